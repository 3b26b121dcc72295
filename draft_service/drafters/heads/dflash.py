"""DFlash and DSpark drafters: one pass over a block of masks, on the target's states as context.

The entries of the head's cache are made of the target's states alone, and what is known of them is kept as of EAGLE's.
The rows of a block leave nothing behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from draft_service.drafters.base import DraftJob
from draft_service.drafters.heads.base import LoadedHead
from draft_service.drafters.heads.eagle import EagleDrafter, EagleState
from engine.device_thread import DeviceThread
from engine.heads.blocks import PagedBlocks
from engine.heads.dflash import DFlashHead
from specdec.errors import InvalidRequest
from specdec.settings import DraftSettings


class DFlashDrafter(EagleDrafter):
    """Drafts chains of the tokens of a block at most."""

    def __init__(self, loaded: LoadedHead, blocks: PagedBlocks, thread: DeviceThread, settings: DraftSettings) -> None:
        """Both were loaded on the thread; the drafter's ``info`` says how many tokens are drafted."""
        super().__init__(loaded, blocks, thread, settings)
        self._max_depth = loaded.info.num_speculative_tokens
        self._num_rows = blocks.num_rows
        self._num_given = blocks.head.config.num_given

    @classmethod
    def _of(cls, loaded: LoadedHead, thread: DeviceThread, settings: DraftSettings) -> Self:
        head, speculative = loaded.head, settings.speculative
        assert isinstance(head, DFlashHead)
        if speculative.tree is not None:
            raise InvalidRequest(
                f"{loaded.info.name} drafts a block in one pass and no tree: leave out tree_top_k and"
                " speculative_token_tree",
                param="tree_top_k",
            )
        num_tokens = min(speculative.num_speculative_tokens, head.config.max_tokens)
        blocks = PagedBlocks(
            head,
            loaded.model,
            loaded.info.max_model_len,
            num_tokens=num_tokens,
            least_confidence=speculative.draft_confidence_threshold,
        )
        info = replace(loaded.info, num_speculative_tokens=num_tokens)
        return cls(replace(loaded, info=info), blocks, thread, settings)

    def room(self, state: EagleState) -> int:
        """The block has one row more than tokens, where its first one predicts nothing."""
        num_entries = len(state.sampling) - 1 - state.num_skipped + self._num_given
        return min(super().room(state), self._pool.total_blocks * self._pool.block_size - num_entries)

    def _num_more(self, job: DraftJob[EagleState], num_tokens: int) -> int:
        return self._num_rows if num_tokens else 0
