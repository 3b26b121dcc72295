"""Models of transformers that attend in their own code, given the attention interface.

Each adapter computes queries, keys and values as the model's attention module does, and leaves attention itself to the
interface. It is used under the names of :mod:`engine.layers` alone; under any other the module runs as it is.
So the check at load compares an adapter with the model's own code.

ALiBi (Press et al. 2022, arXiv 2108.12409) adds slope · position to the score of every key, the same for all rows. That
is one more product: queries get the slope and keys their position as further numbers, and no kernel needs to know.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.layers import PAGED, RECORDING, positions_of

#: Positions are stored as multiples of this and a rest, both exact in 16 bits up to 32 768.
_POSITION_STEP: Final = 128

Forward = Callable[..., tuple[torch.Tensor, None]]


def adopt(model: PreTrainedModel) -> None:
    """Give the attention modules that are known here to the interface; other models stay as they are."""
    modules = [module for module in model.modules() if type(module).__name__ in _ADAPTERS]
    if not modules:
        return
    for module in modules:
        adapter = _ADAPTERS[type(module).__name__]
        module.forward = partial(_forward, module, model.config, adapter, module.forward)
    if model.config.model_type == "mpt":
        model.base_model.register_forward_pre_hook(partial(_give_mask, model.config), with_kwargs=True)
    type(model)._can_set_attn_implementation_cached_value = True  # type: ignore[attr-defined]


def is_adopted(model: PreTrainedModel) -> bool:
    """Whether attention modules of the model are known here."""
    return any(type(module).__name__ in _ADAPTERS for module in model.modules())


def _forward(
    module: nn.Module,
    config: Any,
    adapter: Forward,
    stock: Forward,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """An attention module's forward: the adapter on the interface, or the module's own."""
    name = config._attn_implementation
    if name not in (PAGED, RECORDING):
        return stock(hidden_states, *args, **kwargs)
    attend = partial(ALL_ATTENTION_FUNCTIONS[name], module, attention_mask=None)
    return adapter(module, attend, hidden_states, *args, **kwargs), None


def _give_mask(config: Any, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """MPT cannot do without a mask, which no adapter reads: a small one, instead of none."""
    if config._attn_implementation in (PAGED, RECORDING):
        kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1, device=args[0].device)
    return args, kwargs


def _falcon(
    module: Any, attend: Forward, x: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
) -> torch.Tensor:
    """Falcon with rotary positions, in its three layouts of queries, keys and values. [1, T, H] to [1, T, H]."""
    heads, dim = module.num_heads, module.head_dim
    fused = module.query_key_value(x).unflatten(-1, (-1, dim))  # [1, T, all heads, D]
    if module.new_decoder_architecture:
        groups = fused.unflatten(2, (module.num_kv_heads, -1))
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    elif module.multi_query:
        query, key, value = fused.split((heads, 1, 1), dim=2)
    else:
        query, key, value = fused.unflatten(2, (heads, 3)).unbind(3)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    query, key = _rotate_of(module)(query, key, *position_embeddings)
    out: torch.Tensor = module.dense(attend(query, key, value, scaling=dim**-0.5)[0].flatten(-2))
    return out


def _gptj(module: Any, attend: Forward, x: torch.Tensor, *, position_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """GPT-J: the first ``rotary_dim`` numbers of a head are rotated, in pairs of neighbours."""
    shape = (module.num_attention_heads, module.head_dim)
    query, key, value = (linear(x).unflatten(-1, shape) for linear in (module.q_proj, module.k_proj, module.v_proj))
    sine, cosine = module.embed_positions.to(x.device)[position_ids].to(x.dtype).chunk(2, dim=-1)  # [1, T, dim / 2]
    rotate, dim = _rotate_of(module), module.rotary_dim or module.head_dim

    def rotated(part: torch.Tensor) -> torch.Tensor:
        return torch.cat((rotate(part[..., :dim], sine, cosine), part[..., dim:]), dim=-1)

    parts = (part.transpose(1, 2) for part in (rotated(query), rotated(key), value))
    out: torch.Tensor = module.out_proj(attend(*parts, scaling=module.head_dim**-0.5)[0].flatten(-2))
    return out


def _bloom(module: Any, attend: Forward, x: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """BLOOM, with ALiBi; the residual is added here."""
    query, key, value = module._reshape(module.query_key_value(x))  # [1, heads, T, D] each
    scale = module.head_dim**-0.5
    query, key = _with_alibi(module, query, key, scale)
    out: torch.Tensor = residual + module.dense(attend(query, key, value, scaling=scale)[0].flatten(-2))
    return out


def _mpt(module: Any, attend: Forward, x: torch.Tensor, **_: Any) -> torch.Tensor:
    """MPT, with ALiBi."""
    fused, scale = module.Wqkv(x), module.softmax_scale
    if module.clip_qkv:
        fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (part.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for part in fused.chunk(3, dim=-1))
    query, key = _with_alibi(module, query, key, scale)
    out: torch.Tensor = module.out_proj(attend(query, key, value, scaling=scale)[0].flatten(-2))
    return out


def _with_alibi(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [1, heads, T, D] with four more numbers, whose product is slope · position / scale.

    Both are split, so that the product is exact in 16 bits, too: 128 · high + low.
    """
    dtype, device = key.dtype, key.device
    slopes = alibi_slopes(key.shape[1]).to(device) / scale
    high = slopes.to(dtype)
    low = (slopes - high.float()).to(dtype)
    steps = torch.tensor((_POSITION_STEP, 1), device=device, dtype=dtype)
    slope_parts = torch.cat((high[:, None] * steps, low[:, None] * steps), dim=-1)  # [heads, 4]
    positions = positions_of(module, key.shape[2], device)
    parts = torch.stack((positions // _POSITION_STEP, positions % _POSITION_STEP), dim=-1).to(dtype)  # [T, 2]
    query = torch.cat((query, slope_parts[None, :, None].expand(*query.shape[:3], -1)), dim=-1)
    return query, torch.cat((key, torch.cat((parts, parts), dim=-1).expand(*key.shape[:3], -1)), dim=-1)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """float32 [heads]: a geometric sequence; beyond a power of two, every other one of that for twice as many heads."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    more = [2 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(num_heads - power)]
    return torch.tensor(first + more)


def _rotate_of(module: nn.Module) -> Callable[..., Any]:
    """``apply_rotary_pos_emb`` beside the module's class."""
    return sys.modules[type(module).__module__].apply_rotary_pos_emb  # type: ignore[no-any-return]


_ADAPTERS: Final[dict[str, Any]] = {
    "FalconAttention": _falcon,
    "GPTJAttention": _gptj,
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
}
