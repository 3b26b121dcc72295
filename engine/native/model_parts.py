"""The parts of a model that the native decoder computes, and why it does not compute others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from engine.llama_models import ROPE_TYPES
from engine.mixers import Mixer
from engine.native.layer_parts import FAMILIES, KNOWN_NORMS, LayerParts, LinearGroup, have_one_order, norm_eps
from engine.native.library import DTYPES
from engine.native.mixer import unknown_mixer
from engine.native.rounded import GroupedLinear, Int8Linear, is_plain

#: Keys and values [num_blocks, Hkv, block, D].
LayerCache: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Caches: TypeAlias = Sequence[LayerCache]
#: Cosines and sines of the first positions, so many: float32 [positions, rotated elements / 2], contiguous.
RotaryTables: TypeAlias = Callable[[int], tuple[torch.Tensor, torch.Tensor]]

_FINAL_NORMS: Final = ("norm", "embedding_norm", "final_layernorm", "norm_f")
#: Parameters that may be of any dtype.
_OF_RECURRENCES: Final = frozenset({"A_log", "D", "dt_bias"})


@dataclass(frozen=True)
class ModelParts:
    """Of a model of :data:`~engine.native.layer_parts.FAMILIES`."""

    model: Any

    @cached_property
    def layers(self) -> list[LayerParts]:
        """Of all layers."""
        names, residual = FAMILIES[type(self.model).__name__], getattr(self.model.config, "residual_multiplier", 1.0)
        return [LayerParts.of(layer, names, residual) for layer in self.model.model.layers]

    @property
    def attention(self) -> list[Any]:
        """The modules that attend."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def final_norm(self) -> Any:
        """The norm before the output layer."""
        decoder = self.model.model
        return next(getattr(decoder, name) for name in _FINAL_NORMS if hasattr(decoder, name))

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by."""
        scale: float = getattr(self.model.model, "embedding_multiplier", 1.0)
        return scale

    @property
    def output(self) -> LinearGroup:
        """The output layer."""
        scale = getattr(self.model.model, "lm_head_multiplier", 1.0) / getattr(self.model.config, "logits_scaling", 1.0)
        return LinearGroup(self.model, ["lm_head"], (scale,))

    @property
    def groups(self) -> list[LinearGroup]:
        """All linear layers."""
        return [*(group for layer in self.layers for group in layer.groups.values()), self.output]

    @property
    def intermediate_sizes(self) -> set[int]:
        """Of all MLPs."""
        return {layer.groups["down"].layers[0].in_features for layer in self.layers if layer.mlp is not None}

    @property
    def gates_heads(self) -> bool:
        """Whether a query comes with a gate of what it attends to."""
        first = self.attention[0]
        return bool(first.q_proj.out_features == 2 * self.model.config.num_attention_heads * first.head_dim)

    @property
    def rotary_tables(self) -> RotaryTables:
        """Of its rotary embedding; without one they have no columns."""
        return partial(_rotary_tables, getattr(self.model.model, "rotary_emb", None))

    @cached_property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return 2 * self.rotary_tables(2)[0].shape[1]


def _rotary_tables(rotary: nn.Module | None, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    if rotary is None:
        return torch.empty(length, 0), torch.empty(length, 0)
    cosines, sines = rotary(torch.empty(0), torch.arange(length)[None])  # [1, length, D] each, both halves equal
    half = cosines.shape[-1] // 2
    if not torch.equal(cosines[..., :half], cosines[..., half:]) or not torch.equal(
        sines[..., :half], sines[..., half:]
    ):
        raise NotImplementedError("a rotary embedding whose halves differ")
    return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()


def unknown_model(model: Any, caches: Caches, windows: Sequence[int | None], mixers: Sequence[Mixer]) -> str | None:
    """Why a model is not one that the native decoder computes, or None.

    Caches and windows are those of the layers that attend.
    """
    name = type(model).__name__
    if name not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return f"{name} is none of {', '.join(sorted(FAMILIES))}"
    parts = ModelParts(model)
    attention, layers = parts.attention, parts.layers
    if not len(attention) == len(caches) == len(windows) > 0 or model.config.num_hidden_layers != len(layers):
        return f"{len(layers)} layers, {len(caches)} caches and {len(windows)} windows"
    if {id(layer.mixer) for layer in layers if layer.mixer is not None} != {id(mixer.module) for mixer in mixers}:
        return "recurrent parts in other places"
    eps = norm_eps(parts.final_norm)
    found = [_unknown_config(model.config)]
    found += [_unknown_layer(layer, type(model.lm_head), eps) for layer in layers]
    found += [unknown_mixer(mixer, caches[0][0].dtype, eps) for mixer in mixers]
    found += [_unknown_ends(parts), _unknown_cache(caches)]
    return next((reason for reason in found if reason is not None), None) or _unknown_heads(parts)


def _unknown_config(config: Any) -> str | None:
    for name, known in (("hidden_act", "silu"), ("mlp_hidden_act", "relu2")):
        if getattr(config, name, known) != known:
            return f"{name} is {getattr(config, name)!r}"
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return None if rope_type in ROPE_TYPES else f"rope_type is {rope_type!r}"


def _unknown_layer(layer: LayerParts, kind: type[nn.Module], eps: float) -> str | None:
    """``kind``: of all linear layers."""
    if getattr(layer.layer, "has_experts", False) or not (layer.attention or layer.mixer or layer.mlp):
        return "experts"
    if not all(type(linear) is kind and _is_known(linear) for linear in layer.linears):
        return "linear layers that are not plain"
    if any(type(norm).__name__ not in KNOWN_NORMS or norm_eps(norm) != eps for norm in layer.norms):
        return "norms of another kind"
    has_one_order = all(have_one_order(group.layers) for group in layer.groups.values())
    return None if has_one_order else "inputs in several orders"


def _unknown_ends(parts: ModelParts) -> str | None:
    model = parts.model
    if not _is_known(model.lm_head) or type(parts.final_norm).__name__ not in KNOWN_NORMS:
        return "its output layer"
    dtype = model.lm_head.weight.dtype
    rest = (part for name, part in model.named_parameters() if name.rpartition(".")[2] not in _OF_RECURRENCES)
    if type(model.get_input_embeddings()) is not nn.Embedding or any(part.dtype != dtype for part in rest):
        return "weights of several dtypes"
    return "MLPs of several sizes" if len(parts.intermediate_sizes) > 1 else None


def _unknown_heads(parts: ModelParts) -> str | None:
    first = parts.attention[0]
    if any(one.scaling != first.scaling or one.head_dim % 2 for one in parts.attention):
        return "head sizes"
    try:
        rotary_dim = parts.rotary_dim
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"its rotary embedding: {error}"
    return None if rotary_dim <= first.head_dim else f"rotary embeddings of {rotary_dim} of {first.head_dim}"


def _is_known(linear: nn.Module) -> bool:
    return isinstance(linear, Int8Linear | GroupedLinear) or (type(linear) is nn.Linear and is_plain(linear))


def _unknown_cache(caches: Caches) -> str | None:
    size, dtype = caches[0][0].shape, caches[0][0].dtype
    for cache in (cache for pair in caches for cache in pair):
        if cache.shape != size or cache.dtype != dtype or dtype not in DTYPES or not cache.is_contiguous():
            return f"a cache of {cache.dtype} {tuple(cache.shape)}"
        if cache.device.type != "cpu":
            return f"a cache on {cache.device}"
    return None
