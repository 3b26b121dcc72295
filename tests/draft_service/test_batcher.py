"""How requests become batches, with a drafter that only takes notes."""

import asyncio
from dataclasses import dataclass
from unittest import mock

import pytest

from draft_service.batcher import DraftBatcher
from draft_service.draft_request import DraftRequest
from draft_service.drafters.base import Draft
from specdec.errors import Unavailable


@dataclass(eq=False)
class State:
    num_pending: int


class Notes:
    """Ingests, drafts zeros, and remembers the batches; each takes ``num_iterations`` of the event loop."""

    def __init__(self, num_iterations=3):
        self.batches = []
        self.num_iterations = num_iterations
        self.error = None

    async def draft(self, batch):
        self.batches.append([(job.num_rows, job.num_tokens) for job in batch])
        for _ in range(self.num_iterations):
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        for job in batch:
            job.state.num_pending -= job.num_rows
        return [Draft((0,) * job.num_tokens) for job in batch]


def submit(batcher, state, num_tokens):
    """A request, and a future of what it is answered."""
    done = asyncio.get_running_loop().create_future()

    def deliver(outcome):
        (done.set_exception if isinstance(outcome, Exception) else done.set_result)(outcome)

    request = DraftRequest(state, num_tokens, deliver)
    batcher.submit(request)
    return request, done


def wait_for(batcher, state, num_tokens):
    """A future of what the request is answered."""
    return submit(batcher, state, num_tokens)[1]


@pytest.fixture
async def notes():
    return Notes()


@pytest.fixture
async def batcher(notes):
    batcher = DraftBatcher(notes, max_rows=16)
    yield batcher
    await batcher.close()


async def test_a_lone_session_is_served_at_once(batcher, notes):
    request, done = submit(batcher, State(1), 4)
    assert (await done).token_ids == (0, 0, 0, 0)
    assert notes.batches == [[(1, 4)]]
    assert request.draft_ns > 0


async def test_what_waits_while_a_batch_runs_is_the_next_batch(batcher, notes):
    first = wait_for(batcher, State(1), 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    later = [wait_for(batcher, State(2), k) for k in (1, 2, 3)]
    await asyncio.gather(first, *later)
    assert notes.batches == [[(1, 2)], [(2, 1), (2, 2), (2, 3)]]


async def test_prompts_come_in_chunks_beside_drafts(batcher, notes):
    prompt = wait_for(batcher, State(40), 0)
    drafting = State(1)
    while not prompt.done():
        drafting.num_pending = 1
        await wait_for(batcher, drafting, 2)
    for batch in notes.batches:  # also those between two drafts
        assert sum(rows for rows, tokens in batch if not tokens) <= 4
    assert sum(rows for batch in notes.batches for rows, tokens in batch if not tokens) == 40


async def test_prompts_alone_take_all_the_room(batcher, notes):
    await asyncio.gather(wait_for(batcher, State(20), 0), wait_for(batcher, State(10), 0))
    assert notes.batches == [[(16, 0)], [(4, 0), (10, 0)]]


async def test_a_long_catch_up_drafts_with_its_last_chunk(batcher, notes):
    assert (await wait_for(batcher, State(20), 3)).token_ids == (0, 0, 0)
    assert notes.batches == [[(16, 0)], [(4, 3)]]


async def test_more_drafts_than_room_go_in_order(batcher, notes):
    states = [State(4) for _ in range(6)]
    await asyncio.gather(*(wait_for(batcher, state, 1) for state in states))
    assert notes.batches == [[(4, 1)] * 4, [(4, 1)] * 2]


async def test_a_cancelled_request_is_never_run(batcher, notes):
    first = wait_for(batcher, State(1), 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second, second_done = submit(batcher, State(1), 3)
    third = wait_for(batcher, State(1), 4)
    second.cancel()
    await asyncio.gather(first, third)
    assert not second_done.done()
    assert notes.batches == [[(1, 2)], [(1, 4)]]


async def test_an_error_fails_its_batch_and_no_other(batcher, notes):
    notes.error = RuntimeError("planted")
    requests = [wait_for(batcher, State(1), 2), wait_for(batcher, State(1), 2)]
    for done in requests:
        with pytest.raises(RuntimeError, match="planted"):
            await done
    notes.error = None
    assert (await wait_for(batcher, State(1), 2)).token_ids == (0, 0)


async def test_idle_means_asleep(batcher, notes):
    await wait_for(batcher, State(1), 2)
    for _ in range(3):
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    with mock.patch.object(loop, "call_soon", wraps=loop.call_soon) as calls:
        for _ in range(20):
            await asyncio.sleep(0)
    assert calls.call_count == 20  # this test's own


async def test_closing_ends_the_running_batch_and_fails_the_rest(notes):
    batcher = DraftBatcher(notes, max_rows=16)
    running = wait_for(batcher, State(1), 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    queued = wait_for(batcher, State(1), 2)
    await batcher.close()
    await batcher.close()
    assert (await running).token_ids == (0, 0)
    with pytest.raises(Unavailable):
        await queued
    with pytest.raises(Unavailable):
        submit(batcher, State(1), 1)
