"""Drafters without a model over one session's own text."""

import pytest

from specdec.errors import StaleSession
from specdec.rules import Rule
from tests.draft_service.proposing import propose


@pytest.mark.parametrize(
    ("method", "k", "taken_back"), [("ngram", 5, ([1, 2], (9, 1, 5, 1, 2))), ("suffix", 32, ([1, 5], (1, 5)))]
)
async def test_lookups_draft_over_prompt_and_output(start_core, spec, method, k, taken_back):
    async with start_core(method, k=k) as core:
        info = await core.info()
        assert (info.method, info.vocab_size, info.num_speculative_tokens) == (method, 0, k)
        session = await core.open(spec([1, 2, 3, 4], temperature=1.0, rule=Rule.TOKEN))
        proposal = await propose(session, 4, [1, 2], 2)
        assert (proposal.base_len, proposal.token_ids, proposal.q_rows) == (6, (3, 4), ())
        assert (await propose(session, 6, [9], 4)).token_ids == ()
        assert (await propose(session, 7, [1, 2, 9, 1], 3)).token_ids == (2, 9, 1)
        tokens, drafted = taken_back
        assert (await propose(session, 7, [1, 5, *tokens], 64)).token_ids == drafted
        with pytest.raises(StaleSession):
            await propose(session, 99, [1], 2)
        await session.close()


async def test_no_drafter_proposes_nothing(start_core, spec):
    async with start_core("none") as core:
        session = await core.open(spec([1, 2, 1, 2]))
        proposal = await propose(session, 4, [1], 4)
        assert (proposal.base_len, proposal.token_ids) == (5, ())
        await session.close()
