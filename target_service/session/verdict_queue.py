"""Verdicts of a session that wait to be fetched, with the hidden states that leave with them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from specdec.hidden_state_buffer import StateBuffer
from specdec.types import HiddenStates, Verdict


class VerdictQueue:
    """Verdicts in order. Successive ones without drafts (multi-step decode) are joined when they are taken.

    Hidden states of a prompt, and of verdicts that wait behind others, are kept in a buffer of bounded size.
    """

    def __init__(self, *, last_state_only: bool = False) -> None:
        """``last_state_only``: a verdict carries the last hidden state alone."""
        self._verdicts: deque[Verdict] = deque()
        self._states = StateBuffer()
        self._last_state_only = last_state_only
        self._waiter: asyncio.Future[None] | None = None
        #: Until when :meth:`wait` lets verdicts gather at the moment (``time.perf_counter_ns``); 0: it does not.
        self.gather_until_ns = 0

    def __len__(self) -> int:
        """Verdicts that wait, before any are joined."""
        return len(self._verdicts)

    @property
    def has_answer(self) -> bool:
        """Whether the verdict of a round waits that was asked for."""
        return any(verdict.num_draft_tokens and verdict.drafted is None for verdict in self._verdicts)

    def add_states(self, states: HiddenStates) -> None:
        """Keep hidden states for the next verdict that is taken."""
        self._states.add(states)

    def add(self, verdict: Verdict) -> None:
        """Add a verdict; its hidden states go to the buffer where others wait before it."""
        if self._verdicts:
            for states in verdict.hidden_states:
                self._states.add(states)
            verdict = replace(verdict, hidden_states=())
        self._verdicts.append(verdict)

    async def wait(self, gather_until_ns: int = 0) -> None:
        """Wait for :meth:`wake`, or until ``gather_until_ns`` at most; one caller at a time."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if not gather_until_ns:
            await self._waiter
            return
        timer = loop.call_later(max(0, gather_until_ns - time.perf_counter_ns()) / 1e9, self.wake)
        self.gather_until_ns = gather_until_ns
        try:
            await self._waiter
        finally:
            self.gather_until_ns = 0
            timer.cancel()

    def wake(self) -> None:
        """Wake the caller of :meth:`wait`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> Verdict:
        """Remove and return the next verdict; there is one at least."""
        verdicts = [self._verdicts.popleft()]
        while not _is_round(verdicts[-1]) and self._verdicts and not _is_round(self._verdicts[0]):
            verdicts.append(self._verdicts.popleft())
        verdict = verdicts[0] if len(verdicts) == 1 else join(verdicts)
        if self._states.num_bytes:
            states = (*verdict.hidden_states, *self._states.take(verdict.committed_len - 1))
            if self._last_state_only:
                states = tuple(block.rows(block.end - 1, block.end) for block in states[-1:])
            verdict = replace(verdict, hidden_states=states)
        return verdict


def _is_round(verdict: Verdict) -> bool:
    return verdict.num_draft_tokens > 0 or verdict.drafted is not None


def join(verdicts: Sequence[Verdict]) -> Verdict:
    """Return successive verdicts without drafts as one; the timings are the last one's."""
    return replace(
        verdicts[-1],
        base_len=verdicts[0].base_len,
        hidden_states=tuple(states for verdict in verdicts for states in verdict.hidden_states),
        token_ids=tuple(token_id for verdict in verdicts for token_id in verdict.token_ids),
        logprobs=tuple(entry for verdict in verdicts for entry in verdict.logprobs),
    )
