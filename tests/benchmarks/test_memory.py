"""The memory benchmark: its arithmetic, its bookkeeping without a model, and small sections on real services."""

import argparse
import asyncio
import json
import time

import pytest

from benchmarks import memory
from benchmarks.memory_server import CONTEXT, Reply, block_bytes, serve
from specdec.errors import InvalidRequest, TandemError
from tests.e2e.fork_server import forked_services

__all__ = ["forked_services"]


def options(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**vars(memory.parser().parse_args([])) | values)


def test_gaps_are_those_that_end_in_the_time() -> None:
    replies = [Reply(0.0, [(at, (1,)) for at in (1.0, 1.5, 3.0, 3.25)]), Reply(0.0, [(2.0, (1,))]), Reply(0.0)]
    assert memory.gaps_ms(replies, 1.0, 3.0) == [500.0, 1500.0]


class FakeServer:
    """Answers a request of n tokens in n seconds, one at a time per place; the third one fails."""

    def __init__(self, places: int) -> None:
        self.places = asyncio.Semaphore(places)
        self.ended: list[Reply] = []
        self.num_asked = 0

    async def loads(self) -> list[argparse.Namespace]:
        return [argparse.Namespace(preemptions=2 * self.num_asked, num_batches=10 * len(self.ended))]

    async def ask(self, prompt: tuple[int, ...], max_tokens: int, *, seed: int | None) -> Reply:
        self.num_asked += 1
        is_third = self.num_asked == 3
        async with self.places:
            reply = Reply(time.perf_counter())
            for _ in range(max_tokens):
                await asyncio.sleep(1.0)
                if is_third:
                    raise InvalidRequest("no")
                reply.arrivals.append((time.perf_counter(), (*prompt, seed or 0)))
        self.ended.append(reply)
        return reply


@pytest.mark.usefixtures("virtual_time")
async def test_throughput_counts_the_middle_and_errors_are_told() -> None:
    requests = [((number,), 10, number) for number in range(16)]
    done = await memory.serve_all(FakeServer(places=2), requests, 4)  # type: ignore[arg-type]
    assert done.num_errors == 1
    assert done.preemptions == 2 * 7, "of seven requests that begin in the time"
    assert done.width == pytest.approx(2.0, rel=0.2), "ten steps for the 20 tokens of an answer"
    assert done.texts[5] == (5, 5) * 10
    assert set(done.texts) == {*range(16)} - {2}
    assert done.tokens_per_s == pytest.approx(4.0, rel=0.2), "two places, two tokens a second each"


async def test_an_error_of_the_load_ends_it() -> None:
    async def fail() -> None:
        raise InvalidRequest("the load")

    with pytest.raises(TandemError, match="the load"):
        await memory.while_running([fail()], asyncio.sleep(60))
    assert await memory.while_running([asyncio.sleep(60)], asyncio.sleep(0, 7)) == 7


async def test_bookkeeping_is_of_blocks_that_grow() -> None:
    (few,), (many,) = [await memory.bookkeeping(options(clients=count)) for count in (4, 64)]
    assert 0 < few["µs a step, mean"] < many["µs a step, mean"]


def test_the_table_is_markdown() -> None:
    rows = [{"name": "a", "x": 1.234, "n": 3}, {"name": "b", "x": 12345.6, "n": 4}]
    assert memory.table(rows).splitlines() == [
        "| name | x | n |",
        "| --- | --- | --- |",
        "| a | 1.23 | 3 |",
        "| b | 12,346 | 4 |",
    ]


@pytest.mark.e2e
@pytest.mark.exhaustive
async def test_a_pool_that_is_full_gives_the_same_texts() -> None:
    rows = await memory.full(options(clients=8, repeats=1, batch_limits=(8,)))
    assert [row["errors"] + row["other texts"] for row in rows] == [0, 0, 0]
    assert [row["preemptions"] for row in rows[::2]] == [0, 0], "of unbounded pools"


@pytest.mark.e2e
@pytest.mark.usefixtures("forked_services")
async def test_a_reply_may_be_left_and_tells_what_was_cached() -> None:
    assert block_bytes() == 6 * 2 * 2 * 64 * 4 * 32
    async with serve(CONTEXT // 32) as server:
        prompt = tuple(range(100, 228))
        first = await server.ask(prompt, CONTEXT - 128, leave_after=4)
        assert 4 <= len(first.token_ids) < 100
        second = await server.ask(prompt, 2, seed=1)
        assert second.num_cached == 127, "the last token of a prompt is computed"
        assert not server.open
        assert server.ended == [first, second]
        with pytest.raises(TandemError):
            await server.ask((), 1)


@pytest.mark.e2e
@pytest.mark.usefixtures("forked_services")
def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["memory", "shared", "--repeats", "1", "--json", str(tmp_path / "out")])
    assert memory.main() == 0
    (row,) = json.loads((tmp_path / "out").read_text())["shared"]
    assert row["cached tokens"] == 1500
    assert row["known over cold"] < 0.5
    assert "| cold ms | known ms |" in capsys.readouterr().out
