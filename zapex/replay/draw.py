"""A draw: sampled keys and their leaves, and the gather of their rows into a batch.

The learner's process gathers over shared memory, and so does a client of the library's handle; the
library gathers in the replay's own process. All of them call `Draw.gather`. (Over a network the
replay packs the rows instead: wire/batches.py.)
"""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.device_frames import DeviceFrames
from zapex.chunks.gather import BATCH_GATHER, gather_kernel
from zapex.chunks.keys import NO_KEY, are_inside_kernel, keys_kernel
from zapex.chunks.store import ChunkStore
from zapex.machine.atomics import record_at
from zapex.machine.jit import kernel
from zapex.replay.priorities import SlotArrays
from zapex.sumtree_numba import Method, TreeArrays, sample_distinct_kernel, sample_kernel

METHODS: tuple[Method, ...] = get_args(Method)
STRATIFIED, INDEPENDENT, WITHOUT_REPLACEMENT = range(len(METHODS))
_OUTSIDE = -1
_DEADLINE_S = 60.0  # for work that takes milliseconds


REQUEST = np.dtype([("kind", np.int64), ("rows", np.int64), ("option", np.int64)])
"""What is asked of a replay in shared memory. kind: a Request of wire/messages.py."""


def answer_dtype(rows: int) -> np.dtype[Any]:
    """The answer to a REQUEST: three numbers, and a draw of at most `rows` rows.

    numbers: 0, or an error's number (`errors.tell`); and two that depend on the request. For SAMPLE
    the first of these says how many transitions are in the memory.
    """
    return np.dtype([("numbers", np.int64, (3,)), ("draw", Draw.dtype(rows))])


def update_dtype(rows: int, priority: type[np.float32 | np.float64] = np.float32) -> np.dtype[Any]:
    """New priorities of at most `rows` rows."""
    return np.dtype([("keys", np.int64, (rows,)), ("priorities", priority, (rows,))], align=True)


@kernel
def draw_kernel(
    method: int, tree: TreeArrays, slots: SlotArrays, uniforms: Any, indices: Any, keys: Any
) -> int:
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
def weigh_kernel(leaves: Any, smallest: float, beta: float, weights: Any) -> None:
    """weights[b] = (leaves[b] / smallest)^-beta. smallest 0: the smallest of `leaves`.

    This is (N q)^-beta over its largest value (Schaul et al. 2016, sec. 3.4): N and the total are
    factors of each weight and cancel.
    """
    if smallest == 0.0:
        smallest = leaves.min()
    for b in range(leaves.shape[0]):
        weights[b] = (leaves[b] / smallest) ** -beta


@kernel
def gather_draw_kernel(
    keys: Any,
    indices: Any,
    leaves: Any,
    smallest: float,
    beta: float,
    mem: Any,
    plan: Any,
    batch: Any,
    first: int,
    end: int,
) -> int:
    """Fill the rows from `first` up to `end` of a batch. Returns how many are torn, or _OUTSIDE.

    keys, indices, leaves: of the whole draw. smallest: see `weigh_kernel`. mem, plan: see
    `ChunkStore.gather_arguments`. batch: its memory.
    """
    w = record_at(plan, 0, BATCH_GATHER)
    if not are_inside_kernel(keys, w.slots, w.chunk):
        return _OUTSIDE
    if smallest == 0.0:
        smallest = leaves.min()
    rows, words = end - first, batch.view(np.int64)
    weights = batch.view(np.float32)[w.weights : w.weights + rows]
    keys_out = words[w.keys : w.keys + rows]
    words[w.indices : w.indices + rows] = indices[first:end]
    weigh_kernel(leaves[first:end], smallest, beta, weights)
    torn = gather_kernel(keys[first:end], mem, plan, batch, keys_out)
    if torn:
        for b in range(rows):
            if keys_out[b] == NO_KEY:
                weights[b] = 0.0
    return torn


@dataclass(slots=True)
class Draw:
    """The sampled keys, before their rows are copied.

    Attributes:
        keys: (B,) int64.
        indices: (B,) int64.
        leaves: (B,) float64, the leaf values drawn.
        total: the sum of all leaves of the memory.
        count: transitions in the memory.
        smallest: the smallest positive leaf, or 0 if the caller did not ask for it.
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
        self,
        store: ChunkStore,
        batch: Batch,
        beta: float,
        *,
        by_memory: bool = False,
        first: int = 0,
        end: int | None = None,
    ) -> int:
        """Copy the rows into `batch`, with weights, keys and indices. Releases the GIL.

        Args:
            store: where the rows are.
            batch: has as many rows as the draw.
            beta: exponent of the importance weights.
            by_memory: weights are divided by the largest one of the memory, not of the batch.
            first: the first row to copy.
            end: one past the last row to copy; None: all.

        Returns:
            How many rows are torn, because they were overwritten during the copy. These have weight
            0 and key -1.

        Raises:
            IndexError: a key is not of this store. A peer may send wrong keys.
        """
        layout = batch.layout
        torn = gather_draw_kernel(
            self.keys,
            self.indices,
            self.leaves,
            float(self.smallest) if by_memory else 0.0,
            float(beta),
            *store.gather_arguments(layout, first),
            batch.memory,
            first,
            layout.batch_size if end is None else end,
        )
        if torn == _OUTSIDE:
            raise IndexError("a key points outside of the store")
        return torn


class Gatherer:
    """Gathers one draw at a time into a batch, in threads beside the caller's work if asked.

    Each thread copies an equal part of the rows. Use the gatherer itself from one thread.

    Args:
        store: where the rows are.
        beta: exponent of the importance weights.
        threads: of its own; 0: the caller's thread copies, in `finish`.
        frames: if the frames are on a device, and batches only name them. Then one thread does all.
    """

    def __init__(
        self, store: ChunkStore, beta: float, threads: int = 0, frames: DeviceFrames | None = None
    ) -> None:
        self._store, self._beta, self.threads, self._frames = store, beta, threads, frames
        self._pool = ThreadPoolExecutor(threads, "gather") if threads else None
        self._work: tuple[Draw, Batch] | None = None
        self._parts: list[Future[int]] = []

    @property
    def under_way(self) -> bool:
        """Whether a draw was begun and not finished."""
        return self._work is not None

    def begin(self, draw: Draw, batch: Batch) -> None:
        """Begin to gather. Until `finish`, the draw's memory stays as it is."""
        self._work = draw, batch
        if self._pool is None:
            return
        parts = 1 if self._frames is not None else self.threads
        rows = len(draw.keys)
        for first, end in itertools.pairwise(rows * i // parts for i in range(parts + 1)):
            self._parts.append(self._pool.submit(self._gather, draw, batch, first, end))

    def finish(self, batch: Batch) -> tuple[int, int]:
        """Wait until the draw begun is in `batch`, which was given to `begin`.

        Returns:
            How many rows are torn, and `Draw.count`.
        """
        assert self._work is not None
        draw, begun = self._work
        assert begun is batch, "another batch was begun"
        parts, self._work, self._parts = self._parts, None, []
        if not parts:
            return self._gather(draw, batch, 0, len(draw.keys)), draw.count
        return sum(part.result(_DEADLINE_S) for part in parts), draw.count

    def _gather(self, draw: Draw, batch: Batch, first: int, end: int) -> int:
        if self._frames is None:
            return draw.gather(self._store, batch, self._beta, first=first, end=end)
        torn = self._frames.gather(draw.keys, batch, batch.keys)
        draw.weigh(batch.weights, self._beta)
        batch.indices[:] = draw.indices
        batch.weights[batch.keys == NO_KEY] = 0.0
        return torn
