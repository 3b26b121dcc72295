"""A lookup and a model as one drafter: who drafts, and that the model catches up."""

import pytest

from draft_service.drafters import draft_model
from draft_service.drafters.window import DraftWindow
from specdec.lookup import suffix
from specdec.rules import Rule
from tests.draft_service.proposing import propose

#: Eleven tokens, then ten of them again: a long match, continued by 30, 31, …
COPY = [*range(20, 32), 5, *range(20, 30)]


@pytest.fixture(autouse=True)
def short_is_long(monkeypatch):
    monkeypatch.setattr(suffix, "LONG_MATCH", 6)


@pytest.fixture(params=["suffix", "ngram"])
def start(request, start_core):
    """A core that looks up first, then asks the model."""

    def start(**options):
        return start_core(method=(request.param, "draft_model"), k=4, prompt_lookup_max=6, **options)

    return start


def count_passes(monkeypatch):
    """A list that grows with every batch of the model: the tokens it is given."""
    fed, draft_chains = [], draft_model.draft_chains

    def counted(engine, jobs, *args):
        fed.append(sum(len(job.token_ids) for job in jobs))
        return draft_chains(engine, jobs, *args)

    monkeypatch.setattr(draft_model, "draft_chains", counted)
    return fed


async def test_a_long_match_is_looked_up_and_anything_else_is_the_models(start, spec, greedy, monkeypatch):
    async with start() as core:
        info = await core.info()
        assert info.method in ("suffix+draft_model", "ngram+draft_model")
        assert info.vocab_size == 48  # the model's: its vocabulary is checked against the target's
        session = await core.open(spec(COPY))
        fed = count_passes(monkeypatch)
        assert (await propose(session, len(COPY), [], 2)).token_ids == (30, 31)
        known = [*COPY, 30, 31]
        proposal = await propose(session, len(COPY), [30, 31], 2)
        assert proposal.token_ids == (5, 20)
        assert fed == []  # the model has not been asked yet
        known += [5, 1]
        assert (await propose(session, len(known) - 2, [5, 1], 4)).token_ids == greedy(known, 4)
        assert fed == [4]  # and has ingested all that it had missed, in one pass
        known += [20, 21, 22, 23, 24, 25]
        assert (await propose(session, len(known) - 6, known[-6:], 3)).token_ids == (26, 27, 28)
        assert len(fed) == 1
        known[-2:] = [9]  # taken back
        assert (await propose(session, len(known) - 1, [9], 4)).token_ids == greedy(known, 4)
        await session.close()


async def test_a_model_that_has_missed_much_catches_up_by_chunks(start, spec, greedy, monkeypatch):
    async with start(scheduler={"max_num_batched_tokens": 64}) as core:
        session = await core.open(spec(COPY))
        fed = count_passes(monkeypatch)
        known = list(COPY)
        for _ in range(60):
            proposal = await propose(session, len(known), [], 4)
            assert proposal.token_ids
            await propose(session, len(known), list(proposal.token_ids), 0)
            known += proposal.token_ids
        assert fed == []
        known += [1, 2, 3]
        assert (await propose(session, len(known) - 3, [1, 2, 3], 4)).token_ids == greedy(known, 4)
        assert len(fed) > 3
        assert max(fed) <= 64
        await session.close()


async def test_q_rows_come_with_what_the_model_draws_alone(start, spec):
    async with start() as core:
        session = await core.open(spec(COPY, temperature=1.0, rule=Rule.BLOCK))
        assert (await propose(session, len(COPY), [], 2)).q_rows == ()
        proposal = await propose(session, len(COPY), [1, 2, 3], 2)
        assert len(proposal.q_rows) == len(proposal.token_ids) == 2
        await session.close()


async def test_beyond_the_models_context_what_is_found_is_used(start, spec):
    async with start(model={"max_model_len": 30}) as core:
        session = await core.open(spec(COPY, max_tokens=100))
        known = [*COPY, *[1] * 6]
        assert (await propose(session, len(COPY), [1] * 6, 8)).token_ids  # 29 tokens: room for one or two
        known += [7, 8, 9]
        assert (await propose(session, len(known) - 3, [7, 8, 9], 8)).token_ids == ()
        known += [22]
        assert (await propose(session, len(known) - 1, [22], 1)).token_ids == (23,)
        await session.close()


async def test_entries_are_found_again(start, spec, greedy):
    async with start() as core:
        session = await core.open(spec(COPY))
        await session.close()
        session = await core.open(spec([*COPY, 1, 2, 3]))
        assert session.opened.num_cached_tokens > 0
        assert (await propose(session, len(COPY) + 3, [], 4)).token_ids == greedy([*COPY, 1, 2, 3], 4)
        await session.close()


async def test_a_failing_model_leaves_the_session_as_it_was(start, spec, greedy, monkeypatch):
    async with start() as core:
        session = await core.open(spec(COPY))
        with monkeypatch.context() as patch:

            def fail(*_):
                raise RuntimeError("planted")

            patch.setattr(draft_model, "draft_chains", fail)
            await session.advance(len(COPY), [1, 2, 3], 4)
            with pytest.raises(RuntimeError, match="planted"):
                await session.receive()
        assert (await propose(session, len(COPY), [1, 2, 3], 4)).token_ids == greedy([*COPY, 1, 2, 3], 4)
        await session.close()


async def test_a_chain_in_place_of_a_tree_is_no_longer_than_that_is_deep(start, spec):
    async with start(tree_top_k=2, tree_depth=2) as core:
        session = await core.open(spec(COPY))
        assert (await propose(session, len(COPY), [], 4)).token_ids == (30, 31)
        proposal = await propose(session, len(COPY), [1, 2, 3], 4)
        assert len(proposal.parents) == len(proposal.token_ids) == 4  # the model's
        await session.close()


async def test_a_window_moves_while_the_lookup_drafts(start, spec, greedy):
    window = DraftWindow(64, 4, 30)
    async with start(draft_window_size=64) as core:
        session = await core.open(spec(COPY))
        known = list(COPY)
        for _ in range(60):
            proposal = await propose(session, len(known), [], 4)
            await propose(session, len(known), list(proposal.token_ids), 0)
            known += proposal.token_ids
        known += [1, 2, 3]
        assert (await propose(session, len(known) - 3, [1, 2, 3], 4)).token_ids == greedy(window.read(known), 4)
        await session.close()
