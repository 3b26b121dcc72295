from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.checkpoints import bundled_drafter
from tandem.training.checkpoint import load_model
from tandem.training.measure import acceptance_length, measure_head
from tandem.training.tokenizer import load_tokenizer

MODELS = Path(__file__).parents[3] / "tandem" / "models"
SNIPPETS = sorted((Path(__file__).parent / "snippets").glob("*.txt"))
PROMPT_LENGTH, STRIDE = 96, 160


@pytest.mark.parametrize("name", ["python-12m", "python-1m"])
def test_a_folder_loads_without_a_word(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    shows_bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype="auto", output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    finally:
        if shows_bars:
            transformers.logging.enable_progress_bar()
    assert not any(info.values())
    assert capfd.readouterr().err == ""
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == 2048
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    stored = load_file(MODELS / name / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}


def test_the_pair_is_small_and_the_draft_a_tenth_of_the_target() -> None:
    target, draft = ((MODELS / name / "model.safetensors").stat().st_size for name in ("python-12m", "python-1m"))
    assert draft * 10 <= target
    assert sum(file.stat().st_size for file in MODELS.rglob("*") if file.is_file()) <= 32 * 2**20


def unseen_source() -> torch.Tensor:
    tokenizer = load_tokenizer(MODELS / "python-12m")
    prompts = []
    for snippet in SNIPPETS:
        ids = torch.tensor(tokenizer.encode(snippet.read_text(encoding="utf-8")))
        prompts += list(ids.unfold(0, PROMPT_LENGTH, STRIDE))
    assert len(prompts) >= 15
    return torch.stack(prompts)


def test_a_round_commits_two_and_a_half_tokens_of_unseen_source() -> None:
    target, draft = load_model(MODELS / "python-12m"), load_model(MODELS / "python-1m")
    length = acceptance_length(target, draft, unseen_source(), num_tokens=64, temperature=0.0)
    assert length >= 2.5


@pytest.mark.parametrize(
    ("method", "least"), [pytest.param("eagle3", 2.5, marks=pytest.mark.exhaustive), ("mlp_speculator", 1.7)]
)
def test_a_bundled_head_is_small_and_drafts_what_it_was_trained_for(method: str, least: float) -> None:
    folder = MODELS / f"python-12m-{method}"
    assert bundled_drafter(None, [method]) == folder.name
    assert (folder / "model.safetensors").stat().st_size <= 4 * 2**20
    acceptance = measure_head(MODELS / "python-12m", folder, unseen_source(), num_tokens=64)
    assert acceptance.length >= least
