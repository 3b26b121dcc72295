"""Prediction layers that come inside a target's own checkpoint (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

::

    x   = eh_proj(cat[enorm(embedding(token_{t+1})), hnorm(h_t)])      # h_t: the target's state; MiMo swaps both
    h'  = norm(layer(x))                                               # a decoder layer of the target's own kind
    logits of token_{t+2} = lm_head(h'), the target's own;  the next step's h is h'

A single layer is used again for every drafted token. Of several, layer i reads token_{t+1+i} and the output of layer
i - 1 in place of h_t, and drafts token_{t+2+i} (:mod:`engine.heads.layered_chains`). Each is a transformers model of
the target's class with one layer, so every family's attention and experts are computed by the code that computes the
target's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.heads.head import DraftHead
from engine.heads.layer import Attend
from engine.trimmed_outputs import rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """What a family's prediction layers have of their own."""

    vocab_size: int
    hidden_size: int
    #: The state of the target that is h, numbered as transformers numbers them; -1: after the final norm.
    state_layer: int = -1
    #: ``eh_proj`` takes the state first.
    hidden_first: bool = False
    #: The first row of a text has zeros in place of its embedding.
    blanks_first: bool = False


class PredictionLayer(nn.Module):
    """One of them: a projection, and a model of one decoder layer."""

    def __init__(self, hidden_size: int, body: PreTrainedModel) -> None:
        """``body``: a causal language model of one layer, with the target's embedding and output layer; its final norm
        is that of the prediction layer.
        """
        super().__init__()
        self.body = body
        decoder = body.get_decoder()  # type: ignore[no-untyped-call]
        norm = decoder.norm_f if hasattr(decoder, "norm_f") else decoder.norm
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False, dtype=norm.weight.dtype)


class MtpHead(DraftHead):
    """The prediction layers. H is the target's hidden size, V its vocabulary."""

    method: ClassVar[str] = "mtp"
    config: MtpConfig

    def __init__(self, config: MtpConfig, layers: Sequence[PredictionLayer]) -> None:
        """At least one layer; all get the embedding and the output layer of the first."""
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        first, *others = self.bodies
        for body in others:
            body.set_input_embeddings(first.get_input_embeddings())
            body.set_output_embeddings(first.get_output_embeddings())  # type: ignore[no-untyped-call]
        #: int64 [Vd], ascending: the tokens that are drafted; None: all.
        self.draft_ids: Tensor | None = None

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a chain at most; None: any number."""
        return len(self.layers) if len(self.layers) > 1 else None

    @property
    def bodies(self) -> list[PreTrainedModel]:
        """The models of the layers."""
        return [layer.body for layer in self.layers]  # type: ignore[misc]

    @property
    def hidden_state_layers(self) -> tuple[int, ...]:
        """The target's state it reads."""
        return (self.config.state_layer,)

    @property
    def shared_names(self) -> frozenset[str]:
        """Embedding and output layer."""
        shared = (self.embed_tokens.weight, self.bodies[0].get_output_embeddings().weight)  # type: ignore[no-untyped-call]
        named = self.named_parameters(remove_duplicate=False)
        return frozenset(name for name, value in named if any(value is each for each in shared))

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The target's embedding."""
        found = self.bodies[0].get_input_embeddings()
        assert isinstance(found, nn.Embedding)
        return found

    @property
    def dtype(self) -> torch.dtype:
        """That of its weights."""
        return self.embed_tokens.weight.dtype

    @property
    def num_features(self) -> int:
        """Numbers of the target's state at one position."""
        return self.config.hidden_size

    def trim(self, token_ids: Tensor) -> None:
        """Draft the tokens of these ids alone: int64 [Vd], ascending, without repeats. The output layer keeps their
        rows.
        """
        whole: nn.Linear = self.bodies[0].get_output_embeddings()  # type: ignore[no-untyped-call]
        part = rows_of(whole, token_ids)
        for body in self.bodies:
            body.set_output_embeddings(part)  # type: ignore[no-untyped-call]
        self.draft_ids = token_ids.to(whole.weight.device)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states [..., H] as features [..., H]: the same."""
        return states

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, attend: Attend | None = None, layer: int = 0
    ) -> Tensor:
        """One step of every row, by one of the layers.

        ``token_ids`` int64 [T] of the tokens after the features' ones, ``features`` [T, H] the target's states or what
        the step before returned, ``positions`` int64 [T] of the features. ``attend`` is not asked: attention goes the
        way that the body is set to. Returns [T, H]: what :meth:`logits` reads, and the features of the next step.
        """
        embedded = self.embed_tokens(token_ids)
        if self.config.blanks_first:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0)
        own: Any = self.layers[layer]
        pair = own.enorm(embedded), own.hnorm(features)
        x = own.eh_proj(torch.cat(pair[::-1] if self.config.hidden_first else pair, dim=-1))
        decoder = own.body.get_decoder()
        out: Tensor = decoder(inputs_embeds=x[None], position_ids=positions[None], use_cache=False).last_hidden_state
        return out[0]

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the next token over the tokens that are drafted, [T, Vd]."""
        out: Tensor = self.bodies[0].get_output_embeddings()(x)  # type: ignore[no-untyped-call]
        return out

    def to_target_logits(self, logits: Tensor) -> Tensor:
        """[T, Vd] over the tokens that are drafted to [T, V]: the others get -inf."""
        if self.draft_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        whole[..., self.draft_ids] = logits
        return whole

    def to_target_ids(self, token_ids: Tensor) -> Tensor:
        """Ids of drafted tokens, int64 [...], to target ids."""
        return token_ids if self.draft_ids is None else self.draft_ids[token_ids]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Frequencies of rotary positions keep their precision, whatever the weights are converted to."""
        exact = [(module, dict(module.named_buffers(recurse=False))) for module in self.modules()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, buffers in exact:
            for name, buffer in buffers.items():
                if name.endswith("inv_freq"):
                    setattr(module, name, buffer.to(getattr(module, name).device))
        return self
