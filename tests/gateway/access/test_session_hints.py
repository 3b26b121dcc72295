"""Names of conversations in headers, in metadata and in OpenAI's field."""

import grpc
import pytest

from specdec.rpc.channel import open_channel
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2

LONG = "x" * 257


@pytest.mark.parametrize(
    ("headers", "fields", "name"),
    [
        ({}, {}, None),
        ({"X-Session-ID": "a"}, {}, "/a"),
        ({"x-session-affinity": "b"}, {}, "/b"),
        ({"X-Dynamo-Session-ID": "c", "X-Session-Affinity": "b"}, {}, "/b"),
        ({"X-Dynamo-Session-ID": "c"}, {"prompt_cache_key": "d"}, "/c"),
        ({"X-Session-ID": "a"}, {"session_id": "e"}, "/e"),
        ({}, {"prompt_cache_key": "d"}, "/d"),
        ({}, {"prompt_cache_key": None}, None),
        ({"X-Session-ID": LONG}, {}, None),
    ],
)
async def test_over_rest(stand, headers, fields, name):
    body = {"prompt": [5, 6], "max_tokens": 3} | fields
    answer = await stand.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    (spec,) = stand.targets[0].specs
    assert (spec.session_id if spec.is_named else None) == name


async def test_a_cache_key_that_is_too_long(stand):
    body = {"prompt": [5, 6], "max_tokens": 3, "prompt_cache_key": LONG}
    answer = await stand.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_cache_key"


async def test_over_grpc(stand):
    request = pb.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[5, 6]), max_tokens=3)
    async with open_channel(f"127.0.0.1:{stand.gateway.grpc_port}") as channel:
        call = pb_grpc.GenerationServiceStub(channel).Generate(request, metadata=(("x-session-id", "a"),))
        async for _ in call:
            pass
        assert await call.code() is grpc.StatusCode.OK
    (spec,) = stand.targets[0].specs
    assert (spec.is_named, spec.session_id) == (True, "/a")
