"""Tools and thoughts over gRPC: what REST's chats tell."""

import json

import grpc
import pytest

from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from tests.gateway.rest.test_tools import ANSWER, BOTH, QUESTION, TOOLS, folder, stand
from tests.gateway.text.formats import ARGUMENTS

__all__ = ["folder", "stand"]  # fixtures

GREEDY = types_pb2.SamplingParams(temperature=0)
FUNCTIONS = [tool["function"] for tool in TOOLS]
GIVEN = [
    pb.Tool(**each | {"parameters": json.dumps(each["parameters"]) if "parameters" in each else ""})
    for each in FUNCTIONS
]
USER = pb.ChatMessage(**QUESTION[0])
TOOL_CALLS, STOP = types_pb2.FINISH_REASON_TOOL_CALLS, types_pb2.FINISH_REASON_STOP


async def ask(stub, messages=(USER,), n=1, **chat):
    request = pb.GenerateRequest(chat=pb.Chat(messages=messages, **chat), sampling=GREEDY, n=n)
    return [piece async for piece in stub.Generate(request)]


def called(pieces, index=0):
    calls = {}
    for call in (call for piece in pieces if piece.index == index for call in piece.tool_calls):
        assert bool(call.id) == bool(call.name) == (call.index not in calls)
        name, arguments = calls.get(call.index, (call.name, ""))
        calls[call.index] = name, arguments + call.arguments
    return list(calls.values())


async def test_the_stream_has_content_thoughts_and_calls(stand, stub):
    pieces = await ask(stub, tools=GIVEN, n=2)
    for index in range(2):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == "Sure."
        assert "".join(piece.reasoning_content for piece in mine) == "hm"
        assert called(pieces, index) == BOTH
        assert mine[-1].finish_reason == TOOL_CALLS
        assert sum(call.index == 0 for piece in mine for call in piece.tool_calls) > 2
        thoughts = stand.generation.tokenizer.encode(ANSWER.partition("</think>")[0] + "</think>")
        assert mine[-1].usage.reasoning_tokens == len(thoughts)
    one = await ask(stub, tools=GIVEN, parallel_tool_calls=False)
    assert called(one) == BOTH[:1]


async def test_without_tools_calls_are_text(stub):
    none = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)
    for given in ({}, {"tools": GIVEN, "tool_choice": none}):
        pieces = await ask(stub, **given)
        assert "".join(piece.text for piece in pieces) == ANSWER.partition("</think>\n\n")[2]
        assert (called(pieces), pieces[-1].finish_reason) == ([], STOP)


async def test_a_required_call_is_a_grammar_of_the_target(stand, stub):
    modes = {"mode": pb.TOOL_CHOICE_MODE_REQUIRED}, {"function": "now"}
    for given, names in zip(modes, (["add", "now"], ["now"]), strict=True):
        pieces = await ask(stub, tools=GIVEN, tool_choice=pb.ToolChoice(**given))
        assert pieces[-1].finish_reason == TOOL_CALLS
        grammar = stand.targets[0].specs[-1].params.structured_outputs.grammar
        assert all((f'"{name}\\"' in grammar) == (name in names) for name in ("add", "now"))


async def test_a_conversation_with_tools_is_the_prompt_that_rest_makes(stand, stub):
    calls = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    answer = await stand.http.post("/tokenize", json={"messages": messages, "tools": TOOLS})
    call = pb.ToolCall(id="a", name="add", arguments=ARGUMENTS)
    chat = pb.Chat(
        messages=[
            USER,
            pb.ChatMessage(role="assistant", reasoning_content="hm", tool_calls=[call]),
            pb.ChatMessage(role="tool", content="2", tool_call_id="a"),
        ],
        tools=GIVEN,
    )
    tokens = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert list(tokens.token_ids) == answer.json()["tokens"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [pb.Tool(name="a b")]}, "tools"),
        ({"tools": [pb.Tool(name="f", parameters="[1]")]}, "tools.parameters"),
        ({"tools": [pb.Tool(name="f", parameters="{")]}, "tools.parameters"),
        ({"tools": [pb.Tool(name="f", parameters="[" * 1000)]}, "tools.parameters"),
        ({"tools": [pb.Tool(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": GIVEN, "tool_choice": pb.ToolChoice(function="x")}, "tool_choice"),
        ({"tools": GIVEN, "tool_choice": pb.ToolChoice(mode=9)}, "tool_choice"),
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)}, "tool_choice"),
        ({"messages": [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * 20_000)]}, "messages"),
    ],
)
async def test_refusals_name_the_field(stub, given, param):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stub, **given)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["tandem-param"] == param
