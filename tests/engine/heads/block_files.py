"""Random DFlash and DSpark heads as they are published, and what they compute, written from the formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.engine.heads import checkpoints as files
from tests.engine.heads.reference import Step, rms, rope_angles, turned

BLOCK, MASK, LAYERS, RANK, TOP_K = 6, 96, (1, 3, 4), 10, 7
#: The states they read, as transformers numbers them.
STATES = tuple(i + 1 for i in LAYERS)


def dflash_config(**changes: Any) -> dict[str, Any]:
    """Of ``z-lab/…-DFlash``: a causal layer with a window, and one that sees all of the block."""
    return (
        files.layer_config()
        | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": BLOCK,
            "num_hidden_layers": 2,
            "num_target_layers": files.TARGET_LAYERS,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "use_sliding_window": True,
            "rope_theta": files.DRAFT_ROPE,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(LAYERS)},
        }
        | changes
    )


def dspark_config(kind: str = "rnn", **changes: Any) -> dict[str, Any]:
    """Of ``deepseek-ai/dspark_…``."""
    return (
        files.layer_config()
        | {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "block_size": BLOCK,
            "num_hidden_layers": 2,
            "num_target_layers": files.TARGET_LAYERS,
            "layer_types": ["full_attention", "full_attention"],
            "rope_theta": files.DRAFT_ROPE,
            "mask_token_id": MASK,
            "target_layer_ids": list(LAYERS),
            "num_anchors": 512,
            "markov_rank": RANK,
            "markov_head_type": kind,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        | changes
    )


def dflash2_config(**changes: Any) -> dict[str, Any]:
    """Of ``z-lab/…-DFlash2``."""
    config = dflash_config(architectures=["DFlash2DraftModel"], is_causal=False)
    config["dflash_config"] |= {
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": RANK,
        "selector_top_k": TOP_K,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.7,
    }
    return config | changes


def speculators_config(kind: str, **changes: Any) -> dict[str, Any]:
    """Of the speculators library; ``kind``: dflash, dflash2 or dspark."""
    layer = files.layer_config() | {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_theta": files.DRAFT_ROPE, "rope_type": "default"},
    }
    spark = {
        "sample_from_anchor": True,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    selector = {
        "draft_vocab_size": files.VOCAB,
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": RANK,
        "selector_top_k": TOP_K,
    }
    return {
        "architectures": [{"dspark": "DSparkSpeculator", "dflash2": "DFlash2DraftModel"}.get(kind, "DFlashSpeculator")],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": BLOCK,
        "draft_vocab_size": files.DRAFT_VOCAB,
        "aux_hidden_state_layer_ids": list(STATES),
        "mask_token_id": MASK,
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "transformer_layer_config": layer,
        **{"dspark": spark, "dflash2": selector}.get(kind, {}),
    } | changes


def block_tensors(
    seed: int = 9,
    *,
    markov: str | None = None,
    own: bool = False,
    draft_vocab: int | None = None,
    convolved: bool = False,
    num_layers: int = 2,
) -> dict[str, Tensor]:
    """``markov``: with the heads of DSpark; ``convolved``: with what DFlash2 adds; ``own``: with embeddings and output
    layer; ``draft_vocab``: with an output layer over so many tokens.
    """
    draw = files.Draw(seed)
    hidden, vocab = files.HIDDEN, draft_vocab or files.VOCAB
    tensors = {
        "fc.weight": draw(hidden, len(LAYERS) * hidden),
        "hidden_norm.weight": draw.norm(hidden),
        "norm.weight": draw.norm(hidden),
    }
    for i in range(num_layers):
        tensors |= files.layer_tensors(draw, f"layers.{i}.", hidden, qkv_bias=False)
        tensors[f"layers.{i}.input_layernorm.weight"] = draw.norm(hidden)
        tensors |= {f"layers.{i}.self_attn.{part}_norm.weight": draw.norm(files.HEAD_DIM) for part in "qk"}
        for name in ("attention_conv", "mlp_conv") if convolved else ():
            tensors[f"layers.{i}.{name}.base_kernel"] = draw.norm(2 * 2 * hidden).view(2, 2, hidden)
            tensors[f"layers.{i}.{name}.kernel_projection.weight"] = draw(2 * 2 * hidden // 8, hidden)
    if convolved:
        tensors["candidate_selector.predecessor_codebook"] = 3 * draw(files.VOCAB, RANK)
        tensors["candidate_selector.successor_codebook"] = 3 * draw(files.VOCAB, RANK)
        tensors["candidate_selector.hidden_projection.weight"] = 3 * draw(RANK, hidden)
    if own:
        tensors["embed_tokens.weight"] = draw(files.VOCAB, hidden)
    if own or draft_vocab:
        tensors["lm_head.weight"] = draw(vocab, hidden)
    if draft_vocab:
        keep = torch.randperm(files.VOCAB, generator=draw.generator)[:draft_vocab].sort().values
        tensors["d2t"] = keep - torch.arange(draft_vocab)
    if markov:
        tensors["markov_head.markov_w1.weight"] = 2 * draw(files.VOCAB, RANK)
        tensors["markov_head.markov_w2.weight"] = 2 * draw(vocab, RANK)
        tensors["confidence_head.proj.weight"] = 2 * draw(1, hidden + RANK)
        tensors["confidence_head.proj.bias"] = draw(1)
    if markov == "gated":
        tensors["markov_head.gate_proj.weight"] = draw(RANK, hidden + RANK)
        tensors["markov_head.gate_proj.bias"] = draw(RANK)
    if markov == "rnn":
        tensors["markov_head.joint_proj.weight"] = draw(3 * RANK, 2 * RANK + hidden)
    return tensors


class BlockReference:
    """One block after the committed tokens, row by row, and the chain along it."""

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        *,
        embeddings: Tensor,
        lm_head: Tensor,
        num_rows: int,
        causal: Sequence[bool],
        windows: Sequence[int | None],
        predicts_next: bool,
        markov: str | None = None,
    ) -> None:
        """``num_rows`` of the block; ``causal`` and ``windows`` of each layer."""
        layer = config.get("transformer_layer_config", config)
        self.w = {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}
        self.heads, self.kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
        self.head_dim = layer["hidden_size"] // self.heads
        self.eps = layer["rms_norm_eps"]
        self.angles = rope_angles(self.head_dim, files.DRAFT_ROPE)
        self.embeddings = self.w.get("embed_tokens.weight", embeddings.double())
        self.lm_head = self.w.get("lm_head.weight", lm_head.double())
        self.vocab_size = len(embeddings)
        self.ids = list(range(len(self.lm_head)))
        if "d2t" in self.w:
            self.ids = [i + int(self.w["d2t"][i]) for i in self.ids]
        self.num_rows, self.causal, self.windows = num_rows, causal, windows
        self.first = 0 if predicts_next else 1
        self.markov = markov
        own = config.get("dflash_config", config)
        self.scale, self.cap = own.get("output_multiplier", 1.0), own.get("final_logit_softcapping", 0.0)

    def fuse(self, state: Tensor) -> Tensor:
        """[features] of one position to [H]."""
        return rms(self.w["fc.weight"] @ state.double(), self.w["hidden_norm.weight"], self.eps)

    def rows(self, last_token: int, context: Sequence[Tensor], positions: Sequence[int]) -> list[Tensor]:
        """The block behind the context, after the last norm; ``positions`` are the context's."""
        block = [self.embeddings[token] for token in [last_token, *[MASK] * (self.num_rows - 1)]]
        start = positions[-1] + 1 if positions else 0
        places = range(start, start + len(block))
        for i, (is_causal, window) in enumerate(zip(self.causal, self.windows, strict=True)):
            sight = is_causal, window
            block = self._layer(f"layers.{i}.", block, context, [*positions, *places], sight)
        return [rms(x, self.w["norm.weight"], self.eps) for x in block]

    def after(self, token_ids: Sequence[int], states: Sequence[Tensor], start: int = 0) -> Step:
        """As :meth:`tests.engine.heads.reference.EagleReference.after`."""
        assert len(token_ids) == start + len(states) + 1
        return self.behind(token_ids[-1], states, range(start, start + len(states)))

    def behind(self, last_token: int, states: Sequence[Tensor], positions: Sequence[int]) -> Step:
        """Drafting behind states of some positions."""
        h = self.rows(last_token, [self.fuse(state) for state in states], positions)
        return lambda drafted: self._logits(h, last_token, drafted)

    def confidences(self, h: Sequence[Tensor], last_token: int, drafted: Sequence[int]) -> list[float]:
        """Of each drafted token, before it is drawn."""
        before = [last_token, *drafted][: len(drafted)]
        w1, weight = self.w["markov_head.markov_w1.weight"], self.w["confidence_head.proj.weight"][0]
        scores = [
            weight @ torch.cat([h[self.first + i], w1[token]]) + self.w["confidence_head.proj.bias"][0]
            for i, token in enumerate(before)
        ]
        return [1 / (1 + math.exp(-float(score))) for score in scores]

    def _logits(self, h: Sequence[Tensor], last_token: int, drafted: Sequence[int]) -> Tensor:
        own = self.lm_head @ h[self.first + len(drafted)] * self.scale
        own = torch.tanh(own / self.cap) * self.cap if self.cap else own
        if "candidate_selector.predecessor_codebook" in self.w:
            before = self.w["candidate_selector.predecessor_codebook"][[last_token, *drafted][-1]]
            moved = before * (self.w["candidate_selector.hidden_projection.weight"] @ h[self.first + len(drafted)])
            best = own.topk(TOP_K).indices
            scores = own[best] + self.w["candidate_selector.successor_codebook"][best] @ moved
            own = torch.full_like(own, -torch.inf).index_copy_(0, best, scores)
        if self.markov:
            own = own + self.w["markov_head.markov_w2.weight"] @ self._bias(h, [last_token, *drafted])
        whole = torch.full((self.vocab_size,), -torch.inf, dtype=torch.float64)
        whole[self.ids] = own
        return whole

    def _bias(self, h: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
        """What W2 is multiplied by after the tokens."""
        s, out = torch.zeros(RANK, dtype=torch.float64), torch.zeros(RANK, dtype=torch.float64)
        for i, token in enumerate(tokens):
            e, x = self.w["markov_head.markov_w1.weight"][token], h[self.first + i]
            out = e
            if self.markov == "gated":
                gate = self.w["markov_head.gate_proj.weight"] @ torch.cat([x, e]) + self.w["markov_head.gate_proj.bias"]
                out = torch.sigmoid(gate) * e
            elif self.markov == "rnn":
                g, c, o = (self.w["markov_head.joint_proj.weight"] @ torch.cat([s, e, x])).chunk(3)
                s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
                out = torch.tanh(o)
        return out

    def _layer(
        self,
        prefix: str,
        block: Sequence[Tensor],
        context: Sequence[Tensor],
        positions: Sequence[int],
        sight: tuple[bool, int | None],
    ) -> list[Tensor]:
        is_causal, window = sight
        normed = [rms(x, self.w[prefix + "input_layernorm.weight"], self.eps) for x in block]
        convolved = prefix + "attention_conv.base_kernel" in self.w
        kernels = [self._kernels(prefix + "attention_conv", x) for x in normed] if convolved else []
        normed = self._convolved(normed, kernels, 0)
        read = [*context, *normed]
        keys = [self._heads(prefix + "self_attn.k", x, p) for x, p in zip(read, positions, strict=True)]
        values = [self._heads(prefix + "self_attn.v", x, None) for x in read]
        out = []
        for row in range(len(block)):
            own = len(context) + row
            sees = [
                other
                for other in range(len(read))
                if not (is_causal and other > own) and (window is None or positions[own] - positions[other] < window)
            ]
            queries = self._heads(prefix + "self_attn.q", normed[row], positions[own])
            attended = []
            for head in range(self.heads):
                shared = head // (self.heads // self.kv_heads)
                scores = torch.stack([keys[i][shared] for i in sees]) @ queries[head] / math.sqrt(self.head_dim)
                attended.append(torch.softmax(scores, 0) @ torch.stack([values[i][shared] for i in sees]))
            out.append(self.w[prefix + "self_attn.o_proj.weight"] @ torch.cat(attended))
        block = [x + y for x, y in zip(block, self._convolved(out, kernels, 1), strict=True)]
        normed = [rms(x, self.w[prefix + "post_attention_layernorm.weight"], self.eps) for x in block]
        kernels = [self._kernels(prefix + "mlp_conv", x) for x in normed] if convolved else []
        out = []
        for z in self._convolved(normed, kernels, 0):
            gate, up = (self.w[f"{prefix}mlp.{part}_proj.weight"] @ z for part in ("gate", "up"))
            out.append(self.w[prefix + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        return [x + y for x, y in zip(block, self._convolved(out, kernels, 1), strict=True)]

    def _kernels(self, name: str, x: Tensor) -> Tensor:
        """[2, taps, H] of one row."""
        base = self.w[name + ".base_kernel"]
        moved = (self.w[name + ".kernel_projection.weight"] @ x).view(2, 2, -1)
        return torch.stack([base[..., c] + moved[..., c // 8] for c in range(base.shape[-1])], dim=-1)

    def _convolved(self, rows: list[Tensor], kernels: list[Tensor], side: int) -> list[Tensor]:
        """Each row and the one before it; without kernels the rows as they are."""
        if not kernels:
            return rows
        before = [torch.zeros_like(rows[0]), *rows]
        return [
            kernel[side, 0] * row + kernel[side, 1] * last
            for row, last, kernel in zip(rows, before, kernels, strict=False)
        ]

    def _heads(self, part: str, x: Tensor, position: int | None) -> list[Tensor]:
        heads = (self.w[part + "_proj.weight"] @ x).split(self.head_dim)
        if part + "_norm.weight" in self.w:
            heads = [rms(head, self.w[part + "_norm.weight"], self.eps) for head in heads]
        return [head if position is None else turned(head, position, self.angles) for head in heads]
