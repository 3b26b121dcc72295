"""Drafting ahead of verdicts in real processes: the same text, hits that are counted, nothing stale, nothing left."""

import re
import signal
import time
from functools import partial

import grpc
import httpx
import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from tests.e2e.servers import (
    TARGET_MODEL,
    Stack,
    collect,
    collect_together,
    ids_of,
    is_free,
    request_of,
    wait_until,
)

pytestmark = pytest.mark.e2e
K = 4
#: A machine that stands still for a second must not cost a draft here.
PATIENT = ("--fixed-draft-length", "--draft-timeout-s", "20")


@pytest.fixture(scope="module")
def overlapped(stack):
    """A gateway that lets the draft draft ahead."""
    running = Stack.start(stack.targets, stack.drafts, "--num-ahead-proposals", "8", *PATIENT)
    yield running
    running.close()


@pytest.fixture(scope="module")
def serial(stack):
    """Another one on the same services that drafts and verifies one after the other."""
    running = Stack.start(stack.targets, stack.drafts, "--num-ahead-proposals", "0", *PATIENT)
    yield running
    running.close()


def metrics_of(stack):
    """The gateway's Prometheus metrics, by name and labels."""
    text = httpx.get(f"{stack.base_url}/metrics").text
    text = re.sub(r'\{model_name="python-12m"\}|model_name="python-12m",?', "", text)
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


@pytest.fixture(scope="module")
def score():
    """``score(texts, temperature)``: the p-value of texts, pairs of a prompt and token ids, as samples of the target.

    Each token is replaced by the target's mass of all likelier ones and a random share of its own. Those numbers are
    independent and uniform, whatever the rounds were, if and only if the tokens are drawn from the target.
    """
    model = AutoModelForCausalLM.from_pretrained(TARGET_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET_MODEL)

    def run(texts, temperature):
        shares, noise = [], np.random.default_rng(0)
        for prompt, ids in texts:
            before = tokenizer(prompt).input_ids
            with torch.inference_mode():
                logits = model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1].double()
            p = (logits / temperature).softmax(-1)
            own = p.gather(1, torch.tensor(ids)[:, None])
            likelier = (p * (p > own)).sum(-1)
            shares.append(likelier.numpy() + noise.random(len(ids)) * own.squeeze(1).numpy())
        return stats.kstest(np.concatenate(shares), "uniform").pvalue

    return run


@pytest.mark.parametrize(
    ("temperature", "rule"),
    [
        pytest.param(0.0, types_pb2.VERIFICATION_RULE_UNSPECIFIED, marks=pytest.mark.exhaustive),
        (1.0, types_pb2.VERIFICATION_RULE_COUPLED),
        (1.0, types_pb2.VERIFICATION_RULE_BLOCK),
        pytest.param(0.8, types_pb2.VERIFICATION_RULE_TOKEN, marks=pytest.mark.exhaustive),
    ],
)
def test_requests_with_and_without(overlapped, serial, prompts, score, temperature, rule):  # noqa: PLR0917
    """Under the ratio rules the text depends on where rounds start, so on when the draft is there: its distribution is
    the target's. A temperature that is wrong by a half is seen.
    """
    texts = []
    depends_on_rounds = rule in (types_pb2.VERIFICATION_RULE_BLOCK, types_pb2.VERIFICATION_RULE_TOKEN)
    for number, (prompt, k) in enumerate(zip(prompts, (K, 1), strict=False)):
        request = request_of(
            prompt,
            max_tokens=160,
            temperature=temperature,
            seed=40 + number,
            speculation=pb.SpeculationOptions(num_speculative_tokens=k, verification=rule),
        )
        ahead, serially = collect(overlapped, request), collect(serial, request)
        assert len(ids_of(ahead)) == len(ids_of(serially)) == 160
        assert depends_on_rounds or ids_of(ahead) == ids_of(serially)
        texts += [(prompt, ids_of(ahead)), (prompt, ids_of(serially))]
        speculation = ahead[-1].speculation
        assert speculation.num_spec_steps > 20
        failures = speculation.num_stale, speculation.num_draft_failures, speculation.num_target_failures
        assert failures == (0, 0, 0), "".join(overlapped.gateway.log)
        assert serially[-1].speculation.num_ahead_hits == serially[-1].speculation.num_ahead_misses == 0
        assert serially[-1].speculation.num_wasted_draft_tokens <= k
    if depends_on_rounds:
        assert score(texts, temperature) > 1e-6
        assert score(texts, temperature / 2) < 1e-6


def test_hits_are_counted_by_rule(overlapped, prompts):
    before = metrics_of(overlapped)
    rules = {"coupled": types_pb2.VERIFICATION_RULE_COUPLED, "block": types_pb2.VERIFICATION_RULE_BLOCK}
    reports = {rule: [] for rule in rules}

    def slow_target():
        """Give the draft time to draft ahead, however busy the machine is."""
        overlapped.targets[0].signal(signal.SIGSTOP)
        time.sleep(0.2)
        overlapped.targets[0].signal(signal.SIGCONT)

    def ask(rule, number, acts=None):
        request = request_of(
            prompts[number % len(prompts)],
            max_tokens=120,
            temperature=1.0,
            seed=number,
            speculation=pb.SpeculationOptions(num_speculative_tokens=K, verification=rules[rule]),
        )
        reports[rule].append(collect(overlapped, request, acts=acts)[-1].speculation)

    for rule in rules:
        for number in range(2):
            ask(rule, number)
        while not sum(report.num_ahead_hits for report in reports[rule]) and len(reports[rule]) < 40:
            ask(rule, len(reports[rule]), acts=dict.fromkeys(range(20, 110, 20), slow_target))
    after = metrics_of(overlapped)

    def grown(name):
        return after.get(name, 0.0) - before.get(name, 0.0)

    for rule in rules:
        hits, misses = (
            grown(f'tandem_spec_decode_num_ahead_{what}_total{{rule="{rule}"}}') for what in ("hits", "misses")
        )
        assert hits == sum(report.num_ahead_hits for report in reports[rule]) > 0
        assert misses == sum(report.num_ahead_misses for report in reports[rule]) > 0
    reports = [*reports["coupled"], *reports["block"]]
    # What the draft sent after the last verdict of a request counts, too.
    assert grown("tandem_spec_decode_num_wasted_tokens_total") >= sum(r.num_wasted_draft_tokens for r in reports) > 0
    for name in ("draft_wait", "wire"):
        seconds = sum(getattr(report, f"{name}_ns") for report in reports) / 1e9
        assert seconds > 0
        assert grown(f"tandem_spec_decode_{name}_seconds_total") == pytest.approx(seconds)
    # What the draft sent ahead went to the target, and what came true started rounds there.
    assert overlapped.load_of_target().superseded_proposals > 0


def stale_messages(stack):
    return stack.load_of_target().stale_messages, stack.load_of_draft().stale_messages


def test_many_at_once(overlapped, serial, prompts):
    requests = [
        request_of(prompts[i % len(prompts)], max_tokens=40 + 7 * i, temperature=i % 2, seed=i) for i in range(12)
    ]

    stale = stale_messages(overlapped)
    assert collect_together(overlapped, requests) == collect_together(serial, requests)
    wait_until(partial(is_free, overlapped), 15, "the target to free the sessions")
    assert stale_messages(overlapped) == stale


def test_a_deadline_and_a_cancel_leave_nothing_behind(overlapped, prompts):
    with grpc.insecure_channel(overlapped.grpc_address) as channel:
        stub = overlapped.generation(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request_of(prompts[4], max_tokens=1900), timeout=0.2))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call = stub.Generate(request_of(prompts[3], max_tokens=1900))
        for _ in range(10):
            next(call)
        call.cancel()
    wait_until(partial(is_free, overlapped), 15, "the target to free the sessions")
    wait_until(lambda: overlapped.load_of_draft().open_sessions == 0, 15, "the draft to free the sessions")
