"""One sum tree alone in a fresh process: builds it, then works when told to.

Runs under any Python that has numpy and the contender:

    python benchmarks/peer_trees.py NAME CAPACITY SWEEP_BYTES

answers "ready VERSION" or "missing REASON", then each line "BATCH CALLS COLD" on stdin with a JSON
list of CALLS pairs [sample ns, update ns]. Every contender starts with the same priorities and does
the same work: draw BATCH indices with their priorities, then give them new ones. With COLD, before
each of the two the caches are swept and a call with one item fetches the code.
"""

import json
import os
import sys
import time
from importlib import metadata

import numpy as np

rng = np.random.default_rng(1)


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
        mass = rng.uniform(0.0, self.tree.query(0, self.size), size=n)
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
        indices = self.tree.get_prefix_sum_idx(rng.random(n) * self.tree.reduce())
        self.tree[indices]
        return indices

    def update(self, indices, priorities):
        self.tree[indices] = priorities


class Cpprb:
    """cpprb's PrioritizedReplayBuffer with one float32 column: its tree has no door of its own."""

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
        rest = rng.random(n) * self.tree[1]
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


def serve(name, capacity, sweep_bytes):
    contender = CONTENDERS[name]
    priorities = np.random.default_rng(0).random(capacity) + 1e-6
    try:
        tree = contender(priorities)
    except Exception as error:  # whatever it is, it is the reason why this one does not take part
        print("missing", f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        return
    version = "" if name == "zapex" else metadata.version(contender.package)
    print("ready", version, flush=True)
    memory = np.zeros(sweep_bytes // 8)
    for line in sys.stdin:
        batch, calls, cold = (int(word) for word in line.split())
        times = []
        for _ in range(calls):
            new = rng.random(batch) + 1e-6
            if cold:
                memory += 1.0
                tree.sample(1)
            start = time.perf_counter_ns()
            indices = tree.sample(batch)
            sampled = time.perf_counter_ns() - start
            if cold:
                memory += 1.0
                tree.update(indices[:1], new[:1])
            start = time.perf_counter_ns()
            tree.update(indices, new)
            times.append([sampled, time.perf_counter_ns() - start])
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
