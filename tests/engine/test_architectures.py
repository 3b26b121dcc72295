"""Every architecture: ragged logits equal the stock model's, and greedy text equals ``generate``'s, token for token."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from engine.engine import Engine, Segment
from engine.loading import acceleration

SUPPORTED = [
    "llama",
    "llama_yarn",
    "mistral",
    "mistral_long",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "opt",
    "gpt2",
    "gpt_neox",
    "phi",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "gpt_oss",
    "deepseek",
    "minimax_m3_dense",
    "falcon",
    "falcon_heads",
    "falcon_groups",
    "gptj",
    "bloom",
    "bloom_three_heads",
    "mpt",
    "mpt_six_heads",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "bamba",
    "granite4",
    "granite4_moe",
    "falcon_h1",
    "nemotron_h",
    "zamba2",
    "mamba2",
    "mamba",
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "minimax_lightning",
    "bailing_hybrid",
]
PROMPTS = (9, 2, 30)
NEW_TOKENS = 10


def greedy_ragged(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
    """Greedy text of all prompts in one batch, prefilled in uneven chunks; also every row of logits, by prompt."""
    ends = [len(prompt) + NEW_TOKENS for prompt in prompts]
    sequences = [engine.pool.open(end) for end in ends]
    texts = [list(prompt) for prompt in prompts]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(sequence.length < end - 1 for sequence, end in zip(sequences, ends, strict=True)):
        segments, owners = [], []
        for owner, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            chunk = text[sequence.length : sequence.length + 5 + owner]
            if chunk and sequence.length < ends[owner] - 1:
                segments.append(Segment(sequence, chunk, len(chunk)))
                owners.append(owner)
        logits = engine.forward(segments)
        for owner, segment in zip(owners, segments, strict=True):
            part, logits = logits[: segment.num_logits], logits[segment.num_logits :]
            rows[owner].append(part)
            if sequences[owner].length == len(texts[owner]):
                texts[owner].append(int(part[-1].argmax()))
        assert not len(logits)
    for sequence in sequences:
        engine.pool.release(sequence)
    return texts, rows


#: The fastest path, and transformers' modules with or without native kernels: in each run the fastest and one of the
#: others, alternately; the exhaustive run takes all.
CASES = [
    pytest.param(name, path, marks=() if path in ("fastest", ("modules", "torch")[i % 2]) else pytest.mark.exhaustive)
    for i, name in enumerate(SUPPORTED)
    for path in ("fastest", "modules", "torch")
]


@pytest.fixture
def load_path(
    path: str, load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Engine]:
    """Loads an engine that runs on a path."""
    if path == "torch":
        monkeypatch.setattr(acceleration, "native_attention", lambda: None)

    def load(name: str) -> Engine:
        engine = load_engine(name, enforce_eager=path != "fastest")
        assert path != "torch" or engine.runner.name == "torch attention"
        return engine

    return load


@pytest.mark.parametrize(("name", "path"), CASES)
def test_ragged_equals_stock(
    name: str,
    load_path: Callable[[str], Engine],
    load_stock: Callable[[str], PreTrainedModel],
    tools: SimpleNamespace,
) -> None:
    engine, stock = load_path(name), load_stock(name)
    prompts = [tools.random_ids(length, seed=length) for length in PROMPTS]
    texts, rows = greedy_ragged(engine, prompts)
    for prompt, text, parts in zip(prompts, texts, rows, strict=True):
        wanted = tools.stock_logits(stock, text[:-1])
        # The two forms of a recurrence in transformers, by chunks and by tokens, differ by up to 2e-4 themselves.
        atol = 5e-4 if name in tools.hybrids else 1e-4
        torch.testing.assert_close(torch.cat(parts), wanted, atol=atol, rtol=1e-4)
        generated = stock.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        assert text == generated[0].tolist()
    assert engine.pool.used_blocks == 0
