"""Whole answers with log-probabilities: they are kept as JSON, not as objects, and sent in pieces."""

import asyncio
import gc
import json

import pytest

from gateway.rest.whole_answer import WholeLogprobs, WholeResponse
from specdec.logprobs import PositionLogprobs


async def sent_by(response):
    """The bodies of a response, and how often others ran meanwhile."""
    messages, turns = [], 0

    async def send(message):
        messages.append(message)

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    await response({"type": "http"}, None, send)
    other.cancel()
    return messages, turns


@pytest.mark.parametrize("lists", [[], [[]], [[1], [], [2, {"a": "é"}]]])
async def test_pieces_are_the_object_as_a_whole(lists):
    logprobs = WholeLogprobs()
    for values in lists:
        logprobs.add({"content": values, "tokens": values, "refusal": None})
    entries = [value for values in lists for value in values]
    expected = {"content": entries, "tokens": entries, "refusal": None} if lists else {}
    choices = [({"index": 0}, logprobs), ({"index": 1}, None)]
    messages, turns = await sent_by(WholeResponse({"id": "x"}, choices, {"X-Name": "y"}))
    begin, *bodies = messages
    whole = b"".join(message["body"] for message in bodies)
    assert json.loads(whole) == {
        "id": "x", "choices": [{"index": 0, "logprobs": expected}, {"index": 1, "logprobs": None}],
    }  # fmt: skip
    headers = dict(begin["headers"])
    assert headers[b"content-length"] == str(len(whole)).encode()
    assert (headers[b"content-type"], headers[b"x-name"]) == (b"application/json", b"y")
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    assert turns >= len(bodies) - 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_no_objects_are_kept_until_the_end(stand, monkeypatch, path):
    counts, stream = [], stand.generation.stream

    async def watched(request):
        async for chunk in stream(request):
            yield chunk
            if chunk.final is not None:
                counts.append(num_objects())

    def num_objects():
        return sum(type(each) is PositionLogprobs for each in gc.get_objects())

    gc.collect()
    before = num_objects()  # of other tests
    monkeypatch.setattr(stand.generation, "stream", watched)
    body = {"n": 4, "max_tokens": 60, "temperature": 0}
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
    else:
        body |= {"prompt": "hi", "logprobs": 20}
    answer = (await stand.http.post(path, json=body)).json()
    logprobs = [choice["logprobs"] for choice in answer["choices"]]
    assert [len(each["content" if "chat" in path else "tokens"]) for each in logprobs] == [60] * 4
    assert len(counts) == 4
    assert max(counts) - before < 4 * 60 / 4, "of all that were reported"
