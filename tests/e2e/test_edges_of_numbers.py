"""Numbers at the edges of their wire and native types, through both APIs to a real target and draft: the answer is a
text or a refusal, never an internal error.
"""

import asyncio
import itertools
import math

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.descriptor import FieldDescriptor

from specdec.params import parameters
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from tests.e2e.servers import is_free, wait_until

#: JSON texts. Python's own parser reads the long ones only in part: it refuses more than 4,300 digits.
WHOLE = [
    "-1", "-0", "0", "1", "2147483647", "2147483648", "-2147483649", "4294967295", "4294967296", "9007199254740993",
    "9223372036854775808", "-9223372036854775809", "18446744073709551615", "18446744073709551616", "1" + "0" * 400,
    "-1" + "0" * 400, "1" + "0" * 5000, "1.5", "1e400", "NaN", "-Infinity", "true", '"x"', "[]", "{}",
]  # fmt: skip
REAL = [
    "0", "-0.0", "5e-324", "2.3e-308", "1e-46", "1e-40", "1.2e-38", "3.4e38", "3.5e38", "1.7976931348623157e308",
    "1e400", "NaN", "Infinity", "-1" + "0" * 400, "true", '"x"',
]  # fmt: skip
TOKEN_IDS = [f"[{number}]" for number in WHOLE] + ['"x"', "[[1]]"]
BIASES = [f'{{"5": {number}}}' for number in REAL]
BIASES += [f'{{"{key}": 1}}' for key in ("-1", "²", " 5", "2147483648", "4294967296", "1" * 20, "1" * 5000, "x", "")]
TEXTS = ['""', '"\\u0000"', '"\\ud800"', '["\\ud800"]', "[1]", "1", "[[]]"]
#: The rest of the fields that take numbers.
MORE = {
    "prompt": TOKEN_IDS,
    "best_of": WHOLE,
    "logprobs": WHOLE,
    "speculation": [f'{{"num_speculative_tokens": {number}}}' for number in WHOLE],
}


def edges_of(row):
    """JSON texts at the edges of a parameter's type."""
    if row.number is not None:
        return WHOLE if row.number is int else REAL
    kind = str(row.type)
    return BIASES if "Mapping" in kind else TEXTS if "str" in kind else TOKEN_IDS if "Sequence" in kind else WHOLE


def bodies():
    """Bodies with one value at an edge, greedy and sampled in turn; of equal keys the last one counts."""
    fields = {row.name: edges_of(row) for row in parameters() if row.in_rest} | MORE
    kinds = itertools.cycle(['"temperature": 0', '"temperature": 0.7, "seed": 3'])
    for (name, texts), half in itertools.product(fields.items(), (0, 1)):
        for text, kind in zip(texts[half::2], kinds, strict=False):
            yield f'{{"prompt": "def", "max_tokens": 4, {kind}, "{name}": {text}}}'


async def one_by_one(call, items):
    """Await ``call(item)`` for all items, some at a time."""
    left = iter(items)

    async def worker():
        for item in left:
            await call(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(worker())


def assert_no_tracebacks(stack):
    for process in (stack.gateway, *stack.targets, *stack.drafts):
        assert "Traceback" not in "".join(process.log), process.module


def test_rest(stack):
    answers = {}

    async def post(http, body):
        answer = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400), (body[:200], answer.text[:500])
        assert len(answer.content) < 4096, body[:200]
        answers[body] = answer.status_code

    async def main():
        async with httpx.AsyncClient(base_url=stack.base_url, timeout=60) as http:
            await one_by_one(lambda body: post(http, body), bodies())

    asyncio.run(main())
    assert {200, 400} == set(answers.values())
    assert_no_tracebacks(stack)


REALS = (0.0, -0.0, -1.0, 5e-324, 2.3e-308, 1e-46, 1e-40, 1.2e-38, 3.5e38, 1.8e307, math.inf, -math.inf, math.nan)
EDGES = {
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: REALS,
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_STRING: ("", "\0", "x" * 5000),
}


def messages():
    """Messages with one field at an edge of its wire type, greedy and sampled."""
    for owner in (pb.GenerateRequest, types_pb2.SamplingParams, pb.SpeculationOptions):
        for field in owner.DESCRIPTOR.fields:
            for value in EDGES.get(field.type, ()):
                for temperature in (0.0, 0.7):
                    message = pb.GenerateRequest(text="def", max_tokens=4)
                    message.sampling.temperature = temperature
                    part = {pb.GenerateRequest: message, types_pb2.SamplingParams: message.sampling}.get(owner)
                    part = message.speculation if part is None else part
                    if field.is_repeated:
                        getattr(part, field.name).append(value)
                    else:
                        setattr(part, field.name, value)
                    yield message
    for bias in REALS:
        yield pb.GenerateRequest(text="def", max_tokens=4, sampling=types_pb2.SamplingParams(logit_bias={5: bias}))
    for token_id in EDGES[FieldDescriptor.TYPE_UINT32]:
        bad = types_pb2.SamplingParams(bad_token_ids=[types_pb2.TokenIds(ids=[token_id])], logit_bias={token_id: 1})
        yield pb.GenerateRequest(text="def", max_tokens=4, sampling=bad)
        yield pb.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[token_id]), max_tokens=4)


def test_grpc(stack):
    codes = set()

    async def call(stub, message):
        code = grpc.StatusCode.OK
        try:
            async for _ in stub.Generate(message, timeout=60):
                pass
        except grpc.aio.AioRpcError as error:
            code = error.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), message
        codes.add(code)

    async def main():
        async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
            stub = stack.generation(channel)
            await one_by_one(lambda message: call(stub, message), messages())

    asyncio.run(main())
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= codes
    assert_no_tracebacks(stack)
    wait_until(lambda: is_free(stack), "the target to close the sessions, and to park those with an id")


@pytest.mark.parametrize("seconds", ["1e308", "1e400", "nan", "-1", "1e15", "9" * 5000])
def test_deadlines(stack, seconds):
    body = {"prompt": "def", "max_tokens": 2}
    answer = httpx.post(f"{stack.base_url}/v1/completions", json=body, headers={"X-Request-Timeout-S": seconds})
    assert answer.status_code in (200, 400), answer.text[:500]
    assert_no_tracebacks(stack)
