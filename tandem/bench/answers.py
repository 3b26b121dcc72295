"""What a client sees of an answer: pieces as they arrive, and what follows from their times."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of an answer: what one verdict of the target committed."""

    #: ``time.perf_counter`` when it arrived.
    at: float
    num_tokens: int
    text: str
    #: Set in the last piece: the request's speculation metrics by name; empty where the server tells none.
    speculation: Mapping[str, Any] | None = None
    #: Set where the server counts the tokens itself and pieces do not tell: all of the answer's, in its last piece.
    num_tokens_in_all: int | None = None


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One finished request. Times are seconds."""

    #: ``time.perf_counter`` of the call.
    started: float
    #: Those that brought tokens.
    pieces: tuple[Piece, ...]
    #: Tokens generated.
    num_tokens: int
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def wall_s(self) -> float:
        """From the call to the last piece."""
        return self.pieces[-1].at - self.started

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.pieces[0].at - self.started

    @property
    def decode_s(self) -> float:
        """From the first piece to the last."""
        return self.pieces[-1].at - self.pieces[0].at

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second from the first piece on; None where nothing follows it."""
        return (self.num_tokens - self.pieces[0].num_tokens) / self.decode_s if len(self.pieces) > 1 else None

    @property
    def num_steps(self) -> int | None:
        """Steps of the target after the first token; a piece may hold several. None where the server tells none."""
        accepted = self.speculation.get("num_accepted_draft_tokens")
        return None if accepted is None else self.num_tokens - accepted - 1

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece and the next: what a reader waits."""
        return [after.at - before.at for before, after in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latency, one per token after the first piece: the wait for its piece, shared out."""
        gaps = zip(self.gaps_s, self.pieces[1:], strict=True)
        return [gap / piece.num_tokens for gap, piece in gaps for _ in range(piece.num_tokens)]

    @property
    def histogram(self) -> tuple[int, ...]:
        """Entry a: rounds in which exactly a drafted tokens were accepted."""
        return tuple(self.speculation.get("acceptance_histogram", ()))


async def collect(pieces: AsyncGenerator[Piece, None]) -> TimedAnswer:
    """The answer that a stream of pieces adds up to; the call begins now.

    Raises :class:`Unavailable` where no token came.
    """
    started = time.perf_counter()
    async with aclosing(pieces) as stream:
        listed = [piece async for piece in stream]
    full = tuple(piece for piece in listed if piece.num_tokens)
    if not full:
        raise Unavailable("the server gave an answer without a token")
    counted = listed[-1].num_tokens_in_all
    num_tokens = sum(piece.num_tokens for piece in full) if counted is None else counted
    return TimedAnswer(started, full, num_tokens, listed[-1].speculation or {})
