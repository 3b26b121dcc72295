"""What all drafters with a head share: loading, and the computation of batches on the device thread."""

from __future__ import annotations

import asyncio
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Generic, Protocol, Self, TypeVar

import torch

from draft_service.drafters.base import Draft, Drafter, DraftJob, DraftState, num_short_steps, warm_up_specs
from draft_service.drafters.trees.mixed_batch import draft_mixed
from draft_service.drafters.trees.tree_passes import DraftedTree
from engine.chains import StopFlags
from engine.cuda.graphs import set_eager
from engine.device import resolve_device
from engine.device_thread import DeviceThread
from engine.freed_memory import freed_at_once
from engine.heads.files.checkpoint import read_head, read_packed_state_map
from engine.heads.files.vocabulary_list import read_draft_vocabulary
from engine.heads.head import DraftHead
from engine.loading import checkpoint, refusals
from engine.native.linears import pack_linears
from engine.rounded_states import tensor_of_states
from engine.sampling.drafting import DraftedChain
from engine.sampling.state import SamplingState
from specdec import __version__
from specdec.checkpoint_config import read_text_config
from specdec.errors import InvalidRequest
from specdec.process.cores import usable_cores
from specdec.rules import Rule
from specdec.settings import DTYPES, DraftSettings, ModelSettings
from specdec.state_dtypes import ELEMENT_BYTES
from specdec.types import HiddenStates, ModelInfo, SessionSpec

logger = logging.getLogger(__name__)

#: Of the rounded weights of heads, which lose their acceptance with fewer.
_HEAD_BITS: Final = 8


class HeadState(DraftState, Protocol):
    """The state of one session of a head. Its pending tokens are those whose states are known."""

    sampling: SamplingState
    rule: Rule


S = TypeVar("S", bound=HeadState)
#: One job's part of a batch, prepared on the event loop.
W = TypeVar("W")
#: Place in the batch -> job and its part; jobs without work are left out.
Works = dict[int, tuple[DraftJob[S], W]]


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head on its device, and the facts about it and its target."""

    head: DraftHead
    device: torch.device
    model: ModelSettings
    info: ModelInfo
    #: Reads it again, as it serves; on the device thread.
    read: Callable[[], DraftHead]
    #: Reads what a target may run in its place, packed.
    read_map: Callable[[], bytes]

    @property
    def has_kernels(self) -> bool:
        """Whether native kernels may take the place of torch's layers."""
        return self.device.type == "cpu" and not self.model.enforce_eager

    @property
    def num_threads(self) -> int:
        """Of computations on a CPU."""
        return self.model.num_threads or usable_cores()


@freed_at_once()
def load_head(settings: DraftSettings) -> LoadedHead:
    """Read the head the settings name, on the device thread.

    Sets torch's thread count on the calling thread.

    Raises:
        InvalidRequest: a checkpoint cannot be read, or a setting does not fit it or the machine.
        ModelNotSupported: a variant that is not known, or that does not fit the target; the text names the field.
    """
    model, target = settings.model, settings.target_model
    if model is None or target is None:
        raise InvalidRequest("a draft head needs its folder and that of its target", param="model")
    device = resolve_device(model.device)
    if device.type == "cpu":
        torch.set_num_threads(model.num_threads or usable_cores())
    else:
        torch.cuda.set_device(device)
    set_eager(model.enforce_eager)
    method = settings.speculative.methods[-1]
    head = _trimmed_head(settings, model, target, device)
    tokenizer = checkpoint.read_tokenizer(replace(model, model=model.tokenizer or target, tokenizer=None))
    shared = head.shared_names
    info = ModelInfo(
        name=os.path.basename(os.path.normpath(model.model)),
        architecture=type(head).__name__,
        vocab_size=head.config.vocab_size,
        tokenizer_size=tokenizer.size,
        tokenizer_fingerprint=tokenizer.fingerprint,
        max_model_len=model.max_model_len or _context_of(target),
        dtype=str(head.dtype).removeprefix("torch."),
        device=str(device),
        num_parameters=sum(value.numel() for name, value in head.named_parameters() if name not in shared),
        method=method,
        num_speculative_tokens=settings.speculative.num_speculative_tokens,
        version=__version__,
        hidden_state_layers=head.hidden_state_layers,
        hidden_state_dtype=settings.speculative.hidden_state_dtype,
        hidden_state_map=head.state_map_fingerprint,
    )
    bits = refusals.check_quantization(model, head.config, device)
    if bits:
        if bits < _HEAD_BITS:
            logger.warning("%s: the weights of a head are rounded to %d bits, not to %d", model.model, _HEAD_BITS, bits)
        refusals.quantise(model, head, _HEAD_BITS)

    def read() -> DraftHead:
        again = _trimmed_head(settings, model, target, device)
        if bits:
            refusals.quantise(model, again, _HEAD_BITS)
        if loaded.has_kernels:
            pack_linears(again, loaded.num_threads, model.autotune)
        return again

    read_map = partial(read_packed_state_map, model.model, target, method)
    loaded = LoadedHead(head, device, model, info, read, read_map)
    return loaded


def _trimmed_head(settings: DraftSettings, model: ModelSettings, target: str, device: torch.device) -> DraftHead:
    """The head of a folder in the settings' dtype and vocabulary."""
    dtype = None if model.dtype == DTYPES[0] else getattr(torch, model.dtype)
    head = read_head(model.model, target, method=settings.speculative.methods[-1], dtype=dtype, device=device)
    if (vocabulary := settings.speculative.draft_vocab) is not None:
        head.trim(read_draft_vocabulary(vocabulary, head.config.vocab_size))
    return head


class HeadDrafter(Drafter[S], Generic[S, W]):
    """A drafter whose computation runs on the device thread, its bookkeeping on the event loop."""

    def __init__(self, loaded: LoadedHead, thread: DeviceThread) -> None:
        """``loaded`` was loaded on the thread, which :meth:`shutdown` ends."""
        self.info = loaded.info
        self._read_map = loaded.read_map
        self._device = loaded.device
        self._thread = thread
        self._down = False
        self._state_width = 0
        #: Width of what a target sends that has the head's first layer.
        self._mapped_width = None if (states := loaded.head.state_map) is None else states.width

    # --- what a kind of head implements, besides open and advance ---

    @classmethod
    @abstractmethod
    def _of(cls, loaded: LoadedHead, thread: DeviceThread, settings: DraftSettings) -> Self:
        """A drafter on a loaded head; on the device thread."""

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Open sessions that may draft."""

    @abstractmethod
    def _prepare(self, job: DraftJob[S]) -> W | None:
        """The device's part of a job; None if there is nothing to do."""

    @abstractmethod
    def _compute(self, works: Sequence[W], stop: StopFlags) -> Sequence[DraftedChain]:
        """Draft chains, or ingest what is pending, on the device thread."""

    @abstractmethod
    def _compute_trees(self, works: Sequence[W], stopped: Callable[[], Sequence[bool]]) -> Sequence[DraftedTree]:
        """Draft trees, on the device thread, in inference mode."""

    @abstractmethod
    def _undo(self, work: W) -> None:
        """Restore the state after a failed batch."""

    def _finish(self, work: W) -> None:
        """Update the state after a successful batch."""

    # --- shared by all heads ---

    @classmethod
    async def load(cls, settings: DraftSettings) -> Self:
        """Load and warm up the head on a device thread of its own; raises like :func:`load_head`."""
        thread = DeviceThread("draft-device")
        try:
            drafter = await thread.run(lambda: cls._of(load_head(settings), thread, settings))
            await drafter.warm_up()
        except BaseException:
            await asyncio.to_thread(thread.close)
            raise
        return drafter

    async def draft(self, batch: Sequence[DraftJob[S]]) -> list[Draft]:
        """One call on the device thread: a pass over what is pending, then a step per drafted token."""
        works = self._works(batch)
        num_steps = num_short_steps(batch, self.num_open) if self._device.type == "cpu" else 0
        with self._undoing(works):
            drafted = await self._thread.run_short(self._run, num_steps, works) if works else ()
        return self._drafts(batch, works, drafted)

    async def read_state_map(self) -> bytes:
        """The head's first layer."""
        return await asyncio.to_thread(self._read_map)

    async def shutdown(self) -> None:
        """End the thread."""
        if not self._down:
            self._down = True
            await self._thread.run(self._free)
            await asyncio.to_thread(self._thread.close)

    async def warm_up(self) -> None:
        """Draft once in every way."""
        width, num_tokens = self._state_width, min(2, self.info.num_speculative_tokens)
        data = bytes(ELEMENT_BYTES["float32"] * width)
        for spec in warm_up_specs():
            state = self.open(spec)
            self.advance(state, 1, (0,), (HiddenStates(0, width, "float32", data),))
            if self.room(state) >= num_tokens:
                await self.draft([DraftJob(state, state.num_pending, num_tokens)])
            self.close(state)

    def _sampling(self, spec: SessionSpec) -> SamplingState:
        """The sampling state of a session."""
        info = self.info
        return SamplingState(
            spec.params,
            spec.token_ids,
            spec.prompt_len,
            info.vocab_size,
            tokenizer_size=info.tokenizer_size or None,
            device=self._device,
        )

    def _check_states(self, hidden_states: Sequence[HiddenStates]) -> None:
        """Refuse states the head cannot read.

        Raises:
            InvalidRequest: they are of another width.
        """
        for states in hidden_states:
            if states.num_features not in (self._state_width, self._mapped_width):
                raise InvalidRequest(
                    f"hidden_states have {states.num_features} numbers a position; {self.info.name} reads layers"
                    f" {list(self.info.hidden_state_layers)} of its target, {self._state_width} numbers",
                    param="hidden_states",
                )

    def _free(self) -> None:
        """Free the device's memory; on its thread."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _works(self, batch: Sequence[DraftJob[S]]) -> Works[S, W]:
        """The jobs that have work."""
        works = ((job, self._prepare(job)) for job in batch)
        return {place: (job, work) for place, (job, work) in enumerate(works) if work is not None}

    def _run(self, works: Works[S, W]) -> Sequence[DraftedChain | DraftedTree]:
        jobs, parts = [job for job, _ in works.values()], [work for _, work in works.values()]

        def draft_trees(places: Sequence[int], stop: StopFlags) -> Sequence[DraftedTree]:
            with torch.inference_mode():
                return self._compute_trees([parts[i] for i in places], stop.tolist)

        return draft_mixed(jobs, draft_trees, lambda places, stop: self._compute([parts[i] for i in places], stop))

    def _drafts(
        self, batch: Sequence[DraftJob[S]], works: Works[S, W], drafted: Sequence[DraftedChain | DraftedTree]
    ) -> list[Draft]:
        drafts = [Draft()] * len(batch)
        for (place, (_, work)), one in zip(works.items(), drafted, strict=True):
            self._finish(work)
            if isinstance(one, DraftedTree):
                drafts[place] = Draft(one.token_ids, parents=one.parents)
            else:
                drafts[place] = Draft(one.token_ids, one.q_rows)
        return drafts

    @contextmanager
    def _undoing(self, works: Works[S, W]) -> Iterator[None]:
        """Restore the states if the batch fails."""
        try:
            yield
        except BaseException:
            for _, work in works.values():
                self._undo(work)
            raise


def tensor_of(states: Sequence[HiddenStates]) -> torch.Tensor:
    """[positions, features] on the CPU, bfloat16 if they arrived as such, else float32."""
    parts = [tensor_of_states(each) for each in states]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole if whole.dtype == torch.bfloat16 else whole.float()


def _context_of(target: str) -> int:
    """The longest sequence of a target.

    Raises:
        InvalidRequest: its config does not say.
    """
    config = read_text_config(target)
    length = config.get("max_position_embeddings") or config.get("n_positions")
    if not isinstance(length, int):
        raise InvalidRequest("the target's config names no longest sequence; set max_model_len", param="max_model_len")
    return length
