"""What happens when something breaks, with processes that are really killed.

One draft and one target with the real engine are killed; what the gateway does about the rest shows with toy services.
"""

import asyncio
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Timer

import grpc
import httpx
import pytest

from specdec.v1 import generation_service_pb2 as pb
from tests.e2e.servers import (
    Stack,
    collect,
    collect_together,
    draft_process,
    fake_draft,
    fake_target,
    health_of,
    ids_of,
    is_free,
    request_of,
    speculates,
    target_process,
    wait_until,
)
from tests.reliability.rig import BLOCK_BYTES, FEW_BLOCKS

pytestmark = pytest.mark.e2e

#: Tokens that the bundled pair does not write within the moment that a client takes to kill a service.
LONG = 300


@pytest.fixture(scope="module")
def toys():
    """A gateway over two toy targets and a toy draft."""
    running = Stack.start([fake_target(), fake_target()], [fake_draft()], "--draft-timeout-s", "0.5")
    yield running
    running.close()


def kill_the_draft_within(stack, request):
    """Killing the draft changes no token; returns them. The draft is gone then."""
    undisturbed = collect(stack, request)
    killed = collect(stack, request, acts={60: stack.drafts[0].kill})
    assert ids_of(killed) == ids_of(undisturbed)
    assert killed[-1].speculation.num_draft_failures >= 1
    assert killed[-1].speculation.num_draft_tokens < undisturbed[-1].speculation.num_draft_tokens
    return ids_of(undisturbed)


def test_killing_the_draft_changes_no_token_and_it_comes_back(stack, prompts):
    kill_the_draft_within(stack, request_of(prompts[0], max_tokens=LONG, temperature=1.0, seed=77))
    stack.drafts[0].restart_on_same_port()
    wait_until(partial(speculates, stack, prompts[0]), "speculation with the restarted draft")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (1.0, 77)])
def test_killing_a_toy_draft(toys, prompts, temperature, seed):
    request = request_of(prompts[0], max_tokens=300, temperature=temperature, seed=seed)
    undisturbed = kill_the_draft_within(toys, request)
    without = collect(toys, request)
    assert ids_of(without) == undisturbed
    assert without[-1].speculation.num_draft_tokens == 0
    toys.drafts[0].restart_on_same_port()
    wait_until(partial(speculates, toys, prompts[0]), "speculation with the restarted draft")
    assert ids_of(collect(toys, request)) == undisturbed


def test_a_draft_that_returns_helps_the_running_request(toys, prompts):
    request = request_of(prompts[1], max_tokens=900)

    # Past the freeze the request continues as soon as the draft is left behind, and without it until the thaw.
    freeze, thaw = (partial(toys.drafts[0].signal, number) for number in (signal.SIGSTOP, signal.SIGCONT))
    pieces = collect(toys, request, acts={50: freeze, 400: thaw})
    undisturbed = collect(toys, request)
    assert ids_of(pieces) == ids_of(undisturbed)
    frozen = pieces[-1].speculation
    assert frozen.num_draft_failures >= 1
    # Before the freeze at most 50 + 5 tokens had come, each round drafting four; the rest is after the thaw.
    assert 4 * 55 < frozen.num_draft_tokens < undisturbed[-1].speculation.num_draft_tokens


def test_killing_a_target_moves_the_session_to_another(stack, prompts):
    """The real engine: the second target recomputes what the first one knew, and draws the same tokens."""
    with_two = Stack.start([*stack.targets, target_process()], stack.drafts)
    try:
        request = request_of(prompts[2], max_tokens=LONG, temperature=1.0, seed=3)
        undisturbed = collect(with_two, request)
        busy = []

        def kill_the_busy_one():
            busy.extend(i for i in range(2) if with_two.load_of_target(i).open_sessions)
            with_two.targets[busy[0]].kill()

        moved = collect(with_two, request, acts={60: kill_the_busy_one})
        assert ids_of(moved) == ids_of(undisturbed)
        assert moved[-1].speculation.num_target_failures == 1
        assert with_two.load_of_target(1 - busy[0]).open_sessions == 0
        if busy == [0]:
            stack.targets[0].restart_on_same_port()
            wait_until(lambda: httpx.get(f"{stack.base_url}/health").status_code == 200, "/health to notice")
    finally:
        with_two.close()


def test_kills_among_preempted_sessions(prompts):
    """The real engine, with blocks for half of the sessions: greedy and seeded ones."""
    few = ("--kv-cache-memory-bytes", str(FEW_BLOCKS * BLOCK_BYTES))
    stack = Stack.start([target_process(*few)], [draft_process()])
    try:
        requests = [
            request_of(prompt, max_tokens=200, temperature=float(seed % 2), seed=seed)
            for seed, prompt in enumerate(prompts[:6])
        ]
        alone = [ids_of(collect(stack, request)) for request in requests]
        assert stack.load_of_target().preemptions == 0
        assert collect_together(stack, requests) == alone
        assert stack.load_of_target().preemptions > 0

        def kill_the_target():
            stack.targets[0].kill()
            stack.targets[0].restart_on_same_port()

        acts = {40: stack.drafts[0].kill, 80: kill_the_target}
        with ThreadPoolExecutor(len(requests)) as threads:
            calls = [
                threads.submit(collect, stack, request, acts=None if number else acts)
                for number, request in enumerate(requests)
            ]
            assert [ids_of(call.result()) for call in calls] == alone
        wait_until(partial(is_free, stack), "the target to free the sessions")
    finally:
        stack.close()


@pytest.mark.parametrize(("temperature", "seed"), [pytest.param(0.0, None, marks=pytest.mark.exhaustive), (1.0, 5)])
def test_a_request_waits_for_its_killed_target_to_return(prompts, temperature, seed):
    """With one target alone: the text pauses, and continues as if nothing had happened."""
    stack = Stack.start([fake_target()], [fake_draft()])
    try:
        request = request_of(prompts[0], max_tokens=400, temperature=temperature, seed=seed)
        undisturbed = collect(stack, request)
        back = []

        def kill():
            stack.targets[0].kill()
            back.append(Timer(0.3, stack.targets[0].restart_on_same_port))
            back[0].start()

        paused = collect(stack, request, acts={60: kill})
        back[0].join()
        assert ids_of(paused) == ids_of(undisturbed)
        assert paused[-1].speculation.num_target_failures == 1
        wait_until(partial(is_free, stack), "the target to free the session")
    finally:
        stack.close()


def test_killing_the_only_target_for_good_is_unavailable(prompts):
    stack = Stack.start([fake_target()], (), "--target-wait-s", "0.5")
    try:
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            collect(stack, request_of(prompts[0], max_tokens=600), acts={30: stack.targets[0].kill})
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the target was lost and none came back within 0.5 s; try again later"
        assert 0.5 < time.monotonic() - started < 20
        wait_until(lambda: httpx.get(f"{stack.base_url}/health").status_code == 503, "/health to notice")
        answer = httpx.post(f"{stack.base_url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"]
    finally:
        stack.close()


def test_a_client_that_leaves_frees_the_cache(stack, prompts):
    with grpc.insecure_channel(stack.grpc_address) as channel:
        call = stack.generation(channel).Generate(request_of(prompts[3], max_tokens=1900))
        for _ in range(5):
            next(call)
        assert stack.load_of_target().open_sessions == 1
        call.cancel()
    wait_until(partial(is_free, stack), "the target to free the session")
    wait_until(lambda: stack.load_of_draft().open_sessions == 0, "the draft to free the session")


def test_an_http_client_that_leaves_frees_the_cache(stack, prompts):
    body = {"prompt": prompts[3], "max_tokens": 1900, "stream": True, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{stack.base_url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        assert stack.load_of_target().open_sessions == 1
    wait_until(partial(is_free, stack), "the target to free the session")


def test_a_deadline_ends_a_partial_stream(stack, prompts):
    with grpc.insecure_channel(stack.grpc_address) as channel:
        call = stack.generation(channel).Generate(request_of(prompts[4], max_tokens=1900), timeout=1)
        first = next(call)
        stack.targets[0].signal(signal.SIGSTOP)  # or it might be done in time
        try:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
        finally:
            stack.targets[0].signal(signal.SIGCONT)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert first.token_ids
    wait_until(partial(is_free, stack), "the target to free the session")


def test_overload_is_refused_with_the_numbers(prompts):
    stack = Stack.start([fake_target("--max-num-seqs", "2", "--max-waiting", "1", "--max-wait-s", "0.5")])
    try:

        async def flood():
            async with httpx.AsyncClient(timeout=120) as client:
                body = {"prompt": prompts[0], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
                return await asyncio.gather(
                    *(client.post(f"{stack.base_url}/v1/completions", json=body) for _ in range(6))
                )

        answers = asyncio.run(flood())
        codes = sorted(answer.status_code for answer in answers)
        assert codes[:2] == [200, 200]
        assert set(codes) == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert "2" in refused.json()["error"]["message"]
        wait_until(partial(is_free, stack), "the target to free the sessions")
    finally:
        stack.close()


def test_sigterm_lets_open_streams_finish(prompts):
    stack = Stack.start([fake_target()], [fake_draft()])
    try:
        request = request_of(prompts[5], max_tokens=300)
        whole = ids_of(collect(stack, request))
        drained = collect(stack, request, acts={20: lambda: stack.gateway.signal(signal.SIGTERM)})
        assert ids_of(drained) == whole
        assert stack.gateway.wait() == 0
    finally:
        stack.close()


def test_a_draining_target_finishes_its_sessions(prompts):
    stack = Stack.start([fake_target(), fake_target()], [fake_draft()])
    try:
        request = request_of(prompts[6], max_tokens=300)
        whole = ids_of(collect(stack, request))
        busy = []

        def drain_the_busy_one():
            busy.extend(i for i in range(2) if stack.load_of_target(i).open_sessions)
            stack.targets[busy[0]].signal(signal.SIGTERM)

        pieces = collect(stack, request, acts={20: drain_the_busy_one})
        assert ids_of(pieces) == whole
        assert pieces[-1].speculation.num_target_failures == 0
        assert stack.targets[busy[0]].wait() == 0
        assert ids_of(collect(stack, request)) == whole
    finally:
        stack.close()


def test_sixteen_mixed_requests_at_once(stack, prompts):
    """Greedy and seeded texts are the same alone and among fifteen others of every kind."""

    def kinds():
        for i in range(16):
            kind = i % 4
            yield request_of(
                prompts[i % len(prompts)],
                max_tokens=24 + 5 * i,
                temperature=0.0 if kind == 0 else 0.9,
                seed=None if kind == 0 else 100 + i,
                speculation=pb.SpeculationOptions(num_speculative_tokens=(0, 2, 4, 4)[kind]),
            )

    requests = list(kinds())
    alone = [ids_of(collect(stack, request)) for request in requests]
    assert collect_together(stack, requests) == alone
    wait_until(partial(is_free, stack), "the target to free the sessions")
    assert health_of(stack.targets[0].address) == "SERVING"
