"""Calls whose client does not read."""

import grpc
import pytest

from specdec.rpc.channel import open_channel
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.gateway.conftest import serve
from tests.gateway.grpc.test_grpc import all_closed
from tests.until import until


@pytest.fixture
async def impatient(backends, info, script):
    async with serve(backends, info, script, write_timeout_s=0.5) as stand:
        yield stand


async def test_calls_that_never_read_lose_their_sessions(impatient):
    """Of one connection, which is served on."""
    (target,) = impatient.targets
    prompt = types_pb2.TokenIds(ids=[5])
    request = pb.GenerateRequest(
        token_ids=prompt, max_tokens=500, ignore_eos=True, sampling=types_pb2.SamplingParams(temperature=0), logprobs=20
    )
    small = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]  # what a client buffers of each call
    async with open_channel(f"127.0.0.1:{impatient.gateway.grpc_port}", small) as channel:
        stub = GenerationServiceStub(channel)
        calls = [stub.Generate(request) for _ in range(20)]
        await until(lambda: target.num_opened == 20)
        await until(lambda: not target.open_sessions)
        await until(lambda: not impatient.generation.num_requests)
        request.max_tokens = 1
        assert await stub.Generate(request, timeout=5).read()
        for call in calls:  # what was on the way can be read, and why it ends
            with pytest.raises(grpc.aio.AioRpcError, match=r"took no message for 0\.5 s"):
                async for _ in call:
                    pass
    await all_closed(*impatient.targets, *impatient.drafts)
