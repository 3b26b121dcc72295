"""`OpenAILike`: complete, chat, streams, async; structured output by `response_format`; `chat_with_tools`"""

import asyncio
import json
from typing import Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
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


def vote(word: Literal["yes", "no"]) -> str:
    """Votes."""
    return f"voted {word}"


def test_chat_with_tools(make):
    llm = make(is_chat_model=True, is_function_calling_model=True, max_tokens=100)
    tool = FunctionTool.from_defaults(vote)
    answer = llm.chat_with_tools([tool], user_msg="Vote.", tool_required=True, allow_parallel_tool_calls=False)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_kwargs["word"] in ("yes", "no")
