"""A mailbox in shared memory: one writer, many readers; they read the newest whole value.

Layout, 64-byte aligned; words are int64, two cache lines apart:

    | magic, value_bytes | latest | stamp 0 | stamp 1 | stamp 2 | value 0 | value 1 | value 2 |

    latest = 4 * version + cell, 0 before the first publish
    I1  versions only grow; version 0 means none
    I2  the cell in `latest` is whole, and is not the next one to be written
    I3  every word has exactly one writer: the writer
    I4  stamp c = v once `latest` said (v, c), and until a byte of cell c changes
    SYNC whole:  publish (release latest)            -> read (acquire latest)
    SYNC reuse:  publish (stamp 0, release fence)    -> read (acquire fence, stamp again)
    Crash: if the writer dies while it writes a cell, `latest` names another, whole cell.

The writer uses the three cells in turn. So a reader's cell is overwritten only after one whole
publish and the start of the next. If this happens, the stamp shows it, and the reader starts again
with the newest value. A writer never waits. See docs/ring_protocol.md and
tests/stress/mailbox.pml.
"""

import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from zapex.errors import ConfigError, SharedMemoryError
from zapex.machine.atomics import (
    Words,
    copy_bytes,
    fence_acquire,
    fence_release,
    load_acquire,
    load_kernel,
    load_relaxed,
    store_relaxed,
    store_release,
)
from zapex.machine.jit import kernel
from zapex.machine.memory import Section, align, lay_out
from zapex.machine.segment import view_bytes

_MAGIC = 0x7A61706578_0201  # "zapex", mailbox, layout 1
_HOT_WORDS = 16
_MAGIC_WORD, _VALUE_BYTES_WORD = 0, 1
_LATEST_WORD = _HOT_WORDS
_STAMP_WORD = 2 * _HOT_WORDS  # of cell 0; the others follow, _HOT_WORDS apart
_CELLS = 3
_VERSION_STEP = 4  # latest = version * _VERSION_STEP + cell
_HEADER_WORDS = _STAMP_WORD + _CELLS * _HOT_WORDS
_MAX_VERSION = 2**60

TORN = -1


@kernel
def _create_kernel(words: Any, value_bytes: int) -> None:
    store_relaxed(words, _LATEST_WORD, 0)
    for cell in range(_CELLS):
        store_relaxed(words, _STAMP_WORD + cell * _HOT_WORDS, 0)
    store_relaxed(words, _VALUE_BYTES_WORD, value_bytes)
    store_release(words, _MAGIC_WORD, _MAGIC)  # last: the header is complete


@kernel
def publish_kernel(words: Any, cells: Any, cell_bytes: int, version: int, value: Any) -> None:
    """`Mailbox.publish`, unchecked."""
    latest = load_relaxed(words, _LATEST_WORD)  # I3: only this writer or a dead one wrote it
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
def read_kernel(words: Any, cells: Any, cell_bytes: int, than_version: int, out: Any) -> int:
    """One try of `Mailbox.read_newer`; TORN if the writer overwrote the cell."""
    latest = load_acquire(words, _LATEST_WORD)  # SYNC whole
    version, cell = latest // _VERSION_STEP, latest % _VERSION_STEP
    if version <= than_version:
        return 0
    copy_bytes(out, 0, cells, cell * cell_bytes, out.size)
    # STEP value-copied
    fence_acquire()  # SYNC reuse: every byte is read before the stamp
    whole = load_relaxed(words, _STAMP_WORD + cell * _HOT_WORDS) == version
    return version if whole else TORN


class Mailbox:
    """The mailbox over a buffer, for values of `value_bytes` bytes.

    There may be many readers, and one writer at a time. A writer that replaces a dead one continues
    with versions above `version`.
    """

    def __init__(self, buffer: Any, value_bytes: int, *, create: bool = False) -> None:
        """Make a new mailbox (`create`; the old content is lost), or attach to one.

        Raises SharedMemoryError if the buffer does not fit or has no mailbox of this size.
        """
        self.value_bytes = value_bytes
        self.torn_reads = 0  # how often a read had to start again
        sections, nbytes = self._layout(value_bytes)
        memory = view_bytes(buffer, nbytes, "a mailbox")
        self._words: Words = sections["words"].view(memory)
        cells = sections["cells"].view(memory)
        # The first arguments of the kernels, also for kernels of other modules.
        self.arrays = self._words, cells.reshape(-1), cells.shape[1]
        if create:
            _create_kernel(self._words, value_bytes)
        else:
            self._check_header()

    @classmethod
    def required_bytes(cls, value_bytes: int) -> int:
        """Bytes of a mailbox for values of `value_bytes`."""
        return cls._layout(value_bytes)[1]

    @staticmethod
    def _layout(value_bytes: int) -> tuple[dict[str, Section], int]:
        if value_bytes < 1:
            raise ConfigError(f"a mailbox's value must have at least 1 byte, got {value_bytes}")
        cells = (_CELLS, align(value_bytes))
        return lay_out([("words", (_HEADER_WORDS,), np.int64), ("cells", cells, np.uint8)])

    def _check_header(self) -> None:
        if load_kernel(self._words, _MAGIC_WORD) != _MAGIC:
            raise SharedMemoryError("the buffer holds no mailbox of this version: create it first")
        found = int(self._words[_VALUE_BYTES_WORD])
        if found != self.value_bytes:
            raise SharedMemoryError(
                f"the mailbox holds values of {found} bytes, expected {self.value_bytes}: both "
                "ends must be started from the same config"
            )
        latest = load_kernel(self._words, _LATEST_WORD)
        if latest < 0 or latest % _VERSION_STEP >= _CELLS:
            raise SharedMemoryError(f"the mailbox is damaged: latest is {latest}")

    @property
    def version(self) -> int:
        """The newest version, 0 if there is none: one acquire load."""
        return load_kernel(self._words, _LATEST_WORD) // _VERSION_STEP

    def _check_value(self, value: npt.NDArray[np.uint8]) -> None:
        fits = value.dtype == np.uint8 and value.shape == (self.value_bytes,)
        if not fits or not value.flags.c_contiguous:
            raise ConfigError(
                f"a value must be a contiguous uint8 array of shape ({self.value_bytes},), got "
                f"{value.dtype} of shape {value.shape}"
            )

    def publish(self, version: int, value: npt.NDArray[np.uint8]) -> None:
        """Make `value`, uint8 of shape (value_bytes,), the newest.

        Raises ConfigError if `version` is not larger than all versions before.
        """
        self._check_value(value)
        if not self.version < version <= _MAX_VERSION:
            raise ConfigError(f"a version must be above the newest, {self.version}, got {version}")
        publish_kernel(*self.arrays, version, value)

    def newer_than(
        self, than_version: int, out: npt.NDArray[np.uint8], timeout_s: float = 1.0
    ) -> int:
        """Copy the newest value into `out` if its version is above `than_version`.

        Returns its version. Returns 0 if no version is newer, or if the writer overwrote the cell
        during each attempt within `timeout_s`; the content of `out` is then undefined.
        out: uint8 of shape (value_bytes,).
        """
        self._check_value(out)
        deadline = time.monotonic() + timeout_s
        while True:
            version = read_kernel(*self.arrays, than_version, out)
            if version != TORN:
                return version
            self.torn_reads += 1
            if time.monotonic() >= deadline:
                return 0
            os.sched_yield()
