"""Weights of transformer layers as native passes read them: linear layers packed in groups, the rest as float32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from engine.native.autotune import Prefetch, WeightRun, choose_prefetch
from engine.native.library import Memory, NativeLibrary, give_back_freed
from engine.native.linears import (
    AnyMatrix,
    NativeLinear,
    PackedWeight,
    group_bytes,
    matrix_of,
    pack_group,
    run_of,
)
from engine.native.structs import CLayer

T = TypeVar("T")


class Packing:
    """Packs the layers of one model, and keeps what the native structures point into."""

    def __init__(self, library: NativeLibrary, groups: Sequence[Sequence[AnyMatrix]], num_threads: int) -> None:
        """``groups`` are the weights that will be packed together."""
        self.library = library
        self.num_threads = num_threads
        self.memory = Memory(library, sum(group_bytes(library, group) for group in groups))
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

    def layer(self, layer: Any, window: int | None) -> CLayer:
        """A decoder layer with transformers' names; norms it has not are left out."""
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = self.linears(attention, ["q_proj", "k_proj", "v_proj"])
        output, output_bias = self.linears(attention, ["o_proj"])
        gate_up, gate_up_bias = self.linears(mlp, ["gate_proj", "up_proj"], interleave=True)
        down, down_bias = self.linears(mlp, ["down_proj"])
        return CLayer(
            input_norm=self.norm(layer, "input_layernorm"),
            qkv=qkv,
            qkv_bias=qkv_bias,
            query_norm=self.norm(attention, "q_norm"),
            key_norm=self.norm(attention, "k_norm"),
            output=output,
            output_bias=output_bias,
            post_norm=self.norm(layer, "post_attention_layernorm"),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
            window=window or 0,
        )

    def linears(self, parent: nn.Module, names: Sequence[str], *, interleave: bool = False) -> tuple[int, int | None]:
        """Replace a module's linear layers by packed ones in one group; addresses of weights and biases."""
        layers: list[Any] = [getattr(parent, name) for name in names]
        packed = pack_group(
            self.library, self.memory, [matrix_of(layer) for layer in layers], self.num_threads, interleave=interleave
        )
        biases = [self._padded_bias(layer, weight) for layer, weight in zip(layers, packed, strict=True)]
        self._runs.append(run_of(packed))
        for name, weight, layer in zip(names, packed, layers, strict=True):
            linear = NativeLinear(weight, layer.weight.dtype, layer.bias, self.num_threads)
            self._linears.append(linear)
            setattr(parent, name, linear)
        del layers, layer
        give_back_freed(sum(weight.num_bytes for weight in packed))
        self.keep(packed)
        if all(bias is None for bias in biases):
            return packed[0].address, None
        columns = [
            torch.zeros(self._panels(weight), self.library.panel) if bias is None else bias
            for bias, weight in zip(biases, packed, strict=True)
        ]
        together = torch.stack(columns, 1) if interleave else torch.cat(columns)
        return packed[0].address, self.floats(together)

    def norm(self, parent: nn.Module, name: str) -> int | None:
        """The address of a norm's weight, where the module has that norm."""
        norm = getattr(parent, name, None)
        return None if norm is None else self.floats(norm.weight)

    def floats(self, values: torch.Tensor) -> int:
        """The address of a float32 copy that is kept."""
        return self.keep(values.detach().to(torch.float32, copy=True).contiguous()).data_ptr()

    def _panels(self, weight: PackedWeight) -> int:
        return -(-weight.out_features // self.library.panel)

    def _padded_bias(self, layer: Any, weight: PackedWeight) -> torch.Tensor | None:
        """A bias as float32 [panels, columns of a panel]."""
        if layer.bias is None:
            return None
        padded = torch.zeros(self._panels(weight) * self.library.panel)
        padded[: weight.out_features] = layer.bias.detach()
        return padded.view(-1, self.library.panel)


def layer_groups(layer: Any) -> list[list[AnyMatrix]]:
    """The weights of a layer that :meth:`Packing.layer` packs together."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]
    return [[matrix_of(linear) for linear in group] for group in groups]
