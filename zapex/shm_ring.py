"""A ring in shared memory: one producer sends fixed-size records to one consumer.

Layout, 64-byte aligned; words are int64; tail and head are two cache lines apart:

    | magic, capacity, record_bytes | tail | head | records[capacity] |

    I1  0 <= tail - head <= capacity; capacity is a power of two
    I2  sequences only grow; index = sequence & (capacity - 1)
    I3  every word has exactly one writer (tail: producer; head: consumer)
    I4  slots in [head, tail) belong to the consumer, all others to the producer
    SYNC slot-full: commit (release tail)   -> poll (acquire tail)
    SYNC slot-free: release (release head)  -> claim (acquire head)
    Crash: if a producer dies between claim and commit, nothing is published. If a consumer dies
           between poll and release, the records are delivered again. The next process that
           attaches to an end continues from the end's word.

Each end keeps a copy of the other end's word. It loads the word again only if the copy shows too
little. An old copy is safe: it shows fewer records or less room than there is. Only one thread at a
time may use an end.
See docs/ring_protocol.md and the model in tests/stress/ring.pml.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zapex.errors import ConfigError, SharedMemoryError
from zapex.machine.atomics import (
    Words,
    copy_bytes,
    load_acquire,
    load_kernel,
    load_relaxed,
    store_relaxed,
    store_release,
)
from zapex.machine.jit import kernel
from zapex.machine.memory import Section, lay_out
from zapex.machine.segment import view_bytes

FULL = -1

_MAGIC = 0x7A61706578_0101  # "zapex", ring, layout 1
_HOT_WORDS = 16  # two cache lines: processors fetch them in pairs
_MAGIC_WORD, _CAPACITY_WORD, _RECORD_BYTES_WORD = 0, 1, 2
_TAIL_WORD, _HEAD_WORD = _HOT_WORDS, 2 * _HOT_WORDS
_HEADER_WORDS = 3 * _HOT_WORDS

# An end's own words, in private memory.
_CAPACITY, _SEEN, _HELD = 0, 1, 2  # copy of the other end's word; records held
_OWN_WORDS = 3


@kernel
def _create_kernel(words: Any, capacity: int, record_bytes: int) -> None:
    store_relaxed(words, _TAIL_WORD, 0)
    store_relaxed(words, _HEAD_WORD, 0)
    store_relaxed(words, _CAPACITY_WORD, capacity)
    store_relaxed(words, _RECORD_BYTES_WORD, record_bytes)
    store_release(words, _MAGIC_WORD, _MAGIC)  # last: the header is complete


@kernel
def _claim_kernel(words: Any, own: Any, n: int) -> int:
    tail = load_relaxed(words, _TAIL_WORD)  # I3: only this end writes it
    if tail + n - own[_SEEN] > own[_CAPACITY]:
        own[_SEEN] = load_acquire(words, _HEAD_WORD)  # SYNC slot-free
        if tail + n - own[_SEEN] > own[_CAPACITY]:
            return FULL
    own[_HELD] = n
    return tail


@kernel
def _commit_kernel(words: Any, own: Any, n: int) -> None:
    own[_HELD] = 0
    # STEP ring-written
    store_release(words, _TAIL_WORD, load_relaxed(words, _TAIL_WORD) + n)  # SYNC slot-full
    # STEP ring-committed


@kernel
def _poll_kernel(words: Any, own: Any, max_n: int) -> int:
    head = load_relaxed(words, _HEAD_WORD)  # I3: only this end writes it
    if own[_SEEN] - head < max_n:
        own[_SEEN] = load_acquire(words, _TAIL_WORD)  # SYNC slot-full
    own[_HELD] = min(own[_SEEN] - head, max_n)
    return head


@kernel
def _release_kernel(words: Any, own: Any, n: int) -> None:
    own[_HELD] -= n
    # STEP ring-read
    store_release(words, _HEAD_WORD, load_relaxed(words, _HEAD_WORD) + n)  # SYNC slot-free
    # STEP ring-released


@kernel
def offer_kernel(words: Any, own: Any, ring: Any, rows: Any, n: int, record_bytes: int) -> int:
    """`try_offer` of n records, as bytes. Returns the first sequence, or FULL."""
    sequence = _claim_kernel(words, own, n)
    if sequence != FULL:
        index = sequence & (own[_CAPACITY] - 1)
        before_wrap = min(n, own[_CAPACITY] - index) * record_bytes
        copy_bytes(ring, index * record_bytes, rows, 0, before_wrap)
        copy_bytes(ring, 0, rows, before_wrap, n * record_bytes - before_wrap)
        _commit_kernel(words, own, n)
    return sequence


@kernel
def take_kernel(words: Any, own: Any, ring: Any, rows: Any, max_n: int, record_bytes: int) -> Any:
    """`take` of at most max_n records, as bytes. Returns how many."""
    index = _poll_kernel(words, own, max_n) & (own[_CAPACITY] - 1)
    n = own[_HELD]
    before_wrap = min(n, own[_CAPACITY] - index) * record_bytes
    copy_bytes(rows, 0, ring, index * record_bytes, before_wrap)
    copy_bytes(rows, before_wrap, ring, 0, n * record_bytes - before_wrap)
    _release_kernel(words, own, n)
    return n


@kernel
def _used_kernel(words: Any) -> int:
    # The head is loaded first, so the result is never negative.
    return -load_acquire(words, _HEAD_WORD) + load_acquire(words, _TAIL_WORD)  # SYNC slot-full


@kernel
def _find_used_kernel(memory: Any, firsts: Any, found: Any) -> int:
    """Which of many rings of one block have records that are committed and not released.

    memory: the block as words. firsts: the first word of each ring. found: takes the indices of
    those rings in `firsts`. Returns how many they are.
    """
    count = 0
    for i in range(firsts.size):
        first = firsts[i]
        head = load_acquire(memory, first + _HEAD_WORD)  # before tail, as in `used`
        if load_acquire(memory, first + _TAIL_WORD) > head:  # SYNC slot-full
            found[count] = i
            count += 1
    return count


class ShmRing:
    """A ring of fixed-size records over a buffer, for one producer and one consumer.

    Args:
        buffer: memory of at least `required_bytes`, aligned to 64 bytes.
        capacity: number of records, a power of two.
        dtype: the dtype of one record: plain bytes, no Python objects.
        create: make a new ring and lose the old content; otherwise attach to a ring.

    Attributes:
        records: (capacity,) array of `dtype`.

    Raises:
        ConfigError: the capacity is not a power of two, or the dtype has Python objects.
        SharedMemoryError: the buffer does not fit, or has no ring of this capacity and dtype.
    """

    def __init__(
        self, buffer: Any, capacity: int, dtype: npt.DTypeLike, *, create: bool = False
    ) -> None:
        self.capacity = capacity
        self.dtype = np.dtype(dtype)
        sections, nbytes = self._layout(capacity, self.dtype)
        memory = view_bytes(buffer, nbytes, "a ring")
        self._words: npt.NDArray[np.int64] = sections["words"].view(memory)
        self.records: npt.NDArray[Any] = sections["records"].view(memory)
        self._bytes = self.records.view(np.uint8)
        if create:
            _create_kernel(self._words, capacity, self.dtype.itemsize)
        else:
            self._check_header()

    @classmethod
    def required_bytes(cls, capacity: int, dtype: npt.DTypeLike) -> int:
        """Bytes of a ring of `capacity` records."""
        return cls._layout(capacity, np.dtype(dtype))[1]

    @staticmethod
    def _layout(capacity: int, record: "np.dtype[Any]") -> tuple[dict[str, Section], int]:
        if capacity < 1 or capacity & (capacity - 1):
            raise ConfigError(f"a ring's capacity must be a power of two, got {capacity}")
        if record.hasobject or record.itemsize == 0:
            raise ConfigError(f"a ring's records must be plain bytes, got dtype {record}")
        return lay_out([("words", (_HEADER_WORDS,), np.int64), ("records", (capacity,), record)])

    def record(self, sequence: int) -> Any:
        """The record of a sequence. I4 says which end owns it."""
        return self.records[sequence & (self.capacity - 1)]

    def _check_header(self) -> None:
        if load_kernel(self._words, _MAGIC_WORD) != _MAGIC:
            raise SharedMemoryError("the buffer holds no ring of this version: create it first")
        found = int(self._words[_CAPACITY_WORD]), int(self._words[_RECORD_BYTES_WORD])
        if found != (self.capacity, self.dtype.itemsize):
            raise SharedMemoryError(
                f"the ring has {found[0]} records of {found[1]} bytes, expected {self.capacity} of "
                f"{self.dtype.itemsize}: both ends must be started from the same config"
            )
        # Load head first: head never passes tail, so the tail loaded later is at least head.
        head, tail = self.head, self.tail
        if not 0 <= head <= tail:
            raise SharedMemoryError(f"the ring is damaged: head {head}, tail {tail} (I1)")

    @property
    def head(self) -> int:
        """How many records were released since the creation (acquire load)."""
        return load_kernel(self._words, _HEAD_WORD)

    @property
    def tail(self) -> int:
        """How many records were committed since the creation (acquire load)."""
        return load_kernel(self._words, _TAIL_WORD)

    @property
    def used(self) -> int:
        """How many records are committed and not released; it may change during the call."""
        return _used_kernel(self._words)

    def producer(self) -> "RingProducer":
        """The end that commits. Only one may exist at a time: a second one would break I3."""
        return RingProducer(self)

    def consumer(self) -> "RingConsumer":
        """The end that releases. Only one may exist at a time."""
        return RingConsumer(self)


class RingsWithRecords:
    """Looks at many rings of one block at once: which have records to take?

    memory: the block, uint8. offsets: where each ring begins, in bytes.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], offsets: Sequence[int]) -> None:
        self._words: Words = memory[: memory.nbytes // 8 * 8].view(np.int64)
        self._firsts = np.array(offsets, np.int64) // 8
        self._found = np.empty_like(self._firsts)

    def any(self) -> bool:
        """Whether one has."""
        return _find_used_kernel(self._words, self._firsts, self._found) > 0

    def find(self) -> list[int]:
        """The indices of those that have, growing."""
        count = _find_used_kernel(self._words, self._firsts, self._found)
        found: list[int] = self._found[:count].tolist()
        return found


class _RingEnd:
    """The common part of both ends: the ring, and private words for the kernels."""

    def __init__(self, ring: ShmRing, seen: int) -> None:
        self.ring = ring
        self._words = ring._words
        self._bytes = ring._bytes
        self._record_bytes = ring.dtype.itemsize
        self._own = np.zeros(_OWN_WORDS, np.int64)
        self._own[_CAPACITY] = ring.capacity
        self._own[_SEEN] = seen

    @property
    def arrays(self) -> tuple[Words, Words, npt.NDArray[np.uint8]]:
        """The first arguments of `offer_kernel` and `take_kernel`, for kernels of other modules."""
        return self._words, self._own, self._bytes

    def _check_rows(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """`rows` as bytes, for a kernel."""
        if rows.dtype != self.ring.dtype or rows.ndim != 1 or not rows.flags.c_contiguous:
            raise ConfigError(
                f"rows must be a contiguous array of shape (n,) and dtype {self.ring.dtype}, "
                f"got shape {rows.shape} and dtype {rows.dtype}"
            )
        return rows.view(np.uint8)

    def _check_held(self, n: int, what: str) -> None:
        if not 0 <= n <= self._own[_HELD]:
            raise ConfigError(f"{what} must be of 0 to {self._own[_HELD]} records, got {n}")


class RingProducer(_RingEnd):
    """Claims slots, writes their records, commits them."""

    def __init__(self, ring: ShmRing) -> None:
        super().__init__(ring, seen=ring.head)

    def try_claim(self, n: int = 1) -> int:
        """Reserve n slots. A new claim replaces an earlier one.

        Returns:
            The sequence of the first slot, or FULL.

        Raises:
            ConfigError: n is below 1 or above the capacity.
        """
        if not 1 <= n <= self.ring.capacity:
            raise ConfigError(f"n must be 1 to the capacity, {self.ring.capacity}, got {n}")
        return _claim_kernel(self._words, self._own, n)

    def commit(self, n: int = 1) -> None:
        """Publish the first n claimed slots with one store, and end the claim."""
        self._check_held(n, "a commit")
        _commit_kernel(self._words, self._own, n)

    def try_offer(self, rows: npt.NDArray[Any]) -> bool:
        """Claim, copy and commit all of `rows`, or nothing.

        Args:
            rows: (n,) of the ring's dtype, contiguous.

        Returns:
            False if the ring has too little room.
        """
        data = self._check_rows(rows)
        if not 1 <= rows.size <= self.ring.capacity:
            raise ConfigError(f"rows must be 1 to the capacity, {self.ring.capacity}: {rows.size}")
        sequence = offer_kernel(
            self._words, self._own, self._bytes, data, rows.size, self._record_bytes
        )
        return sequence != FULL


class RingConsumer(_RingEnd):
    """Polls records and releases them in order."""

    def __init__(self, ring: ShmRing) -> None:
        super().__init__(ring, seen=ring.tail)

    def poll(self, max_n: int) -> tuple[int, int]:
        """Find records that are committed and not released. A second poll gives the same records.

        Args:
            max_n: the most records to return.

        Returns:
            The sequence of the first record, and the number of records.
        """
        if max_n < 1:
            raise ConfigError(f"max_n must be at least 1, got {max_n}")
        sequence = _poll_kernel(self._words, self._own, max_n)
        return sequence, int(self._own[_HELD])

    def release(self, n: int) -> None:
        """Return the first n polled slots to the producer."""
        self._check_held(n, "a release")
        _release_kernel(self._words, self._own, n)

    def take(self, max_n: int, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Copy at most max_n records and release them.

        Args:
            max_n: the most records to copy.
            out: memory of shape (at least max_n,) to copy into; None allocates.

        Returns:
            (n,) records; n may be 0. It is a view of `out` if `out` was given.
        """
        rows = np.empty(max_n, self.ring.dtype) if out is None else out
        data = self._check_rows(rows)
        if not 1 <= max_n <= rows.size:
            raise ConfigError(f"max_n must be 1 to {rows.size}, the rows of out, got {max_n}")
        n = take_kernel(self._words, self._own, self._bytes, data, max_n, self._record_bytes)
        return rows[:n]
