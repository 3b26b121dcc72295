"""Drafters whose head reads one state of the target: that which the last committed token was predicted from."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from draft_service.drafter import DraftJob
from draft_service.head_drafter import HeadDrafter, LoadedHead, committed, load_head, tensor_of
from specdec.engine.chains import Drawing, Feed, StopFlags, draw_chains
from specdec.engine.device_thread import DeviceThread
from specdec.sampling.drafting import DraftedChain
from specdec.sampling.rule import Rule
from specdec.sampling.state import SamplingState
from specdec.sessions import HiddenStates, SessionSpec
from specdec.settings import DraftSettings


@dataclass(slots=True, eq=False)
class LastState:
    """One session: its tokens, and the newest state of the target."""

    sampling: SamplingState
    rule: Rule
    #: Of one position.
    newest: HiddenStates | None = None
    num_pending: int = 0
    num_cached_tokens: int = 0

    @property
    def token_ids(self) -> Sequence[int]:
        """The committed tokens."""
        return self.sampling.token_ids

    @property
    def may_draft(self) -> bool:
        """Whether the state is that which the last committed token was predicted from."""
        return self.newest is not None and self.newest.end == len(self.sampling) - 1


@dataclass(frozen=True, slots=True)
class _Work:
    """A chain to draft."""

    newest: HiddenStates
    state: SamplingState
    rule: Rule
    num_tokens: int
    num_candidates: int
    assumed: tuple[int, ...] = ()


class LastStateDrafter(HeadDrafter[LastState, _Work]):
    """Keeps a state per session and no cache; what the head computes of it is the subclass's."""

    def __init__(self, loaded: LoadedHead, thread: DeviceThread, *, width: int, max_tokens: int) -> None:
        """``width``: numbers of a state; ``max_tokens``: tokens the head drafts at most."""
        super().__init__(loaded, thread)
        self._state_width = width
        self._dtype: torch.dtype = getattr(torch, loaded.info.dtype)
        num_tokens = min(loaded.info.num_speculative_tokens, max_tokens)
        self.info = replace(loaded.info, num_speculative_tokens=num_tokens, last_hidden_state_only=True)

    @classmethod
    async def load(cls, settings: DraftSettings) -> Self:
        """Load and warm up the head on a device thread of its own; raises like :func:`load_head`."""
        thread = DeviceThread("draft-device")
        try:
            drafter = cls._of(await thread.run(load_head, settings), thread)
            await drafter.warm_up()
        except BaseException:
            await asyncio.to_thread(thread.close)
            raise
        return drafter

    @classmethod
    @abstractmethod
    def _of(cls, loaded: LoadedHead, thread: DeviceThread) -> Self:
        """A drafter on a loaded head."""

    @abstractmethod
    def _begin(self, states: Tensor, last_tokens: Sequence[int], num_tokens: int) -> tuple[Tensor, Feed]:
        """Logits of the first drafted tokens, float32 [R, V], and what gives those of the next.

        states [R, H] on the head's device and of its dtype; at most ``num_tokens`` are drafted.
        """

    def _draw(
        self, works: Sequence[Drawing], states: Tensor, last_tokens: Sequence[int], stop: StopFlags
    ) -> list[DraftedChain]:
        """The chains of a batch."""
        logits, feed = self._begin(states, last_tokens, max(work.num_tokens for work in works))
        return draw_chains(logits, works, feed, stop)

    def open(self, spec: SessionSpec) -> LastState:
        """A state without memory worth mentioning."""
        return LastState(self._sampling(spec), spec.rule or Rule.BLOCK)

    def advance(
        self, state: LastState, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        """Remember the newest state."""
        self._check_states(hidden_states)
        state.sampling = committed(state.sampling, keep, token_ids)
        position = len(state.sampling) - 2
        for states in hidden_states:
            wanted = states.rows(position, position + 1)
            if wanted.num_positions:
                state.newest = wanted

    def room(self, state: LastState) -> int:
        """As many as the context has; without the state none."""
        return self.info.max_model_len + 1 - len(state.sampling) if state.may_draft else 0

    def close(self, state: LastState, park_as: str | None = None) -> None:
        """Nothing is kept."""
        state.newest = None

    def _prepare(self, job: DraftJob[LastState]) -> _Work | None:
        state = job.state
        num_tokens = min(job.num_tokens, self.info.num_speculative_tokens)
        if state.newest is None or not state.may_draft or num_tokens <= 0 or job.assumed or job.assumes_next:
            return None
        return _Work(state.newest, state.sampling, state.rule, num_tokens, job.num_guesses)

    def _compute(self, works: Sequence[_Work], stop: StopFlags) -> Sequence[DraftedChain]:
        with torch.inference_mode():
            states = tensor_of([work.newest for work in works]).to(self._device, self._dtype)
            last_tokens = [work.state.token_ids[-1] for work in works]
            return self._draw(works, states, last_tokens, stop)

    def _undo(self, work: _Work) -> None:
        """Nothing changes in a state."""
