"""Models and settings that are refused, each with a text that says why and what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel

from engine import modules as engine_module
from engine import torch_runner
from engine.engine import Engine
from engine.layers import PagedLayer
from engine.loading import acceleration, checkpoint, load
from engine.loading.self_check import TOLERANCES, disagreement, has_experts
from engine.native import attention as native
from engine.plan import BatchPlan
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.settings import ModelSettings
from tests.engine.conftest import build


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("recurrent_gemma", {}, "has 2 layers but 0 of them attend .* recurrent, linear or home-made attention"),
        ("rwkv", {}, "RwkvForCausalLM has an attention of its own"),
        ("falcon_alibi", {}, "'falcon' with ALiBi positions .* attends in code of its own"),
        ("codegen", {}, "CodeGenForCausalLM has an attention of its own"),
        ("diffllama", {}, "attends twice in one pass"),
        ("llama4", {}, "chunks of 16 tokens.*set max_model_len to 16 or less"),
        ("llama4_tuned", {}, "scales its attention by a token's place in the batch"),
        ("minimax_m3", {}, "MiniMaxM3VLAttention passes 'block_indices' to its attention"),
        ("minimax_m3_short", {}, "MiniMaxM3VLAttention passes 'block_indices' to its attention"),
        ("deepseek_v32", {}, r"'deepseek_v32' attends to the positions that an indexer .* \(index_topk\)"),
        ("longrope", {}, r"\(longrope\) changes with the longest sequence.*set max_model_len to 32 or less"),
        ("dynamic", {"max_model_len": 200}, r"\(dynamic\) changes with the longest.*beyond 128 tokens"),
    ],
)
def test_models_that_would_be_wrong_are_refused(
    name: str, options: dict[str, Any], text: str, load_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(ModelNotSupported, match=text):
        load_engine(name, **options)


@pytest.mark.parametrize(("name", "length"), [("llama4", 16), ("longrope", 32), ("dynamic", 128)])
def test_they_load_within_the_length_that_is_right(name: str, length: int, load_engine: Callable[..., Engine]) -> None:
    assert load_engine(name, max_model_len=length).info.max_model_len == length


def test_encoder_decoders_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    AutoConfig.for_model("t5", vocab_size=97).save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match=r"an encoder-decoder model \('t5'\)"):
        load.load_engine(ModelSettings(model=str(tmp_path)))


def test_settings_the_model_cannot_meet(load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delattr(checkpoint, "load_model")  # it is refused before the weights are read
        with pytest.raises(InvalidRequest, match="max_model_len is 129 but the model takes 128"):
            load_engine("llama", max_model_len=129)
    with pytest.raises(InvalidRequest, match=r"max_model_len is 128 but the KV cache holds \d+ tokens"):
        load_engine("llama", max_model_len=128, kv_cache_memory_bytes=20_000)
    with pytest.raises(InvalidRequest, match="KV cache may take 1000 bytes"):
        load_engine("llama", kv_cache_memory_bytes=1000)
    with pytest.raises(InvalidRequest, match="device is 'tpu'"):
        load_engine("llama", device="tpu")
    with pytest.raises(InvalidRequest, match="device is 'meta'"):
        load_engine("llama", device="meta")
    with pytest.raises(InvalidRequest, match="this machine has"):
        load_engine("llama", device="cuda:99")
    with pytest.raises(InvalidRequest, match="no tokenizer can be read"):
        load_engine("llama", tokenizer="nowhere/at/all")


def test_folders_that_hold_no_model(tmp_path: Path, checkpoint: Callable[[str], str]) -> None:
    with pytest.raises(InvalidRequest, match=r"has no config\.json"):
        load.load_engine(ModelSettings(model=str(tmp_path)))
    with pytest.raises(InvalidRequest, match="no checkpoint can be read"):
        load.load_engine(ModelSettings(model=str(tmp_path / "absent")))
    config = json.loads(Path(checkpoint("llama"), "config.json").read_text())
    Path(tmp_path, "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="has no weights"):
        load.load_engine(ModelSettings(model=str(tmp_path)))
    shutil.copy(Path(checkpoint("llama"), "model.safetensors"), tmp_path)
    Path(tmp_path, "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    with pytest.raises(ModelNotSupported, match="nonesuch"):
        load.load_engine(ModelSettings(model=str(tmp_path)))


def test_missing_weights_are_not_made_up(tmp_path: Path, tools: SimpleNamespace) -> None:
    tools.build("llama").save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=r"lacks 1 of the model's weights \(model.layers.1.mlp.up_proj.weight"):
        load.load_engine(ModelSettings(model=str(tmp_path)))


def _store(model: PreTrainedModel, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> ModelSettings:
    """A checkpoint with other tensors than its model has."""
    model.save_pretrained(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return ModelSettings(model=str(folder), device="cpu", num_threads=1, block_size=4)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.1.self_attn.q_proj.input_scale",
        "model.layers.1.self_attn.k_scale",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.mlp.gate_proj.bias",
        "lm_head.bias",
    ],
)
def test_tensors_that_would_be_dropped_are_refused_by_name(name: str, tmp_path: Path, tools: SimpleNamespace) -> None:
    settings = _store(tools.build("llama"), tmp_path, lambda weights: weights.update({name: torch.ones(1)}))
    with pytest.raises(ModelNotSupported, match=f"holds 1 tensors that LlamaForCausalLM does not use .{name}"):
        load.load_engine(settings)


def test_modelopt_is_refused_although_its_weights_can_be_cast(tmp_path: Path, tools: SimpleNamespace) -> None:
    def round_weights(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "proj" in name]:
            scale = weights[name].abs().max() / 448
            weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
            weights[name.replace("weight", "weight_scale")] = scale

    settings = _store(tools.build("llama"), tmp_path, round_weights)
    with pytest.raises(ModelNotSupported, match="F8_E4M3 without a quantization_config"):
        load.load_engine(settings)
    config = json.loads(Path(tmp_path, "config.json").read_text())
    for method in ("modelopt", "nonesuch"):
        config["quantization_config"] = {"quant_method": method}
        Path(tmp_path, "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelNotSupported, match=f"weights quantised by '{method}'"):
            load.load_engine(settings)


def test_fp8_with_scales_is_what_its_weights_stand_for(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama")

    def round_weights(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "proj" in name]:
            scale = weights[name].abs().max() / 448
            weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
            model.get_parameter(name).data = weights[name].float() * scale

    settings = _store(model, tmp_path, round_weights)
    config = json.loads(Path(tmp_path, "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    Path(tmp_path, "config.json").write_text(json.dumps(config))
    engine, ids = load.load_engine(settings), tools.random_ids(20, seed=3)
    difference = tools.feed(engine, engine.pool.open(20), ids) - tools.stock_logits(model, ids)
    assert float(difference.square().mean().sqrt()) < 0.05  # in bfloat16; without scales it is 1


def test_tensors_that_change_nothing_are_left_aside(tmp_path: Path, tools: SimpleNamespace) -> None:
    names = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.attn.bias",
        "model.layers.2.mlp.up_proj.weight",
        "model.mtp.fc.weight",
        "model.embeddings.position_ids",
    )
    more = {name: torch.ones(1) for name in names}
    settings = _store(tools.build("llama"), tmp_path, lambda weights: weights.update(more))
    assert load.load_engine(settings).runner.name == "native decoder"


def test_a_tied_output_layer_that_is_stored_once_more_is_left_aside(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama", tie_word_embeddings=True)

    def untie(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    engine = load.load_engine(_store(model, tmp_path, untie))
    ids = tools.random_ids(9, seed=3)
    torch.testing.assert_close(
        tools.feed(engine, engine.pool.open(9), ids), tools.stock_logits(model, ids), atol=1e-4, rtol=1e-4
    )


def test_float16_on_a_cpu_says_which_type_is_fast(
    load_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    load_engine("llama", dtype="float16")
    assert "float16, which is slow on a CPU: --dtype bfloat16 is fast" in caplog.text
    caplog.clear()
    load_engine("llama", dtype="bfloat16")
    assert "--dtype" not in caplog.text


def test_a_checkpoint_in_float16_runs_in_bfloat16_on_a_cpu(
    tmp_path: Path, tools: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    model = tools.build("llama").half()
    model.save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        engine = load.load_engine(ModelSettings(model=str(tmp_path), device="cpu"))
    assert (engine.info.dtype, engine.runner.name) == ("bfloat16", "native decoder")
    assert "is stored in float16 and runs in bfloat16 on this CPU" in caplog.text
    exact = load.load_engine(ModelSettings(model=str(tmp_path), device="cpu", dtype="float32"))
    ids = tools.random_ids(9, seed=3)
    wanted = tools.stock_logits(model.float(), ids)
    torch.testing.assert_close(tools.feed(exact, exact.pool.open(9), ids), wanted, atol=1e-3, rtol=1e-3)


def test_weights_that_overflow_are_refused(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama")
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match="in float32 answers with NaN or infinity"):
        load.load_engine(ModelSettings(model=str(tmp_path)))


def test_a_token_without_a_probability_is_no_draft_vocabulary(tmp_path: Path, tools: SimpleNamespace) -> None:
    """A damaged output layer gives a token -inf in every row, as a trimmed one does where nothing is damaged."""
    model = tools.build("phi")
    model.lm_head.bias.data[7] = -torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match="in float32 answers with NaN or infinity"):
        load.load_engine(ModelSettings(model=str(tmp_path)))


def test_only_tokens_that_a_draft_leaves_out_may_have_no_logits() -> None:
    drafted, tolerance = torch.tensor([0, 1, 3]), TOLERANCES[torch.float32]
    wanted = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    wanted[:, [2, 4]] = -torch.inf
    assert disagreement(wanted.clone(), wanted, tolerance, drafted) is None
    assert "4 of 4 rows differ" in str(disagreement(wanted.clone(), wanted, tolerance))
    other = wanted.clone()
    other[1, 4] = 0.0
    assert disagreement(other, wanted, tolerance, drafted) == "tokens that are left out have logits"


# --- The self-check must see a model that loads and is wrong. ---


def _ignore_positions(model: LlamaForCausalLM) -> None:
    rotary, original = model.model.rotary_emb, model.model.rotary_emb.forward
    rotary.forward = lambda x, position_ids: original(x, torch.arange(x.shape[1])[None])


def _carry_state_between_rows(model: LlamaForCausalLM) -> None:
    layer = model.model.layers[0].mlp
    original = layer.forward
    layer.forward = lambda x: original(x + torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1))


@pytest.mark.parametrize("break_model", [_ignore_positions, _carry_state_between_rows])
def test_the_self_check_refuses_a_model_that_would_be_wrong(
    break_model: Callable[[LlamaForCausalLM], None],
    load_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_model = checkpoint.load_model

    def load_broken(*args: Any) -> Any:
        model = load_model(*args)
        break_model(model)
        return model

    monkeypatch.setattr(checkpoint, "load_model", load_broken)
    with pytest.raises(ModelNotSupported, match="would give wrong answers here and is refused"):
        load_engine("llama", enforce_eager=True)


def test_the_self_check_refuses_a_wrong_window(
    load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PagedLayer", _one_short)
    with pytest.raises(ModelNotSupported, match="would give wrong answers"):
        load_engine("mistral", enforce_eager=True)


# --- What shows in long texts, in trees or in what the config names only. ---

WRONG = "would give wrong answers"


def _one_short(k_cache: Any, v_cache: Any, window: int | None, state: Any) -> PagedLayer:
    return PagedLayer(k_cache, v_cache, None if window is None else window - 1, state)


def _one_more(k_cache: Any, v_cache: Any, window: int | None, state: Any) -> PagedLayer:
    return PagedLayer(k_cache, v_cache, None if window is None else window + 1, state)


@pytest.mark.parametrize("fault", [_one_short, _one_more])
def test_a_window_beyond_the_chunks_is_checked(
    fault: Callable[..., PagedLayer], load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_engine("mistral_long", enforce_eager=True).runner.name == "native attention"
    monkeypatch.setattr(engine_module, "PagedLayer", fault)
    with pytest.raises(ModelNotSupported, match=f"{WRONG}.* after a long text"):
        load_engine("mistral_long", enforce_eager=True)


def _chains_alone(plan: BatchPlan) -> BatchPlan:
    return replace(plan, ancestors=None)


def _first_part_alone(plan: BatchPlan) -> BatchPlan:
    """As if the parts of a long text were not joined."""
    return replace(plan, kv_lens=plan.kv_lens - (plan.kv_lens > 300).int())


@pytest.mark.parametrize(
    ("fault", "text"), [(_chains_alone, "a tree after a long text"), (_first_part_alone, "a(?:fter a)? long text")]
)
def test_kernels_are_checked_with_trees_and_with_long_texts(
    fault: Callable[[BatchPlan], BatchPlan],
    text: str,
    load_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def paged_attention(
        query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BatchPlan, *rest: Any, **more: Any
    ) -> torch.Tensor:
        return native.paged_attention(query, k, v, fault(plan), *rest, **more)

    kernels = SimpleNamespace(paged_attention=paged_attention, write_kv=native.write_kv, KNOWS_SINKS=native.KNOWS_SINKS)
    monkeypatch.setattr(acceleration, "native_attention", lambda: kernels)
    assert load_engine("llama_long", enforce_eager=True).runner.name == "torch attention"
    assert re.search(f"native attention is not used: .*({text})", caplog.text)


def test_the_path_of_a_tree_is_checked_where_it_stays(
    load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (torch_runner, native):
        monkeypatch.setattr(module, "move_entries", lambda *_: None)
    with pytest.raises(ModelNotSupported, match=WRONG):
        load_engine("llama", enforce_eager=True)


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_kernels_with_layouts_of_their_own_pass(block_size: int, load_engine: Callable[..., Engine]) -> None:
    assert load_engine("llama_long", block_size=block_size).runner.name == "native decoder"
    assert load_engine("llama_long", block_size=block_size, dtype="bfloat16").runner.name == "native decoder"


class PoolingLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """From ``pool_window`` tokens on, an MLP looks at the row before."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layer, window = self.model.layers[0].mlp, config.pool_window
        original = layer.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
            out: torch.Tensor = original(x + before * (self.positions >= window)[..., None])
            return out

        layer.forward = forward

    def forward(self, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        length = kwargs["input_ids"].shape[1]
        self.positions = torch.arange(length)[None] if position_ids is None else position_ids
        return super().forward(*args, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize(
    ("window", "text"),
    [
        (20, WRONG),  # within the chunks
        (90, f"{WRONG}.* after a long text"),
        (125, r"beyond 125 tokens \(pool_window in its config\).*set max_model_len to 125 or less"),  # out of reach
    ],
)
def test_lengths_that_the_config_names_are_reached_or_refused(
    window: int, text: str, load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model = checkpoint.load_model

    def load_pooling(*args: Any) -> Any:
        model = load_model(*args)
        model.config.pool_window = window
        pooling: Any = PoolingLlama(model.config)
        pooling.load_state_dict(model.state_dict())
        return pooling.eval().requires_grad_(False)

    monkeypatch.setattr(checkpoint, "load_model", load_pooling)
    with pytest.raises(ModelNotSupported, match=text):
        load_engine("llama", enforce_eager=True)


@pytest.mark.parametrize("fault", ["wrong", "raises", "CompilationError", "OutOfResources", "PTXASError"])
def test_a_kernel_that_fails_the_self_check_is_not_used(
    fault: str, load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def paged_attention(query: torch.Tensor, k_cache: Any, v_cache: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no such instruction")
        if fault != "wrong":
            raise _triton_error(fault)
        return query.new_ones(*query.shape[:2], v_cache.shape[-1])

    kernels = SimpleNamespace(paged_attention=paged_attention, write_kv=lambda *_: None)
    monkeypatch.setattr(acceleration, "native_attention", lambda: kernels)
    engine = load_engine("llama", enforce_eager=True)
    assert engine.runner.name == "torch attention"
    assert caplog.text.count("is not used: ") == 1, "said once"
    assert f"native attention is not used: {FAULTS[fault]}" in caplog.text


FAULTS = {
    "wrong": "a tree after a long text: a row of attention is off by",
    "raises": "RuntimeError: no such instruction",
    "CompilationError": "CompilationError: ",
    "OutOfResources": "OutOfResources: out of resource: shared memory",
    "PTXASError": "PTXASError: PTXAS error: no such instruction",
}


def _triton_error(name: str) -> Exception:
    from triton.compiler import errors as compiler
    from triton.runtime import errors as runtime

    if name == "CompilationError":
        return compiler.CompilationError(None, None, "no such instruction")
    if name == "OutOfResources":
        return runtime.OutOfResources(300_000, 232_448, "shared memory")
    return runtime.PTXASError("no such instruction")


@pytest.mark.parametrize(
    ("dtype", "off", "agrees"),
    [
        *((torch.bfloat16, 0.4, True), (torch.bfloat16, 0.6, False)),
        *((torch.float16, 0.1, True), (torch.float16, 0.15, False)),
        *((torch.float32, 9e-4, True), (torch.float32, 2e-3, False)),
    ],
)
def test_a_single_row_has_a_bound(dtype: torch.dtype, off: float, agrees: bool) -> None:
    """Of 64 rows one is off by so much of the logits' spread."""
    wanted = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    logits = wanted.clone()
    logits[17] += off
    found = disagreement(logits, wanted, TOLERANCES[dtype])
    assert (found is None) is agrees
    assert agrees or f"1 of 64 rows differ from the stock model by more than {TOLERANCES[dtype].worst:g}" in str(found)


def test_a_row_that_went_to_another_expert_may_be_farther_off() -> None:
    assert [has_experts(build(name)) for name in ("mixtral", "deepseek", "llama", "gemma2")] == [
        True,
        True,
        False,
        False,
    ]
