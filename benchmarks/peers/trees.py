"""One sum tree alone in a fresh process: builds it, then works when told to.

    python -m benchmarks.peers.trees NAME CAPACITY SWEEP_BYTES

answers each line "BATCH CALLS COLD" with CALLS rows [sample ns, update ns, places];
places: the sum of the drawn indices, from which it can be seen who drew the same. Every contender
starts with the same priorities and does the same work: draw BATCH indices with their priorities,
then give them new ones. All draw from the same uniforms, so that they read the same places in the
same order: one from each of BATCH equal parts of the total, ascending. cpprb draws by itself, in
the same way. With COLD, before each of the two the caches are swept and a call with one item
fetches the code.
"""

import itertools
import os
import sys
import time

import numpy as np

from benchmarks.peers.serving import serve

rng = np.random.default_rng(1)


def fractions(n):
    """n places in [0, 1), one in each of n equal parts."""
    return (np.arange(n) + rng.random(n)) / n


class Zapex:
    """zapex.sumtree_numba.SumTree."""

    package = "zapex"

    def __init__(self, priorities):
        from zapex.sumtree_numba import SumTree

        self.tree = SumTree(len(priorities))
        self.tree.update(np.arange(len(priorities)), priorities)

    def sample(self, n):
        return self.tree.sample(n, rng)[0]

    def update(self, indices, priorities):
        self.tree.update(indices, priorities)


class TorchRL:
    """The C++ tree under torchrl's PrioritizedSampler, used as its sample() does."""

    package = "torchrl"
    dtype = np.float32

    def __init__(self, priorities):
        import torch  # its libraries must be there before the extension's

        torch.set_num_threads(1)
        # torchrl's wheels name symbols that other torch versions lack; the tree needs none of them.
        flags = sys.getdlopenflags()
        sys.setdlopenflags(os.RTLD_LAZY)
        try:
            from torchrl import _torchrl
        finally:
            sys.setdlopenflags(flags)
        bits = np.dtype(self.dtype).itemsize * 8
        self.size = len(priorities)
        self.tree = getattr(_torchrl, f"SumSegmentTreeFp{bits}")(self.size)
        self.update(np.arange(self.size), priorities)

    def sample(self, n):
        mass = fractions(n) * self.tree.query(0, self.size)
        indices = self.tree.scan_lower_bound(mass)
        self.tree[indices]
        return indices

    def update(self, indices, priorities):
        self.tree[indices] = priorities.astype(self.dtype)


class TorchRLFloat64(TorchRL):
    dtype = np.float64


class Tianshou:
    """tianshou's SegmentTree (Numba), used as its PrioritizedReplayBuffer does."""

    package = "tianshou"

    def __init__(self, priorities):
        from tianshou.data.utils.segtree import SegmentTree

        self.tree = SegmentTree(len(priorities))
        self.update(np.arange(len(priorities)), priorities)

    def sample(self, n):
        indices = self.tree.get_prefix_sum_idx(fractions(n) * self.tree.reduce())
        self.tree[indices]
        return indices

    def update(self, indices, priorities):
        self.tree[indices] = priorities


class Cpprb:
    """cpprb's PrioritizedReplayBuffer with one float32 column: its tree has no door of its own.

    So a column is copied and weights are computed, too, and the uniforms are its own.
    """

    package = "cpprb"

    def __init__(self, priorities):
        import cpprb

        self.buffer = cpprb.PrioritizedReplayBuffer(len(priorities), {"x": {}}, alpha=1.0)
        self.buffer.add(x=np.zeros(len(priorities), np.float32), priorities=priorities)

    def sample(self, n):
        return self.buffer.sample(n, 0.4)["indexes"]

    def update(self, indices, priorities):
        self.buffer.update_priorities(indices, priorities)


class PlainNumpy:
    """A binary tree in one float64 array, one level at a time over the batch."""

    package = "numpy"

    def __init__(self, priorities):
        self.leaves = 1 << (len(priorities) - 1).bit_length()
        self.depth = self.leaves.bit_length() - 1
        self.tree = np.zeros(2 * self.leaves)
        self.update(np.arange(len(priorities)), priorities)

    def sample(self, n):
        rest = fractions(n) * self.tree[1]
        node = np.ones(n, np.int64)
        for _ in range(self.depth):
            node *= 2
            left = self.tree[node]
            right = rest >= left
            rest -= np.where(right, left, 0.0)
            node += right
        self.tree[node]
        return node - self.leaves

    def update(self, indices, priorities):
        node = indices + self.leaves
        self.tree[node] = priorities
        for _ in range(self.depth):
            node = node >> 1
            self.tree[node] = self.tree[2 * node] + self.tree[2 * node + 1]


CONTENDERS = {
    "zapex": Zapex,
    "torchrl-float32": TorchRL,
    "torchrl-float64": TorchRLFloat64,
    "tianshou": Tianshou,
    "cpprb": Cpprb,
    "numpy": PlainNumpy,
}


turns = itertools.count(1)


def measure(tree, sweep, batch, calls, cold):
    times = []
    for turn in itertools.islice(turns, calls):
        seeded = np.random.default_rng(turn)
        new = seeded.random(batch) + 1e-6
        if cold:
            sweep()
            tree.sample(1)
        rng.bit_generator.state = seeded.bit_generator.state  # whatever was drawn before
        start = time.perf_counter_ns()
        indices = tree.sample(batch)
        sampled = time.perf_counter_ns() - start
        assert len(indices) == batch
        if cold:
            sweep()
            tree.update(indices[:1], new[:1])
        start = time.perf_counter_ns()
        tree.update(indices, new)
        updated = time.perf_counter_ns() - start
        times.append([sampled, updated, int(np.asarray(indices, np.int64).sum())])
    return times


def filled(contender):
    """Every contender starts with the same priorities."""
    return lambda capacity: contender(np.random.default_rng(0).random(capacity) + 1e-6)


if __name__ == "__main__":
    serve({name: filled(contender) for name, contender in CONTENDERS.items()}, measure)
