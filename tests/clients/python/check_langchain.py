"""`ChatOpenAI`: invoke, batch, stream, chains, `with_structured_output`, `bind_tools`, an agent; `OpenAI`"""

import asyncio
import functools
from typing import Literal

import pydantic
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


class Answer(pydantic.BaseModel):
    """An answer."""

    model_config = pydantic.ConfigDict(extra="forbid")

    word: Literal["yes", "no"]
    sure: bool


@pytest.fixture(scope="module")
def chat(base_url, model):
    return ChatOpenAI(
        base_url=base_url, api_key="none", model=model, max_tokens=100, temperature=0, max_retries=0, stream_usage=True
    )


def test_invoke_and_stream(chat):
    whole = chat.invoke("Name a language.")
    pieces = list(chat.stream("Name a language."))
    assert "".join(piece.content for piece in pieces) == whole.content
    assert whole.usage_metadata["output_tokens"] == 100
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 100


def test_turns(chat):
    history = [HumanMessage("Name a language."), AIMessage("Python."), HumanMessage("Another one.")]
    assert chat.invoke(history).usage_metadata["input_tokens"] > 10


def test_batch_and_async(chat):
    assert len(chat.batch(["a", "b", "c"])) == 3
    assert asyncio.run(chat.ainvoke("a")).content == chat.invoke("a").content


def test_a_chain(chat):
    chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{what}")]) | chat | StrOutputParser()
    assert chain.invoke({"what": "Name a language."})


@pytest.mark.parametrize("schema", [Answer, Answer.model_json_schema()], ids=["pydantic", "schema"])
def test_with_structured_output(chat, schema):
    answer = chat.with_structured_output(schema, method="json_schema").invoke("Is 7 a prime number?")
    assert Answer.model_validate(answer)


def test_logprobs_and_seed(chat):
    answer = chat.bind(logprobs=True, top_logprobs=2, seed=7, temperature=1.0).invoke("a")
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]


def test_completions(base_url, model):
    llm = OpenAI(base_url=base_url, api_key="none", model=model, max_tokens=8, temperature=0, max_retries=0)
    assert "".join(llm.stream("def add(a, b):\n")) == llm.invoke("def add(a, b):\n")


@tool
def vote(word: Literal["yes", "no"], sure: bool) -> str:
    """Votes."""
    return f"voted {word}"


def test_bind_tools(chat):
    history = [HumanMessage("Vote.")]
    called = chat.bind_tools([vote], tool_choice="any", strict=True, parallel_tool_calls=False).invoke(history)
    (call,) = called.tool_calls
    assert call["name"] == "vote"
    result = vote.invoke(call)
    assert result.content.startswith("voted")
    assert chat.bind_tools([vote], tool_choice="none").invoke([*history, called, result]).content


def test_bind_tools_in_a_stream(chat):
    pieces = list(chat.bind_tools([vote], tool_choice="vote", strict=True, parallel_tool_calls=False).stream("Vote."))
    whole = functools.reduce(lambda one, other: one + other, pieces)
    assert whole.tool_calls[0]["args"]["word"] in ("yes", "no")


def test_structured_output_by_a_call(chat):
    answer = chat.with_structured_output(Answer, method="function_calling", strict=True).invoke("Is 7 a prime number?")
    assert isinstance(answer, Answer)


def test_an_agent(chat):
    """Its model calls nothing by itself, so it answers at once."""
    state = create_agent(chat, [vote], system_prompt="Be brief.").invoke({"messages": [HumanMessage("Hello.")]})
    assert state["messages"][-1].content
