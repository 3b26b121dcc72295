"""Verdicts carry the hidden states their tokens were predicted from: of the committed path, once each, in order."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from engine.heads.files.checkpoint import read_state_map, write_head
from engine.rounded_states import tensor_of_states
from gateway.backends.target import GrpcTarget
from specdec import hidden_state_buffer as state_buffer
from specdec.errors import InvalidRequest
from specdec.rpc.channel import open_channel
from specdec.settings import ModelSettings, TargetSettings
from specdec.types import HiddenStates, Proposal, Verdict
from target_service import core as core_module
from target_service.core import TargetCore
from tests.engine.heads.random_heads import eagle3
from tests.target_service.conftest import VOCAB, make_prompt, make_spec, multi_step_decode, verify
from tests.until import until

H = 32
LAYERS = (2, 0, 1, -1)


@pytest.fixture(scope="module")
def stock(llama):
    """``stock(tokens, layers)``: the stock model's states [n, layers * H], float32."""

    @torch.no_grad()
    def states(token_ids, layers=LAYERS) -> torch.Tensor:
        last = []
        hook = llama.model.layers[-1].register_forward_hook(lambda _m, _a, out: last.append(out))
        found = llama(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True).hidden_states
        hook.remove()
        by_number = dict(enumerate([*found[:-1], last[0]])) | {-1: found[-1]}
        return torch.cat([by_number[layer][0] for layer in layers], 1)

    return states


def tensor_of(block: HiddenStates) -> torch.Tensor:
    assert block.dtype == "bfloat16"
    return torch.frombuffer(bytearray(block.data), dtype=torch.bfloat16).view(block.num_positions, block.num_features)


class Reader:
    """Collects what the verdicts of a session bring and compares it with the stock model."""

    def __init__(self, prompt, stock, layers=LAYERS, first=0):
        self.tokens = list(prompt)
        self.stock = stock
        self.layers = layers
        self.rows: dict[int, torch.Tensor] = {}
        self.next = first

    def take(self, verdict: Verdict) -> None:
        assert verdict.base_len == len(self.tokens)
        self.tokens += verdict.token_ids
        for block in verdict.hidden_states:
            assert block.num_features == H * len(self.layers)
            assert block.start == self.next
            self.next = block.end
            self.rows |= {block.start + i: row for i, row in enumerate(tensor_of(block))}
        if verdict.finish_reason is not None:
            assert verdict.hidden_states == ()
        elif verdict.num_multi_step_left:  # they may be held
            assert self.next <= len(self.tokens) - 1
        else:
            assert self.next == len(self.tokens) - 1

    def check(self) -> None:
        expected = self.stock(self.tokens, self.layers)
        positions = sorted(self.rows)
        actual = torch.stack([self.rows[position] for position in positions])
        torch.testing.assert_close(actual.float(), expected[positions], rtol=2**-8, atol=2e-4)


def drafts_of(plain, prompt, output, rng, k=4):
    """The target's own next tokens, with a wrong one somewhere, or none."""
    drafted = list(plain(prompt, 60)[len(output) : len(output) + k])
    if rng.random() < 0.7 and drafted:
        at = rng.randrange(len(drafted))
        drafted[at] = (drafted[at] + 1) % VOCAB
    return tuple(drafted)


async def speculate(session, reader, plain, prompt, seed) -> None:
    """Rounds with rejections and phases of multi-step decode, to the end."""
    rng = random.Random(seed)
    verdict = session.first
    reader.take(verdict)
    while verdict.finish_reason is None:
        length = len(reader.tokens)
        if rng.random() < 0.25:
            session.multi_step_decode(length, 3)
            while len(reader.tokens) < length + 3 and verdict.finish_reason is None:
                if rng.random() < 0.5:
                    await asyncio.sleep(0.01)  # the steps are joined
                reader.take(verdict := await session.receive())
            continue
        drafted = drafts_of(plain, prompt, reader.tokens[len(prompt) :], rng)
        verdict = await verify(session, length, Proposal(1, length, drafted))
        reader.take(verdict)


@pytest.mark.parametrize("num_sessions", [1, 8])
async def test_states_of_committed_tokens_come_once_each(start_core, plain, stock, num_sessions):
    prompts = [make_prompt(40 + i, 12 + 9 * i) for i in range(num_sessions)]
    async with start_core(max_num_batched_tokens=24) as core:  # prompts are prefilled in chunks

        async def one(i):
            spec = make_spec(prompts[i], 40, session_id=f"s{i}", hidden_state_layers=LAYERS)
            session = await core.open(spec)
            reader = Reader(prompts[i], stock)
            await speculate(session, reader, plain, prompts[i], i)
            reader.check()
            assert tuple(reader.tokens[len(prompts[i]) :]) == plain(prompts[i], 40)
            await session.close()

        await asyncio.gather(*(one(i) for i in range(num_sessions)))


async def test_sessions_that_ask_for_nothing_get_nothing(start_core, plain, stock):
    prompts = [make_prompt(60 + i, 20) for i in range(4)]
    layers = [(), (1,), (-1, 2), ()]
    async with start_core() as core:

        async def one(prompt, layers):
            session = await core.open(make_spec(prompt, 20, session_id=str(prompt), hidden_state_layers=layers))
            verdict, reader = session.first, Reader(prompt, stock, layers)
            tokens = list(prompt)
            while True:
                tokens += verdict.token_ids
                if layers:
                    reader.take(verdict)
                else:
                    assert verdict.hidden_states == ()
                if verdict.finish_reason is not None:
                    break
                drafted = plain(prompt, 60)[len(tokens) - 20 :][:2]
                verdict = await verify(session, len(tokens), Proposal(1, len(tokens), drafted))
            if layers:
                reader.check()
            assert tuple(tokens[20:]) == plain(prompt, 20)
            await session.close()

        await asyncio.gather(*map(one, prompts, layers))


async def test_a_verdict_cut_at_a_stop_token_carries_no_more(start_core, plain, stock):
    prompt = next(p for p in map(make_prompt, range(71, 200)) if len(set(plain(p, 12)[:5])) == 5)
    text = plain(prompt, 12)
    stop = text[4]
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 40, stop_token_ids=(stop,), hidden_state_layers=LAYERS))
        reader = Reader(prompt, stock)
        reader.take(session.first)
        verdict = await verify(session, 13, Proposal(1, 13, text[1:8]))
        assert verdict.token_ids == text[1:5]
        reader.take(verdict)
        reader.check()
        await session.close()


@pytest.mark.parametrize("last_only", [False, True])
async def test_a_tree_brings_the_rows_of_its_accepted_path(start_core, plain, stock, last_only):
    prompt = make_prompt(77, 20)
    text = plain(prompt, 60)
    rng = random.Random(3)
    async with start_core() as core:
        spec = make_spec(prompt, 50, hidden_state_layers=LAYERS, last_hidden_state_only=last_only)
        session = await core.open(spec)
        verdict, tokens, rows = session.first, list(prompt), {}
        while True:
            tokens += verdict.token_ids
            for block in verdict.hidden_states:
                rows |= {block.start + i: row for i, row in enumerate(tensor_of(block))}
            if verdict.finish_reason is not None:
                break
            assert max(rows) == len(tokens) - 2
            # Two branches; the second one is right, as far as it goes.
            right = list(text[len(tokens) - 20 :][:4])
            wrong = [(token + 1) % VOCAB for token in right[:2]]
            if rng.random() < 0.5 and len(right) > 2:
                right[2] = (right[2] + 1) % VOCAB
            drafted = (*wrong, *right)
            count = len(wrong)
            parents = (*range(-1, count - 1), *(-1 if i == 0 else count + i - 1 for i in range(len(right))))
            verdict = await verify(session, len(tokens), Proposal(1, len(tokens), drafted, parents))
        assert tuple(tokens[20:]) == text[:50]
        positions = sorted(rows)
        assert last_only or positions == list(range(positions[-1] + 1))
        expected = stock(tokens)[positions]
        actual = torch.stack([rows[position] for position in positions])
        torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=2e-4)
        await session.close()


async def test_the_last_position_alone(start_core, plain, stock):
    prompt = make_prompt(72, 50)
    async with start_core(max_num_batched_tokens=16) as core:
        session = await core.open(make_spec(prompt, 30, hidden_state_layers=(-1,), last_hidden_state_only=True))
        tokens, verdict = list(prompt), session.first
        while True:
            tokens += verdict.token_ids
            if verdict.finish_reason is not None:
                break
            (block,) = verdict.hidden_states
            assert (block.start, block.num_positions) == (len(tokens) - 2, 1)
            expected = stock(tokens, (-1,))[-2:-1]
            torch.testing.assert_close(tensor_of(block).float(), expected, rtol=2**-8, atol=2e-4)
            if len(tokens) == 60:
                session.multi_step_decode(60, 5)
                await until(lambda: session.committed_len == 65)
                verdict = await session.receive()
                continue
            drafted = plain(prompt, 60)[len(tokens) - 50 :][:3]
            verdict = await verify(session, len(tokens), Proposal(1, len(tokens), (*drafted[:-1], 0)))
        await session.close()


async def test_states_start_where_computing_starts_in_a_session_with_a_name(start_core, plain, stock):
    prompt = make_prompt(73, 40)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 13))
        text = (*session.first.token_ids, *await multi_step_decode(session, 41, 12))
        await session.close()
        follow = (*prompt, *text, *make_prompt(74, 9))
        session = await core.open(make_spec(follow, 8, is_named=True, hidden_state_layers=LAYERS))
        assert session.opened.num_cached_tokens == 52
        reader = Reader(follow, stock, first=52)
        await speculate(session, reader, plain, follow, 3)
        reader.check()
        await session.close()


async def test_without_a_name_all_states_are_computed(start_core, plain, stock):
    prompt = make_prompt(73, 40)
    async with start_core() as core:
        await (await core.open(make_spec(prompt, 10))).close()
        session = await core.open(make_spec(prompt, 8, hidden_state_layers=LAYERS))
        assert session.opened.num_cached_tokens == 0
        reader = Reader(prompt, stock)
        await speculate(session, reader, plain, prompt, 3)
        reader.check()
        await session.close()


async def test_no_more_is_kept_than_there_is_room_for(start_core, plain, stock, monkeypatch):
    limit = 10 * H * len(LAYERS) * 2
    monkeypatch.setattr(core_module, "MAX_BYTES", limit)
    monkeypatch.setattr(state_buffer.StateBuffer.__init__, "__defaults__", (limit,))
    prompt = make_prompt(75, 35)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 60, hidden_state_layers=LAYERS))
        reader = Reader(prompt, stock, first=25)
        reader.take(session.first)
        reader.check()
        session.multi_step_decode(36, 20)
        # Nobody reads: the newest are kept.
        await until(lambda: session.committed_len == 56)
        verdict = await session.receive()
        assert len(verdict.token_ids) == 20
        assert [(block.start, block.end) for block in verdict.hidden_states] == [(45, 55)]
        await session.close()


async def test_over_the_wire_in_pieces(start_core, serve, plain, stock, monkeypatch):
    monkeypatch.setattr(state_buffer.pieces, "__defaults__", (3 * H * len(LAYERS) * 2,))
    prompts = [make_prompt(80 + i, 30) for i in range(3)]
    async with (
        start_core(max_num_batched_tokens=20) as core,
        serve(core) as (_, server),
        open_channel(server.address) as channel,
    ):
        backend = GrpcTarget(channel)

        async def one(i):
            spec = make_spec(prompts[i], 30, session_id=f"s{i}", hidden_state_layers=LAYERS)
            session = await backend.open(spec)
            assert all(block.num_positions <= 3 for block in session.first.hidden_states)
            reader = Reader(prompts[i], stock)
            await speculate(session, reader, plain, prompts[i], i)
            reader.check()
            await session.close()

        await asyncio.gather(*map(one, range(3)))


async def test_layers_that_are_not_there_are_refused(start_core):
    async with start_core() as core:
        for layers, text in (((3,), "names 3; the target has the states 0 to 2"), ((1,) * 17, "names 17 layers")):
            with pytest.raises(InvalidRequest, match=text):
                await core.open(make_spec(make_prompt(1), hidden_state_layers=layers))


async def test_states_go_through_the_first_layer_of_a_head(checkpoint, plain, stock, tmp_path):
    """Only in sessions that ask for it by its fingerprint, in whatever company; also in int8."""
    write_head(eagle3(target_hidden=H, states=(0, 1, 2), fc_norm=True, vocab=VOCAB, draft_vocab=41), tmp_path)
    print_, through = read_state_map(tmp_path, checkpoint, torch.device("cpu"))
    model = ModelSettings(model=checkpoint, device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 22)
    core = await TargetCore.start(TargetSettings(model=model, hidden_state_maps=(str(tmp_path),)))
    prompts = [make_prompt(90 + i, 20 + i) for i in range(4)]
    kinds = [((0, 1, 2), print_, ""), ((0, 1, 2), "0" * 64, ""), ((2, 1, 0), print_, ""), ((0, 1, 2), print_, "int8")]

    async def one(prompt, kind):
        layers, wanted, dtype = kind
        options = {"hidden_state_layers": layers, "hidden_state_map": wanted, "hidden_state_dtype": dtype}
        session = await core.open(make_spec(prompt, 20, session_id=str(prompt), **options))
        tokens, rows, verdict = list(prompt), [], session.first
        while True:
            tokens += verdict.token_ids
            rows += verdict.hidden_states
            if verdict.finish_reason is not None:
                break
            verdict = await verify(
                session, len(tokens), Proposal(1, len(tokens), plain(prompt, 22)[len(tokens) - len(prompt) :][:3])
            )
        await session.close()
        assert tuple(tokens[len(prompt) :]) == plain(prompt, 20)
        found, exact = torch.cat([tensor_of_states(each).float() for each in rows]), stock(tokens, layers)
        exact = exact[: len(found)]
        if wanted == print_ and layers == (0, 1, 2):
            exact = through(exact)
        assert rows[0].dtype == (dtype or "bfloat16")
        torch.testing.assert_close(found, exact, rtol=2**-6, atol=0.03 if dtype else 0.01)
        return exact.shape[1]

    assert await asyncio.gather(*map(one, prompts, kinds)) == [32, 3 * H, 3 * H, 32]
    await core.close()
