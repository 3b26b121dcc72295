"""Which models are refused because they would run and be wrong; see ``docs/engine.md`` for the list and the reasons."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.layers import LayerShape
from engine.native import library
from engine.native.rounded import group_linears, quantise_linears
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.settings import ModelSettings

#: What configs call the longest sequence: most of them, MPT, BLOOM.
_LENGTHS: Final = ("max_position_embeddings", "max_seq_len", "seq_length")
#: Parts of the names of lengths that attention may depend on, as in transformers' configurations.
_LENGTH_NAME: Final = re.compile(
    r"window|chunk|block|sparse|stride|compress|top_?k|budget|local|segment|pool|bucket|landmark|span"
)
#: Fields of such a name that are read from the mask, or count experts, layers or channels.
_NO_LENGTHS: Final = frozenset(
    """
    attention_chunk_size block_multiple_of chunk_size decoder_sparse_step mamba_chunk_size max_window_layers moe_top_k
    moe_topk num_local_experts sliding_window sliding_window_pattern sliding_window_size top_k_experts topk_group
    """.split()  # noqa: SIM905
)


#: Of one type of model: tokens that its recurrence takes together.
_NO_LENGTHS_OF: Final = {"minimax": frozenset({"block_size"})}

#: Types of models in which a small network of each layer chooses what the layer attends to (DeepSeek V3.2, GLM-5).
_INDEXED: Final = ("deepseek_v32", "glm_moe_dsa")


def check_indexers(model_type: str | None) -> None:
    """Refuse layers that attend to chosen positions alone."""
    if model_type in _INDEXED:
        raise ModelNotSupported(
            f"{model_type!r} attends to the positions that an indexer in each layer chooses (index_topk), with a cache"
            " of keys of its own; such layers are not run here"
        )


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the configuration alone gives away, before any weight is read."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotSupported(
            f"{config.model_type!r} is an encoder-decoder model; only decoder-only language models are supported"
        )
    text = config.get_text_config(decoder=True)
    check_indexers(text.model_type)
    if getattr(text, "alibi", False):
        raise ModelNotSupported(
            f"{text.model_type!r} with ALiBi positions (alibi) attends in code of its own, outside transformers'"
            " attention interface; it would attend across sequences"
        )
    if getattr(text, "attn_temperature_tuning", False):
        raise ModelNotSupported(
            f"{text.model_type!r} scales its attention by a token's place in the batch, not in its sequence"
            " (attn_temperature_tuning), so rows of several sequences cannot share one batch"
        )


def check_quantization(settings: ModelSettings, config: object, device: torch.device) -> int:
    """To how many bits weights are to be rounded; 0: not. Where nothing here multiplies the result "auto" leaves them.

    Raises:
        InvalidRequest: weights must be rounded on a GPU, without kernels, or once more.
    """
    if settings.quantization is None or (settings.quantization == "auto" and settings.enforce_eager):
        return 0
    name, problem = f"quantization {settings.quantization!r}", None
    if device.type != "cpu":
        problem = f"{name} is for CPUs, not for {device}; leave it out"
    elif getattr(config, "quantization_config", None) is not None:
        problem = f"{settings.model} is quantised already; leave {name} out"
    elif library.load() is None:
        problem = f"{name} needs the CPU kernels, which cannot be loaded here (the log says why); leave it out"
    if problem is not None and settings.quantization != "auto":
        raise InvalidRequest(problem, param="quantization")
    if problem is not None:
        return 0
    return 4 if settings.quantization == "int4" else 8


def quantise(settings: ModelSettings, model: nn.Module, bits: int) -> None:
    """Round a model's weights to 8 or 4 bits.

    Raises:
        ModelNotSupported: the model has no linear layers of a known type and dtype, and "auto" would not do.
    """
    if not quantise_linears(model, bits) and settings.quantization != "auto":
        raise ModelNotSupported(
            f"{type(model).__name__} in {next(model.parameters()).dtype} has no linear layers that can be rounded to"
            f" {bits} bits: they must be plain ones of float32 or bfloat16"
        )
    if settings.quantized_activations == "float":
        group_linears(model, rounds=False)


def check_model(model: PreTrainedModel) -> None:
    """Refuse models that cannot be told where a row stands, or that never ask the attention registry."""
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters and not takes_any:
        raise ModelNotSupported(
            f"{name} takes no position_ids (ALiBi, recurrent or relative positions), so rows of several sequences"
            " cannot share one batch"
        )
    if not model._can_set_attn_implementation():
        raise ModelNotSupported(f"{name} has an attention of its own, outside transformers' attention interface")


def longest_named_length(model: PreTrainedModel) -> tuple[int, str]:
    """The largest number in the config at which a model may begin to attend differently, and its name; or 0.

    These are whole numbers with a name like a block's, chunk's or window's that the model's own code reads. Windows and
    chunks that act through the attention mask are left out: the recording pass reads them from the mask itself.
    """
    text = model.config.get_text_config(decoder=True)
    file = sys.modules[type(model).__module__].__file__
    code = Path(file).read_text(encoding="utf-8") if file else ""
    named = (
        (value, name)
        for name, value in text.to_dict().items()
        if isinstance(value, int) and not isinstance(value, bool)
        if name not in _NO_LENGTHS and name not in _NO_LENGTHS_OF.get(text.model_type, ())
        if _LENGTH_NAME.search(name) and re.search(rf"config\.{name}\b", code)
    )
    return max(named, default=(0, ""))


def resolve_max_model_len(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence: what is wanted, else what the checkpoint says.

    Raises:
        InvalidRequest: more is wanted than the model takes, or the checkpoint does not say and nothing is wanted.
        ModelNotSupported: positions within that length would be computed wrongly.
    """
    text = config.get_text_config(decoder=True)
    own = next((length for name in _LENGTHS if (length := getattr(text, name, None)) is not None), None)
    if own is None and wanted is None:
        raise InvalidRequest("the model's config names no longest sequence; set max_model_len", param="max_model_len")
    length = int(wanted or own or 0)
    for rope in _rope_parameters(text):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if "dynamic" in kind:
            limit = own
        elif kind == "longrope":
            limit = getattr(text, "original_max_position_embeddings", None)
            limit = limit or rope.get("original_max_position_embeddings") or own
        else:
            continue
        if limit is None or length > limit:
            raise ModelNotSupported(
                f"the model's rotary embedding ({kind}) changes with the longest sequence of a batch beyond"
                f" {limit} tokens, so one session would alter another's text: set max_model_len to {limit} or less"
                f" (it is {length})"
            )
    if own is not None and length > own:
        raise InvalidRequest(
            f"max_model_len is {length} but the model takes {own} tokens; lower it", param="max_model_len"
        )
    return length


def check_chunks(shapes: Sequence[LayerShape], max_model_len: int) -> None:
    """Refuse a model that attends within chunks shorter than its longest sequence."""
    chunk = min((shape.chunk for shape in shapes if shape.chunk is not None), default=None)
    if chunk is not None and max_model_len > chunk:
        raise ModelNotSupported(
            f"the model attends within chunks of {chunk} tokens, which paged attention does not do: set max_model_len"
            f" to {chunk} or less, got {max_model_len}"
        )


def _rope_parameters(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """The rotary parameter sets of a config: one, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return []
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]
