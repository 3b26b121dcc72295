"""A chat template without an end holds up nobody else, whichever way a chat comes; a slow one, no other client."""

import asyncio

import grpc
import httpx
import pytest

from specdec.rpc.channel import open_channel
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from tests.gateway.conftest import serve

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
#: A quarter of a second for a message "slow".
SLOW = (
    "{% if messages[0].content == 'slow' %}{% for i in range(3000) %}{% for j in range(999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)


async def ask(http, key, text):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return await http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})


async def test_many_slow_chats_of_one_client_keep_no_other_client_waiting(backends, info, script, tokenizer_folder):
    settings = {"tokenizer": str(tokenizer_folder), "chat_template": SLOW, "api_key": ("crowd", "single")}
    async with (
        serve(backends, info, script, **settings) as stand,
        httpx.AsyncClient(base_url=stand.url, timeout=60, limits=httpx.Limits(max_connections=None)) as http,
    ):
        crowd = [asyncio.create_task(ask(http, "crowd", "slow")) for _ in range(12)]
        await asyncio.wait(crowd, return_when=asyncio.FIRST_COMPLETED)
        assert (await ask(http, "single", "quick")).status_code == 200
        assert sum(task.done() for task in crowd) <= 4, "it waited behind the others"
        assert {(await task).status_code for task in crowd} == {200}


@pytest.mark.parametrize("is_rest", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["REST", "gRPC"])
async def test_others_are_served_while_a_chat_template_loops(
    backends, info, script, tokenizer_folder, *, is_rest, caplog
):
    """It is told at the start, too."""
    async with (
        serve(backends, info, script, tokenizer=str(tokenizer_folder), chat_template=LOOP) as stand,
        open_channel(f"127.0.0.1:{stand.gateway.grpc_port}") as channel,
    ):
        assert "the chat template takes more than 2 s of CPU time; start the gateway with another" in caplog.text
        message, stub = {"role": "user", "content": "hi"}, pb_grpc.GenerationServiceStub(channel)
        if is_rest:
            chat = asyncio.create_task(stand.http.post("/v1/chat/completions", json={"messages": [message]}))
        else:
            asked = pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(**message)]))
            chat = asyncio.ensure_future(stub.Tokenize(asked))
        for _ in range(10):
            assert (await stand.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200
            assert [answer async for answer in stub.Generate(pb.GenerateRequest(text="a", max_tokens=1))]
            assert (await stub.Tokenize(pb.TokenizeRequest(text="a"))).token_ids
        assert not chat.done()
        if is_rest:
            answer = await chat
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="takes more than 2 s of CPU time"):
                await chat
