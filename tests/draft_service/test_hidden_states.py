"""A drafter that reads hidden states gets them with the tokens, in order, whatever runs meanwhile."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from draft_service import servicer as servicer_module
from draft_service.core import DraftCore
from draft_service.servicer import DraftServicer
from gateway.backends.draft import GrpcDraft
from specdec import hidden_state_buffer as state_buffer
from specdec.errors import InvalidRequest
from specdec.rpc.channel import open_channel
from specdec.rpc.server import RpcServer
from specdec.settings import SchedulerSettings, ServerSettings
from specdec.types import HiddenStates
from specdec.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from tests.readers import StateReader

PROMPT = [3, 14, 15, 9, 26, 5]


def row(position, text="a"):
    return bytes([position]) + text.encode() * 3


def states(start, end, text="a"):
    return HiddenStates(start, 2, "bfloat16", b"".join(row(position, text) for position in range(start, end)))


def rows(start, end, text="a"):
    return {position: row(position, text) for position in range(start, end)}


@asynccontextmanager
async def reading_core(propose=lambda reading: (len(reading.token_ids),) * 4):
    core = DraftCore(StateReader(propose), SchedulerSettings())
    try:
        yield core
    finally:
        await core.close()


async def ask(session, base_len, token_ids, *hidden_states, k=4):
    await session.advance(base_len, token_ids, k, hidden_states)
    return await session.receive()


async def test_states_come_with_their_tokens(spec):
    async with reading_core() as core:
        session = await core.open(spec(PROMPT))
        (reading,) = core.drafter.readings
        assert (await ask(session, 6, [1])).token_ids == ()  # nothing is known yet
        proposal = await ask(session, 7, [2, 3], states(0, 8))
        assert (proposal.base_len, proposal.token_ids) == (9, (9,) * 4)
        assert reading.rows == rows(0, 8)
        assert reading.num_pending == 0
        await session.advance(9, [4], 0, [states(8, 9)])  # the prefix moves, nothing is asked for
        assert (await ask(session, 10, [5], states(9, 10))).token_ids == (11,) * 4
        assert reading.rows == rows(0, 10)
        await session.close()


async def test_states_may_come_after_their_tokens(spec):
    async with reading_core() as core:
        session = await core.open(spec(PROMPT))
        assert (await ask(session, 6, [1, 2, 3])).token_ids == ()
        assert (await ask(session, 9, [], states(2, 8))).token_ids == (9,) * 4  # a gap at the start
        assert core.drafter.readings[0].rows == rows(2, 8)
        await session.close()


async def test_positions_that_are_known_are_ignored(spec):
    async with reading_core() as core:
        session = await core.open(spec(PROMPT))
        await ask(session, 6, [1], states(0, 6))
        await ask(session, 7, [2], states(0, 7, "b"))  # from another replica, the prompt's again
        assert core.drafter.readings[0].rows == rows(0, 6) | rows(6, 7, "b")
        await session.close()


async def test_taking_tokens_back_takes_their_states_back(spec):
    async with reading_core() as core:
        session = await core.open(spec(PROMPT))
        await ask(session, 6, [1, 2, 3], states(0, 8))
        proposal = await ask(session, 6, [1, 7, 8], states(6, 8, "b"))
        assert (proposal.base_len, proposal.token_ids) == (9, (9,) * 4)
        # Position 6 holds token 1 as before; 7 holds another token now.
        assert core.drafter.readings[0].rows == rows(0, 7) | rows(7, 8, "b")
        await session.close()


async def test_messages_that_arrive_while_a_batch_runs_are_taken_in_in_order(spec):
    async with reading_core() as core:
        drafter = core.drafter
        session = await core.open(spec(PROMPT))
        (reading,) = drafter.readings
        drafter.gate.clear()
        await session.advance(6, [1], 4, [states(0, 6)])
        while core.batcher.in_flight is None:  # noqa: ASYNC110 (no event tells it)
            await asyncio.sleep(0)
        for position in range(7, 12):
            await session.advance(position, [position], 4, [states(position - 1, position)])
        assert reading.rows == rows(0, 6)  # the state is in the drafter's hands
        drafter.gate.set()
        proposal = await session.receive()
        while proposal.base_len < 12:
            proposal = await session.receive()
        assert proposal.token_ids == (12,) * 4
        assert reading.rows == rows(0, 11)
        assert reading.token_ids == [*PROMPT, 1, 7, 8, 9, 10, 11]
        await session.close()


async def test_states_of_positions_that_are_not_committed_are_refused(spec):
    async with reading_core() as core:
        session = await core.open(spec(PROMPT))
        with pytest.raises(InvalidRequest, match="reach position 7, but 7 tokens"):
            await ask(session, 6, [1], states(0, 8))
        assert core.drafter.readings[0].rows == {}
        assert (await ask(session, 6, [1], states(0, 7))).token_ids == (7,) * 4  # the session itself is well
        await session.close()


async def test_drafters_that_read_no_states_never_see_states(start_core, spec, greedy):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        assert (await ask(session, 6, [1], states(0, 6))).token_ids == greedy([*PROMPT, 1], 4)
        await session.close()


async def test_states_travel_in_messages_of_bounded_size(spec, monkeypatch):
    monkeypatch.setattr(state_buffer.pieces, "__defaults__", (10,))
    sizes = []
    decode = servicer_module.codec.decode_hidden_states

    def noted(message):
        sizes.append(len(message.data))
        return decode(message)

    monkeypatch.setattr(servicer_module.codec, "decode_hidden_states", noted)
    async with reading_core() as core:
        server = RpcServer(ServerSettings())
        server.add(add_DraftServiceServicer_to_server, DraftServicer(core), "specdec.v1.DraftService")
        await server.start()
        channel = open_channel(server.address)
        try:
            backend = GrpcDraft(channel)
            assert (await backend.info()).hidden_state_layers == (-1,)
            session = await backend.open(spec(PROMPT))
            assert (await ask(session, 6, [1], states(0, 6))).token_ids == (7,) * 4
            assert (await ask(session, 7, [2, 3], states(6, 8))).token_ids == (9,) * 4
            assert sizes == [8, 8, 8, 8]
            assert core.drafter.readings[0].rows == rows(0, 8)
            await session.close()
        finally:
            await channel.close()
            await server.stop()
