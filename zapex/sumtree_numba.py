"""The sum tree: draw an index with probability proportional to its priority.

The layout and the kernels are in sumtree_kernels.py. A tree is not thread-safe, and only
one process uses it. Callers must hold a lock.
"""

from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from zapex.errors import (
    ConfigError,
    InvalidIndex,
    InvalidPriority,
    NotEnoughData,
    SharedMemoryError,
)
from zapex.machine.segment import ALIGNMENT_BYTES, view_bytes
from zapex.machine.simd import FloatArray
from zapex.sumtree_kernels import (
    MINIMA_BLOCK,
    IntArray,
    find_kernel,
    level_offsets,
    min_positive_kernel,
    priority_limit,
    rebuild_kernel,
    sample_distinct_kernel,
    sample_kernel,
    update_kernel,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Method = Literal["stratified", "independent", "without_replacement"]
TreeArrays = tuple[FloatArray, IntArray, int]
"""Nodes, offsets and capacity, as the kernels of sumtree_kernels.py take them."""


def _as_vector(values: npt.ArrayLike, dtype: type, what: str) -> npt.NDArray[Any]:
    """A contiguous writeable vector of `dtype`: kernels are compiled only for these."""
    array = np.asarray(values)
    if array.dtype != dtype:
        kinds = "iu" if dtype is np.int64 else "fiu"
        if array.dtype.kind not in kinds and array.size:
            raise ConfigError(f"{what} must be of {np.dtype(dtype)}, got {array.dtype}")
        array = array.astype(dtype)
    if array.ndim != 1:
        if array.ndim > 1:
            raise ConfigError(f"{what} must be a vector, got shape {array.shape}")
        array = array.reshape(1)
    return array if array.flags.carray else array.copy()


class SumTree:
    """Draws indices with probability proportional to their priority.

    Args:
        capacity: number of leaves; any positive integer.
        buffer: writeable memory of at least `required_bytes(capacity)`, 64-byte aligned (an mmap, a
            memoryview, an array of bytes). Its content is lost. None: allocate memory.

    Raises:
        ConfigError: the capacity is not a positive integer.
        SharedMemoryError: the buffer is too small, read-only or not aligned.

    Attributes:
        arrays: the tree's arguments for kernels of other modules.
    """

    def __init__(self, capacity: int, buffer: "WriteableBuffer | None" = None) -> None:
        if buffer is None:
            size = self.required_bytes(capacity)
            raw = np.empty(size + ALIGNMENT_BYTES, np.uint8)
            skip = -raw.ctypes.data % ALIGNMENT_BYTES
            buffer = raw[skip : skip + size].data
        self._map(capacity, buffer)
        self._nodes[:] = 0.0
        self._nodes[self._offsets[-2] :] = np.inf

    @classmethod
    def attach(cls, capacity: int, buffer: "WriteableBuffer") -> Self:
        """Use memory that holds a tree. Leaves are kept; the rest is computed again.

        Raises:
            ConfigError, SharedMemoryError: as the constructor; also if a leaf is not a priority.
        """
        tree = cls.__new__(cls)
        tree._map(capacity, buffer)
        if not (np.abs(tree._nodes[:capacity]) <= priority_limit(capacity)).all():
            raise SharedMemoryError("the buffer holds no tree: its leaves are not priorities")
        tree.rebuild()
        return tree

    @staticmethod
    def required_bytes(capacity: int) -> int:
        """Bytes of the buffer for `capacity` leaves."""
        if not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise ConfigError(f"capacity must be a positive integer, got {capacity!r}")
        return int(level_offsets(int(capacity))[-1]) * 8

    def _map(self, capacity: int, buffer: "WriteableBuffer") -> None:
        memory = view_bytes(buffer, self.required_bytes(capacity), f"a tree of {capacity} leaves")
        self._capacity = int(capacity)
        self._offsets = level_offsets(self._capacity)
        self._nodes: FloatArray = memory.view(np.float64)
        self._total_at = int(self._offsets[-3])
        self.arrays: TreeArrays = self._nodes, self._offsets, self._capacity

    @property
    def capacity(self) -> int:
        """Number of leaves."""
        return self._capacity

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return self._nodes.item(self._total_at)

    @property
    def leaves(self) -> FloatArray:
        """(capacity,) float64: all leaves, as a read-only view."""
        leaves = self._nodes[: self._capacity]
        leaves.flags.writeable = False
        return leaves

    @property
    def min_positive(self) -> float:
        """The smallest positive leaf; inf if there is none."""
        return min_positive_kernel(self._nodes, self._offsets, self._capacity)

    def update(self, indices: npt.ArrayLike, priorities: npt.ArrayLike) -> None:
        """Set leaves. Of equal indices the last counts. After an error, nothing has changed.

        Args:
            indices: (n,) int64 in [0, capacity).
            priorities: (n,) float64, >= 0 and at most 9e307 / capacity, so that the total is
            finite.

        Raises:
            InvalidIndex: an index is out of range.
            InvalidPriority: a priority is NaN, infinite, negative or too large.
            ConfigError: a wrong dtype or shape.
        """
        indices = _as_vector(indices, np.int64, "indices")
        priorities = _as_vector(priorities, np.float64, "priorities")
        if len(indices) != len(priorities):
            raise ConfigError(f"{len(indices)} indices but {len(priorities)} priorities")
        if not update_kernel(self._nodes, self._offsets, self._capacity, indices, priorities):
            self._check_range(indices)
            limit = priority_limit(self._capacity)
            bad = ~((priorities >= 0.0) & (priorities <= limit))
            raise InvalidPriority(
                f"a priority must be a number in [0, {limit:.3g}], got {priorities[bad][0]} for "
                f"index {indices[bad][0]}; nothing was updated"
            )

    def find(self, prefix_sums: npt.ArrayLike) -> IntArray:
        """Find the smallest i whose cumulative sum exceeds each value; never a leaf that is 0.

        Args:
            prefix_sums: (n,) float64. A value below 0 counts as 0. A value at or above the total
                gives the last positive leaf.

        Returns:
            (n,) int64 indices.

        Raises:
            NotEnoughData: no leaf is positive.
            ConfigError: a value is NaN, or a wrong dtype or shape.
        """
        rests = _as_vector(prefix_sums, np.float64, "prefix_sums").copy()
        self._demand_positive_total()
        indices = np.empty(len(rests), np.int64)
        if not find_kernel(self._nodes, self._offsets, rests, indices):
            raise ConfigError("prefix_sums must not be NaN")
        return indices

    def sample(
        self, batch_size: int, rng: np.random.Generator, method: Method = "stratified"
    ) -> tuple[IntArray, FloatArray]:
        """Draw indices with probability proportional to their leaves.

        Args:
            batch_size: how many, B, at least 1.
            rng: source of B uniforms.
            method: "stratified" draws one from each of B equal parts of the total, in ascending
                order. "independent" draws each from the whole. "without_replacement" draws each
                from the leaves that are not drawn yet.

        Returns:
            (B,) int64 indices and (B,) float64 leaf / total. This is the probability of a single
            draw. For "stratified" it is the mean over the parts. For "without_replacement" it is
            the probability of the first draw.

        Raises:
            NotEnoughData: no leaf is positive, or fewer than `batch_size` without replacement.
            ConfigError: batch_size < 1 or an unknown method.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        self._demand_positive_total()
        nodes, offsets = self._nodes, self._offsets
        probabilities = rng.random(batch_size)
        indices = np.empty(batch_size, np.int64)
        if method in ("stratified", "independent"):
            sample_kernel(nodes, offsets, method == "stratified", indices, probabilities)
        elif method == "without_replacement":
            count = sample_distinct_kernel(nodes, offsets, indices, probabilities)
            if count < batch_size:
                raise NotEnoughData(
                    f"{batch_size} different items were asked for, only {count} have a priority > 0"
                )
        else:
            raise ConfigError(
                f"method must be stratified, independent or without_replacement, got {method!r}"
            )
        return indices, probabilities

    def __len__(self) -> int:
        return self._capacity

    def __getitem__(self, indices: npt.ArrayLike) -> Any:
        """The leaves: a float for an integer, (n,) float64 for (n,) int64. Raises InvalidIndex."""
        wanted = _as_vector(indices, np.int64, "indices")
        self._check_range(wanted)
        leaves = self._nodes[wanted]
        return leaves if np.ndim(indices) else float(leaves[0])

    def rebuild(self) -> None:
        """Compute the sums and minima again from the leaves."""
        rebuild_kernel(self._nodes, self._offsets, self._capacity)

    def check_valid(self) -> tuple[bool, str]:
        """Whether the invariants hold. If not, the text says which one fails, and where."""
        nodes, offsets = self._nodes, self._offsets
        leaves = nodes[: self._capacity]
        bad = np.flatnonzero(~((leaves >= 0.0) & (leaves <= priority_limit(self._capacity))))
        if bad.size:
            return False, f"I1: leaf {bad[0]} is {leaves[bad[0]]}"
        entries = self._capacity
        for h in range(len(offsets) - 3):
            if nodes[offsets[h] + entries : offsets[h + 1]].any():
                return False, f"I1: level {h} has a non-zero entry past its {entries}"
            sums = nodes[offsets[h] : offsets[h + 1]]
            for _ in range(3):  # neighbours, as in `line_sum`
                sums = sums[::2] + sums[1::2]
            entries = len(sums)
            bad = np.flatnonzero(nodes[offsets[h + 1] : offsets[h + 1] + entries] != sums)
            if bad.size:
                return False, f"I2: entry {bad[0]} of level {h + 1} is not the sum of its line"
        positive = np.where(leaves > 0.0, leaves, np.inf)
        exact = np.minimum.reduceat(positive, np.arange(0, self._capacity, MINIMA_BLOCK))
        minima = nodes[offsets[-2] : offsets[-2] + len(exact)]
        bad = np.flatnonzero(np.where(minima > 0.0, minima != exact, -minima > exact))
        if bad.size:
            return False, f"I3: block {bad[0]} says {minima[bad[0]]}, is {exact[bad[0]]}"
        return True, ""

    def _demand_positive_total(self) -> None:
        if not self._nodes.item(self._total_at) > 0.0:
            raise NotEnoughData("every priority is 0: there is nothing to draw")

    def _check_range(self, indices: IntArray) -> None:
        outside = (indices < 0) | (indices >= self._capacity)
        if outside.any():
            raise InvalidIndex(
                f"an index must be in [0, {self._capacity}), got {indices[outside][0]}"
            )
