"""``/v1/messages``: whole and streamed, stop reasons, fields, errors, keys, clients that leave."""

import json

import pytest

from gateway.rest.messages.answers import AnthropicErrorAnswer, InputTokenCount, MessageAnswer, MessageEvent
from tests.gateway.rest.test_rest import chat_of, post
from tests.until import until

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
QUESTION = [{"role": "user", "content": "hi"}]
TEXT = {"type": "text", "text": "hi"}


def asked(**changes):
    return {"model": "toy-model", "messages": QUESTION, "temperature": 0, "max_tokens": 12} | changes


async def whole(stand, **body):
    """The message, checked to be as described."""
    response = await post(stand, PATH, **body)
    assert response.status_code == 200, response.text
    MessageAnswer.model_validate(response.json(), strict=True)
    return response.json()


async def streamed(stand, **body):
    """The events, checked to be framed, named and described as they should."""
    response = await post(stand, PATH, **body, stream=True)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        MessageEvent.model_validate(events[-1], strict=True)
        assert name == f"event: {events[-1]['type']}"
    return events


def added_up(events):
    """The message that the events of a stream make, as a client reads them."""
    first, ping, *events = events
    assert (first["type"], ping) == ("message_start", {"type": "ping"})
    message, pieces = first["message"], ""
    assert message["content"] == []
    for event in events:
        content, kind = message["content"], event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(content)
            content.append(dict(event["content_block"]))
            pieces = ""
        elif kind == "content_block_delta":
            assert event["index"] == len(content) - 1
            delta = dict(event["delta"])
            field = delta.pop("type").removesuffix("_delta")
            (value,) = delta.values()
            if field == "input_json":
                pieces += value
            else:
                content[-1][field] += value
        elif kind == "content_block_stop":
            assert event["index"] == len(content) - 1
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(pieces or "{}")
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"], "metrics": event["metrics"]}
    assert events[-1] == {"type": "message_stop"}
    return message


def same(message, other):
    ours = {"id", "metrics"}
    return {name: message[name] for name in message.keys() - ours} == {
        name: other[name] for name in other.keys() - ours
    }


async def test_a_message_is_the_answer_of_the_chat(stand):
    chat = (await post(stand, "/v1/chat/completions", **chat_of())).json()
    message = await whole(stand, **asked())
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert message["id"].startswith("msg_")
    assert (message["model"], message["role"]) == ("toy-model", "assistant")
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert message["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert message["usage"]["output_tokens"] == 12
    assert message["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    stand.assert_all_closed()


async def test_the_stream_adds_up_to_the_message(stand):
    events = await streamed(stand, **asked(max_tokens=60))
    assert sum(event["type"] == "content_block_delta" for event in events) > 3
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert same(added_up(events), await whole(stand, **asked(max_tokens=60)))
    stand.assert_all_closed()


async def test_stop_reasons(stand):
    message = await whole(stand, **asked(max_tokens=60, stop_sequences=["fox", "§"]))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "fox")
    assert "fox" not in message["content"][0]["text"]
    assert same(added_up(await streamed(stand, **asked(max_tokens=60, stop_sequences=["fox", "§"]))), message)
    stand.script.stop_at = message["usage"]["input_tokens"] + 3
    assert (await whole(stand, **asked()))["stop_reason"] == "end_turn"


async def test_a_conversation_is_the_chat_it_means(stand):
    """The target gets the same prompt."""
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "be brief"}]
    turns = [
        {"role": "user", "content": [TEXT, {"type": "text", "text": "there", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "yes"}]},
        {"role": "user", "content": "go on"},
    ]
    response = await post(stand, PATH, **asked(system=system, messages=turns))
    assert response.headers["X-Ignored-Fields"] == "messages.content.cache_control, messages.content.data"
    meant = [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi\nthere"},
        {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"},
    ]  # fmt: skip
    await post(stand, "/v1/chat/completions", **chat_of(messages=meant))
    ours, chats = (spec.token_ids for spec in stand.targets[0].specs[-2:])
    assert ours == chats
    count = await post(stand, COUNT, model="toy-model", system=system, messages=turns)
    InputTokenCount.model_validate(count.json(), strict=True)
    assert count.json() == {"input_tokens": len(ours)} == {"input_tokens": response.json()["usage"]["input_tokens"]}


async def test_large_messages_are_read_by_workers(stand):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a b c d " * 10}] * 100}]
    response = await post(stand, PATH, **asked(messages=messages))
    assert response.status_code == 400
    assert "toy-model" not in response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "context" in response.json()["error"]["message"]


async def test_sampling_parameters_reach_the_target(stand):
    given = {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "seed": 3}
    await whole(stand, **asked(**given, stop_sequences=["never"], speculation={"num_speculative_tokens": 0}))
    params = stand.targets[0].specs[-1].params
    assert {name: getattr(params, name) for name in ("temperature", "top_k", "top_p")} == {
        name: given[name] for name in ("temperature", "top_k", "top_p")
    }


SWITCHED = (
    "{{ enable_thinking }}{% for message in messages %}{{ message.content }}{% endfor %}"
)  # fmt: skip


@pytest.mark.parametrize("stand", [{"chat_template": SWITCHED}], indirect=True)
@pytest.mark.parametrize(("kind", "value"), [("enabled", "True"), ("adaptive", "True"), ("disabled", "False")])
async def test_thinking_is_switched_where_the_template_can(stand, kind, value):
    response = await post(stand, PATH, **asked(thinking={"type": kind, "budget_tokens": 1024}))
    assert response.status_code == 200
    assert response.headers["X-Ignored-Fields"] == "thinking.budget_tokens"
    prompt = stand.generation.tokenizer.decode(stand.targets[0].specs[-1].token_ids, skip_special_tokens=False)
    assert prompt == f"{value}hi"


async def test_fields_without_effect_are_named(stand):
    given = {"metadata": {"user_id": "1"}, "service_tier": "auto", "thinking": {"type": "enabled"}}
    response = await post(stand, PATH, **asked(**given))
    assert response.headers["X-Ignored-Fields"] == "metadata, service_tier, thinking"


@pytest.mark.parametrize(("changes", "words"), [
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a block of type 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "reads text, tool_result here"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "the field 'text' is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}]}, "messages.content.txt"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role is 'tool'"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "I"}]}, "which this server does not continue"),
    ({"messages": []}, "messages is empty"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "this server runs no tools"),
    ({"tools": [{"name": "a"}]}, "input_schema' is missing"),
    ({"tool_choice": {"type": "any"}}, "tool_choice is required, but there are no tools"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported; call the servers from the client"),
    ({"container": "x"}, "container is not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management is not supported"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format is no JSON schema"),
    ({"n_predict": 4}, "did you mean 'max_tokens'?"),
    ({"stop": ["a"]}, "did you mean 'stop_sequences'?"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"temperature": -1}, "temperature is -1"),
    ({"stop_sequences": [""]}, "contains an empty string"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_honoured_is_refused_by_name(stand, changes, words, stream):
    response = await post(stand, PATH, **asked(**changes), stream=stream)
    assert response.status_code == 400
    AnthropicErrorAnswer.model_validate(response.json(), strict=True)
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("stand", [{"max_content_parts": 4}], indirect=True)
@pytest.mark.parametrize("changes", [
    {"messages": [{"role": "user", "content": [TEXT] * 5}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [TEXT] * 5}]}]},
    {"system": [TEXT] * 5},
])  # fmt: skip
async def test_parts_are_limited_wherever_they_stand(stand, changes):
    response = await post(stand, PATH, **asked(**changes))
    assert response.status_code == 400
    assert "--max-content-parts" in response.json()["error"]["message"]


async def test_claude_codes_context_management_asks_for_nothing(stand):
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    await whole(stand, **asked(context_management=keep))


async def test_errors_have_anthropics_shape(stand):
    for response, status, kind in (
        (await post(stand, PATH, **asked(model="claude-x")), 404, "not_found_error"),
        (await post(stand, COUNT, model="claude-x", messages=QUESTION), 404, "not_found_error"),
        (await post(stand, f"{PATH}/batches", **asked()), 404, "not_found_error"),
        (await stand.http.get(PATH), 405, "invalid_request_error"),
        (await stand.http.post(PATH, content=b"{"), 400, "invalid_request_error"),
        (await stand.http.post(PATH, json=asked(), headers={"X-Request-Timeout-S": "1e-9"}), 504, "timeout_error"),
    ):
        assert response.status_code == status
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == kind
    assert "detail" not in response.json()
    assert (await post(stand, "/v1/messagesx")).json()["error"]["code"] == 404  # another path has OpenAI's


@pytest.mark.parametrize("stand", [{"max_body_bytes": 2000}], indirect=True)
async def test_a_body_that_is_too_large(stand):
    response = await post(stand, PATH, **asked(system="x" * 3000))
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("stand", [{"api_key": ("secret",)}], indirect=True)
async def test_keys_come_in_either_header(stand):
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "Bearer secret", "x-api-key": "other"}, 200),
        ({"x-api-key": "other"}, 401),
        ({}, 401),
    ):
        for path in (PATH, COUNT):
            response = await stand.http.post(path, json={"messages": QUESTION}, headers=headers)
            assert response.status_code == status
            if status == 401:
                assert response.json()["error"]["type"] == "authentication_error"


async def test_an_error_after_the_first_event_is_the_last_event(stand):
    stand.targets[0].latency_s = 0.02
    given = asked(max_tokens=400, stream=True)
    response = await stand.http.post(PATH, json=given, headers={"X-Request-Timeout-S": "1"})
    assert response.status_code == 200
    *frames, last, _ = response.text.split("\n\n")
    assert len(frames) > 3
    error = json.loads(last.removeprefix("event: error\ndata: "))
    AnthropicErrorAnswer.model_validate(error, strict=True)
    assert error["error"]["type"] == "timeout_error"
    stand.assert_all_closed()


async def test_a_client_that_leaves_ends_the_work(stand):
    stand.targets[0].latency_s = 0.02
    async with stand.http.stream("POST", PATH, json=asked(max_tokens=400, stream=True)) as response:
        async for line in response.aiter_lines():
            if "content_block_delta" in line:
                break
    await until(lambda: not stand.generation.num_requests and not stand.targets[0].open_sessions)
    stand.assert_all_closed()
