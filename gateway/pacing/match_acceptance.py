"""Acceptance rates of looked-up continuations, by the length of the match."""

from __future__ import annotations

from collections import defaultdict
from typing import Final, Self

from gateway.pacing.text_acceptance import HALF_LIFE

#: What is assumed, or known of other texts, weighs like so many matches: two wrong ones end a text's lookups.
PRIOR_WEIGHT: Final = 2.0
#: Acceptance rates of what was never seen.
FIRST_GUESS: Final = 0.5

_FADE: Final = 0.5 ** (1.0 / HALF_LIFE)


class _Rates:
    """Fading counts: of first tokens, and of tokens after a right one."""

    __slots__ = ("first_right", "first_tried", "next_right", "next_tried")

    def __init__(self) -> None:
        self.first_tried = self.first_right = self.next_tried = self.next_right = 0.0


class MatchAcceptance:
    """Acceptance rates learned from what was committed after matches, whether or not it had been drafted."""

    def __init__(self, prior: Self | None = None, *, is_predicted: bool = False) -> None:
        """``prior``: what is known of other texts; it learns what is observed here. ``is_predicted``: the tokens of a
        match were predicted like those that follow it.
        """
        self._prior = prior
        self._is_predicted = is_predicted
        #: By the number of bits of the length: matches within a factor of two count as alike.
        self._rates: defaultdict[int, _Rates] = defaultdict(_Rates)

    def observe(self, length: int, num_tokens: int, num_right: int) -> None:
        """After a match of ``length`` tokens ``num_tokens`` were compared with what followed; the first ``num_right``
        were right.
        """
        if not num_tokens:
            return
        rates = self._rates[length.bit_length()]
        tried_next = min(num_right, num_tokens - 1)
        rates.first_tried = rates.first_tried * _FADE + 1.0
        rates.first_right = rates.first_right * _FADE + (num_right > 0)
        rates.next_tried = rates.next_tried * _FADE + tried_next
        rates.next_right = rates.next_right * _FADE + max(0, num_right - 1)
        if self._prior is not None:
            self._prior.observe(length, num_tokens, num_right)

    def rates(self, length: int) -> tuple[float, float]:
        """Of the first token after such a match, and of each further one after a right one.

        Without a prior matches are assumed to be as right as shorter ones: what is wrong is not tried at every length.
        What was never seen in a prediction is as likely as after so many right ones (Laplace's rule of succession), for
        windows with lookups may be too short to learn it: right predictions after wrong ones were found late or never.
        """
        bits, first = length.bit_length(), FIRST_GUESS
        if self._is_predicted:
            first = (length + 1) / (length + 2)
        following = first
        if self._prior is not None:
            first, following = self._prior.rates(length)
        for known in (bits,) if self._prior is not None else range(bits + 1):
            if (rates := self._rates.get(known)) is not None:
                first = (rates.first_right + PRIOR_WEIGHT * first) / (rates.first_tried + PRIOR_WEIGHT)
                following = (rates.next_right + PRIOR_WEIGHT * following) / (rates.next_tried + PRIOR_WEIGHT)
        return first, following
