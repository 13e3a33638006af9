"""Newest value wins: one writer, many readers, whole values only, in shared memory.

Layout, 64-byte aligned; words are int64, two cache lines apart:

    | magic, value_bytes | latest | stamp 0 | stamp 1 | stamp 2 | value 0 | value 1 | value 2 |

    latest = 4 * version + cell, 0 before the first publish
    I1  versions only grow; version 0 is none
    I2  the cell in `latest` is whole, and not the one that is written next
    I3  every word has exactly one writer: the writer
    I4  stamp c = v once `latest` said (v, c), and until a byte of cell c changes
    SYNC whole:  publish (release latest)            -> read (acquire latest)
    SYNC reuse:  publish (stamp 0, release fence)    -> read (acquire fence, stamp again)
    Crash: dying while a cell is written leaves `latest` on another, whole one.

The writer goes round the three cells, so a reader has one whole publish and the start of the next
before its cell is touched; if that happens after all, its stamp says so and it starts again at the
newest. A writer waits for nobody. See docs/ring_protocol.md and tests/stress/mailbox.pml.
"""

import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from zapex.atomics import (
    copy_bytes,
    fence_acquire,
    fence_release,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)
from zapex.errors import ConfigError, SharedMemoryError
from zapex.jit import kernel
from zapex.shm_segment import ALIGNMENT_BYTES, view_bytes

_MAGIC = 0x7A61706578_0201  # "zapex", mailbox, layout 1
_HOT_WORDS = 16
_MAGIC_WORD, _VALUE_BYTES_WORD = 0, 1
_LATEST_WORD = _HOT_WORDS
_STAMP_WORD = 2 * _HOT_WORDS  # of cell 0; the others follow, _HOT_WORDS apart
_CELLS = 3
_VERSION_STEP = 4  # latest = version * _VERSION_STEP + cell
_HEADER_BYTES = 8 * (_STAMP_WORD + _CELLS * _HOT_WORDS)
_MAX_VERSION = 2**60

_TORN = -1


@kernel
def _create_kernel(words: Any, value_bytes: int) -> None:
    store_relaxed(words, _LATEST_WORD, 0)
    for cell in range(_CELLS):
        store_relaxed(words, _STAMP_WORD + cell * _HOT_WORDS, 0)
    store_relaxed(words, _VALUE_BYTES_WORD, value_bytes)
    store_release(words, _MAGIC_WORD, _MAGIC)  # last: an attacher sees all of it or nothing


@kernel
def _load_kernel(words: Any, i: int) -> int:
    return load_acquire(words, i)


@kernel
def _publish_kernel(words: Any, cells: Any, cell_bytes: int, version: int, value: Any) -> None:
    latest = load_relaxed(words, _LATEST_WORD)  # I3: ours, or a dead writer's
    cell = (latest % _VERSION_STEP + 1) % _CELLS
    stamp = _STAMP_WORD + cell * _HOT_WORDS
    store_relaxed(words, stamp, 0)
    fence_release()  # SYNC reuse: the stamp is seen before a byte of the new value
    # STEP cell-marked
    copy_bytes(cells, cell * cell_bytes, value, 0, value.size)
    # STEP cell-written
    store_relaxed(words, stamp, version)
    # STEP cell-stamped
    # SYNC whole: the value and its stamp are seen before they can be found
    store_release(words, _LATEST_WORD, version * _VERSION_STEP + cell)
    # STEP value-published


@kernel
def _read_kernel(words: Any, cells: Any, cell_bytes: int, than_version: int, out: Any) -> int:
    latest = load_acquire(words, _LATEST_WORD)  # SYNC whole
    version, cell = latest // _VERSION_STEP, latest % _VERSION_STEP
    if version <= than_version:
        return 0
    copy_bytes(out, 0, cells, cell * cell_bytes, out.size)
    # STEP value-copied
    fence_acquire()  # SYNC reuse: every byte is read before the stamp
    whole = load_relaxed(words, _STAMP_WORD + cell * _HOT_WORDS) == version
    return version if whole else _TORN


class Mailbox:
    """The mailbox over a buffer, for values of `value_bytes` bytes.

    Any number of readers; one writer at a time. A writer that takes a dead one's place goes on
    with versions above `version`.
    """

    def __init__(self, buffer: Any, value_bytes: int, *, create: bool = False) -> None:
        """Lay a new mailbox out (`create`: what was there is lost) or attach to one.

        Raises SharedMemoryError where the buffer is unfit or holds no mailbox of this size.
        """
        self.value_bytes = value_bytes
        self.torn_reads = 0  # how often a read of ours had to start again
        memory = view_bytes(buffer, self.required_bytes(value_bytes), "a mailbox")
        self._words = memory[:_HEADER_BYTES].view(np.int64)
        self._cells = memory[_HEADER_BYTES:]
        self._cell_bytes = self._cells.size // _CELLS
        if create:
            _create_kernel(self._words, value_bytes)
        else:
            self._check_header()

    @staticmethod
    def required_bytes(value_bytes: int) -> int:
        """Bytes that a mailbox for values of `value_bytes` takes."""
        if value_bytes < 1:
            raise ConfigError(f"a mailbox's value must have at least 1 byte, got {value_bytes}")
        cell_bytes = -(-value_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return _HEADER_BYTES + _CELLS * cell_bytes

    def _check_header(self) -> None:
        if _load_kernel(self._words, _MAGIC_WORD) != _MAGIC:
            raise SharedMemoryError("the buffer holds no mailbox of this version: create it first")
        found = int(self._words[_VALUE_BYTES_WORD])
        if found != self.value_bytes:
            raise SharedMemoryError(
                f"the mailbox holds values of {found} bytes, expected {self.value_bytes}: both "
                "ends must be started from the same config"
            )
        latest = _load_kernel(self._words, _LATEST_WORD)
        if latest < 0 or latest % _VERSION_STEP >= _CELLS:
            raise SharedMemoryError(f"the mailbox is damaged: latest is {latest}")

    @property
    def version(self) -> int:
        """The newest version, 0 where there is none yet: one acquire load."""
        return _load_kernel(self._words, _LATEST_WORD) // _VERSION_STEP

    def _check_value(self, value: npt.NDArray[np.uint8]) -> None:
        fits = value.dtype == np.uint8 and value.shape == (self.value_bytes,)
        if not fits or not value.flags.c_contiguous:
            raise ConfigError(
                f"a value must be a contiguous uint8 array of shape ({self.value_bytes},), got "
                f"{value.dtype} of shape {value.shape}"
            )

    def publish(self, version: int, value: npt.NDArray[np.uint8]) -> None:
        """Make `value`, uint8 of shape (value_bytes,), the newest. `version` must be larger than
        every one before: ConfigError.
        """
        self._check_value(value)
        if not self.version < version <= _MAX_VERSION:
            raise ConfigError(f"a version must be above the newest, {self.version}, got {version}")
        _publish_kernel(self._words, self._cells, self._cell_bytes, version, value)

    def read_newer(
        self, than_version: int, out: npt.NDArray[np.uint8], timeout_s: float = 1.0
    ) -> int:
        """Copy the newest value into `out` if its version is above `than_version`.

        Returns its version, or 0 where there is none, or where the writer was too quick for every
        try within `timeout_s`; then `out` holds rubbish. out: uint8 of shape (value_bytes,).
        """
        self._check_value(out)
        deadline = time.monotonic() + timeout_s
        while True:
            version = _read_kernel(self._words, self._cells, self._cell_bytes, than_version, out)
            if version != _TORN:
                return version
            self.torn_reads += 1
            if time.monotonic() >= deadline:
                return 0
            os.sched_yield()
