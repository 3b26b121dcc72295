"""Several steps of a chain in one graph: the same chains as by a pass for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import build_batch
from engine.chains import ChainJob, draft_chains
from engine.cuda import graphs
from engine.cuda.chains import CapturedChains
from engine.engine import Engine
from engine.sampling.drafting import DraftedChain
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from tests.engine.cuda.launches import rerun

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def engine(load_engine: Callable[..., Engine]) -> Engine:
    return load_engine("llama", device=DEVICE, enforce_eager=DEVICE == "cpu", kv_cache_memory_bytes=200_000)


def captured_chains(engine: Engine, capture: graphs.Capture = rerun) -> CapturedChains:
    """Graphs are functions run again where there is no GPU."""
    if DEVICE != "cpu" and capture is rerun:
        capture = graphs.CudaCapture(engine.device)
    return CapturedChains(
        engine.runner.run_modules,  # type: ignore[attr-defined]
        capture,
        partial(build_batch, **engine.limits),
        max_model_len=engine.info.max_model_len,
        block_size=engine.pool.block_size,
        device=engine.device,
    )


def drafted(
    engine: Engine,
    captured: CapturedChains | None,
    kinds: Sequence[tuple[Rule, dict[str, Any]]],
    counts: Sequence[int],
    stop: Sequence[int] | None = None,
) -> tuple[list[DraftedChain], list[int]]:
    """Two chains of each session, one after the other, and the lengths of their sequences."""
    engine.runner.captured_chains = captured
    sequences = [engine.pool.open(30) for _ in counts]
    states = [
        SamplingState(SamplingParams(seed=i, **params), [3 + i, 5, 7], 3, engine.info.vocab_size, device=engine.device)
        for i, (_, params) in enumerate(kinds)
    ]
    chains = []
    for token_ids in ([3, 5, 7], [9]):
        jobs = [
            ChainJob(sequence, [*token_ids, i], count, state, rule)
            for i, (sequence, state, (rule, _), count) in enumerate(zip(sequences, states, kinds, counts, strict=True))
        ]
        chains += draft_chains(engine, jobs, None if stop is None else np.array(stop, np.int32))
    lengths = [sequence.length for sequence in sequences]
    for sequence in reversed(sequences):
        engine.pool.release(sequence)
    engine.runner.captured_chains = None
    return chains, lengths


@pytest.mark.parametrize(
    ("kinds", "sampling"),
    [
        ([(Rule.BLOCK, GREEDY)], "ARGMAX"),
        ([(Rule.BLOCK, GREEDY), (Rule.TOKEN, GREEDY), (Rule.COUPLED, GREEDY)], "ARGMAX"),
        ([(Rule.BLOCK, {"temperature": 0.7})] * 2, "FROM_Q"),
        ([(Rule.TOKEN, {"top_p": 0.8}), (Rule.BLOCK, {"top_k": 5}), (Rule.TOKEN, {"min_p": 0.02})], "FROM_Q"),
        ([(Rule.BLOCK, GREEDY), (Rule.BLOCK, {})], None),
        ([(Rule.BLOCK, {"temperature": 0.0, "presence_penalty": 1.0})], None),
        ([(Rule.COUPLED, {})], None),
        ([(Rule.BLOCK, GREEDY)] * 17, None),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_chains_are_those_of_single_steps(
    kinds: list[tuple[Rule, dict[str, Any]]], sampling: str | None, count: int, engine: Engine
) -> None:
    captured = captured_chains(engine)
    counts = [count] * len(kinds)
    found = drafted(engine, captured, kinds, counts)
    assert found == drafted(engine, None, kinds, counts)
    assert all(len(chain.token_ids) == count for chain in found[0])
    graphs_of = captured._captured.items()  # noqa: SLF001
    sizes = sorted(size for (shape, size), made in graphs_of if made and shape.sampling.name == sampling)
    assert sizes == ([] if sampling is None else {1: [], 2: [1], 4: [1, 2], 8: [1, 2, 4]}[count])


def test_chains_of_several_lengths_or_stopped_ones_are_drafted_step_by_step(engine: Engine) -> None:
    kinds = [(Rule.BLOCK, GREEDY)] * 2
    for counts, stop in (([2, 5], None), ([4, 4], [0, 1])):
        captured = captured_chains(engine)
        found = drafted(engine, captured, kinds, counts, stop)
        assert found == drafted(engine, None, kinds, counts, stop)
        assert not captured._captured  # noqa: SLF001


def test_sessions_that_are_fed_alone_disturb_nobody(engine: Engine) -> None:
    kinds = [(Rule.BLOCK, GREEDY)] * 3
    captured = captured_chains(engine)
    assert drafted(engine, captured, kinds, [4, 0, 4]) == drafted(engine, None, kinds, [4, 0, 4])


def test_without_memory_for_a_graph_each_token_is_a_pass(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Callable[[], object]) -> Callable[[], object]:
        raise torch.OutOfMemoryError("it is full")

    kinds, counts = [(Rule.BLOCK, GREEDY)], [4]
    assert drafted(engine, captured_chains(engine, fail), kinds, counts) == drafted(engine, None, kinds, counts)
    assert caplog.text.count("are drafted step by step: OutOfMemoryError: it is full") == 2, "once for each size"


def test_no_chain_outgrows_its_sequence(engine: Engine) -> None:
    """As without graphs."""
    for captured in (captured_chains(engine), None):
        with pytest.raises(ValueError, match="exceed the 32"):
            drafted(engine, captured, [(Rule.BLOCK, GREEDY)], [40])
