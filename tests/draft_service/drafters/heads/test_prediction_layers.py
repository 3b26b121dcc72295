"""Sessions of a draft with several prediction layers, against the whole text computed again from the formulas."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.errors import InvalidRequest
from specdec.settings import DraftSettings, SpeculativeSettings
from specdec.types import HiddenStates
from tests.draft_service.conftest import make_model_settings, running
from tests.draft_service.drafters.heads.talk import Talk
from tests.draft_service.drafters.test_draft_model import chi_square, draws_after_states
from tests.engine.heads.mtp_targets import VOCAB, write_mtp_layers
from tests.engine.heads.test_mtp import MtpReference
from tests.engine.heads.test_mtp_layers import by_the_formulas

FAMILY, NUM_LAYERS = "glm4_moe", 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target, layers = write_mtp_layers(folder, FAMILY, NUM_LAYERS)
    return folder, target, [MtpReference(FAMILY, *layer) for layer in layers]


def settings_of(folder, **options) -> DraftSettings:
    return DraftSettings(
        speculative=SpeculativeSettings(method="mtp", model=str(folder), draft_tensor_parallel_size=1, **options),
        model=make_model_settings(str(folder), kv_cache_memory_bytes=1 << 20),
        target_model=str(folder),
    )


async def test_rounds_with_rejections_and_shared_prompts(made, spec) -> None:
    """The second session takes over entries of the first, and drafts what a lone one would."""
    folder, target, reference = made
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(37)]
    async with running(settings_of(folder, num_speculative_tokens=5)) as core:
        assert (await core.info()).num_speculative_tokens == NUM_LAYERS
        for name in ("a", "b"):
            talk = Talk(core, target, "mtp")
            await talk.open(spec(prompt, session_id=name))
            cached = talk.session.opened.num_cached_tokens
            assert (cached > 0) == (name == "b")
            new, start, cut = [rng.randrange(VOCAB)], cached, 5
            for k, num_accepted in ((3, 0), (5, 1), (3, 2), (2, 3), (1, 1), (3, 0), (3, 3)):
                proposal = await talk.propose(new, k, start=start, cut=cut)
                wanted = by_the_formulas(reference, talk.tokens, talk.states()[:-1])
                assert list(proposal.token_ids) == wanted[:k]
                new, start, cut = [*proposal.token_ids[:num_accepted], rng.randrange(VOCAB)], None, None
            await talk.session.close()


async def test_rows_are_what_tokens_were_drawn_from(made, spec) -> None:
    """χ² of the second token, which the second layer drafts, for each first one."""
    folder, target, _ = made
    ids = [3, 1, 4, 1, 5, 9, 2]
    with torch.no_grad():
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, :-1]
    given = HiddenStates(0, states.shape[1], "float32", states.contiguous().numpy().tobytes())
    async with running(settings_of(folder, num_speculative_tokens=2)) as core:
        counts, rows = await draws_after_states(core.drafter, spec, ids, [given], 1, is_chain=True)
    often = {first: seen for first, seen in counts.items() if seen.total() >= 40}
    assert len(often) > 1
    for first, seen in often.items():
        assert chi_square(seen, rows[first], seen.total()) > 1e-5


async def test_lost_states_are_a_gap_and_short_texts_draft(made, spec) -> None:
    folder, target, reference = made
    async with running(settings_of(folder)) as core:
        talk = Talk(core, target, "mtp")
        await talk.open(spec([7]))
        proposal = await talk.propose([8], 3, start=0)
        assert list(proposal.token_ids) == by_the_formulas(reference, [7, 8], talk.states()[:1])
        assert not (await talk.propose([9] * 9, 3, start=1, end=5)).token_ids, "the newest state is not there"
        assert len((await talk.propose([10, 11], 3)).token_ids) == 3
        await talk.session.close()


async def test_trees_are_refused(made) -> None:
    with pytest.raises(InvalidRequest, match="has 3 prediction layers, which draft a token each and no tree"):
        async with running(settings_of(made[0], tree_top_k=2, tree_depth=2)):
            pass
