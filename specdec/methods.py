"""The methods of drafting: their names, what each one needs, and how its checkpoints are recognised.

Reads files, loads no weights. The classes that draft are in :mod:`draft_service.drafters.registry`.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specdec.checkpoint_config import read_config
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.refused_methods import refuse_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method of drafting."""

    name: str
    #: It loads a checkpoint.
    needs_model: bool = False
    #: It is a small head on the target's hidden states, and reads a few tensors of the target's checkpoint.
    is_head: bool = False
    #: It begins with a layer that makes the hidden states smaller, and that a target can run in its place.
    maps_states: bool = False
    #: It attends to the text, with a KV cache of its own.
    attends: bool = False
    #: It looks up what stood in some text before. Of two methods, the first is one of these.
    is_lookup: bool = False
    #: Tokens a round commits with a good draft that reads states, of up to three drafted ones; those that reach far
    #: less are warned of.
    usual_acceptance_length: float = 0.0
    #: How its checkpoints are recognised: ``speculators_model_type`` of the speculators library; a field of
    #: ``config.json``; a pattern in ``architectures`` or ``model_type``, lower case; a tensor, in files with the config
    #: of a Llama of one layer.
    speculators_type: str | None = None
    config_field: str | None = None
    architecture: str | None = None
    tensor: str | None = None
    #: Its name in ``tandem train``, and what is trained; None: it cannot be trained.
    training_name: str | None = None
    training_summary: str = ""


#: Share of the usual gain (:attr:`Method.usual_acceptance_length` without the target's token) from which on a head is
#: not looked into; times its gain that tell the cause.
GOOD_SHARE: Final = 0.75
BETTER: Final = 1.4
#: In the ``config.json`` of prediction layers that were taken out of their target.
MTP_FIELD: Final = "tandem_mtp"
#: Of a draft model that can read its target's states beside its tokens (PARD-2).
STATES_FILE: Final = "warp_model.bin"
#: Parts of the names of tensors that prediction layers alone have; :mod:`engine.heads.files.mtp` knows them in full.
_PREDICTION_TENSORS: Final = (b"mtp.fc.weight", b"eh_proj.weight", b"mtp_layers.")

_BUILT_IN: Final = (
    Method(
        name="draft_model",
        needs_model=True,
        attends=True,
        usual_acceptance_length=2.4,
        training_name="draft",
        training_summary="a small causal language model, distilled from the target",
    ),
    Method(
        name="eagle",
        needs_model=True,
        is_head=True,
        attends=True,
        usual_acceptance_length=2.2,
        speculators_type="eagle",
        architecture="eagle",
        tensor="fc.weight",
        training_name="eagle",
        training_summary="EAGLE-1 and -2: a head on the target's last hidden state",
    ),
    Method(
        name="eagle3",
        needs_model=True,
        is_head=True,
        maps_states=True,
        attends=True,
        usual_acceptance_length=2.4,
        speculators_type="eagle3",
        config_field="eagle_config",
        architecture="eagle3",
        tensor="hidden_norm.weight",
        training_name="eagle3",
        training_summary="a head on three of the target's hidden states, with a vocabulary of its own",
    ),
    Method(
        name="mtp",
        needs_model=True,
        is_head=True,
        attends=True,
        usual_acceptance_length=2.2,
        speculators_type="mtp",
        config_field=MTP_FIELD,
        training_name="mtp",
        training_summary="a prediction layer of the target's own kind, used again for every drafted token",
    ),
    Method(
        name="dflash",
        needs_model=True,
        is_head=True,
        maps_states=True,
        attends=True,
        usual_acceptance_length=2.2,
        speculators_type="dflash",
        config_field="dflash_config",
        architecture="dflashdraft|dflashspeculator|muse_?glimmer_?assistant",
        training_name="dflash",
        training_summary="layers that draft a block in one pass, on some of the target's hidden states",
    ),
    Method(
        name="dflash2",
        needs_model=True,
        is_head=True,
        maps_states=True,
        attends=True,
        usual_acceptance_length=2.4,
        speculators_type="dflash2",
        architecture="dflash2",
    ),
    Method(
        name="dspark",
        needs_model=True,
        is_head=True,
        maps_states=True,
        attends=True,
        usual_acceptance_length=2.4,
        speculators_type="dspark",
        config_field="markov_rank",
        architecture="dspark",
        training_name="dspark",
        training_summary="the same, with a bias from token to token and an estimate of each token's acceptance",
    ),
    Method(
        name="medusa",
        needs_model=True,
        is_head=True,
        usual_acceptance_length=1.9,
        config_field="medusa_num_heads",
        architecture="medusa",
        training_name="medusa",
        training_summary="one head per drafted position, all on the target's last hidden state",
    ),
    Method(
        name="mlp_speculator",
        needs_model=True,
        is_head=True,
        usual_acceptance_length=1.9,
        speculators_type="mlp",
        architecture="^mlp_?speculator",
        training_name="mlp",
        training_summary="an MLP speculator: a state that starts as the target's last hidden state and reads each "
        "drafted token",
    ),
    Method(name="ngram", is_lookup=True),
    Method(name="suffix", is_lookup=True),
    Method(name="none"),
)
#: All methods by name. The last one that recognises a checkpoint is used: EAGLE-3 is an EAGLE, too.
METHODS: Final[dict[str, Method]] = {method.name: method for method in _BUILT_IN}
HEAD_METHODS: Final = tuple(method.name for method in _BUILT_IN if method.is_head)
MODEL_METHODS: Final = tuple(method.name for method in _BUILT_IN if method.needs_model)
LOOKUP_METHODS: Final = tuple(method.name for method in _BUILT_IN if method.is_lookup)
#: Methods by their names in ``tandem train``.
TRAINABLE: Final = {method.training_name: method for method in _BUILT_IN if method.training_name}


def last_method(name: str) -> Method | None:
    """Of the methods of a drafter, as its server names them: one, or a lookup and another ("a+b")."""
    return METHODS.get(name.rsplit("+", maxsplit=1)[-1])


def method_of(folder: str) -> str:
    """The method that the checkpoint in ``folder`` is made for; "draft_model" for any other causal language model.

    A folder without a readable ``config.json`` counts as such a model: loading it reports what is wrong.

    Raises:
        ModelNotSupported: the config names a kind of drafter that is not known here.
    """
    try:
        config = read_config(folder)
    except InvalidRequest:
        return "draft_model"
    return method_of_config(config) or _method_of_tensors(Path(folder), config) or "draft_model"


def method_of_config(config: Mapping[str, Any]) -> str | None:
    """The method that a ``config.json`` names; None if it may be any causal language model's."""
    refuse_config(config)
    kind = config.get("speculators_model_type")
    if kind is not None:
        known = {method.speculators_type: name for name, method in METHODS.items() if method.speculators_type}
        if kind not in known:
            raise ModelNotSupported(
                f"speculators_model_type is {kind!r}; of the speculators format {', '.join(known)} are known"
            )
        return known[kind]
    parts = [part for part in (config, config.get("model")) if isinstance(part, Mapping)]  # vLLM nests the layer's
    named = [name for part in parts for name in (*(part.get("architectures") or ()), part.get("model_type", ""))]
    architectures = [str(name).lower() for name in named]
    for method in reversed(METHODS.values()):
        has_field = method.config_field is not None and method.config_field in config
        if has_field or (method.architecture and any(re.search(method.architecture, each) for each in architectures)):
            return method.name
    if any(name.endswith(("_mtp", "mtpmodel")) for name in architectures):
        raise ModelNotSupported(
            f"the config names {', '.join(map(str, named))}, prediction layers without their target: give the target's"
            ' folder to method "mtp", or what tandem export-mtp makes of it'
        )
    return None


def check_prediction_layers(folder: str) -> None:
    """Raise :class:`InvalidRequest` unless the checkpoint has prediction layers for method "mtp" to draft with."""
    names = _tensor_names(Path(folder))
    if not any(name in names for name in _PREDICTION_TENSORS):
        raise InvalidRequest(
            f'{folder} has no prediction layers, which method "mtp" drafts with: use "eagle3" with a head that was'
            ' trained for the target, or "suffix", which needs none',
            param="method",
        )


def _method_of_tensors(folder: Path, config: Mapping[str, Any]) -> str | None:
    """EAGLE's own files carry the config of a Llama of one layer; the names of their tensors tell."""
    if config.get("num_hidden_layers") != 1:
        return None
    names = _tensor_names(folder)
    known = reversed(METHODS.values())
    return next((method.name for method in known if method.tensor and method.tensor.encode() in names), None)


def _tensor_names(folder: Path) -> bytes:
    """Bytes that contain the names of the checkpoint's tensors: a safetensors header, or the pickle, never run."""
    names = b""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            names += file.read(int.from_bytes(file.read(8), "little"))
    for path in sorted(folder.glob("*.bin")):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names += b"".join(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    return names
