"""Predicted outputs: a client says what it expects the text to be, such as the file that is to be edited.

What is generated is aligned with the prediction as it comes. After a difference the text is found again by its last
tokens: a few near where it was, or :data:`RUN` anywhere, the nearest place first.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
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
_UTF32: Final = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"


class PredictedText:
    """The text of a session, and where in the prediction it stands.

    The prediction is searched as a string. An index made wrong predictions of 300 tokens take twice as long (for 96
    tokens of text, eight at a time), those of 2,000 tokens five times.
    """

    def __init__(self, prediction: PredictionLookup, spec: SessionSpec) -> None:
        self.token_ids = list(spec.token_ids)
        self._prediction = prediction
        self._first = spec.prompt_len
        self._num_read = spec.prompt_len
        #: The token of the prediction that is expected next, and how many before it were as expected.
        self.at = self.run = 0
        #: The token that was expected where the text left the prediction.
        self._left_at = 0

    @property
    def num_pending(self) -> int:
        """Tokens of the text that are not read."""
        return len(self.token_ids) - self._num_read

    def ingest(self, num_tokens: int) -> None:
        """Read the next ``num_tokens`` pending tokens."""
        for token_id in self.token_ids[self._num_read : self._num_read + num_tokens]:
            self._num_read += 1
            self._follow(token_id)

    def replace(self, keep: int, token_ids: Sequence[int]) -> None:
        """Keep the first ``keep`` tokens and put others after them; what is new becomes pending."""
        self.token_ids[keep:] = token_ids
        if keep < self._num_read:
            self._num_read, self.at, self.run, self._left_at = self._first, 0, 0, 0

    def _follow(self, token_id: int) -> None:
        """Continue by one token of the text."""
        predicted = self._prediction.token_ids
        if self.at < len(predicted) and predicted[self.at] == token_id:
            self.at, self.run = self.at + 1, min(self.run + 1, LONGEST_RUN)
            return
        if self.run > 1:  # a single token may have been found in the wrong place
            self._left_at = self.at
        # Elsewhere is looked at once for all tokens that were committed together.
        self.at, self.run = (None if self.num_pending else self._elsewhere()) or self._near(token_id)

    def _elsewhere(self) -> tuple[int, int] | None:
        """Where the prediction has the last :data:`RUN` tokens, as near as possible to where the text left it."""
        if self._num_read - self._first < RUN:
            return None
        last = "".join(map(chr, self.token_ids[self._num_read - RUN : self._num_read]))
        characters = self._prediction.characters
        before = characters.rfind(last, 0, max(0, self._left_at - 1))
        after = characters.find(last, max(0, self._left_at - RUN))
        places = [place + RUN for place in (before, after) if place >= 0]
        return (min(places, key=lambda place: abs(place - self._left_at)), RUN) if places else None

    def _near(self, token_id: int) -> tuple[int, int]:
        """Where it comes soon after the place where the text left the prediction, else as if it stood in place of the
        token that was expected.
        """
        place = self._prediction.characters.find(chr(token_id), self._left_at, self._left_at + NEAR)
        return (place + 1, 1) if place >= 0 else (self.at + 1, 0)


class PredictionLookup(Lookup[PredictedText]):
    """The lookup of one request, by its prediction."""

    def __init__(self, tokenize: Callable[[], Sequence[int]]) -> None:
        """``tokenize``: the prediction's token ids. It is called when a token of a text is first looked up: where
        lookups do not pay, a request has none.
        """
        self._tokenize = tokenize

    @cached_property
    def token_ids(self) -> Sequence[int]:
        """The prediction."""
        return self._tokenize()

    @cached_property
    def characters(self) -> str:
        """The prediction, each token the character of that number: they go up to 1,114,111, vocabularies do not."""
        return array("I", self.token_ids).tobytes().decode(_UTF32, "surrogatepass")

    @property
    def long_match(self) -> int:
        """One right token is enough: a prediction is mostly right."""
        return 1

    def open(self, spec: SessionSpec) -> PredictedText:
        """A text with everything pending."""
        return PredictedText(self, spec)

    def look_up(self, text: PredictedText, num_tokens: int) -> Match:
        """The tokens that are expected next; none before the first token."""
        count = min(num_tokens, FEW + 2 * text.run)
        return Match(tuple(self.token_ids[text.at : text.at + count]), text.run, is_predicted=True)
