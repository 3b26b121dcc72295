"""Trees of the bundled draft through real processes: the text is the target's, also when the draft is killed."""

import pytest

from tandem import LLM, SamplingParams
from tests.e2e.servers import (
    DRAFT_MODEL,
    TARGET_MODEL,
    Stack,
    collect,
    collect_together,
    draft_process,
    ids_of,
    request_of,
)

pytestmark = pytest.mark.e2e

KINDS = [pytest.param(0.0, None, marks=pytest.mark.exhaustive), (1.0, 77)]


@pytest.fixture(scope="module")
def trees(stack):
    """A draft of trees and a gateway for it."""
    length = ("--num-speculative-tokens", "12")
    draft = draft_process(*length, "--tree-top-k", "4", "--tree-depth", "4")
    running = Stack.start(stack.targets, [draft], *length)
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
    for prompt in prompts[:2]:
        request = request_of(prompt, max_tokens=120, temperature=temperature, seed=seed)
        pieces, without = collect(trees, request), collect(trees, plain(request))
        assert ids_of(pieces) == ids_of(without)
        assert without[-1].speculation.num_draft_tokens == 0
        counts = pieces[-1].speculation
        assert counts.num_accepted_draft_tokens > counts.num_spec_steps  # more than one token a round, of trees
        assert counts.num_draft_tokens > 5 * counts.num_spec_steps
        assert max(i for i, n in enumerate(counts.acceptance_histogram) if n) <= 4


def test_to_the_context_limit(prompts):
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    config = {"model": DRAFT_MODEL, "num_speculative_tokens": 12, "tree_top_k": 4, "tree_depth": 4}
    texts = []
    for drafter in (None, config):
        settings = {"max_model_len": 150, "dtype": "float32", "fixed_draft_length": True}
        with LLM(TARGET_MODEL, speculative_config=drafter, **settings) as llm:
            outputs = llm.generate(prompts[:3], params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])
        assert all(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 150 for output in outputs)
    assert texts[0] == texts[1]
    assert all(output.metrics.num_accepted_tokens for output in outputs)


def test_eight_at_once(trees, prompts):
    requests = [
        request_of(prompt, max_tokens=80, temperature=float(i % 2), seed=i if i % 2 else None)
        for i, prompt in enumerate(prompts)
    ]

    assert collect_together(trees, requests) == [ids_of(collect(trees, plain(request))) for request in requests]


def test_killing_the_draft_changes_no_token(trees, prompts):
    request = request_of(prompts[0], max_tokens=300, temperature=1.0, seed=77)
    undisturbed = collect(trees, plain(request))
    killed = collect(trees, request, acts={60: trees.drafts[0].kill})
    assert ids_of(killed) == ids_of(undisturbed)
    assert killed[-1].speculation.num_draft_failures >= 1
