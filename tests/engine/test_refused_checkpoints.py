"""Checkpoints that are refused by their files alone: each format by name, with a remedy, without torch."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.refused_checkpoints import REFUSALS, TEXT_MODELS_OF_MULTIMODAL, check_checkpoint
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.methods import method_of

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8}
_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4}


def safetensors(tensors: Mapping[str, str]) -> bytes:
    """A file of tensors of four numbers each, by name and dtype."""
    header, end = {}, 0
    for name, dtype in tensors.items():
        header[name] = {"dtype": dtype, "shape": [4], "data_offsets": [end, end + 4 * _BYTES[dtype]]}
        end += 4 * _BYTES[dtype]
    return with_header(json.dumps(header).encode()) + bytes(end)


def with_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


PLAIN = safetensors({"model.layers.0.mlp.up_proj.weight": "F32", "model.norm.weight": "BF16"})
FP8 = {"model.layers.0.mlp.up_proj.weight": "F8_E4M3", "model.layers.0.mlp.up_proj.weight_scale_inv": "F32"}
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write(folder: Path, files: Mapping[str, Any]) -> Path:
    """Files by name; those without weights of their own get plain ones."""
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def model(*, weights: bytes = PLAIN, **config: Any) -> dict[str, Any]:
    return {"config.json": {**LLAMA, **config}, "model.safetensors": weights}


def quantised(method: str | None, **more: Any) -> dict[str, Any]:
    return model(quantization_config={"quant_method": method, **more})


#: Files of a folder, and what the refusal must name.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gguf": ({"model-q4_k_m.gguf": b"GGUF"}, r"GGUF weights \(model-q4_k_m.gguf\)"),
    "adapter": ({"adapter_config.json": {}, "adapter_model.safetensors": PLAIN}, "an adapter .*merge_and_unload"),
    "adapter beside a model": ({**model(), "adapter_config.json": {}}, "an adapter"),
    "diffusers": ({"model_index.json": {}}, "diffusion pipeline"),
    "mistral": ({"params.json": {}, "consolidated.safetensors": PLAIN}, r"params\.json"),
    "onnx": ({"onnx/model.onnx": b""}, "ONNX"),
    "sentence-transformers": ({**model(), "modules.json": []}, "an embeddings model"),
    "encoder": (model(model_type="bert", architectures=["BertModel"]), "an encoder .*'bert'"),
    "masked": (model(architectures=["RobertaForMaskedLM"]), "RobertaForMaskedLM, which writes no text"),
    "classifier": (model(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    "encoder-decoder": (model(model_type="t5", is_encoder_decoder=True), r"an encoder-decoder model \('t5'\)"),
    "vision": (model(model_type="qwen2_vl", vision_config={"depth": 1}), "images or sound .*'qwen2_vl'"),
    "sound": (model(model_type="voxtral", audio_config={"depth": 1}), "images or sound .*'voxtral'"),
    "llava": (model(model_type="llava_llama", mm_vision_tower="clip"), "mm_vision_tower"),
    "modelopt": (
        {**model(weights=safetensors(FP8)), "hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}},
        "a ModelOpt quantisation .*not quantised",
    ),
    "modelopt in the config": (quantised("modelopt", quant_algo="FP8"), "'modelopt'.*--quantization int8"),
    "unknown method over plain weights": (quantised("nonesuch"), "quantised by 'nonesuch'"),
    "no method": (quantised(None), "without quant_method"),
    "gptq": (quantised("gptq", bits=2), "quantised by 'gptq' with bits 2"),
    "awq": (quantised("awq", bits=4, version="gemv"), "quantised by 'awq' with version 'gemv'"),
    "compressed-tensors": (quantised("compressed-tensors"), "quantised by 'compressed-tensors'"),
    "compression_config": (model(compression_config={"quant_method": "sparseml"}), "'sparseml'"),
    "in the text model": (model(text_config={"quantization_config": {"quant_method": "exl2"}}), "'exl2'"),
    "old gptq": ({**model(), "quantize_config.json": {"bits": 4}}, r"quantize_config\.json"),
    "old awq": ({**model(), "quant_config.json": {"w_bit": 4}}, r"quant_config\.json"),
    "mlx": (model(quantization={"group_size": 64, "bits": 4}), "MLX"),
    "bitsandbytes over plain weights": (quantised("bitsandbytes", load_in_4bit=True), "bitsandbytes did not write"),
    "older bitsandbytes": (model(quantization_config={"load_in_8bit": True}), "bitsandbytes did not write"),
    "fp8 without a config": (model(weights=safetensors(FP8)), "F8_E4M3 without a quantization_config"),
    "fp8 without scales": (
        model(weights=safetensors({"a.weight": "F8_E4M3"}), quantization_config=FP8_CONFIG),
        "a.weight in F8_E4M3 without a scale",
    ),
    "int8 without a config": (model(weights=safetensors({"a.weight": "I8", "a.scale": "F32"})), "a.weight in I8"),
}

INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
#: Files of a folder that is incomplete or damaged, and what the error must name.
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({}, r"has no config\.json"),
    "no JSON": ({"config.json": b"{", "model.safetensors": PLAIN}, r"config\.json cannot be read"),
    "no object": ({"config.json": [], "model.safetensors": PLAIN}, "no JSON object"),
    "no weights": ({"config.json": LLAMA}, r"has no weights \(model\.safetensors, pytorch_model\.bin"),
    "truncated": (model(weights=PLAIN[:-1]), "truncated or damaged .*its header says"),
    "cut in the header": (model(weights=PLAIN[:40]), "truncated or damaged .*too few for its header"),
    "cut in the length": (model(weights=PLAIN[:5]), "truncated or damaged"),
    "too long": (model(weights=PLAIN + b"x"), "truncated or damaged"),
    "no header": (model(weights=struct.pack("<Q", 8) + b"no JSON!"), "header cannot be read"),
    "an endless offset": (
        model(weights=with_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e400]}}')),
        "header cannot be read",
    ),
    "a nested header": (model(weights=with_header(b"[" * 100_000)), "header cannot be read"),
    "a nested index": (
        {"config.json": LLAMA, "model.safetensors.index.json": b"[" * 100_000},
        r"index\.json cannot be read",
    ),
    "lfs": (model(weights=b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "git lfs pull"),
    "a shard of the index": (
        {"config.json": LLAMA, "model.safetensors.index.json": INDEX, "model-00001-of-00002.safetensors": PLAIN},
        "lacks model-00002-of-00002.safetensors",
    ),
    "a shard without an index": (
        {"config.json": LLAMA, "model-00001-of-00003.safetensors": PLAIN},
        "lacks model-00002-of-00003.safetensors, model-00003-of-00003.safetensors",
    ),
    "no index": (
        {"config.json": LLAMA, "model-00001-of-00001.safetensors": PLAIN},
        r"has no weights \(.*model\.safetensors\.index\.json",
    ),
    "a shard of torch's": (
        {"config.json": LLAMA, "pytorch_model.bin.index.json": {"weight_map": {"a": "pytorch_model-1.bin"}}},
        "lacks pytorch_model-1.bin",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_formats_are_refused_by_name(name: str, tmp_path: Path) -> None:
    files, text = REFUSED[name]
    with pytest.raises(ModelNotSupported, match=text) as caught:
        check_checkpoint(write(tmp_path, files))
    assert str(tmp_path) in str(caught.value)
    assert any(refusal.remedy in str(caught.value) for refusal in REFUSALS)


@pytest.mark.parametrize("config", [b"[]", b"[" * 100_000, b"{"], ids=["a list", "nested", "cut"])
def test_the_method_of_a_damaged_config_is_left_to_the_check(config: bytes, tmp_path: Path) -> None:
    assert method_of(str(write(tmp_path, {"config.json": config}))) == "draft_model"
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_folders_are_named(name: str, tmp_path: Path) -> None:
    files, text = DAMAGED[name]
    with pytest.raises(InvalidRequest, match=text) as caught:
        check_checkpoint(write(tmp_path, files))
    assert str(tmp_path) in str(caught.value)


def test_files_in_place_of_folders(tmp_path: Path) -> None:
    write(tmp_path, {"model.gguf": b"GGUF", "model.safetensors": PLAIN})
    with pytest.raises(ModelNotSupported, match=r"model\.gguf is a GGUF file, of which .* tandem target"):
        check_checkpoint(tmp_path / "model.gguf")
    with pytest.raises(InvalidRequest, match="is a file; give the folder"):
        check_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "files",
    [
        model(),
        model(weights=safetensors(FP8), quantization_config=FP8_CONFIG),
        model(quantization_config={"quant_method": "mxfp4"}),
        model(
            weights=safetensors({"a.weight": "U8", "a.weight.absmax": "F32", "a.weight.quant_map": "F32"}),
            quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
        ),
        model(weights=safetensors({"h.0.attn.bias": "U8", "a.weight": "F32"})),
        model(model_type="gemma3", vision_config={"depth": 1}),
        {"config.json": LLAMA, "pytorch_model.bin": b""},
        {**model(), "model-Q8_0.gguf": b"GGUF"},
    ],
    ids=["plain", "fp8", "mxfp4", "bitsandbytes", "masks", "text of gemma3", "torch", "GGUF beside it"],
)
def test_what_can_be_run_passes(files: dict[str, Any], tmp_path: Path) -> None:
    check_checkpoint(write(tmp_path, files))


def test_models_of_text_and_images_are_those_of_transformers() -> None:
    """Each that is not refused writes text in transformers."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert known >= TEXT_MODELS_OF_MULTIMODAL


def test_torch_is_not_needed(tmp_path: Path) -> None:
    program = (
        "import sys; from engine.refused_checkpoints import check_checkpoint\n"
        "try: check_checkpoint(sys.argv[1])\n"
        "except Exception as error: print(error)\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    folder = write(tmp_path, REFUSED["fp8 without scales"][0])
    ran = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    assert "without a scale" in ran.stdout
    assert ran.stdout.endswith("[]\n")
