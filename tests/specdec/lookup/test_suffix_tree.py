"""Suffix trees against a brute-force counter of every run of tokens."""

import random
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.lookup.suffix_tree import SuffixCache, SuffixText

TOKENS = st.integers(0, 3)


class BruteForce:
    """How often every run of up to ``depth`` tokens stands in some texts, and where it does last."""

    def __init__(self, texts, depth):
        self.count, self.newest = defaultdict(int), {}
        self.depth = depth
        position = 0
        for text in texts:
            for start in range(len(text)):
                for end in range(start + 1, min(len(text), start + depth) + 1):
                    run = tuple(text[start:end])
                    self.count[run] += 1
                    self.newest[run] = position + start
            position += len(text)

    def best(self, text, k, factor, min_prob):
        """Score of the best path after a text, its tokens, and how many tokens have matched at most."""
        best, longest = (0.0, ()), 0
        for m in range(1, min(self.depth, len(text))):
            run = tuple(text[-m:])
            if run not in self.newest:
                break
            draft, prob, score = [], 1.0, 0.0
            while len(draft) < min(k, int(m * factor + 1e-6)):
                if len(run) == self.depth:
                    run = run[-max(1, self.depth // 2) :]
                children = [(self.count[child], self.newest[child]) for child in self.children(run)]
                if not children:
                    break
                count, newest = max(children)
                prob *= count / self.count[run]
                if prob < min_prob:
                    break
                (run,) = [child for child in self.children(run) if self.newest[child] == newest]
                draft.append(run[-1])
                score += prob
            if draft:
                best, longest = max((score, tuple(draft)), best, key=lambda path: path[0]), m
        return *best, longest

    def children(self, run):
        return [(*run, token) for token in range(6) if (*run, token) in self.newest]


def expected(text, outputs, depth, *, k, factor=1.0, min_prob=0.1):
    """What is to be drafted, and how many tokens have matched."""
    own = BruteForce([text], depth).best(text, k, factor, min_prob)
    past = BruteForce(outputs, depth).best(text, k, factor, min_prob)
    _, draft, _ = past if past[0] > own[0] else own
    return draft, max(own[2], past[2])


def look_up(text, cache, k, *, factor=1.0, min_prob=0.1):
    text.ingest(text.num_pending)
    match = text.look_up(k, cache, max_spec_factor=factor, min_token_prob=min_prob)
    return match.token_ids, match.length


def repetitive(texts):
    """Random texts, and texts that repeat a short run."""
    return st.one_of(texts, st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.integers(1, 40)).map(_repeated))


def _repeated(pair):
    run, length = pair
    return (run * length)[:length]


@settings(max_examples=300, deadline=None)
@given(
    repetitive(st.lists(TOKENS, min_size=1, max_size=40)),
    st.lists(st.tuples(st.integers(0, 40), st.lists(TOKENS, max_size=8)), max_size=8),
    st.integers(1, 8),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)
def test_a_text_equals_brute_force_after_any_history(prompt, moves, depth, factor, min_prob):
    """Tokens come in chunks, and are taken back, few or many."""
    text, tokens = SuffixText(prompt, depth), list(prompt)
    for drop, new in [(0, []), *moves]:
        keep = max(0, len(tokens) - drop)
        tokens[keep:] = new
        text.replace(keep, new)
        text.ingest(text.num_pending // 2)
        draft = look_up(text, None, 5, factor=factor, min_prob=min_prob)
        assert draft == expected(tokens, [], depth, k=5, factor=factor, min_prob=min_prob)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(repetitive(st.lists(TOKENS, min_size=1, max_size=20)), st.integers(0, 30)), min_size=1, max_size=10
    ),
    repetitive(st.lists(TOKENS, min_size=1, max_size=12)),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(5, 60),
)
def test_eviction_leaves_what_was_never_evicted(outputs, prompt, depth, max_requests, max_tokens):
    """After any additions, settled in steps of any size, the tree counts the newest outputs and nothing else."""
    cache = SuffixCache(depth, max_requests, max_tokens)
    for output, budget in outputs:
        cache.add(output)
        cache.apply_pending(budget)
    while not cache.is_up_to_date:
        cache.apply_pending(7)
    kept = [output for output, _ in outputs][-max_requests:]
    while sum(map(len, kept)) > max_tokens:
        del kept[0]
    brute = BruteForce(kept, depth)
    runs = {
        tuple(output[i:j]) for output, _ in outputs for i in range(len(output)) for j in range(i + 1, i + depth + 1)
    }
    assert all(cache.count(run) == brute.count.get(run, 0) for run in runs if len(run) <= depth)
    size = cache.size
    assert (size.num_requests, size.num_tokens) == (len(kept), sum(map(len, kept)))
    assert size.num_nodes <= 2 * size.num_tokens
    assert look_up(SuffixText(prompt, depth), cache, 6) == expected(prompt, kept, depth, k=6)


def test_one_output_too_many_would_be_noticed():
    """Twin of the test above: a cache that evicts one request too late."""
    outputs = [[1, 2, 3], [1, 2, 0], [1, 2, 0]]
    cache = SuffixCache(4, 3, 100)  # planted: 3 instead of 2
    for output in outputs:
        cache.add(output)
        cache.apply_pending(100)
    with pytest.raises(AssertionError):
        assert cache.count([1, 2]) == BruteForce(outputs[-2:], 4).count[1, 2]


def test_longer_matches_win_ties_and_the_text_itself_wins_over_past_outputs():
    cache = SuffixCache(24, 4, 100)
    cache.add([7, 8, 1, 2, 9])
    cache.apply_pending(100)
    assert look_up(SuffixText([5, 8, 1, 2], 24), cache, 4) == ((9,), 3)
    # Once in the text after (1, 2), and that run stands at its end too: probability 1/2; in the past it is 1.
    assert look_up(SuffixText([1, 2, 3, 0, 1, 2], 24), cache, 1)[0] == (9,)
    cache.add([1, 2, 4])
    cache.apply_pending(100)  # now 1/2 each
    assert look_up(SuffixText([1, 2, 3, 0, 1, 2], 24), cache, 1)[0] == (3,)


def test_a_draft_is_as_long_as_its_match():
    run = list(range(100, 140))
    assert look_up(SuffixText([*run, 1, *run[:5]], 24), None, 32) == (tuple(run[5:10]), 5)
    assert look_up(SuffixText([*run, 1, *run[:5]], 24), None, 32, factor=2.0) == (tuple(run[5:15]), 5)
    assert look_up(SuffixText([*run, 1, *run[:9]], 16), None, 32) == (tuple(run[9:18]), 9), "deeper than the tree"
    assert look_up(SuffixText([*run, 1, *run[:20]], 24), None, 7) == (tuple(run[20:27]), 20)
    assert look_up(SuffixText([*run, 1, *run[:20]], 64), None, 32) == ((*run[20:40],), 20)


def test_improbable_tokens_are_not_drafted():
    text = [1, 2, 1, 3, 1, 4, 1]  # 1 stands four times and is followed by each of three once
    assert look_up(SuffixText(text, 24), None, 4, min_prob=0.25) == ((4,), 1)
    assert look_up(SuffixText(text, 24), None, 4, min_prob=0.26) == ((), 0)


def test_all_token_ids_fit():
    assert look_up(SuffixText([2**32 - 1, 2**32 - 2, 0, 2**32 - 1], 24), None, 4)[0] == (2**32 - 2,)


def test_memory_is_bounded_under_many_requests():
    """Ten thousand outputs are kept; as many more again take nothing."""
    rng = random.Random(3)
    blocks = [[rng.randrange(4000) for _ in range(rng.randrange(1, 12))] for _ in range(3000)]
    cache = SuffixCache(24, 10_000, 2_000_000)
    sizes = []
    for count in range(1, 20_001):
        cache.add([token for _ in range(8) for token in rng.choice(blocks)])
        cache.apply_pending(10**6)
        if count % 10_000 == 0:
            sizes.append(cache.size)
    first, second = sizes
    assert (first.num_requests, second.num_requests) == (10_000, 10_000)
    assert first.num_nodes <= 2 * first.num_tokens
    assert second.num_bytes <= 1.1 * first.num_bytes
    assert second.num_bytes <= 300 * second.num_tokens


def test_cost_does_not_grow_with_text_and_past():
    def seconds(length):
        rng = random.Random(0)
        tokens = [rng.randrange(300) for _ in range(length)]
        cache = SuffixCache(24, 10**6, 10**9)
        cache.add(tokens)
        cache.apply_pending(10**9)
        text = SuffixText(tokens, 24)
        text.ingest(length)
        best = float("inf")
        for _ in range(20):
            start = time.thread_time()
            for _ in range(50):
                text.replace(len(text.token_ids), [rng.randrange(300)])
                look_up(text, cache, 8)
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(200_000) < 20 * seconds(500)


def test_texts_of_different_threads_do_not_meet():
    """Every thread may have a draft service of its own."""

    def repeat(first):
        text = SuffixText([first, first + 1, first], 24)
        return all(look_up(text, None, 8)[0] == (first + 1,) for _ in range(3000))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(0, 400, 100)))
