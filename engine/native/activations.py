"""Elementwise functions that do not depend on where in a tensor an element stands, as torch's do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from engine.native.library import DTYPES, loaded
from engine.native.read_weights import apply, knows, knows_rows, multiply

#: By what torch is asked for: the number of the kernel's function.
_FUNCTIONS: Final[dict[Any, int]] = {
    F.silu: 0,
    torch.sigmoid: 1,
    torch.Tensor.sigmoid: 1,
    F.sigmoid: 1,
    F.softplus: 2,
    F.gelu: 3,
}

#: What a product is asked for as.
_PRODUCTS: Final = frozenset({torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul})


class EvenActivations(TorchFunctionMode):
    """While it is entered, the thread's SiLU, sigmoid, softplus, GELU and products with weights are the kernels'.

    So a row of a model's own modules is the same to the bit in any company, as far as their other operations are.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch calls instead of ``func``."""
        if func in _PRODUCTS and knows(*args):
            return multiply(*args)
        if func is F.linear and not kwargs and knows_rows(*args):
            return apply(*args[:2])
        function = _FUNCTIONS.get(func)
        is_plain = len(args) == 1 and not (kwargs and (kwargs.keys() != {"inplace"} or kwargs["inplace"]))
        if function is None or not is_plain or args[0].dtype not in DTYPES or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        return elementwise(function, args[0])


def elementwise(function: int, x: torch.Tensor) -> torch.Tensor:
    """SiLU (0), sigmoid (1), softplus (2) or GELU (3) of float32 or bfloat16 numbers on a CPU."""
    library = loaded()
    x = x.contiguous()
    out = torch.empty_like(x)
    library.elementwise(function, DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())
    return out
