"""A small causal language model as the draft: k forward passes for all waiting sessions together.

A model that drafts in parallel (:mod:`draft_service.drafters.parallel`) needs one. It may read the target's states
beside its tokens (:mod:`draft_service.drafters.state_inputs`): the prompt waits for those of all its tokens then, or
for the first verdict.

Which entries does the cache hold (``docs/drafters.md``)? With n committed tokens c and drafts x₁…x_k,
drafting feeds cₙ₋₁, x₁…x₍ₖ₋₁₎: x_k is never fed. So after a verdict that accepts a < k drafts, the cache is cut to
the common prefix and the target's own token y is fed next; after a = k both x_k and y are. All of this is one rule
here: **keep the entries that agree with the committed tokens, feed the committed tokens that have no entry.**
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from draft_service.drafters.base import Draft, Drafter, DraftJob, Occupancy, num_short_steps, warm_up_specs
from draft_service.drafters.parallel import check_mask, check_prompt, mask_token
from draft_service.drafters.session_cache import SessionCache
from draft_service.drafters.state_inputs import StateInputs
from draft_service.drafters.trees.mixed_batch import draft_mixed
from draft_service.drafters.trees.tree_passes import DraftedTree, TreeJob, draft_trees
from draft_service.drafters.window import DraftWindow
from engine.chains import ChainJob, StopFlags, draft_chains
from engine.device_thread import DeviceThread
from engine.engine import Engine
from engine.heads.files.packed_state_map import pack_state_map
from engine.heads.files.vocabulary_list import read_draft_vocabulary
from engine.kv_pool import CacheFull
from engine.loading.load import load_engine
from engine.loading.memory import LargestStep
from engine.sampling.drafting import DraftedChain, draft_many
from engine.sampling.state import SamplingState
from specdec.checkpoint_config import read_text_config
from specdec.errors import InvalidRequest
from specdec.rules import DEFAULT_RULE, Rule
from specdec.settings import DraftSettings
from specdec.types import HiddenStates, ModelInfo, SessionSpec
from specdec.vocabulary import check_shared_tokens


@dataclass(slots=True, eq=False)
class ModelState:
    """One session of a draft model."""

    sampling: SamplingState
    #: None if the prompt is longer than the model's context, or its blocks did not suffice; nothing is drafted then.
    cache: SessionCache | None
    rule: Rule
    window: DraftWindow
    num_cached_tokens: int = 0
    #: Tokens at most, committed and drafted; the cache may hold more entries, for siblings.
    max_tokens: int = 0
    #: Of a model that drafts in parallel.
    mask_token_id: int | None = None
    #: Tokens that wait for the target's states; and the states that are known and may be read.
    num_waiting: int = 0
    states: list[HiddenStates] = field(default_factory=list)

    @property
    def token_ids(self) -> Sequence[int]:
        """The committed tokens."""
        return self.sampling.token_ids

    @property
    def num_entries(self) -> int:
        """Entries of the committed tokens once all of them that are read are in the cache."""
        return len(self.sampling) - self.window.num_skipped(len(self.sampling))

    @property
    def num_pending(self) -> int:
        """Committed tokens without an entry in the cache."""
        if self.cache is None or self.num_waiting:
            return 0
        return max(0, self.num_entries - self.cache.sequence.length)


@dataclass(slots=True, eq=False)
class _Feed:
    """A job and the cache that is fed for it."""

    job: DraftJob[ModelState]
    cache: SessionCache
    #: Entries before.
    length: int
    #: Fed, then drafted after.
    token_ids: Sequence[int]
    #: What reads states, and the positions of those tokens.
    inputs: StateInputs | None
    positions: Sequence[int]

    def chain(self) -> ChainJob:
        """A chain after the committed tokens."""
        job, state = self.job, self.job.state
        return ChainJob(
            self.cache.sequence,
            self.token_ids,
            job.num_tokens,
            state.sampling,
            state.rule,
            features=None if self.inputs is None else self.inputs.rows(state.states, self.positions),
            mask_token_id=state.mask_token_id,
        )

    def tree(self) -> TreeJob:
        """A tree after the committed tokens."""
        job, state = self.job, self.job.state
        assert job.tree is not None
        return TreeJob(self.cache.sequence, self.token_ids, job.tree, job.num_tokens, state.sampling, state.rule)

    def finish(self, chain: DraftedChain | DraftedTree) -> Draft:
        """The cache holds the entries of a drafted chain; of a tree it holds none."""
        if isinstance(chain, DraftedTree):
            return Draft(chain.token_ids, parents=chain.parents)
        self.cache.token_ids = chain.token_ids
        return Draft(chain.token_ids, chain.q_rows)


Job = DraftJob[ModelState]


class ModelDrafter(Drafter[ModelState]):
    """Drafts with a small model; its forward passes run on the device thread, its bookkeeping on the event loop."""

    def __init__(
        self,
        engine: Engine,
        thread: DeviceThread,
        settings: DraftSettings,
        mask_token_id: int | None = None,
        inputs: StateInputs | None = None,
    ) -> None:
        """The engine must have been loaded on the thread; both are closed by :meth:`shutdown`. ``mask_token_id``: of a
        model that drafts in parallel; ``inputs``: what reads the target's states for it.
        """
        self._mask_token_id = mask_token_id
        self._inputs = inputs
        self._engine = engine
        self._pool = engine.pool
        self._thread = thread
        self._down = False
        self._states: set[ModelState] = set()
        self._shares_prefixes = settings.scheduler.enable_prefix_caching
        tree = settings.speculative.tree
        if (states := engine.pool.states) is not None:
            if tree is not None:
                raise InvalidRequest(
                    f"the draft {engine.info.name} has recurrent states, which follow a chain of tokens and no tree:"
                    " leave out tree_top_k and speculative_token_tree",
                    param="tree_top_k",
                )
            # A chain that gets no verdict is rolled back as a whole, with the token before it.
            states.num_kept = settings.speculative.num_speculative_tokens + 1
        if inputs is not None and tree is not None:
            raise InvalidRequest(
                f"the draft {engine.info.name} reads the target's states and drafts no tree: leave out tree_top_k and"
                " speculative_token_tree",
                param="tree_top_k",
            )
        #: Entries that trees need beyond those of the tokens before them.
        self._num_fed = 0 if tree is None else tree.num_fed
        self.info: ModelInfo = replace(
            engine.info,
            method="draft_model",
            num_speculative_tokens=settings.speculative.num_speculative_tokens,
            hidden_state_layers=() if inputs is None else inputs.layers,
            hidden_state_dtype="" if inputs is None else settings.speculative.hidden_state_dtype,
            hidden_state_map="" if inputs is None or inputs.mapped_width is None else inputs.matrix.fingerprint(),
        )
        self._window = DraftWindow.of(settings, self.info)
        self.streams = tree is None and engine.pool.states is None and inputs is None

    @classmethod
    async def load(cls, settings: DraftSettings) -> Self:
        """Load and warm up the model on a device thread of its own; raises like :meth:`load_engine` and
        :func:`mask_token`.
        """
        if settings.model is None:
            raise InvalidRequest("a draft model needs its folder; give --model", param="model")
        folder = settings.model.model
        if settings.model.tokenizer is not None:
            check_shared_tokens(settings.model.tokenizer, folder)
        mask = mask_token(folder, settings.speculative.parallel_drafting)
        inputs = None
        if mask is not None and settings.target_model is not None:
            inputs = StateInputs.read(folder, settings.target_model)
        drafted = None
        if (path := settings.speculative.draft_vocab) is not None:
            drafted = read_draft_vocabulary(path, read_text_config(folder)["vocab_size"])
        thread = DeviceThread("draft-device")
        try:
            largest = LargestStep(settings.scheduler.max_num_batched_tokens, draft_many)
            load = partial(load_engine, settings.model, None, largest, drafted, reads_more=inputs is not None)
            engine = await thread.run(load)
            await thread.run(engine.warm_up)
            if mask is not None and (prompt := check_prompt(folder)):
                await thread.run(check_mask, engine, prompt, mask)
            drafter = cls(engine, thread, settings, mask, inputs)
            await drafter._warm_up()
        except BaseException:
            await asyncio.to_thread(thread.close)
            raise
        return drafter

    def open(self, spec: SessionSpec) -> ModelState:
        """Reserve the cache of the prompt, or take over what others have computed of it."""
        info = self.info
        sampling = SamplingState(
            spec.params,
            spec.token_ids,
            spec.prompt_len,
            info.vocab_size,
            tokenizer_size=info.tokenizer_size or None,
            device=self._engine.device,
        )
        rule = spec.rule or DEFAULT_RULE
        state = ModelState(sampling, None, rule, self._window, mask_token_id=self._mask_token_id)
        pool = self._pool
        longest = self._window.longest_text(min(info.max_model_len, pool.total_blocks * pool.block_size))
        if len(spec.token_ids) > longest:
            return state
        wanted = longest if spec.params.max_tokens is None else spec.prompt_len + spec.params.max_tokens
        state.max_tokens = max(len(spec.token_ids), min(wanted, longest))
        token_ids = self._window.read(spec.token_ids)
        sequence = pool.open_empty((spec.owner, spec.cache_salt) if self._shares_prefixes else None)
        pool.match(sequence, token_ids, len(token_ids) - 1)
        if not pool.grow(sequence, len(token_ids)):
            pool.release(sequence)
            raise CacheFull(f"{len(token_ids)} tokens do not fit into the draft's KV cache at this moment")
        state.cache = SessionCache(pool, sequence)
        state.num_cached_tokens = sequence.length
        if self._inputs is not None:  # the state of the last of them is read for the token after it
            state.num_cached_tokens = max(0, sequence.length - 1)
            state.num_waiting = len(spec.token_ids) if len(spec.token_ids) > 1 else 0
        self._states.add(state)
        return state

    def advance(
        self, state: ModelState, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        """Keep the entries that agree with the new committed tokens; O(1) besides comparing ``token_ids``."""
        cache, window = state.cache, self._window
        if cache is not None:
            num_skipped = window.num_skipped(len(state.sampling))
            if window.num_skipped(keep + len(token_ids)) != num_skipped:
                cache.cut(min(keep, window.num_sinks))  # other tokens follow these from now on
            elif keep == len(state.sampling):
                cache.commit(keep - num_skipped, token_ids)
            else:  # committed tokens were replaced
                cache.cut(max(min(keep, window.num_sinks), keep - num_skipped))
        state.sampling = state.sampling.committed(keep, token_ids)
        if self._inputs is not None:
            self._keep_states(state, keep, hidden_states)

    def num_cached_tokens(self, state: ModelState) -> int:
        """Tokens whose entries another session had computed."""
        return state.num_cached_tokens

    def room(self, state: ModelState) -> int:
        """Drafting k tokens needs len + k - 1 entries."""
        return 0 if state.cache is None else state.max_tokens + 1 - len(state.sampling)

    async def draft(self, batch: Sequence[Job]) -> list[Draft]:
        """One call on the device thread: a ragged pass over what is pending, then a step per drafted token, unless that
        pass drafts them all.
        """
        feeds = [self._prepare(job) for job in batch]
        running = [feed for feed in feeds if feed is not None]
        num_steps = num_short_steps(batch, len(self._states)) if self._engine.runner.brings_threads else 0
        if self._mask_token_id is not None and not any(job.tree for job in batch):
            num_steps = min(num_steps, 1)
        with _undoing(running):
            drafted = await self._thread.run_short(self._compute, num_steps, running) if running else []
        chains = iter(drafted)
        return [Draft() if feed is None else feed.finish(next(chains)) for feed in feeds]

    def close(self, state: ModelState) -> None:
        """Release the cache."""
        cache, state.cache = state.cache, None
        if cache is None:
            return
        self._states.remove(state)
        cache.cut(state.num_entries)
        self._pool.release(cache.sequence, self._window.read(state.token_ids))

    def occupancy(self) -> Occupancy:
        """Blocks of open sessions, blocks that may serve later ones, and all."""
        pool = self._pool
        return Occupancy(pool.used_blocks, pool.cached_blocks, pool.total_blocks)

    async def read_state_map(self) -> bytes:
        """The matrix of PARD-2."""
        assert self._inputs is not None
        return await asyncio.to_thread(pack_state_map, self._inputs.matrix)

    async def shutdown(self) -> None:
        """Drop the model and end the thread."""
        if not self._down:
            self._down = True
            await self._thread.run(self._engine.close)
            await asyncio.to_thread(self._thread.close)

    async def _warm_up(self) -> None:
        """Draft once in every way."""
        num_tokens = min(2, self.info.num_speculative_tokens)
        for spec in warm_up_specs():
            state = self.open(spec)
            await self.draft([DraftJob(state, 1, num_tokens)])
            self.close(state)

    def _keep_states(self, state: ModelState, keep: int, new: Sequence[HiddenStates]) -> None:
        """Add those that came; forget those of tokens that were replaced, and those that are not read again.

        Raises:
            InvalidRequest: they are of another width.
        """
        assert self._inputs is not None
        for each in new:
            if each.num_features not in (self._inputs.width, self._inputs.mapped_width):
                raise InvalidRequest(
                    f"hidden_states have {each.num_features} numbers a position; {self.info.name} reads"
                    f" {self._inputs.width}",
                    param="hidden_states",
                )
        known = [kept for each in state.states if (kept := each.rows(each.start, keep)).num_positions]
        state.states = [*known, *new]
        length = len(state.sampling)
        if length > state.num_waiting or (state.states and state.states[-1].end >= length - 1):
            state.num_waiting = 0
        if state.cache is None or state.num_waiting:
            return
        start = state.cache.sequence.length - 2  # of the last token, which may be fed again
        if self._window.size < length:
            start = length - self._window.size
        state.states = [each for each in state.states if each.end > start]

    def _prepare(self, job: Job) -> _Feed | None:
        """Make room in the cache; None without memory for it."""
        state, window = job.state, self._window
        committed, cache, num_entries = state.token_ids, state.cache, state.num_entries
        assert cache is not None
        # Drop the drafts of an earlier call that got no verdict. If every committed token has its entry, the last one
        # is fed again for its logits.
        cache.cut(num_entries - (1 if job.num_tokens else 0))
        sequence = cache.sequence
        if sequence.length >= sequence.publishable_from:
            self._pool.publish(sequence, window.read(committed))
        start = sequence.length
        end = num_entries if job.num_tokens else start + job.num_rows
        num_drafted = self._num_fed if job.tree else job.num_tokens
        if not self._pool.grow(sequence, min(end + num_drafted, self._pool.total_blocks * self._pool.block_size)):
            self.close(state)  # it drafts nothing any more, and others have its blocks
            return None
        positions = () if self._inputs is None else window.read(range(len(committed)), start)[: end - start]
        return _Feed(job, cache, start, window.read(committed, start)[: end - start], self._inputs, positions)

    def _compute(self, feeds: Sequence[_Feed]) -> list[DraftedChain | DraftedTree]:
        """Feed and draft: all trees, then all chains."""
        jobs = [feed.job for feed in feeds]
        return draft_mixed(
            jobs,
            lambda places, stop: draft_trees(self._engine, [feeds[i].tree() for i in places], stop.tolist),
            lambda places, stop: self._compute_chains([feeds[i] for i in places], stop),
        )

    def _compute_chains(self, feeds: Sequence[_Feed], stop: StopFlags) -> list[DraftedChain]:
        return draft_chains(self._engine, [feed.chain() for feed in feeds], stop)


@contextmanager
def _undoing(feeds: Sequence[_Feed]) -> Iterator[None]:
    """Restore the lengths of the caches if the batch fails."""
    try:
        yield
    except Exception:  # not where the task is cancelled: the device thread may be writing still
        for feed in feeds:
            feed.cache.cut(feed.length)
        raise
