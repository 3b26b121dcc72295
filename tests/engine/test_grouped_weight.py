"""The form of quantised weights: what codes, tables, scales and offsets mean, and how numbers are rounded to it."""

from __future__ import annotations

import pytest
import torch

from engine.grouped_weight import TABLE, GroupedWeight, pack_nibbles, round_to_4_bits, round_to_8_bits, unpack_nibbles


def test_a_weight_is_scale_times_level_minus_offset() -> None:
    table = torch.arange(16, dtype=torch.int8) - 3
    codes = torch.randint(0, 16, (3, 40))
    scales, offsets = torch.rand(3, 3), torch.rand(3, 3)
    weight = GroupedWeight.of_codes(codes, scales, 16, offsets=offsets, table=table)
    for n, k in ((0, 0), (1, 15), (1, 16), (2, 39)):
        expected = scales[n, k // 16] * float(codes[n, k] - 3) - offsets[n, k // 16]
        assert float(weight.decode()[n, k]) == float(expected)
    assert weight.bits == 4
    assert weight.nbytes == 3 * (20 + 12 + 12)

    eight = GroupedWeight.of_codes(torch.tensor([[-128, 127]]), torch.tensor([[0.5]]), 64)
    assert eight.decode().tolist() == [[-64.0, 63.5]]
    assert eight.bits == 8


def test_groups_must_be_whole_sixteens_and_have_a_scale_each() -> None:
    codes = torch.zeros(2, 40)
    with pytest.raises(ValueError, match="groups of 24 inputs"):
        GroupedWeight.of_codes(codes, torch.ones(2, 2), 24)
    with pytest.raises(ValueError, match=r"scales \(2, 2\)"):
        GroupedWeight.of_codes(codes, torch.ones(2, 2), 16)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_nibbles_come_back(count: int) -> None:
    codes = torch.randint(0, 16, (3, count), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes))[:, :count], codes)


def test_4_bits_leave_less_error_than_the_best_even_steps() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    weight[5] = 0.0
    weight[6] *= 1e-20
    found = round_to_4_bits(weight)
    assert found.table is not None
    assert found.table.tolist() == list(TABLE)
    error = (found.decode() - weight).square().sum(1)
    groups = weight.view(64, 4, 64)
    best = torch.full((64, 4), torch.inf)
    for share in torch.linspace(0.7, 1.1, 21):
        scale = groups.abs().amax(2, keepdim=True) / 7.5 * share
        even = (groups / scale.clamp_min(1e-30)).round().clamp(-8, 7) * scale
        best = best.minimum((even - groups).square().sum(2))
    assert bool((error[:5] < best.sum(1)[:5]).all())
    assert bool((found.decode()[5] == 0).all())
    assert 0 < float(found.decode()[6].abs().max()) < 1e-18


def test_8_bits_are_steps_of_a_group() -> None:
    weight = torch.randn(4, 100)
    found = round_to_8_bits(weight)
    steps = torch.stack([weight[:, :64].abs().amax(1), weight[:, 64:].abs().amax(1)], 1) / 127
    assert torch.equal(found.scales, steps)
    assert bool(((found.decode() - weight).abs() <= steps.repeat_interleave(64, 1)[:, :100] * 0.5001).all())
