"""What rounds of looked-up tokens cost at one load: windows in which sessions look up against windows without.

Times are sums over all sessions on the target, those that look nothing up or have a draft included. So a round is
charged with all that it costs: its message, the multi-step decode that it interrupts, what it was late for, and the
time that other sessions wait for it. Where each method was charged with what its own sessions lose, mixed drafters had
0.95, 0.93, 0.94 of plain decoding in place of 0.98, 0.95, 0.96 (embedded, 4 sessions, alternating runs). Where sessions
with a draft were left out, wrong predictions beside a draft, after right ones, had 0.83 and 0.90 in place of 1.01 and
0.97 (200 M, served, 4 and 8 sessions, medians of two to four alternating runs, AMD Zen 3).
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from gateway.pacing.round_times import MEMORY as OFF_MEMORY
from gateway.pacing.round_times import WINDOW_NS, WINDOW_VERDICTS

#: Windows with lookups that count. A price is a small difference of long times, so it takes more of them than that of a
#: draft's rounds. Where rounds seem to cost nothing, or less than nothing, the machine may have become faster: then
#: tokens without lookups are measured after as many windows.
MEMORY: Final = 16
#: Windows before so many rounds do not count any more: windows of right predictions have so many that what wrong ones
#: cost showed after 10 windows in place of 4 (simulated).
ENOUGH: Final = 64
#: Price of a round in plain tokens where none was measured, and the rounds that this guess weighs. A round takes the
#: place of a token of multi-step decode, and the target is one token ahead of the message.
FIRST_PRICE: Final = 1.0
FIRST_WEIGHT: Final = 4.0
#: Share of the verdicts of sessions that look up that must be rounds in a window to tell their price: with fewer it is
#: mostly what tokenizing and looking up take, whether or not anything is drafted. Right predictions after wrong ones
#: (embedded, 32 sessions) have 1.81, 1.76, 1.72 of plain decoding so, 1.74, 1.52, 1.73 where each window tells it.
LEAST_ROUNDS: Final = 0.1
#: A window that took longer than so many times the time without lookups counts as that: a stall is no price.
STALL: Final = 3.0
#: Windows with lookups that tell what lookups bring at the moment: texts change.
RECENT: Final = 4
#: Where tokens without lookups take so many times as long as before, or as short, what rounds cost before is forgotten.
#: Where a window of few rounds shows that they are faster, they are measured next.
CHANGE: Final = 1.4
#: Windows are compared in which the shares of verdicts of sessions that draft differ by so much at most: plain tokens
#: beside a draft's rounds took twice as long as without, so wrong predictions seemed to gain 80 %. Where all windows
#: are compared, wrong ones after right ones have 0.92 of plain decoding, not 0.99 to 1.02 (200 M, 4 sessions, served).
LIKE: Final = 0.25
#: Share of the time that windows may lose which are of the slower kind, with or without lookups.
ALLOWED_LOSS: Final = 0.01


class LookupTimes:
    """Nanoseconds of session time that a token takes without lookups, and what a round costs beside its rows."""

    def __init__(self) -> None:
        #: Times of a token in windows without lookups.
        self._off: deque[float] = deque(maxlen=OFF_MEMORY)
        #: Of windows with lookups: the time, in tokens without, that the rounds do not explain, and the rounds.
        self._excess: deque[tuple[float, float]] = deque(maxlen=MEMORY)
        #: How much faster than those without the latest of them were.
        self._gains: deque[float] = deque(maxlen=RECENT)
        #: Time of a token while nothing is looked up; 0: unknown.
        self.off_ns = 0.0
        #: Price of a round in plain tokens, beside its rows.
        self.price = FIRST_PRICE
        #: Whether nothing is looked up in this window.
        self.is_off = True
        #: Share of the verdicts of sessions that draft, in windows without lookups.
        self._drafting = 0.0
        #: Windows of the present kind until one of the other kind.
        self._num_left = 1
        #: Counts how often windows of the other kind began.
        self.num_changes = 0
        self._clear()

    def record(
        self,
        num_sessions: int,
        cycle_ns: int,
        num_tokens: int,
        num_rounds: float,
        saved: float,
        *,
        num_verdicts: int = 1,
        num_looked: int = 1,
        num_drafting: int = 0,
    ) -> bool:
        """One of ``num_sessions`` got verdicts with ``num_tokens`` in ``cycle_ns``: ``num_looked`` of a session that
        may look up, ``num_drafting`` of one that drafts. Meanwhile it asked for ``num_rounds`` rounds, each counted
        with the speed of what it took the place of, that should save so many tokens, less the price of their rows.
        Return whether tokens without lookups take another time than before.
        """
        self._ns += cycle_ns
        self._num_verdicts += num_verdicts
        self._num_looked += num_looked
        self._num_tokens += num_tokens
        self._num_rounds += num_rounds
        self._saved += saved
        self._num_drafting += num_drafting
        least_ns = WINDOW_NS if self.off_ns else 0
        if self._ns >= least_ns * num_sessions and self._num_verdicts >= 2 * WINDOW_VERDICTS * num_sessions:
            return self._close()
        return False

    def _close(self) -> bool:
        """End a window. Return whether tokens without lookups take another time than before."""
        drafting = self._num_drafting / self._num_verdicts
        is_like, has_changed = abs(drafting - self._drafting) <= LIKE, False
        if self.is_off:
            if self._num_tokens and self._ns:
                if not is_like:
                    self._off.clear()
                    self._drafting = drafting
                has_changed = self._learn_off()
        else:
            spent = min(self._ns / self.off_ns, STALL * self._num_tokens)
            self._gains.append(self._num_tokens / spent - 1.0)
            if is_like:
                self._learn_price(spent)
            else:
                self._num_left = min(self._num_left, RECENT)
        self._choose_next()
        self._clear()
        return has_changed

    def _learn_off(self) -> bool:
        """Take up the time of a token without lookups. Return whether it is another than before."""
        before_ns = self.off_ns
        self._off.append(self._ns / self._num_tokens)
        self.off_ns = median(self._off)
        has_changed = not before_ns / CHANGE < self.off_ns < before_ns * CHANGE
        if has_changed:
            self._excess.clear()
            self._gains.clear()
            self.price = FIRST_PRICE
        return has_changed

    def _learn_price(self, spent: float) -> None:
        """Take up the price of a window's rounds, in which so many tokens without lookups would have been decoded."""
        expected = self._num_tokens - self._saved
        tells = self._num_rounds >= LEAST_ROUNDS * self._num_looked
        if not tells and CHANGE * spent < expected:  # the machine has become faster
            self._off.clear()
            self._num_left = 0
        self._excess.append((spent - expected, self._num_rounds) if tells else (0.0, 0.0))
        while sum(count for _, count in self._excess) - self._excess[0][1] >= ENOUGH:
            self._excess.popleft()
        # Long rounds that are right take less than their rows should: wrong predictions after them were free.
        excess = sum(max(0.0, tokens) for tokens, _ in self._excess) + FIRST_WEIGHT * FIRST_PRICE
        self.price = excess / (sum(count for _, count in self._excess) + FIRST_WEIGHT)

    def _choose_next(self) -> None:
        """Choose the kind of the next window: the more the slower kind loses, the fewer windows are of it."""
        self._num_left -= 1
        if not self.off_ns:
            return
        gain = sum(self._gains) / max(len(self._gains), 1)
        if not self.is_off:
            # Texts change: wrong predictions after right ones had 0.82 of plain decoding (200 M, 8 sessions, served).
            self._num_left = min(self._num_left, int(max(0.0, gain) / ALLOWED_LOSS))
            if sum(tokens for tokens, _ in self._excess) < -FIRST_WEIGHT * FIRST_PRICE:
                self._num_left = min(self._num_left, MEMORY)
        if self._num_left > 0:
            return
        self.is_off = not self.is_off
        self.num_changes += 1
        self._num_left = 1 + int(max(0.0, -gain if self.is_off else gain) / ALLOWED_LOSS)

    def _clear(self) -> None:
        self._ns = self._num_verdicts = self._num_looked = self._num_tokens = self._num_drafting = 0
        self._num_rounds = self._saved = 0.0
