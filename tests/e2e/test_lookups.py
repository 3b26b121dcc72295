"""Suffix decoding and combinations on the bundled pair: the text is the target's, in one process and in several."""

import pytest

from tandem import LLM, SamplingParams
from tests.e2e.servers import (
    DRAFT_MODEL,
    TARGET_MODEL,
    Stack,
    collect,
    draft_process,
    ids_of,
    request_of,
)

CONFIGS = {
    "suffix": {"method": "suffix"},
    "suffix+draft_model": {"method": ["suffix", "draft_model"], "model": DRAFT_MODEL},
    "ngram+draft_model": {"method": ["ngram", "draft_model"], "model": DRAFT_MODEL},
    "ngram+suffix": {"method": ["ngram", "suffix"]},
}
#: A single token of a lookup comes too late: the target has decoded on meanwhile.
SHORTEST = {name: 1 if "model" in config else 2 for name, config in CONFIGS.items()}
#: Every run tries each once, and a shortest and a longest proposal.
TRIED = [("suffix", 5), ("suffix+draft_model", 1), ("ngram+draft_model", 32), ("ngram+suffix", 5)]
#: A lookup alone, and one before a model; the exhaustive run takes all.
SOME = [
    pytest.param(name, marks=() if name in {"suffix", "ngram+draft_model"} else pytest.mark.exhaustive)
    for name in CONFIGS
]
TO_THE_LIMIT = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
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


@pytest.fixture(scope="module")
def plain_to_the_limit(texts):
    with make_llm(max_model_len=150) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(texts[:4], TO_THE_LIMIT, use_tqdm=False)]


@pytest.mark.parametrize(
    ("name", "k"),
    [
        pytest.param(name, k, marks=() if (name, k) in TRIED else pytest.mark.exhaustive)
        for name in CONFIGS
        for k in (SHORTEST[name], 5, 32)
    ],
)
def test_text_is_that_of_plain_decoding(texts, plain, name, k):
    with make_llm({**CONFIGS[name], "num_speculative_tokens": k}) as llm:
        outputs = generate(llm, texts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 40


@pytest.mark.parametrize("name", SOME)
def test_to_the_context_limit(texts, plain_to_the_limit, name):
    with make_llm({**CONFIGS[name], "num_speculative_tokens": 32}, max_model_len=150) as llm:
        outputs = llm.generate(texts[:4], TO_THE_LIMIT, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == plain_to_the_limit
    for output in outputs:
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 150


def test_vllms_call_for_suffix_decoding(texts):
    with LLM(model=TARGET_MODEL, speculative_config={"method": "suffix", "num_speculative_tokens": 32}) as llm:
        assert llm.deployment.draft is None
        assert llm.deployment.gateway.lookup == ("suffix",)
        (output,) = llm.generate(texts[0], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    assert output.outputs[0].text


@pytest.mark.e2e
def test_processes_and_a_draft_that_is_killed(stack, texts):
    methods = ("--method", "suffix", "--method", "draft_model")
    length = ("--num-speculative-tokens", "32")
    running = Stack.start(stack.targets, [draft_process(*methods, *length)], *length)
    try:
        request = request_of(texts[1], max_tokens=300, temperature=1.0, seed=77)
        undisturbed = collect(running, request)
        assert undisturbed[-1].speculation.num_accepted_draft_tokens > 0
        killed = collect(running, request, acts={60: running.drafts[0].kill})
        assert ids_of(killed) == ids_of(undisturbed)
        assert killed[-1].speculation.num_draft_failures >= 1
    finally:
        running.close()
