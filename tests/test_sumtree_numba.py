"""The sum tree against its naive twin, against exact sums, and against bad input."""

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.naive import NaiveSumTree
from zapex.errors import (
    ConfigError,
    InvalidIndex,
    InvalidPriority,
    NotEnoughData,
    SharedMemoryError,
)
from zapex.sumtree_numba import (
    MINIMA_BLOCK,
    SumTree,
    _spin,
    _walk_line,
    find_kernel,
    level_offsets,
    priority_limit,
)

CAPACITIES = [1, 2, 7, 8, 9, 63, 64, 65, 513, 5000]


def aligned(size):
    """Writeable memory, 64-byte aligned."""
    raw = np.zeros(size + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size]


def tree_of(leaves):
    tree = SumTree(len(leaves), aligned(SumTree.required_bytes(len(leaves))))
    tree.update(np.arange(len(leaves)), np.asarray(leaves, float))
    return tree


def leaves_of(tree):
    return tree[np.arange(tree.capacity)]


def state_of(tree):
    """Every byte of a tree."""
    return tree._nodes.tobytes()


def assert_valid(tree):
    valid, reason = tree.check_valid()
    assert valid, reason


# -- against the twin ------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_integer_priorities_are_found_exactly(capacity) -> None:
    rng = np.random.default_rng(capacity)
    tree, naive = SumTree(capacity), NaiveSumTree(capacity)
    for _ in range(20):
        n = int(rng.integers(1, 2 * capacity + 2))
        indices, priorities = rng.integers(0, capacity, n), rng.integers(0, 5, n).astype(float)
        tree.update(indices, priorities)
        naive.update(indices.tolist(), priorities.tolist())
        assert leaves_of(tree).tolist() == naive.leaves
        assert tree.total == naive.total
        if naive.total > 0:
            sums = rng.integers(-1, int(naive.total) + 2, 20).astype(float)
            assert tree.find(sums).tolist() == naive.find(sums)


PRIORITY = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-9, 1e9))
BATCH = st.lists(st.tuples(st.integers(0, 199), PRIORITY), min_size=1, max_size=60)


@given(capacity=st.integers(1, 200), batches=st.lists(BATCH, max_size=8), seed=st.integers(0, 99))
@settings(derandomize=True, max_examples=80, deadline=None)
def test_any_sequence_of_operations_agrees_with_the_twin(capacity, batches, seed) -> None:
    rng = np.random.default_rng(seed)
    tree, naive = SumTree(capacity), NaiveSumTree(capacity)
    for batch in batches:
        indices = [index % capacity for index, _ in batch]
        tree.update(indices, [priority for _, priority in batch])
        naive.update(indices, [priority for _, priority in batch])
        if rng.random() < 0.5:  # a query changes which minima are known
            assert tree.min_positive == naive.min_positive
        assert_valid(tree)
        assert leaves_of(tree).tolist() == naive.leaves
        total = naive.total
        slack = 4 * np.spacing(total)
        assert abs(tree.total - total) <= slack
        if total == 0.0:
            continue
        sums = np.append(rng.random(20) * total, [0.0, -1.0, total + 4 * slack, np.inf])
        found = tree.find(sums)
        assert (tree[found] > 0.0).all()
        assert (naive.find(sums - slack) <= found).all()
        assert (found <= naive.find(sums + slack)).all()
        for method in ("stratified", "independent", "without_replacement"):
            n = sum(leaf > 0 for leaf in naive.leaves)
            before = state_of(tree)
            drawn, probabilities = tree.sample(n, rng, method)
            assert state_of(tree) == before
            exact = np.array([naive.leaves[i] for i in drawn]) / total
            assert np.allclose(probabilities, exact, rtol=1e-14)
            assert (exact > 0.0).all()
            assert method != "without_replacement" or len(set(drawn.tolist())) == n


def test_of_equal_indices_the_last_wins() -> None:
    tree = tree_of([0.0] * 100)
    tree.update([7, 3, 7, 7, 3], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert (tree[7], tree[3], tree.total) == (4.0, 5.0, 9.0)


def test_past_the_total_is_the_last_positive_leaf_wherever_zeros_stand() -> None:
    for last in range(0, 600, 37):
        leaves = np.zeros(600)
        leaves[[last, last // 2]] = 1.0
        tree = tree_of(leaves)
        assert tree.find([tree.total, 1e300, np.inf]).tolist() == [last] * 3
        assert tree.find([-1.0, 0.0]).tolist() == [last // 2] * 2


def test_the_smallest_positive_leaf_is_known_while_it_comes_and_goes() -> None:
    capacity = 3 * MINIMA_BLOCK + 5
    rng = np.random.default_rng(0)
    tree, leaves = SumTree(capacity), np.zeros(capacity)
    assert tree.min_positive == np.inf
    for _ in range(300):
        indices = np.unique(rng.integers(0, capacity, 40))
        indices = np.append(indices, leaves.argmin())
        priorities = rng.integers(0, 4, len(indices)) * rng.choice([0.5, 1.0, 7.0])
        tree.update(indices, priorities)
        leaves[indices] = priorities
        assert tree.min_positive == np.min(leaves[leaves > 0.0], initial=np.inf)
    assert_valid(tree)


def test_a_block_whose_smallest_leaf_goes_is_searched_and_no_other() -> None:
    leaves = np.full(3 * MINIMA_BLOCK, 20.0)
    leaves[:MINIMA_BLOCK] = 10.0
    leaves[[MINIMA_BLOCK, MINIMA_BLOCK + 5, 2 * MINIMA_BLOCK - 1]] = 5.0, 3.0, 4.0
    tree = tree_of(leaves)
    for index, smallest in ((MINIMA_BLOCK + 5, 4.0), (2 * MINIMA_BLOCK - 1, 5.0),
                            (MINIMA_BLOCK, 10.0)):  # fmt: skip
        tree.update([index], [0.0])
        assert tree.min_positive == smallest
        assert_valid(tree)


def test_a_prefix_sum_at_or_above_the_total_leaves_an_infinite_rest() -> None:
    tree = tree_of([2.0, 0.0, 3.0] * 30)
    rests, indices = np.array([-1.0, 0.5, 4.0, 149.5, 150.0, 1e9]), np.empty(6, np.int64)
    assert find_kernel(*tree.arrays[:2], rests, indices)
    assert indices.tolist() == [0, 0, 2, 89, 89, 89]
    assert rests.tolist() == [0.0, 0.5, 2.0, 2.5, np.inf, np.inf]


def test_a_line_is_walked_to_its_last_positive_leaf_at_or_above_its_sum() -> None:
    line = np.array([1.0, 0.0, 2.0, 0.0, 4.0, 0.0, 0.0, 0.0])
    for rest, lane, left in ((0.5, 0, 0.5), (1.0, 2, 0.0), (6.5, 4, 3.5), (7.0, 4, np.inf)):
        assert _walk_line(line, np.uint64(0), rest) == (lane, left)


# -- the right probabilities -----------------------------------------------------------------------


def assert_chi_square(counts, expected):
    """Pearson's statistic below its 1 - 1e-6 quantile (Wilson and Hilferty 1931)."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = len(counts) - 1
    spread = 2 / (9 * degrees)
    assert statistic < degrees * (1 - spread + 4.75 * spread**0.5) ** 3


def spread_leaves(count, alpha, seed):
    """Priorities over nine orders of magnitude, to the power of alpha; every seventh is zero."""
    leaves = (10.0 ** np.random.default_rng(seed).uniform(-9, 0, count)) ** alpha
    leaves[::7] = 0.0
    return leaves


SIZES = [
    1000,
    100_000,
    pytest.param(2**21, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("count", SIZES)
def test_draws_follow_the_priorities(count, alpha) -> None:
    leaves = spread_leaves(count, alpha, seed=count)
    tree, rng = tree_of(leaves), np.random.default_rng(1)
    exact = leaves / leaves.sum()
    draws = {"independent": 20 * 100_000, "stratified": 20 * 100_000}
    for method, n in draws.items():
        drawn = np.concatenate([tree.sample(100_000, rng, method)[0] for _ in range(n // 100_000)])
        counts = np.bincount(drawn, minlength=count)
        assert not counts[leaves == 0.0].any()
        # Groups of neighbours, and groups of the like-sized, each of a mass that can be tested.
        for order in (np.arange(count), np.argsort(leaves, kind="stable")):
            mass = np.cumsum(exact[order])
            groups = np.minimum((mass * 200).astype(int), 199)
            grouped = np.bincount(groups, weights=exact[order]) * n
            observed = np.bincount(groups, weights=counts[order])
            some = grouped > 0.0
            assert_chi_square(observed[some], grouped[some])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("count", SIZES)
def test_every_positive_item_can_be_drawn_and_no_other(count, alpha) -> None:
    leaves = spread_leaves(count, alpha, seed=count)
    tree = tree_of(leaves)
    positive = np.flatnonzero(leaves)
    # Sums of the positive items' leaves before each, with eleven more bits than the tree's.
    before = np.cumsum(leaves.astype(np.longdouble)) - leaves
    middles = (before + leaves / 2)[positive].astype(float)
    assert np.array_equal(tree.find(middles), positive)


def test_one_draw_comes_from_each_part_of_the_total() -> None:
    tree = tree_of(np.ones(1000))
    drawn, probabilities = tree.sample(100, np.random.default_rng(0))
    assert (drawn // 10).tolist() == list(range(100))
    assert (probabilities == 1 / 1000).all()


def test_the_generator_is_splitmix64() -> None:
    assert int(_spin(np.uint64(0))) == 0xE220A8397B1DCDAF
    assert int(_spin(np.uint64(1234567))) == 6457827717110365317


def naive_distinct(leaves, uniforms):
    """Draws without replacement from `leaves`, by plain sums; those left over by SplitMix64."""

    def find(rest, prefix):
        below = np.cumsum(rest) <= prefix
        return int(np.argmin(below)) if not below.all() else int(np.flatnonzero(rest)[-1])

    rest, drawn = leaves.astype(float), []
    for prefix in uniforms * leaves.sum():
        drawn += [] if (found := find(leaves, prefix)) in drawn else [found]
    rest[drawn] = 0.0
    spun = np.uint64(0)
    for bits in uniforms.view(np.uint64):
        spun = np.uint64(_spin(spun ^ bits))
    while len(drawn) < len(uniforms) and rest.any():
        spun = np.uint64(_spin(spun))
        found = find(rest, int(spun >> np.uint64(11)) * 2.0**-53 * rest.sum())
        drawn.append(found)
        rest[found] = 0.0
    return drawn


@pytest.mark.parametrize("capacity", [3, 8, 70, 600, 5000])
def test_without_replacement_draws_are_the_naive_twins(capacity) -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        leaves = rng.integers(0, 3, capacity) * (10 if seed % 2 else 1)
        leaves[rng.integers(capacity)] = 1 + 900 * (seed % 3)  # often drawn again
        tree, n = tree_of(leaves), min(int((leaves > 0).sum()), 1 + seed)
        before = state_of(tree)
        twin = naive_distinct(leaves, np.random.default_rng(seed).random(n))
        drawn, shares = tree.sample(n, np.random.default_rng(seed), "without_replacement")
        assert drawn.tolist() == twin
        assert (shares == leaves[twin] / leaves.sum()).all()
        assert state_of(tree) == before


@pytest.mark.slow
def test_the_total_is_exact_after_a_hundred_million_updates() -> None:
    capacity, batch = 2**17, 10_000
    rng = np.random.default_rng(0)
    tree = SumTree(capacity)
    for _ in range(100_000_000 // batch):
        tree.update(rng.integers(0, capacity, batch), rng.random(batch) * 10.0)
    naive = NaiveSumTree(capacity)
    naive.leaves = leaves_of(tree).tolist()
    assert abs(tree.total - naive.total) <= 4 * np.spacing(naive.total)
    assert_valid(tree)


# -- memory ----------------------------------------------------------------------------------------


def test_a_tree_over_a_map_is_found_again_by_who_attaches() -> None:
    rng = np.random.default_rng(0)
    memory = mmap.mmap(-1, SumTree.required_bytes(1000))
    leaves = rng.random(1000) * rng.integers(0, 2, 1000)
    first = SumTree(1000, memory)
    first.update(np.arange(1000), leaves)
    second = SumTree.attach(1000, memory)
    assert_valid(second)
    assert np.array_equal(leaves_of(second), leaves)
    assert second.min_positive == leaves[leaves > 0].min()


@pytest.mark.parametrize(("capacity", "damage"), [(1000, -5.0), (2 * MINIMA_BLOCK + 3, 5.0)])
def test_attaching_mends_everything_but_the_leaves(capacity, damage) -> None:
    memory = aligned(SumTree.required_bytes(capacity))
    tree = SumTree(capacity, memory)
    tree.update(np.arange(capacity), np.arange(float(capacity)))
    nodes = memory.view(np.float64)
    nodes[capacity:] = damage
    nodes[17] *= -1.0  # its owner died while it was drawn without replacement
    again = SumTree.attach(capacity, memory)
    assert_valid(again)
    assert np.array_equal(leaves_of(again), np.arange(float(capacity)))


def test_damage_is_named() -> None:
    offsets = level_offsets(1001)
    for at, value, says in (
        (3, np.nan, "I1: leaf 3"),
        (3, -1.0, "I1: leaf 3"),
        (1003, 1.0, "I1: level 0"),
        (offsets[1] + 2, 0.5, "I2: entry 2 of level 1"),
        (offsets[-3], 7.0, f"I2: entry 0 of level {len(offsets) - 3}"),
        (offsets[-2], 2.0, "I3: block 0"),
    ):
        tree = tree_of(np.ones(1001))
        tree._nodes[at] = value
        valid, reason = tree.check_valid()
        assert not valid
        assert reason.startswith(says)


def test_a_tree_takes_a_seventh_more_than_its_leaves() -> None:
    assert 8 / 7 <= SumTree.required_bytes(2**20) / (8 * 2**20) < 8 / 7 + 0.001


def test_memory_that_cannot_hold_the_tree_is_refused() -> None:
    size = SumTree.required_bytes(100)
    read_only = aligned(size)
    read_only.flags.writeable = False
    for memory, says in (
        (aligned(size - 8), f"needs {size} bytes"),
        (aligned(size + 8)[8:], "aligned"),
        (read_only, "read-only"),
    ):
        with pytest.raises(SharedMemoryError, match=says):
            SumTree(100, memory)
    garbage = aligned(size)
    garbage.view(np.float64)[5] = np.nan
    with pytest.raises(SharedMemoryError, match="not priorities"):
        SumTree.attach(100, garbage)


def test_attaching_takes_leaves_up_to_the_largest_priority() -> None:
    memory, most = aligned(SumTree.required_bytes(100)), priority_limit(100)
    leaves = memory.view(np.float64)[:100]
    leaves[:] = most
    assert np.isfinite(SumTree.attach(100, memory).total)
    leaves[99] = np.nextafter(most, np.inf)
    with pytest.raises(SharedMemoryError, match="not priorities"):
        SumTree.attach(100, memory)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, -1, 2.5, "many"])
def test_a_capacity_that_is_no_positive_integer_is_refused(capacity) -> None:
    with pytest.raises(ConfigError, match="positive integer"):
        SumTree(capacity)


@pytest.mark.parametrize(
    ("indices", "priorities", "error"),
    [
        ([1, 50], [1.0, 1.0], InvalidIndex),
        ([1, -1], [1.0, 1.0], InvalidIndex),
        ([1, 2], [1.0, np.nan], InvalidPriority),
        ([1, 2], [1.0, np.inf], InvalidPriority),
        ([1, 2], [1.0, -1e-9], InvalidPriority),
        ([1, 2], [1.0, 1e307], InvalidPriority),
        ([1, 2], [1.0], ConfigError),
        ([[1, 2]], [[1.0, 1.0]], ConfigError),
        ([1.0, 2.0], [1.0, 1.0], ConfigError),
        ([1, 2], ["high", "low"], ConfigError),
    ],
)
def test_a_bad_update_changes_nothing(indices, priorities, error) -> None:
    tree = tree_of(np.arange(50.0))
    before = state_of(tree)
    with pytest.raises(error):
        tree.update(indices, priorities)
    assert state_of(tree) == before


@pytest.mark.parametrize("capacity", [1, 8, 1000])
def test_the_largest_priority_leaves_room_for_the_total_and_the_next_is_refused(capacity) -> None:
    largest = np.finfo(np.float64).max / (2 * capacity)
    tree = tree_of(np.full(capacity, largest))
    assert np.isfinite(tree.total)
    with pytest.raises(InvalidPriority, match="nothing was updated"):
        tree.update([0], [np.nextafter(largest, np.inf)])


def test_what_cannot_be_drawn_is_one_clear_error() -> None:
    rng = np.random.default_rng(0)
    empty, tree = SumTree(50), tree_of([0.0, 1.0, 0.0, 2.0])
    before = state_of(tree)
    for method in ("stratified", "independent", "without_replacement"):
        with pytest.raises(NotEnoughData, match="every priority is 0"):
            empty.sample(1, rng, method)
        with pytest.raises(ConfigError, match="at least 1"):
            tree.sample(0, rng, method)
    with pytest.raises(NotEnoughData, match="only 2 have"):
        tree.sample(3, rng, "without_replacement")
    with pytest.raises(ConfigError, match="method"):
        tree.sample(3, rng, "sorted")
    with pytest.raises(NotEnoughData):
        empty.find([0.0])
    with pytest.raises(ConfigError, match="NaN"):
        tree.find([np.nan])
    with pytest.raises(InvalidIndex, match="got 4"):
        tree[4]
    assert state_of(tree) == before


def test_inputs_of_other_types_mean_the_same() -> None:
    tree = SumTree(10)
    tree.update(3, 2.5)
    tree.update(np.array([1, 2], np.int32), np.array([1, 2], np.float32))
    tree.update(np.arange(10)[::2][2:4], [4, 6])
    frozen = np.array([5])
    frozen.flags.writeable = False
    tree.update(frozen, np.ones(1))
    tree.update([], [])
    assert list(tree) == [0.0, 1.0, 2.0, 2.5, 4.0, 1.0, 6.0, 0.0, 0.0, 0.0]
    assert len(tree) == tree.capacity == 10
    assert tree.leaves.tolist() == list(tree)
    with pytest.raises(ValueError, match="read-only"):
        tree.leaves[0] = 1.0


# -- with and without JIT --------------------------------------------------------------------------

SCRIPT = """
import hashlib, numpy as np
from zapex.sumtree_numba import SumTree
rng, digest, tree = np.random.default_rng(0), hashlib.sha256(), SumTree(700)
for turn in range(12):
    n = int(rng.integers(1, 90))
    tree.update(rng.integers(0, 700, n), 10.0 ** rng.uniform(-9, 9, n) * rng.integers(0, 2, n))
    for method in ("stratified", "independent", "without_replacement"):
        for drawn in tree.sample(1 + turn // 6, rng, method):
            digest.update(drawn.tobytes())
    digest.update(tree.find(np.append(rng.random(9), 2.0) * tree.total).tobytes())
    digest.update(np.float64(tree.min_positive).tobytes() + tree._nodes.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.timeout(400)  # may compile, beside other tests
def test_kernels_do_the_same_to_the_bit_without_jit() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "NUMBA_DISABLE_JIT": disabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for disabled in ("0", "1")
    }
    assert len(digests) == 1
