"""Weights of transformer layers as native passes read them: linear layers packed in groups, the rest as float32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from engine.freed_memory import give_back_freed
from engine.mixers import Mixer
from engine.native.autotune import Prefetch, choose_prefetch
from engine.native.layer_parts import LayerParts, LinearGroup, Scale, norm_weight
from engine.native.library import Memory, NativeLibrary
from engine.native.linears import JoinedLinear, NativeLinear, PackedWeight, group_bytes, pack_group, run_of
from engine.native.mixer import mixer_fields
from engine.native.model_structs import CLayer, CLinear, CMixer
from engine.native.weight_sweeps import WeightRun

T = TypeVar("T")


class Packing:
    """Packs the layers of one model, and keeps what the native structures point into."""

    def __init__(self, library: NativeLibrary, groups: Sequence[LinearGroup], num_threads: int) -> None:
        """``groups`` are all that will be packed."""
        self.library = library
        self.num_threads = num_threads
        self.memory = Memory(library, sum(group_bytes(library, group.matrices) for group in groups))
        self.kept: list[Any] = []
        self.prefetch = Prefetch()
        self._linears: list[NativeLinear] = []
        self._runs: list[WeightRun] = []

    def choose_prefetch(self, autotune: str) -> dict[str, int]:
        """Choose how far ahead all weights packed so far are prefetched; fields of ``Model`` (decoder.h) or ``Mlp``."""
        self.prefetch = choose_prefetch(self.library, self._runs, self.num_threads, autotune)
        for linear in self._linears:
            linear.prefetch = self.prefetch
        return {"prefetch_one": self.prefetch.one_row, "prefetch_several": self.prefetch.several_rows}

    def keep(self, kept: T) -> T:
        """The same, kept as long as the packing."""
        self.kept.append(kept)
        return kept

    def array(self, structures: Sequence[CLayer]) -> int:
        """The address of an array of layers."""
        return ctypes.addressof(self.keep((CLayer * len(structures))(*structures)))

    def layer(self, parts: LayerParts, window: int | None = None, mixer: Mixer | None = None) -> CLayer:
        """A layer; ``mixer`` has the states of its recurrent part. Norms it has not are left out."""
        names, groups = parts.names, parts.groups
        starts = self._starts(groups["in"]) if mixer is not None else []
        linears = {name: self.linear(group) for name, group in groups.items()}
        own = CLayer(
            input_norm=self.norm(parts.layer, names.input_norm),
            query_norm=self.norm(parts.attention, names.query_norm),
            key_norm=self.norm(parts.attention, names.key_norm),
            post_norm=self.norm(parts.layer, names.post_norm),
            window=window or 0,
            **{name: linear for name, linear in linears.items() if name not in {"in", "out"}},
        )
        if mixer is not None:
            fields = mixer_fields(mixer, starts)
            addresses = {name: self.floats(part) for name, part in fields.floats.items() if part is not None}
            struct = CMixer(linears["in"], linears["out"], **addresses, **fields.numbers)
            own.mixer = ctypes.addressof(self.keep(struct))
        return own

    def linear(self, group: LinearGroup) -> CLinear:
        """Replace a module's linear layers by packed ones in one group."""
        layers, matrices = group.layers, group.matrices
        packed = pack_group(self.library, self.memory, matrices, self.num_threads, interleave=group.interleave)
        biases = [part for layer in layers for part in _parts(layer.bias, len(packed) // len(layers))]
        scales = group.scales or [1.0] * len(packed)
        self._runs.append(run_of(packed))
        natives = [
            NativeLinear(weight, layers[0].weight.dtype, bias, self.num_threads)
            for weight, bias in zip(packed, biases, strict=True)
        ]
        self._linears += natives
        replaced = natives if len(natives) == len(layers) else [JoinedLinear(natives)]
        for name, linear in zip(group.names, replaced, strict=True):
            setattr(group.parent, name, linear)
        del layers, matrices
        give_back_freed(sum(weight.num_bytes for weight in packed))
        self.keep(packed)
        return CLinear(
            packed[0].address,
            self._columns(packed, [0.0 if bias is None else bias for bias in biases], 0.0, group),
            self._columns(packed, scales, 1.0, group),
        )

    def norm(self, parent: Any, name: str) -> int | None:
        """The address of a norm's weight, where the module has that norm."""
        norm = getattr(parent, name, None)
        return None if norm is None else self.floats(norm_weight(norm))

    def floats(self, values: torch.Tensor) -> int:
        """The address of a float32 copy that is kept."""
        return self.keep(values.detach().to(torch.float32, copy=True).contiguous()).data_ptr()

    def _starts(self, group: LinearGroup) -> list[int]:
        """The columns at which the layers of a group begin, and where the last one ends."""
        starts = [0]
        for matrix in group.matrices:
            starts.append(starts[-1] + -(-matrix.out_features // self.library.panel) * self.library.panel)
        return starts

    def _columns(
        self, packed: Sequence[PackedWeight], values: Sequence[Scale], usual: float, group: LinearGroup
    ) -> int | None:
        """The address of a number for every packed column; None where all are as usual."""
        if all(not isinstance(value, torch.Tensor) and value == usual for value in values):
            return None
        columns = []
        for weight, value in zip(packed, values, strict=True):
            column = torch.full((-(-weight.out_features // self.library.panel), self.library.panel), usual)
            column.view(-1)[: weight.out_features] = value
            columns.append(column)
        return self.floats(torch.stack(columns, 1) if group.interleave else torch.cat(columns))


def _parts(bias: torch.Tensor | None, count: int) -> Sequence[torch.Tensor | None]:
    return [None] * count if bias is None else bias.detach().chunk(count)
