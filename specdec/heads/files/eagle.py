"""Files of EAGLE heads: those of the original repository (``yuhuili/EAGLE…``) and those of the speculators library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.eagle3 import Eagle3Config, Eagle3Head, default_layers
from specdec.heads.files.fields import Fields
from specdec.heads.files.head_format import HeadFormat
from specdec.heads.files.tensors import TargetTensors, load
from specdec.heads.layer import DEFAULT_ROPE_THETA, ROPE_TYPES, LayerConfig, RopeConfig

#: Tensors that files bring along and no head uses: tables that follow from the config, and layers of the target that
#: training needed.
_UNUSED: Final = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
#: What EAGLE-3 is, in the words of ModelOpt's ``eagle_config``; other values describe other heads.
_EAGLE_CONFIG: Final[Mapping[str, Any]] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
#: speculators' names of EAGLE-1's tensors.
_SPECULATORS_EAGLE: Final[Mapping[str, str]] = {"fusion_fc.": "fc.", "transformer.": "layers.0."}


def read_eagle(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetTensors) -> EagleHead:
    """An EAGLE-1 or EAGLE-2 head.

    Raises:
        ModelNotSupported: a variant that is not known; the text names the field or tensor.
    """
    fields, layer_fields = _fields(folder, config)
    tensors = _renamed(tensors, _SPECULATORS_EAGLE if "transformer_layer_config" in config else {})
    layer = _read_layer(layer_fields)
    fields.require("layernorms", (False,))  # read as norms of the input by one engine, of the output by another
    fields.require("add_para_norm", (False,))
    fields.require("transformer_layer_architecture", ("LlamaDecoderLayer",))
    bias, vocab_size = _agreed_bias(fields, tensors), _vocab_size(layer_fields, target)
    fields.finish()
    layer_fields.finish()
    if layer.hidden_size != target.hidden_size:
        raise layer_fields.refusal("hidden_size", f"an EAGLE head needs that of its target, {target.hidden_size}")
    tensors.pop("lm_head.weight", None)  # a copy of the target's
    owns_embeddings = "embed_tokens.weight" in tensors
    eagle = EagleConfig(layer=layer, vocab_size=vocab_size, bias=bias, owns_embeddings=owns_embeddings)
    embeddings, lm_head = None if owns_embeddings else target.embeddings(), target.lm_head()
    return load(
        lambda: EagleHead(eagle, embeddings=embeddings, lm_head=lm_head),
        tensors,
        folder,
        shared=("lm_head.weight", *(() if owns_embeddings else ("embed_tokens.weight",))),
    )


def read_eagle3(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetTensors
) -> Eagle3Head:
    """An EAGLE-3 head; raises like :func:`read_eagle`."""
    fields, layer_fields = _fields(folder, config)
    is_speculators = fields is not layer_fields
    tensors = _renamed(tensors, {"layers.0.": "midlayer."})
    layer = _read_layer(layer_fields)
    layers = _read_layer_ids(fields, target)
    fields.require("norm_output", (False,))  # two training libraries mean different things by it
    inner = fields.take("eagle_config", {})
    norm_before_fc = bool(fields.take("norm_before_fc", inner.get("norm_before_fc", False)))
    norm_before_residual = bool(fields.take("norm_before_residual", is_speculators))
    fc_norm = bool(fields.take("fc_norm", False))
    target_size = fields.number("target_hidden_size", layer_fields.take("target_hidden_size", target.hidden_size))
    vocab_size = _vocab_size(layer_fields, target)
    draft_vocab_size = fields.number("draft_vocab_size", vocab_size)
    fields.take("vocab_size")
    fields.take("target_vocab_size")
    fields.finish()
    layer_fields.finish()
    if target_size != target.hidden_size:
        raise fields.refusal("target_hidden_size", f"the target's hidden_size is {target.hidden_size}")
    owns_embeddings, owns_lm_head = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    if not owns_embeddings and layer.hidden_size != target.hidden_size:
        raise layer_fields.refusal(
            "hidden_size", f"without embed_tokens.weight it must be the target's, {target.hidden_size}"
        )
    if not owns_lm_head and (draft_vocab_size, layer.hidden_size) != (target.vocab_size, target.hidden_size):
        raise fields.refusal("draft_vocab_size", "the file has no lm_head.weight, and the target's does not fit")
    eagle3 = Eagle3Config(
        layer=layer,
        target_hidden_size=target_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_state_layers=layers,
        norm_before_residual=norm_before_residual,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        owns_embeddings=owns_embeddings,
        owns_lm_head=owns_lm_head,
    )
    vocabulary = _read_vocabulary(fields, tensors, eagle3)
    embeddings = None if owns_embeddings else target.embeddings()
    lm_head = None if owns_lm_head else target.lm_head()
    shared = [*(() if owns_embeddings else ("embed_tokens.weight",)), *(() if owns_lm_head else ("lm_head.weight",))]
    head = load(
        lambda: Eagle3Head(eagle3, embeddings=embeddings, lm_head=lm_head),
        tensors,
        folder,
        shared=("d2t", "t2d", *shared),
    )
    head.d2t, head.t2d = torch.zeros(draft_vocab_size, dtype=torch.int64), torch.zeros(vocab_size, dtype=torch.bool)
    head.set_vocabulary(vocabulary)
    return head


def eagle_config_of(head: EagleHead) -> dict[str, Any]:
    """The ``config.json`` of a head, as the original repository writes it."""
    config = head.config
    return {
        "architectures": ["EagleLlamaForCausalLM"],
        **_layer_fields(config.layer),
        "vocab_size": config.vocab_size,
        "bias": config.bias,
    }


def eagle3_config_of(head: Eagle3Head) -> dict[str, Any]:
    """The ``config.json`` of a head, as the original repository writes it, with the states it was trained on."""
    config = head.config
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_fields(config.layer),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.hidden_state_layers),
        **{flag: True for flag in flags if getattr(config, flag)},
    }


def _fields(folder: Path, config: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """The head's fields, and those of its layer, which the speculators library keeps apart."""
    origin = str(folder / "config.json")
    fields = Fields(config, origin)
    if "transformer_layer_config" not in config:
        return fields, fields
    return fields, Fields(fields.take("transformer_layer_config"), f"{origin}, transformer_layer_config")


def _read_layer(fields: Fields) -> LayerConfig:
    kind = fields.require("model_type", ("llama", "qwen2", "mistral"))  # one layer, but for what they take for granted
    if kind == "mistral" and fields.take("sliding_window"):
        raise fields.refusal("sliding_window", "only full attention can be run")
    fields.require("hidden_act", ("silu",))
    fields.require("num_hidden_layers", (1,))
    fields.require("use_sliding_window", (False,))
    if set(fields.take("layer_types", [])) - {"full_attention"}:
        raise fields.refusal("layer_types", "only full_attention can be run")
    hidden_size, num_heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    attention_bias = bool(fields.take("attention_bias", False))
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.number("intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.number("num_key_value_heads", num_heads),
        head_dim=fields.number("head_dim", hidden_size // num_heads),
        rms_norm_eps=float(fields.take("rms_norm_eps", 1e-6)),
        rope=_read_rope(fields),
        qkv_bias=bool(fields.take("qkv_bias", attention_bias or kind == "qwen2")),
        o_bias=attention_bias,
        mlp_bias=bool(fields.take("mlp_bias", False)),
    )


def _read_rope(fields: Fields) -> RopeConfig:
    """Older files have ``rope_theta`` and ``rope_scaling``, newer ones ``rope_parameters`` for both."""
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    options = dict(fields.take(name, {}))
    theta = options.pop("rope_theta", None)
    kind = str(options.pop("rope_type", options.pop("type", "default")))
    if kind not in ROPE_TYPES:
        raise fields.refusal(name, f"of its types {', '.join(ROPE_TYPES)} can be run")
    options.pop("type", None)
    if kind == "default" and any(options.values()):
        raise fields.refusal(name, f"{', '.join(sorted(options))} is not known here")
    for other in ("rope_parameters", "rope_scaling"):
        fields.take(other)
    return RopeConfig(
        theta=float(fields.take("rope_theta", DEFAULT_ROPE_THETA) if theta is None else theta),
        rope_type=kind,
        options=tuple(sorted(options.items())),
        max_position_embeddings=fields.number("max_position_embeddings", 2048),
    )


def _read_layer_ids(fields: Fields, target: TargetTensors) -> tuple[int, ...]:
    """The target's states that are fused, numbered as ``hidden_states``.

    At the top level the ids are just that. Inside ``eagle_config`` they name layers whose *outputs* are meant, which
    are the states numbered one higher.
    """
    given = fields.take("eagle_aux_hidden_state_layer_ids")
    inner = fields.take("eagle_config", {})
    if not isinstance(inner, dict):
        raise fields.refusal("eagle_config", "it must be an object")
    for name, value in inner.items():
        if name in ("eagle_aux_hidden_state_layer_ids", "norm_before_fc") or value is None:
            continue
        if value != _EAGLE_CONFIG.get(name, False):
            raise fields.refusal("eagle_config", f"with {name} = {value!r} it is no EAGLE-3 head as known here")
    outputs = inner.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(given) if given else tuple(i + 1 for i in outputs) if outputs else default_layers(target.num_layers)
    if not all(isinstance(i, int) and 0 <= i <= target.num_layers for i in layers):
        name = "eagle_aux_hidden_state_layer_ids" if given else "eagle_config"
        raise fields.refusal(name, f"the states {list(layers)} are not all in [0, {target.num_layers}]")
    return layers


def _read_vocabulary(fields: Fields, tensors: dict[str, Tensor], config: Eagle3Config) -> Tensor:
    """The target ids of the draft vocabulary, int64 [Vd]; takes ``d2t`` and ``t2d`` out of the tensors.

    ``d2t`` holds the *distance* from a draft id to its target id. One of the two maps is enough; without both, ids mean
    the same in both vocabularies, which then are of one size.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size = config.draft_vocab_size
    if d2t is not None:
        token_ids = torch.arange(len(d2t)) + d2t.long()
    elif t2d is not None:
        token_ids = t2d.bool().nonzero().flatten()
    elif size == config.vocab_size:
        return torch.arange(size)
    else:
        raise fields.refusal("draft_vocab_size", f"the target has {config.vocab_size} tokens and d2t is missing")
    is_distinct = len(set(token_ids.tolist())) == len(token_ids) == size
    if not is_distinct or not 0 <= int(token_ids.min()) <= int(token_ids.max()) < config.vocab_size:
        raise fields.refusal(
            "draft_vocab_size", f"d2t or t2d does not name as many different ids below {config.vocab_size}"
        )
    return token_ids


def _agreed_bias(fields: Fields, tensors: Mapping[str, Tensor]) -> bool:
    """Whether ``fc`` has a bias: ``bias`` of the original files, ``fusion_bias`` of speculators' must agree."""
    name = "fusion_bias" if "fusion_bias" in fields else "bias"
    other = "bias" if name == "fusion_bias" else "fusion_bias"
    has_bias = "fc.bias" in tensors
    if bool(fields.take(name, has_bias)) != has_bias:
        raise fields.refusal(name, f"the file {'has' if has_bias else 'lacks'} a bias of fc")
    fields.take(other)
    return has_bias


def _vocab_size(fields: Fields, target: TargetTensors) -> int:
    """The target's vocabulary, which must be the head's: padding may differ by what nobody can draft."""
    size = fields.number("vocab_size", target.vocab_size)
    if size != target.vocab_size:
        raise fields.refusal("vocab_size", f"the target's is {target.vocab_size}")
    return size


def _renamed(tensors: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """Canonical names: without ``model.``, with other beginnings replaced, without what no head uses."""
    renamed = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix("model.")
        old = next((prefix for prefix in prefixes if bare.startswith(prefix)), "")
        if not bare.endswith(_UNUSED):
            renamed[prefixes.get(old, "") + bare.removeprefix(old)] = tensor
    return renamed


def _layer_fields(layer: LayerConfig) -> dict[str, Any]:
    rope = layer.rope
    scaling = {"rope_scaling": {"rope_type": rope.rope_type, **dict(rope.options)}} if rope.options else {}
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": rope.theta,
        **scaling,
        "max_position_embeddings": rope.max_position_embeddings,
        "attention_bias": layer.o_bias,
        **({"qkv_bias": layer.qkv_bias} if layer.qkv_bias != layer.o_bias else {}),
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": False,
    }


EAGLE: Final = HeadFormat(head=EagleHead, read=read_eagle, config_of=eagle_config_of)
EAGLE3: Final = HeadFormat(head=Eagle3Head, read=read_eagle3, config_of=eagle3_config_of)
