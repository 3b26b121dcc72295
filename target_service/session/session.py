"""A session on the target: what is committed, what was asked, and the verdicts that wait to be fetched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from engine.kv_pool import KVPool
from specdec.errors import TandemError, Unavailable
from specdec.types import (
    DraftedRound,
    FinishReason,
    HiddenStates,
    Proposal,
    TargetOpened,
    Verdict,
)
from target_service.session.feed import Feed
from target_service.session.offers import Fate, Offers
from target_service.session.opening import Opening, may_reuse
from target_service.session.progress import Progress, State
from target_service.session.streamed_chain import StreamedChain
from target_service.session.throughput import GroupThroughput
from target_service.session.verdict_queue import VerdictQueue
from target_service.step import PartResult, ScheduledSequence, StepResult, StepSession

#: Tokens of a prompt between two copies of its recurrent states, at least, and copies of one prompt beside that of its
#: end, at most. A copy of Qwen3.5-9B's takes 115 MB.
MIN_SNAPSHOT_INTERVAL: Final = 512
MAX_SNAPSHOTS: Final = 8


class SessionOwner(Protocol):
    """What a session needs of the core."""

    def ready(self, session: Session) -> None:
        """The session has something to feed."""
        ...

    def count_stale(self) -> None:
        """Count a message that does not fit the session's state."""
        ...

    def count_superseded(self, count: int = 1) -> None:
        """Count proposals that were dropped because multi-step decode had gone on."""
        ...

    def finish(self, session: Session) -> None:
        """Give back the cache of a session that has ended."""
        ...

    def release(self, session: Session) -> None:
        """Give back the session's cache and its place. Called exactly once."""
        ...


class Session:
    """Implements :class:`specdec.backends.TargetSession`; made by ``TargetCore.open``.

    Committed tokens c_0…c_{n-1}; the cache holds n-1 entries, for the last committed token is not fed yet. A round
    feeds [c_{n-1}, x_1…x_k], commits a accepted drafts and the target's own token, keeps a+1 of the k+1 new entries
    and drops k-a (of a tree those off the accepted path, and the others are moved together). The end of prefilling is a
    round without drafts whose fed tokens are the prompt.

    All calls but :meth:`continues` are made on the event loop. While a step that carries the session runs
    (``in_flight``), its ``step_session`` belongs to the device thread; closing then waits for the end of the step.
    """

    def __init__(
        self,
        step_session: StepSession,
        pool: KVPool,
        owner: SessionOwner,
        asked_ns: int,
        throughput: GroupThroughput,
        *,
        on_states: Callable[[HiddenStates], None] | None = None,
        wants_state_map: bool = False,
    ) -> None:
        """``asked_ns``: when it was asked for (``time.perf_counter_ns``); it is admitted now. ``throughput``: that of
        its pacing group. ``on_states`` gets the prompt's hidden states as they are computed, but the last step's; None:
        the first verdict has them all. ``wants_state_map``: as :attr:`opened` says.
        """
        self.step_session = step_session
        self.spec = spec = step_session.spec
        self.finish_reason: FinishReason | None = None
        self.in_flight = False
        #: Times that it lost its blocks.
        self.num_preemptions = 0
        #: Called when tokens were committed.
        self.on_committed: Callable[[], None] | None = None
        #: Nanoseconds of the latest step that committed any, and its sessions.
        self.step_ns = self.step_sessions = 0
        #: When a draft's next chain should come; 0: none is waited for.
        self.due_ns = 0
        #: What the verdict of the round that is asked for tells of its proposal.
        self.drafted: DraftedRound | None = None
        self._pool = pool
        self._owner = owner
        self._opening = Opening(step_session, asked_ns, wants_state_map=wants_state_map)
        self._asked_ns = self._opening.admitted_ns
        self._throughput, self._others_from = throughput, throughput.others
        #: When tokens were committed last; None: never.
        self._committed_ns: int | None = None
        self._first: Verdict | None = None
        self._progress = Progress(len(spec.token_ids), step_session.stop_criteria)
        self._offers = Offers(step_session, self._progress)
        #: What the next step gets.
        self.feed = Feed(step_session, self._progress, self._offers)
        self._verdicts = VerdictQueue(last_state_only=spec.last_hidden_state_only)
        #: Gets the prompt's hidden states.
        self._on_states = on_states or self._verdicts.add_states
        #: When the next verdict should come, if its step takes as long as the last one.
        self._next_verdict_ns = 0
        self._failure: TandemError | None = None
        self._closing = False
        self._released = asyncio.Event()

    # --- the plain API ---

    @property
    def committed_len(self) -> int:
        """Committed tokens, the prompt's included."""
        return self._progress.committed_len

    @property
    def is_idle(self) -> bool:
        """Whether the session waits to be asked for something."""
        return self._progress.state is State.IDLE and not self.in_flight

    @property
    def in_round(self) -> bool:
        """Whether it was asked for a round, and nothing else."""
        return self._progress.state is State.ROUND

    @property
    def is_closed(self) -> bool:
        """Whether nothing comes of it any more."""
        return self._closing

    @property
    def has_failed(self) -> bool:
        """Whether an error ended it: what its cache holds is not known then."""
        return self._failure is not None

    @property
    def num_left(self) -> int:
        """Tokens that the session's limits still allow."""
        return self.step_session.stop_criteria.max_len - self.committed_len

    def committed_token_ids(self, start: int = 0) -> tuple[int, ...]:
        """The committed tokens from ``start`` on."""
        return tuple(self.step_session.state.token_ids[start : self.committed_len])

    @property
    def opened(self) -> TargetOpened:
        """What admission and prefilling found."""
        opened = self._opening.opened
        assert opened is not None, "the session is still being opened"
        return opened

    @property
    def first(self) -> Verdict:
        """The verdict of prefilling: the first token."""
        assert self._first is not None, "the session is still being opened"
        return self._first

    async def start(self) -> None:
        """Prefill, up to the first token."""
        self._owner.ready(self)
        self._first = await self.receive()

    def offer(self, proposal: Proposal) -> None:
        """Ask for a round; see :meth:`specdec.backends.TargetSession.offer`. One that fits nothing any more is counted
        and dropped.

        Raises:
            InvalidRequest: the proposal cannot be verified.
        """
        proposal, progress = self._offers.check(proposal), self._progress
        if proposal.epoch != self.spec.epoch or proposal.base_len > progress.committed_len:
            self._owner.count_stale()
            return
        match self._offers.fate(proposal.base_len):
            case Fate.STARTS:
                self._offers.asked = self._offers.cut(proposal)
                progress.ask()
                self._get_ready()
            case Fate.REPLACES_TOKEN:
                fitted = self._offers.fitted(proposal.after(self.committed_token_ids(proposal.base_len)))
                self._owner.count_superseded(fitted is None or self._offers.asked is not None)
                if fitted is not None:
                    self._offers.asked = fitted
                    progress.ask_in_place(goes_on=False)
            case Fate.SUPERSEDED:
                self._owner.count_superseded()
            case Fate.STALE:
                self._owner.count_stale()

    def multi_step_decode(self, committed_len: int, num_tokens: int) -> None:
        """Decode up to ``num_tokens`` tokens after ``committed_len`` on the target's own account, without offers.

        The target does not wait for the verdicts to be fetched. ``committed_len`` may therefore lie behind where the
        session stands, as long as everything since came of multi-step decode. Otherwise the call is stale: it is
        counted and dropped.
        """
        if not num_tokens:
            self._progress.stop_decoding()
            return
        if not self._progress.decode(committed_len, num_tokens):
            self._owner.count_stale()
            return
        if self.feed.has_round:
            self._get_ready()

    @property
    def may_stream(self) -> bool:
        """Whether :meth:`stream` may be called: no round was asked for that the session would wait for."""
        return self._progress.is_multi_step or self.is_idle

    def stream(self, num_tokens: int) -> None:
        """Decode up to the limits, and verify in each step what a draft has streamed by then: up to ``num_tokens``
        tokens, or none. The session waits for nothing.
        """
        self._offers.chain = self._offers.chain or StreamedChain()
        self._offers.num_streamed = num_tokens
        if self._progress.num_multi_step_left < self.num_left:
            self.multi_step_decode(self.committed_len, self.num_left)
        self._progress.ask_in_place(goes_on=True)

    def end_stream(self) -> None:
        """Verify no more of what was streamed."""
        self.due_ns = 0
        self._offers.clear()

    @property
    def chain(self) -> StreamedChain | None:
        """What a draft has streamed, if steps verify it."""
        return self._offers.chain

    def take_streamed(self, proposal: Proposal) -> bool:
        """A proposal of the stream came; whether it begins a chain.

        Raises:
            InvalidRequest: it cannot be verified.
        """
        begins = self._offers.add_streamed(proposal)
        if self.due_ns and self._offers.asked is not None and not self.in_flight:
            self._owner.ready(self)  # a step may wait for it
        return begins

    async def receive(self, gather_until_ns: int = 0) -> Verdict:
        """The next verdict, with those of multi-step decode that wait joined into one; waits until there is one.

        Verdicts that nobody asked for (:attr:`goes_on`) gather as long as another one should come before
        ``gather_until_ns`` (``time.perf_counter_ns``).

        Raises:
            Unavailable: the session was closed.
            TandemError: what ended the session.
        """
        while not self._verdicts:
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise Unavailable("the session was closed")
            await self._verdicts.wait()
        if self._may_gather(gather_until_ns):
            await self._verdicts.wait(gather_until_ns)
        return self._verdicts.take()

    async def receive_all(self, gather_until_ns: int) -> list[Verdict]:
        """What :meth:`receive` returns, and what waits behind it: all but the last verdict are marked as followed."""
        verdicts = [await self.receive(gather_until_ns)]
        while self._verdicts:
            verdicts[-1] = replace(verdicts[-1], is_followed=True)
            verdicts.append(self._verdicts.take())
        return verdicts

    async def close(self) -> None:
        """Release the cache, at the latest when the running step ends. Idempotent."""
        self.end()
        await self._released.wait()

    def end(self) -> None:
        """What :meth:`close` does, without waiting for it."""
        if self._closing:
            return
        self._closing = True
        self._progress.end()
        self._verdicts.wake()
        if not self.in_flight:
            self._release()

    def fail(self, error: TandemError) -> None:
        """Nothing can be computed for the session any more; whoever waits or calls gets ``error``."""
        self._failure = self._failure or error
        self._progress.end()
        self._offers.clear()
        self._verdicts.wake()

    # --- between the steps, called by the batcher ---

    @property
    def has_work(self) -> bool:
        """Whether it has something to feed."""
        return self._progress.state is State.PREFILL or self.feed.has_round

    @property
    def goes_on(self) -> bool:
        """Whether verdicts come without being asked for: of multi-step decode, or of rounds of a draft that the target
        asks.
        """
        return self.finish_reason is None and (self._progress.is_multi_step or self.on_committed is not None)

    @property
    def idle_ns(self) -> int:
        """Nanoseconds since anything was asked of it; 0 while it has something to do."""
        return 0 if self.has_work or self.in_flight else time.perf_counter_ns() - self._asked_ns

    @property
    def reusable(self) -> tuple[Sequence[int], int]:
        """Its tokens, and how many of them may have the entries of others: the last of a prompt is fed in any case."""
        token_ids, is_prefill = self.step_session.state.token_ids, self._progress.state is State.PREFILL
        if is_prefill and not may_reuse(self.spec):
            return token_ids, 0
        return token_ids, self.feed.num_needed - is_prefill

    def matched(self, num_tokens: int) -> None:
        """Entries of others stand for more of its tokens."""
        if self._progress.state is State.PREFILL and not self.num_preemptions:
            self._opening.num_cached_tokens += num_tokens

    def preempt(self) -> None:
        """Its blocks were taken; it is in no step. Everything is fed again when it gets others."""
        self.num_preemptions += 1
        self.feed.is_behind = True
        self._opening.forget_scores()

    def next_chunk(self, num_rows: int) -> ScheduledSequence:
        """The next ``num_rows`` missing tokens or fewer, now in flight."""
        self.in_flight = True
        return self.feed.chunk(num_rows)

    def next_round(self) -> ScheduledSequence:
        """The round that is ready, now in flight."""
        self.in_flight = True
        part = self.feed.take_round()
        if part.is_round and (streamed := self._offers.streamed_round(len(part.proposed_token_ids))):
            self.drafted = streamed  # now: the stream may end before the verdict
        return part

    def continues(self, result: PartResult) -> bool:
        """Whether multi-step decode continues after this result of a step. Called on the device thread, which owns the
        step session at that time.
        """
        is_over = result.error is not None or result.cut.finish_reason is not None
        return not is_over and self._offers.asked is None and self._progress.continues(len(self.step_session.state))

    def continue_step(self, part: ScheduledSequence, result: PartResult, step: StepResult) -> None:
        """Queue the verdict of a step of multi-step decode. The device thread runs the next one already."""
        if not self._closing and self._failure is None:
            self._progress.run_on(len(result.cut.token_ids))
            self._commit(part, result, step)

    def finish_step(self, part: ScheduledSequence, result: PartResult, step: StepResult) -> None:
        """Apply the result of a step: drop the cache entries of rejected tokens and queue the verdict."""
        self.in_flight = False
        self._opening.score(result.prompt_logprobs)
        if not part.decides:
            for states in result.hidden_states:
                self._on_states(states)
        sequence, state = self.step_session.sequence, self.step_session.state
        if result.error is not None:
            self.fail(result.error)
        else:
            length = len(state) - 1 if part.decides else sequence.length
            if sequence.length != length:
                self._pool.rollback(sequence, length)
            if sequence.length >= sequence.publishable_from and not self.has_failed:
                self._pool.publish(sequence, state.token_ids)
            if part.is_prefill:
                is_due = part.decides or sequence.length == sequence.fork
                interval = max(MIN_SNAPSHOT_INTERVAL, len(state) // MAX_SNAPSHOTS)
                self._pool.keep_states(sequence, 0 if is_due else interval)
            self.feed.is_behind = not part.decides or sequence.length != length
        if self._closing:
            self._release()
        elif self._failure is None and part.decides:
            self._commit(part, result, step)
            if self.finish_reason is not None:
                self._owner.finish(self)
        if self.has_work:
            self._owner.ready(self)

    def crash(self, error: TandemError) -> None:
        """The step that carried the session broke: its cache is in an unknown state."""
        self.in_flight = False
        self.fail(error)
        if self._closing:
            self._release()

    def _commit(self, part: ScheduledSequence, result: PartResult, step: StepResult) -> None:
        now_ns = time.perf_counter_ns()
        token_ids, progress = result.cut.token_ids, self._progress
        base_len = progress.committed_len
        self.finish_reason = result.cut.finish_reason
        if self._opening.opened is None:
            self._opening.end(now_ns)
            progress.open(len(token_ids), self.spec.multi_step_tokens)
        else:
            progress.commit(len(token_ids), is_round=part.is_round)
        if self.finish_reason is not None:
            progress.end()
        if self._committed_ns is not None:
            self._throughput.add(len(token_ids), now_ns - self._committed_ns)
        self._committed_ns = now_ns
        num_tokens, session_ns = self._throughput.others
        queue_ns = max(0, step.started_ns - self._asked_ns)
        self._next_verdict_ns = now_ns + (now_ns - self._asked_ns)
        self._asked_ns = now_ns  # of the next token when multi-step decode
        self.step_ns = step.timings.forward_ns + step.timings.verify_ns
        self.step_sessions = step.timings.batch_sessions
        drafted, self.drafted = self.drafted if part.is_round else None, None
        if not part.is_round:
            # Of a stream every step is a round, that of no tokens included: so pacing sees what the stream is worth.
            drafted = self._offers.streamed_round(0)
        # Keep what is left of the round asked for, or ask for more.
        dropped = self._offers.clear() if self.finish_reason is not None else self._offers.commit(token_ids)
        self._owner.count_superseded(dropped)
        if self.on_committed is not None:
            self.on_committed()
        states = result.hidden_states
        if part.holds_states and not (states or progress.is_multi_step or self.finish_reason):
            progress.decode(progress.committed_len, 1)  # it was asked to end too late to send them
        if part.is_prefill:
            for block in states:
                self._verdicts.add_states(block)
            states = ()
        self._verdicts.add(
            Verdict(
                epoch=self.spec.epoch,
                base_len=base_len,
                token_ids=token_ids,
                num_accepted=result.num_accepted,
                num_draft_tokens=len(part.proposed_token_ids),
                finish_reason=result.cut.finish_reason,
                stop_token_id=result.cut.stop_token_id,
                logprobs=result.logprobs,
                timings=replace(
                    step.timings,
                    queue_ns=queue_ns,
                    others_tokens=num_tokens - self._others_from[0],
                    others_ns=session_ns - self._others_from[1],
                ),
                hidden_states=states,
                num_multi_step_left=progress.num_multi_step_left,
                drafted=drafted,
                committed_ns=now_ns,
            )
        )
        if not self._may_gather(self._verdicts.gather_until_ns):
            self._verdicts.wake()

    # --- inside ---

    def _get_ready(self) -> None:
        """Something was asked for. A step that carries the session gets it ready at its end."""
        if not self.in_flight:
            self._asked_ns = time.perf_counter_ns()
            self._owner.ready(self)

    def _may_gather(self, until_ns: int) -> bool:
        """Whether the verdicts that wait may leave with another one, which should come before ``until_ns``."""
        return self._next_verdict_ns <= until_ns and self.goes_on and not self._verdicts.has_answer

    def _release(self) -> None:
        if not self._released.is_set():
            self._released.set()
            self._owner.release(self)
