"""Random grouped weights."""

from __future__ import annotations

import torch

from engine.grouped_weight import GroupedWeight


def random_grouped(
    shape: tuple[int, int], bits: int, group: int, has_offsets: bool, *, generator: torch.Generator
) -> GroupedWeight:
    """Every code there is, from a table without order; scales and offsets of either sign."""
    k, n = shape
    group = min(group, -(-k // 16) * 16)
    size = (n, -(-k // group))
    scales = torch.randn(size, generator=generator) / k**0.5 / 64
    offsets = torch.randn(size, generator=generator) / k**0.5 if has_offsets else None
    if bits == 8:
        codes = torch.randint(-128, 128, (n, k), generator=generator)
        return GroupedWeight.of_codes(codes, scales, group, offsets=offsets)
    table = torch.tensor([-128, 127, 0, 1, -1, 2, 90, -90, 5, -77, 44, 3, -3, 66, -50, 17], dtype=torch.int8)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    order = torch.randperm(k, generator=generator) if group == 128 else None
    return GroupedWeight.of_codes(codes, scales, group, offsets=offsets, table=table, order=order)
