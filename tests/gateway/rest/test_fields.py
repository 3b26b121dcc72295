"""What becomes of each field of a body: honoured, ignored and named, or refused by name."""

import logging

import pytest

from gateway.rest import answers
from gateway.rest.body import Refused
from gateway.rest.schemas import ChatBody, CompletionBody
from tests.gateway.conftest import serve
from tests.gateway.rest.test_rest import body_of, chat_of, events, post

CHAT = "/v1/chat/completions"
HEADER = "X-Ignored-Fields"

#: What openai's ``model_dump()`` of an answer's message holds, and LiteLLM's beside it.
SENT_BACK = {
    "role": "assistant", "content": "x", "refusal": None, "annotations": None, "audio": None, "function_call": None,
    "tool_calls": None, "reasoning_content": None, "provider_specific_fields": {"a": 1}, "id": "msg-1",
    "cache_control": {"type": "ephemeral"},
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_without_effect_are_accepted_and_named(stand, stream):
    plain = (await post(stand, CHAT, **chat_of())).json()["choices"]
    many = {
        "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "priority": 3, "user": "me",
        "reasoning_effort": "low", "mm_processor_kwargs": {"a": 1},
    }  # fmt: skip
    response = await post(stand, CHAT, **chat_of(**many, stream=stream))
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == ", ".join(sorted(many))
    if not stream:
        assert response.json()["choices"] == plain
    response = await post(stand, **body_of(user="me", length_penalty=1.0, stream=stream))
    assert response.headers[HEADER] == "length_penalty, user"
    assert HEADER not in (await post(stand, **body_of(stream=stream))).headers


async def test_the_log_names_an_ignored_field_once(stand, caplog, monkeypatch):
    monkeypatch.setattr(answers, "_logged", set())
    with caplog.at_level(logging.INFO, logger=answers.__name__):
        for _ in range(3):
            await post(stand, **body_of(user="me"))
    assert [record.getMessage() for record in caplog.records] == ["the field user of requests has no effect here"]


async def test_an_answer_can_be_sent_back(stand):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}, SENT_BACK]
    response = await post(stand, CHAT, **chat_of(messages=[*messages, {"role": "user", "content": "more"}]))
    assert response.status_code == 200, response.text
    named = ["messages.cache_control", "messages.id", "messages.provider_specific_fields"]
    assert response.headers[HEADER] == ", ".join(named)


@pytest.mark.parametrize(("path", "given", "body"), [
    ("/v1/completions", body_of(), CompletionBody), (CHAT, chat_of(), ChatBody),
])  # fmt: skip
async def test_null_and_empty_mean_the_default(stand, path, given, body):
    required = {"prompt", "messages", "model", "max_tokens", "temperature"}
    usual = (await post(stand, path, **given)).json()["choices"]
    for empty in (None, "", [], {}):
        nothing = dict.fromkeys(set(body.model_fields) - required, empty)
        if empty is not None:
            del nothing["allowed_token_ids"]
        response = await post(stand, path, **given, **nothing, field_of_tomorrow=empty)
        assert response.status_code == 200, response.text
        assert response.json()["choices"] == usual
        assert HEADER not in response.headers
    inner = {"include_usage": None, "continuous_usage_stats": None, "include_obfuscation": None}
    assert (await post(stand, path, **given, stream=True, stream_options=inner)).status_code == 200
    speculation = {"num_speculative_tokens": None, "verification": "", "method": []}
    assert (await post(stand, path, **given, speculation=speculation)).status_code == 200


REFUSED = {
    "functions": [{}], "function_call": {"name": "f"},
    "modalities": ["audio"], "verbosity": "low", "web_search_options": {"a": 1}, "audio": {"voice": "x"},
    "chat_template": "{{ x }}", "continue_final_message": True, "echo": True, "suffix": "x",
    "documents": [{"text": "x"}], "logits_processors": ["a"], "truncate_prompt_tokens": 5, "use_beam_search": True,
}  # fmt: skip


async def test_fields_that_would_change_the_answer_are_refused_by_name(stand):
    for body, path, given in ((CompletionBody, "/v1/completions", body_of()), (ChatBody, CHAT, chat_of())):
        names = {n for n, field in body.model_fields.items() if any(isinstance(m, Refused) for m in field.metadata)}
        assert names <= set(REFUSED)
        for name in names:
            response = await post(stand, path, **given, **{name: REFUSED[name]})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            assert error["message"].startswith(f"{name} is not supported")
    for name, value in {
        "audio": {"id": "1"},
        "refusal": "no",
    }.items():
        response = await post(stand, CHAT, **chat_of(messages=[{"role": "assistant", "content": "x", name: value}]))
        assert (response.status_code, response.json()["error"]["param"]) == (400, f"messages.{name}")


@pytest.mark.parametrize(("path", "given", "near"), [
    ("/v1/completions", body_of(temprature=0.5), "did you mean 'temperature'?"),
    ("/v1/completions", body_of(**{"x" * 100: 1}), "xxx…"),
    (CHAT, chat_of(max_token=3), "did you mean 'max_tokens'?"),
    (CHAT, chat_of(messages=[{"role": "user", "contents": "x"}]), "did you mean 'messages.content'?"),
    (CHAT, chat_of(stream=True, stream_options={"include_use": True}), "did you mean 'stream_options.include_usage'?"),
    (CHAT, chat_of(n_predict=8), "did you mean 'max_tokens'?"),
    ("/v1/completions", body_of(max_new_tokens=8), "did you mean 'max_tokens'?"),
    ("/v1/responses", {"input": "x", "max_tokens": 8}, "did you mean 'max_output_tokens'?"),
    ("/v1/responses", {"input": "x", "n_predict": 8}, "did you mean 'max_output_tokens'?"),
    ("/v1/responses", {"input": "x", "messages": [1]}, "did you mean 'input'?"),
    (CHAT, chat_of(stop_sequences=["a"]), "did you mean 'stop'?"),
    (CHAT, chat_of(prompt="x"), "did you mean 'messages'?"),
    (CHAT, chat_of(extra_body={"top_k": 1}), "unknown field 'extra_body'; put what it holds into the body itself"),
    (CHAT, chat_of(mirostat=2), "unknown field 'mirostat'; docs/api.md lists the fields"),
])  # fmt: skip
async def test_a_misspelt_field_is_refused_with_the_nearest_name(stand, path, given, near):
    response = await post(stand, path, **given)
    assert response.status_code == 400
    assert near in response.json()["error"]["message"]


async def test_usage_in_every_event(stand):
    given = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path, body, prompt in (("/v1/completions", body_of(n=2), 2), (CHAT, chat_of(n=2), None)):
        pieces = await events(stand, path, **body, **given)
        counts = [piece["usage"]["completion_tokens"] for piece in pieces]
        assert counts == sorted(counts)
        assert counts[-1] == 24
        assert 0 < counts[0] < 24
        assert len({piece["usage"]["prompt_tokens"] for piece in pieces}) == 1
        assert prompt in (None, pieces[0]["usage"]["prompt_tokens"])


async def test_templates_get_what_they_read(backends, info, script, tokenizer_folder):
    template = "{{ reasoning_effort }}|{{ documents[0].text }}|{{ messages[0].reasoning_content }}"
    async with serve(backends, info, script, tokenizer=str(tokenizer_folder), chat_template=template) as stand:
        message = {"role": "assistant", "content": "x", "reasoning_content": "deep"}
        given = {"messages": [message], "reasoning_effort": "low", "documents": [{"text": "d"}]}
        response = await post(stand, CHAT, **chat_of(**given, return_token_ids=True))
        assert response.status_code == 200, response.text
        assert HEADER not in response.headers
        ids = response.json()["prompt_token_ids"]
        assert stand.generation.tokenizer.decode(ids) == "low|d|deep"
