"""One step on the device thread: a single ragged forward pass, then verification of every round in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import torch

from engine.engine import Kept, Segment
from engine.hidden_states import PassStates
from engine.kv_sequence import KVSequence
from engine.sampling.state import SamplingState
from engine.state_map import StateMap
from specdec.errors import InvalidRequest, TandemError
from specdec.logprobs import PositionLogprobs
from specdec.rules import Rule, SparseRow
from specdec.types import HiddenStates, RoundTimings, SessionSpec
from target_service.grammar.grammar import Grammar
from target_service.held_states import HeldStates
from target_service.stop_criteria import StopCriteria, Truncation
from target_service.verification.logprobs import position_logprobs
from target_service.verification.rounds import Outcome, Round
from target_service.verification.verifier import Verifier

#: The hidden states of a pass, a segment's place in it, and its rows of them.
OwnStates = tuple[PassStates, int, int]


class Model(Protocol):
    """What a step needs of :class:`engine.engine.Engine`."""

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Feed every segment and return its logits."""
        ...

    def forward_with_states(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, PassStates]:
        """The same, and the segments' hidden states."""
        ...

    def keep_rows(self, kept: Sequence[Kept]) -> None:
        """Drop what is not on the accepted paths of trees."""
        ...


@dataclass(frozen=True, slots=True)
class StepSession:
    """The part of a session that a step reads and writes: its committed tokens (``state``) and its cache.

    While a step carries the session, this object belongs to the device thread, otherwise to the event loop. What only
    the event loop changes is in :class:`target_service.session.session.Session`; the device thread calls nothing of it
    but ``continues``.
    """

    spec: SessionSpec
    #: Parameters and committed tokens; rules and kernels know this part alone, and drafts have the same class.
    state: SamplingState
    sequence: KVSequence
    rule: Rule
    stop_criteria: StopCriteria
    #: What the output must look like; None: anything.
    grammar: Grammar | None = None
    #: The first position of the prompt whose hidden states the verdicts carry.
    first_state: int = 0
    #: What makes features of them before they are sent; None: they are sent as they are.
    state_map: StateMap | None = None
    #: Entries of the cache at most: what is left of the last block serves the siblings of trees.
    max_entries: int = 2**62
    #: Hidden states that nobody waits for.
    held: HeldStates = field(default_factory=HeldStates)


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One session's part of a step: a chunk of its prompt, a round [last committed token, drafted tokens…], or tokens
    that are fed once more because it was preempted (nothing is decided then, and nothing but their entries wanted).
    """

    session: StepSession
    token_ids: Sequence[int]
    #: Whether the verifier decides what follows; False for a chunk of a prompt that is not the last one.
    decides: bool
    #: Fed and verified: of the proposal, or what the grammar forces.
    draft_token_ids: tuple[int, ...] = ()
    q_rows: tuple[SparseRow, ...] = ()
    #: The proposal's tokens in the places of those; empty in place of a tree that is not fed.
    proposed_token_ids: tuple[int, ...] = ()
    is_prefill: bool = False
    #: Whether it was asked for as a round, with or without drafts.
    is_round: bool = False
    #: Of each drafted token the one it follows, -1 for the committed tokens; empty: a chain.
    parents: tuple[int, ...] = ()
    #: Whether the session decodes on by itself after it, so that nobody waits for its hidden states.
    holds_states: bool = False

    @property
    def is_multi_step(self) -> bool:
        """Whether it is a token of multi-step decode."""
        return self.decides and not self.is_prefill and not self.is_round

    def following(
        self, token_ids: tuple[int, ...], forced: tuple[int, ...], *, holds_states: bool
    ) -> ScheduledSequence:
        """The next token of multi-step decode, and forced ones, after this part, which committed ``token_ids``."""
        token_ids = token_ids[-1], *forced
        return ScheduledSequence(
            self.session, token_ids, decides=True, draft_token_ids=forced, holds_states=holds_states
        )

    def num_accepted(self, num_drafts: int) -> int:
        """The tokens of the proposal among the accepted drafts."""
        if self.parents:
            return num_drafts
        pairs = zip(self.draft_token_ids[:num_drafts], self.proposed_token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def num_logits(self) -> int:
        """Rows of logits the part needs: the last ones."""
        if self.is_prefill and self.session.spec.params.prompt_logprobs is not None:
            return len(self.token_ids)
        return len(self.draft_token_ids) + 1 if self.decides else 0

    @property
    def num_states(self) -> int:
        """Rows of hidden states the part needs: the last ones. Of a round all: any of its tokens may be the last."""
        session, num_rows = self.session, len(self.token_ids)
        if not session.spec.hidden_state_layers or (self.holds_states and session.spec.last_hidden_state_only):
            return 0
        if not self.is_prefill:
            return num_rows if self.decides else 0
        return max(0, min(num_rows, session.sequence.length + num_rows - session.first_state))


@dataclass(frozen=True, slots=True)
class PartResult:
    """What a part brought."""

    cut: Truncation = field(default_factory=lambda: Truncation(()))
    num_accepted: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    #: Of the chunk, or those that committed tokens were predicted from: of the round and of those held before.
    hidden_states: tuple[HiddenStates, ...] = ()
    error: TandemError | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, part by part."""

    parts: list[PartResult]
    started_ns: int
    #: The step's share of a round's timings; ``queue_ns`` is the session's own.
    timings: RoundTimings = field(default_factory=RoundTimings)


def run_steps(
    model: Model,
    verifier: Verifier,
    parts: Sequence[ScheduledSequence],
    follow: Callable[[StepResult], Sequence[ScheduledSequence] | None],
    deliver: Callable[[StepResult], object],
) -> StepResult:
    """Run a step, and at once those that ``follow`` names after each result; it names None after the last.

    ``deliver`` gets every result but the last, which is returned.
    """
    result = run_step(model, verifier, parts)
    while (following := follow(result)) is not None:
        deliver(result)
        result = run_step(model, verifier, following)
    return result


def run_step(model: Model, verifier: Verifier, parts: Sequence[ScheduledSequence]) -> StepResult:
    """Feed all parts in one forward pass, verify all rounds at once, and commit their tokens to the states."""
    started_ns = time.perf_counter_ns()
    segments: list[Segment] = []
    rounds: list[Round] = []
    row = 0
    for part in parts:
        session, num_logits = part.session, part.num_logits
        follows = (-1, *(parent + 1 for parent in part.parents)) if part.parents else ()
        segments.append(
            Segment(
                session.sequence, part.token_ids, num_logits, part.num_states, session.spec.hidden_state_layers, follows
            )
        )
        row += num_logits
        if part.decides:
            start_row = row - len(part.draft_token_ids) - 1
            drafted = (part.draft_token_ids, part.q_rows, session.spec.params.logprobs, part.parents)
            rounds.append(Round(session.state, session.rule, start_row, *drafted, grammar=session.grammar))
    masks = verifier.begin_masks(rounds)
    states: PassStates | None = None
    if any(segment.num_states for segment in segments):
        logits, states = model.forward_with_states(segments)
        for index, (part, segment) in enumerate(zip(parts, segments, strict=True)):
            if segment.num_states and not (part.holds_states or part.session.held):
                states.fetch(index, part.session.spec.hidden_state_dtype, part.session.state_map)
    else:
        logits = model.forward(segments)
    forward_done_ns = time.perf_counter_ns()
    filled = None if masks is None else masks.result()
    mask_wait_ns = 0 if masks is None else time.perf_counter_ns() - forward_done_ns
    decided = verifier.verify(logits, rounds, () if filled is None else filled.masks)
    _keep_paths(model, parts, decided)
    outcomes = iter(decided)
    results = []
    row = 0
    for index, (part, segment) in enumerate(zip(parts, segments, strict=True)):
        scored: Sequence[PositionLogprobs] = ()
        if part.is_prefill and part.session.spec.params.prompt_logprobs is not None:
            scored = _score_prompt(
                part, part.session.spec.params.prompt_logprobs, logits[row : row + segment.num_logits]
            )
        row += segment.num_logits
        own = (states, index, segment.num_states) if states is not None and segment.num_states else None
        if part.decides:
            results.append(_commit(part, next(outcomes), scored, own))
        else:
            results.append(PartResult(prompt_logprobs=scored, hidden_states=_states_of_chunk(part, own)))
    timings = RoundTimings(
        forward_ns=forward_done_ns - started_ns,
        verify_ns=time.perf_counter_ns() - forward_done_ns,
        batch_sessions=len(parts),
        batch_rows=sum(len(part.token_ids) for part in parts),
        batch_context=sum(part.session.sequence.length for part in parts),
        mask_fill_ns=0 if filled is None else filled.fill_ns,
        mask_wait_ns=mask_wait_ns,
    )
    return StepResult(results, started_ns, timings)


def _keep_paths(model: Model, parts: Sequence[ScheduledSequence], outcomes: Sequence[Outcome]) -> None:
    """Only the accepted path stays in the cache of a tree, and of forced tokens, which the next step may follow at
    once.
    """
    kept = []
    for part, outcome in zip((part for part in parts if part.decides), outcomes, strict=True):
        if part.parents or (part.is_multi_step and part.draft_token_ids):
            sequence = part.session.sequence
            rows = (0, *(i + 1 for i in outcome.path))  # row 0 is the last committed token's
            kept.append(Kept(sequence, sequence.length - len(part.token_ids), rows))
    if kept:
        model.keep_rows(kept)


def _commit(
    part: ScheduledSequence, outcome: Outcome, scored: Sequence[PositionLogprobs], own: OwnStates | None
) -> PartResult:
    state = part.session.state
    base_len = len(state)
    cut = part.session.stop_criteria.cut(base_len, outcome.token_ids)
    if part.session.grammar is not None:
        try:
            cut = part.session.grammar.commit(cut)
        except InvalidRequest as error:
            return PartResult(error=error)
    if outcome.error is not None and cut.finish_reason is None:
        return PartResult(error=outcome.error)
    state.commit(cut.token_ids)
    states = _states_of_chunk(part, own) if part.is_prefill else _states_of_round(part, outcome, base_len, cut, own)
    num_accepted = part.num_accepted(outcome.num_accepted)
    return PartResult(cut, num_accepted, outcome.logprobs[: len(cut.token_ids)], scored, states)


def _states_of_chunk(part: ScheduledSequence, own: OwnStates | None) -> tuple[HiddenStates, ...]:
    """All that were computed of a prompt's chunk."""
    if own is None:
        return ()
    num_rows = own[2]
    return (_hidden_states(part, own, part.session.sequence.length - num_rows, range(num_rows)),)


def _states_of_round(
    part: ScheduledSequence, outcome: Outcome, base_len: int, cut: Truncation, own: OwnStates | None
) -> tuple[HiddenStates, ...]:
    """Those that the committed tokens were predicted from; of a tree along the accepted path. None where the sequence
    ends: nothing follows.
    """
    count = len(cut.token_ids)
    if own is None or not count or cut.finish_reason is not None:
        return ()
    first = count - 1 if part.session.spec.last_hidden_state_only else 0
    rows: Sequence[int] = range(first, count)
    if part.parents:
        rows = (0, *(i + 1 for i in outcome.path))[first:count]
    held, start = part.session.held, base_len - 1 + first
    if not (part.holds_states or held):
        return (_hidden_states(part, own, start, rows),)
    states, index, _ = own
    held.add(start, states.raw(index, rows), len(rows))
    if part.holds_states and not held.is_full:
        return ()
    return (held.take(part.session.spec, part.session.state_map),)


def _hidden_states(part: ScheduledSequence, own: OwnStates, start: int, rows: Sequence[int]) -> HiddenStates:
    states, index, _ = own
    return states.rows(index, rows, start, part.session.spec.hidden_state_dtype, part.session.state_map)


def _score_prompt(part: ScheduledSequence, num_top: int, logits: torch.Tensor) -> Sequence[PositionLogprobs]:
    """Log-probabilities of the prompt's tokens that follow those of the chunk; its last token decides the output."""
    session = part.session
    end = session.sequence.length
    start = end - len(part.token_ids)
    following = session.state.token_ids[start + 1 : min(end + 1, session.stop_criteria.prompt_len)]
    if not following:
        return ()
    return position_logprobs(logits[: len(following)], following, num_top, session.state.num_tokens)
