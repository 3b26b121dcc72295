"""Recurrent parts of layers as native passes read them: ``Mixer`` of decoder.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from engine.mixers import Mixer
from engine.native.library import DTYPES
from engine.recurrent.slots import NUM_RECORDS
from engine.recurrent.state_cache import StateCache

#: ``MixerKind`` of decoder.h, by class.
_SHORT, _DELTA, _MAMBA2 = range(3)
KINDS: Final[Mapping[str, int]] = {
    "Lfm2ShortConv": _SHORT,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
}


class MixerFields(NamedTuple):
    """Of ``Mixer``, but for its linear layers."""

    #: What is copied as float32.
    floats: Mapping[str, torch.Tensor | None]
    #: Numbers, and addresses of states.
    numbers: Mapping[str, int | float]


def mixer_fields(mixer: Mixer, starts: Sequence[int]) -> MixerFields:
    """``starts``: where the outputs of each linear layer before the convolution begin in a row, and the row's width."""
    module: Any = mixer.module
    kind = KINDS[type(module).__name__]
    convolution = module.conv if kind == _SHORT else module.conv1d
    rings = mixer.caches[0]
    assert isinstance(rings, torch.Tensor)
    channels = convolution.weight.shape[0]
    floats = {"taps": convolution.weight.squeeze(1).t(), "taps_bias": convolution.bias}
    numbers: dict[str, int | float] = {
        "kind": kind, "width": starts[-1], "channels": channels, "num_taps": convolution.weight.shape[2],
        "rings": rings.data_ptr(), "ring_size": rings.shape[1], "num_records": NUM_RECORDS,
    }  # fmt: skip
    if kind == _SHORT:
        return MixerFields(floats, numbers | {"factor_at": 0, "gate_at": channels, "conv_at": 2 * channels})
    cache = mixer.caches[1]
    assert isinstance(cache, StateCache)
    floats |= {"rates": -module.A_log.float().exp(), "time_bias": module.dt_bias}
    numbers["state"] = cache.state.data_ptr()
    if kind == _DELTA:
        parts = ("key", "delta", "decay")
        floats["norm"] = module.norm.weight
        numbers |= dict(zip(("conv_at", "gate_at", "factor_at", "time_at"), starts, strict=False))
        numbers |= {"key_heads": module.num_k_heads, "key_dim": module.head_k_dim}
        numbers |= {"heads": module.num_v_heads, "value_dim": module.head_v_dim}
    else:
        parts = ("b", "input", "decay")
        inner = module.num_heads * module.head_dim
        floats |= {"skip": module.D, "norm": getattr(module.norm, "weight", None)}
        numbers |= {"gate_at": 0, "conv_at": inner, "time_at": inner + channels}
        numbers |= {"key_heads": module.n_groups, "key_dim": module.ssm_state_size, "norm_groups": module.n_groups}
        numbers |= {"heads": module.num_heads, "value_dim": module.head_dim}
        numbers |= dict(zip(("shortest", "longest"), module.time_step_limit, strict=True))
    records = (cache.records[part].data_ptr() for part in parts)
    return MixerFields(floats, numbers | dict(zip(("keys", "values", "decays"), records, strict=True)))


def unknown_mixer(mixer: Mixer, cache_dtype: torch.dtype, eps: float) -> str | None:
    """Why a recurrent part is not one that native passes compute, or None."""
    module: Any = mixer.module
    if (kind := KINDS.get(type(module).__name__)) is None:
        return f"a {type(module).__name__}"
    rings = mixer.caches[0]
    if not isinstance(rings, torch.Tensor) or rings.dtype != cache_dtype or rings.dtype not in DTYPES:
        return "inputs of another dtype than keys"
    if kind == _SHORT:
        return None
    norm = module.norm
    if module.activation not in {"silu", "swish"}:
        return f"a convolution with {module.activation}"
    if not isinstance(norm, torch.nn.Identity) and norm.variance_epsilon != eps:
        return "norms of several kinds"
    return "a norm before a gate" if getattr(norm, "norm_before_gate", False) else None
