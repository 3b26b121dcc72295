"""A head that reads a window of the text: sinks and the newest entries."""

import random

import pytest

from tests.draft_service.drafters.heads.talk import NATIVE, PROMPT, K, Talk, greedy, others
from tests.engine.heads.block_files import BlockReference


def windowed(model, tokens, states, read, positions):
    """Drafting on the states of the positions ``read``, rotated as if they were ``positions``."""
    if isinstance(model, BlockReference):
        return model.behind(tokens[-1], [states[i] for i in read], positions)
    known = [tokens[i + 1] for i in read], [model.fuse(states[i]) for i in read]

    def step(drafted):
        (ids, features), places = ([*part] for part in known), [*positions]
        for token in drafted:
            features.append(model.outputs(ids, features, places)[-1])
            ids.append(token)
            places.append(places[-1] + 1)
        return model.logits(model.outputs(ids, features, places)[-1])

    return step


WINDOW = {"draft_window_size": 24, "draft_sink_size": 3}


TREE = {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"}


@pytest.mark.parametrize(
    ("method", "tree"),
    [*((method, {}) for method in NATIVE), ("eagle", TREE), ("eagle3", TREE)],
)
@pytest.mark.parametrize("in_torch", [True, False])
async def test_a_window(start, spec, formula, method, tree, in_torch):  # noqa: PLR0917
    """Whole blocks of 4 entries are dropped, 8 at a time; what stays keeps its position. No more blocks are used."""
    rng = random.Random(3)
    model = formula.models[method]
    async with start(method, speculative=WINDOW | tree, block_size=4, enforce_eager=in_torch) as core:
        talk = Talk(core, formula.target, method)
        await talk.open(spec(PROMPT))
        proposal, skipped = await talk.propose([7], 3, start=0), set()
        while len(talk.tokens) < 70:
            new = [*proposal.token_ids[: rng.randrange(4)], *others(rng, rng.choice((1, 1, 9)))]
            proposal = await talk.propose(new, 3)
            length = len(talk.tokens)
            num_skipped = max(0, -(-(length - 24) // 8) * 8)
            read = [i for i in range(length - 1) if i < 4 or i >= 4 + num_skipped]
            assert talk.session.state.known.positions(0, len(read)) == read
            if num_skipped not in skipped:
                step = windowed(model, talk.tokens, talk.states(), read, read)
                assert proposal.token_ids == greedy(step, 3), length
            skipped.add(num_skipped)
            assert (await core.load()).used_blocks <= (24 + K + 4 + 3) // 4 + bool(tree)
        assert len(skipped) > 4
        await talk.session.close()


@pytest.mark.parametrize("length", [24, 25, 32, 33, 61])
async def test_a_window_of_a_session_that_is_opened_late(start, spec, formula, length):
    """States of positions that are not read are not ingested."""
    model, rng = formula.models["eagle3"], random.Random(4)
    async with start("eagle3", speculative=WINDOW, block_size=4) as core:
        talk = Talk(core, formula.target, "eagle3")
        await talk.open(spec(others(rng, length - 1)))
        proposal = await talk.propose([7], K, start=0, cut=7)
        num_skipped = max(0, -(-(length - 24) // 8) * 8)
        read = [i for i in range(length - 1) if i < 4 or i >= 4 + num_skipped]
        assert talk.session.state.known.positions(0, talk.session.state.known.num_entries) == read
        step = windowed(model, talk.tokens, talk.states(), read, range(len(read)))
        assert proposal.token_ids == greedy(step, K)
        await talk.session.close()


@pytest.mark.parametrize("num_known", [0, 2])
async def test_a_window_without_its_first_states(start, spec, formula, num_known):
    """Not all states of the first tokens are known: the window moves over what is known."""
    model, rng = formula.models["eagle3"], random.Random(5)
    async with start("eagle3", speculative=WINDOW, block_size=4) as core:
        talk = Talk(core, formula.target, "eagle3")
        await talk.open(spec(PROMPT))
        await talk.propose([7], K, start=0, end=num_known)
        for _ in range(20):
            proposal = await talk.propose(others(rng, 3), K)
            known = talk.session.state.known
            assert known.num_entries <= 24 + 4
        read = known.positions(0, known.num_entries)
        assert read[-1] == len(talk.tokens) - 2
        step = windowed(model, talk.tokens, talk.states(), read, range(len(read)))
        assert proposal.token_ids == greedy(step, K)
        await talk.session.close()


async def test_a_window_keeps_what_is_read(start, spec, target):
    """The states of what it skips are unknown, and those of some of the first tokens: it drops no entry."""
    rng = random.Random(7)
    async with start("eagle3", speculative=WINDOW | {"draft_sink_size": 8}, block_size=4) as core:
        talk = Talk(core, target, "eagle3")
        await talk.open(spec(PROMPT))
        await talk.propose([7], K, start=0)
        await talk.propose(others(rng, 20), K, start=0, end=0)
        known = talk.session.state.known
        assert known.positions(0, known.num_entries) == [*range(len(PROMPT))]
        await talk.session.close()


@pytest.mark.parametrize("num_more", [2, 30])
async def test_the_beginning_of_a_text_in_a_window_is_taken_up(start, spec, formula, num_more):
    """What stands before the first gap; the window moves on over it."""
    rng, model = random.Random(6), formula.models["eagle3"]
    async with start("eagle3", speculative=WINDOW, block_size=4) as core:
        talk = Talk(core, formula.target, "eagle3")
        await talk.open(spec(PROMPT))
        await talk.propose([7], K, start=0)
        while len(talk.tokens) < 60:
            await talk.propose(others(rng, 3), K)
        await talk.session.close()
        await talk.open(spec([*talk.tokens, *others(rng, num_more)]))
        held = talk.session.opened.num_cached_tokens
        assert 16 <= held <= 24, "whole blocks up to the window's size"
        proposal = await talk.propose([1], K, start=held)
        num_skipped = -(-(len(talk.tokens) - 24) // 8) * 8
        read = [i for i in range(len(talk.tokens) - 1) if i < 4 or i >= 4 + num_skipped]
        positions = [*range(4), *range(held, held + len(read) - 4)]  # what was never fed leaves no gap
        step = windowed(model, talk.tokens, talk.states(), read, positions)
        assert proposal.token_ids == greedy(step, K)
        await talk.session.close()
