"""Draft heads over many rounds, against the whole text computed again from their formulas."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from draft_service.drafters.base import DraftJob, Stop
from draft_service.drafters.heads.eagle import EagleDrafter
from engine.device_thread import DeviceThread
from engine.heads.files.checkpoint import read_state_map
from engine.sampling.drafting import draft
from engine.sampling.rows import Rows
from engine.sampling.sparse import unpack
from engine.sampling.state import SamplingState
from specdec.errors import InvalidRequest
from specdec.rules import Rule
from specdec.types import HiddenStates
from tests.draft_service.drafters.heads.talk import KINDS, NATIVE, PROMPT, K, Talk, greedy, others, verdict
from tests.engine.heads import block_files as blocks
from tests.engine.heads import checkpoints as files

VARIANTS = [*((kind, True) for kind in KINDS), *((kind, False) for kind in NATIVE)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
async def test_logits_over_rounds_with_rejections(start, spec, formula, seen, variant):
    """In torch, where the logits can be seen; and in one native call, where the tokens tell."""
    method, in_torch = variant
    rng, known = random.Random(0), formula(method)
    async with start(method, scheduler={"max_num_batched_tokens": 16}, enforce_eager=in_torch) as core:
        talk = Talk(core, formula.target, method)
        await talk.open(spec(PROMPT))
        drafted, new, cut = (), others(rng, 1), 4
        for kind in (None, "none", "partial", "all", "catch-up", "all", "shorter", "none", "all"):
            if kind is not None:
                new, cut = verdict(rng, kind, drafted), None
            del seen[:]
            k = rng.randrange(2, K + 1)
            proposal = await talk.propose(new, k, start=0 if kind is None else None, cut=cut)
            step = known(talk.tokens, talk.states())
            drafted = proposal.token_ids
            assert drafted == greedy(step, k), kind
            assert in_torch == bool(seen)
            if in_torch:
                wanted = torch.stack([step(drafted[:i]) for i in range(k)]).float()
                torch.testing.assert_close(torch.cat(seen), wanted, rtol=0, atol=1e-4)
        await talk.session.close()


@pytest.mark.parametrize("in_torch", [True, False])
@pytest.mark.parametrize(
    ("method", "tree"),
    [("eagle3", None), ("eagle3", {"tree_top_k": 2, "tree_depth": 2}), ("dflash", None), ("dspark", None)],
    ids=["eagle3", "eagle3 trees", "dflash", "dspark"],
)
async def test_targets_may_have_fused_the_states(  # noqa: PLR0917
    start, spec, folder, formula, target, in_torch, method, tree
):
    """From one message to the next, within what is pending, and in one session of a batch but not in the other."""
    print_, through = read_state_map(folder / method, folder / "target", torch.device("cpu"))
    async with start(method, speculative=tree, enforce_eager=in_torch) as core:
        assert (await core.info()).hidden_state_map == print_
        raw, fused = Talk(core, target, method), Talk(core, target, method)
        for talk, name in ((raw, "a"), (fused, "b")):
            await talk.open(spec(PROMPT, session_id=name))
        for round_number in range(4):
            fused.through = None if round_number == 2 else through
            first = None if round_number else 0
            answers = await asyncio.gather(*(talk.propose([7, round_number], K, start=first) for talk in (raw, fused)))
            if method == "eagle3" and tree is None:
                step = formula("eagle3")(raw.tokens, raw.states())
                assert [answer.token_ids for answer in answers] == [greedy(step, K)] * 2
            assert len(answers[0].token_ids) == K
            assert answers[0] == replace(answers[1], draft_ns=answers[0].draft_ns, queue_ns=answers[0].queue_ns)
        base = len(raw.tokens)
        raw.tokens += [1, 2]
        first = raw.rows(base - 1, base)
        raw.through = through
        await raw.session.advance(base, [1, 2], K, [first, raw.rows(base, base + 1)])
        drafted = (await raw.session.receive()).token_ids
        assert len(drafted) == K
        assert tree or method != "eagle3" or drafted == greedy(formula("eagle3")(raw.tokens, raw.states()), K)
        for talk in (raw, fused):
            await talk.session.close()


async def test_other_features_than_the_targets_are_noticed(start, spec, formula, target, monkeypatch):
    """Planted bug: entries of accepted tokens are not on the features the verdict brings."""

    advance = EagleDrafter.advance

    def forgetful(self, state, keep, token_ids, hidden_states=()):
        advance(self, state, keep, token_ids, [replace(each, data=bytes(len(each.data))) for each in hidden_states])

    async with start("eagle3") as core:
        talk = Talk(core, target, "eagle3")
        await talk.open(spec(PROMPT))
        first = await talk.propose([7], K, start=0)
        monkeypatch.setattr(EagleDrafter, "advance", forgetful)
        second = await talk.propose([*first.token_ids[:2], 1], K)
        assert second.token_ids != greedy(formula("eagle3")(talk.tokens, talk.states()), K)
        await talk.session.close()


@pytest.mark.parametrize("method", KINDS)
async def test_a_batch_drafts_what_each_session_drafts_alone(start, spec, target, method):
    async def rounds(core, seed):
        rng = random.Random(seed)
        talk, texts = Talk(core, target, method), []
        await talk.open(spec(others(rng, 3 + seed), session_id=str(seed)))
        new, first = others(rng, 1), 0
        for kind in ("partial", "none", "all"):
            proposal = await talk.propose(new, 1 + seed % K, start=first)
            texts.append(proposal.token_ids)
            new, first = verdict(rng, kind, proposal.token_ids), None
        await talk.session.close()
        return texts

    async with start(method) as core:
        together = await asyncio.gather(*(rounds(core, seed) for seed in range(8)))
        assert [await rounds(core, seed) for seed in range(8)] == together
        assert all(len(text) == 1 + seed % K for seed, texts in enumerate(together) for text in texts)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "dflash", "dspark"])
async def test_a_draft_that_is_opened_late_works_from_the_states_it_gets(start, spec, formula, target, method):
    async with start(method) as core:
        talk = Talk(core, target, method)
        await talk.open(spec([*PROMPT, 1, 2, 3], prompt_len=len(PROMPT)))
        assert (await talk.propose([4], K, start=0, end=0)).token_ids == ()
        proposal = await talk.propose([8, 9], K)
        step = formula(method)(talk.tokens, talk.states(), len(talk.tokens) - 3)
        assert proposal.token_ids == greedy(step, K)
        await talk.session.close()


@pytest.mark.parametrize("method", KINDS)
async def test_without_the_newest_state_nothing_is_drafted(start, spec, target, method):
    async with start(method) as core:
        talk = Talk(core, target, method)
        await talk.open(spec(PROMPT))
        assert len((await talk.propose([7], K, start=0)).token_ids) == K
        assert (await talk.propose([1, 2], K, end=len(talk.tokens))).token_ids == ()
        assert len((await talk.propose([5], K)).token_ids) == K
        await talk.session.close()


async def test_what_is_known_before_a_gap_stays_of_use(start, spec, formula, seen):
    """Two states are lost: what came before is attended to together with what came after."""
    async with start("eagle3", enforce_eager=True) as core:
        talk = Talk(core, formula.target, "eagle3")
        await talk.open(spec(PROMPT))
        await talk.propose([7], K, start=0)
        assert (await talk.propose([8, 9], K, start=0, end=0)).token_ids == ()
        del seen[:]
        assert len((await talk.propose([10], K)).token_ids) == K
        model, states = formula.models["eagle3"], talk.states()
        known = [*range(len(PROMPT)), len(talk.tokens) - 2]
        tokens, features = [talk.tokens[i + 1] for i in known], [model.fuse(states[i]) for i in known]
        x = model.outputs(tokens, features, range(len(known)))[-1]
        torch.testing.assert_close(seen[0][0], model.logits(x).float(), rtol=0, atol=1e-4)
        await talk.session.close()


@pytest.mark.parametrize("method", KINDS)
async def test_tokens_that_are_taken_back(start, spec, formula, target, method):
    async with start(method) as core:
        talk = Talk(core, target, method)
        await talk.open(spec(PROMPT))
        await talk.propose([7, 11, 12, 13], K, start=0)
        del talk.tokens[8:]
        proposal = await talk.propose([20, 21], K)
        assert proposal.token_ids == greedy(formula(method)(talk.tokens, talk.states()), K)
        await talk.session.close()


@pytest.mark.parametrize("change", [None, 0, 4], ids=["the same", "another first token", "another text"])
async def test_a_conversation_is_taken_up(start, spec, formula, target, change):
    async with start("eagle3") as core:
        talk = Talk(core, target, "eagle3")
        await talk.open(spec(PROMPT))
        await talk.propose([7, 8, 9], K, start=0)
        await talk.session.close()
        later = [*talk.tokens, 30, 31]
        if change is not None:
            later[change] += 1
        await talk.open(spec(later))
        held = {None: 8, 0: 0, 4: 0}[change]  # less than a quarter of a block is not copied
        assert talk.session.opened.num_cached_tokens == held
        proposal = await talk.propose([1], K, start=held)
        assert proposal.token_ids == greedy(formula("eagle3")(talk.tokens, talk.states()), K)
        await talk.session.close()


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.BLOCK])
async def test_draws_are_those_of_the_formulas_logits(start, spec, formula, method, rule):
    """Penalties, bias and temperature are applied to what may be drafted at all, along the drafted tokens."""
    params = {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "logit_bias": {7: 1.0},
        "bad_token_ids": [[9]],
    }
    opening = spec(PROMPT, rule=rule, **params)
    async with start(method) as core:
        talk = Talk(core, formula.target, method)
        await talk.open(opening)
        proposal = await talk.propose([7], K, start=0)
        again = await talk.propose([proposal.token_ids[0], 5], K)
        for tokens, drafted in ((talk.tokens[:7], proposal), (talk.tokens, again)):
            step = formula(method)(tokens, talk.states())
            rows = Rows.after([SamplingState(opening.params, tokens, len(PROMPT), files.VOCAB)])
            for i, token in enumerate(drafted.token_ids):
                wanted = draft(step(drafted.token_ids[:i]).float()[None], rows, [rule])
                assert int(wanted.token_ids) == token
                rows = rows.extended(wanted.token_ids)
                if rule is Rule.BLOCK:
                    ids, weights = unpack(drafted.q_rows[i])
                    q = torch.as_tensor(weights) / weights.sum()
                    expected = wanted.q_weights[0] / wanted.q_weights[0].sum()
                    kept = expected > 0
                    assert list(ids) == wanted.q_token_ids[0][kept].tolist()
                    torch.testing.assert_close(
                        torch.as_tensor(q), expected[kept], rtol=0.1, atol=2e-3, check_dtype=False
                    )
                    if method == "eagle3":
                        assert bool(files.eagle3_tensors()["t2d"][list(ids)].all())
            assert len(drafted.q_rows) == (len(drafted.token_ids) if rule is Rule.BLOCK else 0)
        await talk.session.close()


@pytest.mark.parametrize("method", KINDS)
async def test_states_in_half_precision(start, spec, target, method):
    async with start(method) as core:
        talk = Talk(core, target, method, dtype="bfloat16")
        await talk.open(spec(PROMPT))
        assert len((await talk.propose([7], K, start=0)).token_ids) == K
        await talk.session.close()


@pytest.mark.parametrize("method", KINDS)
async def test_states_of_another_width_are_refused(start, spec, target, method):
    async with start(method) as core:
        talk = Talk(core, target, method)
        await talk.open(spec(PROMPT))
        wrong = HiddenStates(0, 8, "float32", bytes(6 * 32))
        await talk.session.advance(len(PROMPT), [7], K, [wrong])
        with pytest.raises(InvalidRequest, match="8 numbers a position"):
            await talk.session.receive()
        assert len((await talk.propose([7], K, start=0)).token_ids) == K
        await talk.session.close()


@pytest.mark.parametrize(
    ("method", "most"),
    [("medusa", 4), ("mlp_speculator", 5), ("eagle", 9), ("dflash", 5), ("dflash2", 5), ("dspark", 6)],
)
async def test_no_more_tokens_than_the_head_can_draft(start, spec, target, method, most):
    async with start(method, k=9) as core:
        assert (await core.info()).num_speculative_tokens == most
        talk = Talk(core, target, method)
        await talk.open(spec(PROMPT))
        assert len((await talk.propose([7], 9, start=0)).token_ids) == most
        await talk.session.close()


@pytest.mark.parametrize("method", KINDS)
async def test_at_the_context_limit(start, spec, target, method):
    async with start(method, max_model_len=16) as core:
        info = await core.info()
        assert info.max_model_len == 16
        talk = Talk(core, target, method)
        await talk.open(spec(PROMPT))
        lengths = [len((await talk.propose([7], K, start=0)).token_ids)]
        lengths += [len((await talk.propose([1, 2], K)).token_ids) for _ in range(4)]
        assert lengths == [4, 4, 4, 4, 2]
        await talk.session.close()
        await talk.open(spec([1] * 17))
        assert (await talk.propose([7], K, start=0)).token_ids == ()
        await talk.session.close()


@pytest.mark.parametrize(("method", "most"), [("dflash", [4, 3, 2, 1, 0]), ("dspark", [4, 4, 3, 2, 1])])
async def test_a_block_at_the_end_of_the_cache(start, spec, target, method, most):
    """A cache of two blocks, which is less than the context: a draft gets shorter, and none fails."""
    block_bytes = 2 * 2 * files.KV_HEADS * files.HEAD_DIM * 4 * 16
    async with start(method, kv_cache_memory_bytes=3 * block_bytes, block_size=16) as core:
        assert (await core.load()).total_blocks == 2
        talk = Talk(core, target, method)
        await talk.open(spec([5] * 27))
        lengths = [len((await talk.propose([7], K, start=0)).token_ids)]
        lengths += [len((await talk.propose([7], K)).token_ids) for _ in range(4)]
        assert lengths == most
        await talk.session.close()


async def test_memory_is_asked_for_at_opening(start, spec, target):
    """Five blocks: two sessions of two blocks each, a third does not fit."""
    block_bytes = 2 * files.KV_HEADS * files.HEAD_DIM * 4 * 32
    async with start("eagle3", kv_cache_memory_bytes=6 * block_bytes) as core:
        opened = [await core.open(spec([i, *[3] * 40], session_id=str(i))) for i in range(2)]
        load = await core.load()
        assert (load.used_blocks, load.total_blocks) == (4, 5)
        with pytest.raises(Exception, match="KV blocks"):
            await core.open(spec([2, *[3] * 40], session_id="2"))
        for session in opened:
            await session.close()


async def test_a_head_whose_blocks_do_not_suffice_drafts_nothing(start, spec, target):
    block_bytes = 2 * files.KV_HEADS * files.HEAD_DIM * 4 * 32
    async with start("eagle3", kv_cache_memory_bytes=4 * block_bytes) as core:
        other = await core.open(spec([1] * 60))
        talk = Talk(core, target, "eagle3")
        await talk.open(spec([5] * 26))
        assert (await talk.propose([7], K, start=0)).token_ids
        assert (await talk.propose([7] * 8, K)).token_ids == ()
        assert (await talk.propose([7], K)).token_ids == ()
        await talk.session.close()
        await other.close()


async def test_info(start, folder):
    tensors = {
        "eagle": files.eagle_tensors(),  # with embeddings of its own
        "eagle3": files.eagle3_tensors(maps=()),
        "medusa": files.medusa_tensors(),
        "mlp_speculator": files.mlp_tensors(n_predict=5, tied=True, once=True),
        "dflash": blocks.block_tensors(),
        "dflash2": blocks.block_tensors(convolved=True),
        "dspark": blocks.block_tensors(markov="rnn", own=True),
    }
    own = {method: sum(value.numel() for value in parts.values()) for method, parts in tensors.items()}
    read = {"eagle3": (2, 3, 4), **dict.fromkeys(("dflash", "dflash2", "dspark"), blocks.STATES)}
    for method in KINDS:
        layers = read.get(method, (-1,))
        async with start(method) as core:
            info = await core.info()
            assert (info.name, info.method, info.vocab_size) == (method, method, files.VOCAB)
            assert (info.hidden_state_layers, info.max_model_len) == (layers, 512)
            assert info.last_hidden_state_only == (method in ("medusa", "mlp_speculator"))
            assert info.num_parameters == own[method]  # without what is the target's


@pytest.mark.parametrize("method", KINDS)
async def test_a_batch_that_fails_changes_nothing(start, spec, formula, monkeypatch, method):
    async with start(method) as core:
        talk = Talk(core, formula.target, method)
        await talk.open(spec(PROMPT))
        await talk.propose([7], K, start=0)
        run_short = DeviceThread.run_short

        async def failing(*args):
            await run_short(*args)
            raise MemoryError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(DeviceThread, "run_short", failing)
            with pytest.raises(MemoryError, match="planted"):
                await talk.propose([8, 9], K)
        for new in ([], [30]):  # asked again, and after the next verdict
            proposal = await talk.propose(new, K)
            assert proposal.token_ids == greedy(formula(method)(talk.tokens, talk.states()), K)
        await talk.session.close()


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("in_torch", [False, True])
async def test_a_chain_that_is_stopped_ends_with_what_it_has(start, spec, target, method, in_torch):
    async with start(method, enforce_eager=in_torch) as core:
        drafter = core.drafter
        state = drafter.open(spec(PROMPT))
        talk = Talk(core, target, method)
        talk.tokens = [*PROMPT, 7]
        drafter.advance(state, len(PROMPT), [7], [talk.rows(0, len(PROMPT))])
        assert drafter.room(state) > K
        stop = Stop()
        stop.request_stop()
        stopped, whole = [
            (await drafter.draft([DraftJob(state, state.num_pending, K, stop=each)]))[0] for each in (stop, Stop())
        ]
        assert len(stopped.token_ids) < K == len(whole.token_ids)
        assert whole.token_ids[: len(stopped.token_ids)] == stopped.token_ids
        drafter.close(state)


async def test_a_lookup_before_a_head(start, spec, formula):
    """Where the lookup has no long match the head drafts, on all states that have come meanwhile."""
    async with start("eagle3", lookup="ngram") as core:
        assert (await core.info()).hidden_state_layers == (2, 3, 4)
        talk = Talk(core, formula.target, "eagle3")
        await talk.open(spec(PROMPT))
        first, copied = 0, 0
        for new in ([7], [50, 51, 52, 53, 54, 55], [50, 51, 52, 53], [9], [20]):
            proposal = await talk.propose(new, 2, start=first)
            drafted = greedy(formula("eagle3")(talk.tokens, talk.states()), 2)
            copied += proposal.token_ids == (54, 55)
            assert proposal.token_ids in (drafted, (54, 55))
            first = None
        assert copied == 1
        await talk.session.close()
