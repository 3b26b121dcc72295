"""One model with its KV pool: the only thing the services know of running a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from transformers import PreTrainedModel

import specdec
from specdec.cores import usable_cores
from specdec.engine.adapters import adopt
from specdec.engine.attention import PagedBatch
from specdec.engine.batch import Batch, Segment, build_batch
from specdec.engine.compaction import Kept, copy_blocks, move_entries, moves_of
from specdec.engine.cuda.graphs import CudaCapture, GraphRunner, reserved_bytes
from specdec.engine.device import resolve_device
from specdec.engine.hidden_states import STATE_DTYPE, PassStates, StateRows, StateTap, check_layers
from specdec.engine.kv_pool import KVPool
from specdec.engine.layers import PAGED, ForwardState, LayerShape, PagedLayer, bind, record_layers
from specdec.engine.loading import acceleration, checkpoint, memory, refusals
from specdec.engine.loading.acceleration import FusedForward
from specdec.engine.loading.self_check import Reference
from specdec.engine.native.decoder import NativeDecoder
from specdec.engine.native.feed import feed, takes
from specdec.engine.parallel import messages, shards
from specdec.engine.parallel.messages import Operation
from specdec.engine.parallel.ranks import Ranks
from specdec.errors import ModelNotSupported, Unavailable
from specdec.sampling.transfer import send
from specdec.settings import ModelSettings
from specdec.types import ModelInfo

__all__ = ["Engine", "Kept", "Segment"]

logger = logging.getLogger(__name__)

#: Rows of the pass that measures activation memory on a GPU, and of the largest warm-up pass.
_LARGE_PASS_ROWS: Final = 512


class Engine:
    """A loaded model, its KV cache and the forward pass over ragged batches.

    ``load``, ``warm_up``, ``forward`` and ``close`` are called on the device thread; ``pool`` belongs to the event
    loop.
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
    ) -> None:
        self.info = ModelInfo(name="", vocab_size=vocab_size, max_model_len=max_model_len)
        self.pool = KVPool(num_blocks, block_size, has_windows=any(shape.window for shape in shapes))
        self.device = device
        #: How the model is run: "native decoder", "native attention", "cuda graphs", "triton attention" or "torch
        #: attention".
        self.path = "torch attention"
        #: Threads of the native kernels on a CPU; where they run whole passes torch is left with one.
        self.num_threads = 1
        self._model: PreTrainedModel | None = model
        self._decoder: FusedForward | None = None
        self.graphs: GraphRunner | None = None
        self._state = ForwardState()
        #: The ranks that follow this one; None while they load in step, and where there are none.
        self.followers: Ranks | None = None
        #: Key and value cache of every layer.
        self.caches = memory.allocate_caches(shapes, num_blocks, block_size, device)
        self._tap: StateTap | None = StateTap(model, shapes)
        self._num_layers = self._tap.num_layers
        #: Width of a hidden state.
        self.hidden_size: int = model.config.get_text_config(decoder=True).hidden_size
        for shape, (k_cache, v_cache) in zip(shapes, self.caches, strict=True):
            bind(shape, PagedLayer(k_cache, v_cache, shape.window, self._state))

    @classmethod
    def load(cls, settings: ModelSettings, join: Callable[[], Ranks] | None = None) -> Engine:
        """Load a checkpoint, check that it runs correctly here, and lay out the KV cache.

        Sets torch's thread count on the calling thread, which must be the one that calls :meth:`forward`. ``join``
        meets the other ranks of the model, which load at the same time; it is called before weights are read.

        Raises:
            ModelNotSupported: this engine would give wrong answers for the model, or cannot run it.
            InvalidRequest: a setting does not fit the model or the machine.
            Unavailable: the other ranks do not come.
        """
        config = checkpoint.load_config(settings)
        refusals.check_config(config)
        if join is not None:
            size = settings.tensor_parallel_size
            shards.check_plan(config, size, trust_remote_code=settings.trust_remote_code)
        ranks = None if join is None else join()
        place = None if ranks is None else ranks.place
        device = resolve_device(settings.device, 0 if place is None else place.local_rank)
        num_threads = settings.num_threads or max(1, usable_cores() // (1 if place is None else place.local_size))
        if device.type == "cpu":
            torch.set_num_threads(num_threads)
        else:
            torch.cuda.set_device(device)  # of this thread: Triton launches on the current device
        max_model_len = refusals.resolve_max_model_len(config, settings.max_model_len)
        is_rounded = refusals.check_quantization(settings, config, device)
        logger.info("reading the weights of %s", settings.model)
        model = checkpoint.load_model(settings, config, device)
        num_parameters = model.num_parameters()
        if ranks is not None:
            shards.make_local(model, ranks)
        adopt(model)
        refusals.check_model(model)
        tokenizer = checkpoint.read_tokenizer(settings)
        if is_rounded:
            refusals.quantise(settings, model)
        text = config.get_text_config(decoder=True)
        if ranks is not None:
            ranks.wait_for_all()
        shapes, vocab_size = record_layers(model, text.num_hidden_layers, device)
        refusals.check_chunks(shapes, max_model_len)

        activation_bytes = 0
        model.set_attn_implementation(PAGED)
        if device.type == "cuda" and settings.kv_cache_memory_bytes is None:
            activation_bytes = _measure_activation(
                model,
                shapes,
                block_size=settings.block_size,
                vocab_size=vocab_size,
                num_rows=min(_LARGE_PASS_ROWS, max_model_len),
                device=device,
            )
            if not settings.enforce_eager:
                activation_bytes += reserved_bytes(vocab_size, device)
        num_blocks, max_model_len = memory.size_cache(
            settings,
            shapes,
            device=device,
            max_model_len=max_model_len,
            weight_bytes=(weight_bytes := model.get_memory_footprint()),  # type: ignore[no-untyped-call]
            activation_bytes=activation_bytes,
            ranks=ranks,
        )
        logger.info("comparing passes with the model's own modules")
        model.set_attn_implementation("eager")
        reference = Reference(
            model,
            vocab_size=min(vocab_size, text.vocab_size),
            num_blocks=num_blocks,
            block_size=settings.block_size,
            max_model_len=max_model_len,
        )
        model.set_attn_implementation(PAGED)

        engine = cls(
            model,
            shapes,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            device=device,
        )
        engine.num_threads = num_threads
        engine._choose_path(settings, shapes, reference, num_threads)
        engine.info = ModelInfo(
            name=os.path.basename(os.path.abspath(settings.model)),
            architecture=type(model).__name__,
            vocab_size=vocab_size,
            tokenizer_size=tokenizer.size,
            tokenizer_fingerprint=tokenizer.fingerprint,
            max_model_len=max_model_len,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(device),
            num_parameters=num_parameters,
            eos_token_ids=checkpoint.eos_token_ids(model, tokenizer),
            kv_cache_tokens=num_blocks * settings.block_size,
            version=specdec.__version__,
            execution=engine.execution if ranks is None else f"{engine.execution}, {ranks.place.size} ranks",
        )
        if ranks is not None:
            cache_bytes = sum(cache.nbytes for pair in engine.caches for cache in pair)
            logger.info(
                "rank %d of %d: %.1f MiB of weights, %.1f MiB for the KV cache",
                *(ranks.place.rank, ranks.place.size, weight_bytes / 2**20, cache_bytes / 2**20),
            )
            engine.followers = ranks
        return engine

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

    def check_state_layers(self, layers: Sequence[int]) -> None:
        """Raise :class:`InvalidRequest` unless the hidden states of ``layers`` can be had of this model."""
        check_layers(layers, self._num_layers)

    def _feed(self, segments: Sequence[Segment], wanted: StateRows | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [N, V], and the hidden states wanted, [rows, layers, H]."""
        if self._model is None:
            raise Unavailable("the engine is closed")
        if isinstance(self._decoder, NativeDecoder) and takes(segments):
            self.copy_blocks()
            return feed(
                self._decoder,
                segments,
                block_size=self.pool.block_size,
                vocab_size=self.info.vocab_size,
                max_model_len=self.info.max_model_len,
                states=wanted,
            )
        with torch.inference_mode():
            batch = self.prepare(segments)
            rows, layers = ([], ()) if wanted is None else (wanted.rows(), wanted.layers)
            run = partial(self.run, batch, rows, layers)
            if self.followers is None:
                logits, states = run()
            else:
                logits, states = self.followers.lead(messages.encode_pass(batch, rows, layers), run)
        for segment, kv_len in zip(segments, batch.kv_lens, strict=True):
            segment.sequence.length = kv_len
        return logits, states

    def prepare(self, segments: Sequence[Segment]) -> Batch:
        """Lay out a batch and make the copies of blocks that must be there before it writes; raises like forward."""
        self.copy_blocks()
        return build_batch(
            segments,
            block_size=self.pool.block_size,
            vocab_size=self.info.vocab_size,
            max_model_len=self.info.max_model_len,
        )

    def copy_blocks(self) -> None:
        """Make the copies that forked sequences wait for; due before any pass writes to the cache."""
        if copies := self.pool.take_copies():
            copy = partial(copy_blocks, self.all_caches, copies)
            self._everywhere(Operation.COPY_BLOCKS, copies, copy)

    def keep_rows(self, kept: Sequence[Kept]) -> None:
        """Drop all of a tree that is not on its accepted path; each sequence is ``first + len(rows)`` long afterwards.

        No entry is copied where the path is the first rows. Called between passes, where passes are run.
        """
        moving = [one for one in kept if one.moves and not one.sequence.released]
        if moving and isinstance(self._decoder, NativeDecoder):
            self._decoder.keep_rows(moving, self.pool.block_size)
        elif moving:
            moves = moves_of(moving, self.pool.block_size)
            with torch.inference_mode():
                self._everywhere(Operation.MOVE_ENTRIES, moves, partial(move_entries, self.all_caches, moves))
        for one in kept:
            one.sequence.length = one.first + len(one.rows)

    def beat(self) -> None:
        """Tell the ranks that follow that this one is there."""
        self._everywhere(Operation.BEAT, (), lambda: None)

    @property
    def all_caches(self) -> list[torch.Tensor]:
        """Key and value caches, one after another."""
        return [cache for pair in self.caches for cache in pair]

    @property
    def decoder(self) -> FusedForward | None:
        """What runs whole passes outside transformers' modules, where something does."""
        return self._decoder

    @property
    def execution(self) -> str:
        """The path and, of the native decoder, what was measured for its weights."""
        return f"{self.path}, {self._decoder.prefetch}" if isinstance(self._decoder, NativeDecoder) else self.path

    def warm_up(self) -> None:
        """Run the shapes that serving will run, so that the first request pays for nothing."""
        if self.graphs is not None:
            with torch.inference_mode():
                self.graphs.warm_up()
        for num_sequences, num_rows in ((1, 1), (1, 5), (4, 5), (1, 64), (1, _LARGE_PASS_ROWS)):
            rows = min(num_rows, self.info.max_model_len)
            if not self.pool.can_open(num_sequences * -(-rows // self.pool.block_size) * self.pool.block_size):
                continue
            sequences = [self.pool.open(rows) for _ in range(num_sequences)]
            try:
                self.forward([Segment(sequence, [0] * rows, min(rows, 5)) for sequence in sequences])
            finally:
                for sequence in reversed(sequences):
                    self.pool.release(sequence)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Drop the weights and the cache. Idempotent."""
        if self._model is None:
            return
        if self.followers is not None:
            self.followers.close(messages.encode(Operation.STOP))
        self._model = None
        self._tap = None
        self._decoder = None
        self.graphs = None
        self.caches = []
        self._state = ForwardState()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(
        self, batch: Batch, state_rows: Sequence[int] = (), state_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [N, vocab_size] of a batch, float32, and the hidden states wanted, [rows, layers, H]; on this rank."""
        rows = torch.tensor(state_rows, dtype=torch.int64)
        if self._decoder is not None:
            if not state_layers:
                return self._decoder.forward(batch.input_ids, batch.plan, batch.logit_rows).float(), None
            states = torch.empty(len(rows), len(state_layers), self._decoder.hidden_size, dtype=STATE_DTYPE)
            asked = rows, torch.tensor(state_layers), states
            return self._decoder.forward(batch.input_ids, batch.plan, batch.logit_rows, asked).float(), states
        if state_layers:
            rows = send(rows, self.device)
            both = None if self.graphs is None else self.graphs.run_with_states(batch, state_layers)
            if both is not None:
                return both[0], both[1].index_select(0, rows)
            logits, states = self._run_with_states(batch.to(self.device), state_layers, rows)
            return logits.float(), states
        replayed = None if self.graphs is None else self.graphs.run(batch)
        return self._run_modules(batch.to(self.device)).float() if replayed is None else replayed, None

    def _everywhere(self, operation: Operation, numbers: Sequence[Sequence[int]], own_part: Callable[[], None]) -> None:
        """Do something on this rank and on those that follow it."""
        if self.followers is None:
            own_part()
        else:
            self.followers.lead(messages.encode(operation, [each for group in numbers for each in group]), own_part)

    def _run_with_states(
        self, batch: Batch, layers: tuple[int, ...], rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`_run_modules`, and hidden states of some rows (int64 [R]), or of all: [R, layers, H]."""
        assert self._tap is not None
        with self._tap.catch(layers, rows) as caught:
            logits = self._run_modules(batch)
        return logits, caught[0]

    def _run_modules(self, batch: Batch) -> torch.Tensor:
        """Logits [N, vocab_size] of a batch on the device, by the model's own modules."""
        assert self._model is not None
        num_logits = batch.logit_rows.shape[0]
        # An output layer is not asked to handle no rows at all: it gets one, which is dropped.
        rows = batch.logit_rows if num_logits else batch.plan.slots.new_zeros(1)
        self._state.batch = PagedBatch(batch)
        try:
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.plan.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=rows,
            )
        finally:
            self._state.batch = None
        logits: torch.Tensor = output.logits[0]
        return logits[:num_logits]

    def _choose_path(
        self, settings: ModelSettings, shapes: Sequence[LayerShape], reference: Reference, num_threads: int
    ) -> None:
        """Choose the fastest execution path that agrees with the stock model.

        Raises:
            ModelNotSupported: none does.
        """
        assert self._model is not None
        difference: str | None = None
        paths = acceleration.execution_paths(
            self._model,
            self.caches,
            shapes,
            num_threads,
            self._make_graphs,
            enforce_eager=settings.enforce_eager,
            is_split=settings.tensor_parallel_size > 1,
            autotune=settings.autotune,
        )
        for path in paths:
            self._decoder, self.graphs, self.path = path.decoder, path.graphs, path.name
            if self.device.type == "cpu":
                # The native decoder brings its own threads; torch's would spin beside them for milliseconds after every
                # large operation of a sampler.
                torch.set_num_threads(num_threads if path.decoder is None else 1)
            self._state.kernels = path.kernels
            try:
                difference = reference.difference(self.forward, self.pool)
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                difference = f"{type(error).__name__}: {error}"
            if difference is None:
                return
            logger.warning("%s: %s is not used: %s", settings.model, path.name, difference)
        raise ModelNotSupported(
            f"{type(self._model).__name__} would give wrong answers here and is refused: fed as a ragged batch in"
            f" chunks, {difference}"
        )

    def _make_graphs(self) -> GraphRunner:
        return GraphRunner(
            self._run_modules,
            CudaCapture(self.device),
            vocab_size=self.info.vocab_size,
            max_model_len=self.info.max_model_len,
            block_size=self.pool.block_size,
            device=self.device,
            forward_with_states=self._run_with_states,
            hidden_size=self.hidden_size,
        )


def _measure_activation(
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    *,
    block_size: int,
    vocab_size: int,
    num_rows: int,
    device: torch.device,
) -> int:
    """Bytes a large pass needs on a GPU beyond weights and cache."""
    engine = Engine(
        model,
        shapes,
        vocab_size=vocab_size,
        max_model_len=num_rows,
        num_blocks=-(-num_rows // block_size),
        block_size=block_size,
        device=device,
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    engine.forward([Segment(engine.pool.open(num_rows), [0] * num_rows, num_rows)])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
