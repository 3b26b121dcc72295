"""Where a text stands in its prediction, whatever is changed, gone or new."""

import pytest

from specdec.lookup.prediction import PredictionLookup
from specdec.params import SamplingParams
from specdec.types import SessionSpec

PREDICTION = list(range(100, 200))


def follow(output, prediction=PREDICTION, at_once=1000):
    """A text after this output."""
    lookup = PredictionLookup(lambda: prediction)
    text = lookup.open(SessionSpec(session_id="s", epoch=1, token_ids=(1, 2), prompt_len=2, params=SamplingParams()))
    for token in output:
        text.replace(len(text.token_ids), [token])
        while text.num_pending:
            text.ingest(min(at_once, text.num_pending))
    return lookup.look_up(text, 4)


@pytest.mark.parametrize(("output", "expected", "length"), [
    ([100], [101, 102, 103, 104], 1),
    (range(100, 110), [110, 111, 112, 113], 10),
    ([*range(100, 110), 5], [111, 112, 113, 114], 0),  # in place of 110
    ([*range(100, 110), 5, 111], [112, 113, 114, 115], 1),
    ([*range(100, 110), 5, 6, 7, 110], [111, 112, 113, 114], 1),  # new before 110
    ([*range(100, 110), 115], [116, 117, 118, 119], 1),  # five are gone
    ([*range(100, 110), *range(160, 163)], [163, 164, 165, 166], 3),  # fifty are gone
    ([*range(100, 150), 120, 121, 122], [123, 124, 125, 126], 3),  # back
    ([7, 8, 9], [103, 104, 105, 106], 0),
    (range(100, 200), [], 64),
    (range(100, 198), [198, 199], 64),
])  # fmt: skip
@pytest.mark.parametrize("at_once", [1, 1000])
def test_what_is_expected_next(output, expected, length, at_once):
    match = follow(output, at_once=at_once)
    assert (list(match.token_ids), match.length, match.is_predicted) == (expected, length, True)


def test_of_equal_places_the_nearest_counts():
    prediction = [1, 2, 3, 10, 1, 2, 3, 20, *range(50, 90), 1, 2, 3, 30]
    assert follow([7, 1, 2, 3], prediction).token_ids[0] == 10
    assert follow([1, 2, 3, 10, 1, 2, 3, 20, *range(50, 88), 7, 8, 1, 2, 3], prediction).token_ids == (30,)


@pytest.mark.parametrize("first", [0xD7FE, 0xFEFF, 0x10FFF0])
def test_tokens_whose_numbers_are_no_characters(first):
    """Surrogates, a byte order mark, and the last ones there are."""
    prediction = [first, first + 1, first + 2, *range(50, 90), first + 5, first + 4, first + 3, 30]
    assert follow([7, 8, first + 5, first + 4, first + 3], prediction).token_ids == (30,)
    assert follow([7, first + 1], prediction).token_ids == (first + 2, 50, 51, 52)


def test_tokens_that_were_committed_together_are_read_like_those_that_came_one_by_one():
    edited = [*PREDICTION[:20], *range(500, 530), *PREDICTION[40:60]]
    lookup = PredictionLookup(lambda: PREDICTION)
    text = lookup.open(SessionSpec(session_id="s", epoch=1, token_ids=(1,), prompt_len=1, params=SamplingParams()))
    text.replace(1, edited)
    text.ingest(text.num_pending)
    assert (text.num_pending, lookup.look_up(text, 4)) == (0, follow(edited))
    assert lookup.look_up(text, 4).token_ids == (160, 161, 162, 163)


def test_an_output_that_is_replaced_is_read_again():
    lookup = PredictionLookup(lambda: PREDICTION)
    text = lookup.open(SessionSpec(session_id="s", epoch=1, token_ids=(1,), prompt_len=1, params=SamplingParams()))
    text.replace(1, [100, 101, 5])
    text.ingest(text.num_pending)
    text.replace(2, [101, 102])
    text.ingest(text.num_pending)
    assert lookup.look_up(text, 1).token_ids == (103,)
