import itertools
import random

import pytest

from specdec.scheduling.goodput import choose, likeliest


def survivals(rates, k):
    return [list(itertools.accumulate([rate] * k, lambda a, b: a * b)) for rate in rates]


def goodput_of(step, num_sessions):
    return lambda tokens, rounds, accepted: (num_sessions + accepted) / step(num_sessions + tokens)


def best_of_all(rounds, step):
    """Every combination of lengths."""
    best = 0.0
    for lengths in itertools.product(*(range(len(survival) + 1) for survival in rounds)):
        accepted = sum(sum(survival[:n]) for survival, n in zip(rounds, lengths, strict=True))
        best = max(best, (len(rounds) + accepted) / step(len(rounds) + sum(lengths)))
    return best


TICKS = {
    "flat": lambda rows: 10.0,
    "linear": float,
    "knee": lambda rows: 10.0 + max(0, rows - 6) * 2.0,
    "steps": lambda rows: 10.0 * -(-rows // 4),
    "expensive second row": lambda rows: 10.0 + (rows > 3) * 8.0 + 0.01 * rows,
}


@pytest.mark.parametrize("shape", TICKS)
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all_combinations(shape, seed):
    source = random.Random(seed)
    rounds = survivals([source.random() for _ in range(3)], 4)
    choice = choose(rounds, goodput_of(TICKS[shape], 3))
    assert choice.goodput == pytest.approx(best_of_all(rounds, TICKS[shape]))
    lengths = [choice.take(survival) for survival in rounds]
    assert sum(lengths) == choice.num_tokens
    assert sum(length > 0 for length in lengths) == choice.num_rounds
    assert sum(sum(s[:n]) for s, n in zip(rounds, lengths, strict=True)) == pytest.approx(choice.num_accepted)
    assert lengths == likeliest(rounds, choice.num_tokens)


def test_nothing_to_draft_and_nothing_worth_drafting():
    assert choose([], goodput_of(TICKS["flat"], 5)).num_tokens == 0
    choice = choose(survivals([0.9, 0.9], 4), goodput_of(TICKS["linear"], 2))
    assert choice.num_tokens == 0
    assert choice.take([0.999]) == 0


def test_good_rounds_get_more_than_bad_ones():
    rounds = survivals([0.95, 0.6, 0.0], 6)
    choice = choose(rounds, goodput_of(lambda rows: 10.0 + rows, 3))
    good, fair, bad = (choice.take(survival) for survival in rounds)
    assert good > fair > bad == 0


def test_many_tokens_are_tried_in_steps_and_the_choice_stays_near_the_best():
    rounds = survivals([0.8] * 64, 8)
    calls = []

    def goodput(tokens, num_rounds, accepted):
        calls.append(tokens)
        return (64 + accepted) / (10.0 + max(0, 64 + tokens - 200) * 0.2)

    choice = choose(rounds, goodput)
    exact = max(goodput(n, 0, sum(sorted(itertools.chain(*rounds), reverse=True)[:n])) for n in range(512))
    assert choice.goodput > 0.97 * exact
    assert len(calls) < 512 + 80


def test_likeliest_keeps_the_order_of_a_chain_and_the_number():
    rounds = [[0.9, 0.8, 0.1], [0.8, 0.7], []]
    assert likeliest(rounds, 3) == [2, 1, 0]
    assert likeliest(rounds, 0) == [0, 0, 0]
    assert likeliest(rounds, 99) == [3, 2, 0]
