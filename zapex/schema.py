"""Columns and bytes: what a transition holds and where each byte of a chunk and of a batch lies.

A chunk's body, K transitions of one stream and the frames they need:

    frames of obs column 0   (F, frame bytes)      each frame stored once
    frames of obs column 1   ...                   only Dict observations have more than one
    obs_frames               (K, stack) uint16     which frames make s; NO_FRAME is a zero frame
    next_obs_frames          (K, stack) uint16     which make s'
    action, extras           (K, ...)              the columns of the schema that are not "obs"
    reward, discount         (K,) float32          n-step return; gamma^m, or 0 at a terminal
    priority                 (K,) float32          |TD error| from the actor; negative: not given

Every section starts on a cache line. Nothing else in zapex knows these offsets.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zapex.errors import SchemaError

if TYPE_CHECKING:
    import gymnasium

NO_FRAME = 0xFFFF
MAX_CHUNK = 256  # a key has 8 bits for the offset in a chunk
RESERVED = ("reward", "discount", "priority", "next_obs", "weights", "keys", "indices")

# The words of a slot header: one int64 each, two cache lines a slot.
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
    STREAM,
    HOST,  # of chunks that came over a network
) = range(10)
# A slot's state; ownership moves in this order and is never shared.
FREE, GRANTED, COMMITTED, LIVE, EVICTED = range(5)


def align(offset: int, boundary: int = 64) -> int:
    """The smallest multiple of `boundary` that is not below `offset`."""
    return -(-offset // boundary) * boundary


@dataclass(frozen=True)
class Column:
    """One named field of a transition.

    shape: of one frame (without the stack axis) or one value; dtype: any fixed-size NumPy dtype.
    stack: how many successive frames make one observation (observation columns only).
    stack_axis: where the stack stands in the observation's shape; 0 or -1.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    stack: int = 1
    stack_axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        dtype = np.dtype(self.dtype)
        if dtype.hasobject or dtype.itemsize == 0 or dtype.fields:
            raise SchemaError(f"a column's dtype must be a plain fixed-size one, got {dtype}")
        object.__setattr__(self, "dtype", dtype)
        if any(n < 1 for n in self.shape):
            raise SchemaError(f"a column's shape must be positive, got {self.shape}")
        if not 1 <= self.stack <= 16:
            raise SchemaError(f"stack must be 1 to 16, got {self.stack}")
        if self.stack_axis not in (0, -1):
            raise SchemaError(f"stack_axis must be 0 or -1, got {self.stack_axis}")

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one frame, or of one value."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    @cached_property
    def stack_innermost(self) -> bool:
        """Whether the user sees a stack at the last axis."""
        return self.stack > 1 and self.stack_axis == -1

    @cached_property
    def value_shape(self) -> tuple[int, ...]:
        """The shape that the user sees: the frame's, with the stack axis where there is one."""
        if self.stack == 1:
            return self.shape
        if self.stack_axis == 0:
            return (self.stack, *self.shape)
        return (*self.shape, self.stack)

    def describe(self) -> list[Any]:
        """JSON facts, equal on both ends of a link when the column is."""
        return [list(self.shape), np.dtype(self.dtype).str, self.stack, self.stack_axis]


@dataclass(frozen=True, eq=False)
class Schema:
    """The columns of a transition and the n-step return that joins them.

    columns: "obs" (or several "obs/<name>") and "action", and any extra columns; reward, discount
    (float32) and next_obs come by themselves. gamma: discount of one step (Sutton & Barto eq. 3.8).
    """

    columns: Mapping[str, Column]
    n_step: int = 3
    gamma: float = 0.99

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", dict(self.columns))
        if not self.obs_columns:
            raise SchemaError('a schema needs a column "obs" (or several "obs/<name>")')
        if "obs" in self.columns and len(self.obs_columns) > 1:
            raise SchemaError('a schema has either "obs" or several "obs/<name>", not both')
        if "action" not in self.columns:
            raise SchemaError('a schema needs a column "action"')
        for name, column in self.columns.items():
            if name in RESERVED:
                raise SchemaError(f'"{name}" is made by zapex itself; choose another column name')
            if column.stack > 1 and name not in self.obs_columns:
                raise SchemaError(f'only observations are stacked, but "{name}" has a stack')
        if not 1 <= self.n_step <= 64:
            raise SchemaError(f"n_step must be 1 to 64, got {self.n_step}")
        if not 0.0 <= self.gamma <= 1.0:
            raise SchemaError(f"gamma must be in 0..1, got {self.gamma}")

    @cached_property
    def obs_columns(self) -> dict[str, Column]:
        """The observation's columns, by name."""
        return {k: c for k, c in self.columns.items() if k == "obs" or k.startswith("obs/")}

    @cached_property
    def step_columns(self) -> dict[str, Column]:
        """The action and the extra columns: one value a step."""
        return {k: c for k, c in self.columns.items() if k not in self.obs_columns}

    @cached_property
    def stack(self) -> int:
        """The longest stack of the observation's columns."""
        return max(column.stack for column in self.obs_columns.values())

    @cached_property
    def step_dtype(self) -> np.dtype[Any]:
        """A packed record of the step columns, as an actor stages them."""
        return np.dtype([(k, c.dtype, c.shape) for k, c in self.step_columns.items()])

    def describe(self) -> dict[str, Any]:
        """JSON facts, equal on both ends of a link when the schemas are."""
        columns = {name: column.describe() for name, column in self.columns.items()}
        return {"columns": columns, "n_step": self.n_step, "gamma": self.gamma}

    @cached_property
    def hash(self) -> int:
        """A 63-bit fingerprint of the schema, the same on every machine."""
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.hash == other.hash

    def __hash__(self) -> int:
        return self.hash

    @classmethod
    def from_spaces(
        cls,
        observation_space: "gymnasium.Space[Any]",
        action_space: "gymnasium.Space[Any]",
        n_step: int = 3,
        gamma: float = 0.99,
        extra: Mapping[str, Column] | None = None,
        stack: int | Mapping[str, int] | None = None,
    ) -> "Schema":
        """The schema of one environment (of vector environments: its `single_` spaces).

        stack: how many successive frames an observation is made of, at its first or last axis; a
        mapping for Dict observations; 1 for none. None: found by the shape, which is refused where
        it could be either axis or colours. Images of 32 pixels and more are looked at; say stack=1
        where such an axis is not time. A writer checks that it is.

        Raises SchemaError.
        """
        from zapex.spaces import observation_columns, plain_column

        columns = observation_columns(observation_space, stack)
        columns["action"] = plain_column(action_space, "action")
        taken = sorted(columns.keys() & (extra or {}).keys())
        if taken:
            raise SchemaError(f"extra columns {taken} have the names of the spaces' own")
        return cls({**columns, **(extra or {})}, n_step, gamma)

    def to_json(self) -> str:
        """As the text of a file, for `zapex replay --schema` and `zapex.connect(url, schema=)`."""
        return json.dumps(self.describe(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """The inverse of `to_json`. Raises SchemaError."""
        try:
            facts = json.loads(text)
        except ValueError as error:
            raise SchemaError(f"a schema's file must be JSON: {error}") from None
        if not isinstance(facts, dict):
            raise SchemaError("a schema's file must hold a JSON object")
        return cls.from_description(facts)

    @classmethod
    def from_description(cls, facts: Mapping[str, Any]) -> "Schema":
        """The inverse of `describe`."""
        try:
            columns = {}
            for name, (shape, dtype, stack, axis) in facts["columns"].items():
                if any(type(number) is not int for number in (*shape, stack, axis)):
                    raise TypeError(f"{name}: shape, stack and axis are whole numbers")
                columns[name] = Column(tuple(shape), _described_dtype(dtype), stack, axis)
            return cls(columns, int(facts["n_step"]), float(facts["gamma"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SchemaError(f"not a schema's description: {error}") from error


def _described_dtype(text: Any) -> "np.dtype[Any]":
    """The dtype whose `str` is `text`, and nothing else that NumPy would make of a string."""
    if not isinstance(text, str) or not re.fullmatch(r"[<>|=][A-Za-z]\d{1,9}(\[\w{1,9}\])?", text):
        raise ValueError(f"no dtype: {text!r}")
    return np.dtype(text)


@dataclass(frozen=True)
class Section:
    """A contiguous array inside a chunk's body or a batch."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: NDArray[np.uint8], base: int = 0) -> NDArray[Any]:
        """The section as an array over `memory` (uint8), at `base` bytes from its start."""
        start = base + self.offset
        return memory[start : start + self.nbytes].view(self.dtype).reshape(self.shape)


def _lay_out(
    wanted: Iterable[tuple[str, tuple[int, ...], DTypeLike]],
) -> tuple[dict[str, Section], int]:
    """Sections one behind another on cache lines, and the bytes they take."""
    sections: dict[str, Section] = {}
    offset = 0
    for name, shape, dtype in wanted:
        sections[name] = Section(offset, shape, np.dtype(dtype))
        offset = align(offset + sections[name].nbytes)
    return sections, offset


@dataclass(frozen=True)
class ChunkLayout:
    """Where everything lies in a chunk of up to `chunk` transitions."""

    schema: Schema
    chunk: int
    sections: dict[str, Section] = field(init=False, repr=False, compare=False)
    body_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.schema.n_step <= self.chunk <= MAX_CHUNK:
            raise SchemaError(
                f"a chunk holds n_step ({self.schema.n_step}) to {MAX_CHUNK} transitions, "
                f"got {self.chunk}"
            )
        schema, rows = self.schema, self.chunk
        wanted: list[tuple[str, tuple[int, ...], DTypeLike]] = [
            (name, (self.frames, *column.shape), column.dtype)
            for name, column in schema.obs_columns.items()
        ]
        wanted += [(name, (rows, schema.stack), np.uint16) for name in _FRAME_INDICES]
        wanted += [(name, (rows, *c.shape), c.dtype) for name, c in schema.step_columns.items()]
        wanted += [(name, (rows,), np.float32) for name in ("reward", "discount", "priority")]
        sections, body_bytes = _lay_out(wanted)
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "body_bytes", body_bytes)

    @property
    def frames(self) -> int:
        """Frames a chunk has room for: its transitions', the overlap's, and two episode ends."""
        return self.chunk + self.schema.n_step + self.schema.stack - 1 + 2

    def column(self, name: str, memory: NDArray[np.uint8], body: int) -> NDArray[Any]:
        """Section `name` of the chunk whose body starts at byte `body` of `memory`."""
        return self.sections[name].view(memory, body)


_FRAME_INDICES = ("obs_frames", "next_obs_frames")


@dataclass(frozen=True)
class BatchLayout:
    """Where everything lies in the one block of memory that a batch is gathered into.

    channels_last: stacked observations lie with the stack innermost; their shape is the same.
    """

    schema: Schema
    batch_size: int
    channels_last: bool = False
    sections: dict[str, Section] = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise SchemaError(f"a batch has at least one row, got {self.batch_size}")
        rows = self.batch_size
        wanted: list[tuple[str, tuple[int, ...], DTypeLike]] = []
        for prefix in ("obs", "next_obs"):
            for name, column in self.schema.obs_columns.items():
                shape = (rows, *self._memory_shape(column))
                wanted.append((prefix + name.removeprefix("obs"), shape, column.dtype))
        wanted += [
            (name, (rows, *c.shape), c.dtype) for name, c in self.schema.step_columns.items()
        ]
        wanted += [(name, (rows,), np.float32) for name in ("reward", "discount", "weights")]
        wanted += [(name, (rows,), np.int64) for name in ("keys", "indices")]
        sections, nbytes = _lay_out(wanted)
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "nbytes", nbytes)

    def _stack_innermost(self, column: Column) -> bool:
        return column.stack > 1 and (self.channels_last or column.stack_axis == -1)

    def _memory_shape(self, column: Column) -> tuple[int, ...]:
        if self._stack_innermost(column):
            return (*column.shape, column.stack)
        return column.value_shape

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Every column as an array over `memory`, in the shape of its space."""
        views = {name: section.view(memory) for name, section in self.sections.items()}
        for prefix in ("obs", "next_obs"):
            for name, column in self.schema.obs_columns.items():
                if self._stack_innermost(column) and column.stack_axis == 0:
                    key = prefix + name.removeprefix("obs")
                    views[key] = np.moveaxis(views[key], -1, 1)
        return views


# Columns of the two tables that tell the gather kernel what to copy.
(F_SOURCE, F_BYTES, F_STACK, F_OBS, F_NEXT_OBS, F_INNERMOST, F_ITEM) = range(7)
(S_SOURCE, S_BYTES, S_TARGET) = range(3)


def gather_tables(
    chunk: ChunkLayout, batch: BatchLayout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a gather copies: a row for each observation column, and for each step column."""
    frame_rows = []
    for name, column in chunk.schema.obs_columns.items():
        suffix = name.removeprefix("obs")
        frame_rows.append(
            (
                chunk.sections[name].offset,
                column.item_bytes,
                column.stack,
                batch.sections["obs" + suffix].offset,
                batch.sections["next_obs" + suffix].offset,
                int(batch._stack_innermost(column)),
                np.dtype(column.dtype).itemsize,
            )
        )
    step_rows = []
    for name in (*chunk.schema.step_columns, "reward", "discount"):
        source = chunk.sections[name]
        step_rows.append((source.offset, source.nbytes // chunk.chunk, batch.sections[name].offset))
    return np.array(frame_rows, np.int64), np.array(step_rows, np.int64)
