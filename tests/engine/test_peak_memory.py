from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM

from tandem.checkpoints import TARGET, find_checkpoint
from tandem.padding import pad_checkpoint

#: Loads a small model, which brings what every process needs, then a larger one, and reads its memory meanwhile.
PROGRAM = """
import ctypes, json, pathlib, sys, threading, time
import torch
from engine.loading.load import load_engine
from specdec.settings import ModelSettings

def own_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

def load(model):
    return load_engine(ModelSettings(model=model, device="cpu", dtype=sys.argv[3], quantization=sys.argv[4] or None,
                                     num_threads=1, kv_cache_memory_bytes=2**24, max_model_len=256,
                                     autotune="off"))

def watch():
    while not done:
        seen.append(own_bytes())
        time.sleep(0.002)

load(sys.argv[1])
ctypes.CDLL(None).malloc_trim(0)
before, seen, done = own_bytes(), [], []
watcher = threading.Thread(target=watch)
watcher.start()
engine = load(sys.argv[2])
done.append(True)
watcher.join()
info = engine.info
print(json.dumps([max(seen) - before - info.kv_cache_bytes, info.weight_bytes[0]]))
"""


def peak_and_weights(small: str, large: str, dtype: str, quantization: str) -> tuple[int, int]:
    """Bytes: the most that loading ``large`` takes beside its KV cache, and its weights."""
    command = [sys.executable, "-c", PROGRAM, small, large, dtype, quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    peak, weights = json.loads(done.stdout.splitlines()[-1])
    return peak, weights


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("quantization", "smallest"), [("int8", 1.8e8), ("int4", 1.1e8)])
def test_rounding_at_load_takes_little_more_than_the_result(
    tmp_path: Path, quantization: str, smallest: float, dtype: str
) -> None:
    target = find_checkpoint(TARGET)
    padded = pad_checkpoint(target, 200_000_000, cache=tmp_path)
    peak, weights = peak_and_weights(target, padded, dtype, quantization)
    assert weights > smallest
    assert 0.9 * weights < peak <= 1.15 * weights


def write_gpt_oss(folder: Path, size: int, num_experts: int, num_layers: int) -> str:
    """A checkpoint whose experts are [size, size] in MXFP4, of any numbers."""
    config = GptOssConfig(
        hidden_size=size,
        intermediate_size=size,
        num_local_experts=num_experts,
        num_experts_per_tok=2,
        num_hidden_layers=num_layers,
        layer_types=["full_attention"] * num_layers,
        vocab_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=0,
        eos_token_id=1,
    )
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    tensors = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = torch.ones(parameter.shape) if "norm" in name else torch.randn(parameter.shape) / 50
            continue
        experts, inputs, outputs = parameter.shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 118, dtype=torch.uint8)
    folder.mkdir()
    save_file(
        {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    stored = config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (folder / "config.json").write_text(json.dumps(stored))
    return str(folder)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("size", "num_experts", "num_layers"), [(512, 32, 16), (1536, 8, 8)])
def test_experts_go_from_the_file_into_their_panels(
    tmp_path: Path, size: int, num_experts: int, num_layers: int
) -> None:
    """Experts whose tensors are parts of the heap, and experts whose tensors are mapped by themselves."""
    small = write_gpt_oss(tmp_path / "small", 64, 4, 2)
    large = write_gpt_oss(tmp_path / "large", size, num_experts, num_layers)
    peak, weights = peak_and_weights(small, large, "bfloat16", "")
    assert weights > 2e8
    assert 0.9 * weights < peak <= 1.15 * weights
