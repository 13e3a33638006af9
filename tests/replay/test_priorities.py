"""Leaves against a naive twin: priorities clipped from below, and the weight of an age."""

import itertools
import math

import numpy as np
import pytest

from zapex import Column, PrioritizedReplay, Schema
from zapex.chunks.keys import OFFSET_BITS
from zapex.errors import ConfigError
from zapex.replay.priorities import LEAST_WEIGHT

SCHEMA = Schema({"obs": Column((), np.int64), "action": Column((), np.int64)}, n_step=1)
CAPACITY, CHUNK = 96, 8
RULES = [(0.0, 0.0), (0.5, 0.0), (0.0, 3.0), (0.5, 40.0)]  # floor, recency


class Naive:
    """Every transition by its key, with its |priority| and its age from lists."""

    def __init__(self, replay):
        self.replay, self.core = replay, replay.core
        self.rows = {}  # key: [|priority|, the number of its chunk's first transition]
        self.first, self.number = {}, 0

    def insert(self, priorities):
        count, zeros = len(priorities), np.zeros(len(priorities), np.int64)
        keys = self.replay.extend(
            obs=zeros, action=zeros, reward=zeros, next_obs=zeros, terminated=zeros > 0,
            priorities=priorities,
        )  # fmt: skip
        for key, priority in zip(keys.tolist(), priorities, strict=True):
            chunk = self.first.setdefault(key >> OFFSET_BITS, self.number)
            self.rows[key] = [abs(priority), chunk]
            self.number += 1
        assert count == len(keys)

    def update(self, keys, priorities):
        self.replay.update_priorities(keys, priorities)
        for key, priority in zip(keys.tolist(), priorities, strict=True):
            self.rows[key][0] = abs(priority)

    def leaves(self):
        """By key, of the transitions that are there: 1 for a priority of 1 that comes next."""
        core, found = self.core, {}
        for key, (priority, chunk) in self.rows.items():
            if core.store.holds(key):
                age = self.number - chunk
                leaf = max(priority + core.eps, core.floor) ** core.alpha
                found[key] = leaf * math.exp(-core.recency * age / core.layout.capacity)
        return found

    def check(self):
        """The tree has these leaves and no others."""
        core, wanted = self.core, self.leaves()
        assert core.tree.check_valid() == (True, "")
        assert len(wanted) == len(core)
        draw = core.draw(len(core), "without_replacement")
        there = dict(zip(draw.keys.tolist(), draw.leaves, strict=True))
        assert there.keys() == wanted.keys()
        for key, leaf in wanted.items():
            assert there[key] == pytest.approx(leaf, rel=1e-9)
        assert draw.total == pytest.approx(sum(wanted.values()), rel=1e-9)
        assert draw.smallest == pytest.approx(min(wanted.values()), rel=1e-9)


def new(floor, recency, **settings):
    return PrioritizedReplay(
        CAPACITY, SCHEMA, 0.6, 1e-3, seed=1, chunk=CHUNK, floor=floor, recency=recency, **settings
    )


def played(floor, recency, rounds):
    rng, twin = np.random.default_rng(3), Naive(new(floor, recency))
    for _ in range(rounds):
        twin.insert(rng.normal(size=rng.integers(1, 20)))
        keys = rng.choice(list(twin.leaves()), 5, replace=False)
        twin.update(keys, rng.normal(size=5))
        twin.check()
    return twin


@pytest.mark.parametrize(("floor", "recency"), RULES)
def test_leaves_are_those_of_the_twin(floor, recency):
    twin = played(floor, recency, 80)
    assert twin.number > 6 * CAPACITY
    weight = twin.core._weight
    if recency == 40.0:  # e^(6 * 40) is far above 2^64: all were made smaller, more than once
        assert LEAST_WEIGHT / 2 < weight < 1.0
    if recency == 0.0:
        assert weight == LEAST_WEIGHT


@pytest.mark.parametrize(("floor", "recency"), RULES[1:])
def test_draws_have_the_twins_probabilities(floor, recency):
    """Chi-square, with a bound five standard deviations above its mean."""
    twin = played(floor, min(recency, 5.0), 30)
    leaves, draws = twin.leaves(), 40_000
    drawn, counts = twin.core.draw(draws, "independent").keys, dict.fromkeys(leaves, 0)
    for key, count in zip(*np.unique(drawn, return_counts=True), strict=True):
        counts[int(key)] += int(count)
    wanted = np.array(list(leaves.values())) / sum(leaves.values()) * draws
    found = np.array(list(counts.values()))
    common = wanted > 5
    statistic = (((found - wanted) ** 2) / wanted)[common].sum()
    freedom = common.sum() - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_equal_priorities_are_drawn_by_age_alone():
    """The truncated geometric distribution, over chunks."""
    twin = Naive(new(0.0, 2.0))
    for _ in range(4):
        twin.insert(np.ones(CAPACITY // 2))
    by_chunk = {}
    for key, leaf in twin.leaves().items():
        by_chunk.setdefault(twin.rows[key][1], set()).add(leaf)
    leaves = [by_chunk[first] for first in sorted(by_chunk)]
    assert all(len(one) == 1 for one in leaves)
    ratios = {max(b) / max(a) for a, b in itertools.pairwise(leaves)}
    for ratio in ratios:
        assert ratio == pytest.approx(math.exp(2.0 * CHUNK / CAPACITY))
    twin.check()


def test_a_transition_without_a_priority_gets_the_largest_recent_one_at_its_own_age():
    replay = new(0.0, 5.0)
    twin = Naive(replay)
    twin.insert(np.array([4.0, 1.0, 1.0]))
    zeros = np.zeros(50, np.int64)
    keys = replay.extend(
        obs=zeros, action=zeros, reward=zeros, next_obs=zeros, terminated=zeros > 0
    )
    for key in keys.tolist():
        chunk = twin.first.setdefault(key >> OFFSET_BITS, twin.number)
        twin.rows[key] = [4.0, chunk]
        twin.number += 1
    twin.check()


def test_a_snapshot_keeps_the_ages(tmp_path):
    twin = played(0.5, 40.0, 30)
    twin.replay.save(tmp_path)
    loaded = PrioritizedReplay.load(tmp_path)
    assert (loaded.core.floor, loaded.core.recency) == (0.5, 40.0)
    for _ in range(3):
        mine, theirs = twin.core.draw(16), loaded.core.draw(16)
        np.testing.assert_array_equal(mine.leaves, theirs.leaves)
        assert mine.total == theirs.total


def test_memory_that_outlives_its_process_keeps_the_ages():
    from zapex.chunks.batch import aligned_zeros
    from zapex.replay.core import ReplayCore, ReplayLayout

    layout = ReplayLayout(SCHEMA, CAPACITY, chunk=CHUNK)
    memory = aligned_zeros(layout.nbytes)
    first = PrioritizedReplay(
        CAPACITY, SCHEMA, 0.6, 1e-3, seed=1, streams=layout.streams, chunk=CHUNK, recency=9.0,
        buffer=memory,
    )  # fmt: skip
    twin = Naive(first)
    for last in (0.5, 1.0, 1.5, 2.0):
        twin.insert(np.linspace(0.1, last, CAPACITY // 2))
    again = ReplayCore(layout, 0.6, 1e-3, 1, buffer=memory, recency=9.0)
    assert again.total == pytest.approx(first.core.total, rel=1e-9)
    assert again._recent[0] == pytest.approx((2.0 + 1e-3) ** 0.6, rel=1e-2)


@pytest.mark.parametrize("name", ["floor", "recency"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_rule_that_is_no_number_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        PrioritizedReplay(CAPACITY, SCHEMA, chunk=CHUNK, **{name: value})
