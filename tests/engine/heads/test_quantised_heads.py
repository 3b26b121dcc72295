"""Heads in the formats of quantised checkpoints are those of the weights that the formats' libraries decode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.heads.files.checkpoint import read_head
from engine.heads.files.mtp import export_mtp
from engine.heads.head import DraftHead
from engine.refused_checkpoints import check_config
from specdec.errors import ModelNotSupported
from specdec.methods import method_of
from tests.engine.heads import checkpoints as files
from tests.engine.heads.conftest import Target
from tests.engine.heads.mtp_targets import names_of, write_mtp_target
from tests.engine.quantised.formats import FORMATS, REAL_FORMATS, Stored, rewritten

_FORMATS = {**REAL_FORMATS, **FORMATS}


def _equal(found: DraftHead, wanted: DraftHead) -> bool:
    expected = wanted.state_dict()
    return all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


_HEADS: dict[str, Callable[[], tuple[dict[str, Any], Stored, int]]] = {
    "eagle": lambda: (files.eagle_config(), files.eagle_tensors(), 8),
    "eagle3": lambda: (files.eagle3_config(), files.eagle3_tensors(), 8),
    "speculators": lambda: (files.eagle3_speculators_config(), files.eagle3_tensors(layer="layers.0."), 8),
    "medusa": lambda: (files.medusa_config(), files.medusa_tensors(), 2),
}


@pytest.mark.parametrize(
    ("form", "kind"), [*((form, "eagle3") for form in _FORMATS), *(("w4a16", kind) for kind in _HEADS)]
)
def test_heads_are_those_of_the_decoded_weights(form: str, kind: str, tmp_path: Path, target: Target) -> None:
    config, tensors, least = _HEADS[kind]()
    quantization, store = _FORMATS[form]()
    stored, meant, count = rewritten(tensors, store)
    assert count >= least
    config["torch_dtype"] = "bfloat16"
    files.write_head_files(tmp_path / "plain", config, meant)
    folder = tmp_path / "quantised"
    files.write_head_files(folder, {**config, "quantization_config": quantization | {"ignore": ["lm_head"]}}, stored)
    found, wanted = (read_head(path, target.folder, dtype=torch.bfloat16) for path in (folder, tmp_path / "plain"))
    assert found.method == kind.replace("speculators", "eagle3")
    assert _equal(found, wanted)
    assert found.state_map_fingerprint == read_head(folder, target.folder).state_map_fingerprint


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5", "mimo"])
@pytest.mark.parametrize("form", ["fp8", "w4a16", "awq"])
def test_prediction_layers(form: str, family: str, tmp_path: Path) -> None:
    """With the target's output layer quantised, too; beside it, and in the folder that ``tandem export-mtp`` makes."""
    folder, plain = tmp_path / "quantised", tmp_path / "plain"
    for each in (folder, plain):
        write_mtp_target(each, family, vocab=96)
    quantization, store = _FORMATS[form]()
    stored, meant, count = rewritten(load_file(plain / "model.safetensors"), store, names_of(family)[1])
    assert count >= 7
    output, numbers, _ = rewritten({"lm_head.weight": stored.pop("lm_head.weight")}, store)
    save_file(stored | output, folder / "model.safetensors", {"format": "pt"})
    save_file(meant | numbers, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    wanted = read_head(plain, plain, method="mtp", dtype=torch.bfloat16)
    assert _equal(read_head(folder, folder, method="mtp", dtype=torch.bfloat16), wanted)
    export_mtp(folder, tmp_path / "exported")
    assert method_of(str(tmp_path / "exported")) == "mtp"
    assert _equal(read_head(tmp_path / "exported", tmp_path / "exported", dtype=torch.bfloat16), wanted)


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ({"quant_method": "awq", "bits": 8}, "'awq' with bits 8; only 4 is read"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'fp8' with fmt 'e5m2'"),
        ({"quant_method": "gguf", "file": "a.gguf"}, "a head in a GGUF file"),
        ({"quant_method": "quark"}, "weights quantised by 'quark'"),
    ],
)
def test_what_is_not_read_is_refused_from_the_config(quantization: dict[str, Any], text: str, tmp_path: Path) -> None:
    config = files.eagle3_config(quantization_config=quantization)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotSupported, match=text):
        check_config(tmp_path, is_head=True)


def test_a_layer_that_lacks_a_tensor_is_named(tmp_path: Path, target: Target) -> None:
    quantization, store = _FORMATS["gptq"]()
    stored, _, _ = rewritten(files.eagle3_tensors(), store)
    del stored["midlayer.mlp.up_proj.scales"]
    files.write_head_files(tmp_path, files.eagle3_config(quantization_config=quantization), stored)
    with pytest.raises(ModelNotSupported, match=r"midlayer\.mlp\.up_proj in .* cannot be read as gptq: 'scales'"):
        read_head(tmp_path, target.folder)
