"""Buckets, padding and replay. Where there is no GPU, a "graph" is the captured function run again on its buffers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from engine.batch import Batch, build_batch
from engine.chain_job import ChainJob
from engine.compaction import Kept
from engine.cuda import attention, graphs, kernels
from engine.cuda.graphs import (
    ROW_SIZES,
    USUAL_ROWS,
    AgreedCapture,
    Bucket,
    CudaCapture,
    GraphRunner,
    Inputs,
    largest_rows,
    reserved_bytes,
)
from engine.cuda.sync import HostWaits, NotCapturable
from engine.engine import Engine, Segment
from engine.heads.files.checkpoint import read_head
from engine.heads.paged import PagedHead
from engine.kv_pool import KVPool
from engine.kv_sequence import KVSequence
from engine.loading import acceleration
from engine.plan import BatchPlan
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.settings import ModelSettings, SchedulerSettings
from tests.engine.cuda.launches import rerun
from tests.engine.heads.mtp_targets import write_mtp_target
from tests.engine.heads.random_heads import VOCAB, eagle, eagle3
from tests.engine.paged import random_tree

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


Load = Callable[..., Engine]


@pytest.fixture
def load_captured(load_engine: Load) -> Load:
    """Loads an engine that replays graphs: real ones on a GPU."""

    def load(name: str, capture: graphs.Capture = rerun, max_rows: int = 512) -> Engine:
        engine = load_engine(name, device=DEVICE, enforce_eager=DEVICE == "cpu", kv_cache_memory_bytes=200_000)
        if DEVICE == "cpu":
            engine.runner.graphs = GraphRunner(
                engine.runner.run_modules,
                capture,
                vocab_size=engine.info.vocab_size,
                max_model_len=engine.info.max_model_len,
                block_size=engine.pool.block_size,
                device=engine.device,
                forward_with_states=engine.runner.run_modules_with_states,
                hidden_size=engine.hidden_size,
                max_rows=max_rows,
            )
        assert engine.runner.graphs is not None
        return engine

    return load


def feed(engine: Engine, parts: Sequence[tuple[KVSequence, Sequence[int]]]) -> list[torch.Tensor]:
    """Logits of every token, one tensor per sequence, on the CPU."""
    logits = engine.forward([Segment(sequence, ids, len(ids)) for sequence, ids in parts])
    return [rows.cpu() for rows in logits.split([len(ids) for _, ids in parts])]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def batch_of(num_rows: int, num_sequences: int, num_logits: int = 0, *, is_tree: bool = False) -> Batch:
    rows, sizes = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_sequences + 1, dtype=torch.int32)
    plan = BatchPlan(rows, rows, sizes, sizes[None], sizes[1:], 9, num_rows, 4, rows if is_tree else None)
    return Batch(plan, rows[None], rows[:num_logits], [], [])


@given(
    num_rows=st.integers(1, 1100),
    num_sequences=st.integers(1, 600),
    share=st.floats(0, 1),
    is_tree=st.booleans(),
    limit=st.integers(1, 2000),
)
def test_a_bucket_is_the_smallest_that_holds_the_batch(
    num_rows: int, num_sequences: int, share: float, is_tree: bool, limit: int
) -> None:
    """Services whose steps are larger have larger ones."""
    num_logits, max_rows = int(num_rows * share), largest_rows(limit)
    assert min(max(512, limit), 1024) <= max_rows <= max(512, 4 / 3 * limit)
    bucket = Bucket.of(batch_of(num_rows, num_sequences, num_logits, is_tree=is_tree), max_rows)
    if num_rows > max_rows:
        assert bucket is None
        return
    assert bucket is not None
    assert bucket.num_rows == min(size for size in ROW_SIZES if size >= num_rows)
    assert num_sequences <= bucket.num_sequences < 2 * num_sequences
    assert num_logits <= bucket.num_logits <= max(64, bucket.num_rows)
    assert bucket.has_trees is is_tree


def test_the_largest_step_of_a_service_is_in_a_graph() -> None:
    """By default, on any device."""
    assert SchedulerSettings().max_num_batched_tokens <= USUAL_ROWS


def test_logits_of_larger_passes_are_in_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "max_bytes", lambda device: 4000)
    assert [reserved_bytes(100, torch.device("cpu"), *more) for more in ((), (1024,))] == [
        5000 + 4 * 512 * 100,
        5000 + 4 * 1024 * 100,
    ]


def test_a_batch_is_padded_to_its_bucket() -> None:
    pool = KVPool(20, 4)
    one, two = pool.open(20), pool.open(8)
    one.length, two.length = 9, 0
    batch = build_batch(
        [Segment(one, [5, 6], 1), Segment(two, [7, 8, 9], 3)], block_size=4, vocab_size=10, max_model_len=24
    )
    bucket = Bucket.of(batch)
    assert bucket == Bucket(8, 2)
    inputs = Inputs(bucket, max_model_len=24, block_size=4, device=torch.device(DEVICE))
    for _ in range(2):  # what a larger batch has left does not matter
        inputs.fill(batch)
        plan = inputs.batch.plan
        assert inputs.batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
        assert plan.positions.tolist() == [9, 10, 0, 1, 2, 0, 0, 0]
        assert plan.slots.tolist() == [*batch.plan.slots.tolist(), 0, 0, 0]
        assert inputs.batch.logit_rows.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
        assert plan.row_starts.tolist() == [0, 2, 5, 8]
        assert plan.kv_lens.tolist() == [11, 3, 0]
        assert plan.block_tables[0, :3].tolist() == one.blocks[:3].tolist()
        assert plan.block_tables[1, :1].tolist() == two.blocks[:1].tolist()
        assert (plan.max_kv_len, plan.max_rows, plan.num_rows, plan.num_sequences) == (24, 8, 8, 3)
        two.length = 0
        full = build_batch([Segment(two, [1] * 8, 8)], block_size=4, vocab_size=10, max_model_len=24)
        inputs.fill(full)
        assert plan.row_starts.tolist() == [0, 8, 8, 8]
        assert plan.kv_lens.tolist() == [8, 0, 0]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_replayed_passes_leave_the_hidden_states_asked_for(
    name: str, load_captured: Load, load_engine: Load, tools: SimpleNamespace
) -> None:
    engine, plain = load_captured(name), load_engine(name, device=DEVICE, enforce_eager=True)
    assert engine.runner.graphs is not None
    captured_before = len(engine.runner.graphs.buckets)
    texts = [tools.random_ids(21, seed=1), tools.random_ids(9, seed=2)]
    for layers, is_captured in (((1, -1), True), ((0, 2, 1), True), ((2,), False)):
        engines = {}
        for own in (engine, plain):
            sequences = [own.pool.open(21) for _ in texts]
            engines[own] = found = []
            for counts in ((5, 9), (1, 0), (10, 0), (5, 0)):
                segments = [
                    Segment(sequence, text[sequence.length :][:count], min(1, count), count, layers)
                    for sequence, text, count in zip(sequences, texts, counts, strict=True)
                    if count
                ]
                if not counts[1]:
                    segments.append(Segment(sequences[1], [3], 1))
                logits, states = own.forward_with_states(segments)
                found += [logits.cpu(), *(states.of(i).float() for i in range(len(segments)) if segments[i].num_states)]
            for sequence in sequences:
                own.pool.release(sequence)
        for ours, theirs in zip(engines[engine], engines[plain], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=2**-7)
        assert (len(engine.runner.graphs.buckets) > captured_before) is is_captured
        captured_before = len(engine.runner.graphs.buckets)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_replayed_passes_equal_the_stock_model(
    name: str, load_captured: Load, load_stock: Callable[[str], PreTrainedModel], tools: SimpleNamespace
) -> None:
    engine, stock = load_captured(name), load_stock(name)
    texts = [tools.random_ids(40, seed=seed) for seed in range(5)]
    expected = [tools.stock_logits(stock, ids) for ids in texts]
    sequences = [engine.pool.open(40) for _ in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    # A prompt in chunks beside decoding and rounds of several rows; the shapes of a bucket differ from pass to pass.
    passes = ((7, 20, 0, 0, 0), (1, 5, 12, 0, 3), (5, 1, 1, 9, 1), (5, 1, 2, 1, 1), (1, 1, 1, 1, 1), (0, 0, 0, 2, 0))
    for counts in passes:
        members = [index for index, count in enumerate(counts) if count]
        parts = [(sequences[i], texts[i][sequences[i].length : sequences[i].length + counts[i]]) for i in members]
        for i, logits in zip(members, feed(engine, parts), strict=True):
            rows[i].append(logits)
    for part, wanted in zip(rows, expected, strict=True):
        got = torch.cat(part)
        close(got, wanted[: len(got)])
    assert engine.runner.graphs is not None
    assert {Bucket(32, 2), Bucket(24, 4), Bucket(24, 8), Bucket(16, 8), Bucket(8, 8), Bucket(2, 1)} <= set(
        engine.runner.graphs.buckets
    )


def test_a_replay_leaves_earlier_logits_alone(load_captured: Load, tools: SimpleNamespace) -> None:
    engine = load_captured("llama")
    first, second = engine.pool.open(8), engine.pool.open(8)
    kept = engine.forward([Segment(first, [1, 2, 3], 3)])
    before = kept.clone()
    assert not torch.equal(engine.forward([Segment(second, [4, 5, 6], 3)]), before)
    assert torch.equal(kept, before)
    assert kept.dtype == torch.float32


def test_token_ids_and_wanted_rows_are_as_without_graphs(
    load_captured: Load, stock_llama: PreTrainedModel, tools: SimpleNamespace
) -> None:
    engine, ids = load_captured("llama"), tools.random_ids(9, seed=3)
    one, two = engine.pool.open(9), engine.pool.open(9)
    wanted = tools.stock_logits(stock_llama, ids)
    on_device = torch.tensor(ids, device=DEVICE)
    logits = engine.forward([Segment(one, on_device[:6], 2), Segment(two, ids, 0)]).cpu()
    close(logits, wanted[4:6])
    close(engine.forward([Segment(one, on_device[6:], 3)]).cpu(), wanted[6:])
    assert engine.forward([Segment(engine.pool.open(3), [1, 2], 0)]).shape == (0, tools.vocab)


def test_warming_up_captures_every_small_bucket_and_touches_no_session(
    load_captured: Load, stock_llama: PreTrainedModel, tools: SimpleNamespace
) -> None:
    engine, ids = load_captured("llama"), tools.random_ids(12, seed=4)
    sequence = engine.pool.open(12)
    feed(engine, [(sequence, ids[:7])])
    engine.warm_up()
    close(feed(engine, [(sequence, ids[7:])])[0], tools.stock_logits(stock_llama, ids)[7:])
    assert engine.runner.graphs is not None
    found = set(engine.runner.graphs.buckets)
    assert {Bucket.of(batch_of(rows, count, rows)) for rows in range(1, 65) for count in range(1, rows + 1)} <= found
    assert {Bucket.of(batch_of(rows, 1, rows, is_tree=True)) for rows in range(3, 66)} <= found
    assert Bucket(128, 1) in found, "as long as a sequence may be"


@pytest.mark.parametrize("max_rows", [512, 640])
def test_what_no_graph_holds_runs_without(max_rows: int, load_captured: Load, tools: SimpleNamespace) -> None:
    engine, plain = load_captured("llama_long", max_rows=max_rows), load_captured("llama_long")
    runner = engine.runner.graphs
    assert runner is not None
    if DEVICE != "cpu":
        runner._max_rows, runner._logits = max_rows, torch.empty(max_rows, tools.vocab, device=DEVICE)  # noqa: SLF001
    before, found = len(runner.buckets), []
    for own in (engine, plain):
        segments = [Segment(own.pool.open(300), tools.random_ids(n, seed=5), n) for n in (300, 213)]
        found.append(own.forward(segments).cpu())
        assert len(found[-1]) == 513
    assert len(runner.buckets) - before == (max_rows == 640)
    close(*found)


@pytest.mark.parametrize("name", ["llama_long", "mistral_long"])
def test_rounds_of_many_sessions_and_trees_are_replayed(
    name: str, load_captured: Load, load_engine: Load, tools: SimpleNamespace
) -> None:
    """60 sessions of five rows, then trees of different shapes beside chains; the path of each goes on."""
    engine, plain = load_captured(name), load_engine(name, device=DEVICE, enforce_eager=True)
    runner = engine.runner.graphs
    assert runner is not None
    answers = []
    for own in (engine, plain):
        many = [own.pool.open(5) for _ in range(30)]
        found = feed(own, [(sequence, tools.random_ids(5, seed=i)) for i, sequence in enumerate(many)])
        for sequence in many:
            own.pool.release(sequence)
        sequences = [own.pool.open(90) for _ in range(3)]
        found += feed(own, [(sequence, tools.random_ids(9 + i, seed=i)) for i, sequence in enumerate(sequences)])
        for parents in ((-1, 0, 0, 1), (-1, -1, 1, 1, 0, 2, 5), tuple(random_tree(64, 3))):
            ids = tools.random_ids(len(parents), seed=len(parents))
            trees = [Segment(sequences[0], ids, len(ids), parents=parents), Segment(sequences[1], [5, 6], 2)]
            found.append(own.forward(trees).cpu())
            own.keep_rows([Kept(sequences[0], sequences[0].length - len(ids), (1, 3))])
            found += feed(own, [(sequence, [7]) for sequence in sequences])
        answers.append(torch.cat(found))
    close(*answers)
    assert {Bucket(192, 32, has_all_logits=True), Bucket(8, 2, has_trees=True)} <= set(runner.buckets)
    assert Bucket(96, 2, has_all_logits=True, has_trees=True) in runner.buckets


def test_long_prompts_are_replayed_beside_rounds(
    load_captured: Load, load_stock: Callable[[str], PreTrainedModel], tools: SimpleNamespace
) -> None:
    engine, stock = load_captured("llama_long"), load_stock("llama_long")
    prompt, text = tools.random_ids(400, seed=8), tools.random_ids(9, seed=9)
    one, two = engine.pool.open(400), engine.pool.open(9)
    engine.forward([Segment(two, text[:4], 0)])
    logits = engine.forward([Segment(one, prompt, 1), Segment(two, text[4:], 5)]).cpu()
    close(logits, torch.cat([tools.stock_logits(stock, prompt)[-1:], tools.stock_logits(stock, text)[4:]]))
    assert engine.runner.graphs is not None
    assert Bucket(512, 2) in engine.runner.graphs.buckets


def test_memory_that_runs_out_in_a_capture_costs_the_graph_alone(
    load_engine: Load, stock_llama: PreTrainedModel, tools: SimpleNamespace
) -> None:
    def full(run: Callable[[], object]) -> Callable[[], object]:
        raise torch.OutOfMemoryError("all of it")

    engine, ids = load_engine("llama", enforce_eager=True), tools.random_ids(6, seed=6)
    engine.runner.graphs = GraphRunner(
        engine.runner.run_modules, full, vocab_size=97, max_model_len=128, block_size=4, device=engine.device
    )
    close(feed(engine, [(engine.pool.open(6), ids)])[0], tools.stock_logits(stock_llama, ids))
    assert engine.runner.graphs.buckets == []


def test_without_memory_for_a_graph_the_pass_runs_without(
    load_engine: Load, stock_llama: PreTrainedModel, tools: SimpleNamespace
) -> None:
    tried: list[int] = []

    def full(run: Callable[[], object]) -> None:
        tried.append(1)

    engine = load_engine("llama", enforce_eager=True)
    engine.runner.graphs = GraphRunner(
        engine.runner.run_modules, full, vocab_size=97, max_model_len=128, block_size=4, device=engine.device
    )
    ids = tools.random_ids(6, seed=6)
    sequence = engine.pool.open(6)
    rows = [feed(engine, [(sequence, [token])])[0] for token in ids]
    close(torch.cat(rows), tools.stock_logits(stock_llama, ids))
    assert tried == [1]
    assert engine.runner.graphs.buckets == []


@pytest.mark.parametrize("fails", ["buffers", "pass", "room"])
def test_ranks_agree_wherever_memory_runs_out(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has none answers as often as the others, which wait for its answer."""
    answers: list[bool] = []

    class Plain:
        has_room = fails != "room"

        def __call__(self, run: Callable[[], object]) -> Callable[[], object]:
            run()
            return run

    def full(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("all of it")

    def agree(is_true: bool) -> bool:
        answers.append(is_true)
        return is_true

    if fails == "buffers":
        monkeypatch.setattr(graphs, "Inputs", full)
    plain: Any = Plain()
    runner = GraphRunner(
        full if fails == "pass" else lambda batch: torch.zeros(1, 9),
        AgreedCapture(plain, agree),
        vocab_size=9,
        max_model_len=16,
        block_size=4,
        device=torch.device("cpu"),
    )
    batch = build_batch([Segment(KVPool(4, 4).open(8), [1], 1)], block_size=4, vocab_size=9, max_model_len=16)
    assert runner.run(batch) is None
    assert answers == ([False] if fails == "room" else [True, False])


def test_a_model_that_waits_for_the_device_is_not_captured() -> None:
    def forward(batch: Any) -> torch.Tensor:
        return torch.zeros(1, 9) + int(batch.plan.positions.max())

    runner = GraphRunner(forward, rerun, vocab_size=9, max_model_len=16, block_size=4, device=torch.device("cpu"))
    sequence = KVPool(4, 4).open(8)
    batch = build_batch([Segment(sequence, [1], 1)], block_size=4, vocab_size=9, max_model_len=16)
    with torch.inference_mode():
        with pytest.raises(HostWaits, match="it brings a number to the host"):
            runner.run(batch)
        assert runner.run(batch) is None


@pytest.mark.skipif(DEVICE != "cpu", reason="launches can be watched in the interpreter only")
def test_batches_of_a_bucket_launch_the_same(
    load_engine: Load, monkeypatch: pytest.MonkeyPatch, tools: SimpleNamespace
) -> None:
    """A replay repeats grid, numbers and addresses, so no launch may have others for another batch of the bucket."""
    launches: list[Any] = []

    def watched(kernel: Any) -> Any:
        class Watched:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **options: Any) -> None:
                    tensors = [arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args]
                    launches.append((kernel.__name__, grid, tensors, options))  # none needs to run

                return launch

        return Watched()

    engine = load_engine("llama", enforce_eager=True)
    # The check at load takes seconds in the interpreter.
    engine.use(engine.torch_runner("triton attention", attention))
    for name in ("attend", "join", "write"):
        monkeypatch.setattr(kernels, name, watched(getattr(kernels, name)))
    engine.runner.graphs = GraphRunner(
        engine.runner.run_modules, rerun, vocab_size=97, max_model_len=128, block_size=4, device=engine.device
    )
    sequences = [engine.pool.open(60) for _ in range(3)]
    lengths = (2, 3, 50)
    feed(engine, [(sequence, tools.random_ids(n, 7)) for sequence, n in zip(sequences, lengths, strict=True)])
    seen = []
    for counts in ((1, 1, 3), (5, 1, 2), (2, 2, 2)):
        launches.clear()
        feed(engine, [(sequence, [3] * count) for sequence, count in zip(sequences, counts, strict=True)])
        seen.append(list(launches)[-len(launches) // (2 if not seen else 1) :])  # the first also captured
    assert len(seen[0]) == 6
    assert seen[0] == seen[1] == seen[2]


def test_a_closed_engine_frees_its_memory_at_once(load_captured: Load) -> None:
    """Not with the next garbage collection: an engine that is loaded next needs the device's memory."""

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        run()
        return int  # a real graph does not hold the function

    engine = load_captured("llama", capture)
    engine.warm_up()
    cache = weakref.ref(engine.caches[0][0])
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert cache() is None
    finally:
        gc.enable()


def mtp(folder: Path, family: str = "mimo") -> Any:
    """A prediction layer."""
    write_mtp_target(folder, family)
    return read_head(folder, folder, method="mtp")


@pytest.mark.parametrize("build_head", [eagle, eagle3, mtp])
def test_draft_heads_are_replayed(
    build_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Chains of several sessions, prompts of several lengths among them, are those of the head's module."""
    head = (build_head(tmp_path) if build_head is mtp else build_head()).to(DEVICE)
    kernels = acceleration.triton_attention() if DEVICE != "cpu" else acceleration.native_attention()
    drafted = []
    for is_captured in (True, False):
        paged = PagedHead(head, ModelSettings(model="head", enforce_eager=True, kv_cache_memory_bytes=1 << 20), 200)
        monkeypatch.setattr(paged, "_kernels", kernels)
        if is_captured:
            paged.use_graphs(CudaCapture(paged.device) if DEVICE != "cpu" else rerun)
        generator = torch.Generator().manual_seed(3)
        sequences = [paged.pool.open(120) for _ in range(4)]
        chains = []
        for lengths in ((3, 40, 1, 9), (1, 2, 5, 1)):
            jobs = [
                ChainJob(
                    sequence,
                    torch.randint(VOCAB, (length,), generator=generator).tolist(),
                    k,
                    SamplingState(SamplingParams(seed=k, temperature=k / 3), [1, 2], 2, VOCAB, device=paged.device),
                    rule,
                    features=torch.randn(length, head.num_features, generator=generator),
                )
                for sequence, length, k, rule in zip(sequences, lengths, (0, 3, 1, 4), [*Rule, Rule.BLOCK], strict=True)
            ]
            chains += paged.draft_chains(jobs)
        drafted.append(chains)
        if is_captured:
            assert len({bucket.num_rows for bucket in paged._graphs.buckets}) > 5  # type: ignore[union-attr]  # noqa: SLF001
            assert [sequence.length for sequence in sequences] == [4, 42, 6, 10]
    assert [chain.token_ids for chain in drafted[0]] == [chain.token_ids for chain in drafted[1]]
    assert [len(chain.token_ids) for chain in drafted[0]] == [0, 3, 1, 4] * 2


@pytest.mark.parametrize(
    ("error", "is_used"),
    [(NotCapturable("a stream is capturing"), False), (torch.OutOfMemoryError("all of it"), True), (KeyError(1), None)],
)
def test_a_head_that_cannot_be_captured_runs_as_it_is(
    error: Exception, is_used: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says once why. What runs out of memory costs its graph alone, and any other error is a fault."""

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        raise error

    settings = ModelSettings(model="head", enforce_eager=True, kv_cache_memory_bytes=1 << 20)
    for head in (mtp(tmp_path), eagle()):
        paged = PagedHead(head.to(DEVICE), settings, 200)
        caplog.clear()
        if is_used is None:
            with pytest.raises(KeyError):
                paged.use_graphs(capture)
            continue
        paged.use_graphs(capture)
        assert (paged._graphs is not None) is is_used  # noqa: SLF001
        assert caplog.text.count(f"{type(head).__name__} runs without CUDA graphs: a stream is") == (not is_used)


def test_a_pass_that_cannot_be_captured_later_costs_its_graph_alone() -> None:
    """The first one is a fault of the model."""
    failures = [False, True]

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        if failures.pop(0):
            raise NotCapturable
        return rerun(run)

    sizes = {"vocab_size": 9, "max_model_len": 16, "block_size": 4}
    runner = GraphRunner(lambda batch: torch.zeros(1, 9), capture, **sizes, device=torch.device("cpu"))
    passes = [build_batch([Segment(KVPool(4, 4).open(8), [1] * n, 1)], **sizes) for n in (1, 3)]
    with torch.inference_mode():
        assert [runner.run(each) is None for each in passes] == [False, True]
        assert runner.run(passes[1]) is None
