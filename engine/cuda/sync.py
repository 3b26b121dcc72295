"""Operations that make the host wait for the device, noticed before they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

#: The shape of their result is known only once they have run.
_DATA_DEPENDENT: Final = frozenset(
    {
        aten.nonzero.default,
        aten.masked_select.default,
        aten.bincount.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
    }
)
_INDEXING: Final = frozenset(
    {
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index.Tensor,
        aten._unsafe_index_put.default,
    }
)


class NotCapturable(RuntimeError):
    """A function runs, but not while it is captured as a graph."""


class HostWaits(NotCapturable):
    """An operation would wait for the device."""


class NoSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, an operation of this thread that would wait for the device raises :class:`HostWaits`.

    ``device_type`` is the kind of device that must not be waited for. Unlike ``torch.cuda.set_sync_debug_mode`` it
    leaves other threads alone, and it works without a GPU. It sees operations, not what kernels do inside.
    """

    def __init__(self, device_type: str = "cuda", *, captures: bool = False) -> None:
        """``captures``: for what is to be captured. Then any copy between host and device raises
        :class:`NotCapturable`: a replay would read the host's memory as it is by then.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._captures = captures

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reason = self._reason(func, args, kwargs)
        if reason is not None:
            raise HostWaits(f"{func} waits for the device: {reason}")
        with self:  # in inference mode, operations made of others arrive whole
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host lies in memory that copies need not wait for."""
        return tensor.is_pinned()

    def _reason(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if func is aten._to_copy.default:
            return self._copying(args[0], kwargs.get("device"), bool(kwargs.get("non_blocking")), into=None)
        if func is aten.copy_.default:
            waits_not = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            return self._copying(args[1], args[0].device, bool(waits_not), into=args[0])
        if not args or not isinstance(args[0], torch.Tensor) or not self._is_there(args[0]):
            return None
        if func is aten._local_scalar_dense.default:
            return "it brings a number to the host"
        is_repeat = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if is_repeat or func in _DATA_DEPENDENT:
            return "the shape of its result depends on values"
        return self._indexing(args[1], *args[2:3]) if func in _INDEXING else None

    def _indexing(self, indices: Sequence[torch.Tensor | None], value: torch.Tensor | None = None) -> str | None:
        given = [index for index in indices if index is not None]
        if any(index.dtype in {torch.bool, torch.uint8} for index in given):
            is_fill = len(given) == 1 and value is not None and value.dim() == 0 and value.device.type == "cpu"
            return None if is_fill else "it selects by a mask"
        if any(index.dim() and not self._is_there(index) for index in given):
            return "its indices come from the host"
        return None if value is None or self._is_there(value) else "the value it puts comes from the host"

    def _copying(
        self, source: torch.Tensor, target: torch.device | None, non_blocking: bool, into: torch.Tensor | None
    ) -> str | None:
        if target is None or self._is_there(source) == (target.type == self._device_type):
            return None
        if self._captures and source.device.type != target.type:
            raise NotCapturable(f"it copies from {source.device} to {target}, which a replay would repeat")
        if not non_blocking:
            return f"it copies from {source.device} to {target}"
        # A copy to the host that is made again lies in pinned memory.
        host = source if not self._is_there(source) else into
        return None if host is None or self.is_pinned(host) else "it copies between the device and pageable memory"

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device_type
