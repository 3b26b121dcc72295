"""Limits of one client: requests and sequences at once, requests and tokens a minute, and their metrics."""

import asyncio
import json

import grpc
import pytest

from gateway.access.caller import Caller
from gateway.access.keys import digest_of
from gateway.access.usage import FORGET_EVERY, Clients, MinuteBudget
from specdec.errors import InvalidRequest, Overloaded
from specdec.rpc.channel import open_channel
from specdec.settings import ClientLimits, GatewaySettings
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2
from tests.gateway.conftest import serve
from tests.until import until


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def stand_with_keys(backends, info, script, tmp_path):
    """Two people: alice with limits, bob without."""
    limits = {"max_client_requests": 2, "max_client_sequences": 4, "client_tokens_per_minute": 300}
    lines = [{"name": name, "sha256": digest_of(name).hex()} for name in ("alice", "bob", "carol")]
    lines[0] |= limits
    lines[2]["client_requests_per_minute"] = 2
    path = tmp_path / "keys"
    path.write_text("\n".join(map(json.dumps, lines)))
    async with serve(backends, info, script, api_key_file=str(path)) as stand:
        yield stand


async def post(stand, key, **body):
    given = {"prompt": [5], "max_tokens": 3, "temperature": 0} | body
    return await stand.http.post("/v1/completions", headers=bearer(key), json=given)


def refusal(answer):
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["Retry-After"]) >= 1
    return answer.json()["error"]["message"]


async def test_requests_and_sequences_at_once(stand_with_keys):
    stand = stand_with_keys
    (target,) = stand.targets
    target.frozen.clear()
    held = [asyncio.create_task(post(stand, "alice", n=2)) for _ in range(2)]
    await until(lambda: stand.generation.num_requests == 2)
    assert "max_client_requests of the key 'alice' is reached: 2 requests of 2" in refusal(await post(stand, "alice"))
    target.frozen.set()
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
    for body in ({"n": 5}, {"n": 5, "prompt": [[5], [6]]}):  # never possible, so that there is nothing to wait for
        answer = await post(stand, "alice", **body)
        assert answer.status_code == 400, answer.text
        assert "the key 'alice' may have 4 at once (max_client_sequences)" in answer.json()["error"]["message"]
    target.frozen.clear()
    held = asyncio.create_task(post(stand, "alice", n=3))
    await until(lambda: stand.generation.num_requests == 1)
    assert "3 sequences of 4 are in progress, and this request has 2" in refusal(await post(stand, "alice", n=2))
    target.frozen.set()
    assert (await held).status_code == 200
    assert (await post(stand, "alice", n=4)).status_code == 200
    assert (await post(stand, "bob", n=5)).status_code == 200


async def test_tokens_a_minute_are_those_used(stand_with_keys):
    stand = stand_with_keys
    for _ in range(3):  # each may need 200; what it does not use is given back
        assert (await post(stand, "alice", max_tokens=200, stop_token_ids=list(range(3, 400)))).status_code == 200
    assert (await post(stand, "alice", max_tokens=250)).status_code == 200
    assert "300 tokens a minute" in refusal(await post(stand, "alice", max_tokens=250))
    assert (await post(stand, "bob", max_tokens=250)).status_code == 200


async def test_requests_a_minute_over_grpc_as_well(stand_with_keys):
    stand = stand_with_keys
    metadata = (("authorization", "Bearer carol"),)
    async with open_channel(f"127.0.0.1:{stand.gateway.grpc_port}") as channel:
        stub = pb_grpc.GenerationServiceStub(channel)

        async def generate():
            request = pb.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[5]), max_tokens=2)
            return [piece async for piece in stub.Generate(request, metadata=metadata)]

        assert await generate()
        assert (await post(stand, "carol")).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert float(dict(caught.value.trailing_metadata())["tandem-retry-after-s"]) > 20
        assert 20 < int((await post(stand, "carol")).headers["Retry-After"]) <= 30


@pytest.mark.parametrize(("proxies", "expected"), [((), [200, 429, 429]), (("127.0.0.1",), [200, 200, 429])])
async def test_a_client_is_named_by_trusted_proxies_alone(backends, info, script, proxies, expected):
    settings = {"client_requests_per_minute": 1, "forwarded_allow_ips": proxies}
    async with serve(backends, info, script, **settings) as stand:
        seen = []
        for address in ("10.0.0.1", "10.0.0.2", "10.0.0.2"):
            body = {"prompt": [5], "max_tokens": 1, "temperature": 0}
            answer = await stand.http.post("/v1/completions", headers={"X-Forwarded-For": address}, json=body)
            seen.append(answer.status_code)
        assert seen == expected
    with pytest.raises(InvalidRequest, match="forwarded_allow_ips holds 'proxy'; write each as an IP address"):
        GatewaySettings(forwarded_allow_ips=("proxy",))


async def test_metrics_by_key(stand_with_keys):
    stand = stand_with_keys
    await post(stand, "bob", n=2)
    await post(stand, "alice", n=5)
    text = (await stand.http.get("/metrics", headers=bearer("bob"))).text
    assert 'tandem_key_requests_total{key="bob",model_name="toy-model",outcome="length"} 2.0' in text
    assert 'tandem_key_prompt_tokens_total{key="bob",model_name="toy-model"} 2.0' in text
    assert 'tandem_key_generation_tokens_total{key="bob",model_name="toy-model"} 6.0' in text
    assert 'tandem_client_refusals_total{key="alice",limit="max_client_sequences",model_name="toy-model"} 1.0' in text


def test_a_budget_fills_up_again():
    budget = MinuteBudget()
    assert budget.take(60, 60, 0.0) == 0
    assert budget.take(1, 60, 0.0) == pytest.approx(1.0)
    assert budget.take(1, 60, 1.0) == 0
    assert budget.take(500, 60, 1.0) == pytest.approx(60.0), "more than a minute's worth waits for a full minute"
    assert budget.take(500, 60, 61.0) == 0
    assert budget.take(1, 60, 62.0) == pytest.approx(440.0), "and is paid for afterwards"
    budget.give_back(440)
    assert budget.take(1, 60, 62.0) == 0


def test_clients_that_left_are_forgotten():
    clients = Clients(lambda *_: None)
    limits = ClientLimits(max_client_requests=1)
    with clients.request(Caller(client="stays", limits=limits), 1):
        for number in range(3 * FORGET_EVERY):
            with clients.request(Caller(client=str(number), limits=limits), 1):
                pass
        assert clients.num_known <= FORGET_EVERY
        with pytest.raises(Overloaded), clients.request(Caller(client="stays", limits=limits), 1):
            pass
