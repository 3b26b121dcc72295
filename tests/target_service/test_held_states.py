"""Hidden states of tokens after which a session decodes on leave in few batches: exact, complete, in order."""

import asyncio

import pytest
import torch

from engine.heads.files.checkpoint import read_state_map, write_head
from engine.rounded_states import tensor_of_states
from specdec.settings import ModelSettings, TargetSettings
from specdec.types import Proposal
from target_service import held_states
from target_service.core import TargetCore
from tests.engine.heads.random_heads import eagle3
from tests.target_service.conftest import VOCAB, make_prompt, make_spec, verify
from tests.target_service.test_hidden_states import LAYERS, H, Reader, stock  # noqa: F401 (a fixture)
from tests.until import until

PROMPT = make_prompt(5, 20)
ROW_BYTES = H * len(LAYERS) * 2


async def to_the_end(session, reader=None):
    """The verdicts until the session waits for a request."""
    verdicts = []
    while not verdicts or verdicts[-1].num_multi_step_left:
        verdicts.append(await session.receive())
        if reader is not None:
            reader.take(verdicts[-1])
    return verdicts


async def test_they_come_in_one_batch_with_the_last_token(start_core, stock, plain):  # noqa: F811
    async with start_core() as core:
        session = await core.open(make_spec(PROMPT, 60, hidden_state_layers=LAYERS))
        reader = Reader(PROMPT, stock)
        reader.take(session.first)
        session.multi_step_decode(21, 40)
        *others, last = await to_the_end(session, reader)
        assert [verdict.hidden_states for verdict in others] == [()] * len(others)
        assert [(block.start, block.end) for block in last.hidden_states] == [(20, 60)]
        reader.take(await verify(session, 61, Proposal(1, 61, plain(PROMPT, 60)[41:45])))
        reader.check()
        assert tuple(reader.tokens[20:]) == plain(PROMPT, len(reader.tokens) - 20)
        await session.close()


@pytest.mark.parametrize("num_rows", [1, 7])
async def test_no_more_is_held_than_allowed(start_core, stock, monkeypatch, num_rows):  # noqa: F811
    monkeypatch.setattr(held_states, "MAX_HELD_BYTES", num_rows * ROW_BYTES)
    async with start_core() as core:
        session = await core.open(make_spec(PROMPT, 60, hidden_state_layers=LAYERS))
        reader = Reader(PROMPT, stock)
        reader.take(session.first)
        session.multi_step_decode(21, 38)
        verdicts = await to_the_end(session, reader)
        reader.check()
        blocks = [block for verdict in verdicts for block in verdict.hidden_states]
        assert sum(block.num_positions for block in blocks) == 38
        assert all(block.num_positions % num_rows == 0 for block in blocks[:-1])
        await session.close()


async def test_the_end_of_a_sequence_has_none(start_core, plain):
    async with start_core() as core:
        session = await core.open(make_spec(PROMPT, 30, hidden_state_layers=LAYERS))
        session.multi_step_decode(21, 29)
        verdicts = await to_the_end(session)
        assert [verdict.hidden_states for verdict in verdicts] == [()] * len(verdicts)
        assert sum(len(verdict.token_ids) for verdict in verdicts) == 29
        await session.close()


@pytest.mark.parametrize("last_only", [False, True])
async def test_multi_step_decode_that_is_ended_at_any_moment_brings_them_all(
    start_core,
    stock,  # noqa: F811
    plain,
    last_only,
):
    """A step may run when it is to end: then another token is decoded, which brings them."""
    async with start_core() as core:

        async def one(number):
            spec = make_spec(
                PROMPT, 200, session_id=str(number), hidden_state_layers=LAYERS, last_hidden_state_only=last_only
            )
            session = await core.open(spec)
            tokens, rows = [*PROMPT, *session.first.token_ids], {}
            for _ in range(8):
                session.multi_step_decode(len(tokens), 100)
                for _ in range(number):
                    await asyncio.sleep(0)
                if number % 3 == 0:
                    await until(lambda: session.committed_len > len(tokens))  # noqa: B023
                session.multi_step_decode(len(tokens), 0)
                verdicts = await to_the_end(session)
                for verdict in verdicts:
                    tokens += verdict.token_ids
                    for block in verdict.hidden_states:
                        rows |= {i: block.rows(i, i + 1) for i in range(block.start, block.end)}
                assert max(rows) == len(tokens) - 2
                assert session.is_idle
            assert tuple(tokens[20:]) == plain(PROMPT, len(tokens) - 20)
            await session.close()
            exact = stock(tokens)
            if not last_only:
                assert sorted(rows) == list(range(20, len(tokens) - 1))
            for position, row in rows.items():
                found = tensor_of_states(row).float()
                torch.testing.assert_close(found[0], exact[position], rtol=2**-8, atol=2e-4)

        await asyncio.gather(*map(one, range(6)))


async def test_a_round_in_place_of_a_token_brings_what_was_held(start_core, stock, plain):  # noqa: F811
    text = plain(PROMPT, 200)
    async with start_core() as core:
        session = await core.open(make_spec(PROMPT, 200, hidden_state_layers=LAYERS))
        reader = Reader(PROMPT, stock)
        reader.take(session.first)
        for _ in range(2):
            session.multi_step_decode(len(reader.tokens), 150)
            await until(lambda: session.committed_len > len(reader.tokens) + 3)
            num_taken = 0
            while not num_taken:
                n = len(reader.tokens)
                session.offer(Proposal(1, n, text[n - 20 :][:8]))
                verdict = await session.receive()
                num_taken = verdict.num_draft_tokens
                reader.take(verdict)
            assert verdict.num_multi_step_left == 0
        reader.check()
        assert tuple(reader.tokens[20:]) == text[: len(reader.tokens) - 20]
        await session.close()


async def test_a_session_that_leaves_takes_them_along(start_core, stock):  # noqa: F811
    """The next one with its name has its own states alone."""
    async with start_core() as core:
        session = await core.open(make_spec(PROMPT, 200, hidden_state_layers=LAYERS))
        session.multi_step_decode(21, 150)
        await until(lambda: session.committed_len > 40)
        await session.close()
        assert session.step_session.held
        session = await core.open(make_spec(PROMPT, 60, epoch=2, hidden_state_layers=LAYERS, cache_salt="another"))
        reader = Reader(PROMPT, stock)
        reader.take(session.first)
        session.multi_step_decode(21, 10)
        await to_the_end(session, reader)
        reader.check()
        await session.close()


async def test_they_go_through_the_first_layer_of_a_head(checkpoint, stock, tmp_path):  # noqa: F811
    """As in int8, also beside a session that gets each as it is."""
    write_head(eagle3(target_hidden=H, states=(0, 1, 2), fc_norm=True, vocab=VOCAB, draft_vocab=41), tmp_path)
    print_, through = read_state_map(tmp_path, checkpoint, torch.device("cpu"))
    model = ModelSettings(model=checkpoint, device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 22)
    core = await TargetCore.start(TargetSettings(model=model, hidden_state_maps=(str(tmp_path),)))

    async def one(number, layers, wanted, dtype):
        options = {"hidden_state_layers": layers, "hidden_state_map": wanted, "hidden_state_dtype": dtype}
        session = await core.open(make_spec(PROMPT, 80, session_id=str(number), **options))
        session.multi_step_decode(21, 50)
        verdicts = await to_the_end(session)
        tokens = [*PROMPT, *session.first.token_ids, *(i for verdict in verdicts for i in verdict.token_ids)]
        (block,) = verdicts[-1].hidden_states
        await session.close()
        exact = stock(tokens, layers)[20:70]
        if wanted == print_ and layers == (0, 1, 2):
            exact = through(exact)
        assert (block.start, block.num_positions, block.num_features) == (20, 50, exact.shape[1])
        assert block.dtype == ("int8" if dtype else "bfloat16")
        torch.testing.assert_close(tensor_of_states(block).float(), exact, rtol=2**-6, atol=0.1 if dtype else 0.01)

    kinds = [((0, 1, 2), print_, "int8"), ((0, 1, 2), print_, ""), ((2, 1, 0), print_, ""), ((1,), "", "int8_g32")]
    await asyncio.gather(*(one(i, *kind) for i, kind in enumerate(kinds)))
    await core.close()
