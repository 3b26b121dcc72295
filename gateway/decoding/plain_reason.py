"""Why nothing was speculated in a request."""

from __future__ import annotations

from enum import StrEnum


class PlainReason(StrEnum):
    """Each value is what answers and metrics say; :attr:`text` is for people."""

    OFF = "off"
    ENGINE = "engine"
    NO_DRAFT = "no_draft"
    TOO_SHORT = "too_short"
    CROWDED = "batch_size"
    PACING = "pacing"
    NOT_READY = "draft_not_ready"
    FAILED = "draft_failed"
    DECLINED = "draft_declined"
    NO_PROPOSAL = "no_proposal"

    @property
    def text(self) -> str:
        """The reason in a few words."""
        return _TEXTS[self]


_TEXTS = {
    PlainReason.OFF: "it is switched off",
    PlainReason.ENGINE: "an engine behind the gateway answers; its own metrics say what it drafts",
    PlainReason.NO_DRAFT: "no draft is configured",
    PlainReason.TOO_SHORT: "the answer is too short",
    PlainReason.CROWDED: "more sequences are open than disable_by_batch_size allows",
    PlainReason.PACING: "drafting does not pay off at this load; see docs/pacing.md",
    PlainReason.NOT_READY: "no draft could be used in time",
    PlainReason.FAILED: "the draft failed; the gateway's log says why",
    PlainReason.DECLINED: "the draft does not take this request",
    PlainReason.NO_PROPOSAL: "nothing was proposed that could be verified",
}
