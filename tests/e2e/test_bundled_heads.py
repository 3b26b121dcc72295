"""The drafters that come with the bundled target: named by their method alone."""

import pytest

from gateway.text.tokenizer import TextTokenizer
from tandem import LLM, SamplingParams
from tandem.bench.prompts import pick_prompts
from tests.e2e.servers import (
    TARGET_MODEL,
    Stack,
    collect,
    draft_process,
    ids_of,
    request_of,
    target_process,
    wait_until,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


def generate(prompts, config):
    drafts = config["method"] != "none"
    with LLM(speculative_config=config, dtype="float32", fixed_draft_length=drafts) as llm:
        return llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def plain(real_prompts):
    return generate(real_prompts[:4], {"method": "none"})


@pytest.mark.parametrize("method", ["eagle3", "mlp_speculator"])
def test_a_method_alone_takes_the_bundled_head(real_prompts, plain, method):
    drafted = generate(real_prompts[:4], {"method": method, "num_speculative_tokens": 3})
    assert [output.outputs[0].token_ids for output in drafted] == [output.outputs[0].token_ids for output in plain]
    accepted = sum(output.metrics.num_accepted_tokens for output in drafted)
    assert accepted > 0.15 * sum(output.metrics.num_draft_tokens for output in drafted)


def test_a_long_context():
    """Prompts of four times the length of texts in training; without a window the draft model reaches 1.8."""
    prompts = pick_prompts(TextTokenizer.load(TARGET_MODEL).encode, 4, 1024, seed=2)
    outputs = generate([{"prompt_token_ids": list(ids)} for ids in prompts], {"method": "draft_model"})
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    assert 1 + accepted / sum(output.metrics.num_drafts for output in outputs) > 2.4


HEAD = f"{TARGET_MODEL}-eagle3"


def bytes_per_state(pieces):
    speculation = pieces[-1].speculation
    return speculation.hidden_state_bytes / speculation.num_hidden_states


@pytest.mark.e2e
@pytest.mark.parametrize("has_folder", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_target_that_has_the_first_layer_sends_a_twelfth_of_the_bytes(real_prompts, has_folder):
    """Three states of 384 numbers are 2304 bytes a position in bfloat16; what the layer makes of them 192 and a scale.
    The text is that of plain decoding. A target without the head's folder is sent the layer.
    """
    target = target_process(*(["--hidden-state-maps", HEAD] if has_folder else []), "--dtype", "float32")
    draft = draft_process("--method", "eagle3", "--target-model", TARGET_MODEL, model=HEAD)
    stack = Stack.start([target], [draft])
    try:
        prompt = list(TextTokenizer.load(TARGET_MODEL).encode(real_prompts[0]))[:60]
        if not has_folder:
            collect(stack, request_of(prompt, max_tokens=8))
            wait_until(lambda: any("took the first layer" in line for line in target.log), "the layer")
        for changes in ({}, {"temperature": 1.0, "seed": 7}):
            request = request_of(prompt, **{"max_tokens": 64, "temperature": 0.0} | changes)
            pieces = collect(stack, request)
            speculation = pieces[-1].speculation
            assert bytes_per_state(pieces) == 192 + 4
            assert speculation.num_hidden_states >= len(prompt) + 50
            assert speculation.num_accepted_draft_tokens > 0.1 * speculation.num_draft_tokens
            request.speculation.num_speculative_tokens = 0
            assert ids_of(pieces) == ids_of(collect(stack, request))
    finally:
        stack.close()


@pytest.mark.e2e
@pytest.mark.exhaustive
def test_a_target_without_memory_for_the_layer_sends_states(real_prompts):
    draft = draft_process("--method", "eagle3", "--target-model", TARGET_MODEL, model=HEAD)
    stack = Stack.start([target_process("--dtype", "float32", "--max-state-map-bytes", "100000")], [draft])
    try:
        prompt = list(TextTokenizer.load(TARGET_MODEL).encode(real_prompts[0]))[:40]
        request = request_of(prompt, max_tokens=40)
        pieces = collect(stack, request)
        wait_until(lambda: any("100000 are for them all" in line for line in stack.gateway.log), "the refusal")
        assert bytes_per_state(pieces) == bytes_per_state(collect(stack, request)) == 3 * (384 + 4)
        request.speculation.num_speculative_tokens = 0
        assert ids_of(pieces) == ids_of(collect(stack, request))
    finally:
        stack.close()
