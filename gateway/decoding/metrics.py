"""What speculation did for one request, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final, Self

from specdec.types import Verdict


@dataclass(slots=True)
class SpeculationMetrics:
    """Counts of one request; the rates are derived from them."""

    #: Rounds that verified at least one drafted token.
    num_spec_steps: int = 0
    #: Drafted tokens verified.
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    #: Rounds in which a drafted token (in a tree: all that might have followed) was rejected; the others ended with the
    #: draft.
    num_rejections: int = 0
    #: Entry a: rounds in which exactly a drafted tokens were accepted.
    acceptance_histogram: list[int] = field(default_factory=list)
    #: Times the draft was lost, slow or refused.
    num_draft_failures: int = 0
    #: Times the session had to be opened anew on a target.
    num_target_failures: int = 0
    #: Messages that did not fit the session's state, and failures they caused.
    num_stale: int = 0
    #: Verdicts that a proposal drafted ahead was there for, and those that none was there for.
    num_ahead_hits: int = 0
    num_ahead_misses: int = 0
    #: Drafted tokens the draft sent, verified or not.
    num_received_draft_tokens: int = 0
    #: Nanoseconds the draft computed for the proposals that were verified.
    draft_ns: int = 0
    #: Nanoseconds in which there was a verdict but no proposal yet.
    draft_wait_ns: int = 0
    #: Nanoseconds that rounds took beyond their place in the queue and their work: network, messages, hand-overs.
    wire_ns: int = 0

    def record(self, verdict: Verdict, turn_ns: int, depth: int | None = None) -> None:
        """Count a round; one without drafts counts for nothing. ``turn_ns``: from asking for it to its verdict, or
        from the verdict before where it was asked for already then. ``depth``: drafted tokens that might have been
        accepted; None: all of them, for they were a chain.
        """
        if not verdict.num_draft_tokens:
            return
        timings = verdict.timings
        self.wire_ns += max(0, turn_ns - timings.queue_ns - timings.forward_ns - timings.verify_ns)
        self.num_spec_steps += 1
        self.num_draft_tokens += verdict.num_draft_tokens
        self.num_accepted_draft_tokens += verdict.num_accepted
        self.num_rejections += verdict.num_accepted < (verdict.num_draft_tokens if depth is None else depth)
        missing = verdict.num_accepted + 1 - len(self.acceptance_histogram)
        if missing > 0:
            self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[verdict.num_accepted] += 1

    def add(self, other: SpeculationMetrics) -> None:
        """Add the counts of another sample of the same request."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        mine, theirs = self.acceptance_histogram, other.acceptance_histogram
        mine.extend([0] * (len(theirs) - len(mine)))
        for accepted, rounds in enumerate(theirs):
            mine[accepted] += rounds

    @classmethod
    def total(cls, parts: list[SpeculationMetrics]) -> Self:
        """The sum over several samples."""
        result = cls()
        for part in parts:
            result.add(part)
        return result

    @property
    def num_wasted_draft_tokens(self) -> int:
        """Drafted tokens that were never verified."""
        return max(0, self.num_received_draft_tokens - self.num_draft_tokens)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens committed per round with drafts, the target's own included; 0 when there was no such round."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0


_SUMS: Final = tuple(field.name for field in fields(SpeculationMetrics) if field.type == "int")
