"""Trees of draft heads, against the builder fed by the formulas' logits, path by path."""

import asyncio
import random

import pytest

from draft_service.drafters.trees.token_tree import TokenTree
from specdec import trees
from specdec.errors import InvalidRequest
from specdec.rules import Rule
from tests.draft_service.drafters.heads.talk import BLOCK_KINDS, PROMPT, TREE_KINDS, Talk, others
from tests.engine.heads import checkpoints as files

NUM_NODES = 9
DYNAMIC = {"tree_top_k": 3, "tree_depth": 3}
STATIC = {"speculative_token_tree": "[(0,),(1,),(2,),(0,0),(0,1),(1,0),(0,0,0)]"}


def expected(step, shape, num_tokens):
    """Tokens and parents: what the builder asks for is computed from the whole text."""
    tree = TokenTree(shape, num_tokens)
    while not tree.is_complete:
        ids, parents = tree.fed
        count = len(tree.frontier)
        nodes = [-1] if tree.frontier == [-1] else range(len(ids) - count, len(ids))
        best = []
        for node in nodes:
            values = step([ids[i] for i in trees.path_to(parents, node)]).log_softmax(-1)
            order = values.argsort(descending=True)[: shape.top_k]
            best.append([(int(token), float(values[token])) for token in order])
        tree.add_level([[token for token, _ in row] for row in best], [[value for _, value in row] for row in best])
    return tree.finish()


@pytest.mark.parametrize("options", [DYNAMIC, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "variant", [*((kind, False) for kind in TREE_KINDS), ("eagle", True), ("eagle3", True)], ids=str
)
async def test_trees_after_every_verdict(start, spec, formula, variant, options):
    """On the native kernels where there are such, and in torch."""
    method, in_torch = variant
    rng, known = random.Random(2), formula(method)
    async with start(method, k=NUM_NODES, speculative=options, enforce_eager=in_torch) as core:
        assert (await core.info()).num_speculative_tokens == NUM_NODES
        talk = Talk(core, formula.target, method)
        await talk.open(spec(PROMPT))
        new, first = [7], 0
        for _ in range(6):
            proposal = await talk.propose(new, NUM_NODES, start=first)
            step = known(talk.tokens, talk.states())
            assert (proposal.token_ids, proposal.parents) == expected(step, core.tree, NUM_NODES)
            assert proposal.q_rows == ()
            path = trees.path_to(proposal.parents, rng.randrange(-1, len(proposal.parents)))
            new, first = [*(proposal.token_ids[i] for i in path), *others(rng, 1)], None
        await talk.session.close()


async def test_a_tree_is_no_deeper_than_there_are_heads(start, spec, formula):
    async with start("medusa", k=20, speculative={"tree_top_k": 2, "tree_depth": 6}) as core:
        talk = Talk(core, formula.target, "medusa")
        await talk.open(spec(PROMPT))
        proposal = await talk.propose([7], 20, start=0)
        assert proposal.depth == 4
        assert len(proposal.token_ids) == 2 + 3 * 4
        await talk.session.close()


@pytest.mark.parametrize("method", TREE_KINDS)
async def test_all_rules_at_once(start, spec, formula, method):
    """Sessions of every rule in one batch get what each gets alone; no token outside the draft vocabulary."""

    async def run(core, i, rule):
        talk = Talk(core, formula.target, method)
        temperature = 0.0 if rule is None else 1.0
        await talk.open(spec([*PROMPT, i], session_id=str(i), rule=rule, temperature=temperature, presence_penalty=0.5))
        proposals = [await talk.propose([7], NUM_NODES, start=0), await talk.propose([8, 9], NUM_NODES)]
        await talk.session.close()
        return [(proposal.token_ids, proposal.parents) for proposal in proposals]

    rules = [Rule.COUPLED, Rule.BLOCK, None, Rule.TOKEN]
    async with start(method, k=NUM_NODES, speculative=DYNAMIC) as core:
        together = await asyncio.gather(*(run(core, i, rule) for i, rule in enumerate(rules)))
        assert [await run(core, i, rule) for i, rule in enumerate(rules)] == together
        assert all(len(set(ids)) > 1 for texts in together for ids, _ in texts)
    if method == "eagle3":
        drawable = files.eagle3_tensors()["t2d"]
        assert all(drawable[token] for texts in together for ids, _ in texts for token in ids)


async def test_memory_for_siblings_runs_out(start, spec, formula):
    """At the end of a cache that has no room for siblings trees get lower, and the text continues."""
    block_bytes = 2 * files.KV_HEADS * files.HEAD_DIM * 4 * 32
    model = {"kv_cache_memory_bytes": 3 * block_bytes, "max_model_len": 64}
    async with start("eagle", k=30, speculative=DYNAMIC, **model) as core:
        talk = Talk(core, formula.target, "eagle")
        await talk.open(spec(PROMPT, max_tokens=None))
        depths, first = [], 0
        for _ in range(57):
            depths.append((await talk.propose([7], 30, start=first)).depth)
            first = None
        assert depths[:40] == [3] * 40
        assert depths[-1] <= 1
        assert sorted(depths, reverse=True) == depths
        await talk.session.close()


@pytest.mark.parametrize("method", BLOCK_KINDS)
async def test_heads_that_draft_a_block_refuse_trees(start, method):
    with pytest.raises(InvalidRequest, match=f"{method} drafts a block in one pass and no tree: leave out tree_top_k"):
        async with start(method, speculative={"tree_top_k": 2}):
            pass
