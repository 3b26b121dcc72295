"""Suffix decoding and combinations on the bundled pair: the text is the target's, in one process and in several."""

import grpc
import pytest

from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from tandem import LLM, SamplingParams
from tests.e2e.servers import DRAFT_MODEL, TARGET_MODEL, Stack, wait_until

CONFIGS = {
    "suffix": {"method": "suffix"},
    "suffix+draft_model": {"method": ["suffix", "draft_model"], "model": DRAFT_MODEL},
    "ngram+draft_model": {"method": ["ngram", "draft_model"], "model": DRAFT_MODEL},
    "ngram+suffix": {"method": ["ngram", "suffix"]},
}
#: Greedy and seeded; a seed is verified by the coupled rule.
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=60, seed=seed, ignore_eos=True)
    for temperature, seed in (
        (0.0, None),
        (1.0, 5),
        (0.0, None),
        (0.8, 6),
        (0.0, None),
        (1.0, 7),
        (0.0, None),
        (1.2, 8),
    )
]


def make_llm(config=None, **settings):
    return LLM(TARGET_MODEL, speculative_config=config, dtype="float32", fixed_draft_length=True, **settings)


def generate(llm, prompts, params):
    """Token ids, eight requests at a time and then two of them alone."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    outputs += [llm.generate(prompts[i], params[i], use_tqdm=False)[0] for i in (0, 1)]
    return outputs


@pytest.fixture(scope="module")
def texts(prompts):
    """Prompts that repeat themselves: each stands there twice."""
    return [prompt + prompt for prompt in prompts]


@pytest.fixture(scope="module")
def plain(texts):
    with make_llm() as llm:
        return [output.outputs[0].token_ids for output in generate(llm, texts, PARAMS)]


@pytest.mark.parametrize("k", [1, 5, 32])
@pytest.mark.parametrize("name", CONFIGS)
def test_text_is_that_of_plain_decoding(texts, plain, name, k):
    with make_llm({**CONFIGS[name], "num_speculative_tokens": k}) as llm:
        outputs = generate(llm, texts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 40


@pytest.mark.parametrize("name", CONFIGS)
def test_text_drafted_ahead_of_verdicts(texts, plain, name):
    config = {**CONFIGS[name], "num_speculative_tokens": 5}
    with make_llm(config, num_ahead_proposals=4, min_offer_likelihood=0.1) as llm:
        outputs = generate(llm, texts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == plain


@pytest.mark.parametrize("name", CONFIGS)
def test_to_the_context_limit(texts, name):
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    with make_llm(max_model_len=150) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(texts[:4], params, use_tqdm=False)]
    with make_llm({**CONFIGS[name], "num_speculative_tokens": 32}, max_model_len=150) as llm:
        outputs = llm.generate(texts[:4], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    for output in outputs:
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 150


def test_vllms_call_for_suffix_decoding(texts):
    with LLM(model=TARGET_MODEL, speculative_config={"method": "suffix", "num_speculative_tokens": 32}) as llm:
        assert llm.deployment.draft.speculative.method == "suffix"
        (output,) = llm.generate(texts[0], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    assert output.outputs[0].text


@pytest.mark.e2e
@pytest.mark.parametrize("methods", [("suffix",), ("suffix", "draft_model")], ids="+".join)
def test_processes_and_a_draft_that_is_killed(texts, methods):
    flags = [flag for method in methods for flag in ("--method", method)]
    stack = Stack.start(
        draft_arguments=(*flags, "--num-speculative-tokens", "32"), gateway_arguments=("--num-speculative-tokens", "32")
    )
    try:
        for temperature, seed in ((0.0, None), (1.0, 77)):
            request = pb.GenerateRequest(
                text=texts[1],
                max_tokens=300,
                ignore_eos=True,
                seed=seed,
                sampling=types_pb2.SamplingParams(temperature=temperature),
            )
            undisturbed, speculation = generate_remotely(stack, request)
            assert speculation.num_accepted_draft_tokens > 0
            killed, speculation = generate_remotely(stack, request, kill_at=60)
            assert killed == undisturbed
            assert speculation.num_draft_failures >= 1
            stack.drafts[0].restart_on_same_port()
            wait_until(lambda: speculates(stack, texts[1]), 20, "speculation with the restarted draft")
    finally:
        stack.close()


def generate_remotely(stack, request, kill_at=None):
    """Token ids and what was drafted; the draft is killed once so many tokens have come."""
    token_ids, last = [], None
    with grpc.insecure_channel(stack.grpc_address) as channel:
        for piece in stack.generation(channel).Generate(request, timeout=120):
            token_ids += piece.token_ids
            last = piece
            if kill_at is not None and len(token_ids) >= kill_at:
                stack.drafts[0].kill()
                kill_at = None
    return token_ids, last.speculation


def speculates(stack, text):
    request = pb.GenerateRequest(text=text, max_tokens=40, ignore_eos=True)
    return generate_remotely(stack, request)[1].num_accepted_draft_tokens > 0
