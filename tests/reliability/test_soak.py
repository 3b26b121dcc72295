"""A short ``make soak``, and that it notices growth."""

import asyncio

import pytest

from tests.reliability.sizes import MIB, Sizes
from tests.reliability.soak import soak, toys

pytestmark = pytest.mark.e2e


def test_a_mixed_load_leaves_nothing_behind():
    asyncio.run(soak(toys(), seconds=3, seed=3, num_tokens=60))


@pytest.mark.parametrize(
    ("rss", "fds", "is_flat"),
    [
        (range(100 * MIB, 400 * MIB, 5 * MIB), [9] * 60, False),
        ([100 * MIB] * 60, range(9, 69), False),
        ([100 * MIB, 900 * MIB, 100 * MIB] * 20, [9, 30, 9] * 20, True),
    ],
    ids=["memory grows", "descriptors grow", "flat"],
)
def test_growth_is_noticed(rss, fds, is_flat):
    sizes = Sizes()
    for sample in zip(rss, fds, strict=True):
        sizes.add(*sample)
    assert sizes.is_flat is is_flat
