from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, PreTrainedModel

from engine.native import packing
from engine.native.autotune import DISTANCES, Prefetch
from engine.native.decoder import NativeDecoder
from engine.native.linears import NativeLinear
from engine.native.rounded import quantise_linears
from specdec.errors import InvalidRequest
from tests.engine.native.conftest import MODELS, make_caches, make_model, make_plan, windows_of

pytestmark = pytest.mark.usefixtures("kernels")

BLOCK = 8


class Runner:
    """A native decoder and sequences of its cache; ids are fed chunk by chunk."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_threads: int = 2,
        cache_dtype: torch.dtype | None = None,
        block_size: int = BLOCK,
    ) -> None:
        self.vocab_size = model.config.vocab_size
        self.block_size = block_size
        self.caches = make_caches(model, 200, block_size, cache_dtype)
        built = NativeDecoder.build(model, self.caches, windows_of(model), num_threads)
        assert built is not None
        self.decoder = built
        self._next = 1

    def open(self, length: int) -> list[int]:
        count = -(-length // self.block_size)
        self._next += count
        return list(range(self._next - 1, self._next - 1 - count, -1))

    def feed(self, parts: Sequence[tuple[list[int], int, torch.Tensor]]) -> list[torch.Tensor]:
        """Parts (table, entries before, ids); all rows' logits of each part."""
        counts = [ids.shape[0] for _, _, ids in parts]
        plan = make_plan([start for _, start, _ in parts], counts, [table for table, _, _ in parts], self.block_size)
        logits = self.decoder.forward(torch.cat([ids for _, _, ids in parts]), plan, torch.arange(sum(counts)))
        return list(logits.split(counts))


def _ids(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(91, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _stock(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None]).logits[0].float()


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_are_those_of_the_stock_model(name: str) -> None:
    model = make_model(name)
    ids = _ids(70)
    wanted = _stock(model, ids)
    runner = Runner(model)
    table, done, rows = runner.open(70), 0, []
    for count in (1, 20, 1, 5, 1, 1, 36, 5):
        rows += runner.feed([(table, done, ids[done : done + count])])
        done += count
    torch.testing.assert_close(torch.cat(rows), wanted, atol=1e-4, rtol=0)
    assert isinstance(model.model.layers[0].self_attn.q_proj, NativeLinear)
    torch.testing.assert_close(_stock(model, ids), wanted, atol=1e-4, rtol=0)  # the modules still work


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_at_least_as_close_to_the_truth_as_the_stock_model(name: str) -> None:
    model = make_model(name, torch.bfloat16, hidden_size=128, num_attention_heads=8)
    ids = _ids(60)
    exact, stock = _stock(copy.deepcopy(model).float(), ids), _stock(model, ids)
    runner = Runner(model)
    table = runner.open(60)
    ours = torch.cat([*runner.feed([(table, 0, ids[:51])]), *runner.feed([(table, 51, ids[51:])])])
    assert (ours - exact).square().mean() <= (stock - exact).square().mean() * 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_int8_weights_give_the_logits_of_the_rounded_model(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    quantise_linears(model)
    ids = _ids(70)
    wanted = _stock(model, ids)
    runner = Runner(model)
    table = runner.open(70)
    ours = torch.cat([*runner.feed([(table, 0, ids[:51])]), *runner.feed([(table, 51, ids[51:])])])
    distance = (ours - wanted).square().mean().sqrt() / wanted.std()
    assert distance < (2e-2 if dtype == torch.float32 else 0.1)  # close numbers may be rounded to different steps


_COMPANY = [
    *((name, torch.float32, None) for name in MODELS),
    ("qwen2", torch.bfloat16, None),
    *((name, torch.float32, "int8") for name in ("llama-tied-odd", "qwen3")),
    ("qwen2", torch.bfloat16, "int8"),
]


@pytest.mark.parametrize(("name", "dtype", "quantization"), _COMPANY)
def test_a_row_is_the_same_to_the_bit_in_any_company(name: str, dtype: torch.dtype, quantization: str | None) -> None:
    model = make_model(name, dtype)
    if quantization:
        quantise_linears(model)
    runner = Runner(model)
    ids, others = _ids(60), [_ids(50, seed) for seed in (4, 5, 6)]
    table = runner.open(60)
    alone = torch.cat([runner.feed([(table, i, ids[i : i + 1])])[0] for i in range(60)])

    for count in range(1, 41):  # so many rows of it at once: verification and prefill chunks
        again = runner.feed([(table, 60 - count, ids[60 - count :])])[0]
        assert torch.equal(again, alone[60 - count :])

    tables = [runner.open(50) for _ in others]  # among other sessions that prefill, decode and verify
    done = [0, 0, 0, 0]
    rows: list[torch.Tensor] = []
    for step in ((7, 50, 1, 5), (1, 0, 1, 5), (5, 0, 40, 1), (30, 0, 1, 0), (17, 0, 0, 30)):
        parts = []
        for s, (count, text, blocks) in enumerate(zip(step, [ids, *others], [table, *tables], strict=True)):
            if count:
                parts.append((blocks, done[s], text[done[s] : done[s] + count]))
                done[s] += count
        rows.append(runner.feed(parts)[0])
    assert torch.equal(torch.cat(rows), alone)


@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8")]
)
def test_what_the_kernels_prefetch_changes_no_bit(
    dtype: torch.dtype, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, logits = _ids(33), []
    for distance in DISTANCES:
        monkeypatch.setattr(packing, "choose_prefetch", lambda *_, distance=distance: Prefetch(distance, distance))
        model = make_model("llama-tied-odd", dtype)
        if quantization:
            quantise_linears(model)
        runner = Runner(model)
        assert runner.decoder.prefetch.distance(5) == distance
        table = runner.open(33)
        parts = [runner.feed([(table, start, ids[start:end])])[0] for start, end in ((0, 27), (27, 32), (32, 33))]
        logits.append(torch.cat([*parts, _stock(model, ids)]))
    assert all(torch.equal(other, logits[0]) for other in logits)


def test_neither_threads_nor_the_choice_of_logits_change_a_bit() -> None:
    ids = _ids(33)
    wanted = None
    for threads in (1, 2, 5):
        runner = Runner(make_model("qwen3"), threads)
        table = runner.open(33)
        logits = runner.feed([(table, 0, ids)])[0]
        wanted = logits if wanted is None else wanted
        assert torch.equal(logits, wanted)
        plan = make_plan([0], [33], [table], BLOCK)
        for rows in ([32], [5, 9], [8, 8, 0], []):
            some = runner.decoder.forward(ids[None], plan, torch.tensor(rows, dtype=torch.int64))
            assert some.shape == (len(rows), runner.vocab_size)
            assert torch.equal(some, wanted[rows])


@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8")]
)
def test_long_contexts_and_wide_layers_give_the_same_bits_to_every_batch_and_number_of_threads(
    dtype: torch.dtype, quantization: str | None
) -> None:
    """Where work is scarce, splits of a context and chunks of a sum are shared out: the order of sums must not show."""
    ids = _ids(1200)
    wanted = None
    for threads in (1, 2, 3):
        model = make_model("llama", dtype, max_position_embeddings=2048, intermediate_size=5000)
        if quantization:
            quantise_linears(model)
        runner = Runner(model, threads)
        table, other = runner.open(1200), runner.open(30)
        runner.feed([(table, 0, ids[:1190])])
        runner.feed([(other, 0, ids[:25])])
        alone = torch.cat([runner.feed([(table, i, ids[i : i + 1])])[0] for i in range(1190, 1200)])
        wanted = alone if wanted is None else wanted
        assert torch.equal(alone, wanted)
        for count in (2, 5, 10):
            assert torch.equal(runner.feed([(table, 1200 - count, ids[1200 - count :])])[0], wanted[-count:])
            beside = runner.feed([(other, 25, ids[25:30]), (table, 1200 - count, ids[1200 - count :])])
            assert torch.equal(beside[1], wanted[-count:])


@pytest.mark.parametrize(("name", "cache"), [("llama", torch.bfloat16), ("qwen3", None), ("mistral-window", None)])
def test_the_size_of_a_block_changes_no_bit(name: str, cache: torch.dtype | None) -> None:
    """Blocks of whole tiles keep keys in columns, others in rows; a longer text spans several splits."""
    ids, other = _ids(620), _ids(40, seed=4)
    wanted = None
    for block_size in (5, 8, 32, 64, 96):
        runner = Runner(make_model(name, max_position_embeddings=1024), cache_dtype=cache, block_size=block_size)
        table, beside = runner.open(620), runner.open(40)
        rows = runner.feed([(table, 0, ids[:300]), (beside, 0, other[:33])])
        rows += runner.feed([(table, 300, ids[300:611])])
        rows += runner.feed([(beside, 33, other[33:]), (table, 611, ids[611:616])])
        rows += [runner.feed([(table, i, ids[i : i + 1])])[0] for i in range(616, 620)]
        logits = torch.cat(rows)
        wanted = logits if wanted is None else wanted
        assert bool(logits.isfinite().all())
        assert torch.equal(logits, wanted)


def test_a_pass_without_logits_still_writes_the_cache() -> None:
    runner = Runner(make_model("llama"))
    ids, first, second = _ids(20), runner.open(20), runner.open(20)
    wanted = runner.feed([(first, 0, ids)])[0][19:]
    none = torch.empty(0, dtype=torch.int64)
    assert runner.decoder.forward(ids[:19], make_plan([0], [19], [second], BLOCK), none).shape == (0, 97)
    assert torch.equal(runner.feed([(second, 19, ids[19:])])[0], wanted)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_greedy_text_is_that_of_generate(name: str) -> None:
    model = make_model(name)
    prompt = _ids(11)
    wanted = model.generate(prompt[None], max_new_tokens=24, do_sample=False, attention_mask=torch.ones(1, 11))[0]
    runner = Runner(model)
    table, text = runner.open(40), prompt
    logits = runner.feed([(table, 0, prompt)])[0]
    for _ in range(24):
        text = torch.cat([text, logits[-1:].argmax(-1)])
        logits = runner.feed([(table, text.shape[0] - 1, text[-1:])])[0]
    assert text.tolist() == wanted.tolist()


def test_positions_beyond_the_first_tables() -> None:
    model = make_model("llama", max_position_embeddings=2048)
    ids = _ids(700)
    wanted = _stock(model, ids)
    runner = Runner(model)
    table = runner.open(700)
    rows = [runner.feed([(table, start, ids[start : start + 350])])[0] for start in (0, 350)]
    torch.testing.assert_close(torch.cat(rows), wanted, atol=1e-4, rtol=0)


def test_a_float32_model_may_keep_a_bfloat16_cache() -> None:
    model = make_model("llama")
    ids = _ids(40)
    wanted = _stock(model, ids)
    runner = Runner(model, cache_dtype=torch.bfloat16)
    torch.testing.assert_close(runner.feed([(runner.open(40), 0, ids)])[0], wanted, atol=0.3, rtol=0)


@pytest.mark.parametrize("token", [-1, 97])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    runner = Runner(make_model("llama"))
    with pytest.raises(InvalidRequest, match="vocabulary of 97"):
        runner.feed([(runner.open(3), 0, torch.tensor([1, token, 2]))])


def _untouched(model: PreTrainedModel, caches: Any, windows: list[int | None]) -> bool:
    before = {name: type(module) for name, module in model.named_modules()}
    assert NativeDecoder.build(model, caches, windows, 2) is None
    return before == {name: type(module) for name, module in model.named_modules()}


def test_models_it_does_not_know_are_left_alone() -> None:
    for change in ("activation", "rope", "linear", "dtype", "cache"):
        model = make_model("llama")
        caches = make_caches(model, 4, BLOCK)
        if change == "activation":
            model = make_model("llama", hidden_act="gelu")
        elif change == "rope":
            model.config.rope_parameters["rope_type"] = "dynamic"
        elif change == "linear":
            model.model.layers[2].mlp.up_proj = torch.nn.Sequential(model.model.layers[2].mlp.up_proj)
        elif change == "dtype":
            model.model.norm.half()
        else:
            caches[1] = (caches[1][0].half(), caches[1][1])
        assert _untouched(model, caches, windows_of(model)), change
    gemma = GemmaForCausalLM(
        GemmaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=50,
        )
    )
    assert _untouched(gemma, make_caches(gemma, 4, BLOCK), [None])


def test_weights_are_not_held_twice() -> None:
    model = make_model("llama")
    kept = {name for name, _ in model.named_parameters()}
    Runner(model)
    left = {name for name, _ in model.named_parameters()}
    assert kept - left == {name for name in kept if "proj" in name or "lm_head" in name}
