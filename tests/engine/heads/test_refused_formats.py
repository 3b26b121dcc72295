"""Files that hold no head that can be read, or more than one: refused by name."""

import json

import pytest
import torch

from engine.heads.files.checkpoint import read_head
from specdec.errors import InvalidRequest, ModelNotSupported
from tests.engine.heads import checkpoints as files


@pytest.mark.parametrize(
    ("config", "tensors", "named"),
    [
        (files.eagle_config(num_hidden_layers=2), files.eagle_tensors(), "num_hidden_layers"),
        (files.eagle_config(bias=True), files.eagle_tensors(bias=False), "bias"),
        (files.eagle_config(bias=False), files.eagle_tensors(), "bias"),
        (files.eagle_config(add_para_norm=True), files.eagle_tensors(), "add_para_norm"),
        (files.eagle_config(hidden_size=64), files.eagle_tensors(), "hidden_size"),
        (files.eagle_config(hidden_act="gelu"), files.eagle_tensors(), "hidden_act"),
        (files.eagle_config(model_type="gemma2"), files.eagle_tensors(), "model_type"),
        (files.eagle_config(model_type="qwen2", use_sliding_window=True), files.eagle_tensors(), "use_sliding_window"),
        (files.eagle_config(model_type="mistral", sliding_window=8), files.eagle_tensors(), "sliding_window"),
        (files.eagle_config(vocab_size=96), files.eagle_tensors(), "vocab_size"),
        (files.eagle_config(logit_scale=0.5), files.eagle_tensors(), "logit_scale"),
        (files.eagle_config(rope_scaling={"type": "dynamic", "factor": 2.0}), files.eagle_tensors(), "rope_scaling"),
        (files.eagle_config(layer_types=["sliding_attention"]), files.eagle_tensors(), "layer_types"),
        (files.eagle_config(), files.eagle_tensors() | {"norm.weight": torch.ones(32)}, "norm.weight"),
        (files.eagle_config(truncated_vocab_size=41), files.eagle_tensors(), "truncated_vocab_size"),
        (files.eagle_config(partial_rotary_factor=0.5), files.eagle_tensors(), "partial_rotary_factor"),
        (files.eagle3_config(num_hidden_layers=2), files.eagle3_tensors(), "layers.1.input_layernorm.weight"),
        (files.eagle3_config(), files.eagle3_tensors(num_layers=2), "layers.1.input_layernorm.weight"),
        (files.eagle3_config(num_aux_hidden_states=4), files.eagle3_tensors(), "eagle_config"),
        (files.eagle3_config(norm_before_fc=True), files.eagle3_tensors(), "input_norm.weight"),
        (files.eagle3_config(), files.eagle3_tensors(input_norm=True), "input_norm.weight"),
        (files.eagle3_config(fc_norm=True), files.eagle3_tensors(), "fc_norm.0.weight"),
        (files.eagle3_config(draft_vocab_size=40), files.eagle3_tensors(), "draft_vocab_size"),
        (files.eagle3_config(), files.eagle3_tensors(maps=()), "draft_vocab_size"),
        (files.eagle3_config(target_hidden_size=64), files.eagle3_tensors(), "target_hidden_size"),
        (files.eagle3_config(eagle_config={"parallel": 2}), files.eagle3_tensors(), "parallel = 2"),
        (files.eagle3_config(eagle_config={"use_last_layernorm": False}), files.eagle3_tensors(), "use_last_layernorm"),
        (files.eagle3_config(eagle_config={"use_mtp_layernorm": True}), files.eagle3_tensors(), "use_mtp_layernorm"),
        (files.eagle3_config(eagle_config={"parallel_draft_step": 2}), files.eagle3_tensors(), "parallel_draft_step"),
        (
            files.eagle3_config(eagle_aux_hidden_state_layer_ids=[2, 3, 8]),
            files.eagle3_tensors(),
            "eagle_aux_hidden_state_layer_ids",
        ),
        (files.eagle3_config(parallel_drafting=True), files.eagle3_tensors(), "P-EAGLE"),
        (files.medusa_config(original_lm_head=True), files.medusa_tensors(), "original_lm_head"),
        (files.medusa_config(truncated_vocab_size=41), files.medusa_tensors(), "truncated_vocab_size"),
        (files.medusa_config(hidden_size=64), files.medusa_tensors(), "hidden_size"),
        (files.mlp_config(emb_dim=64), files.mlp_tensors(), "emb_dim"),
        (files.mlp_config(vocab_size=96), files.mlp_tensors(), "vocab_size"),
        (files.mlp_config(n_predict=5), files.mlp_tensors(), "emb.4.weight"),
        (files.mlp_config(gating=True), files.mlp_tensors(), "gating"),
        (files.mlp_config(inner_dim=16), files.mlp_tensors(), "emb.0.weight"),
    ],
)
def test_unknown_variants_are_refused_by_name(tmp_path, target, config, tensors, named):
    files.write_head_files(tmp_path, config, tensors)
    method = "eagle" if named == "num_hidden_layers" else None  # else it passes for a language model of two layers
    with pytest.raises(ModelNotSupported, match=named):
        read_head(tmp_path, target.folder, method=method)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "head",
    [
        (files.eagle_config(), files.eagle_tensors()),
        (files.eagle3_config(), files.eagle3_tensors()),
        (files.medusa_config(), files.medusa_tensors()),
        (files.mlp_config(), files.mlp_tensors()),
    ],
    ids=["eagle", "eagle3", "medusa", "mlp"],
)
def test_quantised_tensors_are_refused_by_name(tmp_path, target, head, file, dtype):
    config, tensors = head
    name = max(name for name, tensor in tensors.items() if tensor.dim() == 2 and tensor.is_floating_point())
    files.write_head_files(tmp_path, config, tensors | {name: tensors[name].to(dtype)}, file)
    with pytest.raises(ModelNotSupported, match=f"{name.removeprefix('speculator.')} in .*(?:without|quantised)"):
        read_head(tmp_path, target.folder)


def test_modelopt_heads_are_refused_by_name(tmp_path, target):
    files.write_head_files(tmp_path, files.eagle3_config(), files.eagle3_tensors())
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ModelNotSupported, match="a ModelOpt quantisation"):
        read_head(tmp_path, target.folder)


class Payload:
    """Unpickling it would run something."""

    def __reduce__(self):
        return (print, ("run",))


def test_a_pickle_that_holds_more_than_tensors_is_refused(tmp_path, target, capsys):
    (tmp_path / "config.json").write_text(json.dumps(files.medusa_config()))
    torch.save({"0.0.linear.weight": torch.zeros(2, 2), "extra": Payload()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InvalidRequest, match="more than tensors"):
        read_head(tmp_path, target.folder)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("beside", ["training_args.bin", "optimizer.pt"])
def test_what_a_training_has_left_behind_is_not_looked_at(tmp_path, target, beside):
    files.write_head_files(tmp_path, files.eagle_config(), files.eagle_tensors(), "pytorch_model.bin")
    torch.save({"extra": Payload()}, tmp_path / beside)
    assert read_head(tmp_path, target.folder).method == "eagle"


def test_folders_without_a_head(tmp_path, target):
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_head(tmp_path, target.folder, method="eagle")
    with pytest.raises(InvalidRequest, match="no draft head"):
        read_head(target.folder, target.folder)
    (tmp_path / "config.json").write_text(json.dumps(files.eagle_config()))
    with pytest.raises(InvalidRequest, match="no weights"):
        read_head(tmp_path, target.folder, method="eagle")


def test_a_target_without_safetensors(tmp_path):
    target = files.build_target()
    folder = tmp_path / "target"
    folder.mkdir()
    target.config.save_pretrained(folder)
    torch.save(target.state_dict(), folder / "pytorch_model.bin")
    files.write_head_files(tmp_path / "head", files.eagle_config(), files.eagle_tensors())
    with pytest.raises(InvalidRequest, match="safetensors"):
        read_head(tmp_path / "head", folder)
