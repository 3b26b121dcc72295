"""A draft that dials a gateway: the service's sessions over one call, and calls that are lost."""

import asyncio
import logging
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from draft_service import attaching
from draft_service.attaching import AttachedDraft
from specdec import codec
from specdec.errors import InvalidRequest
from specdec.rpc.channel import open_channel
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from tests.until import until

PROMPT = [3, 14, 15, 9, 26, 5]
TOKEN = "t" * 32


class ScriptedGateway(pb_grpc.GenerationServiceServicer):
    """Each call goes to the next of its scripts."""

    def __init__(self, *scripts):
        self.scripts = [*scripts]
        self.attached = []

    async def AttachDraft(self, request_iterator, context):
        self.attached.append((await context.read()).attach)
        script = self.scripts.pop(0) if self.scripts else stay
        await script(Calls(context))


class Calls:
    """The gateway's end of a call."""

    def __init__(self, context):
        self.context = context

    async def accept(self):
        await self.context.write(pb.AttachDraftResponse(attached=pb.Attached()))

    async def ask(self, session, **request):
        message = draft_pb.DraftRequest(**request) if request else None
        relayed = draft_pb.RelayedRequest(session=session, request=message)
        await self.context.write(pb.AttachDraftResponse(relayed=relayed))

    async def answer(self):
        return await self.context.read()


async def stay(gateway):
    await gateway.accept()
    await gateway.answer()


async def refuse(gateway):
    raise InvalidRequest("no such draft")


async def leave(gateway):
    """End the call as a server that stops."""


@asynccontextmanager
async def dialing(gateway, **parts):
    """The draft while it serves, and the task that does."""
    server = RpcServer(ServerSettings())
    server.add(pb_grpc.add_GenerationServiceServicer_to_server, gateway, "specdec.v1.GenerationService")
    await server.start()
    async with open_channel(server.address) as channel:
        draft = AttachedDraft(pb_grpc.GenerationServiceStub(channel).AttachDraft, "here", TOKEN, **parts)
        task = asyncio.create_task(draft.run())
        try:
            yield draft, task
        finally:
            task.cancel()
            await asyncio.wait((task,))
            await server.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(attaching, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(attaching, "LOOK_S", 0.01)


async def test_sessions_of_one_call_are_those_of_the_service(start_core, spec, greedy):
    done = asyncio.Event()

    async def script(gateway):
        await gateway.accept()
        opening = codec.encode_open_draft(spec(PROMPT)).open
        for session in (1, 2):
            await gateway.ask(session, open=opening)
        opened = [(await gateway.answer()).relayed for _ in range(2)]
        assert {each.session for each in opened} == {1, 2}
        assert all(each.response.opened.streams for each in opened)
        epoch = opened[0].response.opened.epoch
        for session, token in ((1, 1), (2, 2)):
            advance = draft_pb.Advance(epoch=epoch, base_len=6, token_ids=[token], num_draft_tokens=3)
            await gateway.ask(session, advance=advance)
        drafted = {each.session: each for each in [(await gateway.answer()).relayed for _ in range(2)]}
        for session, token in ((1, 1), (2, 2)):
            assert tuple(drafted[session].response.proposal.token_ids) == greedy([*PROMPT, token], 3)
        # A message that cannot be read ends its session alone; one for a session that is over is dropped.
        await gateway.ask(1, open=opening)
        broken = (await gateway.answer()).relayed
        assert (broken.session, "only the first message" in broken.error) == (1, True)
        await gateway.ask(1, advance=draft_pb.Advance(epoch=epoch))
        await gateway.ask(2)
        await gateway.ask(3, advance=draft_pb.Advance(epoch=epoch))
        done.set()
        await gateway.answer()

    async with start_core() as core:
        gateway = ScriptedGateway(script)
        async with dialing(gateway, core=core):
            await asyncio.wait_for(done.wait(), 20)

            async def is_free():
                return (await core.load()).open_sessions == 0

            await until(is_free)
        assert gateway.attached[0].token == TOKEN
        assert gateway.attached[0].draft.vocab_size == core.drafter.info.vocab_size


async def test_a_lost_call_is_made_again_and_its_sessions_end(start_core, spec, caplog):
    async def script(gateway):
        await gateway.accept()
        await gateway.ask(1, open=codec.encode_open_draft(spec(PROMPT)).open)
        await gateway.answer()

    caplog.set_level(logging.INFO)
    async with start_core() as core:
        gateway = ScriptedGateway(script, leave, script)
        async with dialing(gateway, core=core) as (draft, _):
            await until(lambda: len(gateway.attached) == 4 and draft.attached.is_set())
            assert (await core.load()).open_sessions == 0
    lines = [record.getMessage() for record in caplog.records if record.name == attaching.logger.name]
    assert [line.partition(":")[0] for line in lines] == [
        "attached to here", "not attached to here", "not attached to here", "attached to here", "not attached to here",
        "attached to here",
    ]  # fmt: skip
    assert [line[-5:] for line in lines if "again" in line] == ["0.0 s"] * 3


async def test_a_refusal_ends_it():
    async with dialing(ScriptedGateway(refuse)) as (_, task):
        with pytest.raises(InvalidRequest, match="no such draft"):
            await asyncio.wait_for(task, 10)


async def test_a_file_is_sent_whenever_its_text_changes(tmp_path):
    file, texts = tmp_path / "buffer", []

    async def script(gateway):
        await gateway.accept()
        while (message := await gateway.answer()) is not grpc.aio.EOF:
            texts.append(message.prediction)

    async with dialing(ScriptedGateway(script), prediction=file):
        await until(lambda: texts == [""])
        for count, text in enumerate(("one", "two", "two", "x" * (attaching.MAX_TEXT_BYTES + 5)), 2):
            file.write_text(text)
            expected = min(count, 3) if text == "two" else min(count, 4)
            await until(lambda expected=expected: len(texts) == expected)
    assert [texts[0], texts[1], texts[2], len(texts[3])] == ["", "one", "two", attaching.MAX_TEXT_BYTES]
