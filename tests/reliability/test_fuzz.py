"""A short ``make fuzz``, and that it notices what it looks for."""

import logging

import pytest

from tests.reliability.fuzz.parts import Part
from tests.reliability.fuzz.trial import trial

#: Inputs of a part of average weight.
NUM_CASES = 40

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def running():
    with trial() as started:
        yield started


def test_no_invented_input_crashes_hangs_or_leaks(running):
    for part in running.parts:
        running.run(part, max(10, round(NUM_CASES * part.weight / 5)), seed=5)
    running.check_free()


def test_errors_in_the_log_are_noticed(running):
    async def complain(case):
        if case["max_tokens"] > 2:
            logging.getLogger("gateway").error("unexpected")

    rest = running.parts[0]
    with pytest.raises(AssertionError, match="unexpected"):
        running.run(
            Part("planted", rest.inputs.map(lambda ask: {"max_tokens": len(ask.body)}), complain, 1), 20, seed=1
        )
