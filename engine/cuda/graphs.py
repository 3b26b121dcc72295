"""CUDA graphs: one captured pass for a bucket of batch shapes, replayed for every batch that fits into it.

A small pass is hundreds of short kernels, and launching them from Python takes longer than running them. A captured
pass is launched at once, but it always runs the same kernels on the same memory. So a batch is padded to its bucket:
the numbers that describe it go to the bucket's own buffers in one copy, rows left over belong to a last sequence
without entries, whose keys and values go to block 0, and sequences left over have no rows. Nothing a captured kernel is
launched with depends on what differs within a bucket; above all, lengths and block tables are read on the device.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from engine.batch import Batch
from engine.cuda.sync import NoSync, NotCapturable
from engine.plan import BatchPlan

logger = logging.getLogger(__name__)

#: Rows of captured passes; larger passes run as they are, since launching them takes no longer than running them.
ROW_SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
#: Those of services whose steps are no larger.
USUAL_ROWS: Final = 512
#: Rows of logits that a captured pass gives where no more are wanted: those of prompts want one.
FEW_LOGITS: Final = 64
#: Passes of at most so many rows, and the largest of one sequence, are captured at start, others when they first come.
_WARM_ROWS: Final = 64
#: And these, of one tree, which has 65 rows at most.
_WARM_TREES: Final = (96, 64, 48, 32, 24, 16, 8, 4)
#: Choices of layers whose hidden states captured passes leave; with any other, passes run as they are.
MAX_STATE_CHOICES: Final = 2
#: Memory for graphs and what they compute in, at most, and as a share of the device's.
_MAX_BYTES: Final = 2**30
_MAX_SHARE: Final = 0.05
#: Graphs of verdicts get as much again, divided by this.
_SHARE_OF_VERDICTS: Final = 4
#: What the driver keeps of a graph besides, taken to be so much.
_DRIVER_BYTES: Final = 2**21

#: Runs the model's modules on a batch on the device: logits [N, V] of its logit rows.
Forward = Callable[[Batch], torch.Tensor]
#: The same, and hidden states of its rows at some layers, [T or fewer, layers, H].
ForwardWithStates = Callable[[Batch, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]]
#: Makes of a function another that does the same work again, on the same memory; None where there is no room for it.
Capture = Callable[[Callable[[], object]], Callable[[], object] | None]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows and sequences of a captured pass, whether it gives the logits of all rows, and whether they may be trees."""

    num_rows: int
    num_sequences: int
    has_all_logits: bool = False
    has_trees: bool = False

    @classmethod
    def of(cls, batch: Batch, max_rows: int = USUAL_ROWS) -> Bucket | None:
        """The smallest bucket that holds a batch; None where it has too many rows."""
        plan = batch.plan
        if plan.num_rows > max_rows:
            return None
        return cls(
            ROW_SIZES[bisect_left(ROW_SIZES, plan.num_rows)],
            1 << (plan.num_sequences - 1).bit_length(),
            has_all_logits=batch.logit_rows.shape[0] > FEW_LOGITS,
            has_trees=plan.ancestors is not None,
        )

    @property
    def num_logits(self) -> int:
        """Rows of logits it gives."""
        return self.num_rows if self.has_all_logits else min(self.num_rows, FEW_LOGITS)


class _Thread(threading.local):
    """What a thread that owns a device was told."""

    is_eager = False


_thread: Final = _Thread()


def set_eager(is_eager: bool) -> None:
    """Whether what this thread draws runs without graphs from now on, as ``enforce_eager`` wants."""
    _thread.is_eager = is_eager


def is_eager() -> bool:
    """What :func:`set_eager` said."""
    return _thread.is_eager


class Inputs:
    """The buffers a captured pass reads: one piece of memory, filled by one copy."""

    def __init__(self, bucket: Bucket, *, max_model_len: int, block_size: int, device: torch.device) -> None:
        """Filled with padding alone."""
        num_rows, num_sequences = bucket.num_rows, bucket.num_sequences + 1  # the last one has the rows left over
        self._shape = (num_rows, num_sequences, -(-max_model_len // block_size))
        self._num_lists = 5 if bucket.has_trees else 4
        num_int32 = 2 * num_sequences + 1 + num_sequences * self._shape[2]
        size = self._num_lists * num_rows + (num_int32 + 1) // 2
        self._buffer = torch.zeros(size, dtype=torch.int64, device=device)
        numbers, row_starts, kv_lens, block_tables = self._parts(self._buffer, torch.int32)
        row_starts[-1] = num_rows
        plan = BatchPlan(
            positions=numbers[1],
            slots=numbers[2],
            row_starts=row_starts,
            block_tables=block_tables,
            kv_lens=kv_lens,
            max_kv_len=max_model_len,
            max_rows=num_rows,
            block_size=block_size,
            ancestors=numbers[4] if bucket.has_trees else None,
        )
        #: The batch a pass is captured on; its values change, its lists are empty.
        self.batch = Batch(plan, numbers[:1], numbers[3, : bucket.num_logits], [], [])

    def fill(self, batch: Batch) -> None:
        """Bring a batch from the host, without waiting. Its token ids may be on the device already."""
        plan, ids = batch.plan, batch.input_ids[0]
        used_rows, used_sequences, num_logits = plan.num_rows, plan.num_sequences, batch.logit_rows.shape[0]
        # Memory of its own for each copy: torch takes pinned memory back when the copy out of it has been made.
        staged = torch.empty(self._buffer.shape, dtype=torch.int64, pin_memory=self._buffer.is_cuda)
        numbers, row_starts, kv_lens, block_tables = self._parts(staged.numpy(), np.int32)
        numbers[:, min(used_rows, num_logits) :] = 0
        on_host = ids.device.type == "cpu"
        if on_host:
            numbers[0, :used_rows] = ids.numpy()
        numbers[1, :used_rows] = plan.positions.numpy()
        numbers[2, :used_rows] = plan.slots.numpy()
        numbers[3, :num_logits] = batch.logit_rows.numpy()
        if plan.ancestors is not None:
            numbers[4, :used_rows] = plan.ancestors.numpy()
        row_starts[:used_sequences] = plan.row_starts[:-1].numpy()
        row_starts[used_sequences:] = used_rows
        row_starts[-1] = self._shape[0]
        kv_lens[:used_sequences] = plan.kv_lens.numpy()
        kv_lens[used_sequences:] = 0
        # The rest of a table is never read.
        block_tables[:used_sequences, : plan.block_tables.shape[1]] = plan.block_tables.numpy()
        block_tables[-1, 0] = 0
        self._buffer.copy_(staged, non_blocking=True)
        if not on_host:
            self.batch.input_ids[0, :used_rows].copy_(ids)

    def _parts(self, buffer: Any, int32: Any) -> tuple[Any, Any, Any, Any]:
        """Ids, positions, slots, logit rows and, of trees, ancestors, int64 [4 or 5, T]; then row starts, kv_lens and
        block tables, ``int32``.

        They are views of a tensor or of an array.
        """
        num_rows, num_sequences, num_columns = self._shape
        num_lists = self._num_lists
        tables_at, end = 2 * num_sequences + 1, 2 * num_sequences + 1 + num_sequences * num_columns
        sizes = buffer[num_lists * num_rows :].view(int32)
        return (
            buffer[: num_lists * num_rows].reshape(num_lists, num_rows),
            sizes[: num_sequences + 1],
            sizes[num_sequences + 1 : tables_at],
            sizes[tables_at:end].reshape(num_sequences, num_columns),
        )


class GraphRunner:
    """Runs batches by replaying captured passes."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        max_rows: int = USUAL_ROWS,
        forward_with_states: ForwardWithStates | None = None,
        hidden_size: int = 0,
        states_dtype: torch.dtype = torch.bfloat16,
        max_state_choices: int = MAX_STATE_CHOICES,
    ) -> None:
        """``forward`` must not wait for the device, and must launch the same for every batch of a bucket; so must
        ``forward_with_states``, where passes that give hidden states are captured, too. ``max_rows``: of
        :func:`largest_rows`.
        """
        self._states_dtype, self._max_state_choices = states_dtype, max_state_choices
        self._forward = forward
        self._forward_with_states = forward_with_states
        self._hidden_size = hidden_size
        self._capture = capture
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._max_rows = max_rows
        #: Where every captured pass leaves its logits, float32.
        self._logits = torch.empty(max_rows, vocab_size, device=device)
        #: By choice of layers, where captured passes leave the hidden states of their rows.
        self._states: dict[tuple[int, ...], torch.Tensor] = {}
        self._captured: dict[tuple[Bucket, tuple[int, ...]], tuple[Inputs, Callable[[], object]] | None] = {}

    @property
    def buckets(self) -> list[Bucket]:
        """What has been captured."""
        return [bucket for (bucket, _), captured in self._captured.items() if captured is not None]

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits, float32 [N, V], of a batch that :func:`~engine.batch.build_batch` made.

        None where it has to run without a graph: it is too large, or there is no memory for the graph.
        """
        return self._logits[: batch.logit_rows.shape[0]].clone() if self._replay(batch, ()) else None

    def run_with_states(self, batch: Batch, layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same, and the hidden states of its rows at some layers, [T, layers, H], until the next pass."""
        if not self._has_room_for(layers) or not self._replay(batch, layers):
            return None
        return self._logits[: batch.logit_rows.shape[0]].clone(), self._states[layers][: batch.plan.num_rows]

    def _has_room_for(self, layers: tuple[int, ...]) -> bool:
        """Whether hidden states of these layers can be left, or none are wanted."""
        if layers and layers not in self._states:
            if self._forward_with_states is None or len(self._states) >= self._max_state_choices:
                return False
            size = self._max_rows, len(layers), self._hidden_size
            self._states[layers] = torch.empty(size, dtype=self._states_dtype, device=self._logits.device)
        return True

    def _replay(self, batch: Batch, layers: tuple[int, ...]) -> bool:
        bucket = Bucket.of(batch, self._max_rows)
        captured = None if bucket is None else self._captured_for(bucket, layers)
        if captured is None:
            return False
        inputs, replay = captured
        inputs.fill(batch)
        replay()
        return True

    def warm_up(self, layers: tuple[int, ...] = ()) -> None:
        """Capture a pass of a long prompt, trees, then small passes of any number of sequences, which all leave hidden
        states of these layers.

        The largest come first: the others compute in its memory.
        """
        if not self._has_room_for(layers):
            return
        sizes = [size for size in ROW_SIZES if size <= min(self._max_model_len, self._max_rows)]
        self._captured_for(Bucket(sizes[-1], 1), layers)
        for num_rows in _WARM_TREES:
            self._captured_for(Bucket(num_rows, 1, has_all_logits=num_rows > FEW_LOGITS, has_trees=True), layers)
        for num_rows in reversed([size for size in sizes if size <= _WARM_ROWS]):
            for exponent in reversed(range((num_rows - 1).bit_length() + 1)):
                self._captured_for(Bucket(num_rows, 1 << exponent), layers)

    def _captured_for(self, bucket: Bucket, layers: tuple[int, ...] = ()) -> tuple[Inputs, Callable[[], object]] | None:
        key = bucket, layers
        if key not in self._captured:
            self._captured[key] = None  # a capture that fails is not tried again
            made: list[Inputs] = []

            def run() -> None:
                if not made:  # within what ranks agree on: memory may run out on one alone
                    sizes = {"max_model_len": self._max_model_len, "block_size": self._block_size}
                    made.append(Inputs(bucket, **sizes, device=self._logits.device))
                self._compute(made[0].batch, layers)

            try:
                replay = self._capture(run)
            except (torch.OutOfMemoryError, NotCapturable) as error:
                if isinstance(error, NotCapturable) and not self.buckets:  # none of its passes can be captured
                    raise
                logger.warning("passes of %d rows run without a CUDA graph: %s", bucket.num_rows, error)
                return None
            self._captured[key] = None if replay is None else (made[0], replay)
        return self._captured[key]

    def _compute(self, batch: Batch, layers: tuple[int, ...]) -> None:
        """What is captured: a pass whose results are left where all passes leave theirs."""
        out = self._logits[: batch.logit_rows.shape[0]]
        if not layers:
            out.copy_(self._forward(batch))
            return
        assert self._forward_with_states is not None
        logits, states = self._forward_with_states(batch, layers)
        out.copy_(logits)
        self._states[layers][: len(states)].copy_(states)


class CudaCapture:
    """Captures on one stream of its own, in memory that all graphs share, as they never run at once."""

    def __init__(self, device: torch.device, *, of_verdicts: bool = False) -> None:
        """Passes differ in shapes alone, and only the first is checked; verdicts (and draws) have less memory."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._left = max_bytes(device) // (_SHARE_OF_VERDICTS if of_verdicts else 1)
        #: Bytes of the graph that took most.
        self._most = 0
        self._checks_all = of_verdicts
        self._is_checked = False

    @property
    def has_room(self) -> bool:
        """Whether there is memory for another. They share what they compute in, and the largest comes first."""
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return self._left > 0 and free + cached > self._most

    def __call__(self, run: Callable[[], object]) -> Callable[[], object] | None:
        """Run a function until all it needs is compiled and allocated, then capture it.

        The second run is checked for waiting; the first may, where it makes what it keeps. What fails only when it is
        captured after these is the capture's fault, and all other errors are passed on.

        Raises:
            NotCapturable: it cannot be captured, such as :class:`HostWaits`.
        """
        if not self.has_room:
            return None
        before = torch.cuda.memory_reserved(self._device)  # of this process: others may fill the device meanwhile
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            run()
            with nullcontext() if self._is_checked else NoSync(self._device.type, captures=True):
                run()
            self._is_checked = not self._checks_all
            self._stream.synchronize()
            # Other threads may use their streams meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            failure: Exception | None = None
            try:
                run()
            except Exception as error:
                failure = error
            try:
                graph.capture_end()
            except RuntimeError as error:  # it is invalid; torch's allocator would go on serving its pool alone
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                failure = failure or error
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure
        if failure is not None:
            raise NotCapturable(f"{type(failure).__name__}: {failure}") from failure
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        taken = torch.cuda.memory_reserved(self._device) - before + _DRIVER_BYTES
        self._left, self._most = self._left - taken, max(self._most, taken)
        if self._left <= 0:
            logger.warning("CUDA graphs have taken their share of memory: passes of further shapes run without")
        return graph.replay


class AgreedCapture:
    """Captures on all ranks of a split model or on none: a pass exchanges data with theirs, each as often as it runs.

    The sums of NCCL are captured as any other kernel. A pass that cannot be captured runs as it is.
    """

    def __init__(self, capture: CudaCapture, agree: Callable[[bool], bool]) -> None:
        """``agree``: whether something is true on all ranks, which wait for each other there."""
        self._capture, self._agree = capture, agree

    def __call__(self, run: Callable[[], object]) -> Callable[[], object] | None:
        """As the capture of each rank."""
        if not self._agree(self._capture.has_room):
            return None
        replay = None
        try:
            replay = self._capture(run)
        except Exception as error:  # what fails without a graph, too, is raised by the pass itself
            logger.warning("passes with exchanges run without CUDA graphs: %s: %s", type(error).__name__, error)
        return replay if self._agree(replay is not None) else None


def max_bytes(device: torch.device) -> int:
    """Memory that graphs may take on a GPU."""
    return min(_MAX_BYTES, int(_MAX_SHARE * torch.cuda.get_device_properties(device).total_memory))


def largest_rows(num_rows: int) -> int:
    """Rows of the largest captured pass of a service whose steps have up to ``num_rows``."""
    return next((size for size in ROW_SIZES if size >= max(num_rows, USUAL_ROWS)), ROW_SIZES[-1])


def reserved_bytes(vocab_size: int, device: torch.device, max_rows: int = USUAL_ROWS) -> int:
    """Memory to keep free of cache blocks: for the graphs and their logits."""
    return max_bytes(device) * (1 + _SHARE_OF_VERDICTS) // _SHARE_OF_VERDICTS + 4 * max_rows * vocab_size
