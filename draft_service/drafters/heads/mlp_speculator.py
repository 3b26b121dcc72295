"""An MLP speculator as the draft: a state that starts as the target's and takes in the drafted tokens one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from draft_service.drafters.heads.base import LoadedHead
from draft_service.drafters.heads.last_state import LastStateDrafter
from draft_service.drafters.trees.tree_passes import Passes
from specdec.engine.chains import Drawing, Feed, StopFlags
from specdec.engine.device_thread import DeviceThread
from specdec.engine.kv_pool import KVSequence
from specdec.heads.mlp_speculator import MlpSpeculator
from specdec.heads.native.mlp_speculator import NativeMlp
from specdec.heads.tree_passes import MlpTreePasses
from specdec.sampling.drafting import DraftedChain
from specdec.sampling.transfer import send
from specdec.settings import DraftSettings


class MlpDrafter(LastStateDrafter):
    """Drafts chains of ``n_predict`` tokens at most, or trees of as many levels."""

    _head: MlpSpeculator
    _native: NativeMlp | None

    @classmethod
    def _of(cls, loaded: LoadedHead, thread: DeviceThread, settings: DraftSettings) -> Self:
        head = loaded.head
        assert isinstance(head, MlpSpeculator)
        config = head.config
        drafter = cls(loaded, thread, settings, width=config.emb_dim, max_depth=config.n_predict)
        drafter._head = head
        drafter._native = NativeMlp.build(head, loaded.num_threads) if loaded.has_kernels else None
        return drafter

    def _draw(
        self, works: Sequence[Drawing], states: Tensor, last_tokens: Sequence[int], stop: StopFlags
    ) -> list[DraftedChain]:
        """In one native call where the kernels are."""
        if self._native is not None:
            return self._native.draft_chains(works, last_tokens, states, stop)
        return super()._draw(works, states, last_tokens, stop)

    def _begin(self, states: Tensor, last_tokens: Sequence[int], num_tokens: int) -> tuple[Tensor, Feed]:
        head = self._head
        state = head(send(list(last_tokens), states.device), head.start(states), 0)  # [R, inner]
        rows, step = list(range(len(last_tokens))), 0

        def feed(going_on: Sequence[int], token_ids: Tensor) -> Tensor:
            nonlocal state, rows, step
            step += 1
            if list(going_on) != rows:
                kept = [rows.index(i) for i in going_on]
                state, rows = state.index_select(0, send(kept, state.device)), list(going_on)
            state = head(token_ids, state, step)
            return head.logits(state, step).float()

        return head.logits(state, 0).float(), feed

    def _tree_passes(self, states: Mapping[KVSequence, Tensor], depth: int) -> Passes:
        return MlpTreePasses(self._head, states)
