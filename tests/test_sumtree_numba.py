"""The sum tree against its naive twin."""

import numpy as np
import pytest

from tests.naive import NaiveSumTree
from zapex.sumtree_numba import SumTree

CAPACITIES = [1, 2, 7, 8, 9, 63, 64, 65, 513, 5000]


def assert_same(tree: SumTree, naive: NaiveSumTree) -> None:
    valid, reason = tree.check_valid()
    assert valid, reason
    assert tree[np.arange(tree.capacity)].tolist() == naive.leaves
    assert tree.min_positive == naive.min_positive
    valid, reason = tree.check_valid()
    assert valid, reason


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_integer_priorities_are_found_exactly(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    tree, naive = SumTree(capacity), NaiveSumTree(capacity)
    for _ in range(20):
        n = int(rng.integers(1, 2 * capacity + 2))
        indices = rng.integers(0, capacity, n)
        priorities = rng.integers(0, 5, n).astype(float)
        tree.update(indices, priorities)
        naive.update(indices.tolist(), priorities.tolist())
        assert_same(tree, naive)
        assert tree.total == naive.total
        if naive.total > 0:
            sums = rng.integers(-1, int(naive.total) + 2, 20).astype(float)
            assert tree.find(sums).tolist() == [naive.find(s) for s in sums]
