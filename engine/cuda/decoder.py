"""The forward pass of Llama-shaped models on a GPU in eight launches a layer, in e4m3 too.

By transformers' modules it takes forty. The projections of queries, keys and values are one product, as are those of
gate and up. The residual is added where it is normed; attention rotates, and writes keys and values to the cache
(:mod:`engine.cuda.rotary_attention`); numbers become e4m3 where they are made. They are rounded where the modules
round them.

Products with norm, gate and residual in one launch were slower on an H200 than torch's between kernels of our own: of
one row of a 1.1B model in bfloat16 they took 16.2, 5.8, 22.1 and 11.8 us for 7.5, 5.7, 16.1 and 10.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.cuda import kernels
from engine.cuda.attention import DTYPES, padded_size
from engine.cuda.float8 import Float8Linear, Float8Rows, round_rows
from engine.cuda.int4 import Int4Linear
from engine.cuda.joined_biases import join_biases
from engine.cuda.rotary_attention import Around, rotary_attention
from engine.cuda.row_kernels import norm, norm_rounded, silu_multiply
from engine.llama_models import MODELS, NORMS, ROPE_TYPES
from engine.trimmed_outputs import output_linear

#: What hidden states are given as; see :mod:`engine.hidden_states`.
_STATE_DTYPE: Final = torch.bfloat16
_QUANTISED: Final = (Float8Linear, Int4Linear)


class FusedDecoder:
    """A model's weights, some of them joined, and its caches."""

    def __init__(self, model: Any, caches: Sequence[tuple[Tensor, Tensor]], windows: Sequence[int | None]) -> None:
        """Join weights of a model that :func:`unknown` has nothing against; its modules read the joined ones, too."""
        self._body = model.model
        self._lm_head = model.lm_head
        self._caches, self._windows = caches, windows
        attention = self._body.layers[0].self_attn
        self._scale: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._eps: float = model.config.rms_norm_eps
        self._layers = [
            (
                layer,
                _join([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
                _join([layer.mlp.gate_proj, layer.mlp.up_proj]),
            )
            for layer in self._body.layers
        ]
        #: Whether the last program of a tile joins its parts and rounds them; else launches of their own do.
        self.joins = True

    def logits(self, batch: Batch) -> Tensor:
        """Logits [N, V] of a batch on the device."""
        return self._run(batch, (), None)[0]

    def logits_and_states(
        self, batch: Batch, layers: tuple[int, ...], rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """:meth:`logits`, and hidden states of some rows (int64 [R]), or of all: bfloat16 [R, layers, H]."""
        logits, caught = self._run(batch, layers, rows)
        return logits, torch.stack([caught[layer] for layer in layers], dim=1)

    def _run(self, batch: Batch, layers: tuple[int, ...], rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor]]:
        plan = batch.plan
        x = self._body.embed_tokens(batch.input_ids[0])  # [T, H]
        angles = self._angles(x, plan.positions)
        caught: dict[int, Tensor] = {}

        def catch(layer: int, states: Tensor) -> None:
            if layer in layers:
                caught[layer] = (states.clone() if rows is None else states.index_select(0, rows)).to(_STATE_DTYPE)

        delta = self._run_layers(x, angles, batch, catch)
        normed = norm(x, delta, self._body.norm.weight, self._eps)
        catch(len(self._layers), x)
        catch(-1, normed)
        return self._lm_head(normed.index_select(0, batch.logit_rows)), caught

    def _angles(self, x: Tensor, positions: Tensor) -> Tensor:
        """Cosines and sines of the rows, [2, T, D]."""
        rotary, half = self._body.rotary_emb, self._head_dim // 2
        both = x.new_empty(2, len(x), 2 * half)
        kernels.angles[(len(x),)](
            positions,
            rotary.inv_freq,
            *both,
            float(rotary.attention_scaling),
            HALF=half,
            PADDED_HALF=padded_size(half),
            num_warps=1,
        )
        return both

    def _run_layers(
        self, x: Tensor, angles: Tensor, batch: Batch, catch: Callable[[int, Tensor], None]
    ) -> Tensor | None:
        """All layers on ``x`` [T, H] in place; what is to be added to it is returned."""
        delta: Tensor | None = None
        for index, (layer, qkv_proj, gate_up) in enumerate(self._layers):
            qkv = self._normed_product(x, delta, layer.input_layernorm.weight, qkv_proj)
            catch(index, x)
            delta = self._attended_product(qkv, angles, index, batch)
            both, down = (
                self._normed_product(x, delta, layer.post_attention_layernorm.weight, gate_up),
                layer.mlp.down_proj,
            )
            is_float8 = isinstance(down, Float8Linear)
            delta = (
                down.multiply(round_rows(both, down.group, is_gated=True)) if is_float8 else down(silu_multiply(both))
            )
        return delta

    def _attended_product(self, qkv: Tensor, angles: Tensor, index: int, batch: Batch) -> Tensor:
        """Attend, and multiply what was attended."""
        linear = self._body.layers[index].self_attn.o_proj
        is_float8 = isinstance(linear, Float8Linear)
        attended = self._attend(qkv, angles, index, batch, linear.group if is_float8 else None)
        product: Tensor = linear.multiply(attended) if is_float8 else linear(attended)
        return product

    def _normed_product(self, x: Tensor, delta: Tensor | None, weight: Tensor, linear: Any) -> Tensor:
        """Add ``delta`` to ``x`` in place, and multiply the normed sum."""
        if isinstance(linear, Float8Linear):
            return linear.multiply(norm_rounded(x, delta, weight, self._eps, linear.group))
        product: Tensor = linear(norm(x, delta, weight, self._eps))
        return product

    def _attend(
        self, joined: Tensor, angles: Tensor, index: int, batch: Batch, rounded_group: int | None = None
    ) -> Tensor | Float8Rows:
        """Write a layer's keys and values, and attend: [T, all heads · D] to [T, Hq · D]."""
        attention = self._body.layers[index].self_attn
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        around = Around(
            angles[0],
            angles[1],
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            self._eps,
            rounded_group,
        )
        qkv = joined.view(len(joined), -1, self._head_dim)  # [T, heads, D]
        cache, window = self._caches[index], self._windows[index]
        return rotary_attention(qkv, *cache, batch.plan, around, self._scale, window, joins=self.joins)


def unknown(model: Any, caches: Sequence[tuple[Tensor, Tensor]]) -> str | None:  # noqa: PLR0911
    """Why a model is not one this decoder computes, or None."""
    name = type(model).__name__
    if name not in MODELS or not type(model).__module__.startswith("transformers.models."):
        return f"{name} is none of {', '.join(sorted(MODELS))}"
    config, body = model.config, model.model
    if config.hidden_act != "silu" or (config.rope_parameters or {}).get("rope_type", "default") not in ROPE_TYPES:
        return "its activation or its rotary embedding"
    if not _is_plain(output_linear(model), "GatheredLinear") or any(p.dtype not in DTYPES for p in model.parameters()):
        return "its output layer or dtype"
    for layer, (k_cache, v_cache) in zip(body.layers, caches, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        joined = [(attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)]
        outputs = [attention.o_proj, mlp.down_proj]
        if not all(map(_can_join, joined)) or not all(
            _is_plain(x, "SummedLinear") or isinstance(x, _QUANTISED) for x in outputs
        ):
            return "linear layers that are neither plain nor quantised alike"
        norms = [layer.input_layernorm, layer.post_attention_layernorm, body.norm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        if any(type(norm).__name__ not in NORMS or norm.variance_epsilon != config.rms_norm_eps for norm in norms):
            return "norms of another kind"
        if (
            attention.head_dim != 2 * len(body.rotary_emb.inv_freq)
            or k_cache.shape != v_cache.shape
            or k_cache.shape[3] != attention.head_dim
        ):
            return "head sizes"
    return None


def _is_plain(linear: nn.Module, split: str = "") -> bool:
    """Whether a layer is one of torch, or one of :mod:`engine.parallel.shards` by that name."""
    return type(linear) is nn.Linear or type(linear).__name__ == split


def _can_join(linears: Sequence[Any]) -> bool:
    """Whether layers are plain ones, or quantised alike."""
    if isinstance(linears[0], _QUANTISED):
        kind, group = type(linears[0]), linears[0].group
        return all(type(x) is kind and x.group == group and getattr(x, "order", None) is None for x in linears)
    return all(_is_plain(linear) for linear in linears)


def _join(linears: Sequence[Any]) -> Any:
    """One layer with the outputs of several, whose weights are views of its from now on."""
    if isinstance(linears[0], _QUANTISED):
        return linears[0].join(linears)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    sizes = [len(linear.weight) for linear in linears]
    for linear, part in zip(linears, weight.split(sizes), strict=True):  # type: ignore[no-untyped-call]
        linear.weight = nn.Parameter(part, requires_grad=False)
    bias = join_biases(linears)
    joined = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined
