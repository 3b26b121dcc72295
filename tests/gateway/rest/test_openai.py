"""The official openai client, synchronous and asynchronous."""

import asyncio

import openai
import pytest

from tests.until import until


@pytest.fixture
async def client(stand):
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="none", max_retries=0) as client:
        yield client


CHAT = [{"role": "user", "content": "hi"}]


async def test_completions(stand, client, tokenizer):
    answer = await client.completions.create(model="toy-model", prompt="a", temperature=0, max_tokens=12)
    text = tokenizer.decode(stand.script.expect(1, 12))
    assert answer.choices[0].text == text
    assert answer.usage.completion_tokens == 12
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] > 0
    stream = await client.completions.create(
        model="toy-model", prompt="a", temperature=0, max_tokens=12, stream=True, extra_body={"top_k": 5, "min_p": 0.1}
    )
    assert "".join([event.choices[0].text async for event in stream]) == text


async def test_chat(stand, client):
    answer = await client.chat.completions.create(
        model="toy-model", messages=CHAT, temperature=0, max_completion_tokens=12, logprobs=True, top_logprobs=2
    )
    text = answer.choices[0].message.content
    assert len(text) > 10
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = await client.chat.completions.create(
        model="toy-model",
        messages=CHAT,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation": {"num_speculative_tokens": 2, "verification": "coupled"}},
    )
    pieces, usage = "", None
    async for event in stream:
        usage = event.usage or usage
        pieces += (event.choices[0].delta.content or "") if event.choices else ""
    assert pieces == text
    assert usage.completion_tokens == 12


async def test_stream_helper(client):
    given = {"model": "toy-model", "messages": CHAT, "temperature": 0, "max_tokens": 100, "stop": "fox"}
    async with client.chat.completions.stream(**given) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"


async def test_errors(stand, client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="toy-model", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        await client.chat.completions.create(model="toy-model", messages=CHAT, tools=tools)
    stand.targets[0].latency_s = 0.02
    stream = await client.completions.create(
        model="toy-model", prompt="a", max_tokens=400, stream=True, extra_headers={"X-Request-Timeout-S": "1"}
    )
    with pytest.raises(openai.APIError, match="deadline"):
        _ = [event async for event in stream]
    stand.assert_all_closed()


async def test_leaving_a_stream(stand, client):
    stand.targets[0].latency_s = 0.01
    stream = await client.completions.create(model="toy-model", prompt="a", max_tokens=400, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: not stand.generation.num_requests)
    stand.assert_all_closed()


async def test_models(client):
    models = await client.models.list()
    assert [model.id for model in models.data] == ["toy-model"]
    assert (await client.models.retrieve("toy-model")).owned_by == "tandem"


async def test_synchronous_client(stand, tokenizer):
    text = tokenizer.decode(stand.script.expect(1, 12))

    def use():
        with openai.OpenAI(base_url=f"{stand.url}/v1", api_key="none", max_retries=0) as client:
            given = {"model": "toy-model", "prompt": "a", "temperature": 0, "max_tokens": 12}
            assert client.completions.create(**given).choices[0].text == text
            assert "".join(event.choices[0].text for event in client.completions.create(**given, stream=True)) == text
            chat = client.chat.completions.create(model="toy-model", messages=CHAT, seed=3, max_tokens=12)
            again = client.chat.completions.create(model="toy-model", messages=CHAT, seed=3, max_tokens=12)
            assert chat.choices[0].message.content == again.choices[0].message.content

    await asyncio.to_thread(use)
