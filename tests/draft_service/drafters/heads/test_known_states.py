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
        self.skipped = range(0)

    @property
    def end(self):
        return max([*self.entries, *self.waiting], default=-1) + 1

    def add(self, start, end):
        self.waiting += [i for i in range(max(start, self.end), end) if i not in self.skipped]

    def skip(self, start, end):
        self.skipped = range(start, end)
        self.waiting = [i for i in self.waiting if i not in self.skipped]
        return sum(i < start for i in self.entries), sum(i in self.skipped for i in self.entries)

    def take(self, count):
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        self.entries += taken
        return taken

    def cut(self, num_tokens):
        self.entries = [i for i in self.entries if i + 1 < num_tokens]
        self.waiting = [i for i in self.waiting if i < num_tokens]


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_what_may_happen(seed):
    rng = random.Random(seed)
    features, lists, num_tokens = KnownStates(), Lists(), rng.randrange(1, 6)
    for _ in range(60):
        match rng.choice(["more", "more", "gap", "again", "take", "take", "fail", "cut", "skip", "drop"]):
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
            case "skip":
                start = rng.randrange(3)
                end = rng.randrange(start, max(start, num_tokens - 2) + 1)
                assert features.skip(start, end) == lists.skip(start, end)
            case "drop":
                count = rng.randrange(1, features.num_entries + 1) if features.num_entries else 0
                first = rng.randrange(features.num_entries - count + 1)
                if not count:
                    continue
                features.drop(first, count)
                del lists.entries[first : first + count]
        assert features.end == lists.end
        assert features.num_entries == len(lists.entries)
        assert KnownStates(lists.entries).positions(0, features.num_entries) == lists.entries
        assert features.positions(0, features.num_entries) == lists.entries
        assert features.num_waiting(num_tokens) == sum(i < num_tokens - 1 for i in lists.waiting)


def test_entries_of_a_parked_cache():
    features = KnownStates([0, 1, 2, 3, 4])
    assert (features.end, features.positions(3, 2)) == (5, [3, 4])
    features.add([states(2, 7)])
    assert features.num_waiting(8) == 2
    features.take(2)
    features.cut(4)
    assert (features.num_entries, features.end) == (3, 3)
