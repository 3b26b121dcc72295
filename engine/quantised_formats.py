"""How ``quantization_config`` says weights are stored, for the formats that :mod:`engine.quantised` reads.

Imports neither torch nor transformers: a format that is not read is refused from ``config.json`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Values of ``quant_method`` that are read here.
METHODS: Final = ("compressed-tensors", "awq", "gptq", "gguf")
#: Others that are read here of some architectures, bitsandbytes and mxfp4 for a CPU, and else by transformers.
METHODS_OF_TRANSFORMERS: Final = ("fp8", "bitsandbytes", "mxfp4")
#: Architectures whose quantised checkpoints are read: those that the native decoder runs.
MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
#: Of mxfp4, whose experts alone are quantised.
_EXPERT_TYPES: Final = ("gpt_oss",)
_BITS: Final = (4, 8)
_FLOAT_BITS: Final = 8
#: Formats of compressed-tensors with 4-bit floating-point codes, and the size of their groups.
_FLOAT_GROUPS: Final = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """One way to store the weights of linear layers."""

    #: One of :data:`METHODS`.
    method: str
    #: 0: each tensor has a type of its own.
    bits: int
    #: Inputs that share a scale; None: all.
    group: int | None
    #: What is added to stored zero points.
    zero_shift: int = 0
    #: A suffix of the tensor that shows a layer is quantised.
    marker: str = "qweight"
    #: Codes are floating-point numbers (e2m1, e4m3); else whole ones.
    is_float: bool = False
    #: Outputs that share a scale.
    rows: int = 1
    #: The file of the weights; None: the folder's safetensors.
    file: str | None = None


def read_format(quantization: Mapping[str, Any], model_type: str | None) -> QuantisedFormat | str:
    """What a ``quantization_config`` with a method that is read here means; or, as text, what of it is not read.

    ``model_type`` None: of a draft head.
    """
    method = str(quantization.get("quant_method"))
    if model_type is None and method == "gguf":
        return "a head in a GGUF file"
    known = _EXPERT_TYPES if method == "mxfp4" else MODEL_TYPES
    if model_type is not None and model_type not in known:
        return f"weights quantised by {method!r} in a {model_type!r} model; they are read of {', '.join(known)}"
    found = _READERS[method](quantization)
    return f"weights quantised by {method!r} with {found}" if isinstance(found, str) else found


def _awq(quantization: Mapping[str, Any]) -> QuantisedFormat | str:
    version = str(quantization.get("version", "gemm")).lower()
    if version != "gemm":
        return f"version {version!r}; only 'gemm' is read"
    if quantization.get("bits", quantization.get("w_bit")) != 4:
        return f"bits {quantization.get('bits')!r}; only 4 is read"
    group = _group(quantization.get("group_size", quantization.get("q_group_size")))
    return group if isinstance(group, str) else QuantisedFormat("awq", 4, group or None)


def _gptq(quantization: Mapping[str, Any]) -> QuantisedFormat | str:
    kind = str(quantization.get("checkpoint_format", "gptq"))
    if kind not in {"gptq", "gptq_v2"}:
        return f"checkpoint_format {kind!r}; 'gptq' and 'gptq_v2' are read"
    bits = quantization.get("bits")
    if bits not in _BITS:
        return f"bits {bits!r}; 4 and 8 are read"
    if quantization.get("dynamic"):
        return "other settings for some layers (dynamic)"
    group = _group(quantization.get("group_size"))
    return group if isinstance(group, str) else QuantisedFormat("gptq", bits, group or None, 1 if kind == "gptq" else 0)


def _compressed(quantization: Mapping[str, Any]) -> QuantisedFormat | str:  # noqa: PLR0911, PLR0912
    groups = quantization.get("config_groups")
    if (
        not isinstance(groups, Mapping)
        or not groups
        or not all(isinstance(group, Mapping) for group in groups.values())
    ):
        return "no config_groups"
    sparsity = quantization.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"sparse weights ({sparsity.get('format')!r})"
    if quantization.get("kv_cache_scheme"):
        return "a quantised KV cache (kv_cache_scheme)"
    found: set[QuantisedFormat] = set()
    for scheme in groups.values():
        kind = str(scheme.get("format") or quantization.get("format"))
        weights = scheme.get("weights")
        if kind == "naive-quantized" and isinstance(weights, Mapping):  # a name of either
            kind = f"{weights.get('type', 'int')}-quantized"
        known = ("pack-quantized", "int-quantized", "float-quantized", *_FLOAT_GROUPS)
        if kind not in known or not isinstance(weights, Mapping):
            return f"format {kind!r}; {', '.join(known)} are read"
        if kind == "float-quantized":
            float8 = _compressed_float8(weights)
            if isinstance(float8, str):
                return float8
            found.add(float8)
            continue
        if kind in _FLOAT_GROUPS:
            if weights.get("group_size") != _FLOAT_GROUPS[kind] or weights.get("symmetric") is False:
                return f"groups of {weights.get('group_size')} in {kind!r}; {_FLOAT_GROUPS[kind]}, symmetric, is read"
            found.add(
                QuantisedFormat("compressed-tensors", 4, _FLOAT_GROUPS[kind], marker="weight_packed", is_float=True)
            )
            continue
        bits, strategy = weights.get("num_bits"), weights.get("strategy")
        if weights.get("type", "int") != "int" or bits not in _BITS or (kind == "int-quantized" and bits != 8):
            return f"{weights.get('type')} weights of {bits} bits in {kind!r}; int of 4 and 8 are read"
        if strategy not in {"group", "channel", "tensor"}:
            return f"strategy {strategy!r}; group, channel and tensor are read"
        inputs = scheme.get("input_activations")
        if isinstance(inputs, Mapping) and not inputs.get("dynamic"):
            return "activations with scales of their own; dynamic ones are read"
        group = _group(weights.get("group_size") if strategy == "group" else None)
        if isinstance(group, str):
            return group
        marker = "weight_packed" if kind == "pack-quantized" else "weight"
        found.add(QuantisedFormat("compressed-tensors", bits, group or None, marker=marker))
    return found.pop() if len(found) == 1 else "several formats (config_groups)"


def _fp8(quantization: Mapping[str, Any]) -> QuantisedFormat | str:
    if quantization.get("fmt", "e4m3") != "e4m3":
        return f"fmt {quantization['fmt']!r}; only 'e4m3' is read"
    return _float8("fp8", quantization.get("weight_block_size"))


def _compressed_float8(weights: Mapping[str, Any]) -> QuantisedFormat | str:
    strategy = weights.get("strategy")
    if weights.get("num_bits") != _FLOAT_BITS or strategy not in {"tensor", "channel", "block"}:
        return f"weights of {weights.get('num_bits')} bits by {strategy!r}; 8 by tensor, channel and block are read"
    return _float8("compressed-tensors", weights.get("block_structure") if strategy == "block" else None)


def _float8(method: str, block: Any) -> QuantisedFormat | str:
    """e4m3 with a scale per block of outputs and inputs; without a block, per output or tensor."""
    if block is None:
        return QuantisedFormat(method, 8, None, marker="weight", is_float=True)
    if not isinstance(block, list | tuple) or [isinstance(_group(size), int) for size in block] != [True, True]:
        return f"blocks of {block!r}; pairs of multiples of 16 are read"
    return QuantisedFormat(method, 8, block[1], marker="weight", is_float=True, rows=block[0])


def _bitsandbytes(quantization: Mapping[str, Any]) -> QuantisedFormat | str:
    return QuantisedFormat("bitsandbytes", 4 if quantization.get("load_in_4bit") else 8, None, marker="weight")


def _mxfp4(_: Mapping[str, Any]) -> QuantisedFormat | str:
    return QuantisedFormat("mxfp4", 4, 32, marker="blocks", is_float=True)


def _group(size: Any) -> int | str:
    """A group's size; 0: all inputs; or, as text, why it is not read."""
    if size in (None, -1):
        return 0
    return (
        size
        if isinstance(size, int) and size > 0 and size % 16 == 0
        else f"groups of {size!r}; multiples of 16 are read"
    )


def _gguf(quantization: Mapping[str, Any]) -> QuantisedFormat | str:
    """A folder with what a GGUF file says of itself, and the file."""
    name = quantization.get("file")
    if not isinstance(name, str) or "/" in name or not name.endswith(".gguf"):
        return f"file {name!r}; the name of a .gguf file beside config.json is read"
    return QuantisedFormat("gguf", 0, None, file=name)


_READERS: Final = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "gguf": _gguf,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
