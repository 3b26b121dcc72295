"""A small causal language model as the draft: k forward passes for all waiting sessions together.

Which entries the cache holds is the whole art (``docs/drafters.md``). With n committed tokens c and drafts x₁…x_k,
drafting feeds cₙ₋₁, x₁…x₍ₖ₋₁₎: x_k is never fed. So after a verdict that accepts a < k drafts, the cache is cut to
the common prefix and the target's own token y is fed next; after a = k both x_k and y are. All of this is one rule
here: **keep the entries that agree with the committed tokens, feed the committed tokens that have no entry.**
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from draft_service.drafter import Draft, DraftJob
from specdec.engine.chains import ChainJob, draft_chains
from specdec.engine.device_thread import DeviceThread
from specdec.engine.engine import Engine
from specdec.engine.kv_pool import KVSequence
from specdec.errors import InvalidRequest
from specdec.sampling.drafting import DraftedChain
from specdec.sampling.params import SamplingParams
from specdec.sampling.state import SamplingState
from specdec.sessions import ModelInfo, Rule, SessionSpec
from specdec.settings import DraftSettings


@dataclass(slots=True, eq=False)
class ModelState:
    """One session of a draft model."""

    sampling: SamplingState
    #: None where the prompt is longer than the model's context: then nothing is ever drafted.
    sequence: KVSequence | None
    rule: Rule
    num_cached_tokens: int = 0
    #: The last drafts. The cache may hold entries of all but the last one, after those of the committed tokens.
    drafted: tuple[int, ...] = ()

    @property
    def token_ids(self) -> Sequence[int]:
        """The committed tokens."""
        return self.sampling.token_ids

    @property
    def num_pending(self) -> int:
        """Committed tokens without an entry in the cache."""
        return 0 if self.sequence is None else max(0, len(self.sampling) - self.sequence.length)


Job = DraftJob[ModelState]


class ModelDrafter:
    """Drafts with a small model; its forward passes run on the device thread, its bookkeeping on the event loop."""

    def __init__(self, engine: Engine, thread: DeviceThread, settings: DraftSettings) -> None:
        """The engine must have been loaded on the thread; both are closed by :meth:`shutdown`."""
        self._engine = engine
        self._pool = engine.pool
        self._thread = thread
        self._down = False
        self._park_ttl_s = settings.scheduler.park_ttl_s
        self.info: ModelInfo = replace(
            engine.info,
            method="draft_model",
            num_speculative_tokens=settings.speculative.num_speculative_tokens,
        )

    @classmethod
    async def load(cls, settings: DraftSettings) -> Self:
        """Load and warm up the model on a device thread of its own; raises like :meth:`Engine.load`."""
        if settings.model is None:
            raise InvalidRequest("a draft model needs its folder; give --model", param="model")
        thread = DeviceThread("draft-device")
        try:
            engine = await thread.run(Engine.load, settings.model)
            await thread.run(engine.warm_up)
            drafter = cls(engine, thread, settings)
            await drafter._warm_up()
        except BaseException:
            await asyncio.to_thread(thread.close)
            raise
        return drafter

    def open(self, spec: SessionSpec) -> ModelState:
        """Reserve the cache of the whole session, or take back what is parked under its id."""
        info = self.info
        sampling = SamplingState(
            spec.params,
            spec.token_ids,
            spec.prompt_len,
            info.vocab_size,
            tokenizer_size=info.tokenizer_size or None,
            device=self._engine.device,
        )
        state = ModelState(sampling, None, spec.rule or Rule.BLOCK)
        pool = self._pool
        context = min(info.max_model_len, pool.total_blocks * pool.block_size)
        if len(spec.token_ids) > context:
            return state
        pool.expire(time.monotonic(), self._park_ttl_s)
        wanted = context if spec.params.max_tokens is None else spec.prompt_len + spec.params.max_tokens
        max_tokens = max(len(spec.token_ids), min(wanted, context))
        if spec.park:
            state.sequence = pool.resume(spec.session_id, spec.token_ids, max_tokens)
        if state.sequence is None:
            state.sequence = pool.open(max_tokens)
        state.num_cached_tokens = state.sequence.length
        return state

    def advance(self, state: ModelState, keep: int, token_ids: Sequence[int]) -> None:
        """Keep the entries that agree with the new committed tokens; O(1) besides comparing ``token_ids``."""
        sampling, sequence = state.sampling, state.sequence
        agreeing = keep
        if keep == len(sampling):
            for drafted, committed in zip(state.drafted, token_ids, strict=False):
                if drafted != committed:
                    break
                agreeing += 1
            with torch.inference_mode():  # the counts were made in it
                sampling.commit(token_ids)
        else:  # Committed tokens were taken back: rare, and the counts of the penalties start anew.
            state.sampling = SamplingState(
                sampling.params,
                [*sampling.token_ids[:keep], *token_ids],
                sampling.prompt_len,
                sampling.vocab_size,
                tokenizer_size=sampling.num_tokens,
                device=sampling.device,
            )
        state.drafted = ()
        if sequence is not None and sequence.length > agreeing:
            self._pool.rollback(sequence, agreeing)

    def room(self, state: ModelState) -> int:
        """Drafting k tokens needs len + k - 1 entries."""
        return 0 if state.sequence is None else state.sequence.max_tokens + 1 - len(state.sampling)

    async def draft(self, batch: Sequence[Job]) -> list[Draft]:
        """One call on the device thread: a ragged pass that takes in what is pending, then a step per drafted token."""
        before = [self._prepare(job) for job in batch]
        try:
            chains = await self._thread.run(self._compute, batch)
        except Exception:
            for job, length in zip(batch, before, strict=True):
                if job.state.sequence is not None:
                    self._pool.rollback(job.state.sequence, min(length, job.state.sequence.length))
            raise
        for job, chain in zip(batch, chains, strict=True):
            job.state.drafted = chain.token_ids
        return [Draft(chain.token_ids, chain.q_rows) for chain in chains]

    def close(self, state: ModelState, park_as: str | None = None) -> None:
        """Release or park the cache."""
        sequence, state.sequence = state.sequence, None
        if sequence is None:
            return
        if park_as is None:
            self._pool.release(sequence)
            return
        if sequence.length > len(state.token_ids):
            self._pool.rollback(sequence, len(state.token_ids))
        now = time.monotonic()
        self._pool.park(sequence, park_as, state.token_ids, now)
        self._pool.expire(now, self._park_ttl_s)

    def occupancy(self) -> tuple[int, int, int]:
        """Blocks of open and parked sessions, blocks in all, parked sessions."""
        pool = self._pool
        pool.expire(time.monotonic(), self._park_ttl_s)
        return pool.used_blocks + pool.parked_blocks, pool.total_blocks, pool.num_parked

    async def shutdown(self) -> None:
        """Drop the model and end the thread."""
        if not self._down:
            self._down = True
            await self._thread.run(self._engine.close)
            await asyncio.to_thread(self._thread.close)

    async def _warm_up(self) -> None:
        """Draw once under every rule, so that no session pays for the first time."""
        num_tokens = min(2, self.info.num_speculative_tokens)
        for temperature, rule in ((0.0, Rule.BLOCK), (1.0, Rule.BLOCK), (1.0, Rule.COUPLED)):
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=4)
            state = self.open(SessionSpec(session_id="warm-up", token_ids=(0,), prompt_len=1, params=params, rule=rule))
            await self.draft([DraftJob(state, 1, num_tokens)])
            self.close(state)

    def _prepare(self, job: Job) -> int:
        """Bring the cache to where the job feeds from; returns its length.

        Drafts of an earlier call that no verdict has judged are dropped. Where every committed token has its entry
        already, the last one is fed again for its logits.
        """
        state = job.state
        assert state.sequence is not None
        longest = len(state.sampling) - (1 if job.num_tokens else 0)
        if state.sequence.length > longest:
            self._pool.rollback(state.sequence, longest)
        state.drafted = ()
        return state.sequence.length

    def _compute(self, jobs: Sequence[Job]) -> list[DraftedChain]:
        """Feed and draft, on the device thread."""
        chains = []
        for job in jobs:
            state, sequence = job.state, job.state.sequence
            assert sequence is not None
            start = sequence.length
            end = len(state.sampling) if job.num_tokens else start + job.num_rows
            chains.append(ChainJob(sequence, state.token_ids[start:end], job.num_tokens, state.sampling, state.rule))
        return draft_chains(self._engine, chains)
