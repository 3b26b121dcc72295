"""First layers of heads on their way to a target: once at a time, with whose they are, and not again where refused."""

import asyncio
import logging

from gateway.placement import state_map_carrier
from gateway.placement.state_map_carrier import StateMapCarrier
from specdec.errors import InternalError, Overloaded
from specdec.params import SamplingParams
from specdec.types import SessionSpec
from specdec.v1.types_pb2 import StateMapPart

SPEC = SessionSpec(
    session_id="s",
    token_ids=(1,),
    prompt_len=1,
    params=SamplingParams(),
    client="key",
    max_kv_share=0.25,
    hidden_state_map="ab" * 32,
)


class Draft:
    """Sends two parts."""

    error = None

    async def state_map(self, fingerprint):
        if self.error is not None:
            raise self.error
        yield StateMapPart(fingerprint=fingerprint, num_bytes=4, data=b"ab")
        yield StateMapPart(data=b"cd")


class Target:
    """Keeps what came."""

    error = None

    def __init__(self):
        self.came = []

    async def put_state_map(self, parts):
        self.came.append([part async for part in parts])
        if self.error is not None:
            raise self.error


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_map_is_brought_once_at_a_time():
    carrier, target, draft = StateMapCarrier(), Target(), Draft()
    for _ in range(3):
        carrier.carry("t", target, draft, SPEC)
    await settle()
    ((first, second),) = target.came
    assert (first.fingerprint, first.client, first.max_share, first.data) == ("ab" * 32, "key", 0.25, b"ab")
    assert (second.client, second.HasField("max_share"), second.data) == ("", False, b"cd")
    carrier.carry("t", target, object(), SPEC)  # a draft that hands nothing out
    carrier.carry("t", object(), draft, SPEC)  # an engine
    carrier.carry("t", target, draft, SPEC)  # it was given up meanwhile
    await settle()
    assert len(target.came) == 2


async def test_what_was_refused_is_offered_later(monkeypatch, caplog):
    carrier, target, draft = StateMapCarrier(), Target(), Draft()
    target.error = Overloaded("no room")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            carrier.carry("t", target, draft, SPEC)
            await settle()
        assert len(target.came) == 1
        assert [record.message for record in caplog.records] == [
            "target t cannot run the first layer of the draft's head: no room"
        ]
        now_s = state_map_carrier.time.monotonic() + state_map_carrier.RETRY_S
        monkeypatch.setattr(state_map_carrier.time, "monotonic", lambda: now_s)
        carrier.carry("t", target, draft, SPEC)
        await settle()
        assert (len(target.came), len(caplog.records)) == (2, 1)
        draft.error = InternalError("an older draft does not know the call")
        carrier.carry("other", target, draft, SPEC)
        await settle()
        assert "an older draft" in caplog.records[-1].message
    assert len(target.came) == 2
