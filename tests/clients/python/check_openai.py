"""completions, chat, streams, log-probabilities, `n`, `.parse()`, JSON schemas, tools, `responses`, errors, async"""

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


TOOL = {
    "name": "vote",
    "description": "Votes.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"enum": ["yes", "no"]}, "weight": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["word", "weight"],
        "additionalProperties": False,
    },
}


def test_tools(client, model):
    """The small model knows nothing of tools; the grammar makes it call them, and the call is answered."""
    given = {"model": model, "tools": [{"type": "function", "function": TOOL}], "temperature": 0, "max_tokens": 200}
    given["parallel_tool_calls"] = False
    answer = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **given)
    with client.chat.completions.stream(messages=MESSAGES, tool_choice="required", **given) as stream:
        streamed = stream.get_final_completion()
    (call,), (same,) = answer.choices[0].message.tool_calls, streamed.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.arguments == same.function.arguments
    assert json.loads(call.function.arguments)["word"] in ("yes", "no")
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(messages=messages, tool_choice="none", **given).choices[0].message.content


def test_responses(client, model):
    first = client.responses.create(model=model, input="Name a language.", max_output_tokens=16, temperature=0)
    assert first.output_text
    given = {"previous_response_id": first.id, "max_output_tokens": 200, "temperature": 0}
    # An answer that ends with its limit is none to this helper; one in a schema ends by itself.
    with client.responses.stream(model=model, input="Vote.", text_format=Verdict, **given) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert Verdict.model_validate_json(text) == final.output_parsed
    assert final.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text


def test_responses_with_a_schema_and_tools(client, model):
    answer = client.responses.parse(model=model, input="a", text_format=Verdict, max_output_tokens=200, temperature=0)
    assert isinstance(answer.output_parsed, Verdict)
    given = {"model": model, "tools": [{"type": "function", **TOOL}], "temperature": 0, "max_output_tokens": 200}
    answer = client.responses.create(input="a", tool_choice="required", parallel_tool_calls=False, **given)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    last = client.responses.create(input=[result], previous_response_id=answer.id, tool_choice="none", **given)
    assert last.output_text
