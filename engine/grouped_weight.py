"""Weights of 4 or 8 bits with a scale for every group of inputs: the one form in which quantised weights are kept.

``w[n, k] = scales[n, g] · code[n, k] - offsets[n, g]`` with ``g = k // group``. A code of 8 bits is a whole number from
-128 to 127; one of 4 bits is looked up in a table of 16 such numbers. Every published format of that kind has numbers
that this form holds exactly; see :mod:`engine.quantised`.

Kernels either round activations to 8 bits and multiply whole numbers, or decode weights and multiply real ones. Only
the second is possible where codes are real numbers: e4m3, a table of 16 of them, or the weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F

#: Inputs that share a scale where weights are rounded here.
GROUP: Final = 64
#: What codes from 0 to 15 stand for: the levels that leave the least square error (Lloyd's condition) of 64 normal
#: numbers, scaled so that the one of largest magnitude is -127, rounded to whole numbers.
TABLE: Final = (-127, -99, -78, -61, -47, -33, -21, -9, 3, 15, 27, 40, 54, 69, 87, 110)
#: Of that scale: which are tried for each group.
_SHARES: Final = (0.92, 1.02)
_CODE_KINDS: Final = {torch.int8: 0, torch.float8_e4m3fn: 2, torch.float32: 3, torch.bfloat16: 3}
#: Weights that are rounded or decoded together: what bounds the memory it takes.
_AT_ONCE: Final = 2**18


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [out_features, in_features]."""

    out_features: int
    in_features: int
    #: Inputs of a group, a multiple of 16; the last group may be shorter.
    group: int
    #: 4 bits: uint8 [N, ceil(K / 2)], the first of two neighbours in the low half. 8 bits: int8 or float8_e4m3fn
    #: [N, K]. The weights themselves, without scales: float32 or bfloat16 [N, K].
    codes: torch.Tensor
    #: float32 [N, groups].
    scales: torch.Tensor
    #: float32 [N, groups], or None: zero.
    offsets: torch.Tensor | None = None
    #: int8 or float32 [16] where codes have 4 bits.
    table: torch.Tensor | None = None
    #: int32 [K]: which input each column of the codes belongs to; None: they are in order.
    order: torch.Tensor | None = None
    #: Activations are rounded to 8 bits.
    rounds: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Of grouped weights in general, whatever the bits: a key of ``engine.native.library.WEIGHT_DTYPES``."""
        return torch.uint8 if self.rounds else torch.uint16

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8 * self.codes.element_size() if self.table is None else 4

    @property
    def code_kind(self) -> int:
        """CodeKind of grouped.h: 0 whole numbers, 1 real ones by a table, 2 e4m3, 3 the weights themselves."""
        return int(self.table.is_floating_point()) if self.table is not None else _CODE_KINDS[self.codes.dtype]

    @property
    def num_groups(self) -> int:
        """Of each output."""
        return -(-self.in_features // self.group)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def decode(self) -> torch.Tensor:
        """float32 [N, K]: each weight by one multiplication and, with offsets, one subtraction."""
        if self.bits > 8:
            return self.codes.float()
        if self.table is None:
            whole = self.codes.float()
        else:  # both halves of a byte at once
            pairs = torch.stack([self.table.float().repeat(16), self.table.float().repeat_interleave(16)], 1)
            whole = pairs.index_select(0, self.codes.flatten().int()).view(self.out_features, -1)
        padded = self.num_groups * self.group
        whole = whole[:, :padded] if whole.shape[1] >= padded else F.pad(whole, (0, padded - whole.shape[1]))
        values = whole.reshape(self.out_features, -1, self.group).mul_(self.scales[:, :, None])
        if self.offsets is not None:
            values.sub_(self.offsets[:, :, None])
        values = values.flatten(1)[:, : self.in_features]
        return values.contiguous() if self.order is None else values[:, self.order.argsort()]

    def rows(self, order: torch.Tensor) -> GroupedWeight:
        """The same outputs in another order, int64 [N], or some of them."""
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(
            self, out_features=len(order), codes=self.codes[order], scales=self.scales[order], offsets=offsets
        )

    def parts(self) -> Iterator[GroupedWeight]:
        """Runs of outputs that can be decoded without much memory."""
        step = max(1, _AT_ONCE // self.in_features)
        for first in range(0, self.out_features, step):
            run = slice(first, first + step)
            offsets = None if self.offsets is None else self.offsets[run]
            codes = self.codes[run]
            yield replace(self, out_features=len(codes), codes=codes, scales=self.scales[run], offsets=offsets)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Real inputs [..., K] by the weight in their dtype, [..., N]; a run of outputs is decoded at a time.

        Products are float32: for bfloat16 torch keeps code for every number of rows, 80 MB for many experts.
        """
        y = x.new_empty(*x.shape[:-1], self.out_features)
        first = 0
        for part in self.parts():
            y[..., first : first + part.out_features] = F.linear(x.float(), part.decode().to(x.dtype).float())
            first += part.out_features
        return y

    @classmethod
    def of_codes(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        group: int,
        *,
        offsets: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> GroupedWeight:
        """A weight of codes [N, K]: from 0 to 15 with a table, else int8 or e4m3. Scales and offsets [N, groups].

        Raises:
            ValueError: the group is no multiple of 16 though there are several, or the scales are of another number.
        """
        num_outputs, num_inputs = codes.shape
        if group >= num_inputs:
            group = -(-num_inputs // 16) * 16
        if group % 16 or group < 1:
            raise ValueError(f"groups of {group} inputs, not of a multiple of 16")
        size = (num_outputs, -(-num_inputs // group))
        if scales.shape != size or (offsets is not None and offsets.shape != size):
            raise ValueError(f"scales {tuple(scales.shape)} for {size} groups")
        kept = pack_nibbles(codes) if table is not None else codes
        if not kept.is_floating_point() and table is None:
            kept = kept.to(torch.int8)
        if table is not None and not table.is_floating_point():
            table = table.to(torch.int8)
        return cls(
            num_outputs,
            num_inputs,
            group,
            kept.contiguous(),
            scales.float().contiguous(),
            None if offsets is None else offsets.float().contiguous(),
            None if table is None else table.contiguous(),
            None if order is None else order.to(torch.int32).contiguous(),
            rounds=not (kept if table is None else table).is_floating_point(),
        )

    @classmethod
    def plain(cls, weight: torch.Tensor) -> GroupedWeight:
        """A weight [N, K] of float32 or bfloat16 as it is."""
        num_outputs, num_inputs = weight.shape
        return cls(num_outputs, num_inputs, num_inputs, weight.contiguous(), torch.empty(num_outputs, 0), rounds=False)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, ceil(K / 2)] of codes [N, K] from 0 to 15, the first of two neighbours in the low half."""
    codes = F.pad(codes.to(torch.uint8), (0, codes.shape[1] % 2))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 2 B] of bytes [N, B]: the opposite of :func:`pack_nibbles`."""
    return torch.stack([packed & 15, packed >> 4], 2).flatten(1)


def round_to_4_bits(weight: torch.Tensor, dtype: torch.dtype | None = None) -> GroupedWeight:
    """A weight [N, K], in a dtype, on :data:`TABLE`, with scales that leave the least square error of those tried.

    For each share of the scale that takes a group's number of largest magnitude to -127, codes are the nearest of the
    table; the scale is then the one of least square error for those codes.
    """
    table = torch.tensor(TABLE, dtype=torch.int8)
    levels = table.float()
    borders = ((levels[1:] + levels[:-1]) / 2).tolist()

    def rounded(part: torch.Tensor) -> GroupedWeight:
        x = _groups(part, GROUP)  # [n, groups, GROUP]
        widest = x.gather(2, x.abs().argmax(2, keepdim=True)) / levels[0]
        best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        for share in _SHARES:
            scale = widest * share
            found = _count_above(x / scale.where(scale != 0, 1.0), borders)
            level = levels[found.int()]
            scale = (x * level).sum(2, keepdim=True) / level.square().sum(2, keepdim=True)
            error = (x - level * scale).square().sum(2, keepdim=True)
            if best is None:
                best = error, scale, found
            else:
                better = error < best[0]
                best = error.where(better, best[0]), scale.where(better, best[1]), found.where(better, best[2])
        assert best is not None
        codes = best[2].flatten(1)[:, : weight.shape[1]]
        return GroupedWeight.of_codes(codes, best[1][..., 0], GROUP, table=table)

    return _rounded(weight, dtype, rounded)


def round_to_8_bits(weight: torch.Tensor, group: int = GROUP, dtype: torch.dtype | None = None) -> GroupedWeight:
    """A weight [N, K], taken in a dtype, in steps of 1/127 of the largest magnitude of each group."""

    def rounded(part: torch.Tensor) -> GroupedWeight:
        x = _groups(part, group)
        scale = x.abs().amax(2) / 127
        scale = scale.where(scale > 0, 1.0)
        codes = (x / scale[:, :, None]).round().to(torch.int8).flatten(1)[:, : weight.shape[1]]
        return GroupedWeight.of_codes(codes, scale, group)

    return _rounded(weight, dtype, rounded)


def _rounded(
    weight: torch.Tensor, dtype: torch.dtype | None, rounded: Callable[[torch.Tensor], GroupedWeight]
) -> GroupedWeight:
    """A weight [N, K], taken in a dtype, rounded in runs of rows.

    Runs go straight to their place: kept until all are rounded, they would leave holes in the heap.
    """
    whole: GroupedWeight | None = None
    first, num_rows = 0, len(weight)
    for rows in torch.split(weight.detach(), max(1, _AT_ONCE // max(1, weight.shape[1]))):
        part = rounded(rows.to(dtype or rows.dtype).float())
        if whole is None:
            codes = part.codes.new_empty(num_rows, *part.codes.shape[1:])
            scales = part.scales.new_empty(num_rows, *part.scales.shape[1:])
            whole = replace(part, out_features=num_rows, codes=codes, scales=scales)
        whole.codes[first : first + len(rows)] = part.codes
        whole.scales[first : first + len(rows)] = part.scales
        first += len(rows)
    assert whole is not None
    return whole


def _count_above(x: torch.Tensor, borders: list[float]) -> torch.Tensor:
    """How many borders each number is above, uint8: faster than a search."""
    found = torch.zeros(x.shape, dtype=torch.uint8)
    for border in borders:
        found += x > border
    return found


def _groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[N, K] as [N, groups, group], padded with zeros."""
    padded = F.pad(weight, (0, -weight.shape[1] % group))
    return padded.reshape(weight.shape[0], -1, group).contiguous()
