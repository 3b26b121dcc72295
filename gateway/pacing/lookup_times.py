"""What rounds of looked-up tokens cost at one load: windows in which sessions look up against windows of plain tokens.

Times are sums over all sessions on the target that decode plainly, those that look nothing up included. So a round is
charged with all that it costs: its message, the multi-step decode that it interrupts, what it was late for, and the
time that other sessions wait for it. Where each method was charged with what its own sessions lose, mixed drafters had
0.95, 0.93, 0.94 of plain decoding in place of 0.98, 0.95, 0.96 (embedded, 4 sessions, alternating runs).
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from gateway.pacing.round_times import MEMORY as PLAIN_MEMORY
from gateway.pacing.round_times import MOST_ROUNDS, WINDOW_NS, WINDOW_VERDICTS

#: Windows with lookups that count. A price is a small difference of long times, so it takes more of them than that of a
#: draft's rounds. Where rounds seem to cost nothing, or less than nothing, the machine may have become faster: then
#: plain tokens are measured after as many windows.
MEMORY: Final = 16
#: Price of a round in plain tokens where none was measured, and the rounds that this guess weighs. A round takes the
#: place of a token of multi-step decode, and the target is one token ahead of the message.
FIRST_PRICE: Final = 1.0
FIRST_WEIGHT: Final = 4.0
#: Share of the verdicts of sessions that look up that must be rounds in a window to tell their price: with fewer it is
#: mostly what tokenizing and looking up take, whether or not anything is drafted. Right predictions after wrong ones
#: (embedded, 32 sessions) have 1.81, 1.76, 1.72 of plain decoding so, 1.74, 1.52, 1.73 where each window tells it.
LEAST_ROUNDS: Final = 0.1
#: A window that took longer than so many times the time of plain tokens counts as that: a stall is no price.
STALL: Final = 3.0
#: Windows with lookups that tell what lookups bring at the moment: texts change.
RECENT: Final = 4
#: Where plain tokens take so many times as long as before, or as short, what rounds cost before is forgotten. Where a
#: window of few rounds shows that they are faster, they are measured next.
CHANGE: Final = 1.4
#: Share of the time that windows may lose which are of the slower kind, with or without lookups.
ALLOWED_LOSS: Final = 0.01


class LookupTimes:
    """Nanoseconds of session time that a plain token takes, and what a round costs beside its rows."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=PLAIN_MEMORY)
        #: Of windows with lookups: the time, in plain tokens, that the rounds do not explain, and the rounds.
        self._excess: deque[tuple[float, int]] = deque(maxlen=MEMORY)
        #: How much faster than plain decoding the latest of them were.
        self._gains: deque[float] = deque(maxlen=RECENT)
        #: Time of a plain token; 0: unknown.
        self.plain_ns = 0.0
        #: Price of a round in plain tokens, beside its rows.
        self.price = FIRST_PRICE
        #: Whether nothing is looked up in this window.
        self.is_off = True
        #: Whether a draft's rounds were beside the plain tokens that were measured.
        self._had_drafts = True
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
        num_rounds: int,
        saved: float,
        *,
        num_verdicts: int = 1,
        num_looked: int = 1,
    ) -> bool:
        """One of ``num_sessions`` got verdicts with ``num_tokens`` in ``cycle_ns``, ``num_looked`` of them where it may
        look up; meanwhile it asked for ``num_rounds`` rounds that were expected to save so many plain tokens, less the
        price of their rows. Return whether the machine has become faster or slower.
        """
        self._ns += cycle_ns
        self._num_verdicts += num_verdicts
        self._num_looked += num_looked
        self._num_tokens += num_tokens
        self._num_rounds += num_rounds
        self._saved += saved
        least_ns = WINDOW_NS if self.plain_ns else 0
        if self._ns >= least_ns * num_sessions and self._num_verdicts >= 2 * WINDOW_VERDICTS * num_sessions:
            return self._close()
        return False

    def note_drafted(self, num_verdicts: int) -> None:
        """Verdicts of a session that a draft drafts for: its rounds make steps longer."""
        self._num_drafted += num_verdicts

    def _close(self) -> bool:
        """End a window. It tells something if it is like that of the plain tokens that were measured; without a draft's
        rounds is better. Plain tokens beside a draft's rounds seemed to take twice as long, so wrong predictions to
        gain 80 %: 0.83 of plain decoding (200 M, 8 sessions, embedded).
        """
        has_changed = False
        has_drafts = self._num_drafted > MOST_ROUNDS * self._num_verdicts
        if self.is_off:
            if self._num_tokens and self._ns and has_drafts <= self._had_drafts:
                if has_drafts < self._had_drafts:
                    self._plain.clear()
                self._had_drafts = has_drafts
                before_ns = self.plain_ns
                self._plain.append(self._ns / self._num_tokens)
                self.plain_ns = median(self._plain)
                has_changed = not before_ns / CHANGE < self.plain_ns < before_ns * CHANGE
                if has_changed:
                    self._excess.clear()
                    self._gains.clear()
                    self.price = FIRST_PRICE
        elif has_drafts == self._had_drafts:
            spent = min(self._ns / self.plain_ns, STALL * self._num_tokens)
            expected = self._num_tokens - self._saved
            tells = self._num_rounds >= LEAST_ROUNDS * self._num_looked
            if not tells and CHANGE * spent < expected:  # plain tokens have become faster
                self._plain.clear()
                self._num_left = 0
            self._excess.append((spent - expected, self._num_rounds) if tells else (0.0, 0))
            self._gains.append(self._num_tokens / spent - 1.0)
            # Long rounds that are right take less than their rows should: wrong predictions after them were free.
            excess = sum(max(0.0, tokens) for tokens, _ in self._excess) + FIRST_WEIGHT * FIRST_PRICE
            self.price = excess / (sum(count for _, count in self._excess) + FIRST_WEIGHT)
        elif has_drafts < self._had_drafts:
            self._num_left = 0  # plain tokens can be measured as they should
        self._choose_next()
        self._clear()
        return has_changed

    def _choose_next(self) -> None:
        """Choose the kind of the next window: the more the slower kind loses, the fewer windows are of it."""
        self._num_left -= 1
        if not self.plain_ns:
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
        self._ns = self._num_verdicts = self._num_looked = self._num_tokens = self._num_rounds = self._num_drafted = 0
        self._saved = 0.0
