"""Counts what would be launched on a GPU, and stands in for its graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.cuda.sync import NoSync

VIEWS = frozenset(
    """
    view _unsafe_view t transpose permute unsqueeze squeeze expand slice select alias detach as_strided split
    split_with_sizes unbind empty new_empty new_empty_strided empty_like
    """.split()  # noqa: SIM905
)


#: They read or write no more than indices name.
SPARSE = frozenset({"gather", "index", "index_select", "scatter_", "scatter_add_", "searchsorted"})


class Launches(TorchDispatchMode):
    """Counts operations that are kernels or copies on a GPU, those that a tensor of ``device_type`` takes part in, and
    the bytes that they read and write.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_bytes = 0
        self._device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            result = func.decompose(*args, **kwargs or {})
        if result is not NotImplemented:
            return result
        name, result = func.__name__.partition(".")[0], func(*args, **kwargs or {})
        given, made = (
            [each for each in tree_leaves(part) if isinstance(each, torch.Tensor)] for part in ((args, kwargs), result)
        )
        if name not in VIEWS and any(tensor.device.type == self._device_type for tensor in given + made):
            self.counts[name] += 1
            touched = given[1:] * 2 if name in SPARSE else given + made
            self.num_bytes += sum(tensor.nbytes for tensor in touched if tensor.device.type == self._device_type)
        return result


class Counted:
    """Stands for a kernel of our own, which is counted and not run."""

    def __init__(self, name: str, launches: Launches) -> None:
        self._name, self._launches = name, launches

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: object, **_: object) -> None:
            self._launches.counts.update([self._name])
            self._launches.num_bytes += sum(each.nbytes for each in args if isinstance(each, torch.Tensor))

        return launch


def rerun(run: Callable[[], object]) -> Callable[[], object]:
    """Stands in for a capture on a CPU: a function that would wait for the device is refused, too."""
    with NoSync("cpu"):
        run()
    return run
