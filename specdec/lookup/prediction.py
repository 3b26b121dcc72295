"""Predicted outputs: a client says what it expects the text to be, such as the file that is to be edited.

What is generated is aligned with the prediction as it comes. After a difference the text is found again by its last
tokens: a few near where it was, or :data:`RUN` anywhere, the nearest place first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from specdec.lookup.base import Lookup, Match
from specdec.types import SessionSpec

#: Tokens in a row that tell a place anywhere in the prediction.
RUN: Final = 3
#: Tokens from where the text left the prediction, among which a single one tells where it continues.
NEAR: Final = 32
#: Longer runs of right tokens count as so long.
LONGEST_RUN: Final = 64
#: Tokens that are drafted where the place is a guess. Each right token before it allows two more.
FEW: Final = 4


class PredictedText:
    """The text of a session, and where in the prediction it stands."""

    def __init__(self, prediction: Sequence[int], spec: SessionSpec) -> None:
        self.token_ids = list(spec.token_ids)
        self._prediction = prediction
        #: By :data:`RUN` tokens: the places after them, in order.
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._num_indexed = 0
        self._first = spec.prompt_len
        self._num_read = spec.prompt_len
        #: The token of the prediction that is expected next, and how many before it were as expected.
        self.at = self.run = 0
        #: The token that was expected where the text left the prediction.
        self._left_at = 0

    @property
    def num_pending(self) -> int:
        """Tokens of the prediction that are not indexed, and of the text that are not read."""
        return len(self._prediction) - self._num_indexed + len(self.token_ids) - self._num_read

    def ingest(self, num_tokens: int) -> None:
        """Index or read the next ``num_tokens`` pending tokens."""
        end = min(self._num_indexed + num_tokens, len(self._prediction))
        num_tokens -= end - self._num_indexed
        for place in range(max(self._num_indexed, RUN - 1), end):
            self._places[tuple(self._prediction[place - RUN + 1 : place + 1])].append(place + 1)
        self._num_indexed = end
        for _ in range(num_tokens):
            self._num_read += 1
            self._follow(self.token_ids[self._num_read - 1])

    def replace(self, keep: int, token_ids: Sequence[int]) -> None:
        """Keep the first ``keep`` tokens and put others after them; what is new becomes pending."""
        self.token_ids[keep:] = token_ids
        if keep < self._num_read:
            self._num_read, self.at, self.run, self._left_at = self._first, 0, 0, 0

    def _follow(self, token_id: int) -> None:
        """Continue by one token of the text."""
        if self.at < len(self._prediction) and self._prediction[self.at] == token_id:
            self.at, self.run = self.at + 1, min(self.run + 1, LONGEST_RUN)
            return
        self.at, self.run = self._find(token_id)

    def _find(self, token_id: int) -> tuple[int, int]:
        """Where the text continues after a token that was not expected, and how many tokens before it are right."""
        if self.run > 1:  # a single token may have been found in the wrong place
            self._left_at = self.at
        last = tuple(self.token_ids[max(self._first, self._num_read - RUN) : self._num_read])
        if found := self._places.get(last):
            i = bisect_left(found, self._left_at)
            return min(found[max(0, i - 1) : i + 1], key=lambda place: abs(place - self._left_at)), RUN
        for place in range(self._left_at, min(self._left_at + NEAR, len(self._prediction))):
            if self._prediction[place] == token_id:
                return place + 1, 1
        return self.at + 1, 0  # as if it stood in place of the one expected


class PredictionLookup(Lookup[PredictedText]):
    """The lookup of one request, by its prediction."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction

    @property
    def long_match(self) -> int:
        """One right token is enough: a prediction is mostly right."""
        return 1

    def open(self, spec: SessionSpec) -> PredictedText:
        """A text with everything pending."""
        return PredictedText(self._prediction, spec)

    def look_up(self, text: PredictedText, num_tokens: int) -> Match:
        """The tokens that are expected next; none before the first token."""
        count = min(num_tokens, FEW + 2 * text.run)
        return Match(tuple(self._prediction[text.at : text.at + count]), text.run, is_predicted=True)
