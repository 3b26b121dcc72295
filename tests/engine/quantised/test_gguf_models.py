"""GGUF files through the whole engine, written with the gguf package, named and ordered as by llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.gguf_config import ARCHITECTURES, config_of
from engine.gguf_file import GgufFile
from engine.heads.files.tensors import TargetTensors
from engine.loading import load
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.settings import ModelSettings
from tandem.checkpoints import find_checkpoint

_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels stay where they are; folders of GGUF files are made in the test's own."""
    monkeypatch.setattr("tandem.gguf_folder.cache_folder", lambda: tmp_path / "cache")


def _name_of(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        part, _, kind = rest.rpartition(".")
        return f"blk.{layer}.{_PARTS[part]}.{kind}"
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return f"{names[name.rpartition('.')[0]]}.weight"


def _rotated_as_neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of a llama's queries and keys: ``permute`` of convert_hf_to_gguf.py."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _blocks_of(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random blocks of small numbers: the package writes no types with 256 numbers."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(shape[0] + shape[1])
    blocks = generator.integers(0, 256, (shape[0], shape[1] // numbers, size), dtype=np.uint8)
    for at, spread in ((208, 1e-4),) if kind.name == "Q6_K" else ((0, 3e-4), (2, 2e-3)):
        number = (np.abs(generator.normal(size=blocks.shape[:2])) * spread).astype(np.float16)
        blocks[..., at : at + 2] = number[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _write(model: PreTrainedModel, path: Path, *kinds: str, **more: Any) -> None:
    """Matrices in these types in turn; the model gets the numbers that they stand for."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(7)
    for key, value in more.items():
        writer.add_float32(f"{arch}.{key.replace('__', '.')}", value)
    matrices = 0
    for name, parameter in model.named_parameters():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        turn = heads.get(name.split(".")[-2]) if arch == "llama" else None
        data = parameter.detach().numpy()
        if parameter.dim() == 1:
            writer.add_tensor(_name_of(name), data if turn is None else _rotated_as_neighbours(data, turn).ravel())
            continue
        kind = gguf.GGMLQuantizationType[kinds[matrices % len(kinds)]]
        matrices += 1
        if kind.name.endswith("_K"):
            blocks = _blocks_of(data.shape, kind)
            values = gguf.quants.dequantize(blocks, kind)
        else:
            blocks = gguf.quants.quantize(data if turn is None else _rotated_as_neighbours(data, turn), kind)
            values = gguf.quants.dequantize(blocks, kind)
        writer.add_tensor(_name_of(name), blocks, raw_dtype=kind)
        if turn is not None:
            half = config.head_dim // 2
            values = values.reshape(turn, half, 2, -1).swapaxes(1, 2).reshape(values.shape)
        parameter.data = torch.from_numpy(np.ascontiguousarray(values)).float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kinds", [("Q8_0",), ("Q4_0", "Q8_0"), ("Q4_K", "Q6_K", "Q5_K"), ("F16",)])
def test_a_file_answers_as_the_numbers_it_stands_for(
    name: str, kinds: tuple[str, ...], tmp_path: Path, tools: SimpleNamespace
) -> None:
    options = {"tie_word_embeddings": name == "qwen2", "attention_bias": False}
    model = tools.build(name, **_SIZES, **options)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # tame: with sharp attention every rounding grows
            parameter.data /= 0.3 * parameter.shape[1] ** 0.5
    _write(model, tmp_path / "tiny.gguf", *kinds)
    folder = find_checkpoint(str(tmp_path / "tiny.gguf"))
    assert find_checkpoint(str(tmp_path / "tiny.gguf")) == folder
    engine = load.load_engine(ModelSettings(model=folder, device="cpu", dtype="float32", num_threads=1))
    assert (engine.info.name, engine.runner.name) == ("tiny", "native decoder")
    assert engine.info.eos_token_ids == (7,)
    ids = tools.random_ids(20, seed=3)
    wanted = tools.stock_logits(model, ids)
    difference = (tools.feed(engine, engine.pool.open(20), ids) - wanted).square().mean().sqrt() / wanted.std()
    assert float(difference) < (1e-3 if kinds == ("F16",) else 0.15)  # 8-bit activations; in another order it is 1


def test_files_that_cannot_be_run_are_refused_by_name(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama", **_SIZES)
    _write(model, tmp_path / "experts.gguf", "Q8_0", expert_count=8)
    with pytest.raises(ModelNotSupported, match=r"experts\.gguf holds a model of 8.0 experts"):
        find_checkpoint(str(tmp_path / "experts.gguf"))
    model.config.model_type = "gemma3"
    _write(model, tmp_path / "gemma.gguf", "Q8_0")
    with pytest.raises(ModelNotSupported, match="holds a 'gemma3' model; of GGUF llama, qwen2, qwen3 are read"):
        find_checkpoint(str(tmp_path / "gemma.gguf"))
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "experts.gguf").read_bytes()[:-1000])
    with pytest.raises(InvalidRequest, match="truncated or damaged"):
        find_checkpoint(str(tmp_path / "cut.gguf"))


def test_a_head_shares_the_layers_of_a_file(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama", **_SIZES)
    _write(model, tmp_path / "model.gguf", "Q8_0")
    (tmp_path / "config.json").write_text(json.dumps(config_of(GgufFile(tmp_path / "model.gguf"))))
    shared = TargetTensors(tmp_path)
    assert torch.equal(shared.embeddings().float(), model.get_input_embeddings().weight)
    assert torch.equal(shared.lm_head().float(), model.get_output_embeddings().weight)
