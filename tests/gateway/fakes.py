"""Services in the process: the base of the fake ones, and a toy target without randomness.

The toy target's text is a function of the last two tokens (greedy) or of them, the seed and the position (sampled),
which is exactly what greedy decoding and the coupled rule promise: any decoding loop must reproduce :func:`reference`.
The text of a target with ``by_round`` depends on where its rounds start, too, as under a ratio rule: loops that give it
the same proposals get the same text.
"""

import asyncio
import hashlib
from dataclasses import replace

from specdec.errors import Cancelled, InvalidRequest, Unavailable
from specdec.logprobs import PositionLogprobs, pack_top
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.types import (
    FinishReason,
    HiddenStates,
    ModelInfo,
    ServerLoad,
    TargetOpened,
    Verdict,
)

VOCAB = 64


EOS = 2


def number(*key):
    """A number below 2^64 that is a function of the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def share(*key):
    """The same in [0, 1)."""
    return number(*key) / 2**64


def next_token(context, params, vocab_size=VOCAB):
    """The toy target's next token."""
    key = tuple(context[-2:])
    if not params.greedy:
        key += (params.seed, len(context))
    return 3 + number(key) % (vocab_size - 3)


def logprobs_of(token, count, vocab_size=VOCAB):
    """Made-up log-probabilities: the chosen token first."""
    if count is None:
        return ()
    top = pack_top(((token + i) % vocab_size, -0.5 * (i + 1)) for i in range(count))
    return (PositionLogprobs(token, -0.5, 1, top),)


def states_of(token_ids, start, end, layers):
    """Made-up hidden states, two numbers a layer: a function of position, token and layer."""
    rows = [number(i, token_ids[i], layer).to_bytes(8)[:4] for i in range(start, end) for layer in layers]
    return HiddenStates(start, 2 * len(layers), "bfloat16", b"".join(rows))


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
    """What both roles share: counting sessions, and the time that work takes.

    ``latency_s`` are seconds, or an iterator of counts of event-loop iterations, for tests of many schedules.
    """

    def __init__(self, *, latency_s=0.0, open_latency_s=None, faults=None, info=None, next_token=next_token):
        self.latency_s = latency_s
        self.open_latency_s = latency_s if open_latency_s is None else open_latency_s
        self.faults = faults or Faults()
        self.model = info
        self.next_token = next_token
        #: Whether the target's tokens depend on where their round started.
        self.by_round = False
        self.open_sessions = set()
        self.num_opened = 0
        self.num_closed = 0
        self.sessions = []
        self.specs = []
        #: KV blocks in use, and all.
        self.blocks = 0, 0
        self.dead = False
        self.frozen = asyncio.Event()
        self.frozen.set()

    async def work(self, event, latency_s=None):
        """Take the time of one call, then fail where planned."""
        if self.dead:
            raise Unavailable("the fake is dead")
        if latency_s is None:
            latency_s = self.latency_s
        if isinstance(latency_s, int | float):
            await asyncio.sleep(latency_s)
        else:
            for _ in range(next(latency_s)):
                await asyncio.sleep(0)
        await self.frozen.wait()
        if self.dead:
            raise Unavailable("the fake is dead")
        self.faults.hit(event)

    def says(self, context, base, params):
        """The target's token after ``context`` in a round from ``base``."""
        token = self.next_token(context, params)
        return (token + base) % VOCAB if self.by_round and not params.greedy else token

    def verdict(self, context, drafted, params):
        """The tokens a round commits: drafted ones while they are what the target says, then its own."""
        tokens = []
        for guess in [*drafted, None]:
            tokens.append(self.says([*context, *tokens], len(context), params))
            if guess != tokens[-1]:
                break
        return tuple(tokens)

    #: Sessions that share the time of its messages.
    num_going_on = 0

    def count_stale(self):
        raise AssertionError("the gateway sent a stale message")

    async def info(self):
        return self.model

    async def load(self):
        used, total = self.blocks
        return ServerLoad(open_sessions=len(self.open_sessions), used_blocks=used, total_blocks=total)


class FakeSession:
    """Open until closed, exactly once. A task of its own does the work; :meth:`receive` gets what it brings."""

    def __init__(self, backend, spec):
        self.backend = backend
        self.spec = spec
        self.token_ids = list(spec.token_ids)
        self.closed = False
        self.received = asyncio.Queue()
        self.wake = asyncio.Event()
        self.task = asyncio.create_task(self.run())
        same = [other.spec for other in backend.open_sessions if other.spec.session_id == spec.session_id]
        assert all(other.is_named and spec.is_named for other in same)
        backend.open_sessions.add(self)
        backend.num_opened += 1
        backend.sessions.append(self)
        backend.specs.append(spec)

    async def run(self):
        try:
            while True:
                self.wake.clear()
                if not await self.step():
                    await self.wake.wait()
        except Exception as error:
            self.received.put_nowait(error)

    async def receive(self, gather_until_ns=0):
        """The next item; verdicts are not joined, so there is nothing to wait for until ``gather_until_ns``."""
        assert not self.closed
        item = await self.received.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def receive_all(self, gather_until_ns):
        return [await self.receive(gather_until_ns)]

    def end(self):
        """What the servicers call when the requests have ended."""
        self.received.put_nowait(Cancelled("the session was closed"))

    async def close(self):
        """A call that is cancelled here closes all the same, as with real sessions."""
        assert not self.closed, "closed twice"
        self.closed = True
        self.task.cancel()
        self.backend.open_sessions.remove(self)
        self.backend.num_closed += 1
        await asyncio.wait((self.task,))


class FakeTarget(FakeBackend):
    """A target. ``info`` defaults to one of 64 tokens and a context of 512."""

    def __init__(self, *, by_round=False, holds_states=True, **kwargs):
        super().__init__(**kwargs)
        self.by_round = by_round
        #: Whether hidden states come with the end of multi-step decode; older targets send them with each verdict.
        self.holds_states = holds_states
        self.model = self.model or target_info()
        #: Rounds in place of multi-step decode.
        self.num_early_rounds = 0
        #: Nanoseconds that drafts say they took for the proposals verified.
        self.draft_ns = 0

    async def open(self, spec, on_states=None, on_admitted=None):
        await self.work("open", self.open_latency_s)
        session = FakeTargetSession(self, spec)
        if on_admitted is not None:
            on_admitted(session)
        return session


class FakeTargetSession(FakeSession):
    def __init__(self, backend, spec):
        super().__init__(backend, spec)
        params = spec.params
        prompt_logprobs = ()
        if params.prompt_logprobs is not None:
            for token in spec.token_ids[1 : spec.prompt_len]:
                prompt_logprobs += logprobs_of(token, params.prompt_logprobs)
        self.opened = TargetOpened(spec.epoch, spec.rule or Rule.BLOCK, prompt_logprobs=prompt_logprobs, queue_ns=1000)
        self.asked = self.early = self.waiting = None
        self.multi_step_until = 0
        self.finished = False
        self.on_committed = None
        #: The first position whose hidden states were not sent.
        self.states_from = 0
        first = self.commit([])
        self.multi_step_from = len(self.token_ids)
        self.multi_step_until = self.multi_step_from + spec.multi_step_tokens
        self.first = replace(first, num_multi_step_left=self.num_left)

    @property
    def is_multi_step(self):
        return not self.finished and self.multi_step_until > len(self.token_ids)

    @property
    def num_left(self):
        limit = self.spec.prompt_len + self.spec.params.max_tokens
        return 0 if self.finished else max(0, min(self.multi_step_until, limit) - len(self.token_ids))

    def offer(self, proposal):
        assert not self.closed
        self.backend.faults.hit("offer")
        assert proposal.epoch == self.spec.epoch
        assert len(proposal.token_ids) <= self.spec.num_speculative_tokens
        if any(not 0 <= token < VOCAB for token in proposal.token_ids) and self.backend.model.vocab_size == VOCAB:
            raise InvalidRequest("no such token")
        if self.is_multi_step or proposal.base_len < len(self.token_ids):
            rest = proposal.after(tuple(self.token_ids[proposal.base_len :])) if self.is_multi_step else None
            if rest is not None and rest.token_ids:
                self.early = rest
            return
        assert proposal.base_len == len(self.token_ids), "the gateway sent a stale round"
        assert self.asked is None or self.asked is self.started_early, "two rounds at once"
        self.waiting = proposal
        self.look()
        self.wake.set()

    def look(self):
        """Start the round that waits for the end of another one."""
        if self.asked is None:
            self.asked, self.waiting = self.waiting, None

    def multi_step_decode(self, committed_len, num_tokens):
        assert not self.closed
        if not num_tokens:
            self.multi_step_until = min(self.multi_step_until, len(self.token_ids) + 1)
            return
        assert self.asked is None, "a round is in progress"
        assert self.multi_step_from <= committed_len <= len(self.token_ids)
        self.multi_step_until = max(self.multi_step_until, committed_len + num_tokens)
        self.wake.set()

    async def step(self):
        if self.finished or (self.asked is None and not self.is_multi_step):
            return False
        self.started_early = None
        if self.asked is None and self.early is not None:
            self.asked = self.started_early = self.early
            self.early = None
            self.backend.num_early_rounds += 1
        if self.asked is not None:
            self.multi_step_until = 0
        drafted = self.asked.token_ids if self.asked else ()
        await self.backend.work("verify" if self.asked else "multi_step")
        verdict = self.commit(drafted)
        self.backend.draft_ns += self.asked.draft_ns if self.asked else 0
        if self.asked:
            self.multi_step_from = len(self.token_ids)
        self.asked = None
        if self.early is not None:
            self.early = self.early.after(verdict.token_ids) if self.is_multi_step else None
        self.look()
        if verdict.finish_reason:
            self.asked = None
        self.received.put_nowait(replace(verdict, num_multi_step_left=self.num_left))
        return True

    @property
    def num_output(self):
        return len(self.token_ids) - self.spec.prompt_len

    def commit(self, drafted):
        """Accept drafted tokens while they are what the target says, then add its own; mind the limits."""
        base, out, reason, stop = len(self.token_ids), [], None, None
        params = self.spec.params
        drafted = drafted[: self.spec.prompt_len + params.max_tokens - base - 1]
        tokens = self.backend.verdict(self.token_ids, drafted, params)
        for token in tokens:
            out.append(token)
            self.token_ids.append(token)
            if token in params.stop_token_ids and self.num_output > params.min_tokens:
                reason, stop = FinishReason.STOP, token
            elif self.num_output >= params.max_tokens:
                reason = FinishReason.LENGTH
            if reason:
                self.finished = True
                break
        accepted = len(tokens) - 1
        logprobs = sum((logprobs_of(token, params.logprobs) for token in out), ())
        states = ()
        if layers := self.spec.hidden_state_layers:
            end = len(self.token_ids) - 1
            start = end - 1 if self.spec.last_hidden_state_only else self.states_from
            if not (self.backend.holds_states and (self.num_left or reason)):
                states, self.states_from = (states_of(self.token_ids, start, end, layers),), end
        return Verdict(
            self.spec.epoch,
            base,
            tuple(out),
            accepted,
            len(drafted),
            reason,
            stop_token_id=stop,
            logprobs=logprobs,
            hidden_states=states,
        )


def target_info(**changes):
    """The toy target's description."""
    values = {"name": "toy", "vocab_size": VOCAB, "tokenizer_size": VOCAB, "max_model_len": 512}
    values |= {"eos_token_ids": (EOS,), "verification": Rule.BLOCK, "tokenizer_fingerprint": "toy"}
    return ModelInfo(**(values | changes))


def params(max_tokens=40, seed=7, **changes):
    """Sampling parameters as the loop gets them: seed and limit set."""
    return SamplingParams(**({"max_tokens": max_tokens, "seed": seed} | changes))
