"""A draw: the sampled keys, before their rows are copied, and the layout of a draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.keys import NO_KEY
from zapex.chunks.store import ChunkStore
from zapex.replay.sampling import weigh_kernel


@dataclass(frozen=True)
class Draw:
    """The sampled keys, before their rows are copied.

    keys, indices (B,) int64. leaves (B,) float64: the leaf values drawn. total: the sum of all
    leaves of the memory. count: transitions in the memory. smallest: the smallest positive leaf, or
    0 if the caller did not ask for it.
    """

    keys: NDArray[np.int64]
    indices: NDArray[np.int64]
    leaves: NDArray[np.float64]
    total: float
    count: int
    smallest: float

    def piece(self, first: int, rows: int) -> Self:
        """At most `rows` rows of it, from `first` on; views."""
        some = slice(first, first + rows)
        keys, indices, leaves = self.keys[some], self.indices[some], self.leaves[some]
        return type(self)(keys, indices, leaves, self.total, self.count, self.smallest)

    @classmethod
    def whole(cls, pieces: Sequence[Self]) -> Self:
        """What was drawn in pieces, which are given in their order."""
        keys, indices, leaves = (
            np.concatenate([getattr(piece, name) for piece in pieces])
            for name in ("keys", "indices", "leaves")
        )
        one = pieces[0]
        return cls(keys, indices, leaves, one.total, one.count, one.smallest)

    @staticmethod
    @lru_cache(maxsize=256)
    def dtype(rows: int) -> np.dtype[Any]:
        """The record of `rows` rows, in shared memory and in messages. `count` is not in it."""
        columns = [
            ("keys", "<i8", (rows,)),
            ("indices", "<i8", (rows,)),
            ("leaves", "<f8", (rows,)),
        ]
        return np.dtype([("total", "<f8"), ("smallest", "<f8"), *columns])

    def write(self, record: Any) -> None:
        """Write the draw into a record of `dtype`."""
        for name in record.dtype.names:
            record[name] = getattr(self, name)

    @classmethod
    def read(cls, record: Any, count: int = 0) -> Self:
        """Read a draw from a record; its columns are views."""
        fields = {name: record[name] for name in record.dtype.names}
        return cls(**fields, count=count)

    def weigh(self, weights: NDArray[np.float32], beta: float, *, by_memory: bool = False) -> None:
        """Write importance weights (B,), divided by the largest of the batch or of the memory."""
        weigh_kernel(self.leaves, float(self.smallest) if by_memory else 0.0, float(beta), weights)

    def gather(
        self, store: ChunkStore, batch: Batch, beta: float, *, by_memory: bool = False
    ) -> int:
        """Copy the rows into `batch`, with weights and keys. Returns how many are torn.

        A torn row was overwritten during the copy: weight 0, key -1.
        """
        smallest = self.smallest if by_memory else 0.0
        return gather(store, self.keys, self.indices, self.leaves, smallest, batch, beta)


def gather(
    store: ChunkStore,
    keys: NDArray[np.int64],
    indices: NDArray[np.int64],
    leaves: NDArray[np.float64],
    smallest: float,
    batch: Batch,
    beta: float,
) -> int:
    """`Draw.gather` of a draw's parts. smallest: a leaf; 0: the smallest of the batch."""
    batch.indices[:] = indices
    weigh_kernel(leaves, float(smallest), float(beta), batch.weights)
    torn = store.gather(keys, batch.layout, batch.memory, batch.keys)
    if torn:
        batch.weights[batch.keys == NO_KEY] = 0.0
    return torn
