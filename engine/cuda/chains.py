"""Several steps of a chain as one graph: each feeds the tokens that the one before has drawn, and draws from its pass.

A pass of a draft model takes less time than what the host does for it, and nothing that the host does depends on the
tokens: positions, places in the cache and the numbers of the noise are known for all steps before the first. On an H200
the bundled EAGLE-3 head, embedded, made 738 tokens/s for 513 step by step, the draft model 1,074 for 990 (one session).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch, Segment
from engine.cuda import drawing
from engine.cuda.drawing import DrawShape
from engine.cuda.graphs import Bucket, Capture, Forward, Inputs
from engine.kv_sequence import KVSequence
from engine.sampling.drafting import Drafted
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.rules import DraftSampling, Rule

logger = logging.getLogger(__name__)

#: Steps of a graph, powers of two: chains of any length replay some of few graphs.
_STEPS: Final = (4, 2, 1)
#: Up to so many rows every power of two is a bucket of passes, so that a step computes what a single pass would.
MAX_ROWS: Final = 16


class _CapturedSteps(NamedTuple):
    """A graph of S steps for R rows."""

    #: Of each step.
    inputs: list[Inputs]
    #: What the draws read, int64 [S, numbers, R].
    numbers: Tensor
    #: What they leave, int64 [S, R, results].
    out: Tensor
    replay: Callable[[], object]


class CapturedChains:
    """Extends the chains of sessions that all draw in the same way."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        layout: Callable[[Sequence[Segment]], Batch],
        *,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """``forward`` and ``capture`` as those of :class:`~engine.cuda.graphs.GraphRunner`; ``layout`` makes the
        batches, and raises for what cannot be fed.
        """
        self._forward, self._capture, self._layout, self._device = forward, capture, layout, device
        self._make_inputs = partial(Inputs, max_model_len=max_model_len, block_size=block_size, device=device)
        self._captured: dict[tuple[DrawShape, int], _CapturedSteps | None] = {}

    def extend(
        self,
        sequences: Sequence[KVSequence],
        token_ids: Tensor,
        rows: Rows,
        rules: Sequence[Rule],
        count: int,
        *,
        prepare: Callable[[], object] = lambda: None,
    ) -> list[Drafted] | None:
        """Feed tokens, int64 [R], one to each sequence, and draw ``count`` more each: those of ``rows`` and its next.

        Sequences grow by ``count``. None where they draw in several ways, in one that no graph knows, or have no
        graph: nothing was fed then. ``prepare`` is called before the first pass: a capture has used what that reads.
        Called on the device thread, in inference mode; nothing waits for the device.

        Raises as :func:`engine.batch.build_batch`, after which sequences may have grown.
        """
        shape = shape_of(rows.states, rules)
        if shape is None:
            return None
        sizes = [_STEPS[0]] * (count // _STEPS[0]) + [size for size in _STEPS[1:] if count & size]
        graphs = [captured for size in sizes if (captured := self._captured_for(shape, size)) is not None]
        if len(graphs) < len(sizes):
            return None
        prepare()
        drafted: list[Drafted] = []
        for captured in graphs:
            out = self._replay(captured, shape, sequences, token_ids, rows)
            for result in out.unbind():
                ids, *q = result.split([1, shape.q_width, shape.q_width], 1)  # type: ignore[no-untyped-call]
                drafted.append(Drafted(ids[:, 0], *(q if shape.q_width else ())))
            token_ids, rows = drafted[-1].token_ids, _later(rows, len(out))
        return drafted

    def _replay(
        self,
        captured: _CapturedSteps,
        shape: DrawShape,
        sequences: Sequence[KVSequence],
        token_ids: Tensor,
        rows: Rows,
    ) -> Tensor:
        """What the draws of a graph leave of the rows, int64 [S, R, results]."""
        staged = torch.zeros(captured.numbers.shape, dtype=torch.int64, pin_memory=captured.numbers.is_cuda)
        for step, (inputs, numbers) in enumerate(zip(captured.inputs, staged.numpy(), strict=True)):
            inputs.fill(self._layout([Segment(sequence, [0], 1) for sequence in sequences]))
            for sequence in sequences:
                sequence.length += 1
            drawing.fill(numbers, shape, _later(rows, step))
        captured.inputs[0].batch.input_ids[0, : len(rows)].copy_(token_ids)
        captured.numbers.copy_(staged, non_blocking=True)
        captured.replay()
        return captured.out[:, : len(rows)].clone()

    def _captured_for(self, shape: DrawShape, num_steps: int) -> _CapturedSteps | None:
        key = shape, num_steps
        if key not in self._captured:
            self._captured[key] = None  # a capture that fails is not tried again
            made: list[_CapturedSteps] = []

            def run() -> None:
                if not made:
                    made.append(self._made(shape, num_steps))
                self._compute(made[0], shape)

            try:
                replay = self._capture(run)
            except Exception as error:  # no memory, what cannot be captured, or Triton's own errors
                logger.warning("chains of %s are drafted step by step: %s: %s", shape, type(error).__name__, error)
                return None
            self._captured[key] = None if replay is None else made[0]._replace(replay=replay)
        return self._captured[key]

    def _made(self, shape: DrawShape, num_steps: int) -> _CapturedSteps:
        """The memory of a graph."""
        bucket = Bucket(shape.num_rows, shape.num_rows)
        inputs = [self._make_inputs(bucket) for _ in range(num_steps)]
        numbers = drawing.padding(shape, self._device).repeat(num_steps, 1, 1)
        out = numbers.new_zeros(num_steps, shape.num_rows, shape.num_results)
        return _CapturedSteps(inputs, numbers, out, lambda: None)

    def _compute(self, captured: _CapturedSteps, shape: DrawShape) -> None:
        """What is captured. Rows left over draw tokens, too, and feed them to no sequence."""
        for step, inputs in enumerate(captured.inputs):
            if step:
                inputs.batch.input_ids[0].copy_(captured.out[step - 1, :, 0])
            logits = self._forward(inputs.batch).float()
            if shape.sampling is DraftSampling.ARGMAX:
                captured.out[step, :, 0].copy_(logits.argmax(-1))
            else:
                drawing.compute(shape, logits, captured.numbers[step], captured.out[step])


def _later(rows: Rows, num_steps: int) -> Rows:
    """Rows whose tokens nobody reads, so many tokens further."""
    return Rows(rows.states, rows.prefix, [length + num_steps for length in rows.prefix_lens])


def shape_of(states: Sequence[SamplingState], rules: Sequence[Rule]) -> DrawShape | None:
    """How rows are drawn, where that is the same for all and the logits are drawn from as they are; else None."""
    kinds = {rule.sampling_at(state.params.temperature) for state, rule in zip(states, rules, strict=True)}
    if len(kinds) > 1 or len(states) > MAX_ROWS or any(state.edits for state in states):
        return None
    (sampling,) = kinds
    if sampling is DraftSampling.ARGMAX:
        return DrawShape(sampling, False, 1 << (len(states) - 1).bit_length(), states[0].num_tokens)
    return drawing.shape_of(sampling, states)
