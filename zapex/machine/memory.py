"""Blocks of memory: arrays one after another, records of words, and what malloc keeps.

This file imports no Numba.
"""

import ctypes
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

WORD_BYTES = 8
# Of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
_LARGEST_THRESHOLD = 32 << 20
RecordType = np.dtype[Any]


def align(offset: int, boundary: int = 64) -> int:
    """`offset` rounded up to a multiple of `boundary`."""
    return -(-offset // boundary) * boundary


@dataclass(frozen=True)
class Section:
    """A contiguous array inside a block of memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: NDArray[np.uint8], base: int = 0) -> NDArray[Any]:
        """The section as an array over `memory` (uint8), at `base` bytes from its start."""
        return np.ndarray(self.shape, self.dtype, memory, base + self.offset)


def lay_out(
    wanted: Iterable[tuple[str, tuple[int, ...], DTypeLike]], boundary: int = 64
) -> tuple[dict[str, Section], int]:
    """Sections one after another, at multiples of `boundary`, and the total bytes."""
    sections: dict[str, Section] = {}
    offset = 0
    for name, shape, dtype in wanted:
        sections[name] = Section(offset, shape, np.dtype(dtype))
        offset = align(offset + sections[name].nbytes, boundary)
    return sections, offset


def words(names: str) -> RecordType:
    """A record of int64 words. Kernels and NumPy read a word as `record.name`."""
    return np.dtype((np.record, [(name, np.int64) for name in names.split()]))


def count(record: RecordType) -> int:
    """How many words a record has."""
    return record.itemsize // WORD_BYTES


def places(record: RecordType, names: str) -> list[int]:
    """The indices of these words in a record."""
    return [list(record.fields or ()).index(name) for name in names.split()]


def pack(
    record: RecordType, values: Mapping[str, int], parts: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    """(state, views of the parts): a record with these values, then a copy of each part.

    record: the word with a part's name holds the start of the part in the state: in bytes if the
    part has bytes, otherwise in words. A word "num_<part>" holds the part's length.
    """
    wanted = [(name, part.shape, part.dtype) for name, part in parts.items()]
    sections, nbytes = lay_out([("", (), record), *wanted], WORD_BYTES)
    state = np.zeros(nbytes // WORD_BYTES, np.int64)
    views = {name: section.view(state.view(np.uint8)) for name, section in sections.items()}
    own = views.pop("")
    for name, value in values.items():
        own[name] = value
    for name, part in parts.items():
        own[name] = sections[name].offset // (1 if part.dtype == np.uint8 else WORD_BYTES)
        if f"num_{name}" in (record.fields or ()):
            own[f"num_{name}"] = len(part)
        views[name][...] = part
    return state, views


def set_malloc_option(option: int, value: int) -> None:
    """Set an option of glibc's malloc; elsewhere nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def keep_memory() -> None:
    """From now on this process keeps the memory of large messages for later ones.

    By default glibc returns a freed message's memory to the system. Then the next message has a
    page fault for every page.
    """
    set_malloc_option(M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    set_malloc_option(M_TRIM_THRESHOLD, 256 << 20)
    set_malloc_option(M_ARENA_MAX, 1)
