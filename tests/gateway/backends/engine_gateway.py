"""A gateway before engines, and what is asked of it."""

import asyncio
import contextlib
import json

import httpx

from gateway.app import Gateway
from specdec.settings import GatewaySettings
from tests.gateway.quick_stops import quick_stops
from tests.until import until


@contextlib.asynccontextmanager
async def gateway_to(*addresses, tokenizer_folder, is_ready=True, **settings):
    given = {"port": 0, "grpc_port": 0, "drain_s": 2.0, "tokenizer_pool_size": 0} | settings
    with quick_stops():
        gateway = Gateway(GatewaySettings(targets=addresses, tokenizer=str(tokenizer_folder), **given))
        try:
            await gateway.start()
            if is_ready:
                async with asyncio.timeout(10):
                    await gateway.wait_ready()
                await until(lambda: all(each.usable for each in gateway.generation.router.targets.replicas))
            address = f"http://127.0.0.1:{gateway.port}"
            async with httpx.AsyncClient(base_url=address, timeout=60, verify=False) as http:
                yield gateway, http
        finally:
            await gateway.stop()


async def ask(http, prompt="Hello", **body):
    given = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True} | body
    return await http.post("/v1/completions", json=given)


async def ids_of(http, **body):
    answer = await ask(http, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def engine_checked(engine):
    """The gateway asks for its health and gets an answer."""
    before = engine.asked["/health"]
    await until(lambda: engine.asked["/health"] >= before + 2)
