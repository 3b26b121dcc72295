"""What the REST face refuses, and that it names the field."""

import gzip
import json

import pytest

from specdec.errors import InvalidRequest
from tests.gateway.fakes import Faults
from tests.gateway.rest.test_rest import body_of, chat_of, post
from tests.gateway.text.formats import FORMATS

BAD_COMPLETIONS = [
    ({"unknown_field": 1}, "unknown_field"),
    ({"speculation": {"k": 1}}, "speculation.k"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
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
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"4000": 1}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": [4000]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
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
        assert error["code"] in (400, "context_length_exceeded")
        assert error["message"]
    assert not stand.targets[0].num_opened


BAD_CHATS = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"json": {"a": 1}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"jsn": {"a": 1}}}, "structured_outputs"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_regex": "a" * 70_000}, "guided_regex"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "tool_calls": [1]}]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": None}, "messages"),
    ({"prompt": "x"}, "prompt"),
]


REASON = 'structured_outputs.{} cannot be honoured: {}Unimplemented keys: ["uniqueItems"]'
GRAMMAR = REASON.format("grammar", "at 4(9): failed to compile: ") + " 2 | calls: call ^ 3 | call: call_0"
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}


@pytest.mark.parametrize("stand", [{"chat_template": FORMATS["hermes"].chat_template}], indirect=True)
@pytest.mark.parametrize(("path", "given", "reason", "field"), [
    ("/v1/completions", {"structured_outputs": {"regex": "a"}}, REASON.format("regex", ""), "structured_outputs.regex"),
    ("/v1/completions", {"guided_grammar": "a"}, GRAMMAR, "guided_grammar"),
    ("/v1/chat/completions", {"response_format": FORMAT}, REASON.format("json", ""), "response_format"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required"}, GRAMMAR, "tools"),
    ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, REASON.format("json_object", ""), "text.format"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, REASON.format("json", ""),
     "output_config.format"),
])  # fmt: skip
async def test_a_target_that_refuses_a_language_is_told_in_the_clients_words(stand, path, given, reason, field):
    """The target knows one field for what REST has several for, and makes a grammar of tools."""
    stand.targets[0].faults = Faults(open={0: InvalidRequest(reason, param="structured_outputs")})
    chat = {"/v1/completions": body_of, "/v1/responses": lambda **more: {"input": "hi"} | more}.get(path, chat_of)
    response = await post(stand, path, **chat(**given))
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["message"].startswith(f"{field} cannot be honoured:")
    assert ("call_0" in error["message"]) == (field == "guided_grammar")
    assert error.get("param", field) == field.removesuffix(".regex")


async def test_words_that_leave_no_token(stand, tokenizer):
    response = await post(stand, **body_of(bad_words=["a"], allowed_token_ids=tokenizer.encode("a")))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bad_words")


async def test_beyond_the_context(stand):
    for change in ({"max_tokens": 10_000}, {"prompt": [5] * 600}):
        error = (await post(stand, **(body_of() | change))).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 512 tokens" in error["message"]


async def test_bad_chats_name_the_field(stand):
    for change, param in BAD_CHATS:
        response = await post(stand, "/v1/chat/completions", **(chat_of() | change))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), change


async def test_fields_that_ask_for_the_default_are_accepted(stand):
    unused = {"best_of": 1, "suffix": "", "use_beam_search": False, "response_format": {"type": "text"}}
    assert (await post(stand, **body_of(**unused))).status_code == 200
    unused = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    unused |= {"logprobs": False, "top_logprobs": 0}
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


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(("content", "headers", "words"), [
    (b"", JSON, "the body is empty"),
    (b"", {}, "the body is empty"),
    (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, "Content-Type is 'text/plain'; send application/json"),
    (b'{"prompt": "a"}', {}, "Content-Type is missing; send application/json"),
    (gzip.compress(b'{"prompt": "a"}'), JSON | {"Content-Encoding": "gzip"}, "is 'gzip'; send the body as it is"),
    (b'{"seed": ' + b"1" * 5000 + b"}", JSON, "(4300 digits) for integer string conversion: value has 5000 digits"),
    (b"[1]", JSON, "the body is no JSON object"),
    (b'"a"', JSON, "the body is no JSON object"),
])  # fmt: skip
async def test_bodies_that_are_no_object(stand, content, headers, words):
    response = await stand.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert "sys." not in response.json()["error"]["message"]


@pytest.mark.parametrize(("change", "words"), [
    ({"prompt": ["a"] * 5, "n": 128}, "5 prompts times n = 128 is above the limit of 512 sequences"
     " (--max-concurrent-sequences); lower n, or send fewer prompts"),
    ({"prompt": [-1]}, "prompt.0 is -1; it must be at least 0"),
    ({"prompt": [[5, -1]]}, "prompt.0.1 is -1; it must be at least 0"),
    ({"prompt": ["a", 1]}, "prompt.1 must be text"),
    ({"prompt": {"a": 1}}, "prompt must be text or a list"),
    ({"prompt": [1.5]}, "prompt.0 must be a whole number or text or a list"),
    ({"stop": 5}, "stop must be text or a list"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1 must be a number"),
    ({"n": "x"}, "n must be a whole number"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0 is -1; it must be at least 0"),
])  # fmt: skip
async def test_wrong_types_and_values_are_named_where_they_stand(stand, change, words):
    response = await post(stand, **(body_of() | change))
    assert response.status_code == 400
    assert response.json()["error"]["message"] == words


async def test_unknown_paths_and_methods_say_what_there_is(stand):
    response = await stand.http.post("/v1/answers", json={})
    assert "there is no '/v1/answers' here; /openapi.json lists the paths" in response.text
    response = await stand.http.get("/v1/completions")
    assert "GET does not work on '/v1/completions'; use POST" in response.text
    response = await stand.http.head("/version")
    assert (response.status_code, response.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(("content", "words"), [
    ([{"type": "image_url", "image_url": {"url": "x"}}], "a part of type 'image_url'; this server reads parts of type"),
    ([{"type": "input_audio", "input_audio": {}}], "a part of type 'input_audio'"),
    ([{"text": "a"}], "a part without a type"),
    ([{"type": "text"}], "without its text"),
    (["a"], "a part that is no object"),
])  # fmt: skip
async def test_parts_that_are_no_text(stand, content, words):
    response = await post(stand, "/v1/chat/completions", **chat_of(messages=[{"role": "user", "content": content}]))
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


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


@pytest.mark.parametrize(("path", "words"), [
    ("/v1/embeddings", "makes no embeddings"),
    ("/api/embed", "makes no embeddings"),
    ("/v1/rerank", "scores no pairs"),
    ("/score", "scores no pairs"),
    ("/v1/audio/transcriptions", "reads and writes text only"),
    ("/v1/images/generations", "reads and writes text only"),
    ("/v1/batches", "keeps no files and no jobs; send the requests themselves"),
    ("/v1/files/file-1/content", "keeps no files and no jobs"),
    ("/v1/messages/batches", "keeps no files and no jobs"),
    ("/v1/threads/t/runs", "POST /v1/responses keeps conversations"),
    ("/v1/load_lora_adapter", "merge the adapter into the model"),
    ("/sleep", "frees no memory while it runs"),
    ("/api/chat", "use POST /v1/chat/completions"),
    ("/api/generate", "use POST /v1/completions"),
    ("/api/tags", "use GET /v1/models"),
    ("/api/pull", "speaks OpenAI's API below /v1, not Ollama's"),
    ("/generate", "use POST /v1/completions"),
    ("/completion", "use POST /v1/completions"),
    ("/invocations", "use POST /v1/chat/completions"),
    ("/ping", "use GET /health"),
    ("/chat/completions", "did you mean '/v1/chat/completions'?"),
    ("/v1/v1/chat/completions", "did you mean '/v1/chat/completions'?"),
    ("/models", "did you mean '/v1/models'?"),
    ("/v1/batchesque", "/openapi.json lists the paths"),
])  # fmt: skip
async def test_a_path_of_another_server_says_what_to_use(stand, path, words):
    response = await post(stand, path)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, "not_found_error")
    assert repr(path) in error["message"]
    assert words in error["message"]


async def test_strange_but_legal_bodies(stand):
    for text in ("\\ud800", "a\\u0000b"):
        for field in ("prompt", "stop", "request_id", "session_id", "model"):
            raw = json.dumps(body_of(**{field: "?"})).replace("?", text)
            headers = {"Content-Type": "application/json"}
            response = await stand.http.post("/v1/completions", content=raw.encode(), headers=headers)
            good = 404 if field == "model" else 200
            assert response.status_code == (400 if "d800" in text else good), field
    raw, headers = b'{"tokens": [5], "\\ud800": 1}', {"Content-Type": "application/json"}
    response = await stand.http.post("/detokenize", content=raw, headers=headers)
    assert response.status_code == 400
    assert "ud800" in response.json()["error"]["message"]
    kwargs = {"add_generation_prompt": 1, "messages": 2, "self": 3, "x": 4}
    response = await post(stand, "/v1/chat/completions", **chat_of(chat_template_kwargs=kwargs))
    assert response.status_code == 200
    assert (await post(stand, **body_of(prompt="a" * 6000))).status_code == 400
    assert (await post(stand, "/tokenize", prompt="a b " * 5000)).json()["count"] > 5000
