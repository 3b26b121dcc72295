"""The engine's contract: chunks, verification rows, rollback, forks, parking, precision, memory, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from engine.device_thread import DeviceThread
from engine.engine import Engine, Segment
from engine.loading import checkpoint as checkpoint_module
from engine.loading import load, memory
from specdec.errors import InvalidRequest, Unavailable
from specdec.settings import ModelSettings

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected.cpu(), atol=1e-4, rtol=1e-4)


def test_chunks_and_single_rows_equal_one_whole_prefill(llama: Engine, tools: SimpleNamespace) -> None:
    ids = tools.random_ids(40, seed=1)
    whole, chunked, single = (llama.pool.open(40) for _ in range(3))
    expected = tools.feed(llama, whole, ids)
    close(torch.cat([tools.feed(llama, chunked, ids[i : i + 7]) for i in range(0, 40, 7)]), expected)
    close(torch.cat([tools.feed(llama, single, [token]) for token in ids]), expected)
    for sequence in (whole, chunked, single):
        assert sequence.length == 40
        llama.pool.release(sequence)


def test_only_the_wanted_rows_come_back(llama: Engine, tools: SimpleNamespace) -> None:
    ids = [tools.random_ids(12, seed=seed) for seed in range(3)]
    sequences = [llama.pool.open(12) for _ in ids]
    full = [tools.feed(llama, sequence, tokens) for sequence, tokens in zip(sequences, ids, strict=True)]
    for sequence in sequences:
        llama.pool.rollback(sequence, 0)
    wanted = (0, 3, 1)
    logits = llama.forward([Segment(s, t, n) for s, t, n in zip(sequences, ids, wanted, strict=True)])
    assert logits.dtype == torch.float32
    close(logits, torch.cat([rows[12 - count :] for rows, count in zip(full, wanted, strict=True)]))
    for sequence in sequences:
        llama.pool.rollback(sequence, 0)
    assert llama.forward([Segment(s, t, 0) for s, t in zip(sequences, ids, strict=True)]).shape == (0, tools.vocab)
    for sequence in sequences:
        assert sequence.length == 12
        llama.pool.release(sequence)


def test_token_ids_may_be_tensors(llama: Engine, tools: SimpleNamespace) -> None:
    ids = tools.random_ids(6, seed=2)
    first, second = llama.pool.open(6), llama.pool.open(6)
    expected = tools.feed(llama, first, ids)
    llama.pool.rollback(first, 0)
    close(llama.forward([Segment(first, torch.tensor(ids), 6), Segment(second, ids, 6)]), expected.repeat(2, 1))
    llama.pool.release(first)
    llama.pool.release(second)


def test_rollback_then_continue_equals_fresh(
    llama: Engine, stock_llama: PreTrainedModel, tools: SimpleNamespace
) -> None:
    ids, other = tools.random_ids(30, seed=3), tools.random_ids(30, seed=4)
    sequence = llama.pool.open(60)
    for kept in (29, 17, 4, 1):
        llama.pool.rollback(sequence, 0)
        tools.feed(llama, sequence, ids)
        llama.pool.rollback(sequence, kept)
        close(
            tools.feed(llama, sequence, other[:9]),
            tools.stock_logits(stock_llama, ids[:kept] + other[:9])[kept:],
        )
    llama.pool.release(sequence)


def test_copies_of_copies_hold_what_they_would_one_by_one(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for caches in llama.caches:
        for cache in caches:
            cache[1:6] = torch.arange(1.0, 6.0)[:, None, None, None]
    monkeypatch.setattr(llama.pool, "take_copies", lambda: [(1, 2), (2, 3), (4, 1), (1, 5)])
    llama.copy_blocks()
    for k_cache, v_cache in llama.caches:
        assert k_cache[1:6, 0, 0, 0].tolist() == v_cache[1:6, 0, 0, 0].tolist() == [4.0, 1.0, 1.0, 4.0, 4.0]


@pytest.mark.parametrize("kept", [21, 13, 16, 9])
def test_a_sequence_goes_on_after_the_entries_of_another(
    kept: int, llama: Engine, stock_llama: PreTrainedModel, tools: SimpleNamespace
) -> None:
    pool, ids, more = llama.pool, tools.random_ids(21, seed=8), tools.random_ids(9, seed=9)
    sequence = pool.open_empty(("chat", kept))
    assert pool.grow(sequence, 21)
    tools.feed(llama, sequence, ids)
    pool.release(sequence, ids)
    conversation = ids[:kept] + more
    other = pool.open_empty(("chat", kept))
    assert pool.match(other, conversation, len(conversation) - 1) == other.length == kept
    assert pool.grow(other, 40)
    close(tools.feed(llama, other, conversation[kept:]), tools.stock_logits(stock_llama, conversation)[kept:])
    pool.release(other)


def test_rows_of_a_released_sequence_disturb_nobody(
    llama: Engine, stock_llama: PreTrainedModel, tools: SimpleNamespace
) -> None:
    ids = tools.random_ids(10, seed=10)
    gone = llama.pool.open(20)
    tools.feed(llama, gone, ids)
    llama.pool.release(gone)
    heir = llama.pool.open(20)
    assert set(heir.blocks) & set(gone.blocks)
    tools.feed(llama, heir, ids)
    tools.feed(llama, gone, ids)  # a batch that was queued before the release
    close(tools.feed(llama, heir, [4]), tools.stock_logits(stock_llama, [*ids, 4])[-1:])
    llama.pool.release(heir)


def test_a_failed_batch_grows_no_sequence(llama: Engine) -> None:
    good, bad = llama.pool.open(4), llama.pool.open(4)
    with pytest.raises(InvalidRequest, match="token id 97 is outside the vocabulary of 97"):
        llama.forward([Segment(good, [1], 1), Segment(bad, [97], 1)])
    with pytest.raises(InvalidRequest, match="token id -1 is outside"):
        llama.forward([Segment(good, [-1], 1)])
    with pytest.raises(ValueError, match="0 entries and 5 tokens exceed the 4"):
        llama.forward([Segment(good, [1] * 5, 1)])
    with pytest.raises(ValueError, match="cannot give 2 rows"):
        llama.forward([Segment(good, [1], 2)])
    with pytest.raises(ValueError, match="a segment of 0 tokens"):
        llama.forward([Segment(good, [], 0)])
    with pytest.raises(ValueError, match="two segments of one batch"):
        llama.forward([Segment(good, [1], 1), Segment(good, [2], 1)])
    assert good.length == bad.length == 0
    llama.pool.release(good)
    llama.pool.release(bad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_precisions(
    device: str,
    dtype: str,
    load_engine: Callable[..., Engine],
    stock_llama: PreTrainedModel,
    tools: SimpleNamespace,
) -> None:
    engine = load_engine("llama", dtype=dtype, device=device, kv_cache_memory_bytes=100_000)
    assert (engine.info.dtype, engine.info.device) == (dtype, device)
    ids = tools.random_ids(40, seed=11)
    expected = tools.stock_logits(stock_llama, ids)
    distance = (tools.feed(engine, engine.pool.open(40), ids).cpu() - expected).square().mean().sqrt()
    assert float(distance / expected.std()) < {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}[dtype]


def test_sharded_bfloat16_checkpoints_load_as_they_are(tmp_path: Path, tools: SimpleNamespace) -> None:
    tools.build("llama").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    engine = load.load_engine(ModelSettings(model=str(tmp_path), device="cpu", num_threads=1))
    assert engine.info.dtype == "bfloat16"
    assert torch.get_num_threads() == 1


def test_info_tells_what_target_and_draft_must_agree_on(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama")
    model.generation_config = GenerationConfig(eos_token_id=[5, 9])
    model.config.eos_token_id = 7
    model.save_pretrained(tmp_path)
    vocabulary = {f"t{index}": index for index in range(90)} | {"\ud800": 90}
    vocabulary = {token: index for token, index in vocabulary.items() if token.isprintable()}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t3").save_pretrained(tmp_path)
    info = load.load_engine(ModelSettings(model=str(tmp_path), device="cpu", num_threads=1)).info
    assert (info.vocab_size, info.tokenizer_size, info.eos_token_ids) == (97, 90, (3, 5, 7, 9))
    assert info.tokenizer_fingerprint == checkpoint_module.fingerprint(vocabulary.items())
    assert info.num_parameters == model.num_parameters()
    assert (info.name, info.architecture, info.max_model_len) == (tmp_path.name, "LlamaForCausalLM", 128)
    assert info.kv_cache_tokens == 256 * 128


def test_the_fingerprint_depends_on_every_id_and_on_nothing_else() -> None:
    table = {"a": 0, "b": 1, "\ud800": 2}
    assert checkpoint_module.fingerprint(table.items()) == checkpoint_module.fingerprint(reversed(table.items()))
    assert checkpoint_module.fingerprint(table.items()) != checkpoint_module.fingerprint({"a": 1, "b": 0}.items())


def test_the_cache_keeps_to_its_budget(load_engine: Callable[..., Engine]) -> None:
    block_bytes = 4 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, head_dim, bytes
    engine = load_engine("llama", kv_cache_memory_bytes=50 * block_bytes + 17)
    assert engine.pool.total_blocks == 49  # block 0 is paid for too
    assert sum(k.nbytes + v.nbytes for k, v in engine.caches) == 50 * block_bytes
    assert engine.info.kv_cache_tokens == 49 * 4
    small = load_engine("llama", kv_cache_memory_bytes=21 * block_bytes)
    assert small.info.max_model_len == small.info.kv_cache_tokens == 80  # nobody asked for 128


@pytest.mark.parametrize("options", [{"max_model_len": 3, "block_size": 32}, {"kv_cache_memory_bytes": 2048}])
def test_the_smallest_caches_serve(
    options: dict[str, int], load_engine: Callable[..., Engine], stock_llama: PreTrainedModel, tools: SimpleNamespace
) -> None:
    engine = load_engine("llama", **options)
    ids = tools.random_ids(engine.info.max_model_len, seed=13)
    engine.warm_up()
    close(tools.feed(engine, engine.pool.open(len(ids)), ids), tools.stock_logits(stock_llama, ids))


def test_the_share_of_memory_bounds_a_cache_on_a_cpu(
    load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < memory.machine_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2_000_000)
    engine = load_engine("llama", cpu_kv_cache_share=0.1)
    assert 190_000 < sum(k.nbytes + v.nbytes for k, v in engine.caches) <= 200_000


def test_memory_stays_flat_over_a_thousand_sessions(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine("llama_long", block_size=32, kv_cache_memory_bytes=2**28)

    def session(number: int) -> None:
        sequence = engine.pool.open(64 + number % 64)
        engine.forward([Segment(sequence, [3] * (40 + number % 24), 1)])
        engine.forward([Segment(sequence, [4], 1)])
        engine.pool.release(sequence)

    for number in range(64):
        session(number)
    process = psutil.Process()
    before = process.memory_info().rss
    for number in range(1000):
        session(number)
    assert abs(process.memory_info().rss - before) < 0.02 * before


def test_warm_up_leaves_the_pool_as_it_was(llama: Engine) -> None:
    used, first = llama.pool.used_blocks, llama.pool.open(4)
    llama.pool.release(first)
    llama.warm_up()
    assert llama.pool.used_blocks == used
    again = llama.pool.open(4)
    assert again.blocks.tolist() == first.blocks.tolist()
    llama.pool.release(again)


def test_a_closed_engine_says_so(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine("llama")
    sequence = engine.pool.open(4)
    engine.close()
    engine.close()
    with pytest.raises(Unavailable, match="the engine is closed"):
        engine.forward([Segment(sequence, [1], 1)])


async def test_two_engines_run_on_two_threads_at_once(
    load_engine: Callable[..., Engine], load_stock: Callable[[str], PreTrainedModel], tools: SimpleNamespace
) -> None:
    threads = [DeviceThread("one"), DeviceThread("two")]
    names = ["llama", "mistral"]
    try:
        engines = [await thread.run(load_engine, name) for thread, name in zip(threads, names, strict=True)]
        ids = tools.random_ids(24, seed=12)
        sequences = [engine.pool.open(24) for engine in engines]
        rows: list[list[torch.Tensor]] = [[], []]
        for token in ids:
            calls = [
                thread.run(engine.forward, [Segment(sequence, [token], 1)])
                for thread, engine, sequence in zip(threads, engines, sequences, strict=True)
            ]
            for index, call in enumerate(calls):
                rows[index].append(await call)
        for name, part in zip(names, rows, strict=True):
            close(torch.cat(part), tools.stock_logits(load_stock(name), ids))
    finally:
        for thread in threads:
            thread.close()
