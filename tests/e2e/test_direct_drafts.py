"""Targets that ask drafts themselves, as the processes of ``tandem serve`` do: the text is that of plain decoding."""

import asyncio
import random
import signal
import threading
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from tests.e2e.servers import (
    Stack,
    collect,
    collect_together,
    draft_process,
    ids_of,
    request_of,
    target_process,
    wait_until,
)
from tests.reliability.proxy import FaultyProxy

pytestmark = pytest.mark.e2e

#: Greedy, and seeded.
PARAMS = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 77})
#: Tokens that the bundled pair does not write within the moment that a client takes to kill a service.
LONG = 300


@contextmanager
def running(folder, *arguments, num_targets=1):
    """Targets, a draft and a gateway over sockets."""
    targets = [target_process("--socket", f"unix:{folder}/target{i}.sock") for i in range(num_targets)]
    stack = Stack.start(targets, [draft_process("--socket", f"unix:{folder}/draft.sock")], *arguments)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    with running(tmp_path_factory.mktemp("local"), "--draft-timeout-s", "0.5") as stack:
        yield stack


def plain(request):
    result = pb.GenerateRequest()
    result.CopyFrom(request)
    result.speculation.num_speculative_tokens = 0
    return result


@pytest.fixture(scope="module")
def plain_ids(local):
    """``plain_ids(request)``: the tokens of plain decoding, decoded once for each prompt and parameters."""
    known = {}

    def decode(request):
        asked = plain(request)
        key = asked.SerializeToString(deterministic=True)
        if key not in known:
            pieces = collect(local, asked)
            assert pieces[-1].speculation.num_draft_tokens == 0
            known[key] = ids_of(pieces)
        return known[key]

    return decode


def is_direct(pieces):
    """Whether all rounds were the target's own."""
    speculation = pieces[-1].speculation
    return speculation.num_spec_steps > 0 and speculation.num_direct_rounds >= speculation.num_spec_steps


def drafts_directly(stack, prompt):
    return is_direct(collect(stack, request_of(prompt, max_tokens=LONG)))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("k", [1, 4])
def test_text_is_that_of_plain_decoding(local, plain_ids, prompts, params, k):
    for prompt in prompts[:3]:
        request = request_of(prompt, max_tokens=LONG, **params)
        request.speculation.num_speculative_tokens = k
        pieces = collect(local, request)
        assert is_direct(pieces)
        assert ids_of(pieces) == plain_ids(request)
        speculation = pieces[-1].speculation
        assert speculation.num_draft_tokens <= k * speculation.num_spec_steps
        assert speculation.num_accepted_draft_tokens > 0
        assert speculation.draft_ns > 0
        assert speculation.draft_wait_ns > 0


def test_eight_at_once(local, prompts):
    requests = [request_of(prompts[i % 4], max_tokens=120, **PARAMS[i % 2]) for i in range(8)]
    assert collect_together(local, requests) == collect_together(local, map(plain, requests))


def test_structured_outputs_and_several_samples(local, prompts):
    """A grammar cuts proposals, and its end ends the session while the draft works."""
    for field in ({"regex": "[a-z]{100,200}!"}, {"json_object": True}):
        request = request_of(prompts[0], max_tokens=200, ignore_eos=False, temperature=1.0, seed=5)
        request.structured_outputs.CopyFrom(types_pb2.StructuredOutputs(**field))
        assert ids_of(collect(local, request)) == ids_of(collect(local, plain(request)))
    bodies = {"max_tokens": 150, "n": 3, "temperature": 1.0, "seed": 9, "logprobs": 2, "stop": ["return"]}
    spoken = local.complete(prompts[1], **bodies)
    without = local.complete(prompts[1], **bodies, speculation={"num_speculative_tokens": 0})
    assert spoken["choices"] == without["choices"]


@pytest.mark.parametrize("params", PARAMS)
def test_killing_the_draft_changes_no_token_and_it_comes_back(local, prompts, params):
    request = request_of(prompts[0], max_tokens=LONG, **params)
    undisturbed = collect(local, request)
    killed = collect(local, request, acts={100: local.drafts[0].kill})
    assert ids_of(killed) == ids_of(undisturbed)
    assert killed[-1].speculation.num_draft_failures >= 1
    assert killed[-1].speculation.num_spec_steps < undisturbed[-1].speculation.num_spec_steps
    local.drafts[0].restart_on_same_port()
    wait_until(partial(drafts_directly, local, prompts[0]), "rounds with the restarted draft")


def test_a_draft_that_stands_still(local, prompts):
    """It is left after the timeout, and asked again once it goes on."""
    request = request_of(prompts[1], max_tokens=LONG)
    undisturbed = collect(local, request)
    frozen = collect(local, request, acts={100: partial(local.drafts[0].signal, signal.SIGSTOP)})
    local.drafts[0].signal(signal.SIGCONT)
    assert ids_of(frozen) == ids_of(undisturbed)
    assert frozen[-1].speculation.num_draft_failures >= 1
    wait_until(partial(drafts_directly, local, prompts[1]), "rounds with the draft that goes on")


def test_clients_that_leave(local, prompts):
    """Neither service keeps their sessions."""
    with pytest.raises(ConnectionError):
        collect(local, request_of(prompts[2], max_tokens=LONG), acts={60: leave})
    wait_until(lambda: local.load_of_target().open_sessions == local.load_of_draft().open_sessions == 0, "their end")


def leave():
    raise ConnectionError


def test_where_the_target_cannot_reach_the_draft_the_gateway_asks(tmp_path, prompts):
    with running(tmp_path) as stack:
        Path(tmp_path / "draft.sock.framed").rename(tmp_path / "elsewhere")
        request = request_of(prompts[0], max_tokens=LONG)
        pieces = collect(stack, request)
        assert pieces[-1].speculation.num_spec_steps > 0
        assert pieces[-1].speculation.num_direct_rounds == 0
        Path(tmp_path / "elsewhere").rename(tmp_path / "draft.sock.framed")
        direct = collect(stack, request)
        assert is_direct(direct)
        assert ids_of(direct) == ids_of(pieces)


def test_a_lost_target_is_replaced_with_its_draft(tmp_path, prompts):
    request = request_of(prompts[3], max_tokens=LONG, temperature=1.0, seed=3)
    with running(tmp_path, num_targets=2) as stack:
        undisturbed = collect(stack, request)

        def kill_busy():
            busy = [i for i, _ in enumerate(stack.targets) if stack.load_of_target(i).open_sessions]
            (index,) = busy
            stack.targets[index].kill()

        moved = collect(stack, request, acts={60: kill_busy})
        assert ids_of(moved) == ids_of(undisturbed)
        speculation = moved[-1].speculation
        assert (speculation.num_target_failures, speculation.num_draft_failures) == (1, 0)
        assert is_direct(moved)


@contextmanager
def line_to(draft, rtt_ms):
    """Another address of a draft, over a slow line."""
    loop, line = asyncio.new_event_loop(), FaultyProxy(random.Random(0))
    line.upstream_port = int(draft.address.rpartition(":")[2])
    line.delay_s = rtt_ms / 1e3  # half of it on average, each way
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(line.start(), loop).result(10)
        yield SimpleNamespace(address=f"127.0.0.1:{line.port}", is_running=True)
    finally:
        asyncio.run_coroutine_threadsafe(line.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("rtt_ms", [pytest.param(0.0, marks=pytest.mark.exhaustive), 5.0])
def test_a_draft_over_a_network(tmp_path, prompts, rtt_ms):
    """The target asks it. Far away it streams: nobody's text changes. Under a ratio rule it is waited for."""
    draft = draft_process("--port", "0").start()
    target = target_process("--port", "0", "--socket", f"unix:{tmp_path}/target.sock")
    with ExitStack() as exits:
        exits.callback(draft.stop)
        stack = Stack.start([target], [exits.enter_context(line_to(draft, rtt_ms))])
        with closing(stack):
            num_accepted = 0
            for params in PARAMS:
                requests = [request_of(prompt, max_tokens=LONG, **params) for prompt in prompts[:2]]
                for request in requests:
                    pieces = collect(stack, request)
                    assert ids_of(pieces) == ids_of(collect(stack, plain(request)))
                    assert pieces[-1].speculation.num_direct_rounds > 0
                    num_accepted += pieces[-1].speculation.num_accepted_draft_tokens
                together = collect_together(stack, requests)
                assert together == collect_together(stack, map(plain, requests))
            assert num_accepted > 50
            if rtt_ms:
                assert pieces[-1].speculation.draft_wait_ns == 0
            request.speculation.verification = types_pb2.VERIFICATION_RULE_BLOCK
            assert collect(stack, request)[-1].speculation.draft_wait_ns > 20e6 * rtt_ms
