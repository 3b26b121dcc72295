"""DFlash (arXiv 2602.06036): a few layers that draft a block in one pass, on the target's states as their context.

::

    c = hidden_norm(fc(cat of the target's states))           # of every committed token but the last
    x = embedding([last token, mask, mask, …])                # the block, at the positions that follow
    each layer is Llama's; its keys and values are those of c, which is not normed again, and of the block
    logits = lm_head(norm(x))                                 # the target's output layer, unless the file brings one

Within the block a layer is causal, or every row sees all. There are two layouts. With ``predicts_next`` row i predicts
the token after it, as in DSpark; else a mask is filled in: row i > 0 predicts the token at its own position. No row
sees what is drawn at another, so the drafted tokens are independent, given the committed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.heads.head import MappedHead
from engine.heads.layer import (
    Attend,
    Attention,
    LayerConfig,
    LlamaLayer,
    RMSNorm,
    frozen_embedding,
)
from engine.state_map import StateMap


@dataclass(frozen=True, slots=True)
class Reach:
    """What the rows of a block see in one layer."""

    #: Only the rows of the block before it and itself; else all of the block.
    is_causal: bool = False
    #: Positions a row sees, its own included; None: all.
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """Dimensions of a DFlash head."""

    layer: LayerConfig
    #: Of each layer.
    reaches: tuple[Reach, ...]
    target_hidden_size: int
    #: The target's vocabulary, and how many tokens of it can be drafted.
    vocab_size: int
    draft_vocab_size: int
    #: The target's hidden states that are fused, numbered as transformers numbers them, ascending.
    hidden_state_layers: tuple[int, ...]
    #: Rows of a block it was trained on: the last committed token and masks.
    block_size: int
    mask_token_id: int
    #: The row of a token predicts the one after it; else the row of a mask predicts the token in its place.
    predicts_next: bool = False
    #: A norm for each layer's states, before ``fc``.
    state_norms: bool = False
    #: What embeddings and logits are multiplied by, and the soft cap of the logits; 0: none.
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    #: The file brings these; else they are the target's.
    owns_embeddings: bool = False
    owns_lm_head: bool = False
    #: The file brings the embedding of the mask alone.
    owns_mask: bool = False

    @property
    def num_features(self) -> int:
        """Numbers of the target's states at one position."""
        return len(self.hidden_state_layers) * self.target_hidden_size

    @property
    def is_causal(self) -> bool:
        """Whether no row of a block sees one behind it, so that a shorter block drafts the same tokens."""
        return all(reach.is_causal for reach in self.reaches)

    @property
    def num_given(self) -> int:
        """First rows of a block that predict nothing."""
        return 0 if self.predicts_next else 1

    @property
    def max_tokens(self) -> int:
        """Tokens of a block."""
        return self.block_size - self.num_given


def default_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The states that are fused where a checkpoint names none: spread evenly from the second layer's to the last but
    two, or the middle one.
    """
    if count == 1:
        return (num_target_layers // 2 + 1,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) + 1 for i in range(count))


class BlockWalk:
    """The logits along the chains of a batch, from the rows of their blocks. Here no token depends on another."""

    def __init__(self, head: DFlashHead, x: Tensor) -> None:
        """``x`` [R, H] of :meth:`DFlashHead.forward`."""
        self._head = head
        self._logits = head.logits(x).float()

    def step(self, chains: Sequence[int], rows: Tensor, previous: Tensor) -> Tensor:
        """Logits of the next token of some chains over the target's vocabulary, float32 [n, V].

        ``rows`` int64 [n] predict it; ``previous`` int64 [n] are the tokens before it.
        """
        return self._head.to_target_logits(self._logits.index_select(0, rows))

    def lengths(self, counts: Sequence[int], least: float) -> list[int]:
        """How many of the tokens of each chain to keep: those before the first one whose confidence is below
        ``least``.
        """
        return list(counts)


class DFlashHead(MappedHead):
    """Parameters and buffers are named as in the published files.

    H is the head's hidden size, Ht the target's, V the target's vocabulary, Vd the draft's.
    """

    method: ClassVar[str] = "dflash"
    config: DFlashConfig

    def __init__(
        self, config: DFlashConfig, *, embeddings: Tensor | None = None, lm_head: Tensor | None = None
    ) -> None:
        """``embeddings`` [V, H] and ``lm_head`` [Vd, H] are the target's, where the head owns none: shared, not
        trained.
        """
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.config = config
        self.embed_tokens = frozen_embedding(config.vocab_size, size, None if config.owns_embeddings else embeddings)
        if config.owns_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(size))
        if config.state_norms:
            norms = (RMSNorm(config.target_hidden_size, eps) for _ in config.hidden_state_layers)
            self.aux_hidden_norms = nn.ModuleList(norms)
        self.fc = nn.Linear(config.num_features, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(len(config.reaches)))
        self.add_outputs(lm_head)

    def make_layer(self, index: int) -> nn.Module:
        """The layer of this index."""
        return LlamaLayer(self.config.layer, index)

    @property
    def attentions(self) -> Sequence[Attention]:
        """That of every layer."""
        return [module for module in self.layers.modules() if isinstance(module, Attention)]

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states, layer after layer [..., num_features], as context [..., H]."""
        out: Tensor = self._fc_map(states)
        return out

    @property
    def state_map(self) -> StateMap | None:
        """All of :meth:`fuse`, where it makes states smaller."""
        return self._fc_map if self.config.num_features > self.config.layer.hidden_size else None

    @property
    def _fc_map(self) -> StateMap:
        norms = [self.aux_hidden_norms] if self.config.state_norms else []
        return StateMap(self.hidden_state_layers, self.fc, norms, self.hidden_norm)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of the target's ids, int64 [...] to [..., H]."""
        x: Tensor = self.embed_tokens(token_ids) * self.config.embedding_scale
        if self.config.owns_mask:
            x = torch.where((token_ids == self.config.mask_token_id)[..., None], self.mask_embedding, x)
        return x

    def forward(self, token_ids: Tensor, context: Tensor, positions: Tensor, attend: Attend, places: Tensor) -> Tensor:
        """One pass over blocks.

        ``token_ids`` int64 [..., R] of the blocks' rows; ``context`` [..., T, H] of :meth:`fuse`, the committed
        positions that have no keys and values yet; ``positions`` int64 [..., T + R] of both. ``attend`` gets the keys
        and values of all T + R rows. ``places`` int64 [R]: those of the rows in their blocks. Returns [..., R, H], what
        :meth:`logits` reads.
        """
        x = self.embed(token_ids)
        out: Tensor = self.norm(self.run_layers(x, self.rotary(positions, x.dtype), attend, context, places))
        return out

    def run_layers(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, context: Tensor, places: Tensor
    ) -> Tensor:
        """[..., R, H] to [..., R, H]; arguments as of :meth:`forward`."""
        for layer in self.layers:
            x = layer(x, rotation, attend, context)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [..., Vd]."""
        out: Tensor = self.lm_head(x) * self.config.logit_scale
        cap = self.config.softcap
        return torch.tanh(out / cap) * cap if cap else out

    def walk(self, x: Tensor) -> BlockWalk:
        """The chains of a batch, from the rows of their blocks, [R, H] of :meth:`forward`."""
        return BlockWalk(self, x)
