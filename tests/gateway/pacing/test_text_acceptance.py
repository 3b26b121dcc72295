"""Acceptance of texts: rates by position, what is usual, and what a text's own rounds change."""

from __future__ import annotations

import pytest

from gateway.pacing.text_acceptance import FIRST_GUESS, TextAcceptance, expected_tokens, usual_rates


def text_of(*rounds):
    """A text whose rounds asked for so many tokens and accepted so many."""
    text = TextAcceptance()
    for num_tokens, num_accepted in rounds:
        text.observe(num_tokens, num_accepted)
    return text


def test_rates_are_those_of_each_position():
    text = text_of(*[(4, 4), (4, 1)] * 200)
    assert text.own_rates(4) == pytest.approx([1.0, 0.5, 1.0, 1.0], abs=0.05)
    assert text.own_rates(6)[4:] == [text.own_rates(4)[3]] * 2  # unseen positions are like the last one


def test_expected_tokens_are_one_and_the_probabilities_of_the_drafted_ones():
    assert TextAcceptance().own_rates(3) == [FIRST_GUESS] * 3
    assert expected_tokens([0.7, 0.7, 0.7]) == pytest.approx([1.0, 1.7, 2.19, 2.533])


def test_a_text_is_usual_until_its_rounds_are_not():
    usual = [0.7, 0.8, 0.9, 0.9]
    assert TextAcceptance().rates(usual) == usual
    assert TextAcceptance().rates([]) == []
    assert text_of((4, 0)).rates(usual)[0] > 0.6
    assert text_of(*[(4, 0)] * 16).rates(usual)[0] < 0.4
    assert text_of(*[(4, 4)] * 16).rates(usual)[0] > 0.8


def test_bad_rounds_say_something_of_every_position():
    """Later positions of rounds that end early are never seen; they are no better than the first ones."""
    usual = [0.95] * 16
    assert expected_tokens(text_of(*[(16, 0)] * 12).rates(usual))[-1] < 2.5


def test_one_long_copy_shows_that_a_text_is_not_hard():
    usual = [0.2] * 16
    assert expected_tokens(text_of((16, 16)).rates(usual))[-1] > 1.9 * expected_tokens(usual)[-1]


def test_bad_texts_do_not_say_what_is_usual_while_there_are_good_ones():
    bad, good = [text_of(*[(4, 0)] * 500)] * 3, [text_of(*[(4, 4)] * 10)] * 3
    assert usual_rates([*bad, *good], 4)[0] > 0.9
    assert usual_rates([*bad, *bad, *good], 4)[0] == pytest.approx(0.75, abs=0.05)  # four of nine count
    assert usual_rates(bad, 4)[0] < 0.05
    assert usual_rates(bad[:1], 4)[0] < 0.05


def test_a_text_changes():
    text = text_of(*[(4, 4)] * 100, *[(4, 0)] * 100)
    assert text.own_rates(1)[0] < 0.1
