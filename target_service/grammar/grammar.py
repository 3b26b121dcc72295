"""The grammar of one session: where its text stands, and what may follow."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from specdec.errors import InvalidRequest
from specdec.types import FinishReason
from target_service.stop_criteria import Truncation


class Grammar:
    """The committed output of a session, read by its grammar. Belongs to whom the step session belongs to."""

    def __init__(self, matcher: LLMatcher, num_mask_words: int) -> None:
        """``matcher`` has read the output so far and is this object's own; a mask has ``num_mask_words`` int32."""
        self.matcher = matcher
        self.num_mask_words = num_mask_words

    def num_kept(self, token_ids: Sequence[int], *, is_drawn: bool) -> int:
        """How many tokens of a chain are worth verifying: those that may follow, one after the other.

        ``is_drawn``: the tokens were drawn from q. The first token that may not follow is then kept as well: the rule
        must reject it, so that what it draws instead comes from the residual; without it the text would change.
        """
        num_valid = self.matcher.validate_tokens(list(token_ids))
        return min(num_valid + is_drawn, len(token_ids))

    def commit(self, cut: Truncation) -> Truncation:
        """Read tokens that a round commits; the sequence ends where the text is complete.

        Raises:
            InvalidRequest: the grammar became too large to be followed.
        """
        for index, token_id in enumerate(cut.token_ids):
            self.matcher.consume_token(token_id)
            if self.matcher.is_error():
                reason = " ".join(self.matcher.get_error().split())[:200]
                raise InvalidRequest(
                    f"structured_outputs cannot be followed any further ({reason}); simplify the grammar",
                    param="structured_outputs",
                )
            if self.matcher.is_stopped():
                is_cut = index + 1 < len(cut.token_ids) or cut.finish_reason is not FinishReason.STOP
                return Truncation(cut.token_ids[: index + 1], FinishReason.STOP) if is_cut else cut
        return cut
