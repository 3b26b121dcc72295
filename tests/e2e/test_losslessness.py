"""The losslessness contract on the bundled pair: the text is the target's, whatever drafts."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem import LLM, SamplingParams
from tests.e2e.servers import DRAFT_MODEL, TARGET_MODEL

NUM_TOKENS = 64
#: Prompts of one length need no padding in Hugging Face's batches.
PROMPT_LENGTHS = (8, 16, 24, 32, 40)
#: A special token that a model never writes.
PADDING = 1
#: A flip with a larger gap between the two logits is no rounding but a bug.
LARGEST_GAP = 1e-3

DRAFTERS = {
    "draft_model": {"method": "draft_model", "model": DRAFT_MODEL},
    "window": {"method": "draft_model", "model": DRAFT_MODEL, "draft_window_size": 24},
    "ngram": {"method": "ngram", "prompt_lookup_max": 4},
    "none": None,
}
#: Lengths that only the exhaustive run takes.
REST = [("none", 0), ("window", 8), ("draft_model", 1), ("draft_model", 8), ("ngram", 1), ("ngram", 8)]


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(TARGET_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET_MODEL)


def hf_generate(model, prompts, num_tokens, **options):
    """What Hugging Face generates greedily after prompts of one length: the new ids of each, to the first stop."""
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=PADDING,
        **options,
    )
    return [[token for token in row if token != PADDING] for row in out[:, ids.shape[1] :].tolist()]


@pytest.fixture(scope="module")
def expected(reference, tokenizer, real_prompts):
    """50 prompts as ids, in five lengths, and Hugging Face's greedy continuation of each."""
    pairs = []
    for i, length in enumerate(PROMPT_LENGTHS):
        prompts = [tokenizer(text).input_ids[:length] for text in real_prompts[i :: len(PROMPT_LENGTHS)]]
        pairs += zip(prompts, hf_generate(reference, prompts, NUM_TOKENS), strict=True)
    assert len(pairs) == 50
    return pairs


def check_greedy(reference, expected, outputs):
    """Every output is Hugging Face's; where they part, the two logits must be a rounding error apart."""
    flips = []
    for (prompt, wanted), output in zip(expected, outputs, strict=True):
        got = list(output.outputs[0].token_ids)
        if got == wanted:
            continue
        at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + wanted[:at]])).logits[0, -1]
        gap = float(logits[wanted[at]] - logits[got[at]])
        assert abs(gap) < LARGEST_GAP, f"token {at} differs with a gap of {gap}"
        flips.append(gap)
    print(f"{len(flips)} flips in {len(expected)} texts, gaps {flips}")
    assert len(flips) <= max(1, len(expected) // 10)
    return flips


def make_llm(drafter, k, **settings):
    config = DRAFTERS[drafter] and {**DRAFTERS[drafter], "num_speculative_tokens": k}
    settings = {"fixed_draft_length": True} | settings  # drafts are verified whether or not they pay off here
    return LLM(model=TARGET_MODEL, speculative_config=config, dtype="float32", **settings)


@pytest.mark.parametrize(
    ("drafter", "k"),
    [
        *(("draft_model", 3), ("ngram", 3)),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in REST),
    ],
)
def test_greedy_is_hugging_faces(reference, expected, drafter, k):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with make_llm(drafter, k) as llm:
        together = llm.generate([{"prompt_token_ids": ids} for ids, _ in expected], params, use_tqdm=False)
        alone = [llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0] for ids, _ in expected[:4]]
    check_greedy(reference, expected, together)
    # Kernels whose rows do not depend on the batch: alone and among fifty, bit for bit.
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in together[:4]]


def test_greedy_to_the_context_limit(reference, expected):
    with make_llm("draft_model", 4, max_model_len=128) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in expected[:3]], params, use_tqdm=False)
    for (prompt, _), output in zip(expected, outputs, strict=False):
        assert len(prompt) + len(output.outputs[0].token_ids) == 128
        assert output.outputs[0].finish_reason == "length"
    wanted = [
        (prompt, hf_generate(reference, [prompt], 128 - len(prompt), eos_token_id=-1)[0]) for prompt, _ in expected[:3]
    ]
    check_greedy(reference, wanted, outputs)


def test_seeded_text_is_the_same_with_any_drafter_and_k(expected):
    prompts = [{"prompt_token_ids": ids} for ids, _ in expected[:8]]
    params = [
        SamplingParams(temperature=t, top_p=p, top_k=k, max_tokens=64, seed=900 + i)
        for i, (t, p, k) in enumerate([(1.0, 1.0, 0), (1.0, 0.9, 0), (0.7, 1.0, 40), (1.3, 0.95, 0)] * 2)
    ]
    texts = {}
    for drafter, k in (("none", 0), ("draft_model", 4), ("window", 8), ("ngram", 5)):
        with make_llm(drafter, k) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts[drafter, k] = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert len(set(map(tuple, texts.values()))) == 1, texts
    assert len(set(texts["none", 0])) == 8


def test_a_planted_bug_is_caught(reference, expected):
    """The check above can fail: one wrong token in one text is a gap far above rounding."""

    class Output:
        def __init__(self, ids):
            self.outputs = [type("Completion", (), {"token_ids": ids})]

    wrong = [list(wanted) for _, wanted in expected]
    wrong[7][5] = (wrong[7][5] + 1) % 4096
    with pytest.raises(AssertionError, match="token 5 differs"):
        check_greedy(reference, expected, [Output(ids) for ids in wrong])
