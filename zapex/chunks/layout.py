"""The layout of a chunk and of a batch: the offset of each column.

The body of a chunk holds K transitions of one stream, and their frames:

    frames of obs column 0   (F, frame bytes)      each frame stored once
    frames of obs column 1   ...                   only Dict observations have more than one column
    obs_frames               (K, stack) uint16     the frames of s; NO_FRAME is a frame of zeros
    next_obs_frames          (K, stack) uint16     the frames of s'
    action, extras           (K, ...)              the schema's columns that are not "obs"
    reward, discount         (K,) float32          n-step return; gamma^m, or 0 at a terminal
    priority                 (K,) float32          |TD error| from the actor; negative: not given

Each section starts on a cache line. No other module of zapex computes these offsets.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zapex.chunks.schema import Column, Schema
from zapex.errors import SchemaError
from zapex.machine.memory import RecordType, Section, lay_out, words

NO_FRAME = 0xFFFF
MAX_CHUNK = 256  # a key has 8 bits for the offset in a chunk
# A link names a chunk in its stream: 2 * its number, and 1 if its first row begins an episode.
# The next chunk of the stream has the next number. Numbers of two streams are far apart.
LINKED = 1 << 60
LINKS_APART = 1 << 32

# The words of a slot header: one int64 each, two cache lines for each slot.
HEADER_WORDS = 16
(
    STATE,
    GENERATION,
    ACTOR,
    INCARNATION,
    SEQUENCE,
    COMMIT_SEQUENCE,
    GRANT_SEQUENCE,
    COUNT,
    STREAM,  # its number; of chunks that a writer of the library fills, the link (LINKED or more)
    HOST,  # the actor's host, if the chunk came over a network
    AGE_WEIGHT,  # with recency, a factor of its leaves: the bits of a float64 below 1
) = range(11)
# The states of a slot, in this order. In each state a slot has one owner.
FREE, GRANTED, COMMITTED, LIVE, EVICTED = range(5)

# The first words of the state of each kernel over chunks.
_CHUNK_WORDS = (
    "chunk max_frames stack n_step bodies body_bytes "
    "obs_frames next_obs_frames reward discount priority "
)


def chunk_words(own: str) -> RecordType:
    """The record of a kernel's state over chunks: the shared words, then its own."""
    return words(_CHUNK_WORDS + own)


def slots_needed(capacity: int, chunk: int, streams: int) -> int:
    """Slots for `capacity` transitions, 2 more for each stream (its credit), and 8 more."""
    return -(-capacity // chunk) + 2 * streams + 8


def chunk_length(capacity: int, streams: int, n_step: int) -> int:
    """K, the transitions of a chunk: few, so that one eviction takes a small part of the memory."""
    return max(n_step, min(64, capacity // (16 * max(1, streams))))


@dataclass(frozen=True)
class ChunkLayout:
    """The layout of a chunk of up to `chunk` transitions."""

    schema: Schema
    chunk: int
    sections: dict[str, Section] = field(init=False, repr=False, compare=False)
    body_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.schema.n_step <= self.chunk <= MAX_CHUNK:
            raise SchemaError(
                f"chunk must be n_step ({self.schema.n_step}) to {MAX_CHUNK}, got {self.chunk}"
            )
        schema, rows = self.schema, self.chunk
        wanted: list[tuple[str, tuple[int, ...], DTypeLike]] = [
            (name, (self.frames, *column.shape), column.dtype)
            for name, column in schema.obs_columns.items()
        ]
        wanted += [(name, (rows, schema.stack), np.uint16) for name in _FRAME_INDICES]
        wanted += [(name, (rows, *c.shape), c.dtype) for name, c in schema.step_columns.items()]
        wanted += [(name, (rows,), np.float32) for name in ("reward", "discount", "priority")]
        sections, body_bytes = lay_out(wanted)
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "body_bytes", body_bytes)

    @property
    def frames(self) -> int:
        """Most frames in a chunk: for its transitions, the overlap, and two episode ends."""
        return self.chunk + self.schema.n_step + self.schema.stack - 1 + 2

    def column(self, name: str, memory: NDArray[np.uint8], body: int) -> NDArray[Any]:
        """Section `name` of a chunk as an array. The chunk's body starts at byte `body`."""
        return self.sections[name].view(memory, body)


_FRAME_INDICES = ("obs_frames", "next_obs_frames")


@dataclass(frozen=True)
class BatchLayout:
    """The layout of the one block of memory that holds a batch.

    channels_last: in memory, stacked observations have the stack innermost. Their shape does not
    change. frames_apart: the observations are elsewhere (device_frames.py); in their place the
    column "frames" (rows, 2, stack) says where.
    """

    schema: Schema
    batch_size: int
    channels_last: bool = False
    frames_apart: bool = False
    sections: dict[str, Section] = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False)
    _moved: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise SchemaError(f"a batch has at least one row, got {self.batch_size}")
        rows = self.batch_size
        wanted: list[tuple[str, tuple[int, ...], DTypeLike]] = []
        if self.frames_apart:
            wanted.append(("frames", (rows, 2, self.schema.stack), np.int64))
        for prefix in () if self.frames_apart else ("obs", "next_obs"):
            for name, column in self.schema.obs_columns.items():
                shape = (rows, *self._memory_shape(column))
                wanted.append((prefix + name.removeprefix("obs"), shape, column.dtype))
        wanted += [
            (name, (rows, *c.shape), c.dtype) for name, c in self.schema.step_columns.items()
        ]
        wanted += [(name, (rows,), np.float32) for name in ("reward", "discount", "weights")]
        wanted += [(name, (rows,), np.int64) for name in ("keys", "indices")]
        sections, nbytes = lay_out(wanted)
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "nbytes", nbytes)
        object.__setattr__(self, "_moved", tuple(filter(self.moves_stack, sections)))

    def _stack_innermost(self, column: Column) -> bool:
        return column.stack > 1 and (self.channels_last or column.stack_axis == -1)

    def _memory_shape(self, column: Column) -> tuple[int, ...]:
        if self._stack_innermost(column):
            return (*column.shape, column.stack)
        return column.value_shape

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Each column as an array over `memory`, in the shape of its space."""
        views = {name: section.view(memory) for name, section in self.sections.items()}
        for name in self._moved:
            views[name] = np.moveaxis(views[name], -1, 1)
        return views

    def moves_stack(self, name: str) -> bool:
        """Whether a column's stack is innermost in memory, but first in its space's shape."""
        column = self.schema.obs_columns.get(name.removeprefix("next_"))
        return column is not None and self._stack_innermost(column) and column.stack_axis == 0


@dataclass(frozen=True)
class SequenceLayout(BatchLayout):
    """The layout of the one block of memory that holds a batch of sequences.

    An observation column of `stack` frames has each frame once: (sequences, steps + n_step + stack
    - 1, *frame). Observation t is the frames t to t + stack - 1.

    steps: of each sequence, with the burn-in. burn_in: its first steps, which only make a state.
    """

    steps: int = 1
    burn_in: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise SchemaError(f"a batch has at least one sequence, got {self.batch_size}")
        schema, rows, steps = self.schema, self.batch_size, self.steps
        wanted: list[tuple[str, tuple[int, ...], DTypeLike]] = [
            (name, (rows, steps + schema.n_step + c.stack - 1, *c.shape), c.dtype)
            for name, c in schema.obs_columns.items()
        ]
        wanted += [
            (name, (rows, steps, *c.shape), c.dtype) for name, c in schema.step_columns.items()
        ]
        own: list[tuple[str, tuple[int, ...], DTypeLike]] = [
            ("reward", (rows, steps), np.float32),
            ("discount", (rows, steps), np.float32),
            ("bootstrap", (rows, steps), np.int64),
            ("valid", (rows, steps), np.bool_),
            ("reset", (rows,), np.bool_),
            ("weights", (rows,), np.float32),
            ("keys", (rows,), np.int64),
            ("indices", (rows,), np.int64),
            ("spans", (rows,), np.int64),
        ]
        taken = sorted(schema.columns.keys() & {name for name, *_ in own})
        if taken:
            raise SchemaError(f"a batch of sequences has columns {taken} of its own: rename yours")
        sections, nbytes = lay_out([*wanted, *own])
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "nbytes", nbytes)
        object.__setattr__(self, "_moved", ())

    def moves_stack(self, name: str) -> bool:
        """Never: frames follow each other in time."""
        return False
