"""The lines of a session in the cache, against a shadow of what every line must hold."""

import random

import numpy as np
import pytest

from draft_service.ahead.cache_branches import CacheBranches
from specdec.engine.kv_pool import KVPool

BLOCK = 4


class Shadow:
    """Feeds lines as the engine does, with token ids in place of keys and values."""

    def __init__(self, total_blocks=64, max_tokens=120, seed=0):
        self.rng = random.Random(seed)
        self.pool = KVPool(total_blocks, BLOCK)
        self.cache = np.zeros((total_blocks + 1, BLOCK), dtype=np.int64)
        self.lines = CacheBranches(self.pool, self.pool.open(max_tokens))
        self.known = []
        self.reused = 0

    def read(self, sequence):
        return self.cache[sequence.blocks].reshape(-1)[: sequence.length].tolist()

    def feed(self, sequence, token_ids):
        for source, target in self.pool.take_copies():
            self.cache[target] = self.cache[source]
        for token in token_ids:
            self.cache[sequence.blocks[sequence.length // BLOCK], sequence.length % BLOCK] = token
            sequence.length += 1

    def fresh(self, drafted):
        """Draft after the committed tokens."""
        self.lines.cut(len(self.known) - 1)
        main = self.lines.main
        self.feed(main.sequence, [*self.known[main.sequence.length :], *drafted[:-1]])
        main.token_ids = tuple(drafted)

    def ahead(self, guesses):
        """Draft for several guesses in one batch; each is the assumed tokens and the drafted ones."""
        running = []
        for assumed, drafted in guesses:
            line = self.lines.follow(len(self.known), assumed, len(drafted))
            if line is not None:
                text = [*self.known, *assumed]
                self.reused += line.sequence.length - (len(self.known) - 1)
                running.append((line, text[line.sequence.length :], assumed, drafted))
        assert len({id(line) for line, *_ in running}) == len(running)
        for line, fed, assumed, drafted in running:
            assert len(fed) >= 1
            self.feed(line.sequence, [*fed, *drafted[:-1]])
            line.is_busy = False
            line.token_ids = (*assumed, *drafted)
        return len(running)

    def commit(self, token_ids):
        self.lines.commit(len(self.known), token_ids)
        self.known += token_ids

    def check(self):
        for source, target in self.pool.take_copies():
            self.cache[target] = self.cache[source]
        for line in (self.lines.main, *self.lines._branches):
            length = line.sequence.length
            assert self.read(line.sequence) == [*self.known, *line.token_ids][:length]
            assert length <= len(self.known) + len(line.token_ids)
            assert not line.sequence.released
        assert len(self.lines.main.sequence.blocks) == 30
        held = {int(b) for line in (self.lines.main, *self.lines._branches) for b in line.sequence.blocks}
        assert len(held) == self.pool.used_blocks

    def end(self):
        self.lines.cut(len(self.known))
        assert self.read(self.lines.main.sequence) == self.known[: self.lines.main.sequence.length]
        assert self.pool.used_blocks == 30
        self.pool.release(self.lines.main.sequence)
        assert self.pool.num_free_blocks == self.pool.total_blocks


def tokens(rng, count):
    return tuple(rng.randrange(3) for _ in range(count))


def run(seed, total_blocks=64):
    """A session: proposals, guesses at verdicts on them and on each other, and verdicts, foreseen or not."""
    shadow = Shadow(total_blocks, seed=seed)
    rng = shadow.rng
    shadow.commit(list(tokens(rng, rng.randint(1, 12))))
    served = 0
    while len(shadow.known) < 90:
        drafted = tokens(rng, 3)
        shadow.fresh(drafted)
        shadow.check()
        proposals = [((), drafted)]
        for _ in range(rng.randint(0, 3)):
            batch = []
            for _ in range(rng.randint(1, 4)):
                assumed, after = rng.choice(proposals)
                accepted = rng.randint(0, len(after))
                batch.append(((*assumed, *after[:accepted], rng.randrange(3)), tokens(rng, rng.randint(1, 4))))
            batch = list({assumed: (assumed, after) for assumed, after in batch}.values())
            served += shadow.ahead(batch)
            proposals += batch
            shadow.check()
        for _ in range(rng.randint(1, 3)):  # several verdicts may come before the next proposal
            assumed, after = rng.choice(proposals)
            verdict = [*assumed, *after[: rng.randint(0, len(after))], rng.randrange(3)]
            shadow.commit(verdict)
            shadow.check()
            proposals = [(a[len(verdict) :], d) for a, d in proposals if list(a[: len(verdict)]) == verdict] or [
                ((), ())
            ]
    shadow.end()
    return served, shadow.reused


def test_every_line_holds_the_tokens_it_stands_for():
    served = reused = 0
    for seed in range(80):
        more, entries = run(seed)
        served, reused = served + more, reused + entries
    assert served > 2000
    assert reused > 2 * served  # most of what is assumed need not be fed again


def test_without_free_blocks_guesses_only_continue_lines():
    served = sum(run(seed, total_blocks=31)[0] for seed in range(40))
    plenty = sum(run(seed)[0] for seed in range(40))
    assert 0 < served < plenty


def test_a_guess_that_continues_a_line_takes_no_block():
    shadow = Shadow()
    shadow.commit([1, 2, 0, 1, 1])
    shadow.fresh((2, 1, 0))
    free = shadow.pool.num_free_blocks
    assert shadow.ahead([((2, 1, 0, 1), (1, 1, 1))]) == 1
    assert not shadow.lines.has_branches
    assert shadow.ahead([((2, 1, 0, 1, 1, 1, 1, 2), (1, 1, 1))]) == 1
    assert shadow.pool.num_free_blocks == free
    length = shadow.lines.main.sequence.length
    shadow.commit([2, 1, 0, 1])
    assert shadow.lines.main.sequence.length == length  # nothing is lost
    shadow.commit([1, 0])
    assert shadow.lines.main.sequence.length == len(shadow.known) - 1
    shadow.end()


def test_a_branch_costs_few_blocks_and_is_adopted_without_a_copy():
    shadow = Shadow()
    shadow.commit(list(tokens(shadow.rng, 41)))
    shadow.fresh((2, 1, 0))
    free = shadow.pool.num_free_blocks
    assert shadow.ahead([((2, 0), (1, 1, 1)), ((0,), (2, 2, 2)), ((2, 1, 1), (0, 0, 0))]) == 3
    assert free - shadow.pool.num_free_blocks <= 3 * 2
    shadow.check()
    shadow.commit([2, 0])
    assert shadow.pool.take_copies() == []
    assert shadow.lines.main.token_ids == (1, 1, 1)
    assert shadow.lines.main.sequence.length == len(shadow.known) + 2
    assert shadow.pool.num_free_blocks == free
    assert not shadow.lines.has_branches
    shadow.end()


def test_a_failed_batch_leaves_the_lines_as_they_were():
    shadow = Shadow()
    shadow.commit([1, 2, 0, 1, 1])
    shadow.fresh((2, 1, 0))
    length, free = shadow.lines.main.sequence.length, shadow.pool.num_free_blocks
    lines = [shadow.lines.follow(5, assumed, 3) for assumed in ((2, 1, 0, 1), (1,))]
    assert lines[0] is shadow.lines.main
    for line in lines:
        shadow.feed(line.sequence, [0, 0])
        shadow.lines.give_up(line, length)
    assert shadow.lines.main.sequence.length == length
    assert shadow.pool.num_free_blocks == free
    shadow.check()
    shadow.end()


def test_no_room_at_the_end_of_the_reservation():
    shadow = Shadow(max_tokens=120)
    shadow.commit(list(tokens(shadow.rng, 113)))
    shadow.fresh((2, 1, 0))
    assert shadow.lines.follow(113, (2, 1, 0, 1), 5) is None
    assert shadow.lines.follow(113, (2, 1, 0, 1), 4) is not None
    assert shadow.lines.follow(113, (2, 0), 7) is None
    assert shadow.lines.follow(113, (2, 0), 6) is not None


@pytest.mark.parametrize("bug", ["keeps", "forgets", "unmarked"])
def test_the_shadow_finds_a_planted_bug(monkeypatch, bug):
    if bug == "keeps":  # entries that disagree are taken for the committed tokens'
        monkeypatch.setattr(
            "draft_service.ahead.cache_branches.CacheBranch.usable", lambda line, n, token_ids: line.sequence.length
        )
    elif bug == "forgets":  # branches that disagree are kept
        monkeypatch.setattr("draft_service.ahead.cache_branches.CacheBranches.drop_branches", lambda lines: None)
    else:  # two guesses of a batch are written to one line
        monkeypatch.setattr(
            "draft_service.ahead.cache_branches.CacheBranch.is_busy",
            property(lambda line: False, lambda line, value: None),
            raising=False,
        )
    with pytest.raises((AssertionError, ValueError, IndexError)):
        list(map(run, range(40)))
