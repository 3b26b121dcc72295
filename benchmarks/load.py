"""A steady load: a fixed number of clients, each sending its next request when the last one is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import cycle

from tandem.bench.answers import Piece

#: A prompt and the tokens to generate after it, to the stream of the answer's pieces.
Ask = Callable[[tuple[int, ...], int], AsyncGenerator[Piece, None]]


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """What arrived while the load was steady, client by client: when, and how many tokens."""

    arrivals: Sequence[Sequence[tuple[float, int]]]

    @property
    def tokens_per_s(self) -> float:
        """The sum of the clients' own rates.

        A client's rate is what came after its first piece over the time from that to its last one: where all clients
        get their tokens in the same step, counting tokens in the window would be off by up to a step at either end.
        A client with fewer than two pieces has the rate 0.
        """
        return sum(
            sum(count for _, count in pieces[1:]) / (pieces[-1][0] - pieces[0][0])
            for pieces in self.arrivals
            if len(pieces) > 1
        )

    @property
    def tokens_per_piece(self) -> float:
        """Mean tokens a piece brought; 0 where there was none."""
        counts = [count for pieces in self.arrivals for _, count in pieces]
        return sum(counts) / len(counts) if counts else 0.0


async def hold(
    ask: Ask, prompts: Sequence[tuple[int, ...]], *, num_clients: int, max_tokens: int, seconds: float
) -> LoadWindow:
    """Keep ``num_clients`` requests open and record ``seconds`` of it, from when every client has its first token on.

    The first requests are of different lengths, so that clients do not end (and prefill) all at once later on.
    Clients repeat ``prompts`` in order. What is open at the end is cancelled. Raises what a request raises.
    """
    queue = cycle(prompts)
    logs: list[list[tuple[float, int]]] = [[] for _ in range(num_clients)]
    all_running = asyncio.Event()

    async def client(log: list[tuple[float, int]], lengths: Iterator[int]) -> None:
        while True:
            async with aclosing(ask(next(queue), next(lengths))) as pieces:
                async for piece in pieces:
                    log.append((piece.at, piece.num_tokens))
                    if all(logs):
                        all_running.set()

    tasks = [
        asyncio.create_task(client(log, _lengths(number, num_clients, max_tokens))) for number, log in enumerate(logs)
    ]
    try:
        await _while_running(tasks, all_running.wait())
        begun = time.perf_counter()
        await _while_running(tasks, asyncio.sleep(seconds))
        ended = time.perf_counter()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return LoadWindow([[entry for entry in log if begun <= entry[0] <= ended] for log in logs])


def _lengths(number: int, num_clients: int, max_tokens: int) -> Iterator[int]:
    """Tokens of a client's requests: the first is cut to the client's share of the time."""
    yield max(2, max_tokens * (number + 1) // num_clients)
    while True:
        yield max_tokens


async def _while_running(tasks: Sequence[asyncio.Task[None]], awaited: object) -> None:
    """Wait for ``awaited``, or raise the error a client ends with meanwhile."""
    waiter = asyncio.ensure_future(awaited)  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait({waiter, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiter}:
            task.result()
    finally:
        waiter.cancel()
