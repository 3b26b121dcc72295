"""What the layers of the native decoder's models consist of, and which linear layers are packed together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn

from engine.grouped_weight import GroupedWeight
from engine.llama_models import MODELS, NORMS
from engine.native.linears import AnyMatrix, Matrix, matrix_of
from engine.native.rounded import GroupedLinear

#: What outputs are multiplied by: all by one number, or each by its own.
Scale: TypeAlias = float | torch.Tensor


class Names(NamedTuple):
    """What a family calls the parts of its layers."""

    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    mixer: str = ""
    post_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_LLAMA: Final = Names()
_BAMBA: Final = Names(mixer="mamba", post_norm="pre_ff_layernorm", mlp="feed_forward")
#: By class.
FAMILIES: Final[Mapping[str, Names]] = {
    **dict.fromkeys(MODELS, _LLAMA),
    "Lfm2ForCausalLM": Names(
        "operator_norm", output="out_proj", query_norm="q_layernorm", key_norm="k_layernorm", mixer="conv",
        post_norm="ffn_norm", mlp="feed_forward", gate="w1", up="w3", down="w2",
    ),
    "Qwen3_5ForCausalLM": Names(mixer="linear_attn"),
    "BambaForCausalLM": _BAMBA,
    "FalconH1ForCausalLM": _BAMBA,
    "GraniteMoeHybridForCausalLM": Names(
        mixer="mamba", mlp="shared_mlp", gate="input_linear", up="input_linear", down="output_linear"
    ),
    "NemotronHForCausalLM": Names("norm", attention="mixer", mixer="mixer", post_norm="norm", mlp="mixer", gate=""),
}  # fmt: skip
#: Norms whose weight is what is added to 1.
_ADDED_TO_ONE: Final = frozenset({"Qwen3_5RMSNorm"})
#: All that are known.
KNOWN_NORMS: Final = NORMS | {f"{name.removesuffix('ForCausalLM')}RMSNorm" for name in FAMILIES}


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linear layers of one module, of the same inputs, that are packed together."""

    parent: nn.Module
    names: Sequence[str]
    #: Of each what its outputs are multiplied by; none: nothing is.
    scales: Sequence[Scale] = ()
    #: Their panels lie in turn; if there is one layer, those of its halves.
    interleave: bool = False

    @property
    def layers(self) -> list[Any]:
        """The layers."""
        return [getattr(self.parent, name) for name in self.names]

    @property
    def matrices(self) -> list[AnyMatrix]:
        """What is packed."""
        matrices = [matrix_of(layer) for layer in self.layers]
        if self.interleave and len(matrices) == 1:
            return [_rows(matrices[0], half) for half in torch.arange(matrices[0].out_features).chunk(2)]
        return matrices


def _rows(matrix: AnyMatrix, order: torch.Tensor) -> AnyMatrix:
    if isinstance(matrix, GroupedWeight):
        return matrix.rows(order)
    return Matrix(matrix.weight[order], None if matrix.scales is None else matrix.scales[order])


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of one layer; those it has not are None."""

    layer: Any
    names: Names
    attention: Any
    mixer: Any
    mlp: Any
    #: What the layer multiplies by before it adds to the stream.
    residual: float = 1.0

    @classmethod
    def of(cls, layer: Any, names: Names = _LLAMA, residual: float = 1.0) -> LayerParts:
        """Of a module with these names."""

        def part(name: str, needs: str) -> Any:
            found = getattr(layer, name, None) if name else None
            return found if hasattr(found, needs) else None

        mixer = part(names.mixer, "in_proj") or part(names.mixer, "conv1d")
        return cls(layer, names, part(names.attention, "q_proj"), mixer, part(names.mlp, names.down), residual)

    @property
    def norms(self) -> list[Any]:
        """All but that of the mixer."""
        found = [getattr(self.layer, self.names.input_norm, None)] if self.attention or self.mixer else []
        found += [getattr(self.layer, self.names.post_norm, None)] if self.mlp else []
        found += [getattr(self.attention, name, None) for name in (self.names.query_norm, self.names.key_norm)]
        return [norm for norm in found if norm is not None]

    @property
    def groups(self) -> dict[str, LinearGroup]:
        """By what they are called in decoder.h: "qkv", "output", "gate_up", "down", and of the mixer "in" and "out"."""
        layer, names, residual = self.layer, self.names, self.residual
        groups = {}
        if (attention := self.attention) is not None:
            into: float = getattr(layer, "attention_in_multiplier", 1.0)
            keys = into * getattr(attention, "key_multiplier", 1.0)
            out = residual * getattr(layer, "attn_out_multiplier", 1.0)
            groups["qkv"] = LinearGroup(attention, ("q_proj", "k_proj", "v_proj"), (into, keys, into))
            groups["output"] = LinearGroup(attention, (names.output,), (out,))
        if (mixer := self.mixer) is not None:
            columns = getattr(mixer, "mup_vector", None)  # [1, 1, outputs]
            into = getattr(mixer, "ssm_in_multiplier", 1.0) * (1.0 if columns is None else columns.flatten())
            inputs = [name for name in _MIXER_INPUTS if hasattr(mixer, name)]
            out = residual * getattr(layer, "ssm_out_multiplier", 1.0)
            groups["in"] = LinearGroup(mixer, inputs, [into] * len(inputs))
            groups["out"] = LinearGroup(mixer, ("out_proj",), (out,))
        if (mlp := self.mlp) is not None:
            gate = getattr(mlp, "gate_multiplier", 1.0)
            inner = [name for name in dict.fromkeys((names.gate, names.up)) if name]
            scales = (gate, 1.0) if names.gate else ()
            groups["gate_up"] = LinearGroup(mlp, inner, scales, interleave=bool(names.gate))
            groups["down"] = LinearGroup(mlp, (names.down,), (residual * getattr(mlp, "down_multiplier", 1.0),))
        return groups

    @property
    def linears(self) -> Iterator[Any]:
        """All linear layers."""
        return chain.from_iterable(group.layers for group in self.groups.values())


#: Linear layers before a convolution, in the order in which their outputs are packed.
_MIXER_INPUTS: Final = ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def norm_weight(norm: Any) -> torch.Tensor:
    """What a norm multiplies by, float32."""
    weight: torch.Tensor = norm.weight.detach().float()
    return 1.0 + weight if type(norm).__name__ in _ADDED_TO_ONE else weight


def norm_eps(norm: Any) -> float:
    """What a norm adds to the mean square."""
    eps: float = getattr(norm, "variance_epsilon", None) or norm.eps
    return eps


def have_one_order(linears: Sequence[nn.Module]) -> bool:
    """Whether layers that are packed together take their inputs in one order."""
    orders = [linear.grouped.order for linear in linears if isinstance(linear, GroupedLinear) and linear.grouped]
    first = orders[0] if orders else None
    return all(order is first or (order is not None and first is not None and order.equal(first)) for order in orders)
