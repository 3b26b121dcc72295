"""How wishes become batches, with a drafter that only takes notes."""

import asyncio
from dataclasses import dataclass

import pytest

from draft_service.batcher import Batcher
from draft_service.drafter import Draft
from specdec.errors import Unavailable


@dataclass(eq=False)
class State:
    num_pending: int


class Notes:
    """Takes in what it is told, drafts zeros, and remembers the batches; each takes ``turns`` turns of the loop."""

    def __init__(self, turns=3):
        self.batches = []
        self.turns = turns
        self.error = None

    async def draft(self, batch):
        self.batches.append([(job.num_rows, job.num_tokens) for job in batch])
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        for job in batch:
            job.state.num_pending -= job.num_rows
        return [Draft((0,) * job.num_tokens) for job in batch]


@pytest.fixture
async def notes():
    return Notes()


@pytest.fixture
async def batcher(notes):
    batcher = Batcher(notes, max_rows=16)
    yield batcher
    await batcher.close()


async def test_a_lone_session_is_served_at_once(batcher, notes):
    wish = batcher.submit(State(1), 4)
    assert (await wish.done).token_ids == (0, 0, 0, 0)
    assert notes.batches == [[(1, 4)]]
    assert wish.draft_ns > 0


async def test_what_waits_while_a_batch_runs_is_the_next_batch(batcher, notes):
    first = batcher.submit(State(1), 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    later = [batcher.submit(State(2), k) for k in (1, 2, 3)]
    await asyncio.gather(first.done, *(wish.done for wish in later))
    assert notes.batches == [[(1, 2)], [(2, 1), (2, 2), (2, 3)]]


async def test_prompts_come_in_chunks_beside_drafts(batcher, notes):
    prompt = batcher.submit(State(40), 0)
    drafting = State(1)
    while not prompt.done.done():
        drafting.num_pending = 1
        await batcher.submit(drafting, 2).done
    for batch in notes.batches:  # also those between two drafts
        assert sum(rows for rows, tokens in batch if not tokens) <= 4
    assert sum(rows for batch in notes.batches for rows, tokens in batch if not tokens) == 40


async def test_prompts_alone_take_all_the_room(batcher, notes):
    wishes = [batcher.submit(State(20), 0), batcher.submit(State(10), 0)]
    await asyncio.gather(*(wish.done for wish in wishes))
    assert notes.batches == [[(16, 0)], [(4, 0), (10, 0)]]


async def test_a_long_catch_up_drafts_with_its_last_chunk(batcher, notes):
    wish = batcher.submit(State(20), 3)
    assert (await wish.done).token_ids == (0, 0, 0)
    assert notes.batches == [[(16, 0)], [(4, 3)]]


async def test_more_drafts_than_room_go_in_order(batcher, notes):
    states = [State(4) for _ in range(6)]
    wishes = [batcher.submit(state, 1) for state in states]
    await asyncio.gather(*(wish.done for wish in wishes))
    assert notes.batches == [[(4, 1)] * 4, [(4, 1)] * 2]


async def test_a_withdrawn_wish_is_never_run(batcher, notes):
    first = batcher.submit(State(1), 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = batcher.submit(State(1), 3)
    third = batcher.submit(State(1), 4)
    second.done.cancel()
    await asyncio.gather(first.done, third.done)
    assert notes.batches == [[(1, 2)], [(1, 4)]]


async def test_an_error_fails_its_batch_and_no_other(batcher, notes):
    notes.error = RuntimeError("planted")
    wishes = [batcher.submit(State(1), 2), batcher.submit(State(1), 2)]
    for wish in wishes:
        with pytest.raises(RuntimeError, match="planted"):
            await wish.done
    notes.error = None
    assert (await batcher.submit(State(1), 2).done).token_ids == (0, 0)


async def test_idle_means_asleep(batcher, notes):
    await batcher.submit(State(1), 2).done
    for _ in range(3):
        await asyncio.sleep(0)
    wakeups = []
    batcher._take = lambda: wakeups.append(1) or []
    await asyncio.sleep(0.02)
    assert wakeups == []


async def test_closing_ends_the_running_batch_and_fails_the_rest(notes):
    batcher = Batcher(notes, max_rows=16)
    running = batcher.submit(State(1), 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    queued = batcher.submit(State(1), 2)
    await batcher.close()
    await batcher.close()
    assert (await running.done).token_ids == (0, 0)
    with pytest.raises(Unavailable):
        await queued.done
    with pytest.raises(Unavailable):
        batcher.submit(State(1), 1)
