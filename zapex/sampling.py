"""Draw, weigh and copy a batch in one kernel; set priorities, new ones or of new items, in one."""

from typing import Any

import numpy as np

from zapex.chunk_store import NO_KEY, gather_kernel, indices_kernel, keys_kernel
from zapex.jit import kernel
from zapex.sumtree_kernels import (
    min_positive_kernel,
    priority_limit,
    sample_distinct_kernel,
    sample_kernel,
    update_kernel,
)

STRATIFIED, INDEPENDENT, WITHOUT_REPLACEMENT = range(3)
REFUSED = -1


@kernel
def weigh_kernel(leaves: Any, smallest: float, beta: float, weights: Any) -> None:
    """weights[b] = (leaves[b] / smallest)^-beta."""
    for b in range(leaves.shape[0]):
        weights[b] = (leaves[b] / smallest) ** -beta


@kernel
def batch_kernel(method: int, beta: float, by_memory: bool, nodes: Any, offsets: Any,
                 capacity: int, uniforms: Any, shard: int, chunk: int, mem: Any, mem16: Any,
                 headers: Any, bodies: int, body_bytes: int, obs_frames: int, next_frames: int,
                 stack: int, frame_table: Any, step_table: Any, zeros: Any, batch: Any,
                 indices: Any, keys: Any, weights: Any) -> int:  # fmt: skip
    """Draw `indices` with `uniforms` in [0, 1), copy their rows, compute weights.

    Returns how many were drawn: less than B only without replacement, and nothing is copied then.
    Leaves leaf / total in `uniforms`. Nobody may write to live slots meanwhile.
    """
    if method == WITHOUT_REPLACEMENT:
        count = sample_distinct_kernel(nodes, offsets, indices, uniforms)
        if count < len(indices):
            return count
    else:
        sample_kernel(nodes, offsets, method == STRATIFIED, indices, uniforms)
    # (N q)^-beta over the largest of the batch or of the memory (Schaul et al. 2016, sec. 3.4): N
    # is in all of them and cancels.
    smallest = uniforms.min()
    if by_memory:
        smallest = min_positive_kernel(nodes, offsets, capacity) / nodes[offsets[-3]]
    weigh_kernel(uniforms, smallest, beta, weights)
    keys_kernel(indices, headers, chunk, shard, keys)
    gather_kernel(keys, mem, mem16, headers, bodies, body_bytes, obs_frames, next_frames, stack,
                  frame_table, step_table, zeros, batch, keys)  # fmt: skip
    return len(indices)


@kernel
def forget_kernel(first: int, count: int, nodes: Any, offsets: Any, capacity: int) -> None:
    """Leaves of a chunk that is evicted: 0."""
    update_kernel(nodes, offsets, capacity, np.arange(first, first + count), np.zeros(count))


@kernel
def prioritise_kernel(indices: Any, magnitudes: Any, alpha: float, eps: float, largest: float,
                      nodes: Any, offsets: Any, capacity: int) -> float:  # fmt: skip
    """Leaves of new transitions: (|priority| + eps)^alpha, or `largest` where none is given.

    A number that is negative, NaN or infinite counts as not given: an actor's bad number must not
    stop the server. Returns the largest leaf so far.
    """
    leaves = np.empty(len(indices))
    limit = priority_limit(capacity)
    most = largest
    for b in range(len(indices)):
        leaf = largest
        if magnitudes[b] >= 0.0:
            leaf = (magnitudes[b] + eps) ** alpha
            if not leaf <= limit:
                leaf = largest
        leaves[b] = leaf
        most = max(most, leaf)
    update_kernel(nodes, offsets, capacity, indices, leaves)
    return most


@kernel
def reprioritise_kernel(keys: Any, priorities: Any, alpha: float, eps: float, shard: int,
                        chunk: int, headers: Any, nodes: Any, offsets: Any,
                        capacity: int) -> tuple[int, int, float]:  # fmt: skip
    """Set the leaves of `keys` to (|priority| + eps)^alpha; of equal keys the last wins.

    Returns how many were applied, how many keys (-1 apart) are stale, and the largest leaf that was
    set. REFUSED, with the row, and nothing done, where a priority is not finite or too large.
    """
    n = keys.shape[0]
    for b in range(n):
        if not abs(priorities[b]) < np.inf:
            return REFUSED, b, 0.0
    indices = np.empty(n, np.int64)
    fit = indices_kernel(keys, headers, chunk, shard, indices)
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
    if not update_kernel(nodes, offsets, capacity, indices[:at], leaves):
        return REFUSED, row, 0.0
    return fit, stale, largest
