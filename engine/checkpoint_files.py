"""What a checkpoint's folder says without being loaded: its file names, ``config.json`` and safetensors headers.

Imports neither torch nor transformers, so that a refusal needs milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from engine.quantised_formats import METHODS, METHODS_OF_TRANSFORMERS, QuantisedFormat, read_format
from engine.weight_map import INDEXES, read_weight_map
from specdec.checkpoint_config import read_config
from specdec.errors import InvalidRequest

#: The library's own limit of a header, in bytes.
_MAX_HEADER_BYTES: Final = 100_000_000
_LFS_POINTER: Final = b"version https://git-lfs"
#: The files that transformers reads.
WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")
_MAX_SHARDS: Final = 1_000
#: One of several files of weights: its number, and how many there are.
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor, as the header of its file describes it."""

    #: safetensors' name: F32, BF16, F8_E4M3, I8, …
    dtype: str
    shape: tuple[int, ...]


class CheckpointFiles:
    """The files of one checkpoint; each is read when it is first asked for."""

    def __init__(self, folder: str | Path, *, is_head: bool = False) -> None:
        """``is_head``: it is that of a draft head."""
        self.folder = Path(folder)
        self.is_head = is_head

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.folder / name).is_file()

    def named(self, *patterns: str) -> list[str]:
        """Names of the files that match one of the patterns, sorted."""
        return sorted({path.name for pattern in patterns for path in self.folder.glob(pattern)})

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """``config.json``.

        Raises:
            InvalidRequest: it is missing, cannot be read, or is no JSON object.
        """
        return read_config(self.folder)

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        """The classes that ``config.json`` names."""
        names = self.config.get("architectures")
        return tuple(str(name) for name in names) if isinstance(names, list) else ()

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture; empty where there is none."""
        return str(self.config.get("model_type") or "")

    @cached_property
    def quantization(self) -> Mapping[str, Any] | None:
        """The object of ``config.json`` that says how weights are quantised, the text model's of a larger one too."""
        text = self.config.get("text_config")
        for part in (self.config, text if isinstance(text, Mapping) else {}):
            for name in ("quantization_config", "compression_config", "quantization"):
                if isinstance(found := part.get(name), Mapping):
                    return found
        return None

    @property
    def stored_format(self) -> QuantisedFormat | None:
        """The format of quantised weights that is read here; None: there is none, or it is not read."""
        found = self.named_format if self.has("config.json") else None
        return found if isinstance(found, QuantisedFormat) else None

    @property
    def named_format(self) -> QuantisedFormat | str | None:
        """The same; or, as text, why a format of a known method is not read."""
        quantization = self.quantization
        if quantization is None or quantization.get("quant_method") not in (*METHODS, *METHODS_OF_TRANSFORMERS):
            return None
        return read_format(quantization, None if self.is_head else self.model_type)

    @cached_property
    def weights(self) -> tuple[Path, ...]:
        """The safetensors files of the weights; none where they are in torch's own format.

        Raises:
            InvalidRequest: one of several files is missing.
        """
        if self.has("model.safetensors"):
            return (self.folder / "model.safetensors",)
        for index in INDEXES:
            if self.has(index):
                files = tuple(sorted(set(read_weight_map(self.folder / index).values())))
                self._require((file.name for file in files), f"{index} names it")
                return files if index == INDEXES[0] else ()
        return tuple(self.folder / name for name in self.named("*.safetensors"))

    def require_weights(self) -> None:
        """Refuse a folder without the weights of a model (of a head any file will do), or without all of them.

        Raises:
            InvalidRequest: a file is missing.
        """
        for name in self.named("*-of-*.safetensors", "*-of-*.bin"):
            if (found := _SHARD.fullmatch(name)) is not None and int(found[3]) <= _MAX_SHARDS:
                numbers = range(1, int(found[3]) + 1)
                self._require((f"{found[1]}-{n:05}-of-{found[3]}{found[4]}" for n in numbers), f"{name} is there")
        if (stored := self.stored_format) is not None and stored.file is not None:
            self._require([stored.file], "config.json names it")
            return
        names = ("*.safetensors", "*.bin", "*.pt") if self.is_head else (*WEIGHTS, *INDEXES)
        if self.named(*names) or self.config.get("transformers_weights"):
            return
        raise InvalidRequest(f"{self.folder} has no weights ({', '.join(names)})", param="model")

    def _require(self, names: Iterable[str], reason: str) -> None:
        missing = [name for name in names if not self.has(name)]
        if missing:
            shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
            raise InvalidRequest(f"{self.folder} lacks {shown} ({reason}): copy or download it again", param="model")

    @cached_property
    def tensors(self) -> Mapping[str, TensorHeader]:
        """The headers of all :attr:`weights`, by the tensors' names.

        Raises:
            InvalidRequest: a file is missing, truncated or damaged.
        """
        tensors: dict[str, TensorHeader] = {}
        for path in self.weights:
            tensors |= read_header(path)
        return tensors


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file.

    Layout: 8 bytes with the length of the header, little endian; the header, a JSON object; the tensors' bytes.

    Raises:
        InvalidRequest: the file is shorter or longer than its header says, or has no such header.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix + file.read(len(_LFS_POINTER) - len(prefix)) == _LFS_POINTER:
                raise InvalidRequest(f"{path} is a pointer of git-lfs, not weights: run 'git lfs pull'", param="model")
            file.seek(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"it has {size} bytes, too few for its header")
            header = json.loads(file.read(length))
        tensors = {name: info for name, info in header.items() if name != "__metadata__"}
        needed = 8 + length + max((int(info["data_offsets"][1]) for info in tensors.values()), default=0)
        found = {name: TensorHeader(str(info["dtype"]), tuple(info["shape"])) for name, info in tensors.items()}
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="model") from None
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        raise _damaged(path, "its header cannot be read") from None
    if size != needed:
        raise _damaged(path, f"it has {size} bytes, its header says {needed}")
    return found


def _damaged(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is truncated or damaged ({reason}): copy or download it again", param="model")
