"""Which states are known, against a list of positions that is searched through."""

import random

import pytest

from draft_service.drafters.heads.known_states import KnownStates
from specdec.types import HiddenStates


def states(start, end):
    """One number per position: the position itself."""
    return HiddenStates(start, 1, "float32", b"".join(i.to_bytes(4, "little") for i in range(start, end)))


def positions_of(parts):
    return [i for part in parts for i in range(part.start, part.end)]


class Lists:
    """The same by lists of positions."""

    def __init__(self):
        self.entries, self.waiting = [], []

    @property
    def end(self):
        return max([*self.entries, *self.waiting], default=-1) + 1

    def add(self, start, end):
        self.waiting += range(max(start, self.end), end)

    def take(self, count):
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        self.entries += taken
        return taken

    def cut(self, num_tokens):
        self.entries = [i for i in self.entries if i + 1 < num_tokens]
        self.waiting = [i for i in self.waiting if i < num_tokens]

    @property
    def num_gapless(self):
        return sum(place == position for place, position in enumerate(self.entries))


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_what_may_happen(seed):
    rng = random.Random(seed)
    features, lists, num_tokens = KnownStates(), Lists(), rng.randrange(1, 6)
    for _ in range(60):
        match rng.choice(["more", "more", "gap", "again", "take", "take", "fail", "cut"]):
            case "more":
                start, end = lists.end, num_tokens + rng.randrange(1, 4) - 1
                num_tokens = end + 1
                features.add([states(start, end)])
                lists.add(start, end)
            case "gap":
                num_tokens += rng.randrange(2, 5)
                features.add([states(num_tokens - 2, num_tokens - 1)])
                lists.add(num_tokens - 2, num_tokens - 1)
            case "again":
                start = rng.randrange(num_tokens)
                features.add([states(start, num_tokens - 1)] if start < num_tokens - 1 else [])
                lists.add(start, num_tokens - 1)
            case "take":
                count = rng.randrange(features.num_waiting(num_tokens) + 1)
                assert positions_of(features.take(count)) == lists.take(count)
            case "fail":
                count = rng.randrange(features.num_waiting(num_tokens) + 1)
                features.put_back(features.take(count))
            case "cut":
                num_tokens = rng.randrange(max(1, num_tokens - 4), num_tokens + 1)
                features.cut(num_tokens)
                lists.cut(num_tokens)
        assert features.end == lists.end
        assert features.num_entries == len(lists.entries)
        assert features.num_gapless == lists.num_gapless
        assert features.positions(0, features.num_entries) == lists.entries
        assert features.num_waiting(num_tokens) == sum(i < num_tokens - 1 for i in lists.waiting)


def test_entries_of_a_parked_cache():
    features = KnownStates(5)
    assert (features.end, features.num_gapless, features.positions(3, 2)) == (5, 5, [3, 4])
    features.add([states(2, 7)])
    assert features.num_waiting(8) == 2
    features.take(2)
    assert features.num_gapless == 7
    features.cut(4)
    assert (features.num_entries, features.end) == (3, 3)
