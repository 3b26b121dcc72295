"""Trees of the bundled draft through real processes: the text is the target's, also when the draft is killed."""

import asyncio
from functools import partial

import grpc.aio
import pytest

from specdec.v1 import generation_service_pb2_grpc
from tests.e2e.servers import Stack, wait_until
from tests.e2e.test_failures import collect, ids_of, request_of

pytestmark = pytest.mark.e2e

KINDS = [(0.0, None), (1.0, 77)]


@pytest.fixture(scope="module")
def trees():
    """One target with little room, one draft of trees, one gateway."""
    length = ("--num-speculative-tokens", "12")
    running = Stack.start(
        target_arguments=("--max-model-len", "400"),
        draft_arguments=(*length, "--tree-top-k", "4", "--tree-depth", "4"),
        gateway_arguments=length,
    )
    yield running
    running.close()


def plain(request):
    """The same request without speculation."""
    copy = type(request)()
    copy.CopyFrom(request)
    copy.speculation.num_speculative_tokens = 0
    return copy


@pytest.mark.parametrize(("temperature", "seed"), KINDS)
def test_the_text_is_the_plain_one(trees, prompts, temperature, seed):
    for prompt in prompts[:3]:
        request = request_of(prompt, max_tokens=120, temperature=temperature, seed=seed)
        pieces, without = collect(trees, request), collect(trees, plain(request))
        assert ids_of(pieces) == ids_of(without)
        assert without[-1].speculation.num_draft_tokens == 0
        counts = pieces[-1].speculation
        assert counts.num_accepted_draft_tokens > counts.num_spec_steps  # more than one token a round, of trees
        assert counts.num_draft_tokens > 5 * counts.num_spec_steps
        assert max(i for i, n in enumerate(counts.acceptance_histogram) if n) <= 4


def test_to_the_context_limit(trees, prompts):
    length = collect(trees, request_of(prompts[1], max_tokens=1))[-1].usage.prompt_tokens
    request = request_of(prompts[1], max_tokens=400 - length)
    pieces = collect(trees, request)
    assert ids_of(pieces) == ids_of(collect(trees, plain(request)))
    assert len(ids_of(pieces)) == 400 - length


def test_eight_at_once(trees, prompts):
    requests = [
        request_of(prompt, max_tokens=80, temperature=float(i % 2), seed=i if i % 2 else None)
        for i, prompt in enumerate(prompts)
    ]

    async def run(request):
        async with grpc.aio.insecure_channel(trees.grpc_address) as channel:
            stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
            return [token async for piece in stub.Generate(request, timeout=120) for token in piece.token_ids]

    async def run_all():
        return await asyncio.gather(*map(run, requests))

    assert asyncio.run(run_all()) == [ids_of(collect(trees, plain(request))) for request in requests]


@pytest.mark.parametrize(("temperature", "seed"), KINDS)
def test_killing_the_draft_changes_no_token(trees, prompts, temperature, seed):
    request = request_of(prompts[0], max_tokens=300, temperature=temperature, seed=seed)
    undisturbed = collect(trees, plain(request))
    killed = collect(trees, request, acts={60: trees.drafts[0].kill})
    assert ids_of(killed) == ids_of(undisturbed)
    assert killed[-1].speculation.num_draft_failures >= 1
    trees.drafts[0].restart_on_same_port()
    wait_until(partial(speculates, trees, prompts[0]), 20, "speculation with the restarted draft")


def speculates(stack, prompt):
    return collect(stack, request_of(prompt, max_tokens=40))[-1].speculation.num_accepted_draft_tokens > 0
