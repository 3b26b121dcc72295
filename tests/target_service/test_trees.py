"""Trees through the target's sessions: text as without them, acceptance along the right branch, limits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from engine.loading import acceleration
from engine.native.decoder import NativeDecoder
from specdec.rules import Rule
from specdec.trees import path_to
from specdec.types import FinishReason, Proposal
from tests.target_service.conftest import VOCAB, make_prompt, make_spec, verify
from tests.target_service.test_hidden_states import LAYERS, Reader, stock

__all__ = ["stock"]  # a fixture


def tree_around(text: Sequence[int], dice: random.Random, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A random tree; some of its branches begin as the text continues."""
    ids: list[int] = []
    parents: list[int] = []
    right: dict[int, int] = {-1: 0}  # tokens whose whole path is right, and how long that is
    while len(ids) < num_tokens:
        parent = dice.choice([*right, dice.randrange(-1, len(ids))])
        taken = {ids[i] for i, other in enumerate(parents) if other == parent}
        following = text[right[parent]] if parent in right and right[parent] < len(text) else None
        if following is not None and following not in taken and dice.random() < 0.6:
            right[len(ids)] = right[parent] + 1
            ids.append(following)
        else:
            token = dice.randrange(VOCAB)
            if token in taken or token == following:
                continue
            ids.append(token)
        parents.append(parent)
    return tuple(ids), tuple(parents)


def accepted_by(text: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> int:
    """Tokens of the tree's path that agrees longest with the text."""
    paths = [[ids[i] for i in path_to(parents, node)] for node in range(len(ids))]
    return max((len(path) for path in paths if path == list(text[: len(path)])), default=0)


async def decode_with_trees(session, text: Sequence[int], *, seed: int, num_tokens: int = 8) -> tuple[int, ...]:
    """The session's output by rounds of trees; what each must accept is checked."""
    dice, verdict, tokens = random.Random(seed), session.first, list(session.first.token_ids)
    while verdict.finish_reason is None:
        base, rest = session.first.base_len + len(tokens), text[len(tokens) :]
        ids, parents = tree_around(rest, dice, num_tokens)
        verdict = await verify(session, base, Proposal(1, base, ids, parents))
        if verdict.num_draft_tokens == num_tokens:
            assert verdict.num_accepted == accepted_by(rest, ids, parents)
        assert verdict.token_ids == tuple(rest[: len(verdict.token_ids)])
        tokens += verdict.token_ids
    return tuple(tokens)


@pytest.fixture(params=["native decoder", "torch attention"])
def path(request, monkeypatch) -> str:
    if request.param != "native decoder":
        monkeypatch.setattr(NativeDecoder, "build", lambda *_, **__: None)
        monkeypatch.setattr(acceleration, "native_attention", lambda: None)
    return request.param


@pytest.mark.parametrize("rule", list(Rule))
async def test_greedy_text_is_the_plain_one(start_core, plain, path, rule):
    async with start_core(kv_blocks=64) as core:
        assert core.engine.runner.name == path

        async def run(seed: int) -> None:
            prompt = make_prompt(seed, 5 + seed)
            session = await core.open(make_spec(prompt, 40, session_id=str(seed), rule=rule))
            assert await decode_with_trees(session, plain(prompt, 40), seed=seed) == plain(prompt, 40)
            await session.close()

        await asyncio.gather(*map(run, range(5)))


async def test_coupled_text_is_the_plain_one(start_core):
    async with start_core() as core:
        for seed in range(4):
            how = {"temperature": 1.0, "seed": seed, "rule": Rule.COUPLED, "presence_penalty": 0.3 * (seed % 2)}
            plain = await core.open(make_spec(make_prompt(seed), 40, **how))
            text = list(plain.first.token_ids)
            while len(text) < 40:
                text += (await verify(plain, plain.first.base_len + len(text))).token_ids
            await plain.close()
            session = await core.open(make_spec(make_prompt(seed), 40, **how))
            assert await decode_with_trees(session, text, seed=seed) == tuple(text)
            await session.close()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
async def test_near_its_end_a_tree_loses_its_lowest_levels(start_core, plain, max_tokens):
    prompt = make_prompt(3, 16)  # its output begins a KV block, in which siblings have room
    text = plain(prompt, 20)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, max_tokens + 1))
        n = session.first.committed_len
        ids, parents = (text[1], 0, text[2], 1, text[3], 2), (-1, -1, 0, 0, 2, 2)
        verdict = await verify(session, n, Proposal(1, n, ids, parents))
        assert verdict.num_draft_tokens == [0, 2, 4, 6][min(max_tokens, 4) - 1]
        assert verdict.token_ids == text[1 : 1 + min(max_tokens, 4)]
        assert (verdict.finish_reason is FinishReason.LENGTH) == (max_tokens <= 4)
        await session.close()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
async def test_where_no_block_is_left_a_tree_loses_its_last_tokens(start_core, plain, max_tokens):
    prompt = make_prompt(3, 16 - max_tokens)  # the output ends with the first KV block
    text = plain(prompt, 20)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, max_tokens + 1))
        assert len(session.step_session.sequence.blocks) == 1
        n = session.first.committed_len
        ids, parents = (text[1], 0, text[2], 1, text[3], 2), (-1, -1, 0, 0, 2, 2)
        verdict = await verify(session, n, Proposal(1, n, ids, parents))
        assert verdict.num_draft_tokens == max_tokens - 1
        assert verdict.token_ids == text[1 : 2 + [0, 1, 1, 2][max_tokens - 1]]
        await session.close()


async def test_at_the_models_context(start_core, plain):
    """Siblings may lie behind the last position, as far as the last block has room."""
    prompt = make_prompt(5)
    async with start_core() as core:
        context = core.engine.info.max_model_len
        text = plain(prompt, context - len(prompt))
        session = await core.open(make_spec(prompt, None))
        assert await decode_with_trees(session, text, seed=1) == text
        await session.close()


async def test_verdicts_on_trees_carry_the_states_of_the_accepted_path(start_core, plain, path, stock):
    prompt = make_prompt(8)
    text = plain(prompt, 30)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 30, hidden_state_layers=LAYERS))
        reader, dice, verdict = Reader(prompt, stock), random.Random(2), session.first
        reader.take(verdict)
        while verdict.finish_reason is None:
            rest = text[len(reader.tokens) - len(prompt) :]
            ids, parents = tree_around(rest, dice, 8)
            verdict = await verify(session, len(reader.tokens), Proposal(1, len(reader.tokens), ids, parents))
            reader.take(verdict)
        reader.check()
        await session.close()
