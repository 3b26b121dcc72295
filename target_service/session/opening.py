"""What admitting a session and feeding its prompt have found."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specdec.logprobs import PositionLogprobs
from specdec.types import SessionSpec, TargetOpened
from target_service.step import StepSession


class Opening:
    """Gathers what :class:`specdec.types.TargetOpened` tells of a session."""

    def __init__(self, step_session: StepSession, asked_ns: int, *, wants_state_map: bool = False) -> None:
        """``asked_ns``: when the session was asked for (``time.perf_counter_ns``); it is admitted now."""
        self._session = step_session
        self._wants_state_map = wants_state_map
        self.admitted_ns = time.perf_counter_ns()
        self._queue_ns = self.admitted_ns - asked_ns
        #: Tokens of the prompt that were not computed for this session.
        self.num_cached_tokens = step_session.sequence.length
        self._prompt_logprobs: list[PositionLogprobs] = []
        #: None until the first token is committed.
        self.opened: TargetOpened | None = None

    def score(self, logprobs: Sequence[PositionLogprobs]) -> None:
        """Add log-probabilities of the prompt's next tokens."""
        self._prompt_logprobs += logprobs

    def forget_scores(self) -> None:
        """The prompt is fed once more."""
        self._prompt_logprobs.clear()

    def end(self, now_ns: int) -> None:
        """The first token was committed."""
        self.opened = TargetOpened(
            epoch=self._session.spec.epoch,
            rule=self._session.rule,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=tuple(self._prompt_logprobs),
            queue_ns=self._queue_ns,
            prefill_ns=now_ns - self.admitted_ns,
            wants_state_map=self._wants_state_map,
        )


def may_reuse(spec: SessionSpec) -> bool:
    """Whether entries of others serve a session's prompt: what is not computed has no log-probabilities and no hidden
    states. The draft of a session with a name has states of its own.
    """
    needs_states = spec.hidden_state_layers and not spec.last_hidden_state_only and not spec.is_named
    return spec.params.prompt_logprobs is None and not needs_states
