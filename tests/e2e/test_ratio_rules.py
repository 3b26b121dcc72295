"""Texts under the ratio rules in real processes: samples of the target, whatever the rounds were."""

import re

import httpx
import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from tests.e2e.servers import TARGET_MODEL, Stack, collect, ids_of, request_of

pytestmark = pytest.mark.e2e
K = 4
#: A machine that stands still for a second must not cost a draft here.
PATIENT = ("--fixed-draft-length", "--draft-timeout-s", "20")


@pytest.fixture(scope="module")
def patient(stack):
    """A gateway that waits for its draft."""
    running = Stack.start(stack.targets, stack.drafts, *PATIENT)
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
        (1.0, types_pb2.VERIFICATION_RULE_BLOCK),
        pytest.param(0.8, types_pb2.VERIFICATION_RULE_TOKEN, marks=pytest.mark.exhaustive),
    ],
)
def test_texts_are_samples_of_the_target(patient, prompts, score, temperature, rule):
    """A temperature that is wrong by a half is seen."""
    texts, reports = [], []
    before = metrics_of(patient)
    for number, (prompt, k) in enumerate(zip(prompts[:4], (K, 1, K, 1), strict=True)):
        request = request_of(
            prompt,
            max_tokens=160,
            temperature=temperature,
            seed=40 + number,
            speculation=pb.SpeculationOptions(num_speculative_tokens=k, verification=rule),
        )
        events = collect(patient, request)
        texts.append((prompt, ids_of(events)))
        assert len(texts[-1][1]) == 160
        reports.append(events[-1].speculation)
        assert reports[-1].num_spec_steps > 20
        failures = reports[-1].num_stale, reports[-1].num_draft_failures, reports[-1].num_target_failures
        assert failures == (0, 0, 0), "".join(patient.gateway.log)
    assert score(texts, temperature) > 1e-6
    assert score(texts, temperature / 2) < 1e-6
    after = metrics_of(patient)
    for name in ("draft_wait", "wire"):
        metric, seconds = (
            f"tandem_spec_decode_{name}_seconds_total",
            sum(getattr(r, f"{name}_ns") for r in reports) / 1e9,
        )
        assert seconds > 0
        assert after[metric] - before.get(metric, 0.0) == pytest.approx(seconds)
