"""Linear layers with weights packed for a CPU: one row at memory speed, a few rows at the price of one.

Weights may be rounded to 8 bits before (``quantise_linears``). Two packings stand behind one function. The native one
(:mod:`engine.native`) is also batch-invariant: a row's result does not depend on the rows beside it, to the
bit. Where the kernels cannot be compiled, oneDNN's packing is used, which torch brings along; each shape is first
compared with the plain layer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.layers import is_kept_as_it_is
from engine.native.autotune import Prefetch, WeightRun, choose_prefetch
from engine.native.library import DTYPES, WEIGHT_DTYPES, Memory, NativeLibrary, load, page_aligned

logger = logging.getLogger(__name__)

_INT8_MAX: Final = 127


class Matrix(NamedTuple):
    """A weight [out_features, in_features] before it is packed: float32, bfloat16, or int8 with scales."""

    weight: torch.Tensor
    #: float32 [out_features] where the weight is int8: what 1 stands for in each row.
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] as panels of the native kernels (see gemm.h)."""

    library: NativeLibrary
    memory: Memory
    address: int
    #: Panels of a group are interleaved: this weight has every ``panel_step``-th from ``address`` on.
    panel_step: int
    out_features: int
    in_features: int
    dtype: torch.dtype


class PackedLinear(nn.Module):
    """What replaces a linear layer. The weight itself is gone: ``weight`` is empty and tells only the dtype."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = torch.empty(0, dtype=dtype)
        self.bias = bias

    def extra_repr(self) -> str:
        """As torch's own linear layer prints itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class NativeLinear(PackedLinear):
    """A linear layer on the native kernels: float32 or bfloat16 in and out, summing in float32."""

    def __init__(self, packed: PackedWeight, dtype: torch.dtype, bias: torch.Tensor | None, num_threads: int) -> None:
        super().__init__(packed.in_features, packed.out_features, dtype, bias)
        self.packed = packed
        self.num_threads = num_threads
        self.prefetch = Prefetch()
        self._bias32 = None if bias is None else bias.detach().float().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], both of the layer's dtype."""
        packed, dtype = self.packed, self.weight.dtype
        if x.dtype != dtype or x.shape[-1] != packed.in_features:
            raise RuntimeError(f"a {dtype} layer of {packed.in_features} inputs was given {x.dtype} {tuple(x.shape)}")
        rows = x.detach().reshape(-1, packed.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = rows.new_empty(rows.shape[0], packed.out_features)
        if rows.shape[0]:
            failed = packed.library.linear(
                DTYPES[dtype],
                WEIGHT_DTYPES[packed.dtype],
                rows.data_ptr(),
                rows.shape[0],
                rows.stride(0),
                packed.in_features,
                packed.address,
                packed.out_features,
                None if self._bias32 is None else self._bias32.data_ptr(),
                y.data_ptr(),
                packed.out_features,
                packed.panel_step,
                self.prefetch.distance(rows.shape[0]),
                self.num_threads,
            )
            if failed:
                raise MemoryError("working memory for a linear layer")
        return y.view(*x.shape[:-1], packed.out_features)


class Int8Linear(PackedLinear):
    """A linear layer whose weight is rounded to 8 bits, before it is packed.

    Run by itself it multiplies by the rounded weight in the layer's dtype, slowly: what a packed one is compared with.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Round a weight [N, K] to whole multiples of a scale per output feature, the largest to 127 or -127."""
        super().__init__(weight.shape[1], weight.shape[0], weight.dtype, bias)
        exact = weight.detach().float()
        scales = exact.abs().amax(1) / _INT8_MAX
        self.scales = scales.where(scales > 0, 1.0)  # [N]
        self.quantised = (exact / self.scales[:, None]).round().to(torch.int8)  # [N, K]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return F.linear(x, (self.quantised * self.scales[:, None]).to(self.weight.dtype), self.bias)


class OneDnnLinear(PackedLinear):
    """A linear layer on oneDNN with its weight in oneDNN's blocked layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], weight.dtype, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return result


def quantise_linears(model: nn.Module) -> int:
    """Replace the model's plain linear layers (and ``Conv1D``) on the CPU by :class:`Int8Linear`, in place.

    Embeddings, norms and biases stay as they are; an output layer that shares the embedding's weight gets its own.
    Returns how many layers were replaced.
    """
    done: dict[int, tuple[Any, Int8Linear]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for parent, name in _places(model):
            layer: Any = parent._modules[name]
            if id(layer) not in done:
                done[id(layer)] = layer, Int8Linear(matrix_of(layer).weight, layer.bias).train(layer.training)
                layer.weight = None
            parent._modules[name] = done[id(layer)][1]
    return len(done)


def pack_linears(model: nn.Module, num_threads: int, autotune: str = "cached") -> int:
    """Replace the model's plain linear layers (and transformers' ``Conv1D``) on the CPU by packed ones, in place.

    Only :class:`Int8Linear` and exact ``nn.Linear`` and ``Conv1D`` of float32 or bfloat16 are taken; their activations
    must have the same dtype. Each weight is freed as its packed copy is made (one that an embedding shares stays with
    the embedding); the bias is kept. The model can only be run without gradients afterwards. ``autotune``: see
    :func:`~engine.native.autotune.choose_prefetch`.

    Returns how many layers were replaced.
    """
    library = load()
    with torch.inference_mode(False), torch.no_grad():
        if library is None:
            return _pack_with_onednn(model)
        places = _places(model, (Int8Linear,))
        layers: list[Any] = [parent._modules[name] for parent, name in places]
        counts = Counter(id(weight) for weight in {id(layer): layer.weight for layer in layers}.values())
        matrices = {id(layer.weight): matrix_of(layer) for layer in layers}
        memory = Memory(library, sum(group_bytes(library, [matrix]) for matrix in matrices.values()))
        shared = {key: matrix for key, matrix in matrices.items() if counts[key] > 1}  # kept, or an id could come back
        del layers, matrices
        packed_weights: dict[int, PackedWeight] = {}
        done: dict[int, tuple[Any, NativeLinear]] = {}
        for parent, name in places:
            layer: Any = parent._modules[name]
            if id(layer) not in done:
                key = id(layer.weight)
                if key not in packed_weights or key not in shared:
                    packed_weights[key] = pack_group(library, memory, [matrix_of(layer)], num_threads)[0]
                packed = NativeLinear(packed_weights[key], layer.weight.dtype, layer.bias, num_threads)
                layer.weight = layer.quantised = None  # free it now; the layer may stand in another place too
                done[id(layer)] = layer, packed
            parent._modules[name] = done[id(layer)][1].train(layer.training)
        if done:
            runs = [run_of([packed]) for packed in packed_weights.values()]
            prefetch = choose_prefetch(library, runs, num_threads, autotune)
            for _, packed_layer in done.values():
                packed_layer.prefetch = prefetch
        return len(done)


def run_of(group: Sequence[PackedWeight]) -> WeightRun:
    """The memory of weights that were packed together."""
    first = group[0]
    num_panels = sum(-(-packed.out_features // first.library.panel) for packed in group)
    return WeightRun(first.address, num_panels, first.in_features, first.dtype)


def pack_group(
    library: NativeLibrary,
    memory: Memory,
    matrices: Sequence[Matrix],
    num_threads: int,
    *,
    interleave: bool = False,
) -> list[PackedWeight]:
    """Pack matrices [N, K] of one K and dtype one after another, or panel by panel in turn.

    Interleaved ones must have one N. The next page of ``memory`` is taken for them.
    """
    panels = [-(-weight.shape[0] // library.panel) for weight, _ in matrices]
    in_features, dtype = matrices[0].weight.shape[1], matrices[0].weight.dtype
    code = WEIGHT_DTYPES[dtype]
    start = memory.take(library.packed_bytes(code, sum(panels), in_features))
    step = len(matrices) if interleave else 1
    packed, first = [], 0
    for (weight, scales), count in zip(matrices, panels, strict=True):
        dense = weight.detach().contiguous()
        scales_at = None if scales is None else scales.data_ptr()
        library.pack(code, dense.data_ptr(), scales_at, *dense.shape, in_features, start, first, step, num_threads)
        address = start + library.packed_bytes(code, first, in_features)
        packed.append(PackedWeight(library, memory, address, step, weight.shape[0], in_features, dtype))
        first += 1 if interleave else count
    return packed


def group_bytes(library: NativeLibrary, matrices: Iterable[Matrix]) -> int:
    """Bytes :func:`pack_group` takes."""
    total = 0
    for weight, _ in matrices:
        panels = -(-weight.shape[0] // library.panel)
        total += library.packed_bytes(WEIGHT_DTYPES[weight.dtype], panels, weight.shape[1])
    return page_aligned(total)


def matrix_of(layer: Any) -> Matrix:
    """The weight of a plain linear layer or an :class:`Int8Linear`."""
    if isinstance(layer, Int8Linear):
        return Matrix(layer.quantised, layer.scales)
    weight: torch.Tensor = layer.weight
    return Matrix(weight.t() if isinstance(layer, Conv1D) else weight)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is exactly a linear layer whose weight may be packed."""
    return (
        type(layer) in (nn.Linear, Conv1D)
        and not is_kept_as_it_is(layer)
        and isinstance(layer.weight, torch.Tensor)
        and layer.weight.device.type == "cpu"
        and layer.weight.layout is torch.strided
        and layer.weight.dtype in DTYPES
        and layer.weight.numel() > 0
        and (layer.bias is None or isinstance(layer.bias, torch.Tensor))
    )


def _places(model: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> list[tuple[nn.Module, str]]:
    """Every place (parent, name) where a plain linear layer or one of other types stands."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and (is_plain(child) or isinstance(child, others))
    ]


def _pack_with_onednn(model: nn.Module) -> int:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    verdicts: dict[tuple[int, int, torch.dtype], bool] = {}
    done: dict[int, tuple[Any, OneDnnLinear]] = {}
    for parent, name in _places(model):
        layer: Any = parent._modules[name]
        if id(layer) not in done:
            weight = matrix_of(layer).weight.contiguous()
            shape = (*weight.shape, weight.dtype)
            if shape not in verdicts:
                verdicts[shape] = _agrees(weight)
            if not verdicts[shape]:
                continue
            done[id(layer)] = layer, OneDnnLinear(weight, layer.bias)
            layer.weight = None
            del weight
        parent._modules[name] = done[id(layer)][1].train(layer.training)
    return len(done)


def _agrees(weight: torch.Tensor) -> bool:
    """Whether oneDNN's packed layer computes what the plain one does, for a few numbers of rows."""
    generator = torch.Generator().manual_seed(7)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 4e-2
    try:
        packed = OneDnnLinear(weight, None)
        for num_rows in (1, 5, 33):
            x = torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)
            wanted = F.linear(x, weight).float()
            spread = wanted.square().mean().sqrt().clamp_min(1e-20)
            if not bool((packed(x).float() - wanted).abs().max() <= tolerance * spread * 4):
                logger.warning("oneDNN's packed layer is wrong for %s %s and is not used", weight.dtype, weight.shape)
                return False
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.warning("oneDNN cannot pack %s weights: %s", weight.dtype, error)
        return False
    return True
