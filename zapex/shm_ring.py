"""One producer hands fixed-size records to one consumer: a ring in shared memory.

Layout, 64-byte aligned; words are int64, the hot ones two cache lines apart:

    | magic, capacity, record_bytes | tail | head | records[capacity] |

    I1  0 <= tail - head <= capacity; capacity is a power of two
    I2  sequences only grow; index = sequence & (capacity - 1)
    I3  every word has exactly one writer (tail: producer; head: consumer)
    I4  slots in [head, tail) are the consumer's, all others the producer's
    SYNC slot-full: commit (release tail)   -> poll (acquire tail)
    SYNC slot-free: release (release head)  -> claim (acquire head)
    Crash: dying between claim and commit publishes nothing; dying between poll and release
           delivers again. Whoever attaches to an end next goes on where its word stands.

Each end keeps the other's word as it last saw it, and looks again only when that is not enough: a
stale view is safe, it shows less than there is. An end belongs to one thread at a time.
See docs/ring_protocol.md and the model in tests/stress/ring.pml.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zapex.atomics import copy_bytes, load_acquire, load_relaxed, store_relaxed, store_release
from zapex.errors import ConfigError, PeerTimeout, SharedMemoryError
from zapex.idle import wait_until
from zapex.jit import kernel
from zapex.shm_segment import view_bytes

FULL = -1

_MAGIC = 0x7A61706578_0101  # "zapex", ring, layout 1
_HOT_WORDS = 16  # two cache lines: processors fetch them in pairs
_MAGIC_WORD, _CAPACITY_WORD, _RECORD_BYTES_WORD = 0, 1, 2
_TAIL_WORD, _HEAD_WORD = _HOT_WORDS, 2 * _HOT_WORDS
_HEADER_WORDS = 3 * _HOT_WORDS
_HEADER_BYTES = 8 * _HEADER_WORDS

# An end's own words, in private memory.
_CAPACITY, _SEEN, _HELD = 0, 1, 2  # the other end's word as last seen; how many are held
_OWN_WORDS = 3


@kernel
def _load_kernel(words: Any, i: int) -> int:
    return load_acquire(words, i)


@kernel
def _create_kernel(words: Any, capacity: int, record_bytes: int) -> None:
    store_relaxed(words, _TAIL_WORD, 0)
    store_relaxed(words, _HEAD_WORD, 0)
    store_relaxed(words, _CAPACITY_WORD, capacity)
    store_relaxed(words, _RECORD_BYTES_WORD, record_bytes)
    store_release(words, _MAGIC_WORD, _MAGIC)  # last: an attacher sees all of it or nothing


@kernel
def _claim_kernel(words: Any, own: Any, n: int) -> int:
    tail = load_relaxed(words, _TAIL_WORD)  # I3: ours, nobody else writes it
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
    head = load_relaxed(words, _HEAD_WORD)  # I3: ours
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
def _offer_kernel(words: Any, own: Any, ring: Any, rows: Any, n: int, record_bytes: int) -> int:
    sequence = _claim_kernel(words, own, n)
    if sequence != FULL:
        index = sequence & (own[_CAPACITY] - 1)
        before_wrap = min(n, own[_CAPACITY] - index) * record_bytes
        copy_bytes(ring, index * record_bytes, rows, 0, before_wrap)
        copy_bytes(ring, 0, rows, before_wrap, n * record_bytes - before_wrap)
        _commit_kernel(words, own, n)
    return sequence


@kernel
def _take_kernel(words: Any, own: Any, ring: Any, rows: Any, max_n: int, record_bytes: int) -> Any:
    index = _poll_kernel(words, own, max_n) & (own[_CAPACITY] - 1)
    n = own[_HELD]
    before_wrap = min(n, own[_CAPACITY] - index) * record_bytes
    copy_bytes(rows, 0, ring, index * record_bytes, before_wrap)
    copy_bytes(rows, before_wrap, ring, 0, n * record_bytes - before_wrap)
    _release_kernel(words, own, n)
    return n


@dataclass(frozen=True)
class RingStatistics:
    """tail, head: how many records were ever committed and released; used: those in between."""

    capacity: int
    record_bytes: int
    tail: int
    head: int

    @property
    def used(self) -> int:
        return self.tail - self.head


class ShmRing:
    """The ring over a buffer; `records` is its array of shape (capacity,) and of the ring's dtype.

    The record of a sequence is `records[sequence & (capacity - 1)]`; I4 says whose it is.
    """

    def __init__(
        self, buffer: Any, capacity: int, dtype: npt.DTypeLike, *, create: bool = False
    ) -> None:
        """Lay a new ring out (`create`: what was there is lost) or attach to one.

        Raises ConfigError for a capacity that is no power of two or a dtype of Python objects,
        SharedMemoryError where the buffer is unfit or holds no ring of this capacity and dtype.
        """
        self.capacity = capacity
        self.dtype = np.dtype(dtype)
        memory = view_bytes(buffer, self.required_bytes(capacity, dtype), "a ring")
        self._words = memory[:_HEADER_BYTES].view(np.int64)
        self._bytes = memory[_HEADER_BYTES:]
        self.records: npt.NDArray[Any] = self._bytes.view(self.dtype)
        if create:
            _create_kernel(self._words, capacity, self.dtype.itemsize)
        else:
            self._check_header()

    @staticmethod
    def required_bytes(capacity: int, dtype: npt.DTypeLike) -> int:
        """Bytes that a ring of `capacity` records takes."""
        record = np.dtype(dtype)
        if capacity < 1 or capacity & (capacity - 1):
            raise ConfigError(f"a ring's capacity must be a power of two, got {capacity}")
        if record.hasobject or record.itemsize == 0:
            raise ConfigError(f"a ring's records must be plain bytes, got dtype {record}")
        return _HEADER_BYTES + capacity * record.itemsize

    def _check_header(self) -> None:
        if _load_kernel(self._words, _MAGIC_WORD) != _MAGIC:
            raise SharedMemoryError("the buffer holds no ring of this version: create it first")
        found = int(self._words[_CAPACITY_WORD]), int(self._words[_RECORD_BYTES_WORD])
        if found != (self.capacity, self.dtype.itemsize):
            raise SharedMemoryError(
                f"the ring has {found[0]} records of {found[1]} bytes, expected {self.capacity} of "
                f"{self.dtype.itemsize}: both ends must be started from the same config"
            )
        # Head first: it only grows, so a tail read later cannot be behind it.
        head, tail = self.head, self.tail
        if not 0 <= head <= tail:
            raise SharedMemoryError(f"the ring is damaged: head {head}, tail {tail} (I1)")

    @property
    def head(self) -> int:
        """How many records were ever released (acquire load)."""
        return _load_kernel(self._words, _HEAD_WORD)

    @property
    def tail(self) -> int:
        """How many records were ever committed (acquire load)."""
        return _load_kernel(self._words, _TAIL_WORD)

    def statistics(self) -> RingStatistics:
        """What either end, or a third process, sees now; `used` may be off by what is under way."""
        head = self.head  # before tail, so that `used` is never negative
        return RingStatistics(self.capacity, self.dtype.itemsize, self.tail, head)

    def producer(self) -> "RingProducer":
        """The end that commits. One at a time; a second one would break I3."""
        return RingProducer(self)

    def consumer(self) -> "RingConsumer":
        """The end that releases. One at a time."""
        return RingConsumer(self)


class _RingEnd:
    """What both ends have: the ring, and private words for the kernels."""

    def __init__(self, ring: ShmRing, seen: int) -> None:
        self.ring = ring
        self._words = ring._words
        self._bytes = ring._bytes
        self._record_bytes = ring.dtype.itemsize
        self._own = np.zeros(_OWN_WORDS, np.int64)
        self._own[_CAPACITY] = ring.capacity
        self._own[_SEEN] = seen

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
        """Reserve n slots: the first one's sequence, or FULL. A new claim forgets an old one."""
        if not 1 <= n <= self.ring.capacity:
            raise ConfigError(f"n must be 1 to the capacity, {self.ring.capacity}, got {n}")
        return _claim_kernel(self._words, self._own, n)

    def claim(self, n: int = 1, *, timeout_s: float) -> int:
        """As `try_claim`; waits for the consumer. Raises PeerTimeout."""
        sequence = self.try_claim(n)

        def claimed() -> bool:
            nonlocal sequence
            sequence = self.try_claim(n)
            return sequence != FULL

        if sequence == FULL and not wait_until(claimed, timeout_s):
            used = self.ring.statistics().used
            raise PeerTimeout(
                f"the ring's consumer released too little in {timeout_s} s: {n} slots wanted, "
                f"{used} of {self.ring.capacity} in use"
            )
        return sequence

    def commit(self, n: int = 1) -> None:
        """Publish the first n of the claimed slots, with one store; the rest is given up."""
        self._check_held(n, "a commit")
        _commit_kernel(self._words, self._own, n)

    def abort(self) -> None:
        """Give a claim up; nothing is published."""
        self._own[_HELD] = 0

    def try_offer(self, rows: npt.NDArray[Any]) -> bool:
        """Claim, copy and commit all of `rows` (shape (n,), the ring's dtype), or none: False."""
        data = self._check_rows(rows)
        if not 1 <= rows.size <= self.ring.capacity:
            raise ConfigError(f"rows must be 1 to the capacity, {self.ring.capacity}: {rows.size}")
        sequence = _offer_kernel(
            self._words, self._own, self._bytes, data, rows.size, self._record_bytes
        )
        return sequence != FULL


class RingConsumer(_RingEnd):
    """Polls records and releases them in order."""

    def __init__(self, ring: ShmRing) -> None:
        super().__init__(ring, seen=ring.tail)

    def poll(self, max_n: int) -> tuple[int, int]:
        """The first unreleased record's sequence, and how many there are from it on, at most max_n.

        They stay where they are until released; polling again gives the same ones.
        """
        if max_n < 1:
            raise ConfigError(f"max_n must be at least 1, got {max_n}")
        sequence = _poll_kernel(self._words, self._own, max_n)
        return sequence, int(self._own[_HELD])

    def release(self, n: int) -> None:
        """Give the first n polled slots back to the producer."""
        self._check_held(n, "a release")
        _release_kernel(self._words, self._own, n)

    def take(self, max_n: int, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Copy at most max_n records out and release them: an array of shape (n,), n may be 0.

        out: memory of shape (at least max_n,) to copy into; the result is a view of it.
        """
        rows = np.empty(max_n, self.ring.dtype) if out is None else out
        data = self._check_rows(rows)
        if not 1 <= max_n <= rows.size:
            raise ConfigError(f"max_n must be 1 to {rows.size}, the rows of out, got {max_n}")
        n = _take_kernel(self._words, self._own, self._bytes, data, max_n, self._record_bytes)
        return rows[:n]
