"""A tiny random Llama on disk, cores on the real engine, and the stock model's text to compare with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from specdec.params import SamplingParams
from specdec.rpc.channel import open_channel
from specdec.rpc.server import RpcServer
from specdec.rules import Rule
from specdec.settings import ModelSettings, SchedulerSettings, ServerSettings, TargetSettings
from specdec.types import Proposal, SessionSpec
from specdec.v1 import target_service_pb2_grpc as pb_grpc
from target_service.core import TargetCore
from target_service.servicer import TargetServicer
from tests.llamas import build_llama, greedy_text
from tests.until import until

VOCAB = 64
CONTEXT = 256
NAME = "specdec.v1.TargetService"


@pytest.fixture(scope="session")
def llama():
    torch.set_num_threads(1)
    return build_llama(vocab_size=VOCAB, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def checkpoint(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    llama.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def plain(llama):
    """``plain(prompt, n)``: the stock model's n greedy tokens."""
    cache: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def generate(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        key = (tuple(prompt), num_tokens)
        if key not in cache:
            cache[key] = tuple(greedy_text(llama, prompt, num_tokens))
        return cache[key]

    return generate


@pytest.fixture
def start_core(checkpoint):
    """``async with start_core(**scheduler settings) as core``; checks at the end that no block is left in use."""

    @asynccontextmanager
    async def start(
        *,
        kv_blocks: int = 512,
        verification: Rule = Rule.BLOCK,
        expect_clean: bool = True,
        num_threads: int = 1,
        **scheduler,
    ):
        # 2 layers, 2 KV heads, head size 8, keys and values, float32: bytes of a block of 16 tokens.
        block_bytes = 16 * 2 * 2 * 2 * 8 * 4
        settings = TargetSettings(
            model=ModelSettings(
                model=checkpoint,
                device="cpu",
                dtype="float32",
                block_size=16,
                num_threads=num_threads,
                kv_cache_memory_bytes=(kv_blocks + 1) * block_bytes,  # one is padding
            ),
            scheduler=SchedulerSettings(**scheduler),
            verification=verification,
        )
        core = await TargetCore.start(settings)
        try:
            yield core
            if expect_clean:
                await until_clean(core)
        finally:
            await core.close()

    return start


@pytest.fixture
def serve():
    """``async with serve(core) as (stub, server)``: the core behind a real server and a real stub."""

    @asynccontextmanager
    async def start(core: TargetCore | None, **settings):
        server = RpcServer(ServerSettings(**settings))
        servicer = TargetServicer(core)
        server.add(pb_grpc.add_TargetServiceServicer_to_server, servicer, NAME)
        await server.start()
        await server.set_serving(core is not None)
        try:
            async with open_channel(server.address) as channel:
                yield pb_grpc.TargetServiceStub(channel), server
        finally:
            await server.stop()
            await servicer.close()

    return start


async def until_clean(core: TargetCore) -> None:
    """No session holds anything."""
    pool = core.engine.pool

    async def is_clean() -> bool:
        return pool.num_open == 0 and pool.used_blocks == 0 and (await core.load()).open_sessions == 0

    await until(is_clean)
    assert pool.used_blocks == 0
    assert await num_waiting(core) == 0
    assert core.num_open == 0


async def num_waiting(core: TargetCore) -> int:
    """Sessions that wait to be admitted."""
    return (await core.load()).waiting_sessions


def make_prompt(seed: int, length: int = 12) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


def make_spec(prompt: Sequence[int], max_tokens: int = 32, *, generated: Sequence[int] = (), **changes) -> SessionSpec:
    """A greedy session; keywords go to the spec or to its sampling parameters, whichever knows them."""
    of_spec = SessionSpec.__dataclass_fields__.keys() - {"token_ids", "prompt_len", "params"}
    spec = {name: value for name, value in changes.items() if name in of_spec}
    params = {name: value for name, value in changes.items() if name not in of_spec}
    return SessionSpec(
        **({"session_id": "s", "num_speculative_tokens": 8} | spec),
        token_ids=(*prompt, *generated),
        prompt_len=len(prompt),
        params=SamplingParams(
            **({"temperature": 0.0, "seed": 1, "max_tokens": max_tokens, "ignore_eos": True} | params)
        ),
    )


async def verify(session, committed_len, proposal=None):
    """One round to its verdict; without a proposal a plain step."""
    session.offer(proposal or Proposal(session.spec.epoch, committed_len, ()))
    return await session.receive()


async def nothing_comes(session) -> None:
    """Nothing is asked of the session."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await session.receive()


async def multi_step_decode(session, committed_len, num_tokens) -> tuple[int, ...]:
    """Tokens decoded in multi-step, all of them."""
    session.multi_step_decode(committed_len, num_tokens)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        verdict = await session.receive()
        assert verdict.base_len == committed_len + len(tokens)
        assert (verdict.num_draft_tokens, verdict.num_accepted) == (0, 0)
        tokens += verdict.token_ids
        if verdict.finish_reason is not None:
            break
    return tuple(tokens)


async def decode(session, *, k: int = 0, draft=None) -> tuple[int, ...]:
    """The session's output by rounds to its end; ``draft(tokens, k)`` proposes."""
    tokens = list(session.first.token_ids)
    verdict = session.first
    base = session.first.base_len
    while verdict.finish_reason is None:
        committed_len = base + len(tokens)
        proposal = None
        if draft is not None:
            proposal = Proposal(session.opened.epoch, committed_len, tuple(draft(tokens, k)))
        verdict = await verify(session, committed_len, proposal)
        tokens += verdict.token_ids
    return tuple(tokens)
