"""What all draft heads have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.heads.layer import RMSNorm, Rotary, frozen_linear
from engine.state_map import StateMap
from engine.trimmed_outputs import rows_of
from specdec.errors import InvalidRequest


class DraftHead(nn.Module):
    """A small network on the target's hidden states. Parameters are named as in the published files."""

    #: One of :data:`~specdec.methods.METHODS`.
    method: ClassVar[str]
    #: Its dimensions; all have a ``vocab_size``, the target's.
    config: Any
    #: Of the :attr:`state_map` as the checkpoint has it; empty without one.
    state_map_fingerprint: str = ""

    @property
    def hidden_state_layers(self) -> tuple[int, ...]:
        """The target's hidden states it reads, numbered as transformers numbers them; -1 is after the final norm."""
        return (-1,)

    @property
    def state_map(self) -> StateMap | None:
        """What the target can do with its states in the head's place; None where that makes them no smaller."""
        return None

    @property
    def shared_names(self) -> frozenset[str]:
        """Names of the tensors that are the target's."""
        return frozenset()

    @property
    def dtype(self) -> torch.dtype:
        """That of the head's own weights."""
        return next(self.parameters()).dtype

    def trim(self, token_ids: Tensor) -> None:
        """Draft the tokens of these target ids alone: int64 [Vd], ascending, without repeats.

        Raises:
            InvalidRequest: this head cannot.
        """
        raise InvalidRequest(
            f"draft_vocab is given, and a head of method {self.method} drafts all tokens: leave draft_vocab out",
            param="draft_vocab",
        )


class MappedHead(DraftHead):
    """A head with a norm and an output layer, which may draft from a vocabulary of its own: target id = draft id +
    d2t[draft id].

    Its config has a ``draft_vocab_size`` Vd beside the target's ``vocab_size`` V, says which states it reads, and
    whether embeddings and output layer are its own.
    """

    #: int64 [Vd]: target id - draft id.
    d2t: Tensor
    #: bool [V]: the tokens that can be drafted.
    t2d: Tensor

    def add_outputs(self, lm_head: Tensor | None) -> None:
        """The last modules: ``lm_head`` [Vd, H] is the target's, where the head owns none: shared, not trained. The
        first Vd tokens are drafted, until :meth:`set_vocabulary` is called.
        """
        layer = self.config.layer
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        if self.config.owns_lm_head or lm_head is None:
            self.lm_head = nn.Linear(layer.hidden_size, self.config.draft_vocab_size, bias=False)
        else:
            self.lm_head = frozen_linear(lm_head)
        self.rotary = Rotary(layer.rope, layer.head_dim)
        self.register_buffer("d2t", torch.zeros(self.config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(self.config.vocab_size) < self.config.draft_vocab_size)

    @property
    def hidden_state_layers(self) -> tuple[int, ...]:
        """The target's hidden states it reads."""
        layers: tuple[int, ...] = self.config.hidden_state_layers
        return layers

    @property
    def shared_names(self) -> frozenset[str]:
        """Embeddings and output layer, unless the head owns them."""
        owned = {"embed_tokens.weight": self.config.owns_embeddings, "lm_head.weight": self.config.owns_lm_head}
        return frozenset(name for name, is_own in owned.items() if not is_own)

    @property
    def dtype(self) -> torch.dtype:
        """That of the head's own weights."""
        return self.norm.weight.dtype

    @property
    def num_features(self) -> int:
        """Numbers of the target's states at one position."""
        count: int = self.config.num_features
        return count

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Draft the tokens of these target ids: int64 [Vd], ascending, without repeats."""
        self.d2t = token_ids.to(self.d2t.device) - torch.arange(len(token_ids), device=self.d2t.device)
        self.t2d = torch.zeros_like(self.t2d).index_fill_(0, token_ids.to(self.t2d.device), True)

    def trim(self, token_ids: Tensor) -> None:
        """As in the base class: the output layer keeps their rows. A head with a vocabulary of its own refuses."""
        if self.config.draft_vocab_size != self.config.vocab_size:
            raise InvalidRequest(
                f"draft_vocab is given, and the head brings a list of {self.config.draft_vocab_size} tokens: leave"
                " draft_vocab out",
                param="draft_vocab",
            )
        self.lm_head = rows_of(self.lm_head, token_ids)
        self.config = replace(self.config, draft_vocab_size=len(token_ids))
        self.d2t = torch.zeros(len(token_ids), dtype=torch.int64, device=self.d2t.device)
        self.set_vocabulary(token_ids)

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
