"""EAGLE-1, EAGLE-2, EAGLE-3 and MTP drafters: a layer that extrapolates the target's features, a token at a time.

With n committed tokens the target's states of the positions 0 … n-2 are known; each predicted the token after it. An
entry of the head's cache is made of a state and that token, so n-1 entries are on true features. The output at the last
of them predicts token n. Every drafted token but the last makes one entry more, on the head's own features. A verdict
brings the true states of what it accepted. So after every draft the entries on predicted features are dropped, and the
accepted positions are ingested with their true states.

An entry of n prediction layers depends on n tokens after its position. Those of the last n - 1 positions are dropped
after every draft, too, and their states wait for the next one.

In a window whole blocks of the cache are dropped; the entries that stay keep the positions they were rotated by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from draft_service.drafters.base import UNLIMITED, Draft, DraftJob, Occupancy
from draft_service.drafters.heads.base import HeadDrafter, LoadedHead, Works, tensor_of
from draft_service.drafters.heads.known_states import KnownStates
from draft_service.drafters.heads.misread import FirstText
from draft_service.drafters.trees.tree_passes import DraftedTree, TreeJob, draft_trees, new_rows, rows_of_parents
from draft_service.drafters.window import DraftWindow
from engine.batch import Segment
from engine.chains import ChainJob, StopFlags
from engine.device_thread import DeviceThread
from engine.heads.blocks import PagedBlocks
from engine.heads.eagle import EagleHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.mtp import MtpHead
from engine.heads.paged import PagedHead
from engine.kv_pool import CacheFull
from engine.kv_sequence import KVSequence
from engine.sampling.drafting import DraftedChain
from engine.sampling.state import SamplingState
from specdec.errors import InvalidRequest
from specdec.process.tasks import log_failure
from specdec.rules import DEFAULT_RULE, Rule
from specdec.settings import DraftSettings
from specdec.tree_shape import TreeShape
from specdec.types import HiddenStates, SessionSpec


@dataclass(slots=True, eq=False)
class EagleState:
    """One session of an EAGLE head."""

    sampling: SamplingState
    #: None if the prompt is longer than the context; nothing is drafted then.
    sequence: KVSequence | None
    rule: Rule
    known: KnownStates = field(default_factory=KnownStates)
    #: The state of the last entry, of one position. It is fed again if nothing is pending. None: there is no entry, or
    #: another session has computed it.
    newest: HiddenStates | None = None
    num_cached_tokens: int = 0
    #: Tokens that are not read: see :class:`DraftWindow`.
    num_skipped: int = 0
    #: Tokens at most, committed and drafted; the cache may hold more entries, for siblings.
    max_tokens: int = 0
    #: Tokens after its position that an entry depends on.
    num_read: int = 1

    @property
    def token_ids(self) -> Sequence[int]:
        """The committed tokens."""
        return self.sampling.token_ids

    @property
    def num_pending(self) -> int:
        """States that can be ingested for good and are not."""
        return 0 if self.sequence is None else self.known.num_waiting(len(self.sampling) + 1 - self.num_read)

    @property
    def may_draft(self) -> bool:
        """Whether the state that predicts the next token is known."""
        if self.sequence is None or self.known.end != len(self.sampling) - 1:
            return False
        return self.newest is not None or self.known.num_waiting(len(self.sampling)) > 0


@dataclass(frozen=True, slots=True, eq=False)
class _EagleWork:
    """A job and the states it ingests."""

    state: EagleState
    taken: list[HiddenStates]
    job: ChainJob
    #: Shape of the tree to draft instead of the chain.
    shape: TreeShape | None

    def tree(self) -> TreeJob:
        """The tree to draft."""
        job = self.job
        assert self.shape is not None
        return TreeJob(job.sequence, job.token_ids, self.shape, job.num_tokens, job.state, job.rule)


class EagleDrafter(HeadDrafter[EagleState, _EagleWork]):
    """Drafts with an EAGLE head; see the module."""

    def __init__(
        self, loaded: LoadedHead, paged: PagedHead | PagedBlocks, thread: DeviceThread, settings: DraftSettings
    ) -> None:
        """Both were loaded on the thread."""
        super().__init__(loaded, thread)
        self._paged = paged
        self._pool = paged.pool
        self._shares_prefixes = settings.scheduler.enable_prefix_caching
        tree = settings.speculative.tree
        #: Entries that trees need beyond those of the tokens before them.
        self._num_fed = 0 if tree is None else tree.num_fed
        most = loaded.head.max_tokens if isinstance(loaded.head, MtpHead) else None
        self._num_read = most or 1
        #: Tokens of a chain at most.
        self._max_depth = most or UNLIMITED
        if most and tree is not None:
            raise InvalidRequest(
                f"{loaded.info.name} has {most} prediction layers, which draft a token each and no tree: leave out"
                " tree_top_k and speculative_token_tree",
                param="tree_top_k",
            )
        self._state_width = paged.head.num_features
        self.info = replace(
            loaded.info,
            max_model_len=paged.max_model_len,
            kv_cache_tokens=paged.pool.total_blocks * paged.pool.block_size,
            num_speculative_tokens=min(loaded.info.num_speculative_tokens, self._max_depth),
        )
        self._window = DraftWindow.of(settings, self.info, multiple=self._pool.block_size)
        self._first_text = FirstText(loaded)
        self._explaining: asyncio.Task[None] | None = None

    @classmethod
    def _of(cls, loaded: LoadedHead, thread: DeviceThread, settings: DraftSettings) -> Self:
        assert isinstance(loaded.head, EagleHead | Eagle3Head | MtpHead)
        return cls(loaded, PagedHead(loaded.head, loaded.model, loaded.info.max_model_len), thread, settings)

    @property
    def num_open(self) -> int:
        """Open sessions with a cache."""
        return self._pool.num_open

    def open(self, spec: SessionSpec) -> EagleState:
        """Reserve the cache of the prompt, or take over what others have computed of it."""
        state = EagleState(self._sampling(spec), None, spec.rule or DEFAULT_RULE, num_read=self._num_read)
        pool = self._pool
        context = min(self.info.max_model_len, pool.total_blocks * pool.block_size)
        if len(spec.token_ids) > context:
            return state
        wanted = context if spec.params.max_tokens is None else spec.prompt_len + spec.params.max_tokens
        state.max_tokens = max(len(spec.token_ids), min(wanted, context))
        # An entry depends on all tokens before it, and stands for the last one that it reads.
        num_read = self._num_read
        scope = (spec.owner, spec.cache_salt, *spec.token_ids[:num_read])
        state.sequence = pool.open_empty(scope if self._shares_prefixes else None)
        num_known = max(0, len(spec.token_ids) - num_read - 1)
        state.num_cached_tokens = pool.match(state.sequence, spec.token_ids[num_read:], num_known)
        num_held = min(len(spec.token_ids), self._window.size)
        if not pool.grow(state.sequence, num_held):
            pool.release(state.sequence)
            raise CacheFull(f"{num_held} tokens do not fit into the head's KV cache at this moment")
        state.known = KnownStates(range(state.num_cached_tokens))
        self._skip(state)
        self._first_text.open(state, spec, state.num_cached_tokens)
        return state

    def advance(
        self, state: EagleState, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        """Keep the entries on tokens that stay, and the states that came."""
        self._check_states(hidden_states)
        self._first_text.commit(state, keep, token_ids, hidden_states)
        if keep < len(state.sampling):
            state.known.cut(keep, self._num_read)
            if state.sequence is not None and state.known.num_entries < state.sequence.length:
                self._rollback(state)
                state.newest = None
        state.sampling = state.sampling.committed(keep, token_ids)
        if state.sequence is not None:
            self._skip(state)
            state.known.add(hidden_states)

    def num_cached_tokens(self, state: EagleState) -> int:
        """Tokens whose entries another session had computed."""
        return state.num_cached_tokens

    def room(self, state: EagleState) -> int:
        """Drafting k tokens needs len + k - 2 entries at most, and the state of the last token but one."""
        return state.max_tokens + 1 - len(state.sampling) if state.may_draft else 0

    def close(self, state: EagleState) -> None:
        """Release the cache."""
        sequence, state.sequence = state.sequence, None
        state.newest = None
        if sequence is not None:
            self._pool.rollback(sequence, state.known.num_entries)
            self._pool.release(sequence, self._text_of_entries(state))
        if self._first_text.close(state):
            self._explaining = asyncio.get_running_loop().create_task(self._first_text.explain(self._thread))
            self._explaining.add_done_callback(log_failure)

    def occupancy(self) -> Occupancy:
        """Blocks of open sessions, blocks that may serve later ones, and all."""
        pool = self._pool
        return Occupancy(pool.used_blocks, pool.cached_blocks, pool.total_blocks)

    def _rollback(self, state: EagleState) -> None:
        """Keep the entries of known states. Where the pool cannot keep them all, the others are a gap from now on."""
        assert state.sequence is not None
        self._pool.rollback(state.sequence, min(state.known.num_entries, state.sequence.length))
        state.known.keep(state.sequence.length)

    def _text_of_entries(self, state: EagleState) -> Sequence[int]:
        """The tokens that entries stand for, up to the first gap."""
        return state.token_ids[self._num_read : self._num_read + state.known.num_before_gap]

    def _skip(self, state: EagleState) -> None:
        """Forget what is not read of the committed tokens any more."""
        start, num_skipped = self._window.num_sinks, self._window.num_skipped(len(state.sampling))
        if num_skipped == state.num_skipped:
            return
        assert state.sequence is not None
        state.num_skipped, size = num_skipped, self._pool.block_size
        first, count = state.known.skip(start, start + num_skipped)
        if not count:  # all entries are read
            return
        if first % size:  # not all of the first tokens' states are known: none of their entries stays
            first, count = 0, first + count
        if blocks := count // size:
            self._pool.drop_blocks(state.sequence, first // size, blocks)
            state.known.drop(first, blocks * size)

    def _num_more(self, job: DraftJob[EagleState], num_tokens: int) -> int:
        """Entries that drafting needs behind those of the committed tokens."""
        return self._num_fed if job.tree else num_tokens

    def _prepare(self, job: DraftJob[EagleState]) -> _EagleWork | None:
        state = job.state
        num_rows = min(job.num_rows, state.num_pending)
        num_tokens = min(job.num_tokens, self._max_depth) if state.may_draft and num_rows == state.num_pending else 0
        if state.sequence is None or not (num_rows or num_tokens):
            return None
        known = state.known
        if num_tokens:  # and those that are not ingested for good
            num_rows = known.num_waiting(len(state.sampling))
        if state.sequence.length >= state.sequence.publishable_from:
            self._pool.publish(state.sequence, self._text_of_entries(state))
        num_entries = known.num_entries + num_rows + self._num_more(job, num_tokens)
        if not self._pool.grow(state.sequence, min(num_entries, self._pool.total_blocks * self._pool.block_size)):
            self.close(state)  # it drafts nothing any more, and others have its blocks
            return None
        if not num_rows:
            assert state.newest is not None
            known.put_back([state.newest])
            self._rollback(state)
            num_rows = 1
        first, taken = known.num_entries, known.take(num_rows)
        positions = known.positions(first, num_rows)
        job_of_head = ChainJob(
            state.sequence,
            [state.token_ids[position + 1] for position in positions],
            num_tokens,
            state.sampling,
            state.rule,
            positions=positions,
        )
        return _EagleWork(state, taken, job_of_head, job.tree if num_tokens else None)

    def _compute(self, works: Sequence[_EagleWork], stop: StopFlags) -> Sequence[DraftedChain]:
        jobs = [replace(work.job, features=self._features(work)) for work in works]
        return self._paged.draft_chains(jobs, stop)

    def _compute_trees(
        self, works: Sequence[_EagleWork], stopped: Callable[[], Sequence[bool]]
    ) -> Sequence[DraftedTree]:
        assert isinstance(self._paged, PagedHead)
        features = {work.job.sequence: self._features(work) for work in works}
        return draft_trees(PagedTreePasses(self._paged, features), [work.tree() for work in works], stopped)

    def _features(self, work: _EagleWork) -> Tensor:
        """What a work ingests, [positions, features]; on the device thread."""
        states = self._paged.alike([tensor_of([each]) for each in work.taken])
        return states[0] if len(states) == 1 else torch.cat(states)

    def _finish(self, work: _EagleWork) -> None:
        """Keep the state to feed again."""
        last, known = work.taken[-1], work.state.known
        if self._num_read == 1:
            work.state.newest = last.rows(last.end - 1, last.end)
            return
        start = len(work.state.sampling) - self._num_read  # the first position whose entry is not complete
        parts = (each.rows(max(start, each.start), each.end) for each in work.taken)
        known.put_back([part for part in parts if part.num_positions])

    def _drafts(
        self,
        batch: Sequence[DraftJob[EagleState]],
        works: Works[EagleState, _EagleWork],
        drafted: Sequence[DraftedChain | DraftedTree],
    ) -> list[Draft]:
        drafts = super()._drafts(batch, works, drafted)
        for place, (_, work) in works.items():
            self._first_text.draft(work.state, () if drafts[place].parents else drafts[place].token_ids)
        return drafts

    def _undo(self, work: _EagleWork) -> None:
        state = work.state
        state.known.put_back(work.taken)
        self._rollback(state)


class PagedTreePasses:
    """On an EAGLE head. Nodes are fed again at every level: attention sees all rows of a tree in one pass."""

    def __init__(self, paged: PagedHead, features: Mapping[KVSequence, Tensor]) -> None:
        """``features``: the target's states of the committed tokens that are fed first."""
        self._paged = paged
        self._features = features
        #: The head's output at the last committed token and at the nodes, [1 + nodes, H].
        self._states: dict[KVSequence, Tensor] = {}

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits over the target's vocabulary, float32 [new rows, V]."""
        known = self._states
        is_first = not known
        if is_first:
            states = torch.cat(self._paged.alike([self._features[segment.sequence] for segment in segments]))
        else:
            states = torch.cat([rows_of_parents(known[segment.sequence], segment.parents) for segment in segments])
        x, logits = self._paged.step(segments, states, are_features=is_first)
        for segment, rows in zip(segments, new_rows(x, segments), strict=True):
            known[segment.sequence] = rows if is_first else torch.cat((known[segment.sequence], rows))
        return logits
