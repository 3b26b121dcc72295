"""The branches of a session in the cache, against a shadow of what every branch must hold."""

import random

import numpy as np
import pytest

from draft_service.ahead.cache_branches import CacheBranches
from engine.kv_pool import KVPool

BLOCK = 4


class Shadow:
    """Feeds branches as the engine does, with token ids in place of keys and values."""

    def __init__(self, total_blocks=64, seed=0):
        self.rng = random.Random(seed)
        self.pool = KVPool(total_blocks, BLOCK)
        self.cache = np.zeros((total_blocks + 1, BLOCK), dtype=np.int64)
        self.cached = CacheBranches(self.pool, self.pool.open_empty())
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
        self.cached.cut(len(self.known) - 1)
        main = self.cached.main
        assert self.pool.grow(main.sequence, len(self.known) + len(drafted))
        self.feed(main.sequence, [*self.known[main.sequence.length :], *drafted[:-1]])
        main.token_ids = tuple(drafted)

    def ahead(self, guesses):
        """Draft for several guesses in one batch; each is the assumed tokens and the drafted ones."""
        running = []
        for assumed, drafted in guesses:
            branch = self.cached.branch_for(len(self.known), assumed, len(drafted))
            if branch is not None:
                text = [*self.known, *assumed]
                self.reused += branch.sequence.length - (len(self.known) - 1)
                running.append((branch, text[branch.sequence.length :], assumed, drafted))
        assert len({id(branch) for branch, *_ in running}) == len(running)
        for branch, fed, assumed, drafted in running:
            assert len(fed) >= 1
            self.feed(branch.sequence, [*fed, *drafted[:-1]])
            branch.is_busy = False
            branch.token_ids = (*assumed, *drafted)
        return len(running)

    def commit(self, token_ids):
        self.cached.commit(len(self.known), token_ids)
        self.known += token_ids

    def check(self):
        for source, target in self.pool.take_copies():
            self.cache[target] = self.cache[source]
        for branch in (self.cached.main, *self.cached.branches):
            length = branch.sequence.length
            assert self.read(branch.sequence) == [*self.known, *branch.token_ids][:length]
            assert length <= len(self.known) + len(branch.token_ids)
            assert not branch.sequence.released
        held = {int(b) for branch in (self.cached.main, *self.cached.branches) for b in branch.sequence.blocks}
        assert len(held) == self.pool.used_blocks

    def end(self):
        self.cached.cut(len(self.known))
        self.feed(self.cached.main.sequence, [])
        assert self.read(self.cached.main.sequence) == self.known[: self.cached.main.sequence.length]
        assert self.pool.used_blocks == len(self.cached.main.sequence.blocks)
        self.pool.release(self.cached.main.sequence)
        assert self.pool.used_blocks == 0


def tokens(rng, count):
    return tuple(rng.randrange(3) for _ in range(count))


def run(seed, total_blocks=64):
    """A session: proposals, guesses at verdicts on them and on each other, and verdicts, drafted for or not."""
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


def test_every_branch_holds_the_tokens_it_stands_for():
    served = reused = 0
    for seed in range(80):
        more, entries = run(seed)
        served, reused = served + more, reused + entries
    assert served > 2000
    assert reused > 2 * served  # most of what is assumed need not be fed again


def test_without_free_blocks_guesses_only_extend_branches():
    served = sum(run(seed, total_blocks=31)[0] for seed in range(40))
    plenty = sum(run(seed)[0] for seed in range(40))
    assert 0 < served < plenty


def test_a_guess_that_extends_a_branch_takes_no_block():
    shadow = Shadow()
    shadow.commit([1, 2, 0, 1, 1])
    shadow.fresh((2, 1, 0))
    used = shadow.pool.used_blocks
    assert shadow.ahead([((2, 1, 0, 1), (1, 1, 1))]) == 1
    assert not shadow.cached.branches
    assert shadow.ahead([((2, 1, 0, 1, 1, 1, 1, 2), (1, 1, 1))]) == 1
    assert shadow.pool.used_blocks == used + 2, "at the end of the sequence"
    length = shadow.cached.main.sequence.length
    shadow.commit([2, 1, 0, 1])
    assert shadow.cached.main.sequence.length == length  # nothing is lost
    shadow.commit([1, 0])
    assert shadow.cached.main.sequence.length == len(shadow.known) - 1
    shadow.end()


def test_a_branch_costs_few_blocks_and_is_adopted_without_a_copy():
    shadow = Shadow()
    shadow.commit(list(tokens(shadow.rng, 41)))
    shadow.fresh((2, 1, 0))
    used = shadow.pool.used_blocks
    assert shadow.ahead([((2, 0), (1, 1, 1)), ((0,), (2, 2, 2)), ((2, 1, 1), (0, 0, 0))]) == 3
    assert shadow.pool.used_blocks - used <= 3 * 2
    shadow.check()
    shadow.commit([2, 0])
    assert shadow.pool.take_copies() == []
    assert shadow.cached.main.token_ids == (1, 1, 1)
    assert shadow.cached.main.sequence.length == len(shadow.known) + 2
    assert shadow.pool.used_blocks == len(shadow.cached.main.sequence.blocks) <= used + 1
    assert not shadow.cached.branches
    shadow.end()


def test_a_failed_batch_leaves_the_branches_as_they_were():
    shadow = Shadow()
    shadow.commit([1, 2, 0, 1, 1])
    shadow.fresh((2, 1, 0))
    length, used = shadow.cached.main.sequence.length, shadow.pool.used_blocks
    branches = [shadow.cached.branch_for(5, assumed, 3) for assumed in ((2, 1, 0, 1), (1,))]
    assert branches[0] is shadow.cached.main
    for branch in branches:
        shadow.feed(branch.sequence, [0, 0])
        shadow.cached.undo(branch, length)
    assert shadow.cached.main.sequence.length == length
    assert shadow.pool.used_blocks == len(shadow.cached.main.sequence.blocks) == used + 1
    shadow.check()
    shadow.end()


@pytest.mark.parametrize("bug", ["keeps", "forgets", "unmarked"])
def test_the_shadow_finds_a_planted_bug(monkeypatch, bug):
    if bug == "keeps":  # entries that disagree are taken for the committed tokens'
        monkeypatch.setattr(
            "draft_service.ahead.cache_branches.CacheBranch.num_usable",
            lambda branch, n, token_ids: branch.sequence.length,
        )
    elif bug == "forgets":  # branches that disagree are kept
        monkeypatch.setattr("draft_service.ahead.cache_branches.CacheBranches.drop_branches", lambda branches: None)
    else:  # two guesses of a batch are written to one branch
        monkeypatch.setattr(
            "draft_service.ahead.cache_branches.CacheBranch.is_busy",
            property(lambda branch: False, lambda branch, value: None),
            raising=False,
        )
    with pytest.raises((AssertionError, ValueError, IndexError)):
        list(map(run, range(40)))
