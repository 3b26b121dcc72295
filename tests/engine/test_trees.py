"""Trees of rows through whole models, on every runner of a CPU: against passes over each of their paths, and against a
fresh prefill after many rounds of trees of which one path was kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.batch import Segment
from engine.compaction import Kept
from engine.engine import Engine
from engine.loading import acceleration
from tests.engine.paged import random_tree

RUNNERS = ["native decoder", "native attention", "torch attention"]
NAMES = ["llama", "mistral", "qwen2_window", "qwen3"]
Load = Callable[..., Engine]


@pytest.fixture(params=RUNNERS)
def load(request: pytest.FixtureRequest, load_engine: Load, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads engines with one runner, blocks of 4 tokens unless told otherwise."""

    def load_with_runner(name: str, **options: Any) -> Engine:
        if request.param == "torch attention":
            monkeypatch.setattr(acceleration, "native_attention", lambda: None)
        engine = load_engine(name, enforce_eager=request.param != "native decoder", **options)
        assert engine.runner.name == request.param
        return engine

    return load_with_runner


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the root to one of them."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize("name", NAMES)
def test_each_path_of_a_tree_gets_the_logits_of_a_chain(load: Load, load_stock: Any, tools: Any, name: str) -> None:
    check_logits(load(name), load_stock(name), tools)


def test_rows_of_a_tree_have_their_own_alibi(load_engine: Load, load_stock: Any, tools: Any) -> None:
    """BLOOM's positions are not told to its attention."""
    check_logits(load_engine("bloom"), load_stock("bloom"), tools)


def check_logits(engine: Engine, stock: Any, tools: Any) -> None:
    prompts = [tools.random_ids(count, seed=count) for count in (5, 18, 1)]
    trees: list[Sequence[int]] = [random_tree(14, 3), (), random_tree(20, 4)]
    fed = [tools.random_ids(len(tree) or 6, seed=90 + i) for i, tree in enumerate(trees)]
    sequences = [engine.pool.open(60) for _ in trees]
    try:
        engine.forward([Segment(s, ids, 0) for s, ids in zip(sequences, prompts, strict=True)])
        logits = engine.forward(
            [Segment(s, ids, len(ids), parents=tree) for s, ids, tree in zip(sequences, fed, trees, strict=True)]
        )
        rows = iter(logits)
        for prompt, ids, tree in zip(prompts, fed, trees, strict=True):
            for row in range(len(ids)):
                path = path_to(tree or range(-1, len(ids) - 1), row)
                expected = tools.stock_logits(stock, [*prompt, *(ids[i] for i in path)])[-1]
                torch.testing.assert_close(next(rows), expected, atol=1e-4, rtol=0)
    finally:
        for sequence in sequences:
            engine.pool.release(sequence)


@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_after_many_rounds_the_cache_is_that_of_a_fresh_prefill(
    load: Load, load_stock: Any, tools: Any, name: str, block_size: int
) -> None:
    """Also where the path is the first rows or all of a chain, across blocks and beside another session."""
    engine, stock, dice = load(name, block_size=block_size), load_stock(name), random.Random(5)
    sequences = [engine.pool.open(120) for _ in range(2)]
    texts = [tools.random_ids(3, seed=1), tools.random_ids(7, seed=2)]
    engine.forward([Segment(s, ids[:-1], 0) for s, ids in zip(sequences, texts, strict=True)])
    for number in range(20):
        segments, kept = [], []
        for sequence, text in zip(sequences, texts, strict=True):
            parents = random_tree(dice.randrange(2, 12), dice.randrange(10**6))
            if number % 5 == 4:
                parents = list(range(-1, len(parents) - 1))
            ids = [text[-1], *tools.random_ids(len(parents) - 1, seed=dice.randrange(10**6))]
            path = path_to(parents, 0 if number == 3 else dice.randrange(len(parents)))
            segments.append(Segment(sequence, ids, 1, parents=parents))
            kept.append(Kept(sequence, sequence.length, path))
            text += [ids[row] for row in path[1:]]
        engine.forward(segments)
        engine.keep_rows(kept)
        for text in texts:
            text.append(dice.randrange(3, 90))
    assert [s.length for s in sequences] == [len(text) - 1 for text in texts]
    assert len(texts[0]) > 36
    logits = engine.forward([Segment(s, [ids[-1]], 1) for s, ids in zip(sequences, texts, strict=True)])
    for row, text, sequence in zip(logits, texts, sequences, strict=True):
        torch.testing.assert_close(row, tools.stock_logits(stock, text)[-1], atol=1e-4, rtol=0)
        engine.pool.release(sequence)


def test_both_ways_of_laying_out_a_pass_give_the_same_bits(llama: Engine, tools: Any) -> None:
    here, there = ([llama.pool.open(60) for _ in range(2)] for _ in range(2))
    tree, ids = random_tree(9, 3), tools.random_ids(9, seed=3)
    for sequences in (here, there):
        llama.forward([Segment(s, tools.random_ids(7, seed=1), 0) for s in sequences])
    native = llama.forward([Segment(here[0], ids, 9, parents=tree), Segment(here[1], ids, 2)])
    on_tensors = [Segment(there[0], torch.tensor(ids), 9, parents=tree), Segment(there[1], ids, 2)]
    assert torch.equal(native, llama.forward(on_tensors))
    for sequence in (*here, *there):
        llama.pool.release(sequence)


@pytest.mark.parametrize(
    ("count", "parents", "match"),
    [
        (3, [-1, 0], "3 tokens with 2 parents"),
        (3, [-1, 1, 0], r"parents\[1\] is 1"),
        (3, [-2, 0, 1], r"parents\[0\] is -2"),
        (66, [-1] * 66, "66 tokens with 66 parents"),
        (41, range(-1, 40), "exceed the 40"),
    ],
)
@pytest.mark.parametrize("on_tensors", [False, True])
def test_what_is_no_tree_is_refused(
    llama: Engine, count: int, parents: Sequence[int], match: str, on_tensors: bool
) -> None:
    sequence = llama.pool.open(40)
    ids = torch.ones(count, dtype=torch.int64) if on_tensors else [1] * count
    try:
        with pytest.raises(ValueError, match=match):
            llama.forward([Segment(sequence, ids, 0, parents=parents)])
        assert sequence.length == 0
    finally:
        llama.pool.release(sequence)


def test_a_tree_ends_where_the_model_does_by_its_depth(llama: Engine) -> None:
    """Siblings share a position, so they may lie behind the last one."""
    context = llama.info.max_model_len
    sequence = llama.pool.open(context + 4)
    try:
        llama.forward([Segment(sequence, [1] * (context - 2), 0)])
        assert llama.forward([Segment(sequence, [5, 6, 7, 8], 4, parents=[-1, 0, 0, 0])]).isfinite().all()
        sequence.length = context - 2
        with pytest.raises(ValueError, match="the model takes"):
            llama.forward([Segment(sequence, [5, 6, 7, 8], 4, parents=[-1, 0, 1, 1])])
    finally:
        llama.pool.release(sequence)
