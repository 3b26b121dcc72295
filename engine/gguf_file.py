"""The header of a GGUF file: metadata, and where each tensor lies. Imports neither torch nor transformers.

Layout (version 2 and 3, little endian): ``GGUF``, uint32 version, uint64 numbers of tensors and of entries; entries of
a name, a type and a value; tensors of a name, a shape (the fastest dimension first), a type and an offset behind the
header, which is padded to ``general.alignment``. A text is a uint64 length and UTF-8. Source: the specification in
ggml's repository.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specdec.errors import InvalidRequest, ModelNotSupported

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT: Final = 8
_ARRAY: Final = 9
#: Of entries, tensors, dimensions and the elements of an array: more is a damaged file.
_MOST: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a tensor's rows are stored: in blocks of so many numbers and bytes."""

    name: str
    numbers: int
    num_bytes: int


#: Types whose numbers are read, by ggml's numbers.
BLOCK_TYPES: Final[Mapping[int, BlockType]] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
}
#: Those that are not, for people.
_OTHER_TYPES: Final[Mapping[int, str]] = {
    10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: its shape, the slowest dimension first, and its bytes in the file."""

    shape: tuple[int, ...]
    kind: BlockType
    start: int
    num_bytes: int


class GgufFile:
    """A GGUF file, mapped into memory."""

    def __init__(self, path: str | Path) -> None:
        """Read the header.

        Raises:
            InvalidRequest: there is no such file, or it is truncated or damaged.
            ModelNotSupported: tensors of a type that is not read, or another version.
        """
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{path} cannot be read: {error}", param="model") from None
        self._at = 0
        try:
            self._read()
        except (IndexError, OverflowError, UnicodeDecodeError, struct.error) as error:
            raise self._damaged(f"its header cannot be read: {error}") from None

    def _read(self) -> None:
        magic, version, num_tensors, num_entries = self._unpack("4sIQQ")
        if magic != b"GGUF":
            raise self._damaged("it does not begin with GGUF")
        if version not in (2, 3):
            raise ModelNotSupported(
                f"{self.path} is GGUF of version {version}; 2 and 3 are read: convert the model anew"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(self._count(num_entries)):
            name = self._text()
            (kind,) = self._unpack("I")
            self.metadata[name] = self._value(kind)
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(self._count(num_tensors)):
            name = self._text()
            (num_dimensions,) = self._unpack("I")
            shape = self._unpack(f"{self._count(num_dimensions)}Q")
            found[name] = (tuple(reversed(shape)), *self._unpack("IQ"))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(name, *info, start) for name, info in found.items()}

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> StoredTensor:
        if kind not in BLOCK_TYPES:
            known = ", ".join(block.name for block in BLOCK_TYPES.values())
            raise ModelNotSupported(
                f"{self.path} holds {name} as {_OTHER_TYPES.get(kind, f'type {kind}')}, which is not read: take a file"
                f" of {known} (Q4_K_M, Q5_K_M, Q6_K, Q8_0)"
            )
        block = BLOCK_TYPES[kind]
        total = 1
        for size in shape:
            total *= size
        if not shape or shape[-1] % block.numbers:
            raise self._damaged(f"{name} {shape} does not consist of blocks of {block.numbers}")
        num_bytes = total // block.numbers * block.num_bytes
        if start + offset + num_bytes > len(self.data):
            raise self._damaged(f"{name} ends behind its {len(self.data)} bytes")
        return StoredTensor(shape, block, start + offset, num_bytes)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _count(self, number: int) -> int:
        if number > _MOST:
            raise OverflowError(f"{number} entries")
        return number

    def _text(self) -> str:
        (length,) = self._unpack("Q")
        end = self._at + self._count(length)
        if end > len(self.data):
            raise IndexError(f"a text of {length} bytes")
        text = self.data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            element, count = self._unpack("IQ")
            if element in _SCALARS:
                return list(self._unpack(f"{self._count(count)}{_SCALARS[element]}"))
            return [self._value(element) for _ in range(self._count(count))]
        if kind not in _SCALARS:
            raise IndexError(f"a value of type {kind}")
        return self._unpack(_SCALARS[kind])[0]

    def _damaged(self, reason: str) -> InvalidRequest:
        return InvalidRequest(
            f"{self.path} is truncated or damaged ({reason}): copy or download it again", param="model"
        )
