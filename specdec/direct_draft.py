"""A draft's session that a target asks itself, as the gateway sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from specdec.errors import TandemError
from specdec.types import DraftOpened, DraftOpening


class DirectDraftSession:
    """What :meth:`specdec.backends.DraftOpener.open_draft` returns: to be asked for tokens, not told any."""

    def __init__(self, opening: DraftOpening, draft: Callable[[int], None]) -> None:
        """``draft`` tells the target how many tokens to ask for."""
        self._epoch = epoch = opening.spec.epoch
        self._draft = draft
        self._num_draft_tokens = opening.num_draft_tokens
        #: What it may be asked for at most, until the draft says so itself.
        self.opened = DraftOpened(epoch, opening.spec.num_speculative_tokens)
        self._opening: asyncio.Future[DraftOpened] = asyncio.get_running_loop().create_future()
        self._loss: asyncio.Future[TandemError] = asyncio.get_running_loop().create_future()

    async def wait_opened(self) -> None:
        """Return once the draft is open.

        Raises:
            TandemError: it cannot be opened.
            CancelledError: the target's session is over.
        """
        await asyncio.wait((self._opening, self._loss), return_when=asyncio.FIRST_COMPLETED)
        if not self._opening.done():
            raise self._loss.result()
        self.opened = self._opening.result()

    def ask(self, num_draft_tokens: int) -> bool:
        """Have the target ask for so many tokens after each verdict; whether it did not do so."""
        if num_draft_tokens == self._num_draft_tokens:
            return False
        self._num_draft_tokens = num_draft_tokens
        self._draft(num_draft_tokens)
        return True

    async def receive(self) -> NoReturn:
        """Wait until the draft is lost, and raise why; ``CancelledError`` where the target's session is over."""
        raise await asyncio.shield(self._loss)

    async def close(self) -> None:
        """Have the target ask for nothing; it closes the draft's session with its own."""
        if not self._loss.done():
            self.ask(0)

    # --- what the target tells ---

    def open(self, opened: DraftOpened) -> None:
        """A draft is open."""
        if opened.epoch == self._epoch and not self._opening.done():
            self._opening.set_result(opened)

    def lose(self, epoch: int, error: TandemError) -> None:
        """A draft, which was opened with ``epoch``, cannot be asked any more."""
        if epoch == self._epoch and not self._loss.done():
            self._loss.set_result(error)

    def end(self) -> None:
        """The target's session is over."""
        self._loss.cancel()
