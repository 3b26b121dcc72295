"""Files of DFlash heads: those of z-lab and DeepSpec, those of the speculators library, and transformers' own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from engine.heads.dflash import DFlashConfig, DFlashHead, Reach, default_layers
from engine.heads.files.draft_vocabulary import set_vocabulary, take_vocabulary
from engine.heads.files.eagle_layer import fields_of, layer_fields_of, read_layer, read_vocab_size, renamed
from engine.heads.files.fields import Fields
from engine.heads.files.head_format import HeadFormat, all_tensors
from engine.heads.files.tensors import TargetTensors, load
from specdec.errors import ModelNotSupported

#: Other names of tensors: transformers'.
_ALIASES: Final[Mapping[str, str]] = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
#: Where the mask's id may stand: the first counts, as in vLLM.
_MASKS: Final = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
#: Fields of training.
_TRAINING: Final = ("num_anchors", "max_anchors", "loss_decay_gamma")
#: transformers' DFlash, whose layers are Qwen3's. Its windows have one position more.
_MUSE: Final = "muse_glimmer_assistant"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MASK_FILE: Final = "mask_embedding.pt"


def read_dflash(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetTensors
) -> DFlashHead:
    """A DFlash head.

    Raises:
        ModelNotSupported: a variant that is not known; the text names the field or tensor.
    """
    fields, options = read_fields(folder, config, tensors, target, predicts_next=False)
    fields.finish()
    return load_dflash(DFlashHead, DFlashConfig(**options), fields, tensors, target)


def read_fields(
    folder: Path,
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    target: TargetTensors,
    *,
    predicts_next: bool,
    sees_all: bool = False,
) -> tuple[Fields, dict[str, Any]]:
    """The options of a :class:`DFlashConfig`, and the fields, of which those are left that only some heads have.

    ``tensors`` get their canonical names. ``predicts_next`` and ``sees_all``: what holds where the file does not say
    which layout its blocks have, and whether layers with a window are causal.
    """
    flat = {name: value for name, value in config.items() if name != "dflash_config"}
    flat |= config.get("dflash_config") or {}
    is_muse = flat.get("model_type") == _MUSE
    if is_muse:
        flat["model_type"] = "qwen3"
    # Which layers have a window is read here; the layer's other fields are those of any head.
    nested = flat.get("transformer_layer_config")
    own = dict(flat if nested is None else nested)
    sizes = {name: own.pop(name, None) for name in ("layer_types", "sliding_window", "use_sliding_window")}
    if nested is None:
        flat = own
    else:
        flat["transformer_layer_config"] = own
    fields, layer_fields = fields_of(folder, flat)
    canonical = renamed(tensors, _ALIASES)
    tensors.clear()
    tensors |= canonical
    layer = read_layer(layer_fields, tensors, "layers.0.")
    num_layers = layer_fields.number("num_hidden_layers")
    reaches = _reaches(fields, sizes, num_layers, is_muse=is_muse, sees_all=sees_all)
    states = _states(fields, target, num_layers)
    target_size = fields.number("target_hidden_size", target.hidden_size)
    if target_size != target.hidden_size:
        raise fields.refusal("target_hidden_size", f"the target's hidden_size is {target.hidden_size}")
    vocab_size = read_vocab_size(layer_fields, target)
    draft_vocab_size = fields.number("draft_vocab_size", vocab_size)
    for name in ("vocab_size", "target_vocab_size", *_TRAINING):
        fields.take(name)
    fields.require("is_neox_style", (True,))
    fields.require("use_aux_hidden_state", (True,))
    fields.require("attention_value_scale", (1.0,))
    owns_mask = _add_mask(folder, tensors)
    mask = next((name for name in _MASKS if name in fields), _MASKS[0])
    mask_token_id = fields.take(mask)
    for name in _MASKS:
        fields.take(name)
    if not isinstance(mask_token_id, int) or not 0 <= mask_token_id < vocab_size:
        raise fields.refusal(mask, f"the mask of a block is one of the target's ids, 0 to {vocab_size - 1}")
    if layer_fields is not fields:
        layer_fields.finish()
    return fields, {
        "layer": layer,
        "reaches": reaches,
        "target_hidden_size": target_size,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_state_layers": states,
        "block_size": fields.number("block_size"),
        "mask_token_id": mask_token_id,
        "predicts_next": bool(fields.take("sample_from_anchor", predicts_next)),
        "state_norms": "aux_hidden_norms.0.weight" in tensors,
        "embedding_scale": float(fields.take("input_embedding_scale", 1.0)),
        "logit_scale": float(fields.take("output_multiplier", 1.0)),
        "softcap": float(fields.take("final_logit_softcapping", 0.0)),
        "owns_embeddings": "embed_tokens.weight" in tensors,
        "owns_lm_head": "lm_head.weight" in tensors,
        "owns_mask": owns_mask,
    }


def load_dflash(
    kind: type[DFlashHead],
    config: DFlashConfig,
    fields: Fields,
    tensors: dict[str, Tensor],
    target: TargetTensors,
) -> DFlashHead:
    """A head of this kind, with what it shares with the target.

    Raises:
        ModelNotSupported: the target's embeddings or output layer do not fit it, or a tensor is not known.
    """
    size = config.layer.hidden_size
    if not config.owns_embeddings and size != target.hidden_size:
        raise fields.refusal(
            "hidden_size", f"the file has no embed_tokens.weight, and the target's is {target.hidden_size}"
        )
    if not config.owns_lm_head and (config.draft_vocab_size, size) != (target.vocab_size, target.hidden_size):
        raise fields.refusal("draft_vocab_size", "the file has no lm_head.weight, and the target's does not fit")
    vocabulary = take_vocabulary(fields, tensors, config.draft_vocab_size, config.vocab_size)
    embeddings = None if config.owns_embeddings else target.embeddings()
    lm_head = None if config.owns_lm_head else target.lm_head()
    shared = [*(() if config.owns_embeddings else ("embed_tokens.weight",))]
    shared += [*(() if config.owns_lm_head else ("lm_head.weight",))]
    head = load(
        lambda: kind(config, embeddings=embeddings, lm_head=lm_head),
        tensors,
        Path(fields.origin).parent,
        shared=("d2t", "t2d", *shared),
    )
    set_vocabulary(head, vocabulary)
    return head


def dflash_config_of(head: DFlashHead) -> dict[str, Any]:
    """The ``config.json`` of a head, as z-lab writes it."""
    config = head.config
    given = {
        "input_embedding_scale": (config.embedding_scale, 1.0),
        "output_multiplier": (config.logit_scale, 1.0),
        "final_logit_softcapping": (config.softcap, 0.0),
    }
    return {
        "architectures": ["DFlashDraftModel"],
        **block_fields_of(config),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [i - 1 for i in config.hidden_state_layers],
            "sample_from_anchor": config.predicts_next,
            **{name: value for name, (value, neutral) in given.items() if value != neutral},
        },
    }


def block_fields_of(config: DFlashConfig) -> dict[str, Any]:
    """What the files of all these heads have in ``config.json``."""
    windows = {reach.window for reach in config.reaches} - {None}
    causal = {reach.is_causal for reach in config.reaches}
    return {
        **layer_fields_of(config.layer, len(config.reaches)),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "layer_types": [_FULL if reach.window is None else _SLIDING for reach in config.reaches],
        **({"sliding_window": windows.pop(), "use_sliding_window": True} if windows else {}),
        **({"is_causal": causal.pop()} if len(causal) == 1 else {}),
    }


def dflash_tensors_of(head: DFlashHead) -> dict[str, Tensor]:
    """The tensors to write; maps of a vocabulary only where it is not the target's."""
    is_whole = head.config.draft_vocab_size == head.config.vocab_size
    maps = ("d2t", "t2d") if is_whole else ()
    return {name: tensor for name, tensor in all_tensors(head).items() if name not in maps}


def _reaches(
    fields: Fields, sizes: Mapping[str, Any], num_layers: int, *, is_muse: bool, sees_all: bool
) -> tuple[Reach, ...]:
    """What the rows of a block see in each layer.

    Where no field says whether layers are causal, those with a window are.
    """
    kinds = sizes["layer_types"] or [_FULL] * num_layers
    if fields.take("use_swa"):
        kinds = [_SLIDING] * num_layers
    if len(kinds) != num_layers or set(kinds) - {_FULL, _SLIDING}:
        raise ModelNotSupported(
            f"{fields.origin}: layer_types is {kinds!r}; a kind for each of {num_layers} layers is needed, {_FULL} or"
            f" {_SLIDING}"
        )
    window = fields.take("swa_window_size", sizes["sliding_window"])
    if _SLIDING in kinds and (not isinstance(window, int) or window <= 0):
        raise ModelNotSupported(f"{fields.origin}: sliding_window is {window!r}; a whole number above 0 is needed")
    causal = fields.take("is_causal", False if is_muse else None)
    named = fields.take("causal")
    causal = named if causal is None else causal
    both_ways = bool(fields.take("sliding_window_non_causal", sees_all))
    reaches = tuple(
        Reach(
            is_causal=(kind == _SLIDING and not both_ways) if causal is None else bool(causal),
            window=None if kind == _FULL else window + is_muse,
        )
        for kind in kinds
    )
    block_size = fields.number("block_size")
    if any(reach.window and reach.window < block_size and not reach.is_causal for reach in reaches):
        raise ModelNotSupported(
            f"{fields.origin}: sliding_window is {window}, less than block_size, {block_size}; such a block can only"
            " be run if its layers are causal"
        )
    return reaches


def _states(fields: Fields, target: TargetTensors, num_layers: int) -> tuple[int, ...]:
    """The target's states that are fused, numbered as ``hidden_states``.

    ``target_layer_ids`` name layers whose outputs are meant, -1 the embeddings; ``aux_hidden_state_layer_ids`` number
    the states themselves.
    """
    outputs, states = fields.take("target_layer_ids"), fields.take("aux_hidden_state_layer_ids")
    count = fields.number("num_target_layers", target.num_layers)
    if count != target.num_layers:
        raise fields.refusal("num_target_layers", f"the target has {target.num_layers}")
    name = "target_layer_ids" if states is None else "aux_hidden_state_layer_ids"
    given = outputs if states is None else states
    if given is None:
        return default_layers(target.num_layers, num_layers)
    if not isinstance(given, list | tuple) or not all(isinstance(i, int) for i in given) or not given:
        raise fields.refusal(name, "a list of layers is needed")
    layers = tuple(i + 1 if states is None else i for i in given)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= target.num_layers:
        raise fields.refusal(name, f"the states {list(layers)} must ascend from 0 to {target.num_layers} at most")
    return layers


def _add_mask(folder: Path, tensors: dict[str, Tensor]) -> bool:
    """Add the mask's own embedding to the tensors, where the folder has one."""
    path = folder / _MASK_FILE
    if "mask_embedding" not in tensors and path.is_file():
        stored = torch.load(path, map_location="cpu", weights_only=True)
        tensors["mask_embedding"] = stored["embedding"].flatten()
    return "mask_embedding" in tensors


FORMAT: Final = HeadFormat(read=read_dflash, config_of=dflash_config_of, tensors_of=dflash_tensors_of)
