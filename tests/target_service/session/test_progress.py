"""The states of a session: what leads from each to the next."""

import random

import pytest

from target_service.session.progress import Progress, State
from target_service.stop_criteria import StopCriteria

PROMPT, MAX = 10, 40


def opened(num_multi_step=0, max_len=MAX):
    progress = Progress(PROMPT, StopCriteria(PROMPT, max_len))
    assert progress.state is State.PREFILL
    progress.open(1, num_multi_step)
    return progress


def in_round():
    progress = opened()
    progress.ask()
    assert progress.state is State.ROUND
    return progress


@pytest.mark.parametrize(("num_tokens", "state"), [(0, State.IDLE), (1, State.ENDING), (2, State.MULTI_STEP)])
def test_prefilling_may_be_followed_by_multi_step_decode(num_tokens, state):
    progress = opened(num_tokens)
    assert (progress.state, progress.num_multi_step_left) == (state, num_tokens)
    assert progress.may_be_late(PROMPT + 1) == (num_tokens > 0)


def test_a_round():
    base = PROMPT + 1
    progress = in_round()
    assert not progress.is_multi_step
    progress.take_round()
    assert progress.state is State.ROUND
    progress.commit(2, is_round=True)
    assert (progress.committed_len, progress.state) == (base + 2, State.IDLE)
    assert not progress.decode(base, 1), "what came of a round is not of multi-step decode"
    assert progress.decode(base + 2, 4)


def test_multi_step_decode_to_its_end():
    progress = opened()
    assert progress.decode(PROMPT + 1, 3)
    states = []
    for _ in range(3):
        states.append(progress.state)
        progress.commit(1, is_round=False)
    assert states == [State.MULTI_STEP, State.MULTI_STEP, State.ENDING]
    assert (progress.state, progress.num_multi_step_left) == (State.IDLE, 0)
    assert progress.decode(PROMPT + 1, 5), "everything since came of multi-step decode"
    assert progress.num_multi_step_left == 2


def test_multi_step_decode_that_is_stopped_brings_one_more_token():
    progress = opened(9)
    progress.stop_decoding()
    assert (progress.state, progress.num_multi_step_left) == (State.ENDING, 1)
    progress.run_on(1)  # the device thread had begun the token after it
    progress.commit(1, is_round=False)
    assert progress.state is State.ENDING
    progress.commit(1, is_round=False)
    assert progress.state is State.IDLE


@pytest.mark.parametrize(
    ("max_len", "state"), [(MAX, State.MULTI_STEP), (PROMPT + 4, State.ENDING), (PROMPT + 3, State.IDLE)]
)
def test_multi_step_decode_goes_on_after_a_round_of_a_stream(max_len, state):
    progress = opened(9, max_len)
    progress.ask_in_place(goes_on=True)
    progress.take_round()
    assert progress.state is State.MULTI_STEP
    progress.commit(2, is_round=True)
    assert (progress.num_multi_step_left, progress.state) == (max_len - PROMPT - 3, state)


@pytest.mark.parametrize("goes_on", [True, False])
def test_stopping_takes_what_follows_a_round(goes_on):
    progress = opened(9)
    progress.ask_in_place(goes_on=goes_on)
    assert progress.state is State.MULTI_STEP
    progress.stop_decoding()
    progress.take_round()
    assert progress.state is State.ROUND


def test_a_round_in_place_of_a_token():
    progress = opened(9)
    progress.ask_in_place(goes_on=False)
    progress.take_round()
    assert progress.state is State.ROUND


@pytest.mark.parametrize("make", [lambda: Progress(PROMPT, StopCriteria(PROMPT, MAX)), in_round])
def test_no_multi_step_decode_in_a_round_or_before_the_first_token(make):
    progress = make()
    before = progress.state
    assert not progress.decode(PROMPT + 1, 5)
    assert progress.state is before


def test_the_longest_sequence_bounds_it():
    progress = opened(max_len=PROMPT + 3)
    progress.decode(PROMPT + 1, 50)
    assert progress.num_multi_step_left == 2
    assert progress.continues(PROMPT + 2)
    assert not progress.continues(PROMPT + 3)


def test_nothing_leads_out_of_the_end():
    dice = random.Random(1)
    progress = opened(9)
    progress.end()
    for _ in range(50):
        act = dice.choice([progress.stop_decoding, lambda: progress.decode(PROMPT + 1, 5)])
        act()
        assert (progress.state, progress.num_multi_step_left) == (State.OVER, 0)
        assert not progress.continues(PROMPT)
