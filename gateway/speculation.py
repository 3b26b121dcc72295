"""What speculation did for one request, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from specdec.sessions import Verdict


@dataclass(slots=True)
class SpeculationMetrics:
    """Counts of one request; the rates are derived from them."""

    #: Rounds that verified at least one drafted token.
    num_spec_steps: int = 0
    #: Drafted tokens verified.
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    #: Rounds in which a drafted token was rejected; the others ended with the draft.
    num_rejections: int = 0
    #: Entry a: rounds in which exactly a drafted tokens were accepted.
    acceptance_histogram: list[int] = field(default_factory=list)
    #: Times the draft was lost, slow or refused.
    num_draft_failures: int = 0
    #: Times the session had to be opened anew on a target.
    num_target_failures: int = 0
    #: Failures whose cause was a message that did not fit the session's state.
    num_stale: int = 0

    def record(self, verdict: Verdict) -> None:
        """Count a round; one without drafts counts for nothing."""
        if not verdict.num_draft_tokens:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += verdict.num_draft_tokens
        self.num_accepted_draft_tokens += verdict.num_accepted
        self.num_rejections += verdict.num_accepted < verdict.num_draft_tokens
        missing = verdict.num_accepted + 1 - len(self.acceptance_histogram)
        if missing > 0:
            self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[verdict.num_accepted] += 1

    def add(self, other: SpeculationMetrics) -> None:
        """Add the counts of another sample of the same request."""
        self.num_spec_steps += other.num_spec_steps
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_draft_tokens += other.num_accepted_draft_tokens
        self.num_rejections += other.num_rejections
        self.num_draft_failures += other.num_draft_failures
        self.num_target_failures += other.num_target_failures
        self.num_stale += other.num_stale
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
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens committed per round with drafts, the target's own included; 0 when there was no such round."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0
