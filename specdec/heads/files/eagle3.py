"""Files of EAGLE-3 heads: those of the original repository and those of the speculators library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from specdec.heads.eagle3 import Eagle3Config, Eagle3Head, default_layers
from specdec.heads.files.eagle_layer import fields_of, layer_fields_of, read_layer, read_vocab_size, renamed
from specdec.heads.files.fields import Fields
from specdec.heads.files.head_format import HeadFormat
from specdec.heads.files.tensors import TargetTensors, load

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


def read_eagle3(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetTensors
) -> Eagle3Head:
    """An EAGLE-3 head.

    Raises:
        ModelNotSupported: a variant that is not known; the text names the field or tensor.
    """
    fields, layer_fields = fields_of(folder, config)
    is_speculators = fields is not layer_fields
    tensors = renamed(tensors, {"layers.0.": "midlayer."})
    layer = read_layer(layer_fields)
    layers = _read_layer_ids(fields, target)
    fields.require("norm_output", (False,))  # two training libraries mean different things by it
    inner = fields.take("eagle_config", {})
    norm_before_fc = bool(fields.take("norm_before_fc", inner.get("norm_before_fc", False)))
    norm_before_residual = bool(fields.take("norm_before_residual", is_speculators))
    fc_norm = bool(fields.take("fc_norm", False))
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


def eagle3_config_of(head: Eagle3Head) -> dict[str, Any]:
    """The ``config.json`` of a head, as the original repository writes it, with the states it was trained on."""
    config = head.config
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_fields_of(config.layer),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.hidden_state_layers),
        **{flag: True for flag in flags if getattr(config, flag)},
    }


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


FORMAT: Final = HeadFormat(head=Eagle3Head, read=read_eagle3, config_of=eagle3_config_of)
