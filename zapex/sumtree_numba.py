"""The sum tree: draw an index with probability proportional to its priority.

A tree is not thread-safe, and only one process uses it. Callers must hold a lock. The kernels work
on one float64 array. Each level is padded with zeros to whole cache lines of 8 entries:

    leaves | sums of 8 leaves | sums of 8 of those | ... | one line | total | block minima
    h = 0    h = 1                                         depth-1    depth

A node is a line. Its value is in the level above: the sum of its 8 entries. Kernels always compute
this sum from all 8 entries, so rounding errors do not accumulate. `offsets[h]` is the start of
level h; each process computes it and does not read it from the buffer. Kernels process one level at
a time for the whole batch: the cache misses of a level are independent, so they overlap
(docs/decisions.md).

    I1  0 <= leaf <= priority_limit(capacity); entries past the capacity are 0
    I2  entry i of level h + 1 = line_sum of entries [8 i, 8 i + 8) of level h
    I3  minima[b] > 0: the smallest positive leaf of block b, inf if there is none;
        minima[b] < 0: no positive leaf of block b is smaller than -minima[b]

A kernel checks only what its docstring says. `nodes` is the whole array, `offsets` the result of
`level_offsets`. Where speed matters, positions are uint64: Numba then omits the test for
negative ones.
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
from zapex.machine.jit import kernel
from zapex.machine.memory import lay_out
from zapex.machine.segment import ALIGNMENT_BYTES, view_bytes
from zapex.machine.simd import LANES, FloatArray, Position, line_sum, rank_in_line

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

IntArray = npt.NDArray[np.int64]
Method = Literal["stratified", "independent", "without_replacement"]
TreeArrays = tuple[FloatArray, IntArray, int]
"""Nodes, offsets and capacity, as the kernels take them."""

MINIMA_BLOCK = 4096  # leaves; one block is scanned quickly, and there are few blocks
CACHED_ENTRIES = 8192  # a level up to 64 KiB is assumed to be in the L1 or L2 cache
_LARGEST = float(np.finfo(np.float64).max)


def level_offsets(capacity: int) -> IntArray:
    """The start of each level, in entries: leaves, ..., total, minima, end."""
    sizes = [capacity]
    while sizes[-1] > 1 or len(sizes) == 1:
        sizes.append(-(-sizes[-1] // LANES))
    sizes.append(-(-capacity // MINIMA_BLOCK))
    sections, nbytes = lay_out([(str(h), (n,), np.float64) for h, n in enumerate(sizes)])
    starts = [section.offset for section in sections.values()]
    return np.array([*starts, nbytes], np.int64) // np.dtype(np.float64).itemsize


@kernel
def priority_limit(capacity: int) -> float:
    """The largest priority: `capacity` of them do not overflow the total."""
    return _LARGEST / (2 * capacity)


@kernel
def _last_positive(nodes: FloatArray, line: Position) -> Position:
    """Lane of the last positive entry of a line, 0 if there is none."""
    lane = np.uint64(LANES - 1)
    while lane > np.uint64(0) and nodes[line + lane] == 0.0:
        lane -= np.uint64(1)
    return lane


@kernel
def find_kernel(nodes: FloatArray, offsets: IntArray, rests: FloatArray, indices: IntArray) -> bool:
    """Find the leaf of each prefix sum in `rests`, and write its index into `indices`.

    The total must be positive. At the end `rests` holds the rest of each prefix sum within its
    leaf, or inf if it was at or above the total. If a prefix sum is NaN, the kernel changes nothing
    and returns False.
    """
    n = len(rests)
    for i in range(n):
        if np.isnan(rests[i]):
            return False
    touched = np.empty(n)
    for i in range(n):
        indices[i] = 0
        rests[i] = max(rests[i], 0.0)
    for h in range(len(offsets) - 4, -1, -1):
        base = np.uint64(offsets[h])
        if offsets[h + 1] - offsets[h] > CACHED_ENTRIES:
            # In a short loop of loads, more cache misses overlap than in the long loop below.
            for i in range(n):
                touched[i] = nodes[base + np.uint64(LANES) * np.uint64(indices[i])]
        lanes_seen = np.uint64(0)
        for i in range(n):
            entry = np.uint64(LANES) * np.uint64(indices[i])
            lane, below = rank_in_line(nodes, base + entry, rests[i])
            lanes_seen |= np.uint64(lane)
            rests[i] -= below
            indices[i] = np.int64(entry + (np.uint64(lane) & np.uint64(LANES - 1)))
        if lanes_seen & np.uint64(LANES):
            _end_at_last_positive(nodes, base, rests, indices)
    return True


@kernel
def _end_at_last_positive(
    nodes: FloatArray, base: Position, rests: FloatArray, indices: IntArray
) -> None:
    """Correct items at or above the sum of their line, after rounding or by request.

    The search left them at the line's first entry. This moves them to the last positive entry. An
    infinite rest does the same in each level below.
    """
    for i in range(len(rests)):
        entry = np.uint64(indices[i]) & ~np.uint64(LANES - 1)
        if rests[i] >= line_sum(nodes, base + entry):
            indices[i] = np.int64(entry + _last_positive(nodes, base + entry))
            rests[i] = np.inf


@kernel
def sample_kernel(
    nodes: FloatArray,
    offsets: IntArray,
    stratified: bool,
    indices: IntArray,
    probabilities: FloatArray,
) -> None:
    """Draw `indices` from uniforms in [0, 1) in `probabilities`, which then holds leaf / total."""
    total = nodes[offsets[-3]]
    n = len(indices)
    stratum = total / n
    for i in range(n):
        uniform = probabilities[i]
        probabilities[i] = (i + uniform) * stratum if stratified else uniform * total
    find_kernel(nodes, offsets, probabilities, indices)
    for i in range(n):
        probabilities[i] = nodes[np.uint64(indices[i])] / total


@kernel
def sample_distinct_kernel(
    nodes: FloatArray, offsets: IntArray, indices: IntArray, probabilities: FloatArray
) -> int:
    """Like `sample_kernel`, but without replacement. Returns how many were drawn.

    First all are drawn from the whole. A draw of a leaf that was drawn before is skipped: this
    gives the same distribution as a draw from the rest. The missing draws use sums without the
    drawn leaves, and uniforms that are generated from all the given ones.

    A drawn leaf is negative until the end. If the process dies before, no leaf is lost:
    `rebuild_kernel` takes absolute values.
    """
    total_at, n = offsets[-3], len(indices)
    total = nodes[total_at]
    uniforms = probabilities.copy()
    find_kernel(nodes, offsets, uniforms * total, indices)
    count = 0
    for i in range(n):
        leaf = nodes[indices[i]]
        if leaf > 0.0:
            nodes[indices[i]] = -leaf
            indices[count] = indices[i]
            probabilities[count] = leaf / total
            count += 1
    repeats = count < n
    if repeats:
        line = np.zeros(LANES)
        for i in range(count):
            _load_undrawn(nodes, indices[i] // LANES, line)
            nodes[offsets[1] + indices[i] // LANES] = line_sum(line, np.uint64(0))
        _sum_paths(nodes, offsets, 1, indices[:count])
        spun = np.uint64(0)
        for bits in uniforms.view(np.uint64):
            spun = _spin(spun ^ bits)
        while count < n and nodes[total_at] > 0.0:
            spun = _spin(spun)
            rest = np.float64(spun >> np.uint64(11)) * 2.0**-53 * nodes[total_at]
            index = np.uint64(0)
            for h in range(len(offsets) - 4, 0, -1):
                entry = np.uint64(LANES) * index
                lane, rest = _walk_line(nodes, np.uint64(offsets[h]) + entry, rest)
                index = entry + lane
            _load_undrawn(nodes, np.int64(index), line)
            lane, rest = _walk_line(line, np.uint64(0), rest)
            chosen = np.int64(np.uint64(LANES) * index + lane)
            indices[count] = chosen
            probabilities[count] = nodes[chosen] / total
            nodes[chosen] = -nodes[chosen]
            line[np.int64(lane)] = 0.0
            nodes[np.uint64(offsets[1]) + index] = line_sum(line, np.uint64(0))
            _sum_paths(nodes, offsets, 1, indices[count : count + 1])
            count += 1
    for i in range(count):
        nodes[indices[i]] = abs(nodes[indices[i]])
    if repeats:
        _sum_paths(nodes, offsets, 0, indices[:count])
    return count


@kernel
def _spin(state: Position) -> Position:
    """The next state of SplitMix64, and its output (Steele, Lea and Flood 2014)."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def _load_undrawn(nodes: FloatArray, index: Position, line: FloatArray) -> None:
    """Copy line `index` of the leaves, with 0 for leaves that are drawn."""
    for lane in range(LANES):
        line[lane] = max(nodes[LANES * index + lane], 0.0)


@kernel
def _walk_line(nodes: FloatArray, line: Position, rest: Any) -> tuple[Position, Any]:
    """The lane of one line that covers `rest`, and the rest within it; see `find_kernel`."""
    lane, below = rank_in_line(nodes, line, rest)
    if lane < LANES:
        return np.uint64(lane), rest - below
    return _last_positive(nodes, line), np.inf


@kernel
def update_kernel(
    nodes: FloatArray, offsets: IntArray, capacity: int, indices: IntArray, priorities: FloatArray
) -> bool:
    """Write leaves in order and compute their sums again.

    If an index or a priority is out of range, the kernel changes nothing and returns False.
    """
    limit = priority_limit(capacity)
    valid = True
    for i in range(len(indices)):  # no early exit, so that LLVM vectorises it
        valid &= (indices[i] >= 0) & (indices[i] < capacity)
        valid &= (priorities[i] >= 0.0) & (priorities[i] <= limit)
    if not valid:
        return False
    minima = np.uint64(offsets[-2])
    for i in range(len(indices)):
        index = np.uint64(indices[i])
        block = minima + index // np.uint64(MINIMA_BLOCK)
        old, new, smallest = nodes[index], priorities[i], nodes[block]
        if (new > 0.0) & (new <= abs(smallest)):
            nodes[block] = new
        elif (old == smallest) & (old != new):
            nodes[block] = -smallest  # other leaves may be equal; no leaf is smaller
        nodes[index] = new
    _sum_paths(nodes, offsets, 0, indices)
    return True


@kernel
def _sum_paths(nodes: FloatArray, offsets: IntArray, lowest: int, indices: IntArray) -> None:
    """Compute the sums above the leaves `indices` again, from level `lowest` up."""
    n = len(indices)
    for h in range(lowest, len(offsets) - 3):
        base = np.uint64(offsets[h])
        above = np.uint64(offsets[h + 1])
        lines = (offsets[h + 1] - offsets[h]) // LANES
        shift = np.uint64(3 * (h + 1))
        # If a level has no more lines than the batch has items, each line is done once.
        whole = lines <= n
        for i in range(lines if whole else n):
            line = np.uint64(i) if whole else np.uint64(indices[i]) >> shift
            nodes[above + line] = line_sum(nodes, base + np.uint64(LANES) * line)


@kernel
def rebuild_kernel(nodes: FloatArray, offsets: IntArray, capacity: int) -> None:
    """Compute sums and minima again from the leaves."""
    for i in range(capacity):
        nodes[i] = abs(nodes[i])  # see `sample_distinct_kernel`
    nodes[capacity : offsets[-2]] = 0.0
    lines = capacity
    for h in range(len(offsets) - 3):
        lines = (lines + LANES - 1) // LANES
        for i in range(lines):
            nodes[offsets[h + 1] + i] = line_sum(nodes, np.uint64(offsets[h] + LANES * i))
    for block in range(offsets[-1] - offsets[-2]):
        nodes[offsets[-2] + block] = _block_minimum(nodes, capacity, block, 0.0)


@kernel
def _block_minimum(nodes: FloatArray, capacity: int, block: int, bound: float) -> float:
    """Smallest positive leaf of a block that has none below `bound`; inf if there is none."""
    smallest = np.inf
    start = block * MINIMA_BLOCK
    for i in range(start, min(start + MINIMA_BLOCK, capacity)):
        leaf = nodes[np.uint64(i)]
        if (leaf > 0.0) & (leaf < smallest):
            smallest = leaf
            if leaf == bound:
                break
    return smallest


@kernel
def min_positive_kernel(nodes: FloatArray, offsets: IntArray, capacity: int) -> float:
    """Smallest positive leaf. Scans only blocks that may hold a smaller leaf than the known one."""
    minima = nodes[offsets[-2] : offsets[-1]]
    smallest = np.inf
    for block in range(len(minima)):
        if 0.0 < minima[block] < smallest:
            smallest = minima[block]
    for block in range(len(minima)):
        bound = -minima[block]
        if 0.0 < bound < smallest:
            minima[block] = _block_minimum(nodes, capacity, block, bound)
            smallest = min(smallest, minima[block])
    return smallest


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
