"""Prompt lookup against a brute-force search."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.lookup.ngram import LONGEST_MATCH, MAX_INDEXED_TOKENS, NgramIndex


def brute_force(tokens, k, min_n, max_n, begin=0):
    """Longest n first, then the most recent earlier place; past the end of the text the copy continues by itself."""
    for n in range(max_n, min_n - 1, -1):
        suffix = tokens[-n:]
        if len(suffix) < n:
            continue
        for end in range(len(tokens) - 1, max(n, begin) - 1, -1):
            if tokens[end - n : end] == suffix:
                text = list(tokens)
                for i in range(k):
                    text.append(text[end + i])
                return tuple(text[len(tokens) :])
    return ()


def look_up(index, k):
    index.ingest(index.num_pending)
    return index.continuation(k).token_ids


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 3), max_size=6), st.integers(0, 7)), max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_equals_brute_force_after_any_history(prompt, moves, min_n, more):
    max_n = min_n + more
    index, tokens = NgramIndex(prompt, min_n, max_n), list(prompt)
    assert look_up(index, 5) == brute_force(tokens, 5, min_n, max_n)
    for drop, new, chunk in moves:
        keep = max(0, len(tokens) - drop)
        tokens[keep:] = new
        index.replace(keep, new)
        index.ingest(min(chunk, index.num_pending))  # prompts come in chunks, and may be taken back midway
        assert look_up(index, 5) == brute_force(tokens, 5, min_n, max_n)


def test_long_random_texts_equal_brute_force():
    rng = random.Random(1)
    for vocabulary in (2, 5, 50):
        tokens = [rng.randrange(vocabulary) for _ in range(400)]
        index = NgramIndex(tokens[:100], 1, 4)
        for end in range(100, 400, 3):
            index.replace(end - 3 if end > 100 else 100, tokens[max(100, end - 3) : end])
            assert look_up(index, 8) == brute_force(tokens[:end], 8, 1, 4)


def test_the_beginning_of_a_long_text_is_not_indexed(monkeypatch):
    monkeypatch.setattr("specdec.lookup.ngram.MAX_INDEXED_TOKENS", 60)
    rng = random.Random(2)
    tokens = [rng.randrange(6) for _ in range(200)]
    index, begin = NgramIndex(tokens, 1, 4), 140
    assert index.num_pending == 60
    for keep in (200, 180, 150, 140, 120, 90):
        new = [rng.randrange(6) for _ in range(10)]
        tokens[keep:] = new
        index.replace(keep, new)
        begin = min(begin, keep)
        assert look_up(index, 6) == brute_force(tokens, 6, 1, 4, begin)
    monkeypatch.undo()
    index = NgramIndex([1, 2, 3, *[0] * MAX_INDEXED_TOKENS, 1, 2], 2, 4)
    assert (look_up(index, 1), index.num_pending) == ((), 0)


def test_the_brute_force_would_notice_an_index_of_the_text_itself():
    """Twin of the tests above: an index that finds the end of the text differs from brute force."""
    tokens = [1, 2, 3, 1, 2]
    index = NgramIndex([*tokens, 9], 1, 2)
    index.ingest(index.num_pending)
    del index.token_ids[-1]  # planted: the n-gram at the very end stays
    with pytest.raises((AssertionError, ZeroDivisionError)):
        assert index.continuation(2).token_ids == brute_force(tokens, 2, 1, 2)


def test_longest_wins_over_most_recent():
    index = NgramIndex([1, 2, 3, 9, 9, 3, 7, 1, 2, 3], 1, 3)
    assert look_up(index, 2) == (9, 9)
    index = NgramIndex([1, 2, 3, 9, 9, 3, 7, 1, 2, 3], 1, 1)
    assert look_up(index, 2) == (7, 1)


def test_a_match_is_as_long_as_what_stands_in_both_places():
    index = NgramIndex([7, 1, 2, 3, 4, 5, 9, 8, 1, 2, 3, 4, 5], 1, 3)
    assert (look_up(index, 1), index.continuation(1).length) == ((9,), 5)
    index = NgramIndex([1, 2, 3, 1, 2, 3], 1, 2)
    index.ingest(6)
    assert index.continuation(1).length == 3
    index = NgramIndex([5] * 200, 1, 4)
    index.ingest(200)
    assert index.continuation(1).length == LONGEST_MATCH


def test_a_period_fills_the_proposal():
    assert look_up(NgramIndex([5, 6, 7, 6, 7], 1, 4), 6) == (6, 7, 6, 7, 6, 7)


def test_cost_does_not_grow_with_the_text():
    def seconds(length):
        rng = random.Random(0)
        index = NgramIndex([rng.randrange(1000) for _ in range(length)], 1, 4)
        index.ingest(index.num_pending)
        best = float("inf")
        for _ in range(20):
            start = time.thread_time()
            for _ in range(50):
                index.replace(len(index.token_ids), [rng.randrange(1000)])
                index.ingest(1)
                index.continuation(4)
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(30_000) < 20 * seconds(500)
