"""Acceptance of texts: rates by position, what is usual, and when a text is not."""

from __future__ import annotations

import pytest

from gateway.pacing.text_acceptance import FIRST_GUESS, TextAcceptance


def text_of(*rounds):
    """A text whose rounds asked for so many tokens and accepted so many."""
    text = TextAcceptance()
    for num_tokens, num_accepted in rounds:
        text.observe(num_tokens, num_accepted)
    return text


def test_rates_are_those_of_each_position():
    text = text_of(*[(4, 4), (4, 1)] * 200)
    assert text.rates(4) == pytest.approx([1.0, 0.5, 1.0, 1.0], abs=0.05)
    assert text.rates(6)[4:] == [text.rates(4)[3]] * 2  # unseen positions are like the last one


def test_expected_tokens_are_one_and_the_probabilities_of_the_drafted_ones():
    text = TextAcceptance.first(64)
    assert text.expected_tokens(3, text.rates(3)) == pytest.approx([1.0, 1.7, 2.19, 2.533], abs=0.01)


def test_a_text_is_usual_until_its_rounds_are_not():
    usual = [FIRST_GUESS] * 16
    assert text_of((4, 0), (4, 0)).is_like(usual)
    assert not text_of(*[(4, 0)] * 8).is_like(usual)
    assert text_of(*[(4, 2), (4, 4), (4, 1)] * 20).is_like(usual)


def test_one_long_copy_shows_that_a_text_is_not_hard():
    text = text_of((16, 16))
    hard = [0.2] * 16
    assert not text.is_like(hard)
    assert text.expected_tokens(16, hard)[-1] > 5.0


def test_no_text_outweighs_the_others_where_they_are_pooled():
    bad = text_of(*[(4, 0)] * 500)
    good = [text_of(*[(4, 4)] * 10) for _ in range(3)]
    assert TextAcceptance.pooled([bad, *good]).rates(1)[0] > 0.7


def test_a_text_changes():
    text = text_of(*[(4, 4)] * 100, *[(4, 0)] * 100)
    assert text.rates(1)[0] < 0.1


def test_the_likelihood_tells_a_bad_round_from_a_good_text():
    good, bad = [0.95] * 16, [0.1] * 16
    assert text_of((16, 0)).log_likelihood(bad) > text_of((16, 0)).log_likelihood(good)
    assert text_of((16, 3)).log_likelihood(bad) < text_of((16, 3)).log_likelihood(good)
    assert text_of((4, 0)).log_likelihood([1.0] * 4) < text_of((4, 4)).log_likelihood([1.0] * 4) <= 0.0
