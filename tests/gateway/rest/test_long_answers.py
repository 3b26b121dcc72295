"""Answers of many pieces: each costs what the first one costs."""

import time

import pytest

from gateway.rest.messages.events import MessageWriter
from gateway.rest.responses.events import ResponseWriter
from gateway.text.message import AssistantMessage, CallDelta, MessageDelta

PIECE, NUM_PIECES = "x" * 200, 20_000


def choice(**delta):
    return {"delta": delta, "logprobs": None}


def call(arguments):
    return {"index": 0, "id": "abcdefghi", "function": {"name": "add", "arguments": arguments}}


def of_a_message(pieces):
    writer = MessageWriter({"content": []})
    for piece in pieces:
        for _ in writer.add(piece):
            pass
    for _ in writer.end("stop", None, {}, None):
        pass
    return [
        block.get("text") or block.get("thinking") or block["input"]["INVALID_JSON"]
        for block in writer.message["content"]
    ]


def of_a_response(pieces, *, fails=False):
    writer = ResponseWriter({"output": []})
    for piece in pieces:
        for _ in writer.add(piece):
            pass
    if fails:
        writer.fail("server_error", "no")
    else:
        for _ in writer.end("stop"):
            pass
    return [
        item["content"][0]["text"] if "content" in item else item["arguments"] for item in writer.response["output"]
    ]


def of_a_chat(pieces):
    message = AssistantMessage()
    for piece in pieces:
        delta = piece["delta"]
        calls = [CallDelta(0, "" if message.calls else "abcdefghi", "add", each["function"]["arguments"])
                 for each in delta.get("tool_calls", ())]  # fmt: skip
        message.add(MessageDelta(delta.get("content", ""), delta.get("reasoning_content", ""), calls))
    return [text for text in (message.content, message.reasoning, *(each.arguments for each in message.calls)) if text]


@pytest.mark.parametrize("texts_of", [of_a_message, of_a_response, of_a_chat])
@pytest.mark.parametrize("kind", ["content", "reasoning_content", "tool_calls"])
def test_a_piece_costs_the_same_whatever_came_before(texts_of, kind):
    piece = choice(**{kind: [call(PIECE)] if kind == "tool_calls" else PIECE})
    begun_s = time.process_time()
    assert texts_of([piece] * NUM_PIECES) == [PIECE * NUM_PIECES]
    assert time.process_time() - begun_s < 1


def test_a_response_that_fails_has_the_text_so_far():
    assert of_a_response([choice(reasoning_content="a"), choice(content="b"), choice(content="c")], fails=True) == [
        "a",
        "bc",
    ]
    assert of_a_response([choice(tool_calls=[call("{")])], fails=True) == ["{"]
