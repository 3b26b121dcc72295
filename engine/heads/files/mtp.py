"""Prediction layers in the folder of their target, or in one of their own: of ``tandem export-mtp`` or speculators."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from engine.heads.files.decoded import weight_names
from engine.heads.files.head_format import HeadFormat
from engine.heads.files.tensors import TargetTensors, files_by_tensor, is_quantised
from engine.heads.mtp import MtpConfig, MtpHead, PredictionLayer
from engine.loading.refusals import check_indexers
from specdec.checkpoint_config import read_config
from specdec.errors import ModelNotSupported
from specdec.methods import MTP_FIELD

#: Files of a checkpoint that are not its weights.
_OTHER_FILES: Final = ("*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "generation_config.json")
#: Beginnings of the types of targets whose prediction layers read the state before the final norm, or other states.
_OTHER_STATES: Final = ("step3", "mimo_v2", "deepseek_v4", "inkling", "gigachat", "gemma4")
_ENORM, _HNORM, _PROJECTION, _NORM = "enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayout:
    """How a family names its prediction layers."""

    #: Who names them so, for people.
    family: str
    #: The projection of a layer, or of all; the group "place" is what its own tensors begin with.
    projection: re.Pattern[str]
    #: Below the place: what the decoder layers' tensors begin with, where all layers share what is around them.
    layers: str = ""
    #: Below the place: what the tensors of a model begin with that has several layers for one token.
    several: str = ""
    #: How that model of transformers names its final norm and its embedding.
    norm: str = "model.norm.weight"
    embedding: str = "model.embed_tokens.weight"
    #: Below the place: the tensors around the layer, by their names in :class:`MtpHead`.
    around: Mapping[str, str]
    #: Below the place: copies of the target's tensors.
    copies: tuple[str, ...] = ("embed_tokens.weight", "shared_head.head.weight")
    #: What :class:`MtpConfig` says of the family.
    traits: Mapping[str, Any] = field(default_factory=dict)


_NAMES_OF_MIMO: Final = {
    _ENORM: "token_layernorm.weight",
    _HNORM: "hidden_layernorm.weight",
    _PROJECTION: "input_proj.weight",
    _NORM: "final_layernorm.weight",
}
_LAYOUTS: Final = (
    MtpLayout(
        family="Qwen3-Next, Qwen3.5 and later",
        projection=re.compile(r"(?P<place>(?:.*\.)?mtp\.)fc\.weight"),
        layers="layers.{}.",
        around={
            _ENORM: "pre_fc_norm_embedding.weight",
            _HNORM: "pre_fc_norm_hidden.weight",
            _PROJECTION: "fc.weight",
            _NORM: "norm.weight",
        },
    ),
    MtpLayout(
        family="Nemotron 3",
        projection=re.compile(r"(?P<place>(?:.*\.)?mtp\.)layers\.0\.eh_proj\.weight"),
        several="layers.",
        around={
            _ENORM: "layers.0.enorm.weight",
            _HNORM: "layers.0.hnorm.weight",
            _PROJECTION: "layers.0.eh_proj.weight",
            _NORM: "layers.1.final_layernorm.weight",
        },
        norm="model.norm_f.weight",
        embedding="model.embeddings.weight",
    ),
    MtpLayout(
        family="DeepSeek V3, GLM-4.5",
        projection=re.compile(r"(?P<place>(?:.*\.)?layers\.\d+\.)eh_proj\.weight"),
        around={_ENORM: _ENORM, _HNORM: _HNORM, _PROJECTION: _PROJECTION, _NORM: "shared_head.norm.weight"},
    ),
    MtpLayout(
        family="MiMo",
        projection=re.compile(r"(?P<place>model\.mtp_layers\.\d+\.)input_proj\.weight"),
        around=_NAMES_OF_MIMO,
        traits={"hidden_first": True, "blanks_first": True},
    ),
    MtpLayout(
        family="speculators",
        projection=re.compile(r"(?P<place>mtp_layers\.\d+\.)input_proj\.weight"),
        around=_NAMES_OF_MIMO,
    ),
)


def read_mtp(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetTensors) -> MtpHead:
    """The prediction layers of a checkpoint.

    Raises:
        ModelNotSupported: it has none of a family that is known, fewer than its config says, or quantised ones; the
            text names the tensor.
    """
    check_indexers(config.get("model_type"))
    if str(config.get("model_type")).startswith(_OTHER_STATES):
        raise ModelNotSupported(
            f"{folder} is a {config['model_type']!r}, whose prediction layers read states or attend in a way that is"
            " not known here"
        )
    layout, places = _find(folder, tensors)
    text = {**config, **(config.get("text_config") or {})}
    num_layers = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or len(places)
    if num_layers > len(places):
        raise ModelNotSupported(f"{folder} has {len(places)} prediction layers, and its config names {num_layers}")
    if (name := next((name for name, tensor in tensors.items() if is_quantised(tensor)), None)) is not None:
        raise ModelNotSupported(f"{name} in {folder} is quantised ({tensors[name].dtype}) in a way that is not read")
    shared = target.embeddings(), target.lm_head()
    layers: list[PredictionLayer] = []
    for place, below in places[:num_layers]:
        layers.append(_layer(folder, config, tensors, layout, place, below, shared))
        if place == places[0][0]:
            first, last = layers[0], layers[-1]
            last.enorm, last.hnorm, last.eh_proj = first.enorm, first.hnorm, first.eh_proj
    return MtpHead(MtpConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, **layout.traits), layers)


def _layer(  # noqa: PLR0917
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    layout: MtpLayout,
    place: str,
    below: str,
    shared: tuple[Tensor, Tensor],
) -> PredictionLayer:
    """The layer whose own tensors begin with ``place``, and those of its decoder layer with ``below``; ``shared``: the
    target's embedding and output layer.
    """
    around = {name: tensors[place + own] for name, own in layout.around.items() if place + own in tensors}
    if missing := layout.around.keys() - around.keys():
        raise ModelNotSupported(f"{folder} lacks {place}{layout.around[min(missing)]} beside its prediction layer")
    other = {place + own for own in (*layout.around.values(), *layout.copies)}
    own_layer = {
        name.removeprefix(below): tensor
        for name, tensor in tensors.items()
        if name.startswith(below) and name not in other
    }
    dtype = around[_PROJECTION].dtype
    named = {
        f"model.layers.{name if layout.several else f'0.{name}'}": tensor for name, tensor in own_layer.items()
    } | {layout.norm: around.pop(_NORM), layout.embedding: shared[0], "lm_head.weight": shared[1]}
    body = _body(folder, _body_config(folder, config, own_layer), named, dtype)
    layer = PredictionLayer(shared[0].shape[1], body.to(dtype))
    for name, tensor in around.items():
        parameter = layer.get_parameter(name)
        if parameter.shape != tensor.shape:
            raise ModelNotSupported(f"{place}{layout.around[name]} has the shape {list(tensor.shape)}")
        parameter.data = tensor
    return layer


def read_mtp_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the prediction layers; no others are read.

    Raises:
        InvalidRequest: there are no safetensors.
        ModelNotSupported: none of a family that is known is there.
    """
    files = files_by_tensor(folder)
    return _read(files, (name for name in files if name.startswith(_own(folder, files))))


def export_mtp(target: str | Path, folder: str | Path) -> list[str]:
    """Write the prediction layers of a checkpoint to a folder, with what a draft needs beside them: embedding, output
    layer, configuration and tokenizer. Returns the names of the tensors; raises like :func:`read_mtp_tensors`.
    """
    target, folder = Path(target), Path(folder)
    files = files_by_tensor(target)
    places = _own(target, files)
    shared = TargetTensors(target).shared_names()
    tensors = _read(files, (name for name in files if name.startswith(places) or name in shared))
    folder.mkdir(parents=True, exist_ok=True)
    for path in {path for pattern in _OTHER_FILES for path in target.glob(pattern)}:
        shutil.copyfile(path, folder / path.name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**read_config(target), MTP_FIELD: True}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    return sorted(tensors)


def _read(files: Mapping[str, Path], names: Iterable[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in names:
        with safe_open(files[name], framework="pt", device="cpu") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def _find(folder: Path, names: Iterable[str]) -> tuple[MtpLayout, list[tuple[str, str]]]:
    """The layout, and of every prediction layer, in order, what its own tensors and those of its decoder layer begin
    with.
    """
    names = list(names)
    for layout in _LAYOUTS:
        matches = map(layout.projection.fullmatch, names)
        places = sorted((match["place"] for match in matches if match is not None), key=lambda each: (len(each), each))
        if not places:
            continue
        if not layout.layers:
            return layout, [(place, place + layout.several) for place in places]
        below = (places[0] + layout.layers.format(i) for i in count())
        found = takewhile(lambda each: any(name.startswith(each) for name in names), below)
        return layout, [(places[0], each) for each in found] or [(places[0], places[0] + layout.layers.format(0))]
    raise ModelNotSupported(
        f"{folder} has no prediction layers (method mtp) of a family that is known:"
        f" {'; '.join(layout.family for layout in _LAYOUTS)}"
    )


def _own(folder: Path, names: Iterable[str]) -> tuple[str, ...]:
    """What the names of the prediction layers' tensors begin with."""
    return tuple(place for place, _ in _find(folder, weight_names(names))[1])


def _body_config(folder: Path, given: Mapping[str, Any], layer: Mapping[str, Tensor]) -> PretrainedConfig:
    """The configuration of a model of the target's class with one layer, that of the tensors."""
    if given.get("model_type") == "mimo":  # Qwen2's layers
        config: PretrainedConfig = Qwen2Config(**{**given, "model_type": "qwen2"})
    elif (named := given.get("transformer_layer_config")) is not None:  # of speculators
        config = AutoConfig.for_model(**named)
    else:
        config = copy.deepcopy(AutoConfig.from_pretrained(folder).get_text_config(decoder=True))
    has_experts = any(".experts." in name for name in layer)
    kind = "sparse" if has_experts else "dense"
    fields = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": [kind],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0 if has_experts else 1,
        "quantization_config": None,
        **({} if has_experts else {"num_experts": 0}),
    }
    for name, value in fields.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if (blocks := getattr(config, "mtp_layers_block_type", None)) is not None:  # of Nemotron 3
        if len(blocks) != 2 or not {*blocks} <= {"full_attention", "moe", "mlp"}:
            raise ModelNotSupported(
                f"the prediction layer in {folder} is made of {', '.join(blocks)} (mtp_layers_block_type); one of"
                " attention and one of experts or an MLP are known"
            )
        config.layers_block_type = list(blocks)
    return config


def _body(folder: Path, config: PretrainedConfig, named: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """The model of one layer; transformers' conversions (of experts, for example) are applied to its tensors."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelNotSupported(f"{folder} is a {config.model_type!r}, which is no language model of transformers")
    if config.tie_word_embeddings:
        del named["lm_head.weight"]
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    options = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    body, found = kind.from_pretrained(None, config=config, state_dict=named, **options)
    for problem, names in (
        ("lacks", found["missing_keys"]),
        ("has unknown", found["unexpected_keys"]),
        ("has another shape of", [each[0] for each in found["mismatched_keys"]]),
    ):
        if names:
            raise ModelNotSupported(f"the prediction layer in {folder} {problem} {', '.join(sorted(names)[:4])}")
    return body


def mtp_config_of(head: MtpHead) -> dict[str, Any]:
    """As speculators' checkpoints have it."""
    layer = json.loads(head.bodies[0].config.to_json_string(use_diff=False))
    return {
        "speculators_model_type": "mtp",
        "architectures": ["MTPSpeculator"],
        "num_nextn_predict_layers": len(head.layers),
        "transformer_layer_config": layer,
        "vocab_size": head.config.vocab_size,
    }


def mtp_tensors_of(head: MtpHead) -> dict[str, Tensor]:
    """By speculators' names, without the target's."""
    found: dict[str, Tensor] = {}
    for i, (layer, body) in enumerate(zip(head.layers, head.bodies, strict=True)):
        place, decoder = f"mtp_layers.{i}.", body.get_decoder()  # type: ignore[no-untyped-call]
        around = {_NORM: decoder.norm.weight, **dict(layer.named_parameters())}
        found |= {place + name: around[own] for own, name in _NAMES_OF_MIMO.items()}
        found |= {place + name: value for name, value in decoder.layers[0].state_dict().items()}
    return found


FORMAT: Final = HeadFormat(
    read=read_mtp, read_tensors=read_mtp_tensors, config_of=mtp_config_of, tensors_of=mtp_tensors_of
)
