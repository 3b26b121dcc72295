"""Where a round's time goes: backends wrapped in stop-watches under the gateway's own decoding loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from gateway.decoding import Decoder, DecodingRequest
from gateway.routing import Replica, Router
from specdec.errors import Unavailable
from specdec.sampling.params import SamplingParams
from specdec.sessions import (
    DraftBackend,
    DraftOpened,
    DraftSession,
    ModelInfo,
    Proposal,
    Rule,
    ServerLoad,
    SessionSpec,
    TargetBackend,
    TargetOpened,
    TargetSession,
    Verdict,
)
from tandem.bench.limits import quantile


@dataclass(slots=True)
class Samples:
    """Nanoseconds, one entry per step or round."""

    #: Target step without drafts, forward pass and verification.
    decode: list[int] = field(default_factory=list)
    #: The same for rounds that carry all k drafts.
    verify: list[int] = field(default_factory=list)
    #: What a round waits for the target beyond its work: network, serialisation, hand-overs.
    target_wire: list[int] = field(default_factory=list)
    #: Drafting k tokens.
    draft: list[int] = field(default_factory=list)
    #: What a proposal waits for the draft beyond its work.
    draft_wire: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians, in milliseconds, and the ratios the limits are computed from."""

    decode_ms: float
    verify_ms: float
    #: One drafted token.
    draft_ms: float
    #: Network and serialisation of one round, to the target and to the draft.
    wire_ms: float

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


async def probe(
    router: Router, batches: Sequence[Sequence[tuple[int, ...]]], params: SamplingParams, rule: Rule | None, k: int
) -> Costs:
    """Decode each batch of prompts plainly and with k drafts a round, and take the medians of what was timed.

    Raises :class:`Unavailable` when no round carried all k drafts.
    """
    samples = Samples()
    with_stopwatches = _watched(router, samples, k)
    decoder = Decoder(with_stopwatches)
    for batch in batches:
        for drafts in (0, k):
            await asyncio.gather(*(_decode(decoder, prompt, params, rule, drafts) for prompt in batch))
    if not samples.verify or not samples.draft or not samples.decode:
        raise Unavailable(f"no round carried all {k} drafted tokens; take longer answers or check the draft's log")
    return Costs(
        decode_ms=_median_ms(samples.decode),
        verify_ms=_median_ms(samples.verify),
        draft_ms=_median_ms(samples.draft) / k,
        wire_ms=_median_ms(samples.target_wire) + _median_ms(samples.draft_wire),
    )


def _median_ms(values: Sequence[int]) -> float:
    return quantile(values, 0.5) / 1e6


async def _decode(decoder: Decoder, prompt: tuple[int, ...], params: SamplingParams, rule: Rule | None, k: int) -> None:
    # The gateway's preparation draws seeds; what they are does not matter here.
    request = DecodingRequest(prompt=prompt, params=params.with_seed(hash(prompt)), rule=rule, num_speculative_tokens=k)
    async with aclosing(decoder.start(request).verdicts()) as verdicts:
        async for _ in verdicts:
            pass


def _watched(router: Router, samples: Samples, k: int) -> Router:
    """A router over the same replicas, their backends timed."""
    targets = [
        Replica[TargetBackend](replica.name, TimedTarget(replica.backend, samples, k), info=replica.info)
        for replica in router.targets.usable
    ]
    drafts = [
        Replica[DraftBackend](replica.name, TimedDraft(replica.backend, samples, k), info=replica.info)
        for replica in router.drafts.usable
    ]
    return Router(targets, drafts)


class TimedTarget:
    """A target backend that times its sessions."""

    def __init__(self, backend: TargetBackend, samples: Samples, k: int) -> None:
        self._backend, self._samples, self._k = backend, samples, k

    async def open(self, spec: SessionSpec) -> TargetSession:
        """Open a timed session."""
        return _TimedTargetSession(await self._backend.open(spec), self._samples, self._k)

    async def info(self) -> ModelInfo:
        """Describe the model."""
        return await self._backend.info()

    async def load(self) -> ServerLoad:
        """Describe the occupancy."""
        return await self._backend.load()


class _TimedTargetSession:
    def __init__(self, session: TargetSession, samples: Samples, k: int) -> None:
        self._session, self._samples, self._k = session, samples, k

    @property
    def opened(self) -> TargetOpened:
        return self._session.opened

    @property
    def first(self) -> Verdict:
        return self._session.first

    async def verify(self, committed_len: int, proposal: Proposal | None) -> Verdict:
        started = time.perf_counter_ns()
        verdict = await self._session.verify(committed_len, proposal)
        wall = time.perf_counter_ns() - started
        timings = verdict.timings
        worked = timings.forward_ns + timings.verify_ns
        if verdict.num_draft_tokens == self._k:
            self._samples.verify.append(worked)
            self._samples.target_wire.append(wall - worked - timings.queue_ns)
        return verdict

    async def decode_ahead(self, committed_len: int, num_tokens: int) -> AsyncIterator[Verdict]:
        async for verdict in self._session.decode_ahead(committed_len, num_tokens):
            self._samples.decode.append(verdict.timings.forward_ns + verdict.timings.verify_ns)
            yield verdict

    async def close(self) -> None:
        await self._session.close()


class TimedDraft:
    """A draft backend that times its sessions."""

    def __init__(self, backend: DraftBackend, samples: Samples, k: int) -> None:
        self._backend, self._samples, self._k = backend, samples, k

    async def open(self, spec: SessionSpec) -> DraftSession:
        """Open a timed session."""
        return _TimedDraftSession(await self._backend.open(spec), self._samples, self._k)

    async def info(self) -> ModelInfo:
        """Describe the model."""
        return await self._backend.info()

    async def load(self) -> ServerLoad:
        """Describe the occupancy."""
        return await self._backend.load()


class _TimedDraftSession:
    def __init__(self, session: DraftSession, samples: Samples, k: int) -> None:
        self._session, self._samples, self._k = session, samples, k

    @property
    def opened(self) -> DraftOpened:
        return self._session.opened

    async def advance(self, base_len: int, token_ids: Sequence[int], num_draft_tokens: int, num_ahead: int = 0) -> None:
        await self._session.advance(base_len, token_ids, num_draft_tokens, num_ahead)

    async def receive(self) -> Proposal:
        return await self._session.receive()

    async def propose(self, base_len: int, token_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        started = time.perf_counter_ns()
        proposal = await self._session.propose(base_len, token_ids, num_draft_tokens)
        wall = time.perf_counter_ns() - started
        if len(proposal.token_ids) == self._k:
            self._samples.draft.append(proposal.draft_ns)
            self._samples.draft_wire.append(wall - proposal.draft_ns - proposal.queue_ns)
        return proposal

    async def close(self) -> None:
        await self._session.close()
