"""Targets that draft with prediction layers of their own: the text is that of plain decoding, over gRPC too."""

import shutil
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tandem.cli.main import main
from tests.e2e.servers import TARGET_MODEL, Stack, collect, draft_process, ids_of, request_of, target_process
from tests.engine.heads.mtp_targets import CONFIGS, write_mtp_layers, write_mtp_target

NUM_TOKENS = 40
PROMPTS = [list(range(3 + i, 20 + 3 * i)) for i in range(4)]
#: MiMo's own architecture needs code from the hub.
FAMILIES = [
    pytest.param(family, marks=[pytest.mark.exhaustive] if family in ("qwen3_next", "nemotron_h") else [])
    for family in CONFIGS
    if family != "mimo"
]


def generate(folder, config, params):
    with LLM(
        model=str(folder), speculative_config=config, dtype="float32", fixed_draft_length=config["method"] != "none"
    ) as llm:
        return llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)


def texts(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_plain_decoding(tmp_path, family):
    write_mtp_layers(tmp_path, family, 2 if family == "glm4_moe" else 1, agrees=True)
    params = [
        SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, seed=i, ignore_eos=True)
        for i, temperature in enumerate((0.0, 0.0, 0.7, 1.0))
    ]
    drafted = generate(tmp_path, {"method": "mtp", "num_speculative_tokens": 3}, params)
    assert texts(drafted) == texts(generate(tmp_path, {"method": "none"}, params))
    greedy = drafted[:2]
    accepted = sum(output.metrics.num_accepted_tokens for output in greedy)
    assert accepted > 0.3 * sum(output.metrics.num_draft_tokens for output in greedy)


def test_a_draft_vocabulary_changes_no_text(tmp_path):
    """Half of all tokens are never drafted."""
    write_mtp_target(tmp_path / "target", "qwen3_5", agrees=True)
    (tmp_path / "ids.json").write_text(str(list(range(0, 97, 2))))
    config = {"method": "mtp", "num_speculative_tokens": 3, "draft_vocab": str(tmp_path / "ids.json")}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    drafted = generate(tmp_path / "target", config, params)
    assert texts(drafted) == texts(generate(tmp_path / "target", {"method": "none"}, params))
    assert sum(output.metrics.num_accepted_tokens for output in drafted) > 0


@pytest.mark.e2e
def test_an_exported_file_drafts_for_its_target_over_grpc(tmp_path):
    target_folder, exported = tmp_path / "target", tmp_path / "mtp"
    write_mtp_target(target_folder, "qwen3_5", agrees=True, vocab=4096)
    for file in Path(TARGET_MODEL).glob("tokenizer*"):
        shutil.copyfile(file, target_folder / file.name)
    assert main(["export-mtp", str(target_folder), str(exported)]) == 0
    assert main(["export-mtp", str(target_folder), str(exported)]) == 2  # it is not empty any more
    draft = draft_process("--target-model", str(exported), "--dtype", "float32", model=str(exported))
    stack = Stack.start([target_process("--dtype", "float32", model=str(target_folder))], [draft])
    try:
        request = request_of(PROMPTS[0], max_tokens=100)
        pieces = collect(stack, request, acts={40: draft.kill})
        speculation = pieces[-1].speculation
        assert speculation.num_accepted_draft_tokens > 0.3 * speculation.num_draft_tokens > 0
        assert speculation.hidden_state_bytes == (32 + 4) * speculation.num_hidden_states > 0
        request.speculation.num_speculative_tokens = 0
        assert ids_of(pieces) == ids_of(collect(stack, request))
    finally:
        stack.close()
