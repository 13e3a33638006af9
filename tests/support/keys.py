"""Keys as places in a store."""

import numpy as np

from zapex.chunks.keys import indices_kernel


def indices_of(store, keys, shard=0):
    """The index of each key, -1 where it fits no transition; and how many do."""
    indices = np.empty(len(keys), np.int64)
    return indices, indices_kernel(keys, store.headers, store.layout.chunk, shard, indices)
