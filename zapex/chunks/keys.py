"""Keys: a key names one transition while it is in its slot, and no other transition.

shard 8 bits | generation 28 | slot 19 | offset 8. A key is not negative; -1 means no key. A
generation is never 0, so a key is larger than every index.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import COUNT, GENERATION, HEADER_WORDS, LIVE, STATE
from zapex.machine.jit import kernel

OFFSET_BITS, SLOT_BITS, GENERATION_BITS = 8, 19, 28  # the other bits are the shard
MAX_SLOTS = 1 << SLOT_BITS
NO_KEY = -1
GENERATION_MASK = (1 << GENERATION_BITS) - 1
_SLOT_SHIFT = OFFSET_BITS
GENERATION_SHIFT = OFFSET_BITS + SLOT_BITS
LEAST_KEY = 1 << GENERATION_SHIFT
_SHARD_SHIFT = OFFSET_BITS + SLOT_BITS + GENERATION_BITS


@kernel
def slot_of(key: int) -> int:
    """The slot in a key."""
    return (key >> _SLOT_SHIFT) & (MAX_SLOTS - 1)


@kernel
def row_of(key: int) -> int:
    """The row in a key: an offset in the chunk."""
    return key & ((1 << OFFSET_BITS) - 1)


@kernel
def are_inside_kernel(keys: Any, slots: int, chunk: int) -> bool:
    """Whether all keys point into a store of `slots` slots of `chunk` rows."""
    for b in range(keys.shape[0]):
        if keys[b] < 0 or slot_of(keys[b]) >= slots or row_of(keys[b]) >= chunk:
            return False
    return True


@kernel
def keys_kernel(indices: Any, headers: Any, chunk: int, shard: int, keys: Any) -> None:
    """Write the keys of the transitions at `indices` (slot * chunk + offset) into `keys`."""
    for b in range(indices.shape[0]):
        slot = indices[b] // chunk
        generation = headers[slot * HEADER_WORDS + GENERATION]
        keys[b] = (
            (shard << _SHARD_SHIFT)
            | (generation << GENERATION_SHIFT)
            | (slot << _SLOT_SHIFT)
            | (indices[b] - slot * chunk)
        )


@kernel
def indices_kernel(keys: Any, headers: Any, chunk: int, shard: int, indices: Any) -> int:
    """Write the index of each key, or -1 if the key is no longer valid. Returns the valid count."""
    fit = 0
    slots = headers.shape[0] // HEADER_WORDS
    for b in range(keys.shape[0]):
        key = keys[b]
        slot, offset = slot_of(key), row_of(key)
        indices[b] = -1
        if key < 0 or key >> _SHARD_SHIFT != shard or slot >= slots:
            continue
        header = slot * HEADER_WORDS
        if (
            (key >> GENERATION_SHIFT) & GENERATION_MASK == headers[header + GENERATION]
            and headers[header + STATE] == LIVE
            and offset < headers[header + COUNT]
        ):
            indices[b] = slot * chunk + offset
            fit += 1
    return fit


def slots_and_rows(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The slots and the rows in these keys."""
    return keys >> _SLOT_SHIFT & (MAX_SLOTS - 1), keys & ((1 << OFFSET_BITS) - 1)


def with_shard(keys: NDArray[np.int64], shard: int) -> NDArray[np.int64]:
    """The keys of a replay that is shard `shard` of several; -1 stays -1. Keys have shard 0."""
    return np.where(keys == NO_KEY, NO_KEY, keys | shard << _SHARD_SHIFT)


def by_shard(keys: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """The rows of each shard's keys; rows of -1 are left out."""
    shards = keys >> _SHARD_SHIFT
    return {int(s): np.flatnonzero(shards == s) for s in np.unique(shards[keys >= 0])}


def without_shard(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The keys as their own replay knows them."""
    return keys & ((1 << _SHARD_SHIFT) - 1)
