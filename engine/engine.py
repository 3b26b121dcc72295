"""One model with its KV pool: the only thing the services know of running a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from transformers import PreTrainedModel

from engine.added_embeddings import AddedEmbeddings
from engine.attention import AttentionKernels
from engine.batch import Batch, Segment
from engine.compaction import Kept, copy_blocks
from engine.hidden_states import BEFORE_NORM, PassStates, StateRows, check_layers
from engine.kv_pool import KVPool
from engine.layers import LayerShape, allocate_caches
from engine.mixers import Mixer, RecurrentCache, copy_states
from engine.modules import ModelModules
from engine.parallel import messages
from engine.parallel.messages import Operation
from engine.parallel.ranks import Ranks
from engine.recurrent.slots import StateSlots
from engine.runner import PassLimits, Runner
from engine.torch_runner import TorchRunner
from specdec.errors import Unavailable
from specdec.types import ModelInfo

if TYPE_CHECKING:  # it needs Triton
    from engine.cuda.decoder import FusedDecoder

__all__ = ["Engine", "Kept", "Segment"]

#: Rows of the pass that measures activation memory on a GPU, and of the largest warm-up pass.
LARGE_PASS_ROWS: Final = 512


class Engine:
    """A loaded model, its KV cache and the forward pass over ragged batches.

    Made by :func:`engine.loading.load.load_engine`. ``warm_up``, ``forward`` and ``close`` are called on the
    device thread; ``pool`` belongs to the event loop.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape],
        *,
        vocab_size: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        num_threads: int = 1,
        mixers: Sequence[Mixer] = (),
        num_slots: int = 0,
        added: AddedEmbeddings | None = None,
    ) -> None:
        """``mixers``: of a model with recurrent states, which ``num_slots`` sequences may have at a time."""
        self.info = ModelInfo(name="", vocab_size=vocab_size, max_model_len=max_model_len)
        self.pool = KVPool(
            num_blocks,
            block_size,
            has_windows=any(shape.window for shape in shapes),
            states=StateSlots(num_slots) if mixers else None,
        )
        self.device = device
        #: What bounds the batches of all its runners.
        self.limits = PassLimits(block_size=block_size, vocab_size=vocab_size, max_model_len=max_model_len)
        #: Threads of computations on a CPU.
        self.num_threads = num_threads
        #: Key and value cache of every layer.
        self.caches = allocate_caches(shapes, num_blocks, block_size, device)
        #: Width of a hidden state.
        self.hidden_size: int = model.config.get_text_config(decoder=True).hidden_size
        self._modules: ModelModules | None = ModelModules(
            model, shapes, self.caches, device=device, mixers=mixers, num_slots=num_slots
        )
        self._num_layers = self._modules.num_layers
        #: Its recurrent layers, with their states.
        self.mixers = mixers
        self._runner: Runner | None = self.torch_runner("torch attention")
        #: What a model can read beside its tokens; None: nothing, so that anything may run its passes.
        self.added = added

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Feed every segment; each sequence grows by its tokens.

        A sequence may stand in one segment only. One that was released after the batch was queued is harmless: its
        rows go to the padding block. Returns logits, float32 [sum of num_logits, vocab_size], in the order of the
        segments, on the engine's device: an inference tensor, not to be written to outside ``inference_mode``. On an
        error no sequence has grown.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
            ValueError: a segment is empty or does not fit its sequence.
            Unavailable: the engine is closed.
        """
        return self._feed(segments, None)[0]

    def forward_with_states(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, PassStates]:
        """:meth:`forward`, and the hidden states that segments want, one at least.

        Raises as :meth:`forward`, and ValueError where a segment wants more rows than it has; the layers are those that
        :meth:`check_state_layers` lets pass.
        """
        wanted = StateRows(segments)
        logits, states = self._feed(segments, wanted)
        assert states is not None
        return logits, PassStates(wanted, states)

    def check_state_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        """The layers, with their numbers for :data:`BEFORE_NORM` and less. Raises :class:`InvalidRequest` unless their
        hidden states can be had of this model.
        """
        count = self._num_layers or 0
        back = range(BEFORE_NORM - count, BEFORE_NORM + 1)
        layers = tuple(count + layer - BEFORE_NORM if layer in back else layer for layer in layers)
        check_layers(layers, self._num_layers)
        return layers

    def _feed(self, segments: Sequence[Segment], wanted: StateRows | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [N, V], and the hidden states wanted, [rows, layers, H]."""
        runner = self.runner
        self.copy_blocks()
        return runner.forward(segments, wanted)

    def copy_blocks(self) -> None:
        """Make the copies of blocks and states that sequences wait for; due before any pass writes to the cache."""
        if copies := self.pool.take_copies():
            copy = partial(copy_blocks, self.all_caches, copies)
            self._own_modules.everywhere(partial(messages.encode_copies, copies), copy)
        if copies := self.pool.take_state_copies():
            message = partial(messages.encode_copies, copies, Operation.COPY_STATES)
            self._own_modules.everywhere(message, partial(self.copy_states, copies))

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent states on this rank."""
        copy_states(self.state_caches, copies)

    def keep_rows(self, kept: Sequence[Kept]) -> None:
        """Drop all of a tree that is not on its accepted path; each sequence is ``first + len(rows)`` long afterwards.

        No entry is copied where the path is the first rows. Called between passes, where passes are run.
        """
        if moving := [one for one in kept if one.moves and not one.sequence.released]:
            self.runner.keep_rows(moving)
        for one in kept:
            one.sequence.length = one.first + len(one.rows)

    def send_heartbeat(self) -> None:
        """Tell the other ranks of a split model that this one is there; raises as :meth:`Ranks.lead`."""
        self._own_modules.everywhere(partial(messages.encode, Operation.HEARTBEAT), lambda: None)

    @property
    def all_caches(self) -> list[torch.Tensor]:
        """Key and value caches, one after another."""
        return [cache for pair in self.caches for cache in pair]

    @property
    def state_caches(self) -> list[RecurrentCache]:
        """Of all recurrences; none where the model has none."""
        return self._own_modules.state_caches

    @property
    def ranks(self) -> Ranks | None:
        """The ranks of a split model; None while they load in step, and where it is not split."""
        return None if self._modules is None else self._modules.ranks

    @ranks.setter
    def ranks(self, ranks: Ranks) -> None:
        self._own_modules.ranks = ranks

    @property
    def runner(self) -> Runner:
        """What runs its passes; raises :class:`Unavailable` once the engine is closed."""
        if self._runner is None:
            raise Unavailable("the engine is closed")
        return self._runner

    def torch_runner(
        self, name: str, kernels: AttentionKernels | None = None, fused: FusedDecoder | None = None
    ) -> TorchRunner:
        """What runs passes by the model's own modules, with the kernels of the attention; None: torch's. Or what runs
        them by ``fused``.
        """
        return TorchRunner(name, self._own_modules, self.limits, kernels, fused)

    def use(self, runner: Runner) -> None:
        """Run passes in another way from now on."""
        self._runner = runner
        if self.device.type == "cpu":
            # Torch's threads would spin beside those of the kernels for milliseconds after every large operation of a
            # sampler.
            torch.set_num_threads(1 if runner.brings_threads else self.num_threads)

    def warm_up(self) -> None:
        """Run the shapes that serving will run, so that the first request pays for nothing."""
        self._own_modules.everywhere(partial(messages.encode, Operation.WARM_UP), self.warm_up_here)
        for num_sequences, num_rows in ((1, 1), (1, 5), (4, 5), (1, 64), (1, LARGE_PASS_ROWS)):
            rows = min(num_rows, self.info.max_model_len)
            if not self.pool.can_open(rows, num_sequences):
                continue
            sequences = [self.pool.open(rows) for _ in range(num_sequences)]
            try:
                self.forward([Segment(sequence, [0] * rows, min(rows, 5)) for sequence in sequences])
            finally:
                for sequence in reversed(sequences):
                    self.pool.release(sequence)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm_up_here(self) -> None:
        """Prepare passes on this rank."""
        self.runner.warm_up()

    def run(self, batch: Batch, rows: Sequence[int], layers: tuple[int, ...]) -> object:
        """Run a pass that another rank leads."""
        return self.runner.run(batch, rows, layers)

    def close(self) -> None:
        """Drop the weights and the cache, and leave the ranks of a split model. Idempotent."""
        if self._modules is None:
            return
        if self.ranks is not None:
            self.ranks.close(messages.encode(Operation.STOP))
        self._modules = self._runner = None
        self.caches, self.mixers = [], ()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _own_modules(self) -> ModelModules:
        if self._modules is None:
            raise Unavailable("the engine is closed")
        return self._modules
