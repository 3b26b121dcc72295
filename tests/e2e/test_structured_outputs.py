"""Structured outputs on the bundled pair: the text fits, and is that of plain decoding, whatever is drafted."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import jsonschema
import openai
import pytest

from specdec.v1 import types_pb2
from tandem import LLM, SamplingParams, StructuredOutputsParams
from tests.e2e.conftest import PROMPTS
from tests.e2e.random_schemas import random_schema
from tests.e2e.servers import (
    DRAFT_MODEL,
    TARGET_MODEL,
    Stack,
    collect,
    draft_process,
    ids_of,
    request_of,
)
from tests.gateway.text.formats import FORMATS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 5000},
        "kinds": {"type": "array", "items": {"enum": ["file", "folder", "link"]}, "minItems": 2, "maxItems": 5},
        "owner": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"id": {"type": "number"}}}]},
    },
    "required": ["name", "size", "kinds"],
    "additionalProperties": False,
}
LANGUAGES = [
    StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex=r"def [a-z_]+\((self|path)(, [a-z]+){0,3}\):"),
    StructuredOutputsParams(choice=["import os", "import sys", "import re, os"]),
    StructuredOutputsParams(grammar='start: "[" item ("," item)* "]"\nitem: /[0-9]+/ | start'),
]
#: Greedy and seeded; a seed is verified by the coupled rule.
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=80, structured_outputs=language)
    for temperature, seed in ((0.0, None), (1.0, 3), (1.3, 4))
    for language in LANGUAGES
]
CONFIGS = {
    "draft_model": {"model": DRAFT_MODEL, "num_speculative_tokens": 5},
    "tree": {"model": DRAFT_MODEL, "num_speculative_tokens": 8, "speculative_token_tree": "[(0,), (1,), (0, 0)]"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3},
}


def make_llm(config=None, **settings):
    return LLM(TARGET_MODEL, speculative_config=config, dtype="float32", fixed_draft_length=True, **settings)


def generate(llm, prompts, params):
    return llm.generate([prompts[i % len(prompts)] for i in range(len(params))], params, use_tqdm=False)


@pytest.fixture(scope="module")
def plain(prompts):
    with make_llm() as llm:
        return generate(llm, prompts, PARAMS)


def fits(text, language):
    """Whether a complete text is one of the language; by judges of their own."""
    if language.kind == "json":
        jsonschema.validate(json.loads(text), json.loads(language.json))
    if language.kind == "choice":
        assert text in language.choice
    return True


def test_complete_texts_fit(plain):
    finished = [(output.outputs[0], params) for output, params in zip(plain, PARAMS, strict=True)]
    assert sum(sample.finish_reason == "stop" for sample, _ in finished) >= len(PARAMS) // 2
    for sample, params in finished:
        if sample.finish_reason == "stop":
            assert fits(sample.text, params.structured_outputs)


@pytest.mark.parametrize("name", ["draft_model", "tree", pytest.param("ngram", marks=pytest.mark.exhaustive)])
def test_text_is_that_of_plain_decoding(prompts, plain, name):
    with make_llm(CONFIGS[name]) as llm:
        outputs = generate(llm, prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in plain]
    assert [output.outputs[0].finish_reason for output in outputs] == [
        output.outputs[0].finish_reason for output in plain
    ]
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 20


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_random_schemas(prompts, count):
    """Every finished answer parses and validates; a schema that cannot be honoured is refused by the reason."""
    draw = random.Random(5)
    schemas = [random_schema(draw) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 1.0]), seed=i, max_tokens=96,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=i % 3 > 0),
        )
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    with make_llm(CONFIGS["draft_model"]) as llm:
        outputs = generate(llm, prompts, params)
    finished = 0
    for output, schema in zip(outputs, schemas, strict=True):
        sample = output.outputs[0]
        if sample.finish_reason == "stop":
            jsonschema.validate(json.loads(sample.text), schema)
            finished += 1
    assert finished > count / 2


def check_required_calls(base_url):
    """The bundled target knows nothing of tools; the grammar makes it call them all the same."""
    bounded = SCHEMA | {"properties": {name: SCHEMA["properties"][name] for name in SCHEMA["required"]}}
    tool = {"type": "function", "function": {"name": "record", "parameters": bounded}}
    given = {
        "model": "python-12m", "messages": [{"role": "user", "content": "files"}], "max_tokens": 800,
        "temperature": 0.7, "tools": [tool], "parallel_tool_calls": False,
    }  # fmt: skip
    for seed in range(2):
        with openai.OpenAI(base_url=base_url, api_key="none") as client:
            answer = client.chat.completions.create(**given, seed=seed, tool_choice="required")
            named = {"type": "function", "function": {"name": "record"}}
            with client.chat.completions.stream(**given, seed=seed, tool_choice=named) as stream:
                streamed = stream.get_final_completion()
        [choice], [other] = answer.choices, streamed.choices
        [call], [same] = choice.message.tool_calls, other.message.tool_calls
        assert choice.finish_reason == other.finish_reason == "tool_calls"
        assert call.function.name == same.function.name == "record"
        assert call.function.arguments == same.function.arguments
        jsonschema.validate(json.loads(call.function.arguments), bounded)


@pytest.mark.e2e
def test_over_rest_and_with_a_draft_that_is_killed(stack):
    drafts = [draft_process("--num-speculative-tokens", "4")]
    running = Stack.start(stack.targets, drafts, "--chat-template", FORMATS["hermes"].chat_template)
    try:
        schema = json.dumps(SCHEMA | {"properties": SCHEMA["properties"] | {"name": {"type": "string"}}})
        request = request_of("files = ", max_tokens=200, temperature=1.0, seed=11)
        request.structured_outputs.CopyFrom(types_pb2.StructuredOutputs(json=schema))
        undisturbed = collect(running, request)
        killed = collect(running, request, acts={10: running.drafts[0].kill})
        assert ids_of(killed) == ids_of(undisturbed)
        post = partial(httpx.post, f"http://{running.gateway.address}/v1/completions", timeout=60)
        body = {"prompt": "files = ", "max_tokens": 400, "seed": 11, "temperature": 0.7}
        forms = [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}},
            {"structured_outputs": {"json": SCHEMA}},
            {"guided_json": SCHEMA},
        ]
        answers = [post(json=body | form).json() for form in forms]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        jsonschema.validate(json.loads(answers[0]["choices"][0]["text"]), SCHEMA)
        refused = post(json=body | {"guided_json": {"type": "array", "uniqueItems": True}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_json")
        assert "uniqueItems" in refused.json()["error"]["message"]
        refused = post(json=body | {"guided_regex": "a", "guided_choice": ["b"]})
        assert refused.status_code == 400
        check_required_calls(f"http://{running.gateway.address}/v1")
    finally:
        running.close()


#: A line, or its end wherever the model likes it to: both may be drafted.
ENDING = [
    {"structured_outputs": {"regex": r"[^\n]{1,40}\n"}, "logit_bias": {"0": bias}, "min_tokens": min_tokens, **more}
    for bias in (4.0, 8.0, 12.0)
    for min_tokens, more in ((0, {}), (0, {"temperature": 0}), (0, {"n": 3}), (50, {}))
]


def endings_of(running, **more):
    """Of each request every sample's text and why it ended; a request that fails fails the test."""

    def ask(seed, body):
        answer = running.complete(PROMPTS[seed % len(PROMPTS)], max_tokens=60, seed=seed, **body | more)
        return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(len(ENDING)), ENDING))


@pytest.mark.e2e
def test_a_drafted_end_fails_no_request(stack):
    """The end of a complete text may be drafted, accepted, and be forbidden by ``min_tokens``."""
    plain = endings_of(stack, speculation={"num_speculative_tokens": 0})
    assert all(reason == "stop" for answer in plain for _, reason in answer)
    assert endings_of(stack) == plain
    for rule in ("token", "block"):  # their texts depend on what is drafted
        drafted = endings_of(stack, speculation={"verification": rule})
        assert all(text.endswith("\n") or len(text) <= 40 for answer in drafted for text, _ in answer)
    lookups = Stack.start(stack.targets, [], "--lookup", "ngram")
    try:
        assert endings_of(lookups) == plain
    finally:
        lookups.close()
