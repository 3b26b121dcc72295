"""Hidden states of a pass are those of the stock model, numbered as transformers numbers them, however it is fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from engine.engine import Engine, Segment
from engine.hidden_states import BEFORE_NORM
from engine.loading import acceleration
from engine.native.decoder import NativeDecoder
from engine.rounded_states import tensor_of_states
from specdec.errors import InvalidRequest

#: Of models with two layers: embedding, between them, after the last, after the norm.
ALL = (0, 1, 2, -1)
ARCHITECTURES = ("llama", "mistral", "qwen2_window", "qwen3", "gemma2", "opt", "gpt2", "gpt_neox", "phi", "qwen2_moe")
HYBRIDS = ("lfm2", "qwen3_5", "granite4", "falcon_h1")


@torch.no_grad()
def stock_states(model: PreTrainedModel, token_ids: Sequence[int], layers: Sequence[int] = ALL) -> torch.Tensor:
    """States [n, layers * H] of a plain forward pass, float32."""
    stack = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    last: list[torch.Tensor] = []
    hook = stack[-1].register_forward_hook(lambda _m, _a, out: last.append(out[0] if isinstance(out, tuple) else out))
    states = model(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    assert len(states) == 3
    by_number = {0: states[0], 1: states[1], 2: last[0], -1: states[-1]}
    return torch.cat([by_number[layer].reshape(len(token_ids), -1) for layer in layers], 1)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding to bfloat16."""
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=2e-4)


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *HYBRIDS])
def pair(
    request: pytest.FixtureRequest,
    load_engine: Callable[..., Engine],
    load_stock: Callable[[str], PreTrainedModel],
) -> tuple[Engine, PreTrainedModel]:
    return load_engine(request.param), load_stock(request.param)


def test_states_of_a_batch_in_chunks(pair: tuple[Engine, PreTrainedModel], tools: SimpleNamespace) -> None:
    engine, stock = pair
    texts = [tools.random_ids(count, seed=count) for count in (23, 9, 30)]
    sequences = [engine.pool.open(len(text)) for text in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(sequence.length < len(text) for sequence, text in zip(sequences, texts, strict=True)):
        segments, owners = [], []
        for owner, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            if chunk := text[sequence.length :][: 4 + 3 * owner]:
                segments.append(Segment(sequence, chunk, min(owner, len(chunk)), len(chunk), ALL))
                owners.append(owner)
        logits, states = engine.forward_with_states(segments)
        assert logits.shape[0] == sum(segment.num_logits for segment in segments)
        for index, owner in enumerate(owners):
            rows[owner].append(states.of(index))
            last = [states.rows(index, at, 0).data for at in (range(1), (len(segments[index].token_ids) - 1,))]
            assert b"".join(last) == rows[owner][-1][[0, -1]].view(torch.uint8).numpy().tobytes()
    for text, own in zip(texts, rows, strict=True):
        close(torch.cat(own), stock_states(stock, text))
    for sequence in sequences:
        engine.pool.release(sequence)


def test_each_segment_gets_the_rows_and_layers_it_asks_for(
    pair: tuple[Engine, PreTrainedModel], tools: SimpleNamespace
) -> None:
    engine, stock = pair
    texts = [tools.random_ids(12, seed=seed) for seed in range(4)]
    sequences = [engine.pool.open(12) for _ in texts]
    asked: list[tuple[int, tuple[int, ...]]] = [(12, (1, 0, 1)), (0, ()), (3, (-1,)), (1, (2, -1))]
    segments = [
        Segment(sequence, text, num_logits, count, layers)
        for sequence, text, num_logits, (count, layers) in zip(sequences, texts, (1, 2, 0, 5), asked, strict=True)
    ]
    logits, states = engine.forward_with_states(segments)
    for sequence in sequences:
        engine.pool.rollback(sequence, 0)
    plain = engine.forward([Segment(s.sequence, s.token_ids, s.num_logits) for s in segments])
    torch.testing.assert_close(logits, plain, atol=1e-5, rtol=1e-5)
    for index, (text, (count, layers)) in enumerate(zip(texts, asked, strict=True)):
        if count:
            own = states.of(index)
            assert own.shape[0] == count
            close(own, stock_states(stock, text, layers)[-count:])
            assert states.rows(index, range(count), 0).data == own.contiguous().view(torch.uint8).numpy().tobytes()
            for dtype, group_size in (("int8", engine.hidden_size), ("int8_g32", 32)):
                rounded = states.rows(index, (count - 1,), 7, dtype)
                assert (rounded.start, rounded.num_positions, rounded.group_size) == (7, 1, group_size)
                exact = own[-1:].float().unflatten(1, (-1, group_size))
                error = tensor_of_states(rounded).unflatten(1, (-1, group_size)) - exact
                assert (error.abs() <= 0.5001 / 127 * exact.abs().amax(-1, keepdim=True)).all()
    for sequence in sequences:
        engine.pool.release(sequence)


def test_every_runner_of_the_cpu(
    load_engine: Callable[..., Engine],
    load_stock: Callable[[str], PreTrainedModel],
    tools: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, stock = tools.random_ids(20, seed=3), load_stock("llama")
    runners = {"native decoder": {}, "native attention": {"enforce_eager": True}, "torch attention": {}}
    for name, options in runners.items():
        if name == "torch attention":
            monkeypatch.setattr(acceleration, "native_attention", lambda: None)
            monkeypatch.setattr(NativeDecoder, "build", lambda *_, **__: None)
        engine = load_engine("llama", **options)
        assert engine.runner.name == name
        sequence = engine.pool.open(20)
        ids: list[Sequence[int] | torch.Tensor] = [text[:13], torch.tensor(text[13:])]
        rows = [engine.forward_with_states([Segment(sequence, part, 1, len(part), ALL)])[1].of(0) for part in ids]
        close(torch.cat(rows), stock_states(stock, text))
        engine.pool.release(sequence)
        engine.close()


def test_layers_the_model_does_not_have_are_refused(llama: Engine) -> None:
    assert llama.check_state_layers(()) == ()
    assert llama.check_state_layers(ALL) == ALL
    assert llama.check_state_layers((BEFORE_NORM,)) == (2,)
    assert llama.check_state_layers((-3, -4)) == (1, 0)
    for layer in (3, -5):
        with pytest.raises(InvalidRequest, match=f"names {layer}; the target has the states 0 to 2, and -1"):
            llama.check_state_layers((0, layer))
    sequence = llama.pool.open(4)
    with pytest.raises(ValueError, match="a segment of 2 tokens cannot give 3 rows of hidden states"):
        llama.forward_with_states([Segment(sequence, [1, 2], 0, 3, (0,))])
    assert sequence.length == 0
    llama.pool.release(sequence)
