"""Finding checkpoints, and refusing pairs that do not fit."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import draft_service.main
from draft_service.drafters.registry import load_drafter
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.settings import DraftSettings, ModelSettings, SpeculativeSettings
from tandem import LLM, SamplingParams
from tandem.checkpoints import MODELS, bundled_models, check_pair, find_checkpoint
from tandem.cli import main as cli

TARGET, DRAFT = MODELS / "python-12m", MODELS / "python-1m"


def test_the_bundled_pair_fits() -> None:
    assert {"python-12m", "python-1m"} <= set(bundled_models())
    assert find_checkpoint("python-12m") == find_checkpoint(str(TARGET)) == str(TARGET)
    check_pair(str(TARGET), str(DRAFT))


def test_services_are_started_by_bundled_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(draft_service.main, "main", lambda argv, prog: calls.append(argv) or 0)
    assert cli.main(["draft", "--model=python-1m", "--target_model", "python-12m", "--port", "0"]) == 0
    assert calls == [[f"--model={DRAFT}", "--target-model", str(TARGET), "--port", "0"]]


def edit(source: Path, folder: Path, **config: object) -> dict:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**old, **config}))
    return json.loads((folder / "tokenizer.json").read_text())


def test_a_padded_embedding_is_fine(tmp_path: Path) -> None:
    edit(DRAFT, tmp_path / "draft", vocab_size=4160)
    check_pair(str(TARGET), str(tmp_path / "draft"))


def test_another_vocabulary_is_refused_and_both_are_named(tmp_path: Path) -> None:
    tokenizer = edit(DRAFT, tmp_path / "draft")
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelNotSupported, match="different vocabularies") as caught:
        check_pair(str(TARGET), str(tmp_path / "draft"))
    assert str(TARGET) in str(caught.value)
    assert str(tmp_path / "draft") in str(caught.value)


def longer_draft(folder: Path) -> Path:
    """The bundled draft with 64 rows more, of which the first stands for a token of its own."""
    tokenizer = edit(DRAFT, folder, vocab_size=4160)
    extra = {"id": 4096, "content": "<|own|>", "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append(extra | {"normalized": False, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tensors = load_file(DRAFT / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat((rows, rows.flip(0)[:64] * 3))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_draft_that_knows_more_tokens_goes_by_those_of_the_target(tmp_path: Path) -> None:
    draft = str(longer_draft(tmp_path / "longer"))
    assert check_pair(str(TARGET), draft) == str(TARGET)
    assert check_pair(str(TARGET), str(DRAFT)) is None
    with pytest.raises(ModelNotSupported, match=r"token 4096 is .* in the target only"):
        check_pair(draft, str(TARGET))
    prompts, params = ["def main():\n    parser", "class A:\n"], SamplingParams(temperature=0.0, max_tokens=40)
    with LLM() as llm:
        usual = llm.generate(prompts, params)
    with LLM(speculative_config={"model": draft}) as llm:
        drafted = llm.generate(prompts, params)
    assert [each.outputs[0].text for each in drafted] == [each.outputs[0].text for each in usual]
    assert sum(each.metrics.num_accepted_tokens for each in drafted) > 20


def test_a_draft_service_refuses_a_tokenizer_whose_tokens_it_does_not_know(tmp_path: Path) -> None:
    longer = str(longer_draft(tmp_path / "longer"))
    settings = DraftSettings(
        speculative=SpeculativeSettings(model=str(DRAFT)), model=ModelSettings(model=str(DRAFT), tokenizer=longer)
    )
    with pytest.raises(ModelNotSupported, match="in the target only"):
        asyncio.run(load_drafter(settings))


def test_without_tokenizer_files_the_sizes_count(tmp_path: Path) -> None:
    edit(DRAFT, tmp_path / "draft", vocab_size=100)
    (tmp_path / "draft" / "tokenizer.json").unlink()
    with pytest.raises(ModelNotSupported, match="100 and 4096 tokens"):
        check_pair(str(TARGET), str(tmp_path / "draft"))


def test_a_head_of_a_model_of_images_is_fetched_as_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **given: str(tmp_path))
    assert find_checkpoint("somebody/head") == str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlavaForCausalLM"]}))
    with pytest.raises(ModelNotSupported, match="a model of images or sound"):
        find_checkpoint("somebody/model")


def test_what_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        find_checkpoint(str(tmp_path))
    with pytest.raises(InvalidRequest, match="does not exist"):
        find_checkpoint("./nowhere/at-all")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidRequest, match="the hub did not give it"):
        find_checkpoint("tandem-tests/no-such-model")
