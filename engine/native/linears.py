"""Linear layers with weights packed for a CPU: one row at memory speed, a few rows at the price of one.

Weights may be rounded before (:mod:`engine.native.rounded`). Two packings stand behind one function. The native one
(:mod:`engine.native`) is also batch-invariant: a row's result does not depend on the rows beside it, to the
bit. Where the kernels cannot be compiled, oneDNN's packing is used, which torch brings along; each shape is first
compared with the plain layer.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from engine.freed_memory import FreedParts
from engine.grouped_weight import GroupedWeight
from engine.native.autotune import Prefetch, choose_prefetch
from engine.native.library import DTYPES, GROUPED, WEIGHT_DTYPES, Memory, NativeLibrary, load, page_aligned
from engine.native.model_structs import CGroupedSource
from engine.native.rounded import GroupedLinear, Int8Linear, PackedLinear, places, plain_weight
from engine.native.weight_sweeps import WeightRun

logger = logging.getLogger(__name__)


class Matrix(NamedTuple):
    """A weight [out_features, in_features] before it is packed: float32, bfloat16, or int8 with scales."""

    weight: torch.Tensor
    #: float32 [out_features] where the weight is int8: what 1 stands for in each row.
    scales: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers: a key of ``WEIGHT_DTYPES``."""
        return self.weight.dtype

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[1]


AnyMatrix: TypeAlias = Matrix | GroupedWeight


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] as panels of the native kernels (see gemm.h)."""

    library: NativeLibrary
    memory: Memory
    #: Of the first panel; of grouped weights the list that names the panels.
    address: int
    #: Panels of a group are interleaved: this weight has every ``panel_step``-th from ``address`` on.
    panel_step: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    #: Of all its panels.
    num_bytes: int
    #: What the panels point to: :attr:`GroupedWeight.order`.
    order: torch.Tensor | None = None


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


class JoinedLinear(nn.Module):
    """Packed layers of the same inputs in the place of one: their outputs side by side."""

    def __init__(self, parts: Sequence[NativeLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., the sum of the parts' out_features]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


class OneDnnLinear(PackedLinear):
    """A linear layer on oneDNN with its weight in oneDNN's blocked layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], weight.dtype, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return result


def pack_linears(model: nn.Module, num_threads: int, autotune: str = "cached") -> int:
    """Replace the model's plain linear layers (and transformers' ``Conv1D``) on the CPU by packed ones, in place.

    Only layers on rounded weights and exact ``nn.Linear`` and ``Conv1D`` of float32 or bfloat16 are taken; their
    activations must have the same dtype. Each weight is freed as its packed copy is made (one that an embedding shares
    stays with the embedding); the bias is kept. The model can only be run without gradients afterwards. ``autotune``:
    see :func:`~engine.native.autotune.choose_prefetch`.

    Returns how many layers were replaced.
    """
    library = load()
    with torch.inference_mode(False), torch.no_grad():
        if library is None:
            return _pack_with_onednn(model)
        found = places(model, (Int8Linear, GroupedLinear))
        layers: list[Any] = [parent._modules[name] for parent, name in found]
        counts = Counter(id(weight) for weight in {id(layer): layer.weight for layer in layers}.values())
        matrices = {id(layer.weight): matrix_of(layer) for layer in layers}
        memory = Memory(library, sum(group_bytes(library, [matrix]) for matrix in matrices.values()))
        shared = {key: matrix for key, matrix in matrices.items() if counts[key] > 1}  # kept, or an id could come back
        del layers, matrices
        packed_weights: dict[int, PackedWeight] = {}
        done: dict[int, tuple[Any, NativeLinear]] = {}
        freed = FreedParts()
        for parent, name in found:
            layer: Any = parent._modules[name]
            if id(layer) not in done:
                key = id(layer.weight)
                if key not in packed_weights or key not in shared:
                    packed_weights[key] = pack_group(library, memory, [matrix_of(layer)], num_threads)[0]
                packed = NativeLinear(packed_weights[key], layer.weight.dtype, layer.bias, num_threads)
                layer.weight = layer.quantised = layer.grouped = (
                    None  # free it now; the layer may stand in another place too
                )
                freed.add(packed.packed.num_bytes)
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
    num_bytes = sum(packed.num_bytes for packed in group)
    return WeightRun(first.address, num_panels, first.in_features, first.dtype, num_bytes)


def pack_group(
    library: NativeLibrary,
    memory: Memory,
    matrices: Sequence[AnyMatrix],
    num_threads: int,
    *,
    interleave: bool = False,
) -> list[PackedWeight]:
    """Pack matrices [N, K] of one K and dtype one after another, or panel by panel in turn.

    Interleaved ones must have one N. The next page of ``memory`` is taken for them. Grouped ones may have groups and
    codes of several kinds, but one order of inputs.
    """
    panels = [-(-matrix.out_features // library.panel) for matrix in matrices]
    in_features, dtype = matrices[0].in_features, matrices[0].dtype
    sizes = [_panel_bytes(library, matrix) for matrix in matrices]
    start = memory.take(group_bytes(library, matrices))
    list_bytes = _list_bytes(sum(panels)) if dtype in GROUPED else 0
    step = len(matrices) if interleave else 1
    packed, first = [], 0
    at = start + list_bytes
    for matrix, count, size in zip(matrices, panels, sizes, strict=True):
        first_address = start
        if isinstance(matrix, GroupedWeight):
            source = CGroupedSource.of(matrix)
            memory_step = sum(sizes) if interleave else size
            library.pack_grouped(ctypes.addressof(source), at, memory_step, start, first, step, num_threads)
            first_address += 8 * first
        else:
            dense = matrix.weight.detach().contiguous()
            scales_at = None if matrix.scales is None else matrix.scales.data_ptr()
            code = WEIGHT_DTYPES[dtype]
            library.pack(code, dense.data_ptr(), scales_at, *dense.shape, in_features, start, first, step, num_threads)
            first_address += first * size
        at += size if interleave else count * size
        packed.append(
            PackedWeight(
                library,
                memory,
                first_address,
                step,
                matrix.out_features,
                in_features,
                dtype,
                count * size,
                matrix.order if isinstance(matrix, GroupedWeight) else None,
            )
        )
        first += 1 if interleave else count
    return packed


def group_bytes(library: NativeLibrary, matrices: Sequence[AnyMatrix]) -> int:
    """Bytes :func:`pack_group` takes."""
    panels = [-(-matrix.out_features // library.panel) for matrix in matrices]
    total = sum(count * _panel_bytes(library, matrix) for count, matrix in zip(panels, matrices, strict=True))
    return page_aligned(total + (_list_bytes(sum(panels)) if matrices[0].dtype in GROUPED else 0))


def _panel_bytes(library: NativeLibrary, matrix: AnyMatrix) -> int:
    if isinstance(matrix, GroupedWeight):
        source = CGroupedSource.of(matrix)
        size: int = library.grouped_panel_bytes(ctypes.addressof(source))
    else:
        size = library.packed_bytes(WEIGHT_DTYPES[matrix.dtype], 1, matrix.in_features)
    return size


def _list_bytes(num_panels: int) -> int:
    """Of the addresses of grouped panels, in whole lines of a cache."""
    return -(-8 * num_panels // 64) * 64


def matrix_of(layer: Any) -> AnyMatrix:
    """The weight of a plain linear layer or of one on rounded weights."""
    if isinstance(layer, Int8Linear):
        return Matrix(layer.quantised, layer.scales)
    if isinstance(layer, GroupedLinear):
        assert layer.grouped is not None
        return layer.grouped
    return Matrix(plain_weight(layer))


def _pack_with_onednn(model: nn.Module) -> int:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    verdicts: dict[tuple[int, int, torch.dtype], bool] = {}
    done: dict[int, tuple[Any, OneDnnLinear]] = {}
    for parent, name in places(model):
        layer: Any = parent._modules[name]
        if id(layer) not in done:
            weight = plain_weight(layer).contiguous()
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
