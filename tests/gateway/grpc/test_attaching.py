"""The rate at which an attachment's messages are read."""

import asyncio

import grpc.aio
import pytest

from gateway.access.caller import Caller
from gateway.grpc import attaching
from gateway.grpc.attaching import paced, serve_attachment
from gateway.requests.types import GenerationRequest
from specdec.errors import InvalidRequest, Overloaded
from specdec.params import SamplingParams
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import generation_service_pb2 as pb
from tests.until import until

ATTACH = pb.Attachment(token="t" * 32)


class FloodingCall:
    """Its messages are always there."""

    def __init__(self, *messages):
        self.messages = iter(messages)

    async def read(self):
        return next(self.messages, grpc.aio.EOF)


class SlowClock:
    """Time passes where somebody sleeps."""

    def __init__(self):
        self.now_s = 7.0

    def monotonic(self):
        return self.now_s

    async def sleep(self, duration_s):
        self.now_s += duration_s


@pytest.mark.parametrize(
    ("sizes", "wait_s"),
    [
        ([10] * 350, 0.5),
        ([10] * 90, 0.0),
        ([2**20] * 5, 3.0),
        ([2**20, *[10] * 90], 0.0),  # a prediction holds up no proposal
    ],
)
async def test_what_comes_too_fast_is_read_later(sizes, wait_s, monkeypatch):
    clock = SlowClock()
    monkeypatch.setattr(attaching, "time", clock)
    monkeypatch.setattr(attaching.asyncio, "sleep", clock.sleep)
    call = FloodingCall(*[bytes(size) for size in sizes])
    assert [len(raw) async for raw in paced(call)] == sizes
    assert clock.now_s == pytest.approx(7.0 + wait_s, abs=0.02)


class SilentReader:
    """A client that takes one message and no other."""

    def __init__(self):
        self.messages = asyncio.Queue()
        self.ends = []

    async def read(self):
        return await self.messages.get()

    async def write(self, message):
        if message.WhichOneof("kind") != "attached":
            await asyncio.Event().wait()

    def cancel(self, error):
        self.ends.append(error)
        self.messages.put_nowait(grpc.aio.EOF)


async def test_a_client_that_reads_nothing_is_left(make_generation):
    attachments = make_generation().attachments
    call = SilentReader()
    call.messages.put_nowait(pb.AttachDraftRequest(attach=ATTACH).SerializeToString())
    serving = asyncio.create_task(serve_attachment(attachments, call))
    await until(lambda: len(attachments))
    (attachment, _) = attachments.find(Caller(), ATTACH.token)
    session = attachment.open_relayed(lambda answer: None)
    await asyncio.sleep(0)  # the first message leaves
    for _ in range(attaching.MAX_WAITING):
        session.post(draft_pb.DraftRequest())
    assert call.ends == []
    session.post(draft_pb.DraftRequest())
    assert [type(error) for error in call.ends] == [Overloaded]
    await serving
    assert not len(attachments)


@pytest.mark.parametrize("messages", [(), (pb.AttachDraftRequest(prediction="x").SerializeToString(),)])
async def test_a_call_begins_with_attach(make_generation, messages):
    with pytest.raises(InvalidRequest, match="the first message of a call must be attach"):
        await serve_attachment(make_generation().attachments, FloodingCall(*messages))


@pytest.mark.parametrize(
    ("token", "prediction", "expected"),
    [("t" * 32, "", 5), ("u" * 32, "", 0), ("t" * 32, "say something else", 0)],
)
async def test_a_request_is_drafted_from_what_its_attachment_predicts(
    make_generation, script, token, prediction, expected
):
    """Unless it has a prediction of its own; the text is tokenized once."""
    generation = make_generation()
    text = generation.tokenizer.decode(script.expect(3, 60))
    with generation.attachments.join(Caller(), "t" * 32, None, print, print) as attachment:
        attachment.prediction = text
        request = GenerationRequest(
            prompt=script.expect(0, 3),
            params=SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
            attachment=token,
            prediction=prediction,
        )
        result = await generation.generate(request)
        assert list(result.samples[0].token_ids) == script.expect(3, 40)
        num_accepted = result.samples[0].final.speculation.num_accepted_predicted_tokens
        assert (num_accepted > expected) if expected else (num_accepted == 0)
        assert isinstance(attachment.prediction, str) is (not expected)


async def test_a_target_that_asks_nothing_through_the_gateway_decodes_by_itself(make_generation, script):
    """Such as one in this process."""
    generation, token = make_generation(), "t" * 32
    with generation.attachments.join(Caller(), token, generation.router.model(), print, print):
        request = GenerationRequest(
            prompt=script.expect(0, 3),
            params=SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
            attachment=token,
        )
        result = await generation.generate(request)
    assert list(result.samples[0].token_ids) == script.expect(3, 40)
    assert result.samples[0].final.speculation.num_draft_tokens == 0
    assert result.samples[0].final.speculation.num_draft_failures == 1
