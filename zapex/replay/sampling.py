"""Kernels: one draws, weighs and copies a batch; others set the priorities of transitions."""

from typing import Any, get_args

import numpy as np

from zapex.chunks.keys import LEAST_KEY, NO_KEY, indices_kernel, keys_kernel
from zapex.chunks.store import GatherArguments, gather_kernel
from zapex.machine.jit import kernel
from zapex.sumtree_kernels import (
    min_positive_kernel,
    priority_limit,
    sample_distinct_kernel,
    sample_kernel,
    update_kernel,
)
from zapex.sumtree_numba import Method, TreeArrays

METHODS: tuple[Method, ...] = get_args(Method)
STRATIFIED, INDEPENDENT, WITHOUT_REPLACEMENT = range(len(METHODS))
REFUSED, NOT_A_KEY = -1, -2
# Kernels take plain tuples, made once: to pass a NamedTuple takes one microsecond more.
SlotArrays = tuple[Any, int, int]
"""Headers of a store, chunk and shard: the kernels make a key of an index with these."""


@kernel
def weigh_kernel(leaves: Any, smallest: float, beta: float, weights: Any) -> None:
    """weights[b] = (leaves[b] / smallest)^-beta. smallest 0: the smallest of `leaves`."""
    if smallest == 0.0:
        smallest = leaves.min()
    for b in range(leaves.shape[0]):
        weights[b] = (leaves[b] / smallest) ** -beta


@kernel
def draw_kernel(method: int, tree: TreeArrays, slots: SlotArrays, uniforms: Any, indices: Any,
                keys: Any) -> int:  # fmt: skip
    """Draw `indices` and their `keys` with `uniforms` in [0, 1), which then holds the leaves.

    Returns how many were drawn: less than B only without replacement, and then without keys.
    """
    nodes, offsets, _ = tree
    if method == WITHOUT_REPLACEMENT:
        count = sample_distinct_kernel(nodes, offsets, indices, uniforms)
        if count < len(indices):
            return count
    else:
        sample_kernel(nodes, offsets, method == STRATIFIED, indices, uniforms)
    for b in range(len(indices)):
        uniforms[b] = nodes[indices[b]]  # a leaf over the total may be too small for a float64
    keys_kernel(indices, *slots, keys)
    return len(indices)


@kernel
def batch_kernel(method: int, beta: float, by_memory: bool, tree: TreeArrays, slots: SlotArrays,
                 rows: GatherArguments, uniforms: Any, batch: Any, indices: Any, keys: Any,
                 weights: Any) -> int:  # fmt: skip
    """Draw `indices` with `uniforms` in [0, 1), copy their rows, compute weights.

    Returns how many were drawn. This is less than B only without replacement; then nothing is
    copied. At the end `uniforms` holds the leaves. No process may write to live slots during the
    call.
    """
    drawn = draw_kernel(method, tree, slots, uniforms, indices, keys)
    if drawn == len(indices):
        # (N q)^-beta over the largest of the batch or of the memory (Schaul et al. 2016, sec. 3.4):
        # N is a factor of each weight and cancels.
        smallest = min_positive_kernel(*tree) if by_memory else 0.0
        weigh_kernel(uniforms, smallest, beta, weights)
        gather_kernel(keys, *rows, batch, keys)
    return drawn


@kernel
def forget_kernel(first: int, count: int, tree: TreeArrays) -> None:
    """Set the leaves of an evicted chunk to 0."""
    update_kernel(*tree, np.arange(first, first + count), np.zeros(count))


@kernel
def prioritise_kernel(indices: Any, magnitudes: Any, alpha: float, eps: float, largest: float,
                      tree: TreeArrays) -> float:  # fmt: skip
    """Set leaves of new transitions: (|priority| + eps)^alpha, or `largest` if none is given.

    A negative, NaN or infinite number counts as not given: a wrong number of an actor must not stop
    the server. Returns the largest leaf so far.
    """
    leaves = np.empty(len(indices))
    limit = priority_limit(tree[2])
    most = largest
    for b in range(len(indices)):
        leaf = largest
        if magnitudes[b] >= 0.0:
            leaf = (magnitudes[b] + eps) ** alpha
            if not leaf <= limit:
                leaf = largest
        leaves[b] = leaf
        most = max(most, leaf)
    update_kernel(*tree, indices, leaves)
    return most


@kernel
def reprioritise_kernel(keys: Any, priorities: Any, alpha: float, eps: float, slots: SlotArrays,
                        tree: TreeArrays) -> tuple[int, int, float]:  # fmt: skip
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
