"""The tree of guesses at coming verdicts: probabilities, order, growth, and what a verdict leaves of it."""

import itertools
import math
import random

import pytest

from draft_service.ahead.acceptance_stats import FIRST_AFTER_ALL, FIRST_AFTER_REJECTION, AcceptanceStats, SessionStats
from draft_service.ahead.verdict_tree import FLOOR, VerdictTree
from draft_service.drafters.base import Draft

STOP = 99


@pytest.fixture(autouse=True)
def floor(monkeypatch):
    """The limit that the numbers below were worked out with."""
    monkeypatch.setattr("draft_service.ahead.verdict_tree.FLOOR", 0.05)


class Fixed:
    """AcceptanceStats that learn nothing."""

    def __init__(self, acceptance=0.7, after_rejection=(0.5, 0.2, 0.1), after_all=(0.6, 0.2)):
        self._acceptance = acceptance
        self.after_rejection = Chances(after_rejection)
        self.after_all = Chances(after_all)
        self.counted = []

    def acceptance(self, at):
        return self._acceptance[at] if isinstance(self._acceptance, tuple) else self._acceptance

    def count(self, num_accepted, num_judged):
        self.counted.append((num_accepted, num_judged))


class Chances:
    def __init__(self, probabilities):
        self.probabilities = probabilities
        self.counted = []

    def count(self, token_id, guesses):
        self.counted.append((token_id, list(guesses)))


def make_tree(stats=None, num_tokens=3, end=10**6):
    tree = VerdictTree(stats or Fixed(), frozenset({STOP}), lambda length: min(num_tokens, end - length - 1))
    tree.budget = 100
    return tree


def drafted(*token_ids, next_guesses=(), width=4):
    """A draft whose guesses at each place are the drafted token and the tens after it."""
    guesses = tuple(tuple(token + 10 * i for i in range(width)) for token in token_ids)
    return Draft(tuple(token_ids), (), guesses, tuple(next_guesses))


def opened(tree):
    return {node.path: round(node.likelihood, 6) for node in tree.undrafted if not node.assumes_next}


def follower(tree):
    return next(node for node in tree.undrafted if node.assumes_next)


def test_the_verdicts_on_a_proposal_and_their_probabilities():
    tree = make_tree()
    tree.reset_root(50, drafted(1, 2, 3))
    # a drafts accepted: 0.7^a · 0.3, then the guess; all of them: 0.7^3, then the guess that is still to be made
    assert opened(tree) == {
        (11,): 0.15,
        (21,): 0.06,
        (1, 12): 0.105,
        (1, 2, 13): 0.0735,
    }
    node = follower(tree)
    assert (node.path, node.likelihood) == ((1, 2, 3), pytest.approx(0.343 * 0.6))
    assert [n.committed_len for n in tree.undrafted] == [54, 51, 52, 53, 51]
    assert [n.num_tokens for n in tree.undrafted] == [3] * 5
    assert [n.likelihood for n in tree.undrafted] == sorted((n.likelihood for n in tree.undrafted), reverse=True)


def test_probabilities_of_all_verdicts_add_up_to_one(monkeypatch):
    monkeypatch.setattr("draft_service.ahead.verdict_tree.FLOOR", 0.0)
    tree = make_tree(Fixed(after_rejection=(0.5, 0.3, 0.2), after_all=(0.6, 0.4)))
    tree.reset_root(50, drafted(1, 2, 3))
    tree.mark_started(node := follower(tree))
    tree.add_draft(node, drafted(4, 5, 6, next_guesses=(70, 71)))
    first = sum(n.likelihood for n in tree.undrafted if n.parent is tree.root) + node.likelihood
    assert first == pytest.approx(1.0)
    below = [n for n in tree.undrafted if n.parent is node]
    # its own follower's guess is not made yet: only the best one counts for now
    assert sum(n.likelihood for n in below) == pytest.approx(node.likelihood * (1 - 0.7**3 * 0.4))


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
def test_fan_out_falls_geometrically_with_what_is_accepted(monkeypatch, acceptance):
    """With many guesses of equal steepness, the number taken per place falls by a constant."""
    monkeypatch.setattr("draft_service.ahead.verdict_tree.FLOOR", 0.002)
    steep = 0.7
    stats = Fixed(acceptance, after_rejection=tuple(0.3 * steep**m for m in range(40)))
    tree = make_tree(stats)
    tree.reset_root(50, drafted(1, 2, 3, 4, width=41))
    fan_out = [sum(len(n.token_ids) == at + 1 for n in tree.undrafted if not n.assumes_next) for at in range(4)]
    # guess m at place a is taken while acceptance^a · steep^m is above a limit: m falls by a constant per place
    step = math.log(acceptance) / math.log(steep)
    for more, less in itertools.pairwise(fan_out):
        assert abs(more - less - step) <= 1.0
    assert fan_out[0] > fan_out[-1]


def test_a_verdict_that_was_drafted_for_is_the_new_root_and_keeps_what_is_below_it():
    stats = Fixed(0.85)
    tree = make_tree(stats)
    tree.reset_root(50, drafted(1, 2, 3))
    tree.mark_started(node := follower(tree))
    tree.add_draft(node, drafted(5, 6, 7, next_guesses=(4, 8)))
    assert node.path == (1, 2, 3, 4)
    assert tree.root.next_guesses == (4, 8)
    assert opened(tree)[(1, 2, 3, 8)] == pytest.approx(0.85**3 * 0.2, abs=1e-6)
    deeper = follower(tree)
    assert deeper.path == (1, 2, 3, 4, 5, 6, 7)
    assert deeper.likelihood == pytest.approx((0.85**3 * 0.6) ** 2)
    tree.mark_started(deeper)
    tree.add_draft(deeper, drafted(9, 9, 9, next_guesses=(8,)))
    assert tree.budget == 98

    assert tree.advance((1, 2, 3, 4))
    assert stats.counted == [(3, 3)]
    assert stats.after_all.counted == [(4, [4, 8])]
    assert tree.root is node
    assert tree.num_drafted == 3
    assert deeper.path == (5, 6, 7, 8)
    assert deeper.likelihood == pytest.approx(0.85**3 * 0.6)
    likelihoods = opened(tree)
    assert likelihoods[(15,)] == pytest.approx(0.15 * 0.5)  # too unlikely before
    assert (1, 2, 3, 8) not in likelihoods
    assert tree.advance((5, 6, 7, 8))
    assert tree.root is deeper


def test_several_verdicts_at_once(monkeypatch):
    monkeypatch.setattr("draft_service.ahead.verdict_tree.FLOOR", 0.01)
    stats = Fixed(0.9)
    tree = make_tree(stats)
    tree.reset_root(50, drafted(1, 2, 3))
    tree.mark_started(node := follower(tree))
    tree.add_draft(node, drafted(5, 6, 7, next_guesses=(4,)))
    tree.mark_started(rejection := next(n for n in tree.undrafted if n.path == (1, 2, 3, 4, 15)))
    tree.add_draft(rejection, drafted(1, 1, 1))
    assert tree.advance((1, 2, 3, 4, 15))
    assert stats.counted == [(3, 3), (0, 1)]
    assert stats.after_rejection.counted == [(15, [15, 25, 35])]
    assert tree.root is rejection


@pytest.mark.parametrize("tokens", [(1, 2, 77), (8,), (1, 2, 3, 5), (1, 2, 3), (1,), (1, 2, 3, 4, 4)])
def test_a_verdict_nobody_drafted_for_empties_the_tree(tokens):
    tree = make_tree()
    tree.reset_root(50, drafted(1, 2, 3))
    tree.mark_started(node := follower(tree))
    tree.add_draft(node, drafted(5, 6, 7, next_guesses=(4,)))
    assert not tree.advance(tokens)
    assert (tree.undrafted, tree.num_drafted) == ([], 0)
    assert not tree.advance((1,))


def test_what_was_begun_and_came_to_nothing_is_left_alone_until_the_next_verdict():
    tree = make_tree(Fixed(0.9))
    tree.reset_root(50, drafted(1, 2, 3))
    tree.mark_started(node := follower(tree))
    tree.add_draft(node, drafted(5, 6, 7, next_guesses=(4,)))
    tree.mark_started(deeper := follower(tree))  # stopped, or no memory: no grow
    assert all(n is not deeper for n in tree.undrafted)
    assert tree.advance((1, 2, 3, 4))
    assert deeper in tree.undrafted


def test_nothing_is_drafted_for_after_the_last_token():
    tree = make_tree()
    tree.reset_root(50, drafted(1, STOP, 3))
    assert set(opened(tree)) == {(11,), (21,), (1, STOP + 10)}  # nothing follows an accepted stop token
    assert not any(n.assumes_next for n in tree.undrafted)
    tree.reset_root(50, Draft((1, 2), (), ((1, STOP, 12), (2, 13, STOP))))
    assert set(opened(tree)) == {(12,), (1, 13)}
    tree = make_tree(num_tokens=3, end=54)
    tree.reset_root(50, drafted(1, 2, 3))
    # the verdict (1, 2, x) leaves one token, which the target adds itself
    assert {n.path: n.num_tokens for n in tree.undrafted} == {(11,): 2, (21,): 2, (1, 12): 1}


def test_without_guesses_only_acceptance_of_all_is_drafted_for():
    tree = make_tree()
    tree.reset_root(50, Draft((1, 2, 3)))
    assert [n.assumes_next for n in tree.undrafted] == [True]
    assert not tree.advance((9,))


def test_which_nodes_a_message_makes_impossible(monkeypatch):
    monkeypatch.setattr("draft_service.ahead.verdict_tree.FLOOR", 0.01)
    tree = make_tree(Fixed(0.9))
    tree.reset_root(50, drafted(1, 2, 3))
    tree.mark_started(node := follower(tree))
    assert all(node.is_possible_after(tokens) for tokens in ((), (1, 2), (1, 2, 3, 9)))
    assert not any(node.is_possible_after(tokens) for tokens in ((1, 2, 9), (1, 2, 3, 9, 9)))
    tree.add_draft(node, drafted(5, 6, 7, next_guesses=(4,)))
    rejection = next(n for n in tree.undrafted if n.path == (1, 2, 3, 4, 15))
    assert rejection.is_possible_after((1, 2, 3, 4))
    assert rejection.is_possible_after((1, 2, 3, 4, 15))
    assert not rejection.is_possible_after((1, 2, 3, 4, 15, 1))
    assert not rejection.is_possible_after((1, 2, 3, 5))


def test_random_growth_keeps_the_books(monkeypatch):
    """Likelihoods fall along the path, open ones are sorted and not drafted, children are named by their tokens."""
    monkeypatch.setattr("draft_service.ahead.verdict_tree.FLOOR", 0.001)
    rng = random.Random(3)
    for _ in range(30):
        tree = make_tree(Fixed(rng.choice([0.4, 0.8])))
        tree.reset_root(50, drafted(*(rng.randrange(9) for _ in range(3))))
        committed = 50
        for _ in range(12):
            for node in rng.sample(tree.undrafted[:8], min(3, len(tree.undrafted[:8]))):
                tree.mark_started(node)
                if rng.random() < 0.8:
                    guesses = tuple(rng.sample(range(9), 2)) if node.assumes_next else ()
                    tree.add_draft(node, drafted(*(rng.randrange(9) for _ in range(3)), next_guesses=guesses))
            check(tree, committed)
            paths = [n.path for n in tree.root.children.values() if n.draft]
            if paths and rng.random() < 0.7:
                tokens = rng.choice(paths)
                assert tree.advance(tokens)
                committed += len(tokens)
            check(tree, committed)


def check(tree, committed):
    open_nodes = set(tree.undrafted)
    assert len(open_nodes) == len(tree.undrafted)
    assert [n.likelihood for n in tree.undrafted] == sorted((n.likelihood for n in tree.undrafted), reverse=True)
    assert all(n.draft is None and n.num_tokens == 3 for n in tree.undrafted)
    todo = [tree.root]
    assert tree.root.likelihood == pytest.approx(1.0)
    seen = set()
    while todo:
        node = todo.pop()
        seen.add(node)
        assert node.committed_len == committed + len(node.path) + node.assumes_next
        for tokens, child in node.children.items():
            assert child.parent is node
            assert child.token_ids == tokens
            assert 0 < child.likelihood <= node.likelihood
            todo.append(child)
    assert open_nodes <= seen


def test_odds_follow_the_session_and_begin_with_the_service():
    service = AcceptanceStats()
    first, second = SessionStats(service), SessionStats(service)
    assert first.acceptance(0) == second.acceptance(7) == 0.6
    for _ in range(200):
        first.count(4, 4)
    assert first.acceptance(0) > 0.95
    assert 0.6 < second.acceptance(3) < first.acceptance(3)
    assert second.acceptance(4) == 0.6
    for _ in range(50):
        second.count(1, 2)
    assert second.acceptance(0) > 0.9
    assert second.acceptance(1) < 0.2
    assert first.acceptance(1) > 0.9  # its own history outweighs the service's


def test_odds_of_guesses_are_the_services():
    service = AcceptanceStats()
    first, second = SessionStats(service), SessionStats(service)
    assert tuple(second.after_rejection.probabilities) == FIRST_AFTER_REJECTION
    assert tuple(second.after_all.probabilities) == FIRST_AFTER_ALL
    for i in range(300):
        first.after_rejection.count(5, [5, 6, 7] if i % 2 else [6, 5])
    assert second.after_rejection.probabilities[0] == pytest.approx(0.5, abs=0.02)
    assert second.after_rejection.probabilities[1] == pytest.approx(0.5, abs=0.02)
    assert second.after_rejection.probabilities[2] < 0.02
    assert FLOOR > 0
