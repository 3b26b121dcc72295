"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and EAGLE-3.1 (arXiv 2605.09992).

It reads features of three layers of the target and drafts from a vocabulary of its own.

::

    g = fc(cat[h_low, h_mid, h_high])                        # the target's; with norm_before_fc or fc_norm normed first
    a = cat[rms_in(embedding(token_{t+1})), rms_hidden(g)]
    x = g + attention(a);  x = x + mlp(rms_post(x))           # with norm_before_residual: rms_hidden(g) + attention(a)
    more layers, if any, are Llama's own
    logits of token_{t+2} = lm_head(norm(x));  the next step's g is x itself, with norm_output norm(x)

``lm_head`` is over a draft vocabulary: target id = draft id + d2t[draft id]. EAGLE-3.1 is ``fc_norm`` with
``norm_output``. A head that reads the state after the target's final norm has no ``fc``: that state is g.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from engine.heads.head import MappedHead
from engine.heads.layer import (
    MLP,
    Attend,
    Attention,
    LayerConfig,
    LlamaLayer,
    RMSNorm,
    frozen_embedding,
)
from engine.state_map import StateMap

#: The state after the target's final norm, alone.
LAST_STATE: Final = (-1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Dimensions of an EAGLE-3 head."""

    layer: LayerConfig
    #: Hidden size of the target.
    target_hidden_size: int
    #: The target's vocabulary, and how many tokens of it can be drafted.
    vocab_size: int
    draft_vocab_size: int
    #: The target's hidden states that are fused, numbered as transformers numbers them: i is the input of layer i. The
    #: one after the final norm, -1, stands alone and is not fused.
    hidden_state_layers: tuple[int, ...]
    num_layers: int = 1
    #: The residual stream starts from the normed features.
    norm_before_residual: bool = False
    #: One norm over all states together, before ``fc``.
    norm_before_fc: bool = False
    #: A norm for each layer's states, before ``fc``.
    fc_norm: bool = False
    #: What is fed back is the normed output, which the output layer reads.
    norm_output: bool = False
    #: The file brings the embeddings; else they are the target's.
    owns_embeddings: bool = False
    #: The file brings the output layer; else it is the target's.
    owns_lm_head: bool = True

    @property
    def num_features(self) -> int:
        """Numbers of the target's states at one position."""
        return len(self.hidden_state_layers) * self.target_hidden_size

    @property
    def has_fc(self) -> bool:
        """Whether states are fused."""
        return self.hidden_state_layers != LAST_STATE


def default_layers(num_target_layers: int) -> tuple[int, int, int]:
    """The states that are fused where a checkpoint names none: early, middle and late."""
    return 2, num_target_layers // 2, num_target_layers - 3


class Eagle3Layer(nn.Module):
    """The first layer: a Llama layer whose attention reads the token's embedding beside the features."""

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


class Eagle3Head(MappedHead):
    """Parameters and buffers are named as in the published files.

    H is the head's hidden size, Ht the target's, V the target's vocabulary, Vd the draft's.
    """

    method: ClassVar[str] = "eagle3"
    config: Eagle3Config

    def __init__(
        self, config: Eagle3Config, *, embeddings: Tensor | None = None, lm_head: Tensor | None = None
    ) -> None:
        """``embeddings`` [V, H] and ``lm_head`` [V, H] are the target's, where the head owns none: shared, not trained.

        The draft vocabulary is the first Vd tokens until :meth:`set_vocabulary` is called.
        """
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.config = config
        shared = None if config.owns_embeddings else embeddings
        self.embed_tokens = frozen_embedding(config.vocab_size, size, shared)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_features, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.hidden_state_layers)
        if config.has_fc:
            self.fc = nn.Linear(config.num_features, size, bias=False)
        self.midlayer = Eagle3Layer(config.layer, norm_before_residual=config.norm_before_residual)
        self.layers = nn.ModuleDict({str(i): LlamaLayer(config.layer, i) for i in range(1, config.num_layers)})
        self.add_outputs(lm_head)

    @property
    def attentions(self) -> Sequence[Attention]:
        """That of every layer."""
        layers = (self.midlayer, *self.layers.values())
        return [module for layer in layers for module in layer.modules() if isinstance(module, Attention)]

    @property
    def state_map(self) -> StateMap | None:
        """The norms before ``fc``, and ``fc``."""
        if not self.config.has_fc or self.config.num_features <= self.config.layer.hidden_size:
            return None
        return self._fc_map

    @property
    def _fc_map(self) -> StateMap:
        norms: list[Iterable[nn.Module]] = [[self.input_norm]] if self.config.norm_before_fc else []
        if self.config.fc_norm:
            norms.append(self.fc_norm)
        return StateMap(self.hidden_state_layers, self.fc, norms)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states, layer after layer [..., num_features], as features [..., H]."""
        return self._fc_map(states) if self.config.has_fc else states

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step of every row.

        ``token_ids`` int64 [...] are target ids of the tokens after the features' ones, ``features`` [..., H] those of
        :meth:`fuse` or of the step before, ``positions`` int64 [...] the features'. Returns [..., H]: what
        :meth:`logits` reads, and the features of the next step.
        """
        rotation = self.rotary(positions, features.dtype)
        out: Tensor = self.midlayer(self.embed_tokens(token_ids), features, rotation, attend)
        for layer in self.layers.values():
            out = layer(out, rotation, attend)
        return self.norm(out) if self.config.norm_output else out

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the next token over the draft vocabulary, [..., Vd]."""
        out: Tensor = self.lm_head(x if self.config.norm_output else self.norm(x))
        return out
