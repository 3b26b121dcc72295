"""A client with many requests does not keep another one waiting: in the gateway's queue, and in the target's."""

import asyncio

import httpx
import pytest

from tests.e2e.fake_service import AdmittingTarget
from tests.gateway.conftest import serve
from tests.gateway.fake_draft import FakeDraft
from tests.until import until


async def post(stand, key, **body):
    given = {"prompt": [5], "max_tokens": 10, "temperature": 0} | body
    answer = await stand.http.post("/v1/completions", headers={"Authorization": f"Bearer {key}"}, json=given)
    return answer.status_code


@pytest.mark.parametrize(("in_gateway", "in_target"), [(4, 64), (512, 4)])
async def test_a_single_request_is_served_beside_hundreds(info, script, in_gateway, in_target):
    target = AdmittingTarget(
        max_open=in_target, max_waiting=1000, max_wait_s=60.0, next_token=script, info=info, latency_s=0.01
    )
    settings = {"api_key": ("crowd", "single"), "max_concurrent_sequences": in_gateway, "max_queued_requests": 1000}
    async with serve(([target], [FakeDraft()]), info, script, **settings) as stand:
        stand.http = httpx.AsyncClient(base_url=stand.url, timeout=60, limits=httpx.Limits(max_connections=None))
        crowd = [asyncio.create_task(post(stand, "crowd", n=2)) for _ in range(80)]
        await until(lambda: len(target.open_sessions) == 4)
        await until(lambda: sum(task.done() for task in crowd) >= 4)
        assert await post(stand, "single") == 200
        num_served = sum(task.done() for task in crowd)
        assert num_served < 40, "it waited behind the others"
        for task in crowd:
            task.cancel()
        await asyncio.wait(crowd)
        await stand.http.aclose()
    assert not target.open_sessions


async def test_samples_count_as_sequences(backends, info, script):
    """A request with n samples takes n places."""
    (target,), _ = backends
    settings = {"max_concurrent_sequences": 100, "max_queued_requests": 0}
    async with serve(backends, info, script, **settings) as stand:
        target.frozen.clear()
        held = asyncio.create_task(post(stand, "any", n=90))
        await until(lambda: stand.generation.num_requests)
        assert await post(stand, "any", n=11) == 429
        other = asyncio.create_task(post(stand, "any", n=10))
        await until(lambda: stand.generation.num_requests == 2)
        target.frozen.set()
        assert (await held, await other) == (200, 200)
