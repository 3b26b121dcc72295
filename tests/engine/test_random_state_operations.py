"""Random operations on a pool with recurrent states, beside the text that every state must stand for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.kept_states import KeptStates
from engine.kv_pool import CacheFull, KVPool
from engine.kv_sequence import KVSequence
from engine.prefix_tree import PrefixNode
from engine.recurrent.slots import NUM_RECORDS, StateSlots
from tests.engine.kv_entries import BLOCK, Shadow

#: Texts: few tokens, so that many begin alike.
TOKENS = range(2)
NUM_OPERATIONS = 150


@dataclass
class StateShadow(Shadow):
    """With texts in place of states: what is stored at a place, and the records of the entries since."""

    states: dict[int, tuple[list[int], dict[int, int]]] = field(default_factory=dict)

    def copy(self) -> None:
        super().copy()
        for source, target in self.pool.take_state_copies():
            stored, records = self.states.get(source, ([], {}))
            self.states[target] = list(stored), dict(records)

    def feed(self, sequence: KVSequence, tokens: list[int]) -> None:
        self.copy()
        slot, start = sequence.states, sequence.length
        assert slot is not None
        base, new_base = slot.bases(start, len(tokens))
        stored, records = self.states.get(slot.index, ([], {})) if start else ([], {})
        stored = stored if base else []  # a state of no entries is zero, whatever is stored
        assert len(stored) == base, "the state is that of another length"
        text = stored + [records[entry % NUM_RECORDS] for entry in range(base, start)]
        assert text == self.expected[sequence], "the state is that of another text"
        super().feed(sequence, tokens)
        whole = [*text, *tokens]
        kept = {entry % NUM_RECORDS: whole[entry] for entry in range(start, len(whole))}
        self.states[slot.index] = whole[:new_base], {**records, **kept}
        slot.base, slot.end = new_base, len(whole)


def run_random_operations(seed: int) -> int:  # noqa: PLR0912
    """Returns how many entries were taken over."""
    rng = random.Random(seed)
    slots = StateSlots(rng.choice((2, 4, 9)))
    pool = KVPool(rng.choice((12, 40)), BLOCK, states=slots)
    shadow = StateShadow(pool, np.zeros((pool.total_blocks + 1, BLOCK), dtype=np.int64))
    expected, num_found = shadow.expected, 0
    for _ in range(NUM_OPERATIONS):
        live = list(expected)
        sequence = rng.choice(live) if live else None
        action = rng.choice(("begin", "begin", "feed", "feed", "feed", "keep", "keep", "rollback", "release", "vacate"))
        try:
            if action == "begin" or sequence is None:
                sequence = pool.open_empty((rng.choice("xy"),))
                expected[sequence] = []
            elif action == "rollback":
                length = rng.randint(max(0, sequence.length - 6), sequence.length)
                pool.rollback(sequence, length)
                assert sequence.length in {0, length // BLOCK * BLOCK, length}
                del expected[sequence][sequence.length :]
            elif action == "keep":
                pool.publish(sequence, expected[sequence])
                pool.keep_states(sequence, rng.choice((0, 0, 8)))
            elif action == "release":
                pool.release(sequence, expected.pop(sequence) if rng.random() < 0.8 else ())
                expected.pop(sequence, None)
                continue
            elif action == "vacate":
                pool.vacate(sequence)
                expected[sequence] = []
            if action in {"begin", "vacate"} or rng.random() < 0.3:
                text = [*expected[sequence], *(rng.choice(TOKENS) for _ in range(rng.randint(1, 30)))]
                if found := pool.match(sequence, text, len(text) - 1):
                    num_found += found
                    expected[sequence] = text[: sequence.length]
            tokens = [rng.choice(TOKENS) for _ in range(rng.choice((1, 1, 3, 9, 20)))]
            if rng.random() < 0.7 and pool.grow(sequence, sequence.length + len(tokens)):
                shadow.feed(sequence, tokens)
        except CacheFull:
            continue
        shadow.check()
        places = [each.states.index for each in expected if each.states is not None]
        assert len(places) == len(set(places)), "two sequences have one place"
    for sequence, text in expected.items():
        pool.release(sequence, text)
    while slots.num_free < slots.count:  # what is kept yields to whoever opens
        opened = [pool.open_empty() for _ in range(slots.count)]
        for sequence in opened:
            pool.release(sequence)
    return num_found


def test_every_state_stands_for_the_text_of_its_sequence() -> None:
    assert sum(run_random_operations(seed) for seed in range(60)) > 200


def reaches_too_far(kept: KeptStates, slot: Any, node: PrefixNode, length: int) -> None:
    """The state of all that was kept, as if it were that of the length."""
    COPY_TO(kept, slot, node, length)
    slot.base = length


def shares_a_place(kept: KeptStates, slot: Any, node: PrefixNode, length: int) -> None:
    """No copy is made."""
    COPY_TO(kept, slot, node, length)
    slot.index = kept._copies.pop()[0]  # noqa: SLF001


COPY_TO = KeptStates.copy_to


@pytest.mark.parametrize("bug", [reaches_too_far, shares_a_place])
def test_bugs_are_found(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptStates, "copy_to", bug)
    with pytest.raises((AssertionError, KeyError)):
        sum(run_random_operations(seed) for seed in range(60))
