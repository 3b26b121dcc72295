"""Times of an engine's passes, and the share of the memory's bandwidth they reach.

A pass over few rows reads every weight and the cached entries once; whatever else it does should take no time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.random_pairs import PairShape
from engine.chains import ChainJob, draft_chains
from engine.engine import Engine, Segment
from engine.kv_sequence import KVSequence
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from tandem.bench.limits import quantile
from target_service.verification.rounds import Round
from target_service.verification.verifier import Verifier

#: Rows of the pass that shows how fast prompts are ingested.
PREFILL_ROWS: Final = 512
_WARM_UPS: Final = 3
_CHUNK: Final = 512


@dataclass(frozen=True, slots=True)
class Step:
    """Passes over so many sessions with so many entries each: one row per session, and k + 1."""

    sessions: int
    context: int
    decode_s: float
    verify_s: float
    #: Bytes a decode pass reads.
    num_bytes: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a decode pass."""
        return self.num_bytes / self.decode_s

    @property
    def verify_ratio(self) -> float:
        """Price of verifying in decode passes."""
        return self.verify_s / self.decode_s


def bytes_read(shape: PairShape, itemsize: int, *, sessions: int, context: int) -> int:
    """Bytes a decode pass cannot but read: the weights, and the entries before each session's row."""
    return itemsize * (shape.num_read + sessions * context * shape.kv_per_token)


def prefill_flops(shape: PairShape, num_rows: int) -> int:
    """Operations of the matrix products of a pass that wants the logits of one row."""
    output = shape.vocab_size * shape.hidden_size
    return 2 * (num_rows * (shape.num_read - output) + output)


def measure_bandwidth(device: torch.device, num_bytes: int, repeats: int) -> float:
    """Bytes per second of the memory: the best of reading and of copying so many bytes."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    reading = num_bytes / _median(source.sum, device, repeats)
    copying = 2 * num_bytes / _median(lambda: target.copy_(source), device, repeats)
    return max(reading, copying)


def time_steps(
    engine: Engine, shape: PairShape, *, k: int, loads: Sequence[tuple[int, int]], repeats: int
) -> Iterator[Step]:
    """Steps for each (sessions, context), those that do not fit the cache left out."""
    itemsize = torch.finfo(getattr(torch, engine.info.dtype)).bits // 8
    for sessions, context in loads:
        room = context + k + 1
        blocks = -(-room // engine.pool.block_size) * engine.pool.block_size
        if room > engine.info.max_model_len or not engine.pool.can_open(sessions * blocks):
            continue
        with _opened(engine, sessions, context, room) as sequences:
            decode_s, verify_s = (time_pass(engine, sequences, rows, rows, repeats) for rows in (1, k + 1))
        num_bytes = bytes_read(shape, itemsize, sessions=sessions, context=context)
        yield Step(sessions, context, decode_s, verify_s, num_bytes)


def time_prefill(engine: Engine, repeats: int) -> float:
    """Seconds of a pass over :data:`PREFILL_ROWS` rows (or as many as the model takes) of a new sequence."""
    num_rows = min(PREFILL_ROWS, engine.info.max_model_len)
    with _opened(engine, 1, 0, num_rows) as sequences:
        return time_pass(engine, sequences, num_rows, 1, repeats)


def time_pass(engine: Engine, sequences: Sequence[KVSequence], num_rows: int, num_logits: int, repeats: int) -> float:
    """Median seconds of a pass over ``num_rows`` rows per sequence, until its logits are there."""
    lengths = [sequence.length for sequence in sequences]
    segments = [Segment(sequence, list(range(1, num_rows + 1)), num_logits) for sequence in sequences]

    def run() -> None:
        engine.forward(segments)
        for sequence, length in zip(sequences, lengths, strict=True):
            engine.pool.rollback(sequence, length)

    return _median(run, engine.device, repeats)


def time_drafting(engine: Engine, rule: Rule, *, temperature: float, k: int, repeats: int) -> float:
    """Median seconds a drafted token takes within a chain of k tokens, its transfer to the host included."""
    state = _state(engine, temperature)
    with _opened(engine, 1, len(state) - 1, len(state) + k) as (sequence,):
        length = sequence.length

        def run() -> None:
            draft_chains(engine, [ChainJob(sequence, state.token_ids[length:], k, state, rule)])
            engine.pool.rollback(sequence, length)

        return _median(run, engine.device, repeats) / k


def warm_verifier(engine: Engine, *, captures: bool = True) -> Verifier:
    """What decides the engine's rounds, as a target has it."""
    verifier = Verifier()
    verifier.warm_up(engine.device, engine.info.vocab_size, engine.info.tokenizer_size, captures=captures)
    return verifier


def time_verdict(engine: Engine, verifier: Verifier, rule: Rule, *, temperature: float, k: int, repeats: int) -> float:
    """Median seconds from the logits of a round of k drafts to its tokens on the host."""
    state = _state(engine, temperature)
    logits = torch.randn(k + 1, engine.info.vocab_size, device=engine.device)
    rounds = [Round(state, rule, 0, list(range(1, k + 1)))]
    return _median(lambda: verifier.verify(logits, rounds), engine.device, repeats)


def count_calls(engine: Engine, verifier: Verifier, k: int) -> dict[str, int]:
    """Calls of CUDA, by name, in a round of k drafts and its verdict; without a GPU torch's operations in all."""
    state = _state(engine, 1.0)
    rounds = [Round(state, Rule.BLOCK, 0, list(range(1, k + 1)))]
    on_gpu = engine.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _opened(engine, 1, len(state) - 1, len(state) + k) as (sequence,):
        length = sequence.length
        for _ in range(_WARM_UPS):
            with profile(activities=kinds) as profiled:
                verifier.verify(engine.forward([Segment(sequence, list(range(k + 1)), k + 1)]), rounds)
            engine.pool.rollback(sequence, length)
    names = [event.name for event in profiled.events()]
    calls = Counter(name for name in names if name.startswith(("cuda", "cuLaunch")))
    return dict(calls) if on_gpu else {"operations": sum(name.startswith("aten::") for name in names)}


def _state(engine: Engine, temperature: float) -> SamplingState:
    prompt = list(range(1, 33))
    params = SamplingParams(temperature=temperature, seed=0)
    return SamplingState(params, prompt, len(prompt), engine.info.vocab_size, device=engine.device)


@contextmanager
def _opened(engine: Engine, sessions: int, context: int, room: int) -> Iterator[list[KVSequence]]:
    """Sequences with so many entries."""
    sequences = [engine.pool.open(room) for _ in range(sessions)]
    try:
        for sequence in sequences:
            for start in range(0, context, _CHUNK):
                engine.forward([Segment(sequence, [1] * min(_CHUNK, context - start), 0)])
        yield sequences
    finally:
        for sequence in reversed(sequences):
            engine.pool.release(sequence)


def _median(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(_WARM_UPS + repeats):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return quantile(times[_WARM_UPS:], 0.5)
