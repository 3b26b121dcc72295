"""What REST offers is there over gRPC, too, with the same answers."""

import json

import grpc
import pytest

from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2

GREEDY = types_pb2.SamplingParams(temperature=0)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick"}]


async def ask(stub, **fields):
    return [piece async for piece in stub.Generate(pb.GenerateRequest(**{"sampling": GREEDY} | fields))]


def text_of(pieces, index=0):
    return "".join(piece.text for piece in pieces if piece.index == index)


async def rest(stand, path, **body):
    answer = await stand.http.post(path, json={"temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("padding", ["", " jumps" * 2000], ids=["here", "in a worker"])
async def test_a_conversation_is_rendered_by_the_chat_template(stand, stub, padding):
    """Large requests are read by the functions that workers call."""
    given = await stand.http.post("/tokenize", json={"messages": MESSAGES})
    chat = pb.Chat(
        messages=[pb.ChatMessage(**message) for message in MESSAGES], template_kwargs=f'{{"x": "{padding}"}}'
    )
    tokens = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert list(tokens.token_ids) == given.json()["tokens"]
    pieces = await ask(stub, chat=chat, max_tokens=12, echo=True)
    whole = await rest(stand, "/v1/chat/completions", messages=MESSAGES, max_tokens=12)
    assert text_of(pieces) == whole["choices"][0]["message"]["content"]
    assert pieces[0].prompt.token_ids == tokens.token_ids
    assert pieces[0].prompt.text == "<|user|>Be brief.<|user|>The quick<|assistant|>"


async def test_what_a_template_gets(stand, stub, monkeypatch):
    asked = []

    def render(messages, **given):
        asked.append((messages, given))
        return "The quick"

    monkeypatch.setattr(stand.generation.text, "render_chat", render)
    message = pb.ChatMessage(role="assistant", content="Yes.", name="Ada", reasoning_content="Hm.")
    chat = pb.Chat(messages=[message], add_generation_prompt=False, template_kwargs='{"enable_thinking": true, "n": 3}')
    await ask(stub, chat=chat, max_tokens=1)
    messages = [{"role": "assistant", "content": "Yes.", "name": "Ada", "reasoning_content": "Hm."}]
    variables = {"enable_thinking": True, "n": 3}
    assert asked == [(messages, {"add_generation_prompt": False, "variables": variables})]


async def test_a_conversation_may_use_the_whole_context(stand, stub):
    pieces = await ask(stub, chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")]))
    usage = pieces[-1].usage
    assert usage.prompt_tokens + usage.completion_tokens == 512


async def test_samples(stand, stub):
    pieces = await ask(stub, text="The", n=3, seed=7, max_tokens=6, sampling=None)
    whole = await rest(stand, "/v1/completions", prompt="The", n=3, seed=7, max_tokens=6, temperature=1)
    assert [text_of(pieces, index) for index in range(3)] == [choice["text"] for choice in whole["choices"]]
    assert len({text_of(pieces, index) for index in range(3)}) > 1
    ends = [piece for piece in pieces if piece.HasField("usage")]
    assert sorted(piece.index for piece in ends) == [0, 1, 2]
    assert all(piece.usage.completion_tokens == 6 for piece in ends)


async def test_the_prompt_is_reported_where_it_is_asked_for(stand, stub, tokenizer):
    ids = tokenizer.encode("The quick")
    quiet = await ask(stub, text="The quick", max_tokens=4)
    assert not any(piece.HasField("prompt") for piece in quiet)
    for prompt in ({"text": "The quick"}, {"token_ids": types_pb2.TokenIds(ids=ids)}):
        pieces = await ask(stub, **prompt, max_tokens=4, echo=True)
        (report,) = [piece.prompt for piece in pieces if piece.HasField("prompt")]
        assert (report.text, list(report.token_ids), list(report.logprobs)) == ("The quick", ids, [])
        assert text_of(pieces) == text_of(quiet)


async def test_log_probabilities_of_the_prompt(stand, stub):
    pieces = await ask(stub, text="The quick brown", max_tokens=2, prompt_logprobs=2)
    whole = await rest(stand, "/v1/completions", prompt="The quick brown", max_tokens=2, prompt_logprobs=2)
    _, *expected = whole["choices"][0]["prompt_logprobs"]
    assert expected
    given = pieces[0].prompt
    assert given.text == ""
    assert len(given.logprobs) == len(given.token_ids) - 1 == len(expected)
    for position, objects in zip(given.logprobs, expected, strict=True):
        tokens = {str(token.token_id): token for token in (*position.top, position.token)}
        assert tokens.keys() == objects.keys()
        assert [tokens[name].logprob for name in objects] == pytest.approx(
            [each["logprob"] for each in objects.values()]
        )


async def test_a_prompt_alone_can_be_scored(stand, stub):
    pieces = await ask(stub, text="The quick", max_tokens=0, echo=True, prompt_logprobs=0)
    assert text_of(pieces) == ""
    assert not any(piece.token_ids for piece in pieces)
    assert pieces[-1].usage.completion_tokens == 0
    assert pieces[0].prompt.text == "The quick"


async def test_special_tokens_are_added_where_asked_for(stand, stub, monkeypatch):
    asked = []
    encode = stand.generation.text.encode

    def watched(text, *, add_special_tokens=True):
        asked.append(add_special_tokens)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(stand.generation.text, "encode", watched)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    for fields in ({"text": "x"}, {"text": "x", "add_special_tokens": False}, {"chat": chat},
                   {"chat": chat, "add_special_tokens": True}):  # fmt: skip
        await ask(stub, **fields, max_tokens=1)
        await stub.Tokenize(pb.TokenizeRequest(**fields))
    assert asked == [True, True, False, False, False, False, True, True]


async def test_bad_words_and_structured_outputs_reach_the_target(stand, stub):
    (target,) = stand.targets
    structured = types_pb2.StructuredOutputs(json=json.dumps({"type": "integer"}))
    await ask(stub, text="The", max_tokens=1, bad_words=["fox"], structured_outputs=structured)
    params = target.specs[-1].params
    assert params.bad_token_ids
    assert params.structured_outputs.json == '{"type": "integer"}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat": pb.Chat()}, "messages"),
        ({"chat": pb.Chat(messages=[pb.ChatMessage(role="user")] * 5000)}, "messages"),
        ({"chat": pb.Chat(messages=[pb.ChatMessage(role="user")], template_kwargs="{")}, "template_kwargs"),
        ({"chat": pb.Chat(messages=[pb.ChatMessage(role="user")], template_kwargs="[1]")}, "template_kwargs"),
        ({"chat": pb.Chat(messages=[pb.ChatMessage(role="user")], template_kwargs="[" * 1000)}, "template_kwargs"),
        ({"text": "x", "n": 0}, "n"),
        ({"text": "x", "n": 1000}, "n"),
        ({"text": "x", "max_tokens": 0}, "max_tokens"),
        ({"text": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"text": "x", "bad_words": ["x"] * 5000}, "bad_words"),
    ],
)
async def test_refusals_name_the_field(stand, stub, fields, param):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stub, **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert param in dict(caught.value.trailing_metadata())["tandem-param"]


async def test_a_text_and_a_conversation_are_not_both_tokenized(stub):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    with pytest.raises(grpc.aio.AioRpcError, match="either text or chat"):
        await stub.Tokenize(pb.TokenizeRequest(text="x", chat=chat))
