"""A draft that drafts in parallel, in a process of its own: the text is that of plain decoding, whatever it drafts."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.v1 import types_pb2
from tandem.training.checkpoint import save_draft
from tandem.training.parallel import as_parallel
from tests.e2e.servers import DRAFT_MODEL, MODELS, Stack, collect, draft_process, ids_of, request_of, wait_until
from tests.e2e.test_draft_methods import with_options


@pytest.fixture(scope="module", params=["pard", pytest.param("pard2", marks=pytest.mark.exhaustive)])
def with_parallel(request, stack, tmp_path_factory):
    """The bundled draft with a mask that it has not learned: of each draft the first token is good. As PARD-2 it reads
    states, through a small matrix.
    """
    folder = tmp_path_factory.mktemp("models") / "untrained"
    model = as_parallel(LlamaForCausalLM.from_pretrained(MODELS / Path(DRAFT_MODEL).name), 4096)
    save_draft(model, MODELS / "python-12m", folder)
    options = ["--num-speculative-tokens", "6"]
    if request.param == "pard2":
        matrix = 1e-3 * torch.randn(model.config.hidden_size, 2 * 384)
        torch.save({"target_proj.weight": matrix}, folder / "warp_model.bin")
        config = json.loads((folder / "config.json").read_text()) | {"pard2_target_layers": [-1, -2]}
        (folder / "config.json").write_text(json.dumps(config))
        options += ["--target-model", str(MODELS / "python-12m")]
    draft = draft_process(*options, model=str(folder))
    running = Stack.start(stack.targets, [draft], "--num-speculative-tokens", "6", "--fixed-draft-length")
    yield running
    running.close()


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11}],
    ids=["greedy", "coupled"],
)
def test_text_is_that_of_plain_decoding(with_parallel, prompts, params):
    request = request_of(prompts[1], max_tokens=60, **params)
    plain = ids_of(collect(with_parallel, with_options(request, num_speculative_tokens=0)))
    pieces = collect(with_parallel, with_options(request))
    assert ids_of(pieces) == plain
    drafted = sum(token.origin == "draft" for piece in pieces for token in piece.token_metrics)
    assert drafted > 10
    reads_states = "--target-model" in with_parallel.drafts[0].command
    assert (pieces[-1].speculation.hidden_state_bytes > 0) == reads_states
    if reads_states:  # the target has been sent the matrix, which makes 768 numbers as many as the draft's states have
        log = with_parallel.targets[0].log
        wait_until(lambda: any("took the first layer" in line for line in log), "the matrix")
        speculation = collect(with_parallel, with_options(request))[-1].speculation
        assert speculation.hidden_state_bytes < 200 * speculation.num_hidden_states


@pytest.mark.parametrize("rule", ["TOKEN", "BLOCK"])
def test_ratio_rules_take_its_rows(with_parallel, prompts, rule):
    verification = types_pb2.VerificationRule.Value(f"VERIFICATION_RULE_{rule}")
    request = request_of(prompts[0], max_tokens=60, temperature=0.9, seed=3)
    pieces = collect(with_parallel, with_options(request, verification=verification))
    assert len(ids_of(pieces)) == 60
    assert any(token.origin == "draft" for piece in pieces for token in piece.token_metrics)


def test_a_mask_that_was_not_trained_is_reported_at_start(with_parallel):
    (draft,) = with_parallel.drafts
    wait_until(lambda: any("SELF-TEST FAILED" in line for line in draft.log), "the line of the self-test")
    assert any("after the mask token 4096, draft untrained predicts" in line for line in draft.log)
