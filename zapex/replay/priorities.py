"""Where priorities are applied: kernels that set leaves of the sum tree.

A leaf is (|priority| + eps)^alpha (Schaul et al. 2016, eq. 1), or 0 once its transition is evicted.
"""

from typing import Any

import numpy as np

from zapex.chunks.keys import LEAST_KEY, NO_KEY, indices_kernel
from zapex.machine.jit import kernel
from zapex.sumtree_numba import TreeArrays, priority_limit, update_kernel

REFUSED, NOT_A_KEY = -1, -2
RecentLargest = tuple[float, float, int]
"""The largest leaf that was given while the last `capacity` transitions came, the largest that was
given since (0: none), and how many transitions came since.

A transition without a priority gets the larger of the two. So an outlier is forgotten by the time
that the memory has filled twice, and each given priority counts for as long as its transition can
be in the memory."""
# Kernels take plain tuples, made once: to pass a NamedTuple takes one microsecond more.
SlotArrays = tuple[Any, int, int]
"""Headers of a store, chunk and shard: the kernels make a key of an index with these."""


@kernel
def forget_kernel(first: int, count: int, tree: TreeArrays) -> None:
    """Set the leaves of an evicted chunk to 0."""
    update_kernel(*tree, np.arange(first, first + count), np.zeros(count))


@kernel
def prioritise_kernel(
    indices: Any,
    magnitudes: Any,
    alpha: float,
    eps: float,
    capacity: int,
    recent: RecentLargest,
    tree: TreeArrays,
) -> RecentLargest:
    """Set leaves of new transitions: (|priority| + eps)^alpha, or the largest recent one.

    The latter if no priority is given. A negative, NaN or infinite number counts as not given: a
    wrong number of an actor must not stop the server. Returns `recent` after these transitions.
    """
    leaves = np.empty(len(indices))
    limit = priority_limit(tree[2])
    before, since, rows = recent
    for b in range(len(indices)):
        leaf = max(before, since)
        if magnitudes[b] >= 0.0:
            given = (magnitudes[b] + eps) ** alpha
            if given <= limit:
                leaf = given
                since = max(since, given)
        leaves[b] = leaf
        rows += 1
        if rows >= capacity and since > 0.0:
            before, since, rows = since, 0.0, 0
    update_kernel(*tree, indices, leaves)
    return before, since, rows


@kernel
def reprioritise_kernel(
    keys: Any, priorities: Any, alpha: float, eps: float, slots: SlotArrays, tree: TreeArrays
) -> tuple[int, int, float]:
    """Set the leaves of `keys` to (|priority| + eps)^alpha; of equal keys the last counts.

    Returns how many were applied, how many keys are stale (without those that are -1), and the
    largest leaf set. If a priority is not finite or too large: REFUSED, the row, and no change. If
    a key is an index: NOT_A_KEY, the row, and no change.
    """
    n = keys.shape[0]
    for b in range(n):
        if not abs(priorities[b]) < np.inf:
            return REFUSED, b, 0.0
        if 0 <= keys[b] < LEAST_KEY:
            return NOT_A_KEY, b, 0.0
    indices = np.empty(n, np.int64)
    fit = indices_kernel(keys, *slots, indices)
    leaves = np.empty(fit)
    at, stale, largest, row = 0, 0, 0.0, 0
    for b in range(n):
        if indices[b] < 0:
            stale += keys[b] != NO_KEY
            continue
        leaf = (abs(priorities[b]) + eps) ** alpha
        if leaf > largest:
            largest, row = leaf, b
        indices[at], leaves[at] = indices[b], leaf
        at += 1
    if not update_kernel(*tree, indices[:at], leaves):
        return REFUSED, row, 0.0
    return fit, stale, largest
