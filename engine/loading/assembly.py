"""A model put together from a checkpoint whose linear layers are stored in a format of :mod:`engine.quantised`.

Layers are read one after another, so that at no time more than one of them is decoded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from engine.checkpoint_files import CheckpointFiles
from engine.freed_memory import give_back_freed
from engine.gguf_config import tensor_names
from engine.gguf_file import GgufFile
from engine.grouped_weight import GroupedWeight
from engine.native.experts import GroupedExperts
from engine.native.rounded import GroupedLinear, group_linears, round_weight
from engine.quantised.gguf_blocks import read_grouped, read_plain
from engine.quantised.packed_integers import OF_LINEARS, REAL_DTYPES, parts_of, read_experts, read_linear
from engine.quantised_formats import QuantisedFormat
from specdec.errors import InvalidRequest, ModelNotSupported


class TensorSource(Protocol):
    """The tensors of a checkpoint under the names that transformers gives them."""

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor of real numbers, as it is stored."""

    def linear(self, prefix: str) -> GroupedWeight | None:
        """The weight of the linear layer of a name; None: it is not quantised."""


class PackedSource:
    """Folders of safetensors with packed integers."""

    def __init__(self, files: CheckpointFiles, stored: QuantisedFormat, stack: ExitStack) -> None:
        """The files stay open until the stack is closed."""
        self._stored = stored
        self._open: dict[str, Any] = {}
        for path in files.weights:
            file = stack.enter_context(safe_open(path, "pt"))
            self._open |= dict.fromkeys(file.keys(), file)
        self._parts = parts_of(self._open)

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._open.keys()

    def read(self, name: str) -> torch.Tensor:
        """A tensor, as it is stored."""
        tensor: torch.Tensor = self._open[name].get_tensor(name)
        return tensor

    def linear(self, prefix: str) -> GroupedWeight | None:
        """The weight of the linear layer of a name; None: it is not quantised.

        Raises:
            ModelNotSupported: tensors of the layer are missing or do not fit together.
        """
        marker, parts = self._stored.marker, self._parts.get(prefix, ())
        if marker not in parts or self.read(f"{prefix}.{marker}").dtype in REAL_DTYPES:
            return None
        try:
            return read_linear(self._stored, {part: self.read(f"{prefix}.{part}") for part in parts})
        except (KeyError, RuntimeError, ValueError) as error:
            raise ModelNotSupported(
                f"{prefix} cannot be read as {self._stored.method}: {error}; take the checkpoint that is not quantised"
            ) from None


class RoundedSource(PackedSource):
    """Folders of safetensors with real numbers, whose linear layers are rounded as they are read."""

    def __init__(self, files: CheckpointFiles, bits: int, dtype: torch.dtype, stack: ExitStack) -> None:
        """The weights are taken in a dtype before they are rounded to so many bits."""
        super().__init__(files, QuantisedFormat("", bits, None), stack)
        self._bits = bits
        self._dtype = dtype

    def linear(self, prefix: str) -> GroupedWeight | None:
        """The weight of the linear layer of a name, rounded; None: there is none."""
        is_output = prefix == OUTPUT
        name = f"{prefix}.weight"
        if is_output and name not in self._open:  # tied
            name = f"{EMBEDDING}.weight"
        if name not in self._open:
            return None
        return round_weight(self.read(name), self._bits, is_output=is_output, dtype=self._dtype)


class GgufSource:
    """A GGUF file."""

    def __init__(self, file: GgufFile, config: PreTrainedConfig) -> None:
        self._file = file
        self._names = tensor_names(file)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        #: Of projections whose outputs GGUF has in another order.
        self._heads = {"q_proj": heads, "k_proj": kv_heads} if config.model_type == "llama" else {}

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._names.keys()

    def read(self, name: str) -> torch.Tensor:
        """A tensor, decoded."""
        tensor = read_plain(self._file, self._names[name])
        order = self._order(name.rpartition(".")[0], tensor.shape[0])
        return tensor if order is None else tensor[order]

    def linear(self, prefix: str) -> GroupedWeight | None:
        """The weight of the linear layer of a name; None: it is not quantised."""
        name = self._names.get(f"{prefix}.weight")
        weight = None if name is None else read_grouped(self._file, name)
        order = None if weight is None else self._order(prefix, weight.out_features)
        return weight if weight is None or order is None else weight.rows(order)

    def _order(self, prefix: str, num_rows: int) -> torch.Tensor | None:
        """Which row each row of transformers' is, in a llama's queries and keys: GGUF rotates neighbours, transformers
        the halves of a head.
        """
        heads = self._heads.get(prefix.rpartition(".")[2])
        return None if heads is None else torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).flatten()


#: What the architectures of :data:`engine.quantised_formats.MODEL_TYPES` call their embedding and output layer.
EMBEDDING: Final = "model.embed_tokens"
OUTPUT: Final = "lm_head"


def assemble(
    source: TensorSource,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    folder: str,
    *,
    on_cpu: bool = True,
    rounds: bool = True,
) -> tuple[PreTrainedModel, list[str]]:
    """A model whose quantised layers are :class:`GroupedLinear`, and the names of tensors that it did not take.

    On a CPU layers beside those that are not quantised, such as the output layer, are rounded to 8 bits in groups, as
    are activations; without ``rounds``, or where codes are real numbers, neither is.

    Raises:
        ModelNotSupported: weights are missing, or of another shape than the model's.
    """
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            plain, dtype=dtype, attn_implementation="eager"
        )
    taken: set[str] = set()
    _take_linears(model, source, dtype, taken)
    has_linears = bool(taken)
    names = set(source.names)
    _take_experts(model, source, names, dtype, taken)
    for name, parameter in list(model.named_parameters()):
        if name not in names:
            continue
        tensor = source.read(name)
        if tensor.shape != parameter.shape:
            raise ModelNotSupported(f"{folder}: {name} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._parameters[last] = nn.Parameter(tensor.to(dtype), requires_grad=False)
        taken.add(name)
    model.tie_weights()
    absent = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    if absent:
        raise ModelNotSupported(
            f"{folder} lacks {len(absent)} of the model's weights ({', '.join(absent[:4])}): not a checkpoint of"
            f" {type(model).__name__}"
        )
    if on_cpu and has_linears:
        group_linears(model, rounds=rounds)
    give_back_freed(sum(parameter.nbytes for parameter in model.parameters()))
    model = model.eval().requires_grad_(False)
    assert isinstance(model, PreTrainedModel)
    return model, sorted(names - taken)


def _take_experts(model: nn.Module, source: TensorSource, names: set[str], dtype: torch.dtype, taken: set[str]) -> None:
    """Put :class:`GroupedExperts` in the place of experts that the source has in MXFP4."""
    for name, module in list(model.named_modules()):
        if f"{name}.down_proj_blocks" not in names:
            continue
        layers: list[list[GroupedLinear]] = []
        for own in ("gate_up_proj", "down_proj"):
            parts = [f"{name}.{own}_{part}" for part in ("blocks", "scales", "bias")]
            if absent := [part for part in parts if part not in names]:
                raise ModelNotSupported(f"{', '.join(absent)} are missing beside {name}.down_proj_blocks")
            blocks, scales, biases = map(source.read, parts)
            weights = read_experts(blocks, scales)
            size = getattr(module, own).transpose(1, 2).shape
            if (len(weights), weights[0].out_features, weights[0].in_features) != size:
                raise ModelNotSupported(f"{name}.{own}_blocks are {tuple(blocks.shape)}, which is not {tuple(size)}")
            rows = (nn.Parameter(bias.to(dtype), requires_grad=False) for bias in biases)
            layers.append([GroupedLinear(weight, dtype, bias) for weight, bias in zip(weights, rows, strict=True)])
            taken.update(parts)
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = GroupedExperts(module, *layers)


def read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the ``generation_config.json`` of its folder, where there is one."""
    if (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except (OSError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{folder}/generation_config.json cannot be read: {error}", param="model") from None


def _take_linears(model: nn.Module, source: TensorSource, dtype: torch.dtype, taken: set[str]) -> None:
    """Put :class:`GroupedLinear` in the place of layers that the source has quantised."""
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        weight = source.linear(name)
        if weight is None:
            continue
        if (weight.out_features, weight.in_features) != (module.out_features, module.in_features):
            raise ModelNotSupported(
                f"{name} is {(weight.out_features, weight.in_features)}, not {tuple(module.weight.shape)}"
            )
        bias = None
        if module.bias is not None:
            bias = nn.Parameter(source.read(f"{name}.bias").to(dtype), requires_grad=False)
            taken.add(f"{name}.bias")
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = GroupedLinear(weight, dtype, bias)
        taken |= {f"{name}.{part}" for part in OF_LINEARS}
        give_back_freed(weight.in_features * weight.out_features)
