"""What the REST face refuses, and that it names the field."""

import json

import pytest

from tests.gateway.rest.test_rest import body_of, chat_of, post

BAD_COMPLETIONS = [
    ({"unknown_field": 1}, "unknown_field"),
    ({"speculation": {"k": 1}}, "speculation.k"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 13}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"4000": 1}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": [4000]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"speculation": {"num_speculative_tokens": 65}}, "num_speculative_tokens"),
    ({"speculation": {"verification": "magic"}}, "speculation"),
    ({"session_id": "x" * 257}, "session_id"),
    ({"session_id": "x", "prompt": ["a", "b"]}, "session_id"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [4000]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [5] * 600}, "prompt"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_completions_name_the_field(stand, stream):
    for change, param in BAD_COMPLETIONS:
        response = await post(stand, **(body_of(stream=stream) | change))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), change
        assert error["type"] == "invalid_request_error"
        assert error["code"] == 400
        assert error["message"]
    assert not stand.targets[0].num_opened


BAD_CHATS = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 30}, "logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "tool_calls": [1]}]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": None}, "messages"),
    ({"prompt": "x"}, "prompt"),
]


async def test_bad_chats_name_the_field(stand):
    for change, param in BAD_CHATS:
        response = await post(stand, "/v1/chat/completions", **(chat_of() | change))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), change


async def test_fields_that_mean_nothing_are_accepted(stand):
    unused = {"best_of": 1, "suffix": None, "user": "me", "store": False, "metadata": None, "service_tier": "auto"}
    assert (await post(stand, **body_of(**unused))).status_code == 200
    unused = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    assert (await post(stand, "/v1/chat/completions", **chat_of(**unused))).status_code == 200


async def test_bodies_that_are_no_json_or_too_large(stand):
    headers = {"Content-Type": "application/json"}
    response = await stand.http.post("/v1/completions", content=b"{nope", headers=headers)
    assert response.status_code == 400
    assert "not JSON" in response.json()["error"]["message"]
    response = await stand.http.post("/v1/completions", json={"prompt": "a" * (17 * 2**20)})
    assert response.status_code == 413

    async def pieces():
        for _ in range(17):
            yield b"a" * 2**20

    response = await stand.http.post("/v1/completions", content=pieces(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == 413


async def test_unknown_models_and_paths(stand):
    for response in (
        await post(stand, **body_of(model="other")),
        await post(stand, "/v1/chat/completions", **chat_of(model="other")),
        await stand.http.get("/v1/models/other"),
        await stand.http.get("/v2/none"),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"
    assert (await stand.http.get("/v1/completions")).status_code == 405


async def test_strange_but_legal_bodies(stand):
    for text in ("\\ud800", "a\\u0000b"):
        for field in ("prompt", "stop", "request_id", "session_id", "model"):
            raw = json.dumps(body_of(**{field: "?"})).replace("?", text)
            headers = {"Content-Type": "application/json"}
            response = await stand.http.post("/v1/completions", content=raw.encode(), headers=headers)
            good = 404 if field == "model" else 200
            assert response.status_code == (400 if "d800" in text else good), field
    kwargs = {"add_generation_prompt": 1, "messages": 2, "self": 3, "x": 4}
    response = await post(stand, "/v1/chat/completions", **chat_of(chat_template_kwargs=kwargs))
    assert response.status_code == 200
    assert (await post(stand, **body_of(prompt="a" * 6000))).status_code == 400
    assert (await post(stand, "/tokenize", prompt="a b " * 5000)).json()["count"] > 5000
