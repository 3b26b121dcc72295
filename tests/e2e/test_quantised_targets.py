"""Quantised targets with drafts: texts are those without, and GGUF files are served by real processes."""

import json
import os
import shutil

import gguf
import httpx
import numpy as np
import pytest
from safetensors.torch import load_file

from specdec.compiler import cache_folder
from tandem import LLM, SamplingParams
from tests.e2e.fork_server import ForkedProcess
from tests.e2e.servers import TARGET_MODEL

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def write_gguf(path):
    """The bundled target in Q8_0, with its tokenizer, as llama.cpp's converter writes a llama."""
    with open(f"{TARGET_MODEL}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    with open(f"{TARGET_MODEL}/tokenizer.json", encoding="utf-8") as file:
        tokenizer = json.load(file)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for text, token_id in tokenizer["model"]["vocab"].items():
        tokens[token_id] = text
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]], kinds[token["id"]] = token["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(f"{TARGET_MODEL}/model.safetensors").items():
        weight = weight.float().numpy()  # noqa: PLW2901
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            stored = f"blk.{layer}.{_PARTS[part]}.weight"
            if (turn := heads.get(part.rpartition(".")[2])) is not None:
                halves = weight.reshape(turn, 2, weight.shape[0] // turn // 2, -1)
                weight = halves.swapaxes(1, 2).reshape(weight.shape)  # noqa: PLW2901
        else:
            stored = _OTHERS[name]
        weight = np.ascontiguousarray(weight, dtype=np.float32)  # noqa: PLW2901
        if weight.ndim == 1:
            writer.add_tensor(stored, weight)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.gguf_folder.cache_folder", lambda: tmp_path / "cache")
    write_gguf(tmp_path / "python-q8.gguf")
    return str(tmp_path / "python-q8.gguf")


def _texts(prompts, model, config, **options):
    params = [SamplingParams(temperature=t, seed=5, max_tokens=40) for t in (0.0, 0.8) for _ in prompts]
    drafts = config.get("method") != "none"
    with LLM(model=model, speculative_config=config, fixed_draft_length=drafts, **options) as llm:
        outputs = llm.generate(prompts * 2, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], sum(o.metrics.num_accepted_tokens for o in outputs)


def test_a_target_of_4_bits_writes_the_same_with_a_draft(real_prompts):
    prompts = real_prompts[:3]
    draft = {"model": "python-1m", "num_speculative_tokens": 4, "quantization": "int4"}
    plain, _ = _texts(prompts, "python-12m", {"method": "none"}, quantization="int4")
    drafted, accepted = _texts(prompts, "python-12m", draft, quantization="int4")
    assert drafted == plain
    assert accepted > 60


def test_a_gguf_file_writes_nearly_what_its_original_does(gguf_file, real_prompts):
    prompts = real_prompts[:3]
    draft = {"model": "python-1m", "num_speculative_tokens": 4}
    plain, _ = _texts(prompts, gguf_file, {"method": "none"})
    drafted, accepted = _texts(prompts, gguf_file, draft)
    original, _ = _texts(prompts, "python-12m", {"method": "none"})
    assert drafted == plain
    assert accepted > 60
    same = [a == b for one, other in zip(plain, original, strict=True) for a, b in zip(one, other, strict=False)]
    assert sum(same) > 0.5 * len(same)


def test_serving_a_gguf_file(tmp_path):
    """The path alone; its tokenizer is the one in the file. One process serves: others get the folder made of it."""
    write_gguf(tmp_path / "python-q8.gguf")
    kernels = shutil.ignore_patterns("gguf")  # and links to files that other tests made
    shutil.copytree(cache_folder(), tmp_path / "cache" / "tandem", ignore=kernels)
    draft = json.dumps({"model": "python-1m", "num_speculative_tokens": 3})
    arguments = ["serve", str(tmp_path / "python-q8.gguf"), "--speculative-config", draft, "--embedded"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    process = ForkedProcess("tandem", [*arguments, "--port", "0", "--grpc-port", "0"], environment, tmp_path)
    try:
        lines = iter(process.stdout.readline, "")
        ready = next((line for line in lines if line.startswith("ready: ")), None)
        assert ready is not None, "it ended before it was ready"
        base = ready.split()[1].rstrip(",")
        body = {
            "model": "python-q8",
            "prompt": "def main():\n    parser = argparse.",
            "max_tokens": 24,
            "temperature": 0,
        }
        answer = httpx.post(f"{base}/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["text"].startswith("ArgumentParser(")
    finally:
        process.terminate()
        process.stdout.read()
        process.stdout.close()
        assert process.wait(30) == 0
