"""A stub that calls the gateway under test."""

import pytest

from specdec.rpc.channel import open_channel
from specdec.v1 import generation_service_pb2_grpc as pb_grpc


@pytest.fixture
async def stub(stand):
    async with open_channel(f"127.0.0.1:{stand.gateway.grpc_port}") as channel:
        yield pb_grpc.GenerationServiceStub(channel)
