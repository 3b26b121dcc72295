"""The decoder layers inside an EAGLE head: Llama's, with the attention itself left to the caller.

What attends depends on who asks: a paged cache where tokens are drafted, a mask over several unrolled steps where the
head is trained. So every module here takes any leading dimensions, and attention is a function it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

#: Base of the rotary embedding where a checkpoint names none. It is never the target's.
DEFAULT_ROPE_THETA: Final = 10000.0
#: Rotary embeddings whose angles depend on the position alone.
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")


class Attend(Protocol):
    """Attention of all rows, scaled by head_dim^-0.5."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        """[..., Hq, D], [..., Hkv, D] and [..., Hkv, D] to [..., Hq, D]; keys are rotated already.

        ``layer``: place of the layer that asks, from 0; each has keys and values of its own.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = DEFAULT_ROPE_THETA
    #: One of :data:`ROPE_TYPES`.
    rope_type: str = "default"
    #: What else the type needs, under transformers' names.
    options: tuple[tuple[str, Any], ...] = ()
    max_position_embeddings: int = 2048

    def frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """Angle per position, float32 [head_dim / 2], and the factor of cosine and sine."""
        config = LlamaConfig(
            head_dim=head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_type": self.rope_type, "rope_theta": self.theta, **dict(self.options)},
        )
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
        return rotary.inv_freq, float(rotary.attention_scaling)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Dimensions of the layer. The activation is SiLU."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    #: Biases of the query, key and value projections, of the output projection, and of the MLP.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    #: Queries and keys are normed head by head before they are rotated, as in Qwen3.
    qk_norm: bool = False


class RMSNorm(nn.Module):
    """weight · x · rsqrt(mean(x²) + eps), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary:
    """Cosines and sines of the positions; on a device once it was asked for there."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self._frequencies, self._factor = config.frequencies(head_dim)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """int64 [...] to cosine and sine [..., 1, head_dim], to be shared by all heads."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys [..., heads, head_dim], turned by their positions: halves are paired, as in Llama."""
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LayerConfig, input_size: int, layer: int = 0) -> None:
        """``layer``: its place in the head."""
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.has_norms = config.qk_norm

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, context: Tensor | None = None
    ) -> Tensor:
        """[..., R, input_size] to [..., R, hidden_size].

        ``context`` [..., T, input_size]: rows before them that bring keys and values alone; ``rotation`` is that of all
        T + R rows then, and so are the keys and values that ``attend`` gets.
        """
        rows = x if context is None else torch.cat((context, x), dim=-2)
        query = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        key, value = self.keys_and_values(rows, rotation)
        if self.has_norms:
            query = self.q_norm(query)
        if context is not None:
            cos, sin = rotation
            rotation = cos[..., context.shape[-2] :, :, :], sin[..., context.shape[-2] :, :, :]
        attended = attend(rotated(query, rotation), key, value, self.layer)
        out: Tensor = self.o_proj(attended.flatten(-2))
        return out

    def keys_and_values(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., R, input_size] to rotated keys and values, [..., R, Hkv, D] each."""
        key = self.k_proj(rows).unflatten(-1, (self.num_kv_heads, self.head_dim))
        value = self.v_proj(rows).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return rotated(self.k_norm(key) if self.has_norms else key, rotation), value


class MLP(nn.Module):
    """down(SiLU(gate(x)) · up(x))."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] to [..., hidden_size]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaLayer(nn.Module):
    """A Llama layer."""

    def __init__(self, config: LayerConfig, layer: int) -> None:
        """``layer``: its place in the head."""
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config, size, layer)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, context: Tensor | None = None
    ) -> Tensor:
        """[..., R, H] to [..., R, H]; ``context`` [..., T, H] is not normed here."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend, context)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SmallLinear(nn.Linear):
    """A layer that is not worth packing or rounding, and so is left as it is."""


def frozen_embedding(vocab_size: int, size: int, shared: Tensor | None) -> nn.Embedding:
    """An embedding that is not trained: on a tensor such as the target's, uncopied, or with weights of its own."""
    if shared is None:
        return nn.Embedding(vocab_size, size).requires_grad_(False)
    layer = nn.Embedding(shared.shape[0], shared.shape[1], device="meta")
    layer.weight = nn.Parameter(shared, requires_grad=False)
    return layer


def frozen_linear(weight: Tensor) -> nn.Linear:
    """A linear layer on a tensor [out, in] that is not trained; nothing is copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
