"""A draw: the sampled keys, before their rows are copied, and the layout of a draw."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.device_frames import DeviceFrames
from zapex.chunks.gather import GatherArguments, gather_kernel
from zapex.chunks.keys import NO_KEY, keys_kernel
from zapex.chunks.store import ChunkStore
from zapex.machine.jit import kernel
from zapex.replay.priorities import SlotArrays
from zapex.sumtree_numba import (
    Method,
    TreeArrays,
    min_positive_kernel,
    sample_distinct_kernel,
    sample_kernel,
)

_DEADLINE_S = 60.0  # for work that takes milliseconds
METHODS: tuple[Method, ...] = get_args(Method)
STRATIFIED, INDEPENDENT, WITHOUT_REPLACEMENT = range(len(METHODS))


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


class Gatherer:
    """Copies the rows of a draw, with weights, from a store into a batch. Use it from one thread.

    The kernels release the GIL, so the threads copy while Python runs. Each copies an equal part of
    the rows.

    threads: its own; 0: the caller's thread copies, in `finish`. frames: if the frames are on a
    device, and batches only name them; then one thread does all.
    """

    def __init__(
        self, store: ChunkStore, beta: float, threads: int = 0, frames: DeviceFrames | None = None
    ) -> None:
        self._store, self._beta, self.threads, self._frames = store, beta, threads, frames
        self._pool = ThreadPoolExecutor(threads, "gather") if threads else None
        self._work: tuple[Batch, Draw] | None = None
        self._parts: list[Future[int]] = []

    @property
    def under_way(self) -> bool:
        """Whether a draw was begun and not finished."""
        return self._work is not None

    def begin(self, draw: Draw, batch: Batch) -> None:
        """Begin to gather. Until `finish`, the draw's memory stays as it is."""
        self._work = batch, draw
        if self._pool is not None:
            self._parts = [self._pool.submit(part) for part in self._split(draw, batch)]

    def _split(self, draw: Draw, batch: Batch) -> list[Callable[[], int]]:
        frames = self._frames
        if frames is not None:
            return [lambda: frames.gather(draw.keys, batch, batch.keys)]
        rows, parts = len(draw.keys), max(1, self.threads)
        bounds = [rows * i // parts for i in range(parts + 1)]

        def part(first: int, end: int) -> Callable[[], int]:
            return lambda: self._store.gather(
                draw.keys[first:end], batch.layout, batch.memory, batch.keys[first:end], first
            )

        return [part(*pair) for pair in itertools.pairwise(bounds)]

    def finish(self, batch: Batch) -> tuple[int, int]:
        """The draw begun is in `batch`. Returns how many rows are torn, and `Draw.count`.

        If it was begun for another batch, it is gathered again.
        """
        assert self._work is not None
        (begun, draw), parts = self._work, self._parts
        self._work, self._parts = None, []
        torn = sum(part.result(_DEADLINE_S) for part in parts)
        if begun is not batch:
            batch.fresh.extend(begun.fresh)
            begun.fresh.clear()
        if not parts or begun is not batch:
            torn = sum(part() for part in self._split(draw, batch))
        draw.weigh(batch.weights, self._beta)
        batch.indices[:] = draw.indices
        if torn:
            batch.weights[batch.keys == NO_KEY] = 0.0
        return torn, draw.count
