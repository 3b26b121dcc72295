"""A short ``make chaos``, and that it notices what it looks for."""

import asyncio
import random

import pytest

from tests.reliability.chaos import cause_chaos, toys
from tests.reliability.load import EndedEarly, Load, Question

pytestmark = pytest.mark.e2e

QUESTION = Question("x", 4, None, 0)


def test_ten_streams_survive_faults_of_every_service_and_link(tmp_path):
    report = asyncio.run(cause_chaos(toys, seed=7, seconds=4, num_tokens=100, folder=tmp_path, num_faults=5))
    assert int(report.split(" faults")[0]) >= 5, report


@pytest.mark.parametrize(
    ("pieces", "what"),
    [
        (("ab", "ce"), "gave another text"),
        (("ab",), "gave another text"),
        ((EndedEarly("INTERNAL", "internal error", unclear=True),), "unclear error"),
        (("x", EndedEarly("UNAVAILABLE", "gone", unclear=False)), "gave another text"),
        (("ab", EndedEarly("UNAVAILABLE", "gone", unclear=False)), None),
        (("ab", "cd"), None),
    ],
)
async def test_the_load_notices(pieces, what):
    load = Load(None, [QUESTION], random.Random(0))
    load.texts = {QUESTION: "abcd"}

    async def over(question):
        for piece in pieces:
            if isinstance(piece, EndedEarly):
                raise piece
            yield piece

    await load.ask(QUESTION, over)
    assert bool(load.outcomes.wrong) == (what is not None)
    assert what is None or what in load.outcomes.wrong[0]
