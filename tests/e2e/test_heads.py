"""Draft heads on the bundled target: the text is the target's, whatever they draft."""

import json

import pytest
from transformers import AutoTokenizer

from tandem import LLM, SamplingParams
from tests.e2e.fitted_heads import write_heads
from tests.e2e.servers import TARGET_MODEL, Stack, collect, draft_process, request_of
from tests.e2e.servers import ids_of as ids_of_pieces

NUM_TOKENS = 32
METHODS = ("eagle", "eagle3", "dflash", "dspark", "medusa", "mlp_speculator")
#: Heads of which a good part of what they draft is accepted.
FITTED = ("eagle", "medusa")
#: One that follows the target's states and one that does not; the exhaustive run takes all.
SOME = [
    pytest.param(method, marks=() if method in {"eagle", "dflash", "medusa"} else pytest.mark.exhaustive)
    for method in METHODS
]
#: Lengths that only the exhaustive run takes.
REST = [
    *((method, k) for method in ("eagle3", "mlp_speculator") for k in (1, 64)),
    *((method, k) for method in FITTED for k in (1, 64)),
]


@pytest.fixture(scope="module")
def prompts(real_prompts):
    tokenizer = AutoTokenizer.from_pretrained(TARGET_MODEL)
    return [tokenizer(text).input_ids for text in real_prompts]


@pytest.fixture(scope="module")
def heads(tmp_path_factory, prompts):
    folder = tmp_path_factory.mktemp("heads")
    write_heads(folder, TARGET_MODEL, prompts)
    return folder


@pytest.fixture(scope="module")
def llm_of():
    """``llm_of(config, settings)``: requests of one drafter share its engine, until the next is asked for."""
    last = {}

    def run(config, settings):
        key = json.dumps((config, settings), sort_keys=True)
        if key not in last:
            close()
            last[key] = LLM(model=TARGET_MODEL, speculative_config=config, **settings)
        return last[key]

    def close():
        while last:
            last.popitem()[1].close()

    yield run
    close()


@pytest.fixture(scope="module")
def generate(heads, prompts, llm_of):
    """``generate(method, k, params)``: the first eight prompts' outputs, drafted by a head, or by none."""

    def run(method, k, params, *, count=8, repeats=True, speculative=None, **settings):
        config = None
        if method:
            config = {
                "method": method,
                "model": str(heads / method),
                "num_speculative_tokens": k,
                **(speculative or {}),
            }
        llm = llm_of(config, {"fixed_draft_length": True, "dtype": "float32"} | settings)
        inputs = [{"prompt_token_ids": ids[: 8 + 4 * i]} for i, ids in enumerate(prompts[:count])]
        together = llm.generate(inputs, params, use_tqdm=False)
        if repeats:
            first = params[0] if isinstance(params, list) else params
            assert ids_of(llm.generate(inputs[0], first, use_tqdm=False)) == ids_of(together)[:1]
        return together

    return run


def ids_of(outputs):
    return [tuple(output.outputs[0].token_ids) for output in outputs]


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
SEEDED = [
    SamplingParams(temperature=t, top_p=p, top_k=k, max_tokens=NUM_TOKENS, seed=900 + i)
    for i, (t, p, k) in enumerate([(1.0, 1.0, 0), (1.0, 0.9, 0), (0.7, 1.0, 40), (1.3, 0.95, 0)] * 2)
]


@pytest.fixture(scope="module")
def plain(generate):
    return {"greedy": ids_of(generate(None, 0, GREEDY)), "seeded": ids_of(generate(None, 0, SEEDED))}


@pytest.mark.parametrize(
    ("method", "k"),
    [
        *((method, 3) for method in METHODS if method != "dflash"),
        pytest.param("dflash", 3, marks=pytest.mark.exhaustive),  # DSpark is of its kind
        *(pytest.param(method, k, marks=pytest.mark.exhaustive) for method, k in REST),
    ],
)
def test_the_text_is_that_of_plain_decoding(generate, plain, method, k):
    """Greedy, and seeded at temperature 1 and around it; eight at once and one alone."""
    greedy = generate(method, k, GREEDY)
    assert ids_of(greedy) == plain["greedy"]
    drafted = sum(output.metrics.num_draft_tokens for output in greedy)
    accepted = sum(output.metrics.num_accepted_tokens for output in greedy)
    assert drafted > 0
    if method in FITTED:
        assert accepted > (0.01 if k == 64 else 0.05) * drafted
    if k == 3:
        assert ids_of(generate(method, k, SEEDED)) == plain["seeded"]


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("eagle", {"tree_top_k": 3, "tree_depth": 3}),
        pytest.param(
            "medusa",
            {"speculative_token_tree": "[(0,),(1,),(2,),(0,0),(0,1),(1,0),(0,0,0)]"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_trees(generate, plain, method, tree):
    """More than one token of a place is tried: a tree's rounds accept more than a chain's of its depth."""
    trees = generate(method, 9, GREEDY, speculative=tree)
    assert ids_of(trees) == plain["greedy"]
    assert ids_of(generate(method, 9, SEEDED, speculative=tree)) == plain["seeded"]
    length = {
        name: sum(output.metrics.num_accepted_tokens for output in outputs)
        / sum(output.metrics.num_drafts for output in outputs)
        for name, outputs in (("tree", trees), ("chain", generate(method, 3, GREEDY)))
    }
    assert length["tree"] > length["chain"]


TO_THE_LIMIT = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def plain_to_the_limit(generate):
    return ids_of(generate(None, 0, TO_THE_LIMIT, count=3, max_model_len=96))


@pytest.mark.parametrize("method", SOME)
def test_to_the_context_limit(generate, plain_to_the_limit, method):
    outputs = generate(method, 4, TO_THE_LIMIT, count=3, max_model_len=96)
    assert ids_of(outputs) == plain_to_the_limit
    assert all(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 96 for output in outputs)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("eagle", "token"),
        pytest.param("eagle3", "block", marks=pytest.mark.exhaustive),
        pytest.param("medusa", "token", marks=pytest.mark.exhaustive),
        ("mlp_speculator", "block"),
    ],
)
def test_ratio_rules_take_the_rows_of_q(generate, method, rule):
    """That their text is distributed as the target's is tested where q is known to be what was drawn from."""
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS)
    outputs = generate(method, 3, params, count=4, repeats=False, verification=rule)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    assert all(output.metrics.num_draft_tokens > 0 for output in outputs)
    assert accepted > 0 or method not in FITTED


@pytest.mark.parametrize(
    "config",
    [
        {"method": "eagle", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
        pytest.param(
            {"method": "eagle3", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
            marks=pytest.mark.exhaustive,
        ),
        {"folder": "mlp_speculator", "draft_tensor_parallel_size": 1},
        pytest.param({"folder": "eagle3"}, marks=pytest.mark.exhaustive),
        pytest.param({"folder": "medusa", "num_speculative_tokens": 3}, marks=pytest.mark.exhaustive),
    ],
    ids=["eagle", "eagle3", "mlp by its model alone", "eagle3 by its model alone", "medusa by its model"],
)
def test_the_calls_of_vllms_documentation(heads, prompts, config):
    config = dict(config)
    model = str(heads / config.pop("folder", config.get("method")))
    with LLM(model=TARGET_MODEL, speculative_config={"model": model, **config}, fixed_draft_length=True) as llm:
        (output,) = llm.generate({"prompt_token_ids": prompts[0][:20]}, GREEDY, use_tqdm=False)
    assert output.metrics.num_draft_tokens > 0


@pytest.fixture(scope="module", params=["eagle", pytest.param("dspark", marks=pytest.mark.exhaustive)])
def head_stack(request, stack, heads):
    draft = draft_process("--method", request.param, "--target-model", TARGET_MODEL, model=str(heads / request.param))
    running = Stack.start(stack.targets, [draft])
    yield running, request.param
    running.close()


@pytest.mark.e2e
def test_killing_the_draft_changes_no_token(head_stack, prompts):
    """And processes start with a head. The states of the running request are lost: the rest of it is not drafted."""
    running, method = head_stack
    request = request_of(prompts[0][:30], max_tokens=200, temperature=1.0, seed=77)
    undisturbed = collect(running, request)
    killed = collect(running, request, acts={40: running.drafts[0].kill})
    assert ids_of_pieces(killed) == ids_of_pieces(undisturbed)
    assert 0 < killed[-1].speculation.num_draft_tokens < undisturbed[-1].speculation.num_draft_tokens
    assert undisturbed[-1].speculation.num_accepted_draft_tokens > 0 or method not in FITTED
