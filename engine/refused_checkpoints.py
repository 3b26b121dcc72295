"""Checkpoints that are refused by name, in one sentence, before torch is imported and weights are read.

Each format that cannot be run correctly is one row of :data:`REFUSALS`: a format that is added loses its row. What the
files alone cannot show is refused later, by :mod:`engine.loading`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from engine.checkpoint_files import CheckpointFiles
from engine.quantised_formats import METHODS, MODEL_TYPES
from specdec.checkpoint_config import read_text_config
from specdec.errors import InvalidRequest, ModelNotSupported

#: Values of ``quant_method`` whose scales transformers applies; bitsandbytes needs its library.
QUANTIZATION_METHODS: Final = ("fp8", "mxfp4", "bitsandbytes")
#: Types of models of text and images that run without images.
TEXT_MODELS_OF_MULTIMODAL: Final = frozenset(
    """
    dots3_note fuyu gemma3 gemma3n gemma4 gemma4_unified lfm2_vl llama4 mistral3 phi4_multimodal qwen2_5_vl qwen3_5
    qwen3_5_moe qwen3_vl qwen4_exp
    """.split()  # noqa: SIM905
)

_UNQUANTISED: Final = (
    "take the checkpoint that is not quantised (--quantization int8 or int4 rounds it at load, on a CPU), or one in"
    f" {', '.join(QUANTIZATION_METHODS[:2])} or, of {', '.join(MODEL_TYPES)}, {', '.join(METHODS)}"
)
_ENCODERS: Final = frozenset(
    """
    albert bert camembert clip convbert deberta deberta-v2 distilbert electra ernie eurobert gte mobilebert modernbert
    mpnet new nomic_bert roberta siglip squeezebert xlm-roberta xlm-roberta-xl xmod
    """.split()  # noqa: SIM905
)
_OTHER_TASKS: Final = ("ForMaskedLM", "Classification", "ForQuestionAnswering", "ForMultipleChoice", "ForRewardModel")
_PERCEPTION: Final = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual")
#: Types of models whose layers have recurrent states, where the configuration lists no types of layers.
_RECURRENT: Final = frozenset("bamba falcon_h1 falcon_mamba jamba mamba mamba2 nemotron_h zamba2".split())  # noqa: SIM905
_RECURRENT_LAYERS: Final = frozenset({"conv", "hybrid", "linear_attention", "mamba"})
#: Names under which bitsandbytes keeps the scales of its weights, as the end of a tensor's name.
_BITSANDBYTES_SCALES: Final = (".absmax", ".quant_map", ".SCB", "bitsandbytes__nf4", "bitsandbytes__fp4")
#: Types of a header that hold numbers to compute with; all others are codes, which mean nothing without a scale.
_PLAIN_DTYPES: Final = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """One format that is refused."""

    #: What was found, as the object of "the folder holds …"; None: it is not this format.
    found: Callable[[CheckpointFiles], str | None]
    #: What to do.
    remedy: str
    #: It is looked for in the folder of a draft head, too.
    is_of_heads: bool = True
    #: It shows in the headers of the weights only.
    reads_headers: bool = False


def _gguf(files: CheckpointFiles) -> str | None:
    names = [] if files.has("config.json") else files.named("*.gguf")
    return f"GGUF weights ({names[0]}) without config.json" if names else None


def _adapter(files: CheckpointFiles) -> str | None:
    return "an adapter (adapter_config.json), which would not be applied" if files.has("adapter_config.json") else None


def _no_config(files: CheckpointFiles) -> str | None:
    if files.has("config.json"):
        return None
    if files.has("model_index.json"):
        return "a diffusion pipeline (model_index.json), not a language model"
    if files.has("params.json"):
        return "weights in Mistral's or Meta's own format (params.json), which is not read"
    if files.named("*.onnx", "onnx/*.onnx"):
        return "ONNX files, which are not read"
    return None


def _embeddings(files: CheckpointFiles) -> str | None:
    if files.has("modules.json") or files.has("config_sentence_transformers.json"):
        return "an embeddings model (sentence-transformers), which writes no text"
    task = next((name for name in files.architectures if name.endswith(_OTHER_TASKS)), None)
    if task is not None:
        return f"{task}, which writes no text"
    if files.model_type in _ENCODERS and not files.config.get("is_decoder"):
        return f"an encoder ({files.model_type!r}), which writes no text"
    return None


def _encoder_decoder(files: CheckpointFiles) -> str | None:
    if not files.config.get("is_encoder_decoder"):
        return None
    return f"an encoder-decoder model ({files.model_type!r})"


def _multimodal(files: CheckpointFiles) -> str | None:
    if files.model_type in TEXT_MODELS_OF_MULTIMODAL:
        return None
    part = next((name for name in _PERCEPTION if files.config.get(name)), None)
    return None if part is None else f"a model of images or sound ({files.model_type!r} with {part})"


def _modelopt(files: CheckpointFiles) -> str | None:
    return "a ModelOpt quantisation (hf_quant_config.json)" if files.has("hf_quant_config.json") else None


def _mlx(files: CheckpointFiles) -> str | None:
    is_mlx = isinstance(files.config.get("quantization"), dict)
    return 'weights quantised by MLX ("quantization" in config.json)' if is_mlx else None


def _method(files: CheckpointFiles) -> str | None:
    for name in ("quantize_config.json", "quant_config.json"):  # AutoGPTQ's and AutoAWQ's
        if files.quantization is None and files.has(name):
            return f"quantised weights ({name})"
    if files.quantization is None or _is_bitsandbytes(files):
        return None
    method = files.quantization.get("quant_method")
    if method in METHODS or (files.is_head and method != "mxfp4"):
        found = files.named_format
        if found is not None:
            return found if isinstance(found, str) else None
    if method in QUANTIZATION_METHODS:
        return None
    return f"weights quantised by {method!r}" if method else "a quantization_config without quant_method"


def _is_bitsandbytes(files: CheckpointFiles) -> bool:
    quantization = files.quantization or {}
    named = quantization.get("quant_method") == "bitsandbytes"
    return named or bool(quantization.get("load_in_8bit") or quantization.get("load_in_4bit"))


def _bitsandbytes_over_plain(files: CheckpointFiles) -> str | None:
    if not _is_bitsandbytes(files) or not files.tensors:
        return None
    if any(name.endswith(_BITSANDBYTES_SCALES) for name in files.tensors):
        return None
    return "a bitsandbytes quantization_config over weights that bitsandbytes did not write"


def _codes(files: CheckpointFiles) -> str | None:
    """Weights of fewer than 16 bits that nothing scales."""
    if _is_bitsandbytes(files):
        return None
    is_packed = files.stored_format is not None
    for name, header in files.tensors.items():
        if is_packed and name.endswith("qweight"):
            continue  # whose scales have names of another form
        if header.dtype in _PLAIN_DTYPES or "scale" in name:
            continue
        if not (name.endswith("weight") or header.dtype.startswith("F")):
            continue  # masks, counters, blocks of mxfp4
        if files.quantization is None:
            return f"{name} in {header.dtype} without a quantization_config"
        if not any(scale in files.tensors for scale in (f"{name}_scale_inv", f"{name}_scale")):
            return f"{name} in {header.dtype} without a scale"
    return None


#: In the order they are looked for: what needs no weights comes first.
REFUSALS: Final = (
    Refusal(_gguf, "give the path of the .gguf file itself"),
    Refusal(_adapter, "merge it into its base model (peft: merge_and_unload, save_pretrained) and give that folder"),
    Refusal(_no_config, "give a folder in Hugging Face format, with config.json and safetensors"),
    Refusal(_embeddings, "give a decoder-only language model", is_of_heads=False),
    Refusal(_encoder_decoder, "only decoder-only language models are supported", is_of_heads=False),
    Refusal(_multimodal, "give a language model of text", is_of_heads=False),
    Refusal(_modelopt, _UNQUANTISED),
    Refusal(_mlx, _UNQUANTISED),
    Refusal(_method, _UNQUANTISED),
    Refusal(
        _bitsandbytes_over_plain,
        f"delete quantization_config from its config.json, or {_UNQUANTISED}",
        reads_headers=True,
    ),
    Refusal(_codes, _UNQUANTISED, reads_headers=True),
)


def check_tree(folder: str | Path) -> None:
    """Refuse to draft trees for, or with, the checkpoint in a folder if its layers have recurrent states.

    Raises:
        InvalidRequest: they have, as far as ``config.json`` shows.
    """
    text = read_text_config(folder)
    layers = text.get("layer_types")
    is_recurrent = bool(_RECURRENT_LAYERS & set(layers)) if isinstance(layers, list) else False
    if is_recurrent or text.get("model_type") in _RECURRENT:
        raise InvalidRequest(
            f"{folder} has recurrent states ({text.get('model_type')!r}), which follow a chain of tokens and no tree:"
            " leave out tree_top_k and speculative_token_tree",
            param="tree_top_k",
        )


def check_config(folder: str | Path, *, is_head: bool = False) -> None:
    """Refuse a folder by its file names and ``config.json``; weights need not be there yet.

    What is no folder passes: whoever looks for it reports that.

    Raises:
        ModelNotSupported: it holds a format of :data:`REFUSALS`.
        InvalidRequest: there is no ``config.json`` that can be read.
    """
    files = CheckpointFiles(folder, is_head=is_head)
    if files.folder.is_file():
        _refuse_file(files.folder)
    if files.folder.is_dir():
        _check(files, reads_headers=False)
        if not files.config:
            raise InvalidRequest(f"{folder}/config.json is empty", param="model")


def check_checkpoint(folder: str | Path, *, is_head: bool = False) -> None:
    """Refuse a folder by its file names, ``config.json`` and safetensors headers; as :func:`check_config`.

    Raises:
        ModelNotSupported: it holds a format of :data:`REFUSALS`.
        InvalidRequest: files are missing, truncated or damaged.
    """
    check_config(folder, is_head=is_head)
    files = CheckpointFiles(folder, is_head=is_head)
    if not files.folder.is_dir():
        return
    files.require_weights()
    _check(files, reads_headers=True)


def _refuse_file(path: Path) -> NoReturn:
    if path.suffix == ".gguf":
        raise ModelNotSupported(
            f"{path} is a GGUF file, of which a service needs a folder: tandem serve, tandem target, tandem draft and"
            " LLM make one"
        )
    raise InvalidRequest(f"{path} is a file; give the folder of a checkpoint in Hugging Face format", param="model")


def _check(files: CheckpointFiles, *, reads_headers: bool) -> None:
    for refusal in REFUSALS:
        if refusal.reads_headers != reads_headers or (files.is_head and not refusal.is_of_heads):
            continue
        if (found := refusal.found(files)) is not None:
            raise ModelNotSupported(f"{files.folder} holds {found}: {refusal.remedy}")
