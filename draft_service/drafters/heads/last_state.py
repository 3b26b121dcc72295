"""Drafters whose head reads one state of the target: the one that predicted the last committed token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draft_service.drafters.base import DraftJob
from draft_service.drafters.heads.base import HeadDrafter, LoadedHead, tensor_of
from draft_service.drafters.trees.tree_passes import DraftedTree, Passes, TreeJob, draft_trees
from engine.chains import Drawing, Feed, StopFlags, draw_chains
from engine.device_thread import DeviceThread
from engine.kv_sequence import KVSequence
from engine.sampling.drafting import DraftedChain
from engine.sampling.state import SamplingState
from engine.sampling.transfer import send
from specdec.rules import DEFAULT_RULE, Rule
from specdec.settings import DraftSettings
from specdec.tree_shape import TreeShape
from specdec.types import HiddenStates, SessionSpec


@dataclass(slots=True, eq=False)
class LastState:
    """One session: its tokens, and the newest state of the target."""

    sampling: SamplingState
    rule: Rule
    #: Of one position.
    newest: HiddenStates | None = None
    num_pending: int = 0

    @property
    def token_ids(self) -> Sequence[int]:
        """The committed tokens."""
        return self.sampling.token_ids

    @property
    def may_draft(self) -> bool:
        """Whether the newest state is the one that predicted the last committed token."""
        return self.newest is not None and self.newest.end == len(self.sampling) - 1


@dataclass(frozen=True, slots=True)
class _LastStateWork:
    """A chain to draft."""

    newest: HiddenStates
    state: SamplingState
    rule: Rule
    num_tokens: int
    shape: TreeShape | None


class LastStateDrafter(HeadDrafter[LastState, _LastStateWork]):
    """Keeps one state of the target per session, and no cache. A subclass runs the head."""

    def __init__(
        self, loaded: LoadedHead, thread: DeviceThread, settings: DraftSettings, *, width: int, max_depth: int
    ) -> None:
        """``width``: numbers of a state; ``max_depth``: tokens the head drafts one after the other at most."""
        super().__init__(loaded, thread)
        self._max_depth = max_depth
        self._num_open = 0
        self._state_width = width
        self._dtype: torch.dtype = getattr(torch, loaded.info.dtype)
        num_tokens = loaded.info.num_speculative_tokens
        if settings.speculative.tree is None:
            num_tokens = min(num_tokens, max_depth)
        self.info = replace(loaded.info, num_speculative_tokens=num_tokens, last_hidden_state_only=True)

    @abstractmethod
    def _begin(self, states: Tensor, last_tokens: Sequence[int], num_tokens: int) -> tuple[Tensor, Feed]:
        """Logits of the first drafted tokens, float32 [R, V], and a function for those of the next ones.

        states [R, H] on the head's device and of its dtype; at most ``num_tokens`` are drafted.
        """

    def _draw(
        self, works: Sequence[Drawing], states: Tensor, last_tokens: Sequence[int], stop: StopFlags
    ) -> list[DraftedChain]:
        """The chains of a batch."""
        logits, feed = self._begin(states, last_tokens, max(work.num_tokens for work in works))
        return draw_chains(logits, works, feed, stop)

    @abstractmethod
    def _tree_passes(self, states: Mapping[KVSequence, Tensor], depth: int) -> Passes:
        """Passes over trees of ``depth`` levels at most, after the states [1, H] of their sequences."""

    @property
    def num_open(self) -> int:
        """Open sessions."""
        return self._num_open

    def open(self, spec: SessionSpec) -> LastState:
        """A state that takes hardly any memory."""
        state = LastState(self._sampling(spec), spec.rule or DEFAULT_RULE)
        self._num_open += 1
        return state

    def close(self, state: LastState) -> None:
        """Nothing is kept."""
        self._num_open -= 1

    def advance(
        self, state: LastState, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        """Remember the newest state."""
        self._check_states(hidden_states)
        state.sampling = state.sampling.committed(keep, token_ids)
        position = len(state.sampling) - 2
        for states in hidden_states:
            wanted = states.rows(position, position + 1)
            if wanted.num_positions:
                state.newest = wanted

    def room(self, state: LastState) -> int:
        """The rest of the context; 0 without the state."""
        return self.info.max_model_len + 1 - len(state.sampling) if state.may_draft else 0

    def _prepare(self, job: DraftJob[LastState]) -> _LastStateWork | None:
        state = job.state
        shape = job.tree and job.tree.cut(self._max_depth)
        num_tokens = job.num_tokens if shape else min(job.num_tokens, self._max_depth)
        if state.newest is None or not state.may_draft or num_tokens <= 0:
            return None
        return _LastStateWork(state.newest, state.sampling, state.rule, num_tokens, shape)

    def _compute(self, works: Sequence[_LastStateWork], stop: StopFlags) -> Sequence[DraftedChain]:
        with torch.inference_mode():
            states = self._states(works)
            last_tokens = [work.state.token_ids[-1] for work in works]
            return self._draw(works, states, last_tokens, stop)

    def _compute_trees(
        self, works: Sequence[_LastStateWork], stopped: Callable[[], Sequence[bool]]
    ) -> Sequence[DraftedTree]:
        jobs = []
        for work in works:
            assert work.shape is not None
            sequence = KVSequence(np.empty(0, dtype=np.int32), capacity=2**31)  # without a cache
            jobs.append(
                TreeJob(sequence, work.state.token_ids[-1:], work.shape, work.num_tokens, work.state, work.rule)
            )
        rows = self._states(works)
        states = {job.sequence: rows[i : i + 1] for i, job in enumerate(jobs)}
        return draft_trees(self._tree_passes(states, max(job.shape.depth for job in jobs)), jobs, stopped)

    def _states(self, works: Sequence[_LastStateWork]) -> Tensor:
        """The target's states, [R, H]."""
        return send(tensor_of([work.newest for work in works]), self._device).to(self._dtype)

    def _undo(self, work: _LastStateWork) -> None:
        """Nothing changes in a state."""
