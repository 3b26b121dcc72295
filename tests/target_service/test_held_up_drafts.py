"""A draft nearby whose proposal is held up, as by a lost packet: the target does not wait for it."""

import time

import pytest

from target_service.trip_times import TripTimes
from tests.target_service.conftest import make_prompt
from tests.target_service.test_direct_draft import K, serving_draft, session, tokens_of
from tests.target_service.test_streamed_drafts import StreamingDraft, slow  # noqa: F401 (a fixture)

NUM_TOKENS = 100
HELD_UP_S = 3.0


@pytest.fixture(autouse=True)
def near(monkeypatch):
    """Drafts are near, but not on this machine."""
    init = TripTimes.__init__
    monkeypatch.setattr(TripTimes, "__init__", lambda times, **_: init(times))
    monkeypatch.setattr("target_service.trip_times.STREAMS_FROM", 1000.0)
    monkeypatch.setattr("target_service.trip_times.WAITS_BELOW", 1000.0)


async def test_a_proposal_that_is_held_up_is_not_waited_for(start_core, serve, plain, tmp_path):
    prompt = make_prompt(5)
    text = plain(prompt, NUM_TOKENS)
    pauses = iter([*[0.0] * 8, HELD_UP_S])
    draft = StreamingDraft(prompt, text, pause=lambda: next(pauses, 0.0))
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt, max_tokens=NUM_TOKENS) as client:
            await client.use_draft(address)
            began = time.monotonic()
            verdicts = await client.rest()
            assert time.monotonic() - began < HELD_UP_S - 1.0
        assert tokens_of(client.first, verdicts) == text
        assert not client.told, "the draft is not lost"
        assert (K, 0) in draft.asked
        assert any(ahead for _, ahead in draft.asked)
