"""Rolled back and fed on, in any company, a recurrent layer answers as one that was fed token by token: to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.native import recurrent as native
from engine.recurrent.convolution import ConvolutionShape, convolve
from engine.recurrent.delta_rule import DeltaRule, delta_shape
from engine.recurrent.plan import StatePlan, StateStep
from engine.recurrent.slots import NUM_RECORDS, StateSlot, StateSlots
from engine.recurrent.state_cache import run_pass
from engine.recurrent.state_space import Mamba2Scan, MambaScan, mamba2_shape, mamba_shape

CPU = torch.device("cpu")
NUM_SEQUENCES = 3
NUM_ENTRIES = 90
#: Inputs of the rows [T, …] to outputs [T, …], with the plan of their pass.
Layer = Callable[[StatePlan, dict[str, torch.Tensor]], torch.Tensor]


def convolution() -> tuple[dict[str, tuple[int, ...]], Callable[[int], Layer]]:
    weight = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))

    def make(num_slots: int) -> Layer:
        rings = ConvolutionShape(10, 4, torch.float32).allocate(num_slots, CPU).fill_(torch.nan)
        return lambda plan, rows: convolve(rings, plan, rows["x"], weight=weight, bias=weight[:, 0], activation=None)

    return {"x": (10,)}, make


def recurrence(
    inputs: dict[str, tuple[int, ...]], shape_of: Callable[..., Any], rule: Callable[..., Any]
) -> tuple[dict[str, tuple[int, ...]], Callable[[int], Layer]]:
    def make(num_slots: int) -> Layer:
        cache = shape_of(**{name: torch.empty(1, 1, *part) for name, part in inputs.items()}).allocate(num_slots, CPU)
        for part in (cache.state, *cache.records.values()):
            part.fill_(torch.nan)

        def layer(plan: StatePlan, rows: dict[str, torch.Tensor]) -> torch.Tensor:
            pass_rows = rule(**rows)
            run_pass(cache, plan, pass_rows)
            out: torch.Tensor = pass_rows.outputs
            return out

        return layer

    return inputs, make


def native_convolution(dtype: torch.dtype) -> tuple[dict[str, tuple[int, ...]], Callable[[int], Layer]]:
    weight = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))

    def make(num_slots: int) -> Layer:
        rings = ConvolutionShape(300, 4, dtype).allocate(num_slots, CPU).fill_(torch.nan)

        def layer(plan: StatePlan, rows: dict[str, torch.Tensor]) -> torch.Tensor:
            inputs, before = rows["x"].to(dtype), torch.where(rings.isnan(), 0, rings)
            out = native.convolve(rings, plan, inputs, weight=weight, bias=weight[0], activation="silu")
            assert out is not None
            wanted = convolve(before, plan, inputs, weight=weight.t(), bias=weight[0], activation="silu")
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
            return out

        return layer

    return {"x": (300,)}, make


def native_recurrence(
    inputs: dict[str, tuple[int, ...]], shape_of: Callable[..., Any], rule: Callable[..., Any], run: Callable[..., Any]
) -> tuple[dict[str, tuple[int, ...]], Callable[[int], Layer]]:
    """The kernel and the reference side by side, each with states of its own."""

    def make(num_slots: int) -> Layer:
        shape = shape_of(**{name: torch.empty(1, 1, *part) for name, part in inputs.items()})
        own, other = shape.allocate(num_slots, CPU), shape.allocate(num_slots, CPU)
        for part in (own.state, *own.records.values()):
            part.fill_(torch.nan)

        def layer(plan: StatePlan, rows: dict[str, torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = run(own, plan, rows)
            reference = rule(**rows)
            run_pass(other, plan, reference)
            torch.testing.assert_close(out, reference.outputs, atol=1e-4, rtol=1e-4)
            return out

        return layer

    return inputs, make


def native_delta_rule(
    key_heads: int, heads: int, key_dim: int, value_dim: int, *, decays_channels: bool
) -> tuple[dict[str, tuple[int, ...]], Callable[[int], Layer]]:
    return native_recurrence(
        {
            "query": (key_heads, key_dim),
            "key": (key_heads, key_dim),
            "value": (heads, value_dim),
            "g": (heads, key_dim) if decays_channels else (heads,),
            "beta": (heads,),
        },
        lambda key, value, g, **_: delta_shape(key, value, g),
        lambda query, key, value, g, beta: DeltaRule(
            query, key, value, log_decay=-g.abs(), beta=beta.abs() / 4, is_normalised=False
        ),
        lambda cache, plan, rows: native.delta_rule(
            cache,
            plan,
            rows["query"],
            rows["key"],
            rows["value"],
            log_decay=-rows["g"].abs(),
            beta=rows["beta"].abs() / 4,
            is_normalised=False,
        ),
    )


def native_mamba2(
    heads: int, dim: int, groups: int, size: int
) -> tuple[dict[str, tuple[int, ...]], Callable[[int], Layer]]:
    of_heads = -torch.rand(heads, 2, generator=torch.Generator().manual_seed(2))
    rest = {"a": of_heads[:, 0], "d": of_heads[:, 1]}
    return native_recurrence(
        {"x": (heads, dim), "dt": (heads,), "b": (groups, size), "c": (groups, size)},
        lambda x, b, **_: mamba2_shape(x, b),
        lambda x, dt, b, c: Mamba2Scan(x, dt.abs(), b=b, c=c, **rest),
        lambda cache, plan, rows: native.mamba2(
            cache, plan, rows["x"], rows["dt"].abs(), b=rows["b"], c=rows["c"], **rest
        ),
    )


def native_mamba(channels: int, size: int) -> tuple[dict[str, tuple[int, ...]], Callable[[int], Layer]]:
    a = -torch.rand(channels, size, generator=torch.Generator().manual_seed(2))
    return native_recurrence(
        {"x": (channels,), "dt": (channels,), "b": (size,), "c": (size,)},
        lambda x, b, **_: mamba_shape(x.transpose(1, 2), b.transpose(1, 2)),
        lambda x, dt, b, c: MambaScan(x, dt.abs(), a=a, b=b, c=c, d=a[:, 0]),
        lambda cache, plan, rows: native.mamba(
            cache, plan, rows["x"], rows["dt"].abs(), a=a, b=rows["b"], c=rows["c"], d=a[:, 0]
        ),
    )


def delta_rule(decay: tuple[int, ...]) -> tuple[dict[str, tuple[int, ...]], Callable[[int], Layer]]:
    return recurrence(
        {"query": (2, 8), "key": (2, 8), "value": (4, 6), "g": decay, "beta": (4,)},
        lambda key, value, g, **_: delta_shape(key, value, g),
        lambda query, key, value, g, beta: DeltaRule(
            query, key, value, log_decay=-g.abs(), beta=beta, is_normalised=False
        ),
    )


A = -torch.rand(10, 4, generator=torch.Generator().manual_seed(2))
KINDS: dict[str, Callable[[], tuple[dict[str, tuple[int, ...]], Callable[[int], Layer]]]] = {
    "convolution": convolution,
    "delta rule": lambda: delta_rule((4,)),
    "delta rule with a decay per channel": lambda: delta_rule((4, 8)),
    "mamba2": lambda: recurrence(
        {"x": (4, 6), "dt": (4,), "b": (2, 8), "c": (2, 8)},
        lambda x, b, **_: mamba2_shape(x, b),
        lambda x, dt, b, c: Mamba2Scan(x, dt.abs(), a=A[:4, 0], b=b, c=c, d=A[:4, 1]),
    ),
    "mamba": lambda: recurrence(
        {"x": (10,), "dt": (10,), "b": (4,), "c": (4,)},
        lambda x, b, **_: mamba_shape(x.transpose(1, 2), b.transpose(1, 2)),
        lambda x, dt, b, c: MambaScan(x, dt.abs(), a=A, b=b, c=c, d=A[:, 1]),
    ),
    "native convolution": lambda: native_convolution(torch.float32),
    "native convolution in bfloat16": lambda: native_convolution(torch.bfloat16),
    "native delta rule": lambda: native_delta_rule(2, 4, 16, 72, decays_channels=False),
    "native delta rule of narrow heads": lambda: native_delta_rule(3, 3, 6, 4, decays_channels=False),
    "native delta rule with a decay per channel": lambda: native_delta_rule(2, 2, 20, 20, decays_channels=True),
    "native mamba2": lambda: native_mamba2(4, 12, 2, 40),
    "native mamba": lambda: native_mamba(70, 16),
    "native mamba of narrow states": lambda: native_mamba(5, 6),
    "native mamba2 of narrow states": lambda: native_mamba2(3, 5, 1, 6),
}


def plan_of(slots: list[StateSlot], starts: list[int], counts: list[int]) -> StatePlan:
    """The plan of one pass, and its effect on the slots."""
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    bases = [slot.bases(start, count) for slot, start, count in zip(slots, starts, counts, strict=True)]
    plan = StatePlan(
        slots=[slot.index for slot in slots],
        bases=[base for base, _ in bases],
        starts=starts,
        ends=ends,
        new_bases=[new_base for _, new_base in bases],
        device=CPU,
    )
    for slot, base, end in zip(slots, plan.new_bases, ends, strict=True):
        slot.base, slot.end = base, end
    return plan


def texts_of(inputs: dict[str, tuple[int, ...]], seed: int) -> list[dict[str, torch.Tensor]]:
    """Random inputs of every entry of every sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(NUM_ENTRIES, *part, generator=generator) for name, part in inputs.items()}
        for _ in range(NUM_SEQUENCES)
    ]


def one_by_one(make: Callable[[int], Layer], text: dict[str, torch.Tensor]) -> torch.Tensor:
    """Outputs [entries, …] of a sequence that is fed token by token and never rolled back."""
    layer, slot = make(1), StateSlots(1).take()
    return torch.cat(
        [
            layer(plan_of([slot], [at], [1]), {name: part[at : at + 1] for name, part in text.items()})
            for at in range(NUM_ENTRIES)
        ]
    )


def differences(kind: str, seed: int) -> Iterator[str]:
    """What differs while sequences are fed together in any order, with rejected rows that are rolled back."""
    inputs, make = KINDS[kind]()
    texts = texts_of(inputs, seed)
    wanted = [one_by_one(make, text) for text in texts]
    rng = random.Random(seed)
    num_kept = rng.choice((0, 0, 7))
    pool = StateSlots(NUM_SEQUENCES, num_kept)
    slots, lengths, layer = [pool.take() for _ in texts], [0] * NUM_SEQUENCES, make(NUM_SEQUENCES)
    noise = texts_of(inputs, seed + 1000)
    while any(length < NUM_ENTRIES for length in lengths):
        fed, rows = [], []
        for i in rng.sample(range(NUM_SEQUENCES), NUM_SEQUENCES):
            right = min(rng.choice((1, 1, 2, 5, 20)), NUM_ENTRIES - lengths[i])
            wrong = rng.choice((0, 0, 1, 3, 6, NUM_RECORDS - 1))
            if right and rng.random() < 0.8:
                fed.append((i, right, wrong))
                rows += [texts[i], noise[i]]
        if not fed:
            continue
        starts, counts = [lengths[i] for i, *_ in fed], [right + wrong for _, right, wrong in fed]
        batch = {
            name: torch.cat(
                [
                    part
                    for (i, right, wrong) in fed
                    for part in (texts[i][name][lengths[i] : lengths[i] + right], noise[i][name][:wrong])
                ]
            )
            for name in inputs
        }
        out = layer(plan_of([slots[i] for i, *_ in fed], starts, counts), batch)
        for i, right, wrong in fed:
            start = lengths[i]
            if not torch.equal(out[:right], wanted[i][start : start + right]):
                yield f"sequence {i}, entries {start} to {start + right}"
            out = out[right + wrong :]
            accepted = rng.choice((0, right, rng.randrange(right + 1)))
            back = rng.randrange(num_kept + 1) if num_kept and wrong < num_kept else 0
            lengths[i] = max(start + accepted - (back if accepted == 0 else 0), 0)
            if not slots[i].reaches(lengths[i]):
                lengths[i] = start + right


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_passes_and_rollbacks_is_exact(kind: str, seed: int) -> None:
    assert list(differences(kind, seed)) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "convolution" not in kind and "native" not in kind])
@pytest.mark.parametrize("num_folds", [-1, 1])
def test_the_fuzz_finds_a_wrong_number_of_folds(kind: str, num_folds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = StatePlan.folds.func

    def folds(plan: StatePlan) -> list[StateStep]:
        steps: list[StateStep] = stock(plan)
        return steps[:-1] if num_folds < 0 else steps + steps[-1:]

    monkeypatch.setattr(StatePlan, "folds", property(folds))
    assert any(list(differences(kind, seed)) for seed in range(4))


@pytest.mark.parametrize("kind", ["native convolution", "native delta rule", "native mamba2", "native mamba"])
def test_the_number_of_threads_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(10**6))
    monkeypatch.setattr(torch, "get_num_threads", lambda: next(numbers) % 4 + 1)
    assert list(differences(kind, 9)) == []


def test_the_fuzz_finds_inputs_that_are_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution goes on from the newest inputs, rejected ones among them."""
    stock = StatePlan.windows
    ends: dict[int, int] = {}

    def windows(plan: StatePlan, taps: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        older, reads = stock(plan, taps, size)
        shifts = [ends.get(slot, start) - start for slot, start in zip(plan.slots, plan.starts, strict=True)]
        counts = [min(start, taps - 1) for start in plan.starts]
        shift = [by for by, count in zip(shifts, counts, strict=True) for _ in range(count)]
        ends.update(zip(plan.slots, plan.ends, strict=True))
        return older // size * size + (older % size + torch.tensor(shift, dtype=torch.int64)) % size, reads

    monkeypatch.setattr(StatePlan, "windows", windows)
    assert any(list(differences("convolution", seed)) for seed in range(4))


def test_a_state_before_the_base_cannot_be_had() -> None:
    slot = StateSlots(1).take()
    plan_of([slot], [0], [10])
    assert slot.base == 0
    assert slot.reaches(3)
    plan_of([slot], [6], [4])
    assert (slot.base, slot.end) == (6, 10)
    assert [length for length in range(12) if slot.reaches(length)] == [0, 6, 7, 8, 9, 10]
    plan_of([slot], [10], [200])
    assert slot.base == 210 - NUM_RECORDS
    slot.forget()
    assert slot.reaches(0)
    assert not slot.reaches(1)


def test_kept_entries_can_be_rolled_back_after_later_passes() -> None:
    slot = StateSlots(1, num_kept=5).take()
    for at in range(20):
        plan_of([slot], [at], [1])
    assert [length for length in range(1, 21) if slot.reaches(length)] == [15, 16, 17, 18, 19, 20]


def test_places_are_reused_and_a_moved_slot_leaves_nothing() -> None:
    slots = StateSlots(2)
    first, second = slots.take(), slots.take()
    assert {first.index, second.index} == {1, 2}
    assert slots.num_free == 0
    parked = first.moved()
    slots.give_back(first)
    assert slots.num_free == 0
    slots.give_back(parked)
    assert slots.num_free == 1
    assert slots.take().index == 1
