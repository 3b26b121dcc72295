"""Suffix decoding: what followed the last tokens most often, in this text or in the outputs of past requests.

Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications"; options and their
meaning are vLLM's. No model; a proposal is as long as its match is worth. The trees are in
:mod:`specdec.lookup.suffix_tree`.
"""

from __future__ import annotations

from typing import Final

from specdec.lookup.base import Lookup, Match
from specdec.lookup.past_outputs import PastOutputsByOwner
from specdec.lookup.suffix_tree import SuffixText, can_load
from specdec.settings import LookupSettings
from specdec.types import SessionSpec

#: A match of so many tokens is better than a model's draft; docs/drafters.md has the measurement.
LONG_MATCH: Final = 8


class SuffixSession(SuffixText):
    """The text of a session."""

    def __init__(self, spec: SessionSpec, depth: int) -> None:
        super().__init__(spec.token_ids, depth)
        self.prompt_len = spec.prompt_len
        self.seed = spec.params.seed
        self.owner = spec.owner
        self.is_draft_invariant = spec.is_draft_invariant


class SuffixLookup(Lookup[SuffixSession]):
    """Suffix trees: one over each session's text, one over past outputs."""

    def __init__(self, settings: LookupSettings) -> None:
        """Compile the trees if they are not prebuilt and this machine has not done so yet.

        Raises:
            InvalidRequest: they are not prebuilt, and there is no compiler.
        """
        self._depth = settings.suffix_decoding_max_tree_depth
        self._max_spec_factor = settings.suffix_decoding_max_spec_factor
        self._min_token_prob = settings.suffix_decoding_min_token_prob
        self.past = PastOutputsByOwner(self._depth, settings.suffix_decoding_max_cached_requests)

    @classmethod
    def is_usable(cls) -> bool:
        """Whether the trees are prebuilt, or there is a compiler for them."""
        return can_load()

    def open(self, spec: SessionSpec) -> SuffixSession:
        """A text with everything pending."""
        return SuffixSession(spec, self._depth)

    @property
    def long_match(self) -> int:
        """A run of tokens that is rarely found by chance; a tree that is not so deep must match in full."""
        return min(LONG_MATCH, self._depth - 1)

    def look_up(self, text: SuffixSession, num_tokens: int) -> Match:
        """The likeliest continuation of the ingested tokens.

        Under a ratio rule a draft must not depend on the noise that decides on it. Another request with the same seed
        had the same noise at the same positions: what it wrote there is no draft for this one. (With p = (.6, .4) the
        first writes token 1 where u >= .6; proposed to the second, it would be accepted where u < .4, so never.)
        """
        past = self.past.of(text.owner)
        return text.look_up(
            num_tokens,
            past.cache if text.is_draft_invariant or not past.has_seed(text.seed) else None,
            max_spec_factor=self._max_spec_factor,
            min_token_prob=self._min_token_prob,
        )

    def close(self, text: SuffixSession) -> None:
        """Add the output to the past ones of its owner."""
        self.past.add(text.owner, text.token_ids[text.prompt_len :], text.seed)
