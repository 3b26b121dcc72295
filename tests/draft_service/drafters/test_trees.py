"""Trees of a draft model: the builder against EAGLE-2's formulas written out, the drafter against the stock model."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from draft_service.drafters.trees.token_tree import TokenTree
from specdec import trees
from specdec.rules import Rule
from specdec.tree_shape import TreeShape
from tests.draft_service.conftest import VOCAB
from tests.draft_service.proposing import propose

PROMPT = [3, 14, 15, 9, 26, 5]
Path = tuple[int, ...]


class Language:
    """log q of every next token after every path, made up."""

    def __init__(self, seed: int, num_tokens: int = 7) -> None:
        self._seed, self._num_tokens = seed, num_tokens

    @cache  # noqa: B019 - a few dozen paths
    def best(self, path: Path) -> list[tuple[int, float]]:
        """All tokens, the likeliest first."""
        generator = torch.Generator().manual_seed(hash((self._seed, path)) % 2**31)
        values = (torch.randn(self._num_tokens, generator=generator) * 2).log_softmax(-1)
        order = values.argsort(descending=True)
        return [(int(token), float(values[token])) for token in order]

    def score(self, path: Path) -> float:
        return sum(dict(self.best(path[:i]))[token] for i, token in enumerate(path))


def eagle_2(language: Language, shape: TreeShape, num_tokens: int) -> set[Path]:
    """The paths of the tree: levels, frontiers, and the best of all candidates."""
    frontier: list[Path] = [()]
    candidates: list[Path] = []
    for _ in range(shape.depth):
        children = [(*path, token) for path in frontier for token, _ in language.best(path)[: shape.top_k]]
        candidates += children
        frontier = sorted(children, key=language.score, reverse=True)[: shape.top_k]
    return set(sorted(candidates, key=language.score, reverse=True)[:num_tokens])


def build(language: Language, shape: TreeShape, num_tokens: int) -> TokenTree:
    """The builder, fed by the language: what it asks for is looked up path by path."""
    tree = TokenTree(shape, num_tokens)
    while not tree.is_complete:
        ids, parents = tree.fed
        asked = [()] if tree.frontier == [-1] else paths_of(ids, parents)[-len(tree.frontier) :]
        best = [language.best(path)[: shape.top_k] for path in asked]
        tree.add_level([[token for token, _ in row] for row in best], [[value for _, value in row] for row in best])
    return tree


def paths_of(token_ids: Sequence[int], parents: Sequence[int]) -> list[Path]:
    return [tuple(token_ids[i] for i in trees.path_to(parents, node)) for node in range(len(token_ids))]


@pytest.mark.parametrize("shape", [TreeShape(1, 5), TreeShape(2, 3), TreeShape(3, 4), TreeShape(7, 2), TreeShape(4, 1)])
def test_the_tree_is_eagle_2s(shape: TreeShape) -> None:
    for seed in range(20):
        language = Language(seed)
        for num_tokens in (1, 3, 8, 30):
            token_ids, parents = build(language, shape, num_tokens).finish()
            assert set(paths_of(token_ids, parents)) == eagle_2(language, shape, num_tokens)
            assert len(set(paths_of(token_ids, parents))) == len(token_ids)
            assert max(trees.depths(parents)) < shape.depth
            assert len(build(language, shape, num_tokens).fed[0]) <= shape.num_fed


def test_its_first_tokens_are_the_best_tree_of_so_many() -> None:
    language, shape = Language(3), TreeShape(3, 4)
    token_ids, parents = build(language, shape, 20).finish()
    for count in range(1, 20):
        assert (token_ids[:count], parents[:count]) == build(language, shape, count).finish()


def test_a_static_tree_takes_the_ranks_it_names() -> None:
    nodes = ((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 1))
    shape, language = TreeShape(4, 3, nodes), Language(8)
    tree = build(language, shape, 7)
    expected = []
    for ranks in nodes:
        path: Path = ()
        for rank in ranks:
            path = (*path, language.best(path)[rank][0])
        expected.append(path)
    token_ids, parents = tree.finish()
    assert paths_of(token_ids, parents) == expected
    assert [len(path) for path in paths_of(*tree.fed)] == [1, 1, 2]  # only those with children are ever fed
    assert shape.num_fed == 3
    assert len(build(language, shape, 4).finish()[0]) == 4


def test_tokens_that_cannot_be_drawn_are_no_children() -> None:
    tree = TokenTree(TreeShape(3, 2), 9)
    tree.add_level([[5, 6, 7]], [[-0.1, -math.inf, -math.inf]])
    tree.add_level([[1, 2, 3]], [[-0.1, -2.0, -math.inf]])
    assert tree.finish() == ((5, 1, 2), (-1, 0, 0))


# --- the drafter ---


@pytest.fixture
def stock_tree(llama):
    """``stock_tree(prefix, shape, num_tokens)``: the tree that the stock model's log-probabilities make."""

    @torch.inference_mode()
    def tree(prefix: Sequence[int], shape: TreeShape, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        class Model(Language):
            @cache  # noqa: B019
            def best(self, path: Path) -> list[tuple[int, float]]:
                logits = llama(torch.tensor([[*prefix, *path]]), use_cache=False).logits[0, -1]
                values = logits.log_softmax(-1)
                return [(int(token), float(values[token])) for token in values.argsort(descending=True)]

        return build(Model(0), shape, num_tokens).finish()

    return tree


@pytest.mark.parametrize(
    "options", [{"tree_top_k": 3, "tree_depth": 4}, {"speculative_token_tree": "[(0,),(1,),(0,1)]"}]
)
async def test_its_trees_are_those_of_the_stock_model_after_every_verdict(
    start_core, spec, stock_tree, options
) -> None:
    rng = random.Random(1)
    async with start_core(k=9, **options) as core:
        shape = core.tree
        session = await core.open(spec(PROMPT))
        known, new = list(PROMPT), []
        for number in range(25):
            proposal = await propose(session, len(known), new, 9)
            known += new
            assert (proposal.token_ids, proposal.parents) == stock_tree(known, shape, 9)
            assert proposal.q_rows == ()
            path = trees.path_to(proposal.parents, rng.randrange(-1, len(proposal.parents)))
            new = [proposal.token_ids[i] for i in path]
            if number % 6:
                new.append(rng.randrange(VOCAB))
            elif not new:
                new = [rng.randrange(VOCAB) for _ in range(30)]
        await session.close()


async def test_a_tree_does_not_depend_on_who_is_drafted_for_beside_it(start_core, spec) -> None:
    async with start_core(k=12, tree_top_k=4, tree_depth=4) as core:
        prompts = [[*PROMPT, i, 2 * i] for i in range(8)]
        rules = [Rule.COUPLED, Rule.BLOCK, None, Rule.TOKEN] * 2
        how = [{"rule": rule, "temperature": 0.0 if rule is None else 1.0, "seed": i} for i, rule in enumerate(rules)]

        async def run(i: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
            session = await core.open(spec(prompts[i], session_id=str(i), **how[i]))
            found = []
            for n in range(5):
                proposal = await propose(session, len(prompts[i]) + max(0, n - 1), [n] if n else [], 12)
                found.append((proposal.token_ids, proposal.parents))
            await session.close()
            return found

        together = await asyncio.gather(*map(run, range(8)))
        assert together == [await run(i) for i in range(8)]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"presence_penalty": 1.0}, {"temperature": 0.6, "top_k": 5}])
async def test_the_coupled_choice_of_the_same_model_is_the_first_child(start_core, spec, own_target, params) -> None:
    """Draft and target see the same noise."""
    opening = spec(PROMPT, rule=Rule.COUPLED, **{"temperature": 1.0, **params})
    async with start_core(k=6, speculative_token_tree="[(0,),(1,),(0,0),(0,1),(0,0,0),(0,0,2)]") as core:
        session, target = await core.open(opening), own_target(opening)
        known, (_, new) = list(PROMPT), target.verify()
        for _ in range(20):
            proposal = await propose(session, len(known), new, 6)
            known += new
            accepted, new = target.verify(proposal)
            assert accepted == 3
        await session.close()
        target.close()


@pytest.mark.parametrize("rule", [None, Rule.COUPLED])
async def test_a_kindred_target_accepts_more_of_a_tree_than_of_a_chain(start_core, spec, kindred_target, rule) -> None:
    mean = {}
    for kind, options in {"chain": {"k": 4}, "tree": {"k": 16, "tree_top_k": 4, "tree_depth": 4}}.items():
        async with start_core(**options) as core:
            opening = spec(PROMPT, rule=rule, temperature=0.0 if rule is None else 1.0, max_tokens=1000)
            session, target = await core.open(opening), kindred_target(opening)
            known, (_, new), counts = list(PROMPT), target.verify(), []
            for _ in range(80):
                proposal = await propose(session, len(known), new, options["k"])
                known += new
                accepted, new = target.verify(proposal)
                counts.append(accepted)
            mean[kind] = sum(counts) / len(counts)
            await session.close()
            target.close()
    assert mean["tree"] > mean["chain"] + 0.2


async def test_under_a_ratio_rule_chains_are_drawn(start_core, spec, kindred_target) -> None:
    """As deep as a tree would be, with q."""
    opening = spec(PROMPT, rule=Rule.BLOCK, temperature=1.0)
    async with start_core(k=12, tree_top_k=3, tree_depth=4) as core:
        session, target = await core.open(opening), kindred_target(opening)
        known, (_, new) = list(PROMPT), target.verify()
        for _ in range(10):
            proposal = await propose(session, len(known), new, 12)
            known += new
            assert (len(proposal.token_ids), len(proposal.q_rows), proposal.parents) == (4, 4, ())
            _, new = target.verify(proposal)
        await session.close()
        target.close()


async def test_at_its_limits_a_tree_is_low_or_none(start_core, spec, stock_tree) -> None:
    async with start_core(k=40, tree_top_k=3, tree_depth=4) as core:
        session = await core.open(spec(PROMPT, max_tokens=6))
        for n in range(6):
            proposal = await propose(session, len(PROMPT) + max(0, n - 1), [7] if n else [], 40)
            depth = min(4, 6 - n - 1)  # the target adds the last token
            assert proposal.depth == depth
            if depth:
                known = [*PROMPT, *[7] * n]
                assert (proposal.token_ids, proposal.parents) == stock_tree(known, core.tree.cut(depth), 40)
        await session.close()


async def test_at_the_context_limit_of_a_cache_without_room_for_siblings(start_core, spec) -> None:
    size = 2 * 2 * 2 * 8 * 4 * 32  # bytes of a block: layers, keys and values, KV heads, head size, float32, tokens
    options = {"model": {"kv_cache_memory_bytes": size * 4, "max_model_len": 96}}
    async with start_core(k=40, tree_top_k=3, tree_depth=4, **options) as core:
        session = await core.open(spec(PROMPT, max_tokens=None))
        depths = []
        for n in range(90):
            proposal = await propose(session, len(PROMPT) + max(0, n - 1), [n % VOCAB] if n else [], 40)
            depths.append(proposal.depth)
        assert depths[:70] == [4] * 70
        assert depths[-1] <= 1
        assert sorted(depths, reverse=True) == depths
        await session.close()
