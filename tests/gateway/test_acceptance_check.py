"""A draft that reads other states than it was trained on is found, and the line names its layer ids."""

import pytest

from gateway.acceptance_check import StartUpCheck
from tests.gateway.fake_draft import FakeDraft, FakeDraftSession, draft_info
from tests.gateway.fakes import states_of


class ReadingDraft(FakeDraft):
    """Drafts well where the states are those of the layers that it was trained on."""

    def __init__(self, named, trained, method, **options):
        values = {"vocab_size": 400, "tokenizer_size": 400, "method": method, "hidden_state_layers": named}
        super().__init__(quality=0.0, info=draft_info(**values), **options)
        self.trained = trained

    async def open(self, spec):
        await self.work("open", self.open_latency_s)
        return ReadingSession(self, spec)


class ReadingSession(FakeDraftSession):
    async def advance(self, base_len, token_ids, num_draft_tokens, hidden_states=(), stream_tokens=0):
        await super().advance(base_len, token_ids, num_draft_tokens, ())
        for block in hidden_states:
            right = states_of(self.token_ids, block.start, block.end, self.backend.trained)
            self.backend.quality = float(block == right)


OFF = "Likely cause: its layer ids, which are off by one. On the hidden states {}, not {},"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("draft_model", (-1, 4), (-1, 4)), None),
        (("suffix+draft_model", (6, 3), (-1, 4)), OFF),  # of six layers
        (("draft_model", (0, 5), (-1, 4)), OFF),
        (("draft_model", (-1, 4), (-3, 3)), OFF.replace("{}", "[-2, 3]", 1)),
        (("draft_model", (5, 3), (6, 4)), OFF),
        (("draft_model", (-1, 4), (9,)), "Usual causes: the head was trained for another target"),
        (("eagle3", (0, 2, 4), (1, 3, 5)), OFF),
        (("eagle", (-1,), (-2,)), "Likely cause: the norm of its state. On the state before the final norm"),
    ],
)
async def test_layer_ids_that_are_wrong_are_named(backends, make_generation, caplog, case, words):
    method, named, trained = case
    script = backends[0][0].next_token
    backends[1][:] = [ReadingDraft(named, trained, method, next_token=script)]
    check = StartUpCheck(make_generation())
    await check.run()
    await check.run()
    lines = [line for line in caplog.messages if "SELF-TEST" in line]
    assert len(lines) == (words is not None)
    shown = words and words.format(*([*each] for each in (trained, named)[-words.count("{}") :]))
    assert all(shown in line for line in lines)


async def test_drafts_without_states_are_not_looked_into(backends, make_generation):
    backends[1][0].quality = 0.0
    await StartUpCheck(make_generation()).run()
    assert not backends[1][0].num_opened
