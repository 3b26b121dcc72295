"""Prompt lookup: the text so far is its own draft model (Saxena 2023, "Prompt Lookup Decoding").

Find where the last n tokens stood before and propose what followed them there. Longest n first, then the most recent
place. A copy that reaches the end of the text continues with its own tokens, as LZ77 does, so that a text that repeats
with a short period fills a whole proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specdec.lookup.base import Lookup, Match
from specdec.settings import LookupSettings
from specdec.types import SessionSpec

#: Longer matches count as so long.
LONGEST_MATCH: Final = 32
#: Tokens of a text that are indexed when it is opened: the last ones. They take 16 MB at most, and 256 of them 1.2 ms.
#: With 131,072 tokens it would be 63 MB and 5 ms, in which no other request gets its next round.
MAX_INDEXED_TOKENS: Final = 32_768


class NgramIndex:
    """Tokens of one session, and for every n-gram in them the place where it last ended.

    An n-gram enters the index when the token after it is known: then a lookup never finds the end of the text itself.
    Adding and dropping a token costs one dictionary operation per n; a lookup costs at most one per n.
    """

    def __init__(self, token_ids: Sequence[int], min_n: int, max_n: int) -> None:
        self.token_ids = list(token_ids)
        self._sizes = range(max_n, min_n - 1, -1)
        #: Tokens whose n-grams (those that end right before them) are indexed, after those that never are.
        self._num_indexed = self._num_skipped = max(0, len(self.token_ids) - MAX_INDEXED_TOKENS)
        #: Per n: n-gram -> index of the token that followed it last.
        self._last: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._sizes}
        #: Per n: for each indexed token, the token that followed the same n-gram the time before (0: never).
        self._before: dict[int, list[int]] = {n: [] for n in self._sizes}

    @property
    def num_pending(self) -> int:
        """Tokens not indexed yet."""
        return len(self.token_ids) - self._num_indexed

    def ingest(self, num_tokens: int) -> None:
        """Index the next ``num_tokens`` pending tokens."""
        tokens = self.token_ids
        start, end = self._num_indexed, self._num_indexed + num_tokens
        for n in self._sizes:
            last, before = self._last[n], self._before[n]
            first = max(start, n)  # the first token that has an n-gram before it
            before += [0] * (min(first, end) - start)
            windows = [tokens[first - n + i : max(first, end) - n + i] for i in range(n)]
            for following, ngram in enumerate(zip(*windows, strict=True), first):
                before.append(last.get(ngram, 0))
                last[ngram] = following
        self._num_indexed = end

    def replace(self, keep: int, token_ids: Sequence[int]) -> None:
        """Keep the first ``keep`` tokens and put others after them; what is new becomes pending."""
        if keep < self._num_indexed:
            self._remove_after(keep)
        self.token_ids[keep:] = token_ids

    def _remove_after(self, keep: int) -> None:
        tokens = self.token_ids
        for n in self._sizes:
            last, before = self._last[n], self._before[n]
            while len(before) > max(0, keep - self._num_skipped):
                i, earlier = self._num_skipped + len(before) - 1, before.pop()
                if earlier:
                    last[tuple(tokens[i - n : i])] = earlier
                elif i >= n:
                    del last[tuple(tokens[i - n : i])]
        self._num_indexed, self._num_skipped = keep, min(self._num_skipped, keep)

    def continuation(self, num_tokens: int) -> Match:
        """The ``num_tokens`` tokens that followed the longest, most recent match; empty without a match."""
        tokens = self.token_ids
        length = len(tokens)
        for n in self._sizes:
            if n >= length:
                continue
            start = self._last[n].get(tuple(tokens[length - n :]))
            if start is not None:
                period = length - start
                copied = tokens[start : start + num_tokens]
                return Match(tuple(copied[i % period] for i in range(num_tokens)), self._match_length(start, n))
        return Match()

    def _match_length(self, start: int, least: int) -> int:
        """How many of the last tokens stand before ``start``, too: ``least`` or more."""
        tokens, count = self.token_ids, least
        while count < min(start, LONGEST_MATCH) and tokens[start - 1 - count] == tokens[-1 - count]:
            count += 1
        return count


class NgramLookup(Lookup[NgramIndex]):
    """Prompt lookup over prompt and output of each session."""

    def __init__(self, settings: LookupSettings) -> None:
        self._min_n = settings.prompt_lookup_min
        self._max_n = settings.prompt_lookup_max

    def open(self, spec: SessionSpec) -> NgramIndex:
        """An index with everything pending."""
        return NgramIndex(spec.token_ids, self._min_n, self._max_n)

    @property
    def long_match(self) -> int:
        """The longest n-gram."""
        return self._max_n

    def look_up(self, text: NgramIndex, num_tokens: int) -> Match:
        """The continuation of the indexed tokens."""
        return text.continuation(num_tokens)
