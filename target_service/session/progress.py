"""Where one session stands between the prompt and its end: the states and what moves it from one to the next."""

from __future__ import annotations

import sys
from enum import Enum, auto
from typing import Final

from target_service.stop_criteria import StopCriteria


class State(Enum):
    """What a session does next."""

    #: The prompt is fed; its end brings the first token.
    PREFILL = auto()
    #: Nothing, until a round or multi-step decode is asked for.
    IDLE = auto()
    #: A round was asked for, or runs; it waits for requests after that.
    ROUND = auto()
    #: It decodes tokens by itself; a round may take the place of the next one.
    MULTI_STEP = auto()
    #: The next token, or the round that runs, is the last of multi-step decode.
    ENDING = auto()
    #: The sequence ended or failed, or the session was closed.
    OVER = auto()


_DECODING: Final = (State.MULTI_STEP, State.ENDING)


class Progress:
    """The state of a session, and how many tokens are committed.

    Changed on the event loop alone. The device thread reads :meth:`continues`.

    =========== ======================================================
    state       next states
    =========== ======================================================
    PREFILL     :meth:`open`: IDLE, MULTI_STEP, ENDING
    IDLE        :meth:`ask`: ROUND; :meth:`decode`: MULTI_STEP, ENDING
    ROUND       :meth:`commit`: IDLE
    MULTI_STEP  :meth:`commit`, :meth:`stop_decoding`: ENDING; :meth:`take_round`: ROUND
    ENDING      :meth:`commit`: IDLE; :meth:`decode`: MULTI_STEP; :meth:`take_round`: ROUND, MULTI_STEP
    OVER        none; :meth:`end` leads here from every state
    =========== ======================================================
    """

    def __init__(self, committed_len: int, limits: StopCriteria) -> None:
        """``committed_len``: tokens of the prompt, and those generated before the session was opened."""
        self.state = State.PREFILL
        self.committed_len = committed_len
        self._max_len = limits.max_len
        #: In MULTI_STEP and ENDING: decoding continues up to this length.
        self.multi_step_until = 0
        #: Whether it goes on after the round that was asked for, up to the longest sequence.
        self._goes_on = False
        #: Everything since this length came of multi-step decode.
        self._multi_step_from = 0
        #: A round from this length on may come too late: multi-step decode continued meanwhile.
        self._early_from = sys.maxsize

    @property
    def is_multi_step(self) -> bool:
        """Whether tokens will come without being asked for."""
        return self.state in _DECODING

    @property
    def num_multi_step_left(self) -> int:
        """Tokens that multi-step decode still brings."""
        return self.multi_step_until - self.committed_len if self.is_multi_step else 0

    def continues(self, length: int) -> bool:
        """Whether multi-step decode continues after ``length`` tokens, of which the event loop may not know yet."""
        return self.is_multi_step and self.multi_step_until > length

    def may_be_late(self, base_len: int) -> bool:
        """Whether a round for this length could not know that multi-step decode had gone on."""
        return base_len >= self._early_from

    # --- what is asked for ---

    def ask(self) -> None:
        """A round: IDLE to ROUND."""
        self.state = State.ROUND
        self._goes_on = False
        self._early_from = sys.maxsize

    def ask_in_place(self, *, goes_on: bool) -> None:
        """A round in place of the next token of multi-step decode, which continues until a step takes the round; with
        ``goes_on`` also after it.
        """
        self._goes_on = goes_on

    def decode(self, from_len: int, num_tokens: int) -> bool:
        """Multi-step decode up to ``num_tokens`` tokens after ``from_len``; False where that does not fit the state."""
        in_round = self.state is State.PREFILL or self.state is State.ROUND
        if in_round or not self._multi_step_from <= from_len <= self.committed_len:
            return False
        if not self.is_multi_step:
            self._early_from = from_len
        self._decode_until(max(self.multi_step_until, min(from_len + num_tokens, self._max_len)), self.state)
        return True

    def stop_decoding(self) -> None:
        """End multi-step decode: the next token is its last, and none follow the round that was asked for."""
        self._goes_on = False
        if self.is_multi_step:
            self._decode_until(min(self.multi_step_until, self.committed_len + 1), State.IDLE)

    # --- what steps do ---

    def take_round(self) -> None:
        """A step feeds the round that was asked for."""
        self._decode_until(self._max_len if self._goes_on else 0, State.ROUND)

    def open(self, num_tokens: int, num_multi_step: int) -> None:
        """Prefilling committed its first tokens; ``num_multi_step`` tokens are decoded without being asked for."""
        self.committed_len += num_tokens
        self._multi_step_from = self.committed_len
        if num_multi_step:
            self._early_from = self.committed_len
        self._decode_until(min(self.committed_len + num_multi_step, self._max_len), State.IDLE)

    def commit(self, num_tokens: int, *, is_round: bool) -> None:
        """A step committed tokens, of a round or of multi-step decode."""
        self.committed_len += num_tokens
        if is_round:
            self._multi_step_from = self.committed_len
        self._decode_until(self.multi_step_until, State.IDLE)

    def run_on(self, num_tokens: int) -> None:
        """A step of multi-step decode brought tokens, and the device thread runs the next one already."""
        self._decode_until(max(self.multi_step_until, self.committed_len + num_tokens + 1), State.IDLE)

    def end(self) -> None:
        """Nothing more is computed."""
        self.state = State.OVER

    def _decode_until(self, length: int, otherwise: State) -> None:
        """Multi-step decode up to ``length``; where that brings no token the state is ``otherwise``."""
        self.multi_step_until = length
        if self.state is not State.OVER:
            left = length - self.committed_len
            self.state = otherwise if left <= 0 else State.MULTI_STEP if left > 1 else State.ENDING
