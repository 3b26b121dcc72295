"""Medusa as the draft: every head draws its token from the same state of the target.

A head's distribution does not depend on the tokens drafted before it. That costs acceptance but no exactness: under a
ratio rule the rows of q are what the tokens were drawn from, given the prefix, which is all that the rule asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from draft_service.drafters.heads.base import LoadedHead
from draft_service.drafters.heads.last_state import LastStateDrafter
from draft_service.drafters.trees.tree_passes import Passes
from specdec.engine.chains import Feed
from specdec.engine.device_thread import DeviceThread
from specdec.engine.kv_pool import KVSequence
from specdec.engine.native.linears import pack_linears
from specdec.heads.medusa import MedusaHeads
from specdec.heads.tree_passes import MedusaTreePasses
from specdec.sampling.transfer import send
from specdec.settings import DraftSettings


class MedusaDrafter(LastStateDrafter):
    """Drafts chains of as many tokens as there are heads, at most, or trees of as many levels."""

    _heads: MedusaHeads

    @classmethod
    def _of(cls, loaded: LoadedHead, thread: DeviceThread, settings: DraftSettings) -> Self:
        heads = loaded.head
        assert isinstance(heads, MedusaHeads)
        config = heads.config
        drafter = cls(loaded, thread, settings, width=config.hidden_size, max_depth=config.num_heads)
        drafter._heads = heads
        if loaded.has_kernels:
            pack_linears(heads, loaded.num_threads)
        return drafter

    def _begin(self, states: Tensor, last_tokens: Sequence[int], num_tokens: int) -> tuple[Tensor, Feed]:
        logits: Tensor = self._heads(states, num_tokens).float()  # [R, num_tokens, V]
        step = 0

        def feed(going_on: Sequence[int], token_ids: Tensor) -> Tensor:
            nonlocal step
            step += 1
            return logits[:, step].index_select(0, send(list(going_on), logits.device))

        return logits[:, 0], feed

    def _tree_passes(self, states: Mapping[KVSequence, Tensor], depth: int) -> Passes:
        return MedusaTreePasses(self._heads, states, depth)
