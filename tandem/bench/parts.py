"""The parts of a round, each timed alone: target step, verification, drafting, the network between the services.

Rounds are run here one part after the other, straight against the model services: all sessions draft, then all are
verified. What the services report about their own work is left of a call's duration; the rest is network,
serialisation and hand-overs. Nothing overlaps and nothing adapts, so the costs are those the limits are made of.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from gateway.placement.routing import Router
from specdec import codec
from specdec.backends import DraftSession, TargetSession
from specdec.errors import Unavailable
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.types import Proposal, SessionSpec, Verdict
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from tandem.bench.limits import quantile

Prompt = tuple[int, ...]

#: A step counts when it holds at least this share of the sessions: those that came early or late cost less.
_FULL: Final = 0.75


@dataclass(slots=True)
class Samples:
    """Nanoseconds, an entry per session and step; beside those of the target how many sessions the step held."""

    #: Target step without drafts: forward pass and sampling.
    decode: list[tuple[int, int]] = field(default_factory=list)
    #: The same for rounds that carry all k drafts.
    verify: list[tuple[int, int]] = field(default_factory=list)
    #: Drafting k tokens.
    draft: list[int] = field(default_factory=list)
    #: What a round waits for the target, and a proposal for the draft, beyond work and queue.
    target_wire: list[int] = field(default_factory=list)
    draft_wire: list[int] = field(default_factory=list)
    #: Of rounds alone: sampling and verification; and with a schema filling masks, and waiting for them.
    rules: list[int] = field(default_factory=list)
    mask_fill: list[int] = field(default_factory=list)
    mask_wait: list[int] = field(default_factory=list)
    #: Bytes of a round's four messages.
    wire_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Medians, in milliseconds, and the ratios the limits are computed from."""

    decode_ms: float
    verify_ms: float
    #: One drafted token.
    draft_ms: float
    #: Network and serialisation of one round, to the target and to the draft.
    wire_ms: float
    #: Advance, proposal, round and verdict of one round, as protobuf messages.
    wire_bytes: float
    #: Of a round: sampling and verification; filling a schema's masks beside the forward pass, and waiting for them.
    rules_ms: float = 0.0
    mask_fill_ms: float = 0.0
    mask_wait_ms: float = 0.0

    @property
    def c(self) -> float:
        """Draft step / target step."""
        return self.draft_ms / self.decode_ms

    @property
    def d(self) -> float:
        """Network and serialisation of a round / target step."""
        return self.wire_ms / self.decode_ms

    @property
    def verify_ratio(self) -> float:
        """Verifying k drafts / decoding one token: 1 where the forward pass is bound by reading the weights."""
        return self.verify_ms / self.decode_ms


async def time_parts(
    router: Router, batches: Sequence[Sequence[Prompt]], params: SamplingParams, rule: Rule | None, k: int
) -> RoundCosts:
    """Decode each batch of prompts plainly, then in rounds of k drafts, and take the medians.

    Raises :class:`Unavailable` when no draft service takes part, or no round carried all k drafts.
    """
    if not router.drafts.usable:
        raise Unavailable("no draft service takes part: lookups draft in the gateway")
    samples = Samples()
    for batch in batches:
        await _decode(router, batch, params, samples)
        await _rounds(router, batch, params=params, rule=rule, k=k, samples=samples)
    if not samples.verify or not samples.draft or not samples.decode:
        raise Unavailable(f"no round verified all {k} drafted tokens; take longer answers or check the draft's log")
    size = len(batches[0])
    return RoundCosts(
        decode_ms=_of_full_steps(samples.decode, size) / 1e6,
        verify_ms=_of_full_steps(samples.verify, size) / 1e6,
        draft_ms=quantile(samples.draft, 0.5) / 1e6 / k,
        wire_ms=(quantile(samples.target_wire, 0.5) + quantile(samples.draft_wire, 0.5)) / 1e6,
        wire_bytes=quantile(samples.wire_bytes, 0.5),
        rules_ms=quantile(samples.rules, 0.5) / 1e6,
        mask_fill_ms=quantile(samples.mask_fill, 0.5) / 1e6,
        mask_wait_ms=quantile(samples.mask_wait, 0.5) / 1e6,
    )


def _of_full_steps(entries: Sequence[tuple[int, int]], num_sessions: int) -> float:
    """Median duration of the steps that held (nearly) all sessions; of the fullest ones where none did."""
    enough = min(max(held for held, _ in entries), _FULL * num_sessions)
    return quantile([spent for held, spent in entries if held >= enough], 0.5)


def _spec(prompt: Prompt, params: SamplingParams, rule: Rule | None, k: int) -> SessionSpec:
    # The gateway's preparation draws seeds; what they are does not matter here.
    return SessionSpec(
        session_id=uuid.uuid4().hex,
        token_ids=prompt,
        prompt_len=len(prompt),
        params=params.with_seed(hash(prompt)),
        rule=rule,
        num_speculative_tokens=k,
    )


async def _decode(router: Router, batch: Sequence[Prompt], params: SamplingParams, samples: Samples) -> None:
    backend = router.targets.usable[0].backend

    async def one(prompt: Prompt) -> None:
        session = await backend.open(_spec(prompt, params, None, 0))
        try:
            verdict = session.first
            session.multi_step_decode(verdict.committed_len, (params.max_tokens or 2) - 1)
            while verdict.finish_reason is None:
                verdict = await session.receive()
                samples.decode.append(_work(verdict))
        finally:
            await session.close()

    await asyncio.gather(*(one(prompt) for prompt in batch))


async def _rounds(
    router: Router, batch: Sequence[Prompt], *, params: SamplingParams, rule: Rule | None, k: int, samples: Samples
) -> None:
    """Rounds of all sessions in step, until the first of them has no room for another full one."""
    end = min(map(len, batch)) + (params.max_tokens or 1)
    async with AsyncExitStack() as stack:
        pairs = await asyncio.gather(*(_Pair.open(router, _spec(prompt, params, rule, k), stack) for prompt in batch))
        while all(not pair.ended and len(pair.token_ids) + k + 1 <= end for pair in pairs):
            proposals = await asyncio.gather(*(pair.propose(k, samples) for pair in pairs))
            verdicts = zip(pairs, proposals, strict=True)
            await asyncio.gather(*(pair.verify(proposal, k, samples) for pair, proposal in verdicts))


class _Pair:
    """A session on the target and one on the draft."""

    def __init__(self, target: TargetSession, draft: DraftSession, spec: SessionSpec) -> None:
        self._target, self._draft = target, draft
        self.token_ids = [*spec.token_ids, *target.first.token_ids]
        #: The target's hidden states that the draft was not told yet.
        self._states = list(target.first.hidden_states)
        self.ended = target.first.finish_reason is not None
        self._is_structured = spec.params.structured_outputs is not None
        self._known_len = len(spec.token_ids)

    @classmethod
    async def open(cls, router: Router, spec: SessionSpec, stack: AsyncExitStack) -> _Pair:
        states = router.hidden_states_spec(spec.session_id)
        target = await router.targets.usable[0].backend.open(states.asked_in(spec))
        stack.push_async_callback(target.close)
        draft = await router.drafts.usable[0].backend.open(spec)
        stack.push_async_callback(draft.close)
        return cls(target, draft, spec)

    async def propose(self, k: int, samples: Samples) -> tuple[Proposal, int]:
        """A proposal, and the bytes of asking for it."""
        base_len, news = self._known_len, self.token_ids[self._known_len :]
        states, self._states = self._states, []
        started = time.perf_counter_ns()
        await self._draft.advance(base_len, news, k, hidden_states=states)
        proposal = await self._draft.receive()
        wall = time.perf_counter_ns() - started
        self._known_len = len(self.token_ids)
        if len(proposal.token_ids) == k:
            samples.draft.append(proposal.draft_ns)
            samples.draft_wire.append(wall - proposal.draft_ns - proposal.queue_ns)
        message = draft_pb.Advance(
            epoch=1,
            base_len=base_len,
            token_ids=news,
            num_draft_tokens=k,
            hidden_states=map(codec.encode_hidden_states, states),
        )
        return proposal, draft_pb.DraftRequest(advance=message).ByteSize()

    async def verify(self, asked: tuple[Proposal, int], k: int, samples: Samples) -> None:
        """Verify what was proposed."""
        proposal, advance_bytes = asked
        started = time.perf_counter_ns()
        self._target.offer(proposal)
        verdict = await self._target.receive()
        wall = time.perf_counter_ns() - started
        # A grammar cuts proposals: then rounds with fewer drafts count, too.
        if verdict.num_draft_tokens == k or (self._is_structured and verdict.num_draft_tokens):
            work = _work(verdict)
            samples.rules.append(verdict.timings.verify_ns)
            samples.mask_fill.append(verdict.timings.mask_fill_ns)
            samples.mask_wait.append(verdict.timings.mask_wait_ns)
            samples.verify.append(work)
            samples.target_wire.append(wall - work[1] - verdict.timings.queue_ns)
            samples.wire_bytes.append(advance_bytes + _round_bytes(len(self.token_ids), proposal, verdict))
        self.token_ids += verdict.token_ids
        self._states += verdict.hidden_states
        self.ended = verdict.finish_reason is not None


def _work(verdict: Verdict) -> tuple[int, int]:
    timings = verdict.timings
    return timings.batch_sessions, timings.forward_ns + timings.verify_ns


def _round_bytes(committed_len: int, proposal: Proposal, verdict: Verdict) -> int:
    """Bytes of a proposal, once from the draft and once to the target, and of its verdict."""
    encoded = codec.encode_proposal(proposal)
    answer = draft_pb.DraftResponse(proposal=encoded)
    request = target_pb.VerifyRequest(round=target_pb.Round(epoch=1, committed_len=committed_len, proposal=encoded))
    return (
        answer.ByteSize()
        + request.ByteSize()
        + target_pb.VerifyResponse(verdict=codec.encode_verdict(verdict)).ByteSize()
    )
