"""The sum tree: draw an index with probability proportional to its priority.

Layout, float64, every level padded with zeros to whole cache lines of 8:

    leaves | sums of 8 leaves | sums of 8 of those | ... | one line | total | block minima
    h = 0    h = 1                                         depth-1    depth

A node is a cache line: its value, one level up, is the sum of its 8 entries, and is always
computed anew from them, so that nothing drifts. `offsets[h]` is where level h begins; it is the
process's own and never read from the buffer. Kernels walk one level at a time over the whole
batch: the cache misses of a level do not depend on each other, so many of them are in flight.

    I1  0 <= leaf < inf; entries past the capacity are 0
    I2  entry i of level h + 1 = sum of entries [8 i, 8 i + 8) of level h, added as in `_line_sum`
    I3  minima[b] > 0: the smallest positive leaf of block b, inf where there is none;
        minima[b] < 0: no positive leaf of block b is smaller than -minima[b]

Not thread-safe, and one process owns it: callers lock.
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
from zapex.jit import kernel

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Position = Any  # int64 or uint64: inside kernels Numba knows, mypy need not
Method = Literal["stratified", "independent", "without_replacement"]

FANOUT = 8
MINIMA_BLOCK = 4096  # leaves: a block is scanned anew in about a microsecond
_LINE_BYTES = 64
_ALL_GOOD = -1


def level_offsets(capacity: int) -> IntArray:
    """Where each level begins, in float64 elements: leaves, ..., total, minima, end."""
    offsets = [0]
    entries = capacity
    while True:
        lines = -(-entries // FANOUT)
        offsets.append(offsets[-1] + lines * FANOUT)
        if lines == 1:
            break
        entries = lines
    offsets.append(offsets[-1] + FANOUT)  # the total has a line of its own
    blocks = -(-capacity // MINIMA_BLOCK)
    offsets.append(offsets[-1] + -(-blocks // FANOUT) * FANOUT)
    return np.array(offsets, np.int64)


# -- kernels ---------------------------------------------------------------------------------------
# `nodes` is the whole buffer. Positions are uint64: Numba then leaves out the test for negative
# indices. Depth, the level of the total, is len(offsets) - 3.


@kernel
def _half_sum(nodes: FloatArray, at: Position) -> Any:
    return (nodes[at] + nodes[at + np.uint64(1)]) + (
        nodes[at + np.uint64(2)] + nodes[at + np.uint64(3)]
    )


@kernel
def _line_sum(nodes: FloatArray, at: Position) -> Any:
    """Sum of one line. The walk splits a line in the same order, so their roundings agree."""
    return _half_sum(nodes, at) + _half_sum(nodes, at + np.uint64(4))


@kernel
def _walk_line(nodes: FloatArray, at: Position, rest: Any) -> tuple[Position, Any]:
    """Which entry (its position) covers `rest`, and what is left of it there.

    Goes right only where something positive lies right, so that no rounding leads to a zero and a
    `rest` at or past the line's sum ends at its last positive entry.
    """
    left = _half_sum(nodes, at)
    right = _half_sum(nodes, at + np.uint64(4))
    go = (rest >= left) & (right > 0.0)
    rest = rest - left if go else rest
    at = at + np.uint64(4) if go else at
    left = nodes[at] + nodes[at + np.uint64(1)]
    right = nodes[at + np.uint64(2)] + nodes[at + np.uint64(3)]
    go = (rest >= left) & (right > 0.0)
    rest = rest - left if go else rest
    at = at + np.uint64(2) if go else at
    left = nodes[at]
    go = (rest >= left) & (nodes[at + np.uint64(1)] > 0.0)
    rest = rest - left if go else rest
    at = at + np.uint64(1) if go else at
    return at, rest


@kernel
def _find_kernel(
    nodes: FloatArray, offsets: IntArray, rests: FloatArray, indices: IntArray
) -> None:
    """Turn prefix sums into indices, and in `rests` into what is left of them within the leaf.

    The caller has checked that the total is positive and no prefix sum is NaN.
    """
    depth = len(offsets) - 3
    for i in range(len(rests)):
        indices[i] = 0
        rests[i] = max(rests[i], 0.0)
    for h in range(depth - 1, -1, -1):
        base = np.uint64(offsets[h])
        for i in range(len(rests)):
            line = base + np.uint64(FANOUT) * np.uint64(indices[i])
            at, rests[i] = _walk_line(nodes, line, rests[i])
            indices[i] = np.int64(at - base)


@kernel
def _sample_kernel(
    nodes: FloatArray,
    offsets: IntArray,
    stratified: bool,
    indices: IntArray,
    probabilities: FloatArray,
) -> None:
    """Turn uniforms in [0, 1) in `probabilities` into `indices` and their probabilities."""
    depth = len(offsets) - 3
    n = len(indices)
    total = nodes[offsets[depth]]
    stratum = total / n
    for i in range(n):
        u = probabilities[i]
        probabilities[i] = (i + u) * stratum if stratified else u * total
    _find_kernel(nodes, offsets, probabilities, indices)
    for i in range(n):
        probabilities[i] = nodes[np.uint64(indices[i])] / total


@kernel
def _first_invalid(capacity: int, indices: IntArray, priorities: FloatArray) -> int:
    """Position of the first index out of range or bad priority, or -1."""
    for i in range(len(indices)):
        if not (
            (indices[i] >= 0)
            & (indices[i] < capacity)
            & (priorities[i] >= 0.0)
            & (priorities[i] < np.inf)
        ):
            return i
    return _ALL_GOOD


@kernel
def _write_leaf(nodes: FloatArray, minima: Position, index: Position, priority: float) -> None:
    """Store one leaf and keep I3."""
    block = minima + index // np.uint64(MINIMA_BLOCK)
    old = nodes[index]
    smallest = nodes[block]
    if (priority > 0.0) & (priority <= abs(smallest)):
        nodes[block] = priority
    elif (old == smallest) & (old != priority):
        nodes[block] = -smallest
    nodes[index] = priority


@kernel
def _sum_paths(nodes: FloatArray, offsets: IntArray, indices: IntArray) -> None:
    """Compute anew every sum above `indices`, level by level."""
    depth = len(offsets) - 3
    n = len(indices)
    for h in range(depth):
        base = np.uint64(offsets[h])
        above = np.uint64(offsets[h + 1])
        lines = (offsets[h + 1] - offsets[h]) // FANOUT
        if lines <= n:
            for i in range(lines):
                line = np.uint64(i)
                nodes[above + line] = _line_sum(nodes, base + np.uint64(FANOUT) * line)
        else:
            shift = np.uint64(3 * (h + 1))
            for i in range(n):
                line = np.uint64(indices[i]) >> shift
                nodes[above + line] = _line_sum(nodes, base + np.uint64(FANOUT) * line)


@kernel
def _update_kernel(
    nodes: FloatArray, offsets: IntArray, capacity: int, indices: IntArray, priorities: FloatArray
) -> int:
    """Write leaves in order and compute their sums anew; -1, or where the first bad pair is."""
    bad = _first_invalid(capacity, indices, priorities)
    if bad != _ALL_GOOD:
        return bad
    minima = np.uint64(offsets[-2])
    for i in range(len(indices)):
        _write_leaf(nodes, minima, np.uint64(indices[i]), priorities[i])
    _sum_paths(nodes, offsets, indices)
    return _ALL_GOOD


@kernel
def _rebuild_kernel(nodes: FloatArray, offsets: IntArray, capacity: int) -> None:
    """Compute sums and minima from the leaves alone."""
    for i in range(capacity, offsets[1]):
        nodes[i] = 0.0
    nodes[offsets[1] : offsets[-2]] = 0.0
    entries = capacity
    for h in range(len(offsets) - 3):
        entries = (entries + FANOUT - 1) // FANOUT
        for i in range(entries):
            nodes[offsets[h + 1] + i] = _line_sum(nodes, np.uint64(offsets[h] + FANOUT * i))
    for b in range(offsets[-1] - offsets[-2]):
        nodes[offsets[-2] + b] = _block_minimum(nodes, capacity, b, 0.0)


@kernel
def _block_minimum(nodes: FloatArray, capacity: int, block: int, at_least: float) -> float:
    """Smallest positive leaf of a block; none is below `at_least`, so one equal to it ends it."""
    smallest = np.inf
    start = block * MINIMA_BLOCK
    for i in range(start, min(start + MINIMA_BLOCK, capacity)):
        leaf = nodes[np.uint64(i)]
        if (leaf > 0.0) & (leaf < smallest):
            smallest = leaf
            if leaf == at_least:
                break
    return smallest


@kernel
def _min_positive_kernel(nodes: FloatArray, offsets: IntArray, capacity: int) -> float:
    """Smallest positive leaf; scans only those blocks that may hold a smaller one than is known."""
    first = offsets[-2]
    blocks = offsets[-1] - first
    smallest = np.inf
    for b in range(blocks):
        if 0.0 < nodes[first + b] < smallest:
            smallest = nodes[first + b]
    for b in range(blocks):
        bound = -nodes[first + b]
        if 0.0 < bound < smallest:
            nodes[first + b] = _block_minimum(nodes, capacity, b, bound)
            smallest = min(smallest, nodes[first + b])
    return smallest


@kernel
def _is_drawn(drawn: IntArray, index: Position) -> bool:
    """Whether `index` is in the open-addressed set; adds nothing."""
    mask = len(drawn) - 1
    slot = (index * 0x9E3779B1 >> 16) & mask
    while drawn[slot] >= 0:
        if drawn[slot] == index:
            return True
        slot = (slot + 1) & mask
    return False


@kernel
def _add_drawn(drawn: IntArray, index: Position) -> None:
    mask = len(drawn) - 1
    slot = (index * 0x9E3779B1 >> 16) & mask
    while drawn[slot] >= 0:
        slot = (slot + 1) & mask
    drawn[slot] = index


@kernel
def _sample_distinct_kernel(
    nodes: FloatArray, offsets: IntArray, indices: IntArray, probabilities: FloatArray
) -> int:
    """Like `_sample_kernel`, one after the other among the leaves not yet drawn; returns how many.

    A drawn leaf is taken out of the sums above it, never out of the leaves: a process that dies in
    here loses nothing, because sums are rebuilt on attach.
    """
    depth = len(offsets) - 3
    n = len(indices)
    total = nodes[offsets[depth]]
    size = 2
    while size < 2 * n:
        size *= 2
    drawn = np.full(size, -1, np.int64)
    line = np.zeros(FANOUT)
    count = 0
    while count < n and nodes[offsets[depth]] > 0.0:
        rest = probabilities[count] * nodes[offsets[depth]]
        index = np.uint64(0)
        for h in range(depth - 1, 0, -1):
            base = np.uint64(offsets[h])
            at, rest = _walk_line(nodes, base + np.uint64(FANOUT) * index, rest)
            index = at - base
        first = np.int64(index) * FANOUT
        for j in range(FANOUT):
            line[j] = 0.0 if _is_drawn(drawn, first + j) else nodes[first + j]
        at, rest = _walk_line(line, np.uint64(0), rest)
        chosen = first + np.int64(at)
        _add_drawn(drawn, chosen)
        indices[count] = chosen
        probabilities[count] = nodes[chosen] / total
        count += 1
        line[np.int64(at)] = 0.0
        nodes[offsets[1] + chosen // FANOUT] = _line_sum(line, np.uint64(0))
        for h in range(1, depth):
            parent = np.uint64(chosen >> (3 * (h + 1)))
            base = np.uint64(offsets[h])
            nodes[np.uint64(offsets[h + 1]) + parent] = _line_sum(
                nodes, base + np.uint64(FANOUT) * parent
            )
    _sum_paths(nodes, offsets, indices[:count])
    return count


# -- the face --------------------------------------------------------------------------------------


def _as_vector(values: npt.ArrayLike, dtype: type, what: str) -> npt.NDArray[Any]:
    """A contiguous writeable vector of `dtype`: kernels are compiled for nothing else."""
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
    """Priorities of `capacity` items and their sums, over memory that the caller may give.

    Args:
        capacity: number of leaves; any positive integer.
        buffer: writeable memory of at least `required_bytes(capacity)`, 64-byte aligned (an mmap, a
            memoryview, an array of bytes); its content is overwritten with zeros. None allocates.

    Raises:
        ConfigError: the capacity is not a positive integer.
        SharedMemoryError: the buffer is too small, read-only or not aligned.
    """

    def __init__(self, capacity: int, buffer: "WriteableBuffer | None" = None) -> None:
        if buffer is None:
            size = self.required_bytes(capacity)
            raw = np.empty(size + _LINE_BYTES, np.uint8)
            skip = -raw.ctypes.data % _LINE_BYTES
            buffer = raw[skip : skip + size].data
        self._map(capacity, buffer)
        self._nodes[:] = 0.0
        self._nodes[self._offsets[-2] :] = np.inf

    @classmethod
    def attach(cls, capacity: int, buffer: "WriteableBuffer") -> Self:
        """Take over memory that holds a tree: leaves are kept, everything else is computed anew.

        Raises:
            ConfigError, SharedMemoryError: as the constructor; also where a leaf is not a priority.
        """
        tree = cls.__new__(cls)
        tree._map(capacity, buffer)
        leaves = tree._nodes[:capacity]
        if not (np.isfinite(leaves).all() and (leaves >= 0.0).all()):
            raise SharedMemoryError("the buffer's leaves are not finite priorities >= 0: no tree")
        tree.rebuild()
        return tree

    @staticmethod
    def required_bytes(capacity: int) -> int:
        """Bytes of the buffer for so many leaves."""
        if not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise ConfigError(f"capacity must be a positive integer, got {capacity!r}")
        return int(level_offsets(int(capacity))[-1]) * 8

    def _map(self, capacity: int, buffer: "WriteableBuffer") -> None:
        size = self.required_bytes(capacity)
        raw = np.frombuffer(memoryview(buffer), np.uint8)
        if raw.size < size:
            raise SharedMemoryError(
                f"{capacity} leaves need {size} bytes, the buffer has {raw.size}"
            )
        if raw.ctypes.data % _LINE_BYTES:
            raise SharedMemoryError(f"the buffer must be aligned to {_LINE_BYTES} bytes")
        if not raw.flags.writeable:
            raise SharedMemoryError("the buffer is read-only; a tree needs to write to it")
        self._capacity = int(capacity)
        self._offsets = level_offsets(self._capacity)
        self._nodes: FloatArray = raw[:size].view(np.float64)
        self._total_at = int(self._offsets[-3])

    @property
    def capacity(self) -> int:
        """Number of leaves."""
        return self._capacity

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return self._nodes.item(self._total_at)

    @property
    def min_positive(self) -> float:
        """The smallest positive leaf; inf where there is none."""
        return _min_positive_kernel(self._nodes, self._offsets, self._capacity)

    def update(self, indices: npt.ArrayLike, priorities: npt.ArrayLike) -> None:
        """Set leaves; of equal indices the last wins; on an error nothing has changed.

        Args:
            indices: (n,) int64 in [0, capacity).
            priorities: (n,) float64, finite and >= 0.

        Raises:
            InvalidIndex: an index is out of range.
            InvalidPriority: a priority is NaN, infinite or negative.
            ConfigError: a wrong dtype or shape.
        """
        indices = _as_vector(indices, np.int64, "indices")
        priorities = _as_vector(priorities, np.float64, "priorities")
        if len(indices) != len(priorities):
            raise ConfigError(f"{len(indices)} indices but {len(priorities)} priorities")
        bad = _update_kernel(self._nodes, self._offsets, self._capacity, indices, priorities)
        if bad != _ALL_GOOD:
            if not 0 <= indices[bad] < self._capacity:
                raise InvalidIndex(self._out_of_range(indices[bad]))
            raise InvalidPriority(
                f"a priority must be finite and >= 0, got {priorities[bad]} for index "
                f"{indices[bad]}; nothing was updated"
            )

    def find(self, prefix_sums: npt.ArrayLike) -> IntArray:
        """The smallest i whose cumulative sum exceeds the value; never a leaf that is 0.

        Args:
            prefix_sums: (n,) float64; below 0 counts as 0, at or above the total gives the last
                positive leaf.

        Returns:
            (n,) int64 indices.

        Raises:
            NotEnoughData: no leaf is positive.
            ConfigError: a value is NaN, or a wrong dtype or shape.
        """
        rests = _as_vector(prefix_sums, np.float64, "prefix_sums").copy()
        if np.isnan(rests).any():
            raise ConfigError("prefix_sums must not be NaN")
        self._demand_positive_total()
        indices = np.empty(len(rests), np.int64)
        _find_kernel(self._nodes, self._offsets, rests, indices)
        return indices

    def sample(
        self, batch_size: int, rng: np.random.Generator, method: Method = "stratified"
    ) -> tuple[IntArray, FloatArray]:
        """Draw indices with probability proportional to their leaves.

        Args:
            batch_size: how many, at least 1.
            rng: gives `batch_size` uniforms.
            method: "stratified" draws one from each of `batch_size` equal parts of the total,
                in ascending order; "independent" draws each from the whole;
                "without_replacement" draws one after the other from those not yet drawn.

        Returns:
            (batch_size,) int64 indices and (batch_size,) float64 leaf / total: the probability of a
            single draw, for "stratified" the mean over the parts, for "without_replacement" that
            of being drawn first.

        Raises:
            NotEnoughData: no leaf is positive, or fewer than `batch_size` without replacement.
            ConfigError: batch_size < 1 or an unknown method.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        self._demand_positive_total()
        probabilities = rng.random(batch_size)
        indices = np.empty(batch_size, np.int64)
        if method == "without_replacement":
            count = _sample_distinct_kernel(self._nodes, self._offsets, indices, probabilities)
            if count < batch_size:
                raise NotEnoughData(
                    f"{batch_size} different items were asked for, only {count} have a priority > 0"
                )
        elif method in ("stratified", "independent"):
            stratified = method == "stratified"
            _sample_kernel(self._nodes, self._offsets, stratified, indices, probabilities)
        else:
            raise ConfigError(
                f"method must be stratified, independent or without_replacement, got {method!r}"
            )
        return indices, probabilities

    def __len__(self) -> int:
        return self._capacity

    def __getitem__(self, indices: npt.ArrayLike) -> Any:
        """Leaves: a float for an integer, (n,) float64 for (n,) int64. Raises InvalidIndex."""
        wanted = _as_vector(indices, np.int64, "indices")
        outside = (wanted < 0) | (wanted >= self._capacity)
        if outside.any():
            raise InvalidIndex(self._out_of_range(wanted[outside][0]))
        leaves = self._nodes[wanted]
        return leaves if np.ndim(indices) else float(leaves[0])

    def rebuild(self) -> None:
        """Compute everything anew from the leaves."""
        _rebuild_kernel(self._nodes, self._offsets, self._capacity)

    def check_valid(self) -> tuple[bool, str]:
        """Whether the invariants hold, and which one does not, where."""
        nodes, offsets = self._nodes, self._offsets
        leaves = nodes[: self._capacity]
        bad = np.flatnonzero(~((leaves >= 0.0) & (leaves < np.inf)))
        if bad.size:
            return False, f"I1: leaf {bad[0]} is {leaves[bad[0]]}"
        entries = self._capacity
        for h in range(len(offsets) - 3):
            if nodes[offsets[h] + entries : offsets[h + 1]].any():
                return False, f"I1: level {h} has a non-zero entry past its {entries}"
            c = nodes[offsets[h] : offsets[h + 1]].reshape(-1, FANOUT).T
            sums = ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]))
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

    def _out_of_range(self, index: int) -> str:
        return f"an index must be in [0, {self._capacity}), got {index}"
