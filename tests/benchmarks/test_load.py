"""The steady load: what it counts, how it ends."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from benchmarks.load import LoadWindow, hold
from specdec.errors import Unavailable
from tandem.bench.answers import Piece


def test_rates_are_those_between_first_and_last_piece() -> None:
    steady = [(0.0, 4), (0.5, 2), (1.0, 3)]  # 5 tokens in one second after the first piece
    assert LoadWindow([steady]).tokens_per_s == 5.0
    assert LoadWindow([steady, steady]).tokens_per_s == 10.0
    assert LoadWindow([steady, [(0.2, 9)], []]).tokens_per_s == 5.0, "one piece is no rate"
    assert LoadWindow([steady, [(0.2, 1)]]).tokens_per_piece == 2.5
    assert LoadWindow([[]]).tokens_per_piece == 0.0


class Server:
    """Gives a token every 2 ms; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.open = 0
        self.most_open = 0

    async def ask(self, prompt: tuple[int, ...], length: int) -> AsyncGenerator[Piece, None]:
        self.asked.append((prompt, length))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            for _ in range(length):
                await asyncio.sleep(0.002)
                yield Piece(time.perf_counter(), 1, "")
        finally:
            self.open -= 1


@pytest.mark.usefixtures("virtual_time")
async def test_so_many_requests_are_always_open() -> None:
    server = Server()
    prompts = [(number,) for number in range(3)]
    window = await hold(server.ask, prompts, num_clients=4, max_tokens=8, seconds=0.15)
    assert server.most_open == 4
    assert server.open == 0, "what was open is cancelled"
    assert len(window.arrivals) == 4
    assert all(len(pieces) > 10 for pieces in window.arrivals), "clients continue with their next request"
    assert window.tokens_per_s == pytest.approx(4 * 500)
    assert [length for _, length in server.asked[:4]] == [2, 4, 6, 8], "the first ones end at different times"
    assert {length for _, length in server.asked[4:]} == {8}
    assert [prompt for prompt, _ in server.asked[:5]] == [(0,), (1,), (2,), (0,), (1,)]


async def test_an_error_ends_the_load() -> None:
    async def ask(prompt: tuple[int, ...], length: int) -> AsyncGenerator[Piece, None]:
        yield Piece(time.perf_counter(), 1, "")
        raise Unavailable("gone")

    with pytest.raises(Unavailable, match="gone"):
        await hold(ask, [(1,)], num_clients=2, max_tokens=4, seconds=60)
