"""Predicted outputs over every interface: the text is the same, rounds are fewer, and usage tells what was right."""

import pytest

from gateway.generation import Generation
from gateway.requests.types import GenerationRequest
from gateway.text.tokenizer import TextTokenizer
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.rpc.channel import open_channel
from specdec.rules import Rule
from specdec.settings import GatewaySettings
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2
from tests.gateway.conftest import router_of
from tests.gateway.rest.test_rest import body_of, chat_of, post

GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
GREEDY_TWICE = SamplingParams(temperature=0.0, max_tokens=20, n=2)


@pytest.fixture
def alone(backends, info, tokenizer):
    """A gateway without any draft or lookup."""
    targets, _ = backends
    return Generation(router_of(targets, [], info), GatewaySettings(fixed_draft_length=True), tokenizer)


async def generate(generation, prediction="", params=GREEDY, **given):
    request = GenerationRequest(prompt=[5, 6], params=params, prediction=prediction, **given)
    result = await generation.generate(request)
    return result.samples[0], result.speculation


async def test_a_right_prediction_saves_rounds(alone, backends, tokenizer):
    sample, plain = await generate(alone)
    assert (plain.num_spec_steps, plain.no_speculation_reason) == (0, "no_draft")
    fast, speculation = await generate(alone, sample.text)
    assert fast.token_ids == sample.token_ids
    assert speculation.num_spec_steps <= 4
    assert speculation.num_accepted_predicted_tokens >= 90
    assert speculation.num_rejected_predicted_tokens == 0
    assert (await generate(alone, list(sample.token_ids)))[1].num_spec_steps <= 4


@pytest.mark.parametrize("prediction", ["nothing like it", "x" * 600])
async def test_a_wrong_prediction_changes_nothing(alone, prediction):
    sample, _ = await generate(alone)
    wrong, speculation = await generate(alone, prediction)
    assert wrong.token_ids == sample.token_ids
    assert speculation.num_rejected_predicted_tokens > 0


async def test_an_edited_text_is_found_again(alone):
    sample, _ = await generate(alone)
    text = sample.text
    edited, speculation = await generate(alone, text[:60] + " and more words " + text[90:])
    assert edited.token_ids == sample.token_ids
    assert speculation.num_rejected_predicted_tokens > 0
    assert speculation.num_accepted_predicted_tokens > 50


@pytest.mark.parametrize(("given", "is_used"), [
    ({"params": SamplingParams(temperature=1.0, seed=3, max_tokens=60)}, True),  # coupled
    ({"params": SamplingParams(temperature=1.0, seed=3, max_tokens=60), "rule": Rule.BLOCK}, False),
    ({"params": SamplingParams(temperature=1.0, max_tokens=60), "rule": Rule.BLOCK}, True),
    ({"num_speculative_tokens": 0}, False),
])  # fmt: skip
async def test_where_a_prediction_is_drafted(alone, tokenizer, script, given, is_used):
    """Under a ratio rule the answer of an earlier request with the same seed is no draft for this one."""
    _, speculation = await generate(alone, tokenizer.decode(script.expect(2, 60, 3)), **given)
    assert bool(speculation.num_spec_steps) == is_used


@pytest.mark.parametrize(("given", "num_times"), [({"num_speculative_tokens": 0}, 0), ({"params": GREEDY_TWICE}, 1)])
async def test_a_prediction_is_tokenized_once_where_it_is_looked_up(alone, monkeypatch, given, num_times):
    texts, encode = [], TextTokenizer.encode
    monkeypatch.setattr(TextTokenizer, "encode", lambda self, text, **_: texts.append(text) or encode(self, text))
    await generate(alone, "nothing like it", **given)
    assert texts == num_times * ["nothing like it"]


async def test_half_a_surrogate_pair_is_refused_at_once(alone):
    with pytest.raises(InvalidRequest, match="half a surrogate pair") as error:
        await generate(alone, "\ud800", num_speculative_tokens=0)
    assert error.value.param == "prediction"


async def test_over_rest(stand):
    text = (await post(stand, **body_of(max_tokens=100))).json()["choices"][0]["text"]
    for content in (text, [{"type": "text", "text": text[:50]}, {"type": "text", "text": text[50:]}]):
        answer = (
            await post(stand, **body_of(max_tokens=100, prediction={"type": "content", "content": content}))
        ).json()
        assert answer["choices"][0]["text"] == text
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 50
        assert details["rejected_prediction_tokens"] == 0
    twice = (await post(stand, **body_of(max_tokens=100, n=2, prediction={"type": "content", "content": text}))).json()
    assert [choice["text"] for choice in twice["choices"]] == [text] * 2
    assert twice["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 100
    large = {"type": "content", "content": text * 60}  # read by a worker
    answer = (await post(stand, **body_of(max_tokens=100, prediction=large))).json()
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 50
    plain = (await post(stand, **body_of())).json()
    assert plain["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    chat = "/v1/chat/completions"
    text = (await post(stand, chat, **chat_of(max_tokens=60))).json()["choices"][0]["message"]["content"]
    given = chat_of(max_tokens=60, prediction={"type": "content", "content": text})
    answer = (await post(stand, chat, **given)).json()
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 30


@pytest.mark.parametrize(("prediction", "param"), [
    ({"type": "text", "content": "x"}, "prediction"),
    ({"type": "content"}, "prediction"),
    ({"type": "content", "content": 5}, "prediction"),
    ({"type": "content", "content": "x" * 66_000}, "prediction"),
])  # fmt: skip
async def test_refusals(stand, prediction, param):
    response = await post(stand, **body_of(prediction=prediction))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_over_grpc(stand):
    given = {"text": "a", "sampling": types_pb2.SamplingParams(temperature=0.0), "max_tokens": 100}
    async with open_channel(f"127.0.0.1:{stand.gateway.grpc_port}") as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        text = "".join([piece.text async for piece in stub.Generate(pb.GenerateRequest(**given))])
        pieces = [piece async for piece in stub.Generate(pb.GenerateRequest(**given, prediction=text))]
    assert "".join(piece.text for piece in pieces) == text
    assert pieces[-1].usage.accepted_prediction_tokens > 50
    assert pieces[-1].usage.rejected_prediction_tokens == 0
