"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): features of three layers of the target, and a vocabulary of its own.

::

    g = fc(cat[h_low, h_mid, h_high])                        # the target's; with norm_before_fc or fc_norm normed first
    a = cat[rms_in(embedding(token_{t+1})), rms_hidden(g)]
    x = g + attention(a);  x = x + mlp(rms_post(x))           # with norm_before_residual: rms_hidden(g) + attention(a)
    logits of token_{t+2} = lm_head(norm(x));  the next step's g is x itself

``lm_head`` is over a draft vocabulary: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from specdec.heads.head import DraftHead
from specdec.heads.layer import MLP, Attend, Attention, LayerConfig, RMSNorm, Rotary, frozen_embedding, frozen_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Dimensions of an EAGLE-3 head."""

    layer: LayerConfig
    #: Hidden size of the target.
    target_hidden_size: int
    #: The target's vocabulary, and how many tokens of it can be drafted.
    vocab_size: int
    draft_vocab_size: int
    #: The target's hidden states that are fused, numbered as transformers numbers them: i is the input of layer i.
    hidden_state_layers: tuple[int, ...]
    #: The residual stream starts from the normed features.
    norm_before_residual: bool = False
    #: One norm over all states together, before ``fc``.
    norm_before_fc: bool = False
    #: A norm for each layer's states, before ``fc``.
    fc_norm: bool = False
    #: The file brings the embeddings; else they are the target's.
    owns_embeddings: bool = False
    #: The file brings the output layer; else it is the target's.
    owns_lm_head: bool = True


def default_layers(num_target_layers: int) -> tuple[int, int, int]:
    """The states that are fused where a checkpoint names none: early, middle and late."""
    return 2, num_target_layers // 2, num_target_layers - 3


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the token's embedding beside the features."""

    def __init__(self, config: LayerConfig, *, norm_before_residual: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)
        self.norm_before_residual = norm_before_residual

    def forward(self, embedded: Tensor, g: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[..., H] each, to [..., H]."""
        normed = self.hidden_norm(g)
        x = normed if self.norm_before_residual else g
        x = x + self.self_attn(torch.cat((self.input_layernorm(embedded), normed), dim=-1), rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Head(DraftHead):
    """Parameters and buffers are named as in the published files.

    H is the head's hidden size, Ht the target's, V the target's vocabulary, Vd the draft's.
    """

    method: ClassVar[str] = "eagle3"
    config: Eagle3Config
    #: int64 [Vd]: target id - draft id.
    d2t: Tensor
    #: bool [V]: the tokens that can be drafted.
    t2d: Tensor

    def __init__(
        self, config: Eagle3Config, *, embeddings: Tensor | None = None, lm_head: Tensor | None = None
    ) -> None:
        """``embeddings`` [V, H] and ``lm_head`` [V, H] are the target's, where the head owns none: shared, not trained.

        The draft vocabulary is the first Vd tokens until :meth:`set_vocabulary` is called.
        """
        super().__init__()
        size, eps, num_states = config.layer.hidden_size, config.layer.rms_norm_eps, len(config.hidden_state_layers)
        self.config = config
        if config.owns_embeddings or embeddings is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
            self.embed_tokens.weight.requires_grad = False
        else:
            self.embed_tokens = frozen_embedding(embeddings)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_states * config.target_hidden_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([RMSNorm(config.target_hidden_size, eps) for _ in range(num_states)])
        self.fc = nn.Linear(num_states * config.target_hidden_size, size, bias=False)
        self.midlayer = Eagle3Layer(config.layer, norm_before_residual=config.norm_before_residual)
        self.norm = RMSNorm(size, eps)
        if config.owns_lm_head or lm_head is None:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        else:
            self.lm_head = frozen_linear(lm_head)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self._rotary = Rotary(config.layer.rope, config.layer.head_dim)

    @property
    def hidden_state_layers(self) -> tuple[int, ...]:
        """The target's hidden states it reads."""
        return self.config.hidden_state_layers

    @property
    def shared_names(self) -> frozenset[str]:
        """Embeddings and output layer, unless the head owns them."""
        owned = {"embed_tokens.weight": self.config.owns_embeddings, "lm_head.weight": self.config.owns_lm_head}
        return frozenset(name for name, is_own in owned.items() if not is_own)

    @property
    def dtype(self) -> torch.dtype:
        """That of the head's own weights."""
        return self.fc.weight.dtype

    @property
    def target_hidden_size(self) -> int:
        """Size of one of the target's hidden states."""
        return self.config.target_hidden_size

    @property
    def attention(self) -> Attention:
        """The only attention."""
        return self.midlayer.self_attn

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Draft the tokens of these target ids: int64 [Vd], ascending, without repeats."""
        self.d2t = token_ids.to(self.d2t.device) - torch.arange(len(token_ids), device=self.d2t.device)
        self.t2d = torch.zeros_like(self.t2d).index_fill_(0, token_ids.to(self.t2d.device), True)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states, layer after layer [..., 3 Ht], as features [..., H]."""
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(states)
        return out

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step of every row.

        ``token_ids`` int64 [...] are target ids of the tokens after the features' ones, ``features`` [..., H] those of
        :meth:`fuse` or of the step before, ``positions`` int64 [...] the features'. Returns [..., H]: what
        :meth:`logits` reads, and the features of the next step.
        """
        rotation = self._rotary(positions, features.dtype)
        out: Tensor = self.midlayer(self.embed_tokens(token_ids), features, rotation, attend)
        return out

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the next token over the draft vocabulary, [..., Vd]."""
        out: Tensor = self.lm_head(self.norm(x))
        return out

    def to_target_logits(self, logits: Tensor) -> Tensor:
        """[..., Vd] over the draft vocabulary to [..., V] over the target's: tokens that cannot be drafted get -inf."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        whole[..., self.to_target_ids(torch.arange(logits.shape[-1], device=logits.device))] = logits
        return whole

    def to_target_ids(self, token_ids: Tensor) -> Tensor:
        """Draft ids, int64 [...], to target ids."""
        return token_ids + self.d2t[token_ids]
