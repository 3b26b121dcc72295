"""Recorded rounds: what a guess is, and the record of a pair that must agree."""

import pytest

from benchmarks.rounds import NUM_GUESSES, GuessOutcome, Recorder, Statistics, rank_of
from gateway.text.tokenizer import TextTokenizer
from specdec.rules import Rule
from tandem.bench.prompts import pick_prompts
from tandem.checkpoints import DRAFT, find_checkpoint


def test_a_rejected_token_is_no_guess() -> None:
    guesses = tuple(range(10, 10 + NUM_GUESSES + 1))
    assert rank_of(10, guesses, None) == 0
    assert rank_of(11, guesses, 10) == 0
    assert rank_of(guesses[-1], guesses, 10) == NUM_GUESSES - 1
    assert rank_of(guesses[-1], guesses, None) == NUM_GUESSES, "one more was asked for than is looked at"
    assert rank_of(99, guesses, 10) == NUM_GUESSES


def test_statistics_by_hand() -> None:
    texts = [[GuessOutcome(2, 0), GuessOutcome(0, 1)], [GuessOutcome(0, NUM_GUESSES), GuessOutcome(2, 3)]]
    known = Statistics.of(texts, 2)
    assert known.accepted == [0.5, 0.0, 0.5]
    assert (known.tokens_per_round, known.alpha) == (2.0, 2 / 3)
    assert known.hit_rate(1) == (0.0, 0.5)
    assert known.hit_rate(4) == (0.5, 1.0)
    assert known.likelihood(GuessOutcome(0, 1)) == 0.25
    assert known.likelihood(GuessOutcome(2, 3)) == 0.25


@pytest.fixture(scope="module")
def twins():
    """The draft as its own target."""
    folder = find_checkpoint(DRAFT)
    recorder = Recorder(folder, folder, num_threads=1)
    yield recorder
    recorder.close()


PROMPTS = pick_prompts(TextTokenizer.load(find_checkpoint(DRAFT)).encode, 6, 48)


@pytest.mark.parametrize("rule", [Rule.BLOCK, Rule.COUPLED])
def test_a_model_accepts_its_own_drafts(twins, rule) -> None:
    texts = twins.record(PROMPTS, rule, k=3, max_tokens=20, temperature=1.0)
    assert len(texts) == len(PROMPTS)
    outcomes = [outcome for text in texts for outcome in text.outcomes]
    assert all(sum(outcome.accepted + 1 for outcome in text.outcomes) >= 20 for text in texts)
    # q travels rounded and cut, so a ratio rule may reject a token now and then; shared noise never does.
    assert sum(outcome.accepted == 3 for outcome in outcomes) >= 0.8 * len(outcomes)
    if rule is Rule.COUPLED:
        assert all(outcome == GuessOutcome(3, 0) for outcome in outcomes), "the same noise picks the same bonus token"


def test_a_greedy_model_guesses_itself(twins) -> None:
    texts = twins.record(PROMPTS, Rule.BLOCK, k=4, max_tokens=10, temperature=0.0)
    assert all(outcome == GuessOutcome(4, 0) for text in texts for outcome in text.outcomes)
