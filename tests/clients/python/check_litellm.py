"""`openai` and `hosted_vllm`: conversations, streams, JSON schemas, tools, log-probabilities, completions, errors"""

import json
from typing import Literal

import litellm
import pydantic
import pytest

litellm.telemetry = False


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    word: Literal["yes", "no"]


@pytest.fixture(params=["openai", "hosted_vllm"])
def given(request, base_url, model):
    return {
        "model": f"{request.param}/{model}", "api_base": base_url, "api_key": "none", "max_tokens": 24,
        "temperature": 0, "num_retries": 0,
    }  # fmt: skip


def test_several_turns(given):
    messages = []
    for text in ("Name a language.", "Another one.", "And one more."):
        messages.append({"role": "user", "content": text})
        answer = litellm.completion(messages=messages, **given)
        messages.append(answer.choices[0].message.model_dump())
    assert answer.usage.prompt_tokens > 50


def test_streams(given):
    messages = [{"role": "user", "content": "Name a language."}]
    whole = litellm.completion(messages=messages, **given)
    stream = litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **given)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 24


def test_schemas(given):
    messages = [{"role": "user", "content": "Is 7 a prime number?"}]
    answer = litellm.completion(messages=messages, response_format=Answer, **given | {"max_tokens": 100})
    assert Answer.model_validate(json.loads(answer.choices[0].message.content))


def test_logprobs(given):
    answer = litellm.completion(
        messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2, seed=3, n=2, **given
    )
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.content) == 24


def test_text_completions(base_url, model):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        api_base=base_url,
        api_key="none",
        prompt="def add(a, b):\n",
        max_tokens=8,
    )
    assert answer.usage.completion_tokens == 8


def test_errors(given):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=[{"role": "user", "content": "a"}], **given | {"max_tokens": 100000})


def test_tools(given):
    parameters = Answer.model_json_schema()
    tools = [{"type": "function", "function": {"name": "vote", "description": "Votes.", "parameters": parameters}}]
    messages = [{"role": "user", "content": "Vote."}]
    given |= {"max_tokens": 100, "tools": tools}
    answer = litellm.completion(messages=messages, tool_choice="required", parallel_tool_calls=False, **given)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "vote"
    if given["model"].startswith("openai/"):  # for vLLM, LiteLLM takes additionalProperties out of schemas
        assert Answer.model_validate_json(call.function.arguments)
    messages += [answer.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert litellm.completion(messages=messages, tool_choice="none", **given).choices[0].message.content
