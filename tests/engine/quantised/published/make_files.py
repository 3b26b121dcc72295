"""Write small checkpoints with AutoRound and GPTQModel, and the sha256 of each weight as GPTQModel decodes it.

``python make_files.py FOLDER``, in the environment of ``make formats``. ``decoded.json`` beside a file has, for each
linear layer, the type in which it was decoded and the hash of its numbers [N, K] in that type.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": "2"}

import sentencepiece
import torch
from auto_round import AutoRound
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

_VOCABULARY = 64
_GROUP = 32
#: Settings of GPTQModel.
_GPTQMODEL: dict[str, dict[str, Any]] = {
    "gptq_act_order": {"bits": 4, "desc_act": True},
    "gptq_8_bits": {"bits": 8, "desc_act": False},
    "gptq_v2": {"bits": 4, "desc_act": False, "format": "gptq_v2", "sym": False},
    "awq": {"bits": 4, "method": "awq", "format": "gemm"},
}
#: Schemes, formats and settings of AutoRound.
_AUTO_ROUND: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq_of_auto_round": ("W4A16", "auto_gptq", {"group_size": _GROUP}),
    "awq_of_auto_round": ("W4A16", "auto_awq", {"group_size": _GROUP, "sym": False}),
    "fp8_of_auto_round": ("FP8_BLOCK", "fp8", {}),
    "q4_k_m": ("W4A16", "gguf:q4_k_m", {}),
}


def _make_model(folder: Path, *, width: int, kv_heads: int) -> None:
    """A Llama of random weights with a tokenizer of SentencePiece, which AutoRound's GGUF writer knows."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=max(128, width),
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=_VOCABULARY,
        max_position_embeddings=64,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = ["alpha", "beta", "gamma", "delta", "draft", "target", "token", "verdict"]
    lines = (" ".join(random.Random(i).choices(words, k=8)) for i in range(500))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(folder / "tokenizer"),
        vocab_size=_VOCABULARY,
        model_type="bpe",
        hard_vocab_limit=False,
    )
    tokens = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))


def _decoded(made: Path) -> dict[str, list[str]]:
    """What GPTQModel decodes: of each layer the type and the hash."""
    folder, weights = next(made.rglob("config.json")).parent, {}
    if "awq" in made.name:
        tensors = load_file(folder / "model.safetensors")
        for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
            parts = [tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")]
            weights[name] = dequantize_gemm(*parts, 4, _GROUP)
    else:  # scales are float16
        model = GPTQModel.load(str(folder), backend=BACKEND.GPTQ_TORCH, device="cpu", dtype=torch.float16).model
        layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "dequantize_weight")}
        weights = {name: layer.dequantize_weight() for name, layer in layers.items()}

    def digest(weight: torch.Tensor) -> str:
        return hashlib.sha256(weight.t().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    return {name: [str(weight.dtype).removeprefix("torch."), digest(weight)] for name, weight in weights.items()}


def _keep(made: Path, folder: Path) -> None:
    """What a loader reads of a folder, without the files and fields that say how it was made."""
    folder.mkdir(parents=True, exist_ok=True)
    if found := list(made.rglob("*.gguf")):
        shutil.copy(found[0], folder / "model.gguf")
        return
    config_file = next(made.rglob("config.json"))
    shutil.copy(config_file.with_name("model.safetensors"), folder)
    config = json.loads(config_file.read_text())
    config["quantization_config"].pop("meta", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Make all of them."""
    out, work = Path(sys.argv[1]).absolute(), Path(sys.argv[1]).absolute() / "work"
    shutil.rmtree(work, ignore_errors=True)
    _make_model(work / "base", width=64, kv_heads=4)
    _make_model(work / "wide", width=256, kv_heads=1)
    generator = random.Random(2)
    texts = [[generator.randrange(_VOCABULARY) for _ in range(64)] for _ in range(16)]
    for name, settings in _GPTQMODEL.items():
        model = GPTQModel.load(str(work / "base"), QuantizeConfig(group_size=_GROUP, **settings), device="cpu")
        model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts], batch_size=4)
        model.save(str(work / name))
    for name, (scheme, form, settings) in _AUTO_ROUND.items():
        base = work / ("wide" if form.startswith("gguf") else "base")
        maker = AutoRound(str(base), scheme=scheme, iters=0, disable_opt_rtn=True, device_map="cpu", **settings)
        maker.quantize_and_save(str(work / name), format=form)
    for name in (*_GPTQMODEL, *_AUTO_ROUND):
        _keep(work / name, out / name)
        if "ptq" in name or "awq" in name:
            decoded = _decoded(work / name)
            (out / name / "decoded.json").write_text(json.dumps(decoded, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
