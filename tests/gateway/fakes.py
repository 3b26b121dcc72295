"""In-process backends for tests: a toy deterministic target, and drafts of chosen quality, latency and failures.

The toy target's text is a function of the last two tokens (greedy) or of them, the seed and the position (sampled),
which is exactly what greedy decoding and the coupled rule promise: any decoding loop must reproduce :func:`reference`.
"""

import asyncio
import hashlib
import random

from specdec.errors import Cancelled, StaleSession, Unavailable
from specdec.sampling.params import SamplingParams
from specdec.sessions import (
    DraftOpened,
    FinishReason,
    ModelInfo,
    PositionLogprobs,
    Proposal,
    Rule,
    ServerLoad,
    TargetOpened,
    TokenLogprob,
    Verdict,
)

VOCAB = 64
EOS = 2


def next_token(context, params, vocab_size=VOCAB):
    """The toy target's next token."""
    key = list(context[-2:])
    if not params.greedy:
        key += [params.seed, len(context)]
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return 3 + int.from_bytes(digest, "little") % (vocab_size - 3)


def logprobs_of(token, count, vocab_size=VOCAB):
    """Made-up log-probabilities: the chosen token first."""
    if count is None:
        return ()
    top = tuple(TokenLogprob((token + i) % vocab_size, -0.5 * (i + 1), i + 1) for i in range(count))
    return (PositionLogprobs(TokenLogprob(token, -0.5, 1), top),)


def reference(prompt, params, next_token=next_token):
    """What the target alone generates."""
    out = []
    while len(out) < params.max_tokens:
        out.append(next_token([*prompt, *out], params))
        if out[-1] in params.stop_token_ids:
            break
    return out


class Faults:
    """Raises planned errors: ``plan[event]`` maps the count of that event (from 0) to an error, or is a callable."""

    def __init__(self, **plan):
        self.plan = plan
        self.counts = {}

    def hit(self, event):
        """Count an event; raise its planned error."""
        index = self.counts.get(event, 0)
        self.counts[event] = index + 1
        plan = self.plan.get(event)
        error = plan(index) if callable(plan) else (plan or {}).get(index)
        if error is not None:
            raise error


class FakeBackend:
    """What both roles share: counting sessions."""

    def __init__(self, *, latency_s=0.0, open_latency_s=None, faults=None, info=None, next_token=next_token):
        self.latency_s = latency_s
        self.open_latency_s = latency_s if open_latency_s is None else open_latency_s
        self.faults = faults or Faults()
        self.model = info
        self.next_token = next_token
        self.open_sessions = set()
        self.num_opened = 0
        self.num_closed = 0
        self.specs = []
        self.dead = False
        self.frozen = asyncio.Event()
        self.frozen.set()

    async def work(self, event, latency_s=None):
        """Take the time of one call, then fail where planned."""
        if self.dead:
            raise Unavailable("the fake is dead")
        if latency_s is None:
            latency_s = self.latency_s
        await asyncio.sleep(latency_s)
        await self.frozen.wait()
        if self.dead:
            raise Unavailable("the fake is dead")
        self.faults.hit(event)

    async def info(self):
        return self.model

    async def load(self):
        return ServerLoad(open_sessions=len(self.open_sessions))

    def count_stale(self):
        raise AssertionError("the gateway sent a stale message")


class FakeSession:
    """Open until closed, exactly once."""

    def __init__(self, backend, spec):
        self.backend = backend
        self.spec = spec
        self.token_ids = list(spec.token_ids)
        self.closed = False
        self.busy = False
        assert all(spec.session_id != other.spec.session_id for other in backend.open_sessions)
        backend.open_sessions.add(self)
        backend.num_opened += 1
        backend.specs.append(spec)

    async def close(self):
        assert not self.closed, "closed twice"
        self.closed = True
        self.backend.open_sessions.remove(self)
        self.backend.num_closed += 1


class FakeTarget(FakeBackend):
    """A target. ``info`` defaults to one of 64 tokens and a context of 512."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.model = self.model or target_info()

    async def open(self, spec):
        await self.work("open", self.open_latency_s)
        return FakeTargetSession(self, spec)


class FakeTargetSession(FakeSession):
    def __init__(self, backend, spec):
        super().__init__(backend, spec)
        params = spec.params
        prompt_logprobs = ()
        if params.prompt_logprobs is not None:
            for token in spec.token_ids[1 : spec.prompt_len]:
                prompt_logprobs += logprobs_of(token, params.prompt_logprobs)
        self.opened = TargetOpened(spec.epoch, spec.rule or Rule.BLOCK, prompt_logprobs=prompt_logprobs, queue_ns=1000)
        self.first = self.commit([])

    @property
    def num_output(self):
        return len(self.token_ids) - self.spec.prompt_len

    def commit(self, drafted):
        """Accept drafted tokens while they are what the target would say, then add its own."""
        base, out, reason, stop, accepted = len(self.token_ids), [], None, None, 0
        params = self.spec.params
        for guess in [*drafted, None]:
            token = self.backend.next_token([*self.token_ids], params)
            out.append(token)
            self.token_ids.append(token)
            accepted += guess == token
            if token in params.stop_token_ids and self.num_output > params.min_tokens:
                reason, stop = FinishReason.STOP, token
            elif self.num_output >= params.max_tokens:
                reason = FinishReason.LENGTH
            if guess != token or reason:
                break
        logprobs = sum((logprobs_of(token, params.logprobs) for token in out), ())
        return Verdict(
            self.spec.epoch, base, tuple(out), accepted, len(drafted), reason, stop_token_id=stop, logprobs=logprobs
        )

    async def verify(self, committed_len, proposal):
        assert not self.busy
        assert not self.closed
        self.busy = True
        try:
            await self.backend.work("verify")
        finally:
            self.busy = False
        if committed_len != len(self.token_ids) or (proposal and proposal.base_len != committed_len):
            raise StaleSession("stale")
        assert proposal is None or proposal.epoch == self.spec.epoch
        assert proposal is None or 0 < len(proposal.token_ids) <= self.spec.num_speculative_tokens
        return self.commit(proposal.token_ids if proposal else ())

    async def decode_ahead(self, committed_len, num_tokens):
        assert not self.busy
        assert not self.closed
        assert committed_len == len(self.token_ids)
        self.busy = True
        try:
            for _ in range(num_tokens):
                await self.backend.work("ahead")
                verdict = self.commit([])
                yield verdict
                if verdict.finish_reason:
                    return
        finally:
            self.busy = False


class FakeDraft(FakeBackend):
    """A draft that guesses right with probability ``quality`` per token."""

    def __init__(self, *, quality=0.8, limit=8, empty_every=0, **kwargs):
        super().__init__(**kwargs)
        self.model = self.model or draft_info(limit)
        self.quality = quality
        self.limit = limit
        self.empty_every = empty_every
        self.random = random.Random(0)
        self.num_proposals = 0

    async def open(self, spec):
        await self.work("open", self.open_latency_s)
        return FakeDraftSession(self, spec)


class FakeDraftSession(FakeSession):
    def __init__(self, backend, spec):
        super().__init__(backend, spec)
        self.opened = DraftOpened(spec.epoch, min(backend.limit, spec.num_speculative_tokens))

        self.asked = asyncio.Queue()

    async def advance(self, base_len, token_ids, num_draft_tokens, num_ahead=0):
        assert not self.closed
        self.asked.put_nowait((base_len, token_ids, num_draft_tokens))

    async def receive(self):
        assert not self.busy
        self.busy = True
        try:
            asked = await self.asked.get()
            if asked is None:
                raise Cancelled("the session was closed")
            return await self.answer(*asked)
        finally:
            self.busy = False

    async def propose(self, base_len, token_ids, num_draft_tokens):
        await self.advance(base_len, token_ids, num_draft_tokens)
        return await self.receive()

    async def close(self):
        await super().close()
        self.asked.put_nowait(None)

    async def answer(self, base_len, token_ids, num_draft_tokens):
        await self.backend.work("propose")
        if base_len != len(self.token_ids):
            raise StaleSession("stale")
        self.token_ids += token_ids
        self.backend.num_proposals += 1
        if self.backend.empty_every and self.backend.num_proposals % self.backend.empty_every == 0:
            return Proposal(self.spec.epoch, len(self.token_ids), ())
        guess = []
        for _ in range(num_draft_tokens):
            token = self.backend.next_token([*self.token_ids, *guess], self.spec.params)
            guess.append(token if self.backend.random.random() < self.backend.quality else (token + 1) % VOCAB)
        return Proposal(self.spec.epoch, len(self.token_ids), tuple(guess))


def target_info(**changes):
    """The toy target's description."""
    values = {"name": "toy", "vocab_size": VOCAB, "tokenizer_size": VOCAB, "max_model_len": 512}
    values |= {"eos_token_ids": (EOS,), "verification": Rule.BLOCK, "tokenizer_fingerprint": "toy"}
    return ModelInfo(**(values | changes))


def draft_info(limit=8, **changes):
    """The toy draft's description."""
    values = {"name": "toy-draft", "vocab_size": VOCAB, "tokenizer_size": VOCAB, "method": "draft_model"}
    return ModelInfo(**(values | {"num_speculative_tokens": limit, "tokenizer_fingerprint": "toy"} | changes))


def params(max_tokens=40, seed=7, **changes):
    """Sampling parameters as the loop gets them: seed and limit set."""
    return SamplingParams(**({"max_tokens": max_tokens, "seed": seed} | changes))
