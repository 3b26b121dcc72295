"""The OpenAPI description is that of the real answers."""

import json
import re

import pytest

from gateway.decoding.metrics import METRICS
from gateway.rest.answer_schemas import ErrorAnswer, SpeculativeDecoding
from gateway.rest.app import api_routes
from gateway.rest.messages.schemas import CountTokensBody, MessagesBody
from gateway.rest.responses.schemas import ResponseBody
from gateway.rest.schemas import ChatBody, CompletionBody
from gateway.text.chat_template import ChatTemplate
from tests.gateway.conftest import serve
from tests.gateway.rest.test_rest import body_of, chat_of, events, post

EVERYTHING = {
    "n": 2,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "stop": "fox",
    "return_token_metrics": True,
}
CALLS = [
    ("/v1/completions", body_of()),
    ("/v1/completions", body_of(prompt="a b", echo=True, **EVERYTHING)),
    ("/v1/completions", body_of(stream_options={"include_usage": True, "continuous_usage_stats": True}, **EVERYTHING)),
    ("/v1/chat/completions", chat_of()),
    ("/v1/chat/completions", chat_of(**(EVERYTHING | {"logprobs": True, "top_logprobs": 2}))),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_generated_answers_are_as_described(stand, path, body):
    route = {each.path: each for each in api_routes(stand.generation)}[path]
    for piece in await events(stand, path, **body):
        route.event.model_validate(piece, strict=True)
    whole = {name: value for name, value in body.items() if name != "stream_options"}
    route.answer.model_validate((await post(stand, path, **whole)).json(), strict=True)


async def test_other_answers_are_as_described(stand):
    sent = {"/tokenize": {"prompt": "a b", "return_token_strs": True}, "/detokenize": {"tokens": [5]}}
    for route in api_routes(stand.generation):
        url = route.path.replace("{name:path}", "toy-model")
        if url in sent or (route.method == "GET" and route.answer is not None and "{" not in url):
            response = await (post(stand, url, **sent[url]) if url in sent else stand.http.get(url))
            route.answer.model_validate(response.json(), strict=True)
    for response in (await post(stand), await stand.http.get("/none"), await stand.http.get("/v1/completions")):
        ErrorAnswer.model_validate(response.json(), strict=True)


async def test_the_description_names_content_types_and_errors(stand):
    schema = (await stand.http.get("/openapi.json")).json()
    described = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    assert described == {(route.method, route.path_format) for route in api_routes(stand.generation)}
    responses = schema["paths"]["/v1/completions"]["post"]["responses"]
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert set(responses) == {"200", "400", "401", "404", "413", "429", "4XX", "500", "503", "504"}
    assert set(schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    components = schema["components"]["schemas"]
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(schema)))
    assert named <= components.keys()
    for body in (CompletionBody, ChatBody, ResponseBody, MessagesBody, CountTokensBody):
        assert set(components[body.__name__]["properties"]) == set(body.model_fields)
    temperature = components["ChatBody"]["properties"]["temperature"]["anyOf"]
    assert temperature[0] == {"type": "number", "minimum": 0.0}


async def test_fields_that_must_not_be_empty_and_values_beside_a_range_are_described(stand):
    components = (await stand.http.get("/openapi.json")).json()["components"]["schemas"]
    prompt, tokens, top_k = (
        components["CompletionBody"]["properties"][name]["anyOf"] for name in ("prompt", "allowed_token_ids", "top_k")
    )
    assert all(kind.get("minLength", kind.get("minItems")) == 1 for kind in prompt)
    assert tokens[0]["minItems"] == 1
    assert {"enum": ["", [], {}, -1]} in top_k
    assert components["ChatBody"]["properties"]["messages"]["minItems"] == 1
    assert components["ResponseBody"]["properties"]["input"]["anyOf"][1]["minItems"] == 1


async def test_generated_clients_keep_their_names(stand):
    paths = (await stand.http.get("/openapi.json")).json()["paths"]
    completions, forget = paths["/v1/completions"]["post"], paths["/v1/responses/{response_id}"]["delete"]
    assert (completions["operationId"], completions["summary"]) == ("completions_v1_completions_post", "Completions")
    assert forget["operationId"] == "forget_response_v1_responses__response_id__delete"
    assert forget["parameters"] == [
        {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "title": "Response Id"}}
    ]


async def test_streams_end_as_described(stand):
    paths = (await stand.http.get("/openapi.json")).json()["paths"]
    data = {
        path: paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]["properties"][
            "data"
        ]
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")
    }
    assert data["/v1/chat/completions"]["anyOf"][1] == {"const": "[DONE]"}
    assert data["/v1/messages"]["contentSchema"] == {"$ref": "#/components/schemas/MessageEvent"}
    assert data["/v1/responses"]["contentSchema"] == {"$ref": "#/components/schemas/ResponseEvent"}


async def test_links_lead_from_a_response_to_all_that_can_be_asked_of_it(stand):
    paths = (await stand.http.get("/openapi.json")).json()["paths"]
    links = paths["/v1/responses"]["post"]["responses"]["200"]["links"]
    operations = {
        operation["operationId"]
        for path, methods in paths.items() if path.startswith("/v1/responses")
        for operation in methods.values()
    }  # fmt: skip
    assert {link["operationId"] for link in links.values()} == operations
    query = {each["name"] for each in paths["/v1/responses/{response_id}/input_items"]["get"]["parameters"]}
    assert query == {"response_id", "limit", "order", "after"}


async def test_every_object_of_a_body_names_the_values_that_mean_the_default(stand):
    components = (await stand.http.get("/openapi.json")).json()["components"]["schemas"]
    bodies = ("ChatBody", "Message", "EarlierCall", "CalledFunction", "Prediction", "Speculation", "ResponseBody")
    for body in bodies:
        assert components[body]["additionalProperties"] == {"enum": [None, "", [], {}]}, body
    assert components["EarlierCall"]["properties"]["type"]["anyOf"][-1] == {"enum": ["", [], {}]}


def test_the_described_metrics_are_the_reported_ones():
    assert list(SpeculativeDecoding.model_fields) == list(METRICS)


async def test_tokenizer_info(backends, info, script, stand):
    """Clients with a remote tokenizer, such as lm-eval, render chats by themselves."""
    about = (await stand.http.get("/tokenizer_info")).json()
    special = stand.generation.tokenizer.special_tokens
    assert {role: about[role] for role in special} == special
    messages = [{"role": "user", "content": "a"}]
    rendered = ChatTemplate(about["chat_template"], special).render(messages)
    assert rendered == stand.generation.text.render_chat(messages)
    async with serve(backends, info, script) as bare:
        assert (await bare.http.get("/tokenizer_info")).status_code == 404
