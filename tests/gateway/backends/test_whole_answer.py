"""Answers of an engine that come as a whole: the log-probabilities of a long prompt."""

import asyncio
import json

import pytest

from gateway.backends.engines.answer import EngineLogprobs, parse
from gateway.backends.engines.logprobs import output_positions
from gateway.backends.engines.whole_answer import POSITIONS_AT_ONCE, read_whole
from specdec.errors import Unavailable


def whole_answer(positions, **changes):
    choice = {"text": '"prompt_logprobs": [', "prompt_logprobs": positions, "token_ids": [5], "finish_reason": "length"}
    return json.dumps({"id": "x", "choices": [choice | changes], "usage": {"prompt_tokens": 1}}).encode()


def at(token, **others):
    return {str(token): {"logprob": -0.5, "rank": 2, "decoded_token": '"]},{'}} | others


async def test_a_long_prompts_logprobs_are_read_in_slices():
    prompt = list(range(100))
    slices = 0

    async def count():
        nonlocal slices
        while True:
            await asyncio.sleep(0)
            slices += 1

    beside = asyncio.create_task(count())
    answer, positions = await read_whole(whole_answer([None, *map(at, prompt[1:])]), prompt, 0)
    beside.cancel()
    assert slices >= len(prompt) // POSITIONS_AT_ONCE
    assert [(each.token_id, each.rank) for each in positions] == [(token, 2) for token in prompt[1:]]
    assert (answer.choices[0].token_ids, answer.choices[0].finish_reason) == ([5], "length")


@pytest.mark.parametrize(
    "data",
    [
        whole_answer([None, at(2)]),
        whole_answer([None, at(2), at(3), at(4)]),
        whole_answer([None, at(2), at(4)]),
        whole_answer([None, at(2), None]),
        whole_answer([None, at(2), at(3, x={"logprob": 1})]),
        whole_answer([None, at(2), {"3": {"logprob": float("nan")}}]),
        whole_answer([None, at(2), {"3": {"logprob": -1e300}}]),
        whole_answer([None, at(2), at(3)], token_ids=[-1]),
        whole_answer([None, at(2), at(3)])[:-20],
        whole_answer([None, at(2), at(3)])[:60],
        whole_answer([None, at(2)])[:-3] + b"\xff",
        b'{"choices": [{"prompt_logprobs": [' + b"[" * 100_000,
        b'{"choices": [{"prompt_logprobs": [' + b"9" * 100_000,
    ],
)
async def test_prompt_logprobs_that_cannot_be(data):
    with pytest.raises(Unavailable):
        await read_whole(data, [1, 2, 3], 0)


@pytest.mark.parametrize(
    "choice",
    [
        {"token_logprobs": [-0.5], "top_logprobs": [{f"token_id:{2**32}": -0.5}]},
        {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:7": -1e300}]},
        {"token_logprobs": [-1e300]},
        {"token_logprobs": [None]},
        {"token_logprobs": [-0.5], "top_logprobs": [{"fox": -0.5}]},
    ],
)
def test_logprobs_that_cannot_be(choice):
    """Ids have 32 bits and values are float32: they would fit no message."""
    with pytest.raises(Unavailable):
        output_positions(parse(EngineLogprobs, json.dumps(choice).encode()), [7], 1)
