"""Tables of test cases: every pair of values in each push, every combination in the exhaustive run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

#: A value's index on each axis.
Row = tuple[int, ...]


def pairwise_rows(sizes: Sequence[int]) -> list[Row]:
    """Rows of the full product of axes of these sizes in which any two values of two axes meet at least once.

    Greedy: each row is the first that adds the most pairs.
    """
    axes = list(combinations(range(len(sizes)), 2)) or [(0, 0)]
    left = {(i, j, row[i], row[j]) for row in product(*map(range, sizes)) for i, j in axes}
    rows = []
    while left:
        rows.append(max(product(*map(range, sizes)), key=lambda row: len(_pairs_of(row, axes) & left)))
        left -= _pairs_of(rows[-1], axes)
    return sorted(rows)


def _pairs_of(row: Row, axes: Sequence[tuple[int, int]]) -> set[tuple[int, int, int, int]]:
    return {(i, j, row[i], row[j]) for i, j in axes}


def parametrize_pairwise(axes: Mapping[str, Sequence[Any]]) -> Callable[..., Any]:
    """Parametrize a test over the product of ``axes``; rows that no pair needs carry the marker ``exhaustive``.

    The name of an axis may be several names with commas between them; its values are tuples then.
    """
    chosen = set(pairwise_rows([len(values) for values in axes.values()]))
    params = []
    for row in product(*(range(len(values)) for values in axes.values())):
        values: list[Any] = []
        for (names, choices), i in zip(axes.items(), row, strict=True):
            values += choices[i] if "," in names else [choices[i]]
        params.append(pytest.param(*values, marks=() if row in chosen else pytest.mark.exhaustive))
    return pytest.mark.parametrize(",".join(axes), params)
