"""What one request's text repeats: its lookups, which run where its tokens are committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from gateway.decoding.request import RequestState
from specdec.lookup.base import AnyLookup, LookupText, Match

#: Tokens ingested at once: less than a millisecond. Other tasks run before the next ones.
MAX_TOKENS_AT_ONCE: Final = 256


class LookupClient:
    """Continuations of one request's committed tokens. Finding one takes microseconds, no message and no wait."""

    def __init__(self, lookups: Sequence[AnyLookup], state: RequestState) -> None:
        """``lookups``, best first, after the request's own prediction; with none nothing is ever found."""
        self._state = state
        request = state.request
        #: With the tokens of a draft at most.
        self._lookups: Sequence[tuple[AnyLookup, int]] = ()
        if request.num_speculative_tokens:
            own = [(request.prediction, request.num_predicted_tokens)] if request.prediction else []
            self._lookups = [*own, *((lookup, request.max_looked_up_tokens) for lookup in lookups)]
        self._texts: list[LookupText] = []
        self._task: asyncio.Task[None] | None = None
        #: Whether anything was ever found.
        self.found_any = False

    @property
    def is_on(self) -> bool:
        """Whether anything is looked up."""
        return bool(self._lookups)

    def start(self) -> None:
        """Ingest the prompt, a long one in the background."""
        if self._lookups:
            spec = self._state.spec(1)
            self._texts = [lookup.open(spec) for lookup, _ in self._lookups]
            self._catch_up()
            if self._num_pending:
                self._task = asyncio.create_task(self._ingest_rest())

    def commit(self) -> None:
        """Take over the tokens that were committed."""
        self._extend()
        if self._task is None or self._task.done():
            self._catch_up()

    def find(self, num_tokens: int, *, only_long: bool) -> Match | None:
        """What may follow the committed tokens, as many as a draft may have and ``num_tokens`` at most; None where
        nothing is found.

        The first lookup with a long match counts, else the last one; with ``only_long`` none.
        """
        self.commit()
        if num_tokens <= 0 or self._num_pending:
            return None
        match = Match()
        for (lookup, limit), text in zip(self._lookups, self._texts, strict=True):
            match = lookup.look_up(text, min(num_tokens, limit))
            if match.token_ids and match.length >= lookup.long_match:
                break
        else:
            if only_long or not match.token_ids:
                return None
        self.found_any = True
        return match

    def stop(self) -> None:
        """Look up nothing more: the target cannot verify what is found."""
        self._lookups, self._texts = (), []

    def close(self) -> None:
        """The request is over: its output becomes one of the past ones."""
        if self._task is not None:
            self._task.cancel()
        self._extend()
        for (lookup, _), text in zip(self._lookups, self._texts, strict=False):
            lookup.close(text)
        self._texts = []

    @property
    def _num_pending(self) -> int:
        return max((text.num_pending for text in self._texts), default=0)

    def _extend(self) -> None:
        for text in self._texts:
            length = len(text.token_ids)
            text.replace(length, self._state.after(length))

    def _catch_up(self) -> None:
        for text in self._texts:
            text.ingest(min(MAX_TOKENS_AT_ONCE, text.num_pending))

    async def _ingest_rest(self) -> None:
        while self._num_pending:
            await asyncio.sleep(0)
            self._catch_up()
