"""Admission: fairness between clients, a queue that is shared, requests of several slots, limits of one client."""

import asyncio

import pytest

from specdec.errors import InvalidRequest, Overloaded
from specdec.scheduling.admission import Admission, ClientFull


def make(max_open=2, max_waiting=100, max_wait_s=10.0):
    return Admission(
        max_open=max_open,
        max_waiting=max_waiting,
        max_wait_s=max_wait_s,
        undo=lambda _: None,
        describe=lambda: "it is full",
    )


class Queue:
    """Clients that ask, and the order in which they are admitted."""

    def __init__(self, admission):
        self.admission = admission
        self.admitted = []
        self.tasks = []

    async def ask(self, client, num_slots=1, reserve=lambda: True):
        async def wait():
            await self.admission.admit(reserve, client=client, num_slots=num_slots)
            self.admitted.append(client)

        self.tasks.append(asyncio.create_task(wait()))
        await asyncio.sleep(0)
        return self.tasks[-1]

    async def leave(self, client, num_slots=1):
        self.admission.leave(client, num_slots)
        for _ in range(5):
            await asyncio.sleep(0)

    def cancel(self):
        for task in self.tasks:
            task.cancel()


@pytest.fixture
def queue():
    queue = Queue(make())
    yield queue
    queue.cancel()


async def test_one_request_does_not_wait_behind_five_hundred(queue):
    queue.admission = make(max_open=4, max_waiting=1000)
    for _ in range(500):
        await queue.ask("crowd")
    await queue.ask("single")
    await queue.leave("crowd")
    assert queue.admitted == ["crowd"] * 4 + ["single"]
    await queue.leave("single")
    assert queue.admitted[5:] == ["crowd"]


async def test_clients_with_many_get_equal_shares(queue):
    queue.admission = make(max_open=6)
    for client in "aaaaaaaaaabbbbbbbbbbcccccccccc":
        await queue.ask(client)
    for _ in range(6):
        await queue.leave("a")
    assert sorted(queue.admitted[6:]) == ["a", "a", "b", "b", "c", "c"]


async def test_of_equal_clients_the_first_to_come_is_first(queue):
    queue.admission = make(max_open=1)
    for client in ("x", "b", "a", "c"):
        await queue.ask(client)
    for client in ("x", "b", "a"):
        await queue.leave(client)
    assert queue.admitted == ["x", "b", "a", "c"]


async def test_clients_that_keep_coming_do_not_starve_one(queue):
    queue.admission = make(max_open=1)
    for _ in range(3):
        await queue.ask("crowd")
    holder = "crowd"
    for number in range(8):
        await queue.ask(f"new {number}")
        await queue.leave(holder)
        holder = queue.admitted[-1]
    assert queue.admitted.count("crowd") == 3


async def test_a_full_queue_is_shared(queue):
    queue.admission = make(max_open=1, max_waiting=4)
    crowd = [await queue.ask("crowd") for _ in range(5)]
    with pytest.raises(Overloaded, match="4 of 4 waiting"):
        await (await queue.ask("crowd"))
    single = await queue.ask("single")
    with pytest.raises(Overloaded, match="the queue is full"):
        await crowd[-1]
    assert not single.done()
    for _ in range(2):
        await queue.leave("crowd")
    assert queue.admitted == ["crowd", "crowd", "single"], "next but one, however many the crowd has waiting"


async def test_slots_of_one_request_are_taken_together(queue):
    queue.admission = make(max_open=4)
    for slots in (2, 4, 1):
        await queue.ask(f"of {slots}", slots)
    assert queue.admitted == ["of 2"], "nobody overtakes the large one"
    await queue.leave("of 2", 2)
    assert queue.admitted == ["of 2", "of 4"]
    await queue.leave("of 4", 4)
    assert (queue.admitted[-1], queue.admission.num_open) == ("of 1", 1)


async def test_a_client_that_holds_its_share_lets_others_pass(queue):
    held = 1

    def reserve():
        if held:
            raise ClientFull("it holds all it may")
        return True

    await queue.ask("full", reserve=reserve)
    await queue.ask("other")
    assert queue.admitted == ["other"]
    held = 0
    queue.admission.admit_next()
    await asyncio.wait(queue.tasks)
    assert queue.admitted == ["other", "full"]


async def test_errors_and_cancelled_calls_leave_nothing(queue):
    def refuse():
        raise InvalidRequest("never")

    with pytest.raises(InvalidRequest):
        await (await queue.ask("a", reserve=refuse))
    for client in "abc":
        await queue.ask(client)
    queue.tasks[-1].cancel()
    await asyncio.wait(queue.tasks)
    assert (queue.admission.num_waiting, queue.admission.num_open) == (0, 2)
    with pytest.raises(Overloaded, match=r"no slot came free within 0\.05 s"):
        await make(max_open=0, max_wait_s=0.05).admit(lambda: True)
