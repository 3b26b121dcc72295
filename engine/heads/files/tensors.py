"""Tensors of a checkpoint's folder by their names: safetensors, in one file or with an index, or torch's own files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.checkpoint_files import CheckpointFiles
from engine.gguf_config import tensor_names
from engine.gguf_file import GgufFile
from engine.heads.files.decoded import decode_linears, weight_names
from engine.quantised.gguf_blocks import read_plain
from engine.weight_map import INDEXES, read_weight_map
from specdec.checkpoint_config import read_text_config
from specdec.errors import InvalidRequest, ModelNotSupported

H = TypeVar("H", bound=nn.Module)

#: Weights of a head, the first that there are.
_WEIGHTS: Final = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt")
#: Names of the embedding and the output layer in the architectures of transformers, after any prefix.
_EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "embeddings.weight",
)
_OUTPUTS: Final = ("lm_head.weight", "embed_out.weight")


def read_tensors(folder: Path, patterns: Sequence[str] = _WEIGHTS) -> dict[str, Tensor]:
    """All tensors of a small checkpoint, on the CPU: of the files that the first pattern with any matches.

    Safetensors are taken where there are any; else ``.bin`` or ``.pt`` files, which may hold tensors only: nothing in
    them is run. What a training has left beside the weights (``training_args.bin``, ``optimizer.pt``) is not looked at.

    Raises:
        InvalidRequest: there are none, or they cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    paths = next((found for pattern in patterns if (found := sorted(folder.glob(pattern)))), [])
    try:
        for path in paths:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt", device="cpu") as file:
                    tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                continue
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(loaded, Mapping):
                raise InvalidRequest(f"{path} holds no named tensors", param="model")
            tensors |= {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise InvalidRequest(f"the weights in {folder} cannot be read: {error}", param="model") from error
    except Exception as error:  # pickle.UnpicklingError and whatever else damaged bytes lead to
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(
            f"the weights in {folder} hold more than tensors, or are damaged: {type(error).__name__}", param="model"
        ) from error
    if not tensors:
        raise InvalidRequest(f"{folder} has no weights (*.safetensors, *.bin or *.pt)", param="model")
    return tensors


def load(make: Callable[[], H], tensors: Mapping[str, Tensor], folder: Path, shared: Iterable[str] = ()) -> H:
    """A head with these tensors. ``make`` builds it without memory, but for what it shares with others: ``shared``.

    Raises:
        ModelNotSupported: a tensor is missing, of another shape, of no use, or quantised.
    """
    with torch.device("meta"):
        head = make()
    wanted = {name: value.shape for name, value in head.state_dict().items() if name not in set(shared)}
    for problem, names in (("lacks", wanted.keys() - tensors.keys()), ("has unknown", tensors.keys() - wanted.keys())):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (", …" if len(names) > 4 else "")
            raise ModelNotSupported(f"the head in {folder} {problem} {shown}: not a variant that is known here")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ModelNotSupported(
                f"the head in {folder} has {name} of shape {list(tensors[name].shape)}; its config means {list(shape)}"
            )
        if is_quantised(tensors[name]):
            raise ModelNotSupported(
                f"the head in {folder} has {name} in {tensors[name].dtype}, which is quantised: give it in 16 or 32"
                " bits (--quantization int8 rounds it at load, on a CPU)"
            )
    head.load_state_dict(dict(tensors), strict=False, assign=True)
    return head


class TargetTensors:
    """The few tensors of a target's checkpoint that heads share; only these are read."""

    def __init__(self, folder: Path) -> None:
        """Read the config only; raises like :func:`read_text_config`."""
        self._folder = folder
        self.config = read_text_config(folder)

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state."""
        return int(self.config.get("hidden_size") or self.config["n_embd"])

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config.get("num_hidden_layers") or self.config["n_layer"])

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config["vocab_size"])

    def embeddings(self) -> Tensor:
        """The embedding [V, H].

        Raises:
            InvalidRequest: the target's weights are not safetensors.
            ModelNotSupported: no tensor has one of the known names, or it is quantised.
        """
        return self._read(self._find(_EMBEDDINGS))

    def lm_head(self) -> Tensor:
        """The output layer [V, H]: the embedding where the two are tied; raises like :meth:`embeddings`."""
        own = self._find(_OUTPUTS, required=False)
        is_tied = self.config.get("tie_word_embeddings", own is None)
        if own is None and not is_tied:
            raise ModelNotSupported(f"{self._folder} has no output layer ({', '.join(_OUTPUTS)})")
        return self.embeddings() if is_tied or own is None else self._read(own)

    def shared_names(self) -> set[str]:
        """Names of the tensors that :meth:`embeddings` and :meth:`lm_head` read; raises like these."""
        found = (self._find(_EMBEDDINGS), self._find(_OUTPUTS, required=False))
        return {each for name in found if name is not None for each in self._stored_as(name)}

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file of every tensor."""
        if self._gguf is not None:
            return dict.fromkeys(tensor_names(self._gguf), self._gguf.path)
        return files_by_tensor(self._folder)

    @cached_property
    def _gguf(self) -> GgufFile | None:
        """The file of a folder that is one."""
        stored = CheckpointFiles(self._folder).stored_format
        return None if stored is None or stored.file is None else GgufFile(self._folder / stored.file)

    def _stored_as(self, name: str) -> list[str]:
        """The tensors of the module whose weight has a name."""
        return [each for each in self._files if each.startswith(name.removesuffix("weight"))]

    def _find(self, endings: Sequence[str], required: bool = True) -> str | None:
        for ending in endings:
            names = [name for name in weight_names(self._files) if name == ending or name.endswith("." + ending)]
            if names:
                return min(names, key=lambda name: ("language" not in name and "." in name, len(name)))
        if required:
            raise ModelNotSupported(
                f"{self._folder} has no tensor that a draft head can take as the target's embeddings:"
                f" none is named {', '.join(endings)}"
            )
        return None

    def _read(self, name: str | None) -> Tensor:
        assert name is not None
        if self._gguf is not None:
            return read_plain(self._gguf, tensor_names(self._gguf)[name])
        stored: dict[str, Tensor] = {}
        for each in self._stored_as(name):
            with safe_open(self._files[each], framework="pt", device="cpu") as file:
                stored[each] = file.get_tensor(each)
        tensor = decode_linears(self._folder, stored).get(name)
        if tensor is None or is_quantised(tensor):
            raise ModelNotSupported(
                f"{name} in {self._folder} is quantised in a way that is not read; a draft head needs its numbers"
            )
        return tensor


def is_quantised(tensor: Tensor) -> bool:
    """Whether the numbers mean nothing without scales."""
    return not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1


def files_by_tensor(folder: Path) -> dict[str, Path]:
    """The safetensors file of every tensor.

    Raises:
        InvalidRequest: there are none, or the index cannot be read.
    """
    index = folder / INDEXES[0]
    if index.is_file():
        return read_weight_map(index)
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            files |= dict.fromkeys(file.keys(), path)
    if not files:
        raise InvalidRequest(
            f"{folder} has no *.safetensors; a draft head reads tensors of the target from there", param="target_model"
        )
    return files
