"""``/v1/responses``: OpenAI's own client, the events, the conversation that is kept, and hostile input."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from gateway.rest.responses.answers import ResponseAnswer, ResponseEvent
from gateway.rest.responses.events import ResponseWriter
from gateway.rest.responses.schemas import messages_of
from gateway.rest.responses.store import ResponseStore, StoredResponse
from specdec.errors import InvalidRequest, NotFound, Unavailable
from tests.gateway.rest.test_rest import post

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"


def body_of(**changes):
    return {"model": "toy-model", "input": "hi", "temperature": 0, "max_output_tokens": 12} | changes


@pytest.fixture
async def client(stand):
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def events_of(stand, **changes):
    """The events of a stream, framed as OpenAI's are, and each as the description and OpenAI's types have it."""
    response = await post(stand, PATH, **body_of(**changes), stream=True)
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        ResponseEvent.model_validate(event, strict=True)
        TypeAdapter(ResponseStreamEvent).validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_the_client_creates_and_streams(client, stand):
    chat = await client.chat.completions.create(
        model="toy-model", messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=12
    )
    text = chat.choices[0].message.content
    response = await client.responses.create(**body_of())
    assert (response.output_text, response.status) == (text, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert response.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    stand.script.stop_at = response.usage.total_tokens
    async with client.responses.stream(**body_of(max_output_tokens=40)) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == text
    assert len(deltas) > 1
    assert (final.status, final.incomplete_details) == ("completed", None)
    assert final.id != response.id


async def test_events_are_openais(stand):
    events = await events_of(stand, include=[LOGPROBS], top_logprobs=2, metadata={"a": "b"})
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    logprobs = [entry for event in events if "delta" in event for entry in event["logprobs"]]
    assert len(logprobs) == 12
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["logprobs"] == logprobs
    assert last["metadata"] == {"a": "b"}
    whole = (await post(stand, PATH, **body_of(include=[LOGPROBS], top_logprobs=2, metadata={"a": "b"}))).json()
    ResponseAnswer.model_validate(whole, strict=True)
    Response.model_validate(whole)
    differing = {name for name in whole if whole[name] != last[name]}
    assert differing <= {"id", "created_at", "completed_at", "output", "metrics"}
    stand.assert_all_closed()


async def test_a_response_goes_on_from_an_earlier_one(client, stand):
    first = await client.responses.create(**body_of(instructions="be brief"))
    second = await client.responses.create(**body_of(input="more", previous_response_id=first.id))
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    # The same conversation, spelt out; instructions are those of one response.
    spelt = await client.responses.create(**body_of(input=messages))
    assert second.output_text == spelt.output_text
    assert second.usage.input_tokens == spelt.usage.input_tokens
    sent_back = [
        {"role": "user", "content": "hi"},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": [{"type": "input_text", "text": "more"}]},
    ]
    again = await client.responses.create(**body_of(input=sent_back))
    assert again.output_text == spelt.output_text
    sessions = [spec.session_id for spec in stand.targets[0].specs]
    assert sessions[0] == sessions[1] == f"/{first.id}"
    assert len(set(sessions)) == 3


async def test_responses_are_kept_given_and_forgotten(client, stand):
    first = await client.responses.create(**body_of())
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="is not kept here"):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="send the conversation as input") as caught:
        await client.responses.create(**body_of(previous_response_id=first.id))
    assert caught.value.param == "previous_response_id"
    unkept = await client.responses.create(**body_of(store=False))
    assert unkept.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unkept.id)
    assert not stand.targets[0].specs[-1].is_named
    streamed = await events_of(stand)
    assert (await client.responses.retrieve(streamed[-1]["response"]["id"])).status == "incomplete"


@pytest.mark.parametrize("stand", [{"api_key": ("one", "two")}], indirect=True)
async def test_no_key_reads_the_responses_of_another(stand):
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    first = (await stand.http.post(PATH, json=body_of(), headers=mine)).json()
    for method, path in (("GET", f"{PATH}/{first['id']}"), ("DELETE", f"{PATH}/{first['id']}")):
        assert (await stand.http.request(method, path, headers=other)).status_code == 404
        assert (await stand.http.request(method, path)).status_code == 401
    following = body_of(previous_response_id=first["id"])
    assert (await stand.http.post(PATH, json=following, headers=other)).status_code == 400
    assert (await stand.http.post(PATH, json=following, headers=mine)).status_code == 200


class City(BaseModel):
    name: str


async def test_formats_become_structured_outputs(client, stand):
    schema = City.model_json_schema()
    text = {"format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True}}
    await client.responses.create(**body_of(text=text))
    assert stand.targets[0].specs[-1].params.structured_outputs.json == json.dumps(schema)
    await client.responses.create(**body_of(text={"format": {"type": "json_object"}}))
    assert stand.targets[0].specs[-1].params.structured_outputs.json_object
    await client.responses.create(**body_of(text={"format": {"type": "text"}}))
    assert stand.targets[0].specs[-1].params.structured_outputs is None


async def test_large_requests_are_read_by_workers(client, stand):
    schema = City.model_json_schema() | {"description": "x" * 9000}
    text = {"format": {"type": "json_schema", "name": "city", "schema": schema}}
    first = await client.responses.create(**body_of(text=text, metadata={"a": "x" * 9000}))
    assert len(first.metadata["a"]) == 9000
    assert stand.targets[0].specs[-1].params.structured_outputs.json == json.dumps(schema)
    small = await client.responses.create(**body_of())
    assert first.output_text == small.output_text


async def test_fields_reach_the_chat(client, stand):
    extra = {"seed": 5, "speculation": {"num_speculative_tokens": 0}}
    await client.responses.create(**body_of(temperature=0.5, top_p=0.9), extra_body=extra)
    spec = stand.targets[0].specs[-1]
    assert (spec.params.temperature, spec.params.top_p, spec.params.seed) == (0.5, 0.9, 5)
    assert (spec.params.max_tokens, spec.num_speculative_tokens) == (12, 0)


IMAGE = {"type": "input_image", "image_url": "data:x"}
REFUSED = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": ["message"]}]}, "input"),
    ({"input": [{"role": "user"}]}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input"),
    ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input.colour"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input"),
    ({"input": "\ud800"}, "input"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temprature": 1}, "temprature"),
    ({"previous_response_id": "x" * 5000}, "previous_response_id"),
]


async def test_what_is_not_supported_is_refused_by_name(stand):
    for given, param in REFUSED:
        raw = json.dumps(body_of(**given)).encode()
        response = await stand.http.post(PATH, content=raw, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, (given, response.text)
        error = response.json()["error"]
        assert error["param"] == param, given
        assert "max_tokens" not in error["message"], given
        assert len(error["message"]) < 500
    stand.assert_all_closed()


@pytest.mark.parametrize("stand", [{"max_messages": 20, "max_content_parts": 5, "max_body_bytes": 1000}], indirect=True)
async def test_limits_hold_for_one_input_and_for_the_whole_conversation(stand):
    parts = [{"type": "input_text", "text": "x"}] * 6
    for given in ([{"role": "user", "content": "x"}] * 21, [{"role": "user", "content": parts}]):
        assert (await post(stand, PATH, **body_of(input=given))).status_code == 400
    previous = None
    for _ in range(9):
        response = await post(stand, PATH, **body_of(max_output_tokens=40, previous_response_id=previous))
        if response.status_code != 200:
            break
        previous = response.json()["id"]
    assert response.status_code == 400
    assert "--max-body-bytes" in response.json()["error"]["message"]


@pytest.mark.usefixtures("short_pauses")
async def test_an_error_within_a_stream_ends_it_as_failed(stand):
    for event in ("verify", "multi_step"):
        stand.targets[0].faults.plan[event] = lambda _: Unavailable("lost")
    events = await events_of(stand, max_output_tokens=60)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "lost" in last["response"]["error"]["message"]
    assert (await stand.http.get(f"{PATH}/{last['response']['id']}")).status_code == 404


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "s"}]},
        {"role": "assistant", "content": "done"},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (("c1", "f", "{}"), ("c2", "g", ""), ("c3", "f", "{}"))
    ]
    assert messages_of(items) == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": calls[:2], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "done", "tool_calls": calls[2:]},
    ]


def test_thoughts_and_calls_have_their_events():
    writer = ResponseWriter({"id": "r", "output": [], "status": "in_progress"})
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a"'}}
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "h"},
        {"reasoning_content": "m"},
        {"content": "so"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {"tool_calls": [call | {"index": 1, "id": "c2"}]},
    ]
    events = [*writer.begin(), *(e for d in deltas for e in writer.add({"delta": d, "logprobs": None}))]
    events += writer.end("tool_calls")
    for event in events:
        if "response" not in event:
            TypeAdapter(ResponseStreamEvent).validate_python(event)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]
    # What is done changes no more: no copies.
    assert all(kept is told for kept, told in zip(writer.response["output"], done, strict=True))
    assert {item["status"] for item in done} == {"completed"}
    arguments = [e["arguments"] for e in events if e["type"] == "response.function_call_arguments.done"]
    assert arguments == ['{"a":1}', '{"a"']
    message = writer.message()
    assert (message["content"], message["reasoning_content"]) == ("so", "hm")
    assert [each["id"] for each in message["tool_calls"]] == ["c1", "c2"]


def stored(name, size=1000):
    return StoredResponse(name, b"x" * size, (), "s", 0)


@pytest.mark.parametrize("stand", [{"max_stored_response_bytes": most} for most in (0, 1500)], indirect=True)
async def test_an_answer_that_is_not_kept_says_so(stand):
    """With 0 none is; else it shows only when its size is known."""
    response = (await post(stand, PATH, **body_of(metadata={"a": "x" * 400}))).json()
    events = await events_of(stand, metadata={"a": "x" * 400})
    for each in (response, events[-1]["response"]):
        assert each["store"] is False
        assert (await stand.http.get(f"{PATH}/{each['id']}")).status_code == 404


async def test_its_trace_is_one_of_a_chat(stand, monkeypatch):
    operations = []
    monkeypatch.setattr("gateway.rest.route.use_trace_context", lambda _, operation: operations.append(operation))
    await post(stand, PATH, **body_of())
    await post(stand, "/v1/completions", model="toy-model", prompt="hi", max_tokens=1)
    assert operations == ["chat", "text_completion"]


def test_small_messages_count_with_what_they_cost():
    small = StoredResponse("r", b"", (b"{}",) * 10_000, "s", 0)
    assert small.num_bytes > 60 * len(small.messages)


def test_a_response_that_the_bound_drops_at_once_is_not_kept():
    store = ResponseStore(10 * stored("x").num_bytes)
    for number in range(6):
        assert store.add("many", stored(str(number)))
    assert not store.add("one", stored("large", 8 * stored("x").num_bytes))


def test_the_store_is_bounded_and_shared_fairly():
    store = ResponseStore(10 * stored("x").num_bytes)
    store.add("quiet", stored("q"))
    for number in range(100):
        store.add("loud", stored(str(number)))
        assert store.num_bytes <= 10 * stored("x").num_bytes
    assert store.get("quiet", "q").id == "q"
    assert store.get("loud", "99").id == "99"
    for owner, name in (("loud", "0"), ("quiet", "99"), ("nobody", "q")):
        with pytest.raises(NotFound):
            store.get(owner, name)
    store.get("loud", "91")  # used now, so the next one goes
    store.add("loud", stored("new"))
    assert store.get("loud", "91").id == "91"
    with pytest.raises(NotFound):
        store.get("loud", "92")
    store.add("quiet", stored("huge", 10**6))
    assert store.get("quiet", "q").id == "q"
    for owner, names in (("quiet", ["q"]), ("loud", ["91", "new", *map(str, range(93, 100))])):
        for name in names:
            store.delete(owner, name)
    assert store.num_bytes == 0


async def test_other_paths_of_openai_have_its_error_shape(client, stand):
    for call in (
        client.embeddings.create(model="toy-model", input="x"),
        client.images.generate(prompt="x"),
        client.moderations.create(input="x"),
        client.files.list(),
    ):
        with pytest.raises(openai.NotFoundError, match="is not served: ") as caught:
            await call
        assert caught.value.type == "not_found_error"
    with pytest.raises(InvalidRequest):
        messages_of([None])
