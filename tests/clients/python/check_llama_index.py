"""`OpenAILike`: complete, chat, streams, async; structured output by `response_format`"""

import asyncio
import json

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Name a language.")]


@pytest.fixture(scope="module")
def make(base_url, model):
    def make(**given):
        given = {"max_tokens": 12, "temperature": 0, "context_window": 2048, "max_retries": 0} | given
        return OpenAILike(model=model, api_base=base_url, api_key="none", **given)

    return make


def test_complete(make):
    llm = make(is_chat_model=False)
    *_, last = llm.stream_complete("def add(a, b):\n")
    assert last.text == llm.complete("def add(a, b):\n").text


def test_chat(make):
    llm = make(is_chat_model=True)
    *_, last = llm.stream_chat(MESSAGES)
    assert last.message.content == llm.chat(MESSAGES).message.content
    assert asyncio.run(llm.achat(MESSAGES)).message.content == last.message.content


def test_response_format(make):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    given = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    answer = make(is_chat_model=True, max_tokens=100, additional_kwargs=given).chat(MESSAGES)
    assert isinstance(json.loads(answer.message.content)["n"], int)
