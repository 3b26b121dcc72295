"""Reading a Hugging Face checkpoint: configuration, weights, and the facts a service tells about them."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from engine.checkpoint_files import CheckpointFiles
from engine.gguf_file import GgufFile
from engine.loading import gpu_weights
from engine.loading.assembly import (
    EMBEDDING,
    GgufSource,
    PackedSource,
    RoundedSource,
    TensorSource,
    assemble,
    read_generation_config,
)
from engine.quantised_formats import MODEL_TYPES, QuantisedFormat
from engine.refused_checkpoints import check_checkpoint
from engine.weight_map import check_weight_maps
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.settings import ModelSettings

logger = logging.getLogger(__name__)

_TOKENIZER_FILES: Final = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
#: Buffers of rotary embeddings, causal masks and positions; prediction layers that stand apart.
_BUFFER: Final = re.compile(r"rotary_emb\.inv_freq$|(?:attn|attention)\.(?:masked_)?bias$|position_ids$|(?:^|\.)mtp\.")
#: What a model of text and images reads images with.
_TOWER: Final = re.compile(r"^(?:model\.)?(?:vision_model|vision_tower|visual|multi_modal_projector|audio_tower)\.")
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
#: Formats that are read here for a CPU alone.
_OF_CPUS: Final = ("bitsandbytes", "mxfp4")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What must agree between a target and its draft. Zero and empty where the checkpoint has no tokenizer."""

    size: int = 0
    #: sha256 of the id -> token table, hexadecimal.
    fingerprint: str = ""
    eos_token_id: int | None = None


def load_config(settings: ModelSettings) -> PreTrainedConfig:
    """The checkpoint's configuration.

    Raises:
        InvalidRequest: there is no readable checkpoint, or files of it are missing or damaged.
        ModelNotSupported: a format of :mod:`engine.refused_checkpoints`, or transformers does not know the
            architecture.
    """
    check_checkpoint(settings.model)
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    except OSError as error:
        raise InvalidRequest(f"no checkpoint can be read from {settings.model}: {error}", param="model") from error
    except (KeyError, ValueError) as error:
        raise ModelNotSupported(f"the configuration in {settings.model} cannot be used: {error}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def load_model(
    settings: ModelSettings, config: PreTrainedConfig, device: torch.device, split: object = None, bits: int = 0
) -> PreTrainedModel:
    """The model with its weights on ``device``, in evaluation mode, attending as transformers' reference does.

    ``split``: the DistributedConfig of a model of which this process reads a part. ``bits``: what weights will be
    rounded to. Known architectures are rounded here, layer by layer: the whole model is never in memory.

    Raises:
        InvalidRequest: the weights cannot be read.
        ModelNotSupported: not a decoder-only language model, weights are missing (transformers would fill them in at
            random), or the model does not use some, such as scales (it would answer as if they were 1).
    """
    check_weight_maps(Path(settings.model))
    stored = CheckpointFiles(settings.model).stored_format
    if stored is not None and (device.type == "cpu" or stored.method not in _OF_CPUS) and split is None:
        return _assembled(settings, config, device, stored)
    dtype = dtype_of(settings, config, device)
    if bits and split is None and isinstance(dtype, torch.dtype) and _can_round(settings, config, dtype):
        with ExitStack() as stack:
            source = RoundedSource(CheckpointFiles(settings.model), bits, dtype, stack)
            model, names = assemble(
                source, config, dtype, settings.model, rounds=settings.quantized_activations == "int8"
            )
        read_generation_config(model, Path(settings.model))
        _refuse_unused(settings, names, model)
        return model
    options: dict[str, Any] = {}
    if split is not None:
        options["distributed_config"] = split
    if getattr(config, "quantization_config", None) is not None:
        options["device_map"] = {"": device}  # quantised weights are placed while they are read
    try:
        loaded: Any = _loader(config).from_pretrained(
            settings.model,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
            weights_only=True,
            **options,
        )
    except OSError as error:
        raise InvalidRequest(f"the weights in {settings.model} cannot be read: {error}", param="model") from error
    except UnpicklingError as error:
        raise InvalidRequest(
            f"the weights in {settings.model} hold more than tensors, or are damaged; nothing in them was run",
            param="model",
        ) from error
    except (AssertionError, AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelNotSupported(
            f"{settings.model} cannot be loaded as a language model: {error or type(error).__name__}"
        ) from error
    model, report = loaded
    absent = sorted({str(key) for name in ("missing_keys", "mismatched_keys") for key in report.get(name) or ()})
    if absent:
        raise ModelNotSupported(
            f"{settings.model} lacks {len(absent)} of the model's weights ({_shown(absent)}): not a checkpoint of"
            f" {type(model).__name__}"
        )
    _refuse_unused(settings, report.get("unexpected_keys") or (), model)
    if not options:
        model = model.to(device)
    elif device.type == "cpu" and getattr(model, "quantization_method", None) == "bitsandbytes":
        model = model.dequantize(dtype=model.dtype)  # the products of bitsandbytes depend on the rows beside a row
    model = model.eval().requires_grad_(False)
    assert isinstance(model, PreTrainedModel)
    return model


def _can_round(settings: ModelSettings, config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    """Whether layers can be rounded as they are read: known names in safetensors, and code of transformers' own."""
    files = CheckpointFiles(settings.model)
    return (
        config.model_type in MODEL_TYPES
        and type(config) in AutoModelForCausalLM._model_mapping
        and not getattr(config, "auto_map", None)
        and dtype in (torch.float32, torch.bfloat16)
        and f"{EMBEDDING}.weight" in files.tensors
    )


def dtype_of(settings: ModelSettings, config: PreTrainedConfig, device: torch.device) -> torch.dtype | str:
    """The type that weights get. float16, for which there are no kernels on a CPU, becomes bfloat16 there unless it is
    asked for; what that does is logged.
    """
    if settings.dtype in _DTYPES:
        if settings.dtype == "float16" and device.type == "cpu":
            logger.warning("%s is to run in float16, which is slow on a CPU: --dtype bfloat16 is fast", settings.model)
        return _DTYPES[settings.dtype]
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    if stored == torch.float16 and device.type == "cpu":
        logger.info(
            "%s is stored in float16 and runs in bfloat16 on this CPU (--dtype float32: exactly)", settings.model
        )
        return torch.bfloat16
    return "auto" if stored is None else stored


def _assembled(
    settings: ModelSettings, config: PreTrainedConfig, device: torch.device, stored: QuantisedFormat
) -> PreTrainedModel:
    dtype = dtype_of(settings, config, device)
    if dtype not in (torch.float32, torch.bfloat16):
        dtype = torch.bfloat16
    folder = Path(settings.model)
    with ExitStack() as stack:
        source: TensorSource
        if stored.file is None:
            source = PackedSource(CheckpointFiles(folder), stored, stack)
        else:
            source = GgufSource(GgufFile(folder / stored.file), config)
        on_cpu, rounds = device.type == "cpu", settings.quantized_activations == "int8"
        model, names = assemble(source, config, dtype, settings.model, on_cpu=on_cpu, rounds=rounds)
    read_generation_config(model, folder)
    _refuse_unused(settings, names, model)
    if not on_cpu:
        gpu_weights.place(model, dtype, device, settings.model, rounds=rounds)
        moved: Any = model
        model = moved.to(device)
    return model


def _refuse_unused(settings: ModelSettings, names: Iterable[str], model: PreTrainedModel) -> None:
    if unused := unused_tensors(names, model):
        raise ModelNotSupported(
            f"{settings.model} holds {len(unused)} tensors that {type(model).__name__} does not use"
            f" ({_shown(unused)}): it is quantised or changed in a way that is not known here; take the original"
            " checkpoint, or one of another format"
        )


def _loader(config: PreTrainedConfig) -> Any:
    """What makes a model of the configuration. A model of text and images is run without images."""
    is_language_model = type(config) in AutoModelForCausalLM._model_mapping
    sees = not is_language_model and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def unused_tensors(names: Iterable[str], model: PreTrainedModel) -> list[str]:
    """Of the tensors that a model did not take, those that may change its answers; sorted.

    Harmless are buffers that older versions of the model saved, a tied output layer, and layers beyond the last one
    (prediction layers, which draft); and what reads images, where the model does not.
    """
    text = model.config.get_text_config(decoder=True)
    is_tied, num_layers = bool(getattr(text, "tie_word_embeddings", False)), text.num_hidden_layers

    def is_harmless(name: str) -> bool:
        layer = _LAYER.search(name)
        is_beyond = layer is not None and int(layer[1]) >= num_layers
        if _TOWER.search(name) and not hasattr(model.config, "vision_config"):
            return True
        return is_beyond or _BUFFER.search(name) is not None or (is_tied and name.endswith("lm_head.weight"))

    return sorted(name for name in names if not is_harmless(name))


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def read_tokenizer(settings: ModelSettings) -> TokenizerFacts:
    """Size and fingerprint of the checkpoint's tokenizer, read without keeping it."""
    folder = settings.tokenizer or settings.model
    try:
        # Without any of its files transformers would make up an empty tokenizer of the model's kind.
        if os.path.isdir(folder) and not any(glob.glob(os.path.join(folder, name)) for name in _TOKENIZER_FILES):
            raise OSError("no tokenizer files")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        if settings.tokenizer is not None:
            raise InvalidRequest(f"no tokenizer can be read from {folder}: {error}", param="tokenizer") from error
        logger.warning("%s has no tokenizer that can be read: target and draft cannot be compared by it", folder)
        return TokenizerFacts()
    return TokenizerFacts(len(tokenizer), fingerprint(tokenizer.get_vocab().items()), tokenizer.eos_token_id)


def fingerprint(vocabulary: Iterable[tuple[str, int]]) -> str:
    """sha256 over the lines ``id TAB token LF`` in order of the ids, hexadecimal."""
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary, key=lambda item: item[1]):
        digest.update(f"{token_id}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def eos_token_ids(model: PreTrainedModel, tokenizer: TokenizerFacts) -> tuple[int, ...]:
    """Every token that ends a sequence by the generation config, the config or the tokenizer; sorted."""
    found: set[int] = set()
    sources = (getattr(model, "generation_config", None), model.config, model.config.get_text_config(decoder=True))
    for ids in (*(getattr(source, "eos_token_id", None) for source in sources), tokenizer.eos_token_id):
        if isinstance(ids, int):
            found.add(ids)
        elif ids is not None:
            found.update(int(token_id) for token_id in ids)
    return tuple(sorted(found))
