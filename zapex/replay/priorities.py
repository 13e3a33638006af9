"""Where priorities are applied: kernels that set leaves of the sum tree.

A leaf is max(|priority| + eps, floor)^alpha, or 0 once its transition is evicted. floor 0 is
Schaul et al. 2016, eq. 1; floor 1 clips as LAP does (Fujimoto et al. 2020, arXiv 2007.06049).

With recency R, a leaf counts exp(-R age / capacity) times as much. Its age is how many transitions
have come since its chunk began, and eviction ends it near the capacity N. So of transitions with
equal priorities, age a is drawn with the probability (1 - q) q^a / (1 - q^N), q = exp(-R / N): the
truncated geometric distribution of arXiv 2605.10236. Old leaves are not made smaller. New ones are
made larger (forward decay: Cormode et al. 2009), by a weight that all transitions of a chunk share
and that stands in its header. Before the weights reach 1, `fade_kernel` makes all of them smaller.
"""

from typing import Any

import numpy as np

from zapex.chunks.keys import LEAST_KEY, NO_KEY, indices_kernel
from zapex.chunks.layout import AGE_WEIGHT, HEADER_WORDS
from zapex.machine.jit import kernel
from zapex.sumtree_numba import TreeArrays, priority_limit, rebuild_kernel, update_kernel

REFUSED, NOT_A_KEY = -1, -2
LEAST_WEIGHT = 2.0**-64  # of a new transition
MOST_RECENCY = 40.0  # so a weight stays below 1 while one memory of transitions comes
# Kernels take plain tuples, made once: to pass a NamedTuple takes one microsecond more.
SlotArrays = tuple[Any, int, int]
"""Headers of a store, chunk and shard: the kernels make a key of an index with these."""
RecentLargest = tuple[float, float, int]
"""The largest leaf that was given while the last `capacity` transitions came, the largest that was
given since (0: none), and how many transitions came since.

A transition without a priority gets the larger of the two. So an outlier is forgotten by the time
that the memory has filled twice, and each given priority counts for as long as its transition can
be in the memory."""


@kernel
def forget_kernel(first: int, count: int, tree: TreeArrays) -> None:
    """Set the leaves of an evicted chunk to 0."""
    update_kernel(*tree, np.arange(first, first + count), np.zeros(count))


@kernel
def fade_kernel(scale: float, headers: Any, tree: TreeArrays) -> None:
    """Multiply leaves and weights by a power of two: that is exact, and changes no probability."""
    nodes, offsets, capacity = tree
    for i in range(capacity):
        nodes[i] *= scale
    rebuild_kernel(nodes, offsets, capacity)
    weights = headers.view(np.float64)
    for place in range(AGE_WEIGHT, weights.shape[0], HEADER_WORDS):
        weights[place] *= scale


@kernel
def prioritise_kernel(
    indices: Any,
    magnitudes: Any,
    alpha: float,
    eps: float,
    floor: float,
    capacity: int,
    recent: RecentLargest,
    tree: TreeArrays,
) -> RecentLargest:
    """Set leaves of new transitions, by their priority, or to the largest recent one.

    The latter if no priority is given. A negative, NaN or infinite number counts as not given: a
    wrong number of an actor must not stop the server. Returns `recent` after these transitions.
    """
    leaves = np.empty(len(indices))
    limit = priority_limit(tree[2])
    before, since, rows = recent
    for b in range(len(indices)):
        leaf = max(before, since)
        if magnitudes[b] >= 0.0:
            given = max(magnitudes[b] + eps, floor) ** alpha
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
def weigh_ages_kernel(
    indices: Any, growth: float, weight: float, slots: SlotArrays, tree: TreeArrays
) -> float:
    """Multiply leaves of new transitions by the weights of their ages. No index is there twice.

    A chunk gets its weight with its first transition. weight, growth: of the first of them, and how
    much larger the next one's is. Returns the weight of the transition that will be the next.
    """
    leaves = np.empty(len(indices))
    headers, chunk, _ = slots
    weights = headers.view(np.float64)
    for b in range(len(indices)):
        slot = indices[b] // chunk
        place = slot * HEADER_WORDS + AGE_WEIGHT
        if indices[b] == slot * chunk:
            weights[place] = weight
        leaves[b] = tree[0][indices[b]] * weights[place]
        weight *= growth
    update_kernel(*tree, indices, leaves)
    return weight


@kernel
def reprioritise_kernel(
    keys: Any,
    priorities: Any,
    alpha: float,
    eps: float,
    floor: float,
    aged: bool,
    slots: SlotArrays,
    tree: TreeArrays,
) -> tuple[int, int, float]:
    """Set the leaves of `keys` by their priorities; of equal keys the last counts.

    Returns how many were applied, how many keys are stale (without those that are -1), and the
    largest leaf set, without its age's weight. If a priority is not finite or too large: REFUSED,
    the row, and no change. If a key is an index: NOT_A_KEY, the row, and no change. aged: leaves
    have weights of their ages.
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
        leaf = max(abs(priorities[b]) + eps, floor) ** alpha
        if leaf > largest:
            largest, row = leaf, b
        indices[at], leaves[at] = indices[b], leaf
        at += 1
    if aged and largest <= priority_limit(tree[2]):
        headers, chunk, _ = slots
        weights = headers.view(np.float64)
        for i in range(at):
            leaves[i] *= weights[indices[i] // chunk * HEADER_WORDS + AGE_WEIGHT]
    if not update_kernel(*tree, indices[:at], leaves):
        return REFUSED, row, 0.0
    return fit, stale, largest
