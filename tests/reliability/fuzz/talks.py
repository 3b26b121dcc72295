"""Conversations on one internal stream: an opening and what follows, sent as raw bytes to a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from hypothesis import strategies as st

from specdec.rpc.session_stream import WRITE_FAILED
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as pb
from tests.reliability.fuzz.messages import Damage, damages, variations_of

#: Seconds a stream may take to end once its client has nothing more to say.
PATIENCE_S = 20.0
#: How a stream may end. INTERNAL and UNKNOWN are not among them: those are faults of ours.
ENDS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
PROMPT = [3, 14, 15, 9, 26, 5]


@dataclass(frozen=True)
class Step:
    """One message after the opening."""

    message: Message
    damage: Damage
    #: Whether epoch and lengths are made to fit the session, and whether an answer is waited for.
    fits: bool
    waits: bool


@dataclass(frozen=True)
class Talk:
    """What a client says on one stream, and whether it leaves or ends it in order."""

    opening: Message
    damage: Damage
    steps: list[Step]
    leaves: bool


@dataclass
class Known:
    """What the client knows of the session."""

    epoch: int = 0
    length: int = 0
    #: Positions whose hidden states were sent.
    num_states: int = 0


Fit = Callable[[Message, Known], None]


def talks_of(opening: Message, *steps: Message) -> st.SearchStrategy[Talk]:
    """Talks that begin with a variation of ``opening`` and continue with variations of ``steps``."""
    one = st.one_of([variations_of(step, 2) for step in steps])
    return st.builds(
        Talk,
        variations_of(opening, 2),
        damages,
        st.lists(st.builds(Step, one, damages, st.integers(0, 4).map(bool), st.booleans()), max_size=5),
        st.integers(0, 5).map(lambda number: number == 0),
    )


_LIMITS = {"prompt_len": len(PROMPT), "max_tokens": 24, "num_speculative_tokens": 4, "token_ids": PROMPT, "epoch": 1}
_SAMPLING = pb.SamplingParams(temperature=0.8, seed=7)
_PROPOSAL = pb.Proposal(token_ids=[1, 2, 3], base_len=7, epoch=1)
TARGET_TALKS = st.one_of(
    [
        talks_of(
            target_pb.VerifyRequest(open=target_pb.OpenTargetSession(**_LIMITS, sampling=_SAMPLING, verification=rule)),
            target_pb.VerifyRequest(round=target_pb.Round(epoch=1, committed_len=7, proposal=_PROPOSAL)),
            target_pb.VerifyRequest(
                multi_step_decode=target_pb.MultiStepDecode(epoch=1, committed_len=7, num_tokens=5)
            ),
        )
        for rule in (pb.VERIFICATION_RULE_TOKEN, pb.VERIFICATION_RULE_COUPLED)
    ]
)


def draft_talks(num_features: int) -> st.SearchStrategy[Talk]:
    """Talks with a drafter that reads hidden states of so many numbers, or none."""
    advance = draft_pb.Advance(epoch=1, base_len=6, token_ids=[1, 2], num_draft_tokens=4)
    steps = [draft_pb.DraftRequest(advance=advance)]
    if num_features:
        states = pb.HiddenStates(num_features=num_features, dtype="float32", data=bytes(4 * num_features))
        advance.hidden_states.append(states)
        steps += [draft_pb.DraftRequest(advance=advance), draft_pb.DraftRequest(hidden_states=states)]
    opening = draft_pb.OpenDraftSession(**_LIMITS, sampling=_SAMPLING, verification=pb.VERIFICATION_RULE_BLOCK)
    return talks_of(draft_pb.DraftRequest(open=opening), *steps)


def engine_talks() -> st.SearchStrategy[Talk]:
    """Talks of an engine with several sessions on one stream."""
    openings = [
        draft_pb.OpenDraftSession(**_LIMITS, session_id=name, sampling=pb.SamplingParams(temperature=0.0))
        for name in ("a", "b")
    ]
    advance = draft_pb.Advance(base_len=6, token_ids=[1, 2], num_draft_tokens=4)
    advances = [draft_pb.SessionAdvance(session_id=name, advance=advance) for name in ("a", "b", "c")]
    return talks_of(
        draft_pb.DraftStepRequest(step=1, open=openings, advances=advances[:2], timeout_ms=50),
        draft_pb.DraftStepRequest(step=2, advances=advances, timeout_ms=50),
        draft_pb.DraftStepRequest(step=3, close=["b"], open=openings[:1], advances=advances[:1], timeout_ms=5),
    )


def fit_engine(message: Message, known: Known) -> None:
    """Continue each session where it stands."""
    for each in message.advances:
        each.advance.base_len = known.length
    if message.advances:
        known.length += len(message.advances[0].advance.token_ids)
    message.timeout_ms = min(message.timeout_ms, 100)


def fit_target(message: Message, known: Known) -> None:
    """Make a round or multi-step decode one from where the session stands."""
    kind = message.WhichOneof("kind")
    if kind in ("round", "multi_step_decode"):
        inner = getattr(message, kind)
        inner.epoch, inner.committed_len = known.epoch, known.length
        if kind == "round" and inner.HasField("proposal"):
            inner.proposal.epoch, inner.proposal.base_len = known.epoch, known.length


def fit_draft(message: Message, known: Known) -> None:
    """Make an advance one from where the session stands, with hidden states of all positions so far."""
    if message.WhichOneof("kind") != "advance":
        return
    advance = message.advance
    advance.epoch, advance.base_len = known.epoch, known.length
    known.length += len(advance.token_ids)
    if advance.hidden_states:
        states, num_rows = advance.hidden_states[0], known.length - 1 - known.num_states
        row = 4 * states.num_features
        if 0 < num_rows < 100 and states.dtype == "float32" and 0 < row <= len(states.data):
            states.start, states.data = known.num_states, states.data[:row] * num_rows
            known.num_states += num_rows


async def hold(call: Any, talk: Talk, fit: Fit, read: Callable[[bytes, Known], None]) -> grpc.StatusCode:
    """Hold a talk on a call of raw bytes; how the stream ended. Raises TimeoutError where it did not."""
    opening = talk.opening
    known = Known(length=len(PROMPT))
    if "kind" in opening.DESCRIPTOR.oneofs_by_name and opening.WhichOneof("kind") == "open":
        known = Known(opening.open.epoch, len(opening.open.token_ids))
    answered = asyncio.Event()

    async def read_all() -> None:
        while (data := await call.read()) is not grpc.aio.EOF:
            read(data, known)
            answered.set()

    reading = asyncio.create_task(read_all())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _write(call, talk.damage.apply(opening.SerializeToString()))
            await asyncio.sleep(0)
            for step in talk.steps:
                message = type(step.message)()
                message.CopyFrom(step.message)
                if step.fits:
                    fit(message, known)
                answered.clear()
                await _write(call, step.damage.apply(message.SerializeToString()))
                if step.waits and not reading.done():
                    waiter = asyncio.create_task(answered.wait())
                    await asyncio.wait((waiter, reading), timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                    waiter.cancel()
            if talk.leaves:
                call.cancel()
            else:
                await _end(call)
            code = await call.code()
            if code is grpc.StatusCode.INTERNAL and await call.details() == WRITE_FAILED:
                return grpc.StatusCode.CANCELLED  # gRPC's own word for a write after the server's end of the stream
            return code
    finally:
        call.cancel()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _write(call: Any, data: bytes) -> None:
    """Send, unless the stream is over: its status says why."""
    if not call.done():
        await asyncio.gather(call.write(data), return_exceptions=True)


async def _end(call: Any) -> None:
    if not call.done():
        await asyncio.gather(call.done_writing(), return_exceptions=True)


def read_verdict(data: bytes, known: Known) -> None:
    """Follow what the target has committed."""
    answer = target_pb.VerifyResponse.FromString(data)
    if answer.WhichOneof("kind") == "verdict":
        known.length = answer.verdict.base_len + len(answer.verdict.token_ids)


def read_step(data: bytes, known: Known) -> None:
    """An answer must be readable."""
    draft_pb.DraftStepResponse.FromString(data)


def read_proposal(data: bytes, known: Known) -> None:
    """A proposal must be readable; the client knows the length already."""
    draft_pb.DraftResponse.FromString(data)
