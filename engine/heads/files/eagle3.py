"""Files of EAGLE-3 heads: those of the original repository and those of the speculators library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from engine.heads.eagle3 import LAST_STATE, Eagle3Config, Eagle3Head, default_layers
from engine.heads.files.draft_vocabulary import set_vocabulary, take_vocabulary
from engine.heads.files.eagle_layer import fields_of, layer_fields_of, read_layer, read_vocab_size, renamed
from engine.heads.files.fields import Fields
from engine.heads.files.head_format import HeadFormat
from engine.heads.files.tensors import TargetTensors, load

#: What EAGLE-3 is, in the words of ModelOpt's ``eagle_config``; other values describe other heads.
_EAGLE_CONFIG: Final[Mapping[str, Any]] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
#: Flags that stand in ``eagle_config`` or beside it.
_FLAGS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
#: Other names of tensors: SGLang's older ones of the norms before ``fc``.
_ALIASES: Final[Mapping[str, str]] = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_LATER_NORM: Final = re.compile(r"(layers\.[1-9]\d*\.)hidden_norm\.weight")


def read_eagle3(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetTensors
) -> Eagle3Head:
    """An EAGLE-3 head.

    Raises:
        ModelNotSupported: a variant that is not known; the text names the field or tensor.
    """
    fields, layer_fields = fields_of(folder, config)
    is_speculators = fields is not layer_fields
    tensors = _with_canonical_layers(renamed(tensors, _ALIASES))
    layer = read_layer(layer_fields, tensors, "midlayer.")
    num_layers = layer_fields.number("num_hidden_layers", 1)
    inner = _read_eagle_config(fields)
    layers = _read_layer_ids(fields, inner, target)
    flags = {name: fields.take(name, inner.get(name)) for name in _FLAGS}
    if flags["norm_before_residual"] is None:
        flags["norm_before_residual"] = is_speculators
    flags["fc_norm"] = fields.take("use_aux_norm", flags["fc_norm"])  # SGLang's older name
    if layers == LAST_STATE:
        tensors.pop("fc.weight", None)  # vLLM does not read it either
    target_size = fields.number("target_hidden_size", layer_fields.take("target_hidden_size", target.hidden_size))
    vocab_size = read_vocab_size(layer_fields, target)
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
        num_layers=num_layers,
        **{name: bool(flag) for name, flag in flags.items()},
        owns_embeddings=owns_embeddings,
        owns_lm_head=owns_lm_head,
    )
    vocabulary = take_vocabulary(fields, tensors, draft_vocab_size, vocab_size)
    embeddings = None if owns_embeddings else target.embeddings()
    lm_head = None if owns_lm_head else target.lm_head()
    shared = [*(() if owns_embeddings else ("embed_tokens.weight",)), *(() if owns_lm_head else ("lm_head.weight",))]
    head = load(
        lambda: Eagle3Head(eagle3, embeddings=embeddings, lm_head=lm_head),
        tensors,
        folder,
        shared=("d2t", "t2d", *shared),
    )
    set_vocabulary(head, vocabulary)
    return head


def eagle3_config_of(head: Eagle3Head) -> dict[str, Any]:
    """The ``config.json`` of a head, as the original repository writes it, with the states it was trained on."""
    config = head.config
    if config.has_fc:
        states: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(config.hidden_state_layers)}
    else:
        states = {"eagle_config": {"use_aux_hidden_state": False}}
    return {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.layer.qk_norm else "LlamaForCausalLMEagle3"],
        **layer_fields_of(config.layer, config.num_layers),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **states,
        **{flag: True for flag in _FLAGS if getattr(config, flag)},
    }


def _with_canonical_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The norm before the attention of later layers is ``input_layernorm``; SGLang calls it ``hidden_norm``."""
    canonical = {}
    for name, tensor in tensors.items():
        found = _LATER_NORM.fullmatch(name)
        alias = f"{found[1]}input_layernorm.weight" if found else name
        canonical[name if alias in tensors else alias] = tensor
    return canonical


def _read_eagle_config(fields: Fields) -> dict[str, Any]:
    """ModelOpt's ``eagle_config``, of which everything is known but what is empty, false or 0."""
    inner = fields.take("eagle_config", {})
    if not isinstance(inner, dict):
        raise fields.refusal("eagle_config", "it must be an object")
    known = ("eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", *_FLAGS)
    for name, value in inner.items():
        if name not in known and value is not None and value != _EAGLE_CONFIG.get(name, False):
            raise fields.refusal("eagle_config", f"with {name} = {value!r} it is no EAGLE-3 head as known here")
    return inner


def _read_layer_ids(fields: Fields, inner: Mapping[str, Any], target: TargetTensors) -> tuple[int, ...]:
    """The target's states that are fused, ascending, numbered as ``hidden_states``.

    At the top level the ids are just that. Inside ``eagle_config`` they name layers whose *outputs* are meant, which
    are the states numbered one higher. Whatever their order in the file, the states are in that of the layers: they are
    collected while the target runs.
    """
    given = fields.take("eagle_aux_hidden_state_layer_ids")
    name = "eagle_aux_hidden_state_layer_ids" if given else "eagle_config"
    counts = [fields.take(field) for field in ("num_aux_hidden_states", "num_aux_layers")]
    if inner.get("use_aux_hidden_state") is False:
        return LAST_STATE
    ids = given or inner.get("eagle_aux_hidden_state_layer_ids") or ()
    if not isinstance(ids, list | tuple) or not all(isinstance(i, int) for i in ids):
        raise fields.refusal(name, "a list of layers is needed")
    layers = tuple(sorted(i if given else i + 1 for i in ids)) or default_layers(target.num_layers)
    if not 0 <= layers[0] <= layers[-1] <= target.num_layers:
        raise fields.refusal(name, f"the states {list(layers)} are not all in [0, {target.num_layers}]")
    if set(counts) - {None, len(layers)}:
        raise fields.refusal(name, f"the config says elsewhere that {counts} states are fused")
    return layers


FORMAT: Final = HeadFormat(read=read_eagle3, config_of=eagle3_config_of)
