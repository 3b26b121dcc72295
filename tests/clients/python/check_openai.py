"""completions, chat, streams, log-probabilities, `n`, `.parse()`, JSON schemas, errors, async, models"""

import json
from enum import Enum

import openai
import pydantic
import pytest

PROMPT = "def add(a, b):\n"
MESSAGES = [{"role": "user", "content": "Name a language."}]


class Level(Enum):
    LOW = "low"
    HIGH = "high"


class Verdict(pydantic.BaseModel):
    level: Level
    sure: bool
    votes: list[int] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_completions(client, model):
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0)
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text
    assert chunks[-1].usage == answer.usage
    assert answer.usage.completion_tokens == 16


def test_completions_of_several_prompts_with_echo_and_logprobs(client, model):
    answer = client.completions.create(
        model=model, prompt=[PROMPT, "import os\n"], n=2, max_tokens=4, echo=True, logprobs=2, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith(PROMPT)
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset)


def test_chat(client, model):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=16, temperature=0, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.message.role for choice in answer.choices] == ["assistant", "assistant"]
    assert len(answer.choices[0].logprobs.content) == 16
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=16, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == answer.choices[0].message.content


def test_the_stream_helper(client, model):
    given = {"model": model, "messages": MESSAGES, "extra_body": {"guided_choice": ["Python", "Perl"]}}
    with client.chat.completions.stream(**given) as stream:  # which takes no answer that ends with "length"
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_parse(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Verdict, max_tokens=200, temperature=0.5, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, response_format=Verdict, max_tokens=200, temperature=0.5, seed=1
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_json_objects_and_vllms_fields(client, model):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].message.content in ("yes", "no")
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=64, extra_body={"guided_json": {"type": "integer", "maximum": 9}}
    )
    assert isinstance(json.loads(answer.choices[0].text), int)


def test_models(client, model):
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "nobody"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
    ],
)
def test_errors(client, model, fields, error):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": model, "messages": MESSAGES} | fields)
    assert caught.value.body["message"]


def test_a_timeout(client, model):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(
            model=model, prompt=PROMPT, max_tokens=2000, extra_body={"ignore_eos": True}
        )


async def _ask(base_url, model):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, stream=True)
        return [chunk async for chunk in stream]


def test_async(base_url, model):
    import asyncio

    assert len(asyncio.run(_ask(base_url, model))) > 1
