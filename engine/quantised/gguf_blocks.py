"""Blocks of GGUF tensors as grouped weights, each number as ggml decodes it.

A row is a run of blocks (d and dmin are float16; nibbles of 32 numbers lie in 16 bytes, the first 16 in the low
halves):

* ``Q4_0`` d, q: w = d (q - 8). ``Q4_1`` d, m, q: w = d q + m. ``Q5_0`` d, high bits, q: w = d (q - 16). ``Q5_1`` d, m,
  high bits, q: w = d q + m. ``Q8_0`` d, int8 q: w = d q.
* ``Q4_K``, 8 groups of 32: d, dmin, 12 bytes of 6-bit scales and minima, q: w = d sc q - dmin m. Nibbles of two groups
  lie in 32 bytes. ``Q5_K`` the same with 32 bytes of fifth bits before q.
* ``Q6_K``, 16 groups of 16: 128 bytes of low halves, 64 of upper pairs of bits, int8 sc[16], d: w = d sc (q - 32).

Source: ggml's ``dequantize_row_*``; compared with the gguf package bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from engine.gguf_file import GgufFile
from engine.grouped_weight import GroupedWeight

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_plain(file: GgufFile, name: str) -> torch.Tensor:
    """A tensor of the file as numbers: as it is stored, or float32 where it is stored in blocks."""
    stored = file.tensors[name]
    if stored.kind.name in _PLAIN:
        data = torch.frombuffer(bytearray(file.data[stored.start : stored.start + stored.num_bytes]), dtype=torch.uint8)
        return data.view(_PLAIN[stored.kind.name]).view(stored.shape)
    return torch.cat([grouped.decode() for grouped in _parts(file, name)]).view(stored.shape)


def read_grouped(file: GgufFile, name: str) -> GroupedWeight | None:
    """A matrix of the file; None: its numbers are not in blocks."""
    stored = file.tensors[name]
    if stored.kind.name in _PLAIN or len(stored.shape) != 2:
        return None
    parts = list(_parts(file, name))
    first = parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return GroupedWeight(
        stored.shape[0],
        stored.shape[1],
        first.group,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
        first.table,
    )


#: Numbers that are decoded at once.
_AT_ONCE: Final = 2**24


def _parts(file: GgufFile, name: str) -> list[GroupedWeight]:
    """A matrix in parts of some rows."""
    stored = file.tensors[name]
    num_columns, num_rows = stored.shape[-1], stored.num_bytes // (stored.shape[-1] // stored.kind.numbers)
    num_rows //= stored.kind.num_bytes
    row_bytes = num_columns // stored.kind.numbers * stored.kind.num_bytes
    step = max(1, _AT_ONCE // num_columns)
    found = []
    for first in range(0, num_rows, step):
        start = stored.start + first * row_bytes
        count = min(step, num_rows - first)
        data = torch.frombuffer(bytearray(file.data[start : start + count * row_bytes]), dtype=torch.uint8)
        blocks = data.view(count, -1, stored.kind.num_bytes)
        codes, scales, offsets, group = _DECODERS[stored.kind.name](blocks)
        table = _TABLES.get(stored.kind.name)
        found.append(
            GroupedWeight.of_codes(
                codes.reshape(count, -1),
                scales.reshape(count, -1),
                group,
                offsets=None if offsets is None else offsets.reshape(count, -1),
                table=None if table is None else torch.tensor(table),
            )
        )
    return found


#: Codes [rows, blocks, numbers], scales and offsets [rows, blocks, groups], and the size of a group.
_Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float16 numbers at a byte of every block, as float32 [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """The low halves of bytes, and behind them the high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """16 for each bit of 4 bytes that is set, uint8 [rows, blocks, 32]."""
    bits = (data[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q4_0(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[..., 2:]), _half(blocks, 0), None, 32


def _q4_1(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), -_half(blocks, 2), 32


def _q5_0(blocks: torch.Tensor) -> _Decoded:
    codes = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).to(torch.int8) - 16
    return codes, _half(blocks, 0), None, 32


def _q5_1(blocks: torch.Tensor) -> _Decoded:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return codes.to(torch.int8), _half(blocks, 0), -_half(blocks, 2), 32


def _q8_0(blocks: torch.Tensor) -> _Decoded:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None, 32


def _scales_of_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d sc and dmin m, float32 [rows, blocks, 8]."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], -1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], -1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()


def _q4_k(blocks: torch.Tensor) -> _Decoded:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)  # type: ignore[no-untyped-call]
    return codes, *_scales_of_k(blocks), 32


def _q5_k(blocks: torch.Tensor) -> _Decoded:
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32)))  # type: ignore[no-untyped-call]
    bits = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1  # [rows, blocks, 8, 32]
    codes = codes.flatten(-2) | (bits.flatten(-2) << 4)
    return codes.to(torch.int8), *_scales_of_k(blocks), 32


def _q6_k(blocks: torch.Tensor) -> _Decoded:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)  # type: ignore[no-untyped-call]
    pairs = blocks[..., 128:192].unflatten(-1, (2, 1, 32))  # type: ignore[no-untyped-call]
    high = ((pairs >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3).flatten(-3)
    codes = (low | (high << 4)).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return codes, _half(blocks, 208) * scales, None, 16


_DECODERS: Final[Mapping[str, Callable[[torch.Tensor], _Decoded]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
#: Of the types with 4-bit codes; the others have codes of 8 bits.
_TABLES: Final[Mapping[str, tuple[int, ...]]] = {
    "Q4_0": tuple(range(-8, 8)),
    "Q4_1": tuple(range(16)),
    "Q4_K": tuple(range(16)),
}
