"""Hidden states of one session that nobody waits for, as passes left them: they are mapped and rounded together."""

from __future__ import annotations

from typing import Final

from engine.hidden_states import STATE_DTYPE, encode_states
from engine.state_map import StateMap
from specdec.hidden_state_buffer import PIECE_BYTES
from specdec.types import HiddenStates, SessionSpec

#: Bytes at which they leave.
MAX_HELD_BYTES: Final = PIECE_BYTES


class HeldStates:
    """Those of successive positions; false while there are none.

    To map and round a hundred rows takes hardly longer than one. With processes of the bundled target and its EAGLE-3
    head a plain token of a session takes 1.06 times that of a session without a draft at one session, and 1.03 times at
    eight; 1.26 and 1.30 where the states of each token leave with it (medians of alternating windows).
    """

    __slots__ = ("_num_bytes", "_num_rows", "_parts", "_start")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._start = self._num_rows = self._num_bytes = 0

    def __bool__(self) -> bool:
        return self._num_bytes > 0

    @property
    def is_full(self) -> bool:
        """Whether no more should be held."""
        return self._num_bytes >= MAX_HELD_BYTES

    def add(self, start: int, raw: bytes, num_rows: int) -> None:
        """Hold some more (:meth:`engine.hidden_states.PassStates.raw`), the first of which is that of ``start``."""
        if not self._parts:
            self._start, self._num_rows = start, 0
        self._parts.append(raw)
        self._num_rows += num_rows
        self._num_bytes += len(raw)

    def take(self, spec: SessionSpec, through: StateMap | None) -> HiddenStates:
        """All of them as the session wants them, and hold none; there is one at least."""
        raw = bytearray().join(self._parts)
        self._parts, self._num_bytes = [], 0
        width = len(raw) // (self._num_rows * len(spec.hidden_state_layers) * STATE_DTYPE.itemsize)
        return encode_states(raw, self._start, width, spec, through)
