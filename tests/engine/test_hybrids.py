"""Models with recurrent states, rolled back, taken up, in any company, answer to the bit as in one pass over a text."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import mixers
from engine.engine import Engine, Segment
from engine.kv_pool import CacheFull
from engine.kv_sequence import KVSequence
from engine.loading import acceleration, load
from engine.recurrent.convolution import ConvolutionShape
from engine.recurrent.delta_rule import delta_shape
from engine.recurrent.slots import NUM_RECORDS, StateSlot
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.settings import ModelSettings

#: One family of every kind of state, with experts and without.
FAMILIES = [
    "lfm2",
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "minimax_lightning",
    "granite4",
    "falcon_h1",
    "nemotron_h",
    "mamba2",
    "mamba",
    "jamba",
    "zamba2",
]
#: Of each kind of state one whose records are folded. A convolution's inputs are found by the length alone.
WITH_RECORDS = ["qwen3_5", "granite4", "mamba", "kimi_linear"]
NUM_TOKENS = 70


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request: pytest.FixtureRequest, load_engine: Callable[..., Engine]) -> Engine:
    return load_engine(request.param)


def in_one_pass(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """Logits [n, V] of tokens fed to a fresh sequence."""
    sequence = engine.pool.open(len(token_ids))
    logits = engine.forward([Segment(sequence, token_ids, len(token_ids))])
    engine.pool.release(sequence)
    return logits


def mistakes(engine: Engine, texts: list[list[int]], seed: int) -> int:
    """Rows that differ from one pass, where rounds of several sessions are mixed, permuted and rolled back."""
    rng, count = random.Random(seed), 0
    wanted = [in_one_pass(engine, text) for text in texts]
    sequences = [engine.pool.open(2 * NUM_TOKENS) for _ in texts]
    while any(sequence.length < NUM_TOKENS for sequence in sequences):
        segments, rounds = [], []
        for i in rng.sample(range(len(texts)), len(texts)):
            start = sequences[i].length
            right = texts[i][start : start + rng.choice((1, 1, 2, 5, 9))]
            wrong = [rng.randrange(3, 97) for _ in range(rng.choice((0, 0, 1, 4, 8)))]
            if right and rng.random() < 0.8:
                segments.append(Segment(sequences[i], right + wrong, len(right + wrong)))
                rounds.append((i, start, len(right)))
        if not segments:
            continue
        logits = engine.forward(segments)
        for segment, (i, start, right) in zip(segments, rounds, strict=True):
            part, logits = logits[:right], logits[segment.num_logits :]
            count += int((part != wanted[i][start : start + right]).any(-1).sum())
            accepted = rng.choice((right, right, 0, rng.randrange(right + 1)))
            engine.pool.rollback(sequences[i], start + accepted)
            assert sequences[i].length == start + accepted
    for sequence in sequences:
        engine.pool.release(sequence)
    return count


def test_rounds_of_many_sessions_and_their_rollbacks(hybrid: Engine, tools: SimpleNamespace) -> None:
    texts = [tools.random_ids(NUM_TOKENS, seed) for seed in range(4)]
    assert [mistakes(hybrid, texts, seed) for seed in range(2)] == [0, 0]
    assert hybrid.pool.used_blocks == 0
    assert hybrid.pool.states is not None
    assert hybrid.pool.states.num_free == hybrid.pool.states.count


@pytest.mark.parametrize("hybrid", WITH_RECORDS, indirect=True)
def test_a_length_that_is_not_rolled_back_shows(
    hybrid: Engine, tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of the last pass are kept whatever was accepted, as an engine without rollback would."""
    texts = [tools.random_ids(NUM_TOKENS, seed) for seed in range(4)]
    stock = hybrid.pool.rollback

    def rollback(sequence: KVSequence, length: int) -> None:
        stock(sequence, length)
        assert sequence.states is not None
        sequence.states.base = sequence.states.end = length  # what is stored stands for other entries

    monkeypatch.setattr(hybrid.pool, "rollback", rollback)
    assert mistakes(hybrid, texts, 0) > 0


def of_another_session(lengths: list[int], bases: list[int], _: list[int]) -> list[int]:
    """What was accepted of the session that stands after it in the batch."""
    return [min(base, length) for base, length in zip([*bases[1:], bases[0]], lengths, strict=True)]


def forgotten_without_drafts(lengths: list[int], bases: list[int], counts: list[int]) -> list[int]:
    """A step of one row goes on from what is stored, whatever was accepted since."""
    return [length if count == 1 else base for length, base, count in zip(lengths, bases, counts, strict=True)]


@pytest.mark.parametrize("hybrid", WITH_RECORDS, indirect=True)
@pytest.mark.parametrize("bug", [of_another_session, forgotten_without_drafts])
def test_accepted_rows_that_are_not_folded_show(
    hybrid: Engine, bug: Callable[..., list[int]], tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = hybrid.forward

    def planted(segments: list[Segment]) -> torch.Tensor:
        slots = [segment.sequence.states for segment in segments]
        lengths = [segment.sequence.length for segment in segments]
        counts = [len(segment.token_ids) for segment in segments]
        bases = [0 if slot is None else slot.base for slot in slots]
        for slot, base in zip(slots, bug(lengths, bases, counts), strict=True):
            assert slot is not None
            slot.base = base
        return stock(segments)

    monkeypatch.setattr(hybrid, "forward", planted)
    assert mistakes(hybrid, [tools.random_ids(NUM_TOKENS, seed) for seed in range(4)], 0) > 0


def test_a_text_is_taken_up_where_its_states_can_be_had(hybrid: Engine, tools: SimpleNamespace) -> None:
    pool, text = hybrid.pool, tools.random_ids(40, 5)
    wanted = in_one_pass(hybrid, text)
    for ended in range(18, 31):
        for agreed in range(ended - 8, ended + 1):
            sequence = pool.open_empty(("hybrid", ended, agreed))
            assert pool.grow(sequence, 40)
            hybrid.forward([Segment(sequence, text[: ended - 6], 1)])
            hybrid.forward([Segment(sequence, text[ended - 6 : ended], 1)])  # the last pass: 6 rows
            pool.release(sequence, text[:ended])
            other = text[:agreed] + [(token + 1) % 97 for token in text[agreed : agreed + 1]]
            again = pool.open_empty(("hybrid", ended, agreed))
            given = text if agreed == ended else other
            found = pool.match(again, given, min(len(given), agreed + 1))
            assert found == again.length == (agreed if agreed >= ended - 6 else 0)
            assert pool.grow(again, 40)
            rest = hybrid.forward([Segment(again, text[found:], 40 - found)])
            assert rest.equal(wanted[found:])
            pool.release(again)
    assert pool.states is not None
    taken = pool.open(1)  # nothing but states of ended texts is left
    pool.release(taken)
    assert pool.used_blocks == 0


def test_what_cannot_be_rolled_back_is_fed_again(hybrid: Engine, tools: SimpleNamespace) -> None:
    text = tools.random_ids(NUM_RECORDS + 30, 6)
    wanted = in_one_pass(hybrid, text)
    sequence = hybrid.pool.open(len(text))
    hybrid.forward([Segment(sequence, text, 0)])
    hybrid.pool.rollback(sequence, 40)
    assert sequence.length == 40  # the last rows of a long prompt have records
    hybrid.pool.rollback(sequence, 20)
    assert sequence.length == 0
    again = hybrid.forward([Segment(sequence, text, len(text))])
    assert again.equal(wanted)
    hybrid.pool.release(sequence)


def test_a_pass_that_breaks_off_leaves_no_half_written_state(
    hybrid: Engine, tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tools.random_ids(30, 7)
    wanted = in_one_pass(hybrid, text)
    sequence = hybrid.pool.open(40)
    hybrid.forward([Segment(sequence, text[:10], 1)])
    with monkeypatch.context() as patched:
        patched.setattr(hybrid.runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            hybrid.forward([Segment(sequence, torch.tensor(text[10:]), 1)])  # no runner has a call of its own for it
    assert sequence.length == 0
    assert hybrid.forward([Segment(sequence, text, 30)]).equal(wanted)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        hybrid.forward([Segment(sequence, [97], 1)])
    assert sequence.length == 30  # nothing had begun
    hybrid.pool.release(sequence)


def test_a_released_sequence_writes_to_nobodys_states(hybrid: Engine, tools: SimpleNamespace) -> None:
    text = tools.random_ids(30, 8)
    wanted = in_one_pass(hybrid, text)
    gone = hybrid.pool.open(40)
    hybrid.forward([Segment(gone, text[:12], 1)])
    hybrid.pool.release(gone)
    sequence = hybrid.pool.open(40)  # has the place that was given back
    hybrid.forward([Segment(sequence, text[:10], 1)])
    hybrid.forward([Segment(gone, text[:5], 1)])
    rest = hybrid.forward([Segment(gone, text[:5], 5), Segment(sequence, text[10:], 20)])[5:]
    assert rest.equal(wanted[10:])
    hybrid.pool.release(sequence)


def test_what_states_do_not_allow(hybrid: Engine, tools: SimpleNamespace) -> None:
    sequence = hybrid.pool.open(20)
    hybrid.forward([Segment(sequence, tools.random_ids(8, 1), 1)])
    with pytest.raises(ValueError, match="recurrent states, which hold every entry"):
        hybrid.pool.drop_blocks(sequence, 0, 1)
    with pytest.raises(ValueError, match="follow a chain of tokens and no tree"):
        hybrid.forward([Segment(sequence, [3, 4], 2, parents=(-1, -1))])
    assert sequence.length == 8
    hybrid.pool.release(sequence)


def test_places_bound_the_open_sessions_and_states_of_ended_ones_yield(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine("granite4", kv_cache_memory_bytes=600_000)
    pool = engine.pool
    assert pool.states is not None
    opened = [pool.open(4) for _ in range(pool.states.count)]
    assert 2 <= len(opened) < 20
    assert not pool.can_open(4)
    with pytest.raises(CacheFull, match="places for recurrent states are in use"):
        pool.open(4)
    pool.release(opened[0])
    ended = pool.open_empty(("chat",))
    assert pool.grow(ended, 4)
    engine.forward([Segment(ended, [5, 6], 1)])
    pool.release(ended, [5, 6])
    assert pool.states.num_free == 0
    assert pool.can_open(4)
    again = pool.open(4)
    assert pool.match(again, [5, 6, 7], 2) == 0
    for sequence in (*opened[1:], again):
        pool.release(sequence)
    assert pool.states.num_free == pool.states.count


@pytest.mark.parametrize(("name", "options"), [("granite4", {"kv_cache_memory_bytes": 20_000})])
def test_too_little_memory_for_states(name: str, options: dict[str, Any], load_engine: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidRequest, match=r"for recurrent states, .* raise kv_cache_memory_bytes to \d+"):
        load_engine(name, **options)


@pytest.mark.parametrize("name", ["qwen3_5", "granite4"])
def test_bfloat16_and_int8(name: str, load_engine: Callable[..., Engine], tools: SimpleNamespace) -> None:
    for options in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
        engine = load_engine(name, **options)
        text = tools.random_ids(20, 3)
        wanted = in_one_pass(engine, text)
        sequence = engine.pool.open(40)
        engine.forward([Segment(sequence, [*text[:7], 50, 60, 70], 1)])
        engine.pool.rollback(sequence, 7)
        rest = engine.forward([Segment(sequence, text[7:], 13)])
        spread = wanted.std()
        assert (rest - wanted[7:]).square().mean(-1).sqrt().median() < 0.05 * spread
        engine.pool.release(sequence)


def test_zamba2_in_bfloat16(tools: SimpleNamespace, tmp_path: Path) -> None:
    """With the weights of these tests transformers' own answers in bfloat16 are farther from those in float32 (0.34 of
    the logits' spread, the median) than from the engine's (0.14); with half of them 0.03 and 0.02.
    """
    model = tools.build("zamba2")
    settings = ModelSettings(model=str(tmp_path), device="cpu", num_threads=1, block_size=4, dtype="bfloat16")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match=r"wrong answers here.*roundings may disturb .* try dtype float32"):
        load.load_engine(settings)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in key:
                weight.mul_(0.5)
    model.save_pretrained(tmp_path)
    assert load.load_engine(settings).info.dtype == "bfloat16"


def test_nobody_is_told_to_install_kernels_that_no_pass_uses(
    load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: told.append(record.getMessage()))
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning)  # transformers' own, now each time
    library = logging.getLogger("transformers")
    library.addHandler(handler)
    try:
        load_engine("qwen3_5")
        assert not [text for text in told if "much slower" in text]
        monkeypatch.setattr(mixers, "_ADVICE", "another advice")
        load_engine("qwen3_5")
        assert [text for text in told if "much slower" in text]
    finally:
        library.removeHandler(handler)


@pytest.mark.parametrize(("name", "read"), [("olmo_hybrid", set()), ("jamba", {"dt_proj"}), ("mamba", {"dt_proj"})])
def test_all_linear_layers_are_packed_but_those_whose_weight_is_read(
    name: str, read: set[str], load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    stock = acceleration.pack_linears
    monkeypatch.setattr(acceleration, "pack_linears", lambda model, *rest: (models.append(model), stock(model, *rest)))
    load_engine(name)
    plain = {each.rpartition(".")[2] for each, part in models[0].named_modules() if type(part) is torch.nn.Linear}
    assert plain == read


@pytest.mark.parametrize("name", ["qwen3_5", "granite4", "jamba"])
def test_the_check_at_load_finds_a_rollback_that_folds_too_much(
    name: str, load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state after all rows of a pass is kept, rejected ones among them."""
    monkeypatch.setattr(StateSlot, "bases", lambda slot, length, num_rows: (slot.base, length + num_rows))
    monkeypatch.setattr(StateSlot, "reaches", lambda slot, length: True)
    with pytest.raises(ModelNotSupported, match="would give wrong answers here"):
        load_engine(name)


@pytest.mark.parametrize("name", ["qwen3_5", "granite4", "jamba"])
def test_the_check_at_load_finds_states_that_are_wrong_past_the_first_chunks(
    name: str, tools: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of a long piece overwrite each other; the state after more than 64 entries is lost."""
    model = tools.build(name)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("A_log"):
                weight.fill_(-6.0)  # it forgets little, as some heads of trained models
    model.save_pretrained(tmp_path)
    settings = ModelSettings(model=str(tmp_path), device="cpu", num_threads=1, block_size=4)
    load.load_engine(settings)
    stock = StateSlot.bases

    def without_room(slot: StateSlot, length: int, num_rows: int) -> tuple[int, int]:
        return stock(slot, length, num_rows)[0], length

    def lost(slot: StateSlot, length: int, num_rows: int) -> tuple[int, int]:
        base, new_base = stock(slot, length, num_rows)
        return base, new_base if new_base <= 64 else 0

    for bug in (without_room, lost):
        monkeypatch.setattr(StateSlot, "bases", bug)
        with pytest.raises(ModelNotSupported, match=r"wrong answers here.*in a long text"):
            load.load_engine(settings)


def test_a_drafted_token_costs_less_than_a_megabyte() -> None:
    """In the shape of Qwen3.5-9B, whose state takes 48 MiB: 24 layers of 16 key and 32 value heads of 128."""
    key, value, decay = torch.empty(1, 1, 16, 128), torch.empty(1, 1, 32, 128), torch.empty(1, 1, 32)
    rule = delta_shape(key, value, decay)
    convolution = ConvolutionShape(2 * 16 * 128 + 32 * 128, 4, torch.bfloat16)
    assert 24 * 4 * math.prod(rule.state) == 48 * 2**20
    record = sum(4 * math.prod(part) for part in rule.records.values())
    assert rule.bytes_per_slot == 4 * math.prod(rule.state) + NUM_RECORDS * record
    raw_input = convolution.bytes_per_slot // convolution.ring_size
    assert convolution.ring_size == NUM_RECORDS + 3, "the inputs that a state without records needs"
    assert 24 * (record + raw_input) <= 1e6
