"""The benchmark of lookups, on texts so short that what it counts is known."""

import pytest

from benchmarks import lookups
from benchmarks.lookups import Request, measure


async def test_what_is_played_is_counted():
    request = Request([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [3, 4, 5, 6, 7, 9, 9])
    # Rounds: (3, 4) and 5; (6, 7, 8) but 9; then nothing follows 9, and only one token is left.
    outcome = await measure("suffix, own text", "test", [request], 3)
    assert outcome.acceptance_length == 7 / 3
    assert outcome.accepted == pytest.approx(4 / 5)
    assert outcome.speed(0.0) == 7 / 3
    assert outcome.speed(1.0) == pytest.approx(7 / 3 / (1 + 5 / 3))


async def test_past_answers_are_found_again():
    requests = [Request([90, 91], list(range(40))), Request([92, 93], list(range(40)))]
    alone, shared = [await measure(name, "test", requests, 8) for name in ("suffix, own text", "suffix")]
    assert alone.acceptance_length == 1.0
    assert shared.acceptance_length > 1.5


@pytest.mark.parametrize("make", lookups.TEXTS.values())
def test_texts_differ_as_they_should(make):
    requests = make(lambda text: list(text.encode()))
    assert len(requests) >= 20
    assert all(list(request.prompt) != list(request.output) for request in requests)
