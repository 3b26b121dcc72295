"""Files that AutoRound and GPTQModel wrote: every weight is what the library decodes, bit for bit.

The files lie in ``published``, made by ``make_files.py`` beside them; ``make formats`` makes them anew, and sets
``TANDEM_FORMATS`` to where they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.checkpoint_files import CheckpointFiles
from engine.gguf_file import GgufFile
from engine.loading import load
from engine.loading.assembly import GgufSource, PackedSource, TensorSource
from engine.loading.checkpoint import load_config
from specdec.settings import ModelSettings
from tandem.checkpoints import find_checkpoint

_FOLDER = Path(os.environ.get("TANDEM_FORMATS", Path(__file__).with_name("published")))
_OF_GPTQMODEL = ("awq", "awq_of_auto_round", "gptq_8_bits", "gptq_act_order", "gptq_of_auto_round", "gptq_v2")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.gguf_folder.cache_folder", lambda: tmp_path)


def _checkpoint(name: str) -> str:
    file = _FOLDER / name / "model.gguf"
    return find_checkpoint(str(file)) if file.exists() else str(_FOLDER / name)


def _weights(folder: str, names: list[str]) -> dict[str, torch.Tensor]:
    """What the engine makes of linear layers, float32 [N, K]."""
    with ExitStack() as stack:
        files = CheckpointFiles(folder)
        assert files.stored_format is not None
        source: TensorSource
        if files.stored_format.file is None:
            source = PackedSource(files, files.stored_format, stack)
        else:
            config = load_config(ModelSettings(model=folder))
            source = GgufSource(GgufFile(Path(folder, files.stored_format.file)), config)
        found = {name: source.linear(name) for name in names}
    return {name: grouped.decode() for name, grouped in found.items() if grouped is not None}


@pytest.mark.parametrize("name", _OF_GPTQMODEL)
def test_awq_and_gptq_are_decoded_as_gptqmodel_does(name: str) -> None:
    wanted = json.loads((_FOLDER / name / "decoded.json").read_text())
    assert len(wanted) == 7
    for layer, weight in _weights(str(_FOLDER / name), list(wanted)).items():
        dtype, digest = wanted.pop(layer)
        numbers = weight.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(numbers).hexdigest() == digest, layer
    assert not wanted


def _by_transformers(name: str) -> PreTrainedModel:
    gguf = {"gguf_file": "model.gguf"} if (_FOLDER / name / "model.gguf").exists() else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(_FOLDER / name, dtype=torch.float32, **gguf)
    return model.eval()


def _filled_in(name: str) -> PreTrainedModel:
    """The stock model with the weights of a folder's linear layers as the engine decodes them."""
    config = AutoConfig.from_pretrained(_FOLDER / name)
    del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_file(_FOLDER / name / "model.safetensors")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    tensors |= {f"{name}.weight": weight for name, weight in _weights(str(_FOLDER / name), linears).items()}
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    return model


@pytest.mark.parametrize("name", ["fp8_of_auto_round", "q4_k_m"])
def test_fp8_and_gguf_are_decoded_as_transformers_does(name: str) -> None:
    model = _by_transformers(name)
    wanted = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = _weights(_checkpoint(name), list(wanted))
    assert len(found) >= 7
    for layer, weight in found.items():
        assert torch.equal(weight, wanted[layer]), layer


@pytest.mark.parametrize("name", [*_OF_GPTQMODEL, "fp8_of_auto_round", "q4_k_m"])
def test_a_file_answers_as_the_weights_it_stands_for(name: str, tools: SimpleNamespace) -> None:
    folder = _checkpoint(name)
    settings = ModelSettings(
        model=folder, device="cpu", dtype="float32", num_threads=1, quantized_activations="float", block_size=4
    )
    engine = load.load_engine(settings)
    assert engine.runner.name == "native decoder"
    model = _by_transformers(name) if name == "q4_k_m" else _filled_in(name)
    ids = [token % model.config.vocab_size for token in tools.random_ids(20, seed=3)]
    wanted = tools.stock_logits(model, ids)
    error = (tools.feed(engine, engine.pool.open(20), ids) - wanted).square().mean().sqrt() / wanted.std()
    assert float(error) < 1e-5
