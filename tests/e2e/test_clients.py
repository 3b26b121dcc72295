"""The clients users have: the official OpenAI packages, gRPC from Node.js, health checks and reflection."""

import json
from pathlib import Path

import grpc
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from tandem.cli import main as cli
from tests.e2e.servers import health_of, is_free, wait_until

pytestmark = pytest.mark.e2e
PROTOS = str(Path(__file__).parents[2] / "protos")


@pytest.fixture(scope="module")
def client(stack):
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_completion_reports_speculation(client, model, prompts):
    answer = client.completions.create(model=model, prompt=prompts[0], max_tokens=48, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 48
    report = answer.model_extra["metrics"]["speculative_decoding"]
    assert report["num_spec_steps"] > 0
    assert 1.0 < report["mean_acceptance_length"] <= 5.0
    assert report["num_accepted_draft_tokens"] == sum(a * n for a, n in enumerate(report["acceptance_histogram"]))
    assert report["num_rejections"] <= report["num_spec_steps"]
    # Prefill gives the first token, a round with drafts the accepted ones and one more, plain steps what is left.
    assert 40 <= report["num_accepted_draft_tokens"] + report["num_spec_steps"] <= 47


def test_streamed_completion_is_the_whole_one(client, model, prompts):
    whole = client.completions.create(model=model, prompt=prompts[1], max_tokens=40, temperature=0)
    stream = client.completions.create(
        model=model,
        prompt=prompts[1],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, pieces = "", None, 0
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices:
            text += chunk.choices[0].text
            pieces += 1
    assert text == whole.choices[0].text
    assert pieces > 3
    assert usage.completion_tokens == 40


def test_seeded_text_does_not_depend_on_speculation(client, model, prompts):
    texts = set()
    for k in (4, 0, 1, 3):
        answer = client.completions.create(
            model=model,
            prompt=prompts[2],
            max_tokens=48,
            temperature=1.0,
            seed=1234,
            extra_body={"speculation": {"num_speculative_tokens": k}},
        )
        texts.add(answer.choices[0].text)
    assert len(texts) == 1
    other = client.completions.create(model=model, prompt=prompts[2], max_tokens=48, temperature=1.0, seed=1235)
    assert other.choices[0].text not in texts


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_greedy_is_the_same_under_every_rule(client, model, prompts, rule):
    plain = client.completions.create(
        model=model,
        prompt=prompts[3],
        max_tokens=32,
        temperature=0,
        extra_body={"speculation": {"num_speculative_tokens": 0}},
    )
    answer = client.completions.create(
        model=model, prompt=prompts[3], max_tokens=32, temperature=0, extra_body={"speculation": {"verification": rule}}
    )
    assert answer.choices[0].text == plain.choices[0].text


def test_chat(client, model):
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert answer.choices[0].message.role == "assistant"
    assert text == answer.choices[0].message.content
    assert text


def test_logprobs_and_n(client, model, prompts):
    answer = client.completions.create(
        model=model, prompt=prompts[4], max_tokens=8, temperature=0.8, n=2, logprobs=3, seed=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 8
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_a_conversation_reuses_its_cache(client, model, stack):
    first = client.completions.create(
        model=model, prompt="def add(a, b):\n", max_tokens=16, temperature=0, extra_body={"session_id": "conversation"}
    )
    longer = "def add(a, b):\n" + first.choices[0].text
    answers = [
        client.completions.create(model=model, prompt=longer, max_tokens=16, temperature=0, extra_body=body)
        for body in ({"session_id": "conversation"}, {})
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    for answer in answers:
        assert answer.usage.prompt_tokens_details.cached_tokens > 5
    salted = client.completions.create(
        model=model, prompt=longer, max_tokens=16, temperature=0, extra_body={"cache_salt": "another"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].text == answers[0].choices[0].text
    wait_until(lambda: is_free(stack), "the target to release its blocks")
    assert stack.load_of_target().cached_blocks > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 2}, "top_p"),
        ({"extra_body": {"speculation": {"verification": "magic"}}}, "verification"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_an_impossible_value_is_named(client, model, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", **fields)
    assert param in str(caught.value.body)


def test_an_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(client, model):
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=model, prompt=[5] * 3000, max_tokens=4)


def test_node_over_grpc(stack, node, prompts):
    request = {
        "text": prompts[0],
        "max_tokens": 32,
        "sampling": {"temperature": 0.0},
        "speculation": {"num_speculative_tokens": 3},
    }
    done = node("generate.mjs", stack.grpc_address, PROTOS, json.dumps(request))
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    rest = stack.complete(prompts[0], max_tokens=32, temperature=0)
    assert answer["text"] == rest["choices"][0]["text"]
    assert len(answer["token_ids"]) == 32
    assert answer["finish_reason"] == "FINISH_REASON_LENGTH"
    assert answer["usage"]["completion_tokens"] == 32
    assert answer["speculation"]["num_spec_steps"] > 0
    assert answer["pieces"] > 3


def test_node_gets_errors_as_statuses(stack, node):
    request = {"text": "x", "sampling": {"temperature": -1.0}}
    done = node("generate.mjs", stack.grpc_address, PROTOS, json.dumps(request))
    assert json.loads(done.stdout)["code"] == "INVALID_ARGUMENT"


def test_node_with_the_openai_package(stack, node, model):
    done = node("chat.mjs", f"{stack.base_url}/v1", model)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"]
    assert answer["usage"]["completion_tokens"] == 24


def test_health_and_reflection_of_all_three(stack):
    addresses = {
        "specdec.v1.TargetService": stack.targets[0].address,
        "specdec.v1.DraftService": stack.drafts[0].address,
        "specdec.v1.GenerationService": stack.grpc_address,
    }
    for service, address in addresses.items():
        assert health_of(address) == "SERVING"
        assert health_of(address, service) == "SERVING"
        with grpc.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=10)))
            names = [entry.name for entry in answer.list_services_response.service]
        assert cli.main(["health", "--grpc", address]) == 0
        assert service in names
        assert "grpc.health.v1.Health" in names


def test_grpc_generate_tokenize_and_models(stack, prompts):
    with grpc.insecure_channel(stack.grpc_address) as channel:
        stub = stack.generation(channel)
        tokens = stub.Tokenize(pb.TokenizeRequest(text=prompts[0]), timeout=10).token_ids
        assert stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens), timeout=10).text == prompts[0]
        request = pb.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=tokens),
            max_tokens=20,
            sampling=types_pb2.SamplingParams(temperature=0),
        )
        pieces = list(stub.Generate(request, timeout=60))
        models = stub.ListModels(pb.ListModelsRequest(), timeout=10).models
    text = "".join(piece.text for piece in pieces)
    assert text == stack.complete(prompts[0], max_tokens=20, temperature=0)["choices"][0]["text"]
    assert models[0].draft.method == "draft_model"
    assert models[0].target.max_model_len == 2048
