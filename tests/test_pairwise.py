from itertools import combinations, product

import pytest

from tests.pairwise import pairwise_rows


@pytest.mark.parametrize("sizes", [(3,), (4, 2), (8, 2, 6, 2), (3, 3, 3, 3, 3), (1, 5, 1, 2)])
def test_every_pair_of_values_meets(sizes):
    rows = pairwise_rows(sizes)
    for i, j in combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(range(sizes[i]), range(sizes[j])))
    assert {row[0] for row in rows} == set(range(sizes[0]))
    two_largest = sorted((*sizes, 1))[-2:]
    assert two_largest[0] * two_largest[1] <= len(rows) <= 2 * two_largest[0] * two_largest[1]
