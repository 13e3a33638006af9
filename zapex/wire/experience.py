"""Experience between hosts: closed chunks and sampled batches, each frame once."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import NO_FRAME, ChunkLayout
from zapex.chunks.schema import Schema
from zapex.errors import BadMessage
from zapex.machine.atomics import copy_bytes
from zapex.machine.jit import kernel
from zapex.replay.draw import Draw
from zapex.wire.protocol import (
    HEADER,
    MAX_ACTORS,
    Buffer,
    Form,
    Kind,
    RawMessage,
    as_buffer,
)


@kernel
def _copy_rows_kernel(
    packs: bool, buffer: Any, start: int, table: Any, rows: int, chunk: Any, body: int
) -> None:
    """Copy the used rows of all columns from a chunk's body to a buffer; back if not `packs`."""
    at = start
    for c in range(table.shape[0]):
        place, n = body + table[c, 0], rows * table[c, 1]
        if packs:
            copy_bytes(buffer, at, chunk, place, n)
        else:
            copy_bytes(chunk, place, buffer, at, n)
        at += n


@kernel
def _largest_frame_kernel(buffer: Any, start: int, count: int) -> int:
    """The largest of `count` frame numbers (u16) from byte `start`; -1: only zero frames."""
    largest = np.int64(-1)
    for i in range(start, start + 2 * count, 2):
        frame = np.int64(buffer[i]) | np.int64(buffer[i + 1]) << 8
        if frame != NO_FRAME and frame > largest:
            largest = frame
    return largest  # type: ignore[return-value]


# The columns with a value for each row, as the fields of a dtype, in their order on the wire. There
# one whole column follows another.


def _frames_and_steps(schema: Schema) -> list[Any]:
    frames = [(name, "<u2", (schema.stack,)) for name in ("obs_frames", "next_obs_frames")]
    return frames + [(name, c.dtype, c.shape) for name, c in schema.step_columns.items()]


def _chunk_rows(schema: Schema) -> np.dtype[np.void]:
    """The columns of a chunk's rows."""
    numbers = [(name, "<f4") for name in ("reward", "discount", "priority")]
    return np.dtype(_frames_and_steps(schema) + numbers)


@lru_cache(maxsize=16)
def batch_rows(schema: Schema) -> np.dtype[np.void]:
    """The columns of a batch's rows, without its draw."""
    return np.dtype([*_frames_and_steps(schema), ("reward", "<f4"), ("discount", "<f4")])


def batch_rows_bytes(schema: Schema, rows: int) -> int:
    """Bytes of a batch's last buffer."""
    return Draw.dtype(rows).itemsize + rows * batch_rows(schema).itemsize


def row_columns(row: np.dtype[np.void], rows: int, buffer: Buffer) -> dict[str, NDArray[Any]]:
    """`buffer` as arrays of `rows` values each; views, not aligned."""
    arrays, at = {}, 0
    data = np.frombuffer(buffer, np.uint8)
    for name in row.names or ():
        column = row[name]
        nbytes = rows * column.itemsize
        arrays[name] = data[at : at + nbytes].view(column.base).reshape(rows, *column.shape)
        at += nbytes
    return arrays


def _check_schema(raw: RawMessage, form: Form) -> None:
    ours = form.schema.hash
    if raw.schema != ours:
        raise BadMessage(
            f"the peer's schema is {raw.schema:#018x}, this end's {ours:#018x}: start both from "
            "the same config"
        )


def _part_bytes(schema: Schema, frames: int, last: int) -> list[int]:
    """Bytes of each buffer of a body with so many frames, and a last buffer of `last` bytes."""
    return [*(frames * c.item_bytes for c in schema.obs_columns.values()), last]


def _check_lengths(raw: RawMessage, wanted: list[int]) -> None:
    found = [buffer.nbytes for buffer in raw.body]
    if found != wanted:
        raise BadMessage(f"{raw.kind.name} has parts of {wanted} bytes, got {found}")


def _check_frames(buffer: Buffer, start: int, rows: int, frames: int, schema: Schema) -> None:
    """Check both tables of frame numbers, one after the other from byte `start`."""
    numbers = 2 * rows * schema.stack
    if _largest_frame_kernel(np.frombuffer(buffer, np.uint8), start, numbers) >= frames:
        raise BadMessage(f"a row refers to a frame that is not among the {frames} sent")


_tables: dict[int, tuple[ChunkLayout, NDArray[np.int64], int]] = {}


def _row_table(layout: ChunkLayout) -> tuple[NDArray[np.int64], int]:
    """(offset in a chunk's body, bytes per row) of each column of `_chunk_rows`; bytes of a row."""
    known = _tables.get(id(layout))  # by identity: hashing a layout takes longer than the copy
    if known is None:
        row = _chunk_rows(layout.schema)
        columns = [(layout.sections[name].offset, row[name].itemsize) for name in row.names or ()]
        known = _tables[id(layout)] = layout, np.array(columns, np.int64), row.itemsize
    return known[1:]


_RECORD = struct.Struct("<qII")  # of a chunk in a push: stream, rows, frames


class PushedChunk(NamedTuple):
    """One chunk of a push. first_frame: how many frames are before its own in the body's buffers.
    rows_at: the byte of the last buffer where its rows begin."""

    stream: int
    rows: int
    frames: int
    first_frame: int
    rows_at: int


def _records_and_rows_bytes(raw: RawMessage, form: Form) -> int:
    """Bytes of the last buffer of a push with this header. Raises BadMessage."""
    _check_schema(raw, form)
    count = raw.within("value", 1, form.most_pushed)
    rows = raw.within("rows", count, count * form.layout.chunk)
    return count * _RECORD.size + rows * _row_table(form.layout)[1]


def push_bytes(raw: RawMessage, form: Form) -> list[int]:
    """The most bytes that each buffer of a push with this header may have. Raises BadMessage."""
    last = _records_and_rows_bytes(raw, form)
    return _part_bytes(form.schema, raw.value * form.layout.frames, last)


@dataclass(frozen=True)
class Push:
    """Closed chunks of one actor with consecutive sequences: the used part of each column.

    sequence: the first chunk's. more: another push of the actor follows at once. body: for each
    observation column the used frames, chunk by chunk; then a record of each chunk, and the used
    rows of every other column, one column after another, chunk by chunk.
    """

    kind: ClassVar = Kind.PUSH
    schema: int
    actor: int
    incarnation: int
    sequence: int
    more: bool
    chunks: tuple[PushedChunk, ...]
    body: tuple[Buffer, ...] = field(repr=False)

    def raw(self) -> RawMessage:
        return RawMessage(
            self.kind,
            self.schema,
            self.incarnation,
            self.sequence,
            value=len(self.chunks),
            number=self.actor,
            rows=sum(chunk.rows for chunk in self.chunks),
            frames=self.more,
            body=self.body,
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        actor, more = raw.within("number", 0, MAX_ACTORS - 1), bool(raw.within("frames", 0, 1))
        layout, last = form.layout, _records_and_rows_bytes(raw, form)
        if not raw.body or raw.body[-1].nbytes != last:
            raise BadMessage(f"a push of {raw.value} chunks, {raw.rows} rows ends in {last} bytes")
        at, first_frame = raw.value * _RECORD.size, 0
        row_bytes, chunks = _row_table(layout)[1], []
        for stream, rows, frames in _RECORD.iter_unpack(raw.body[-1][:at]):
            if not 1 <= rows <= layout.chunk or not 1 <= frames <= layout.frames or stream < 0:
                raise BadMessage(
                    f"a chunk has 1 to {layout.chunk} rows and 1 to {layout.frames} frames of a "
                    f"stream from 0 on, got {rows}, {frames} and {stream}"
                )
            chunks.append(PushedChunk(stream, rows, frames, first_frame, at))
            first_frame += frames
            at += rows * row_bytes
        _check_lengths(raw, _part_bytes(layout.schema, first_frame, at))
        for chunk in chunks:  # its rows refer only to its frames
            _check_frames(raw.body[-1], chunk.rows_at, chunk.rows, chunk.frames, layout.schema)
        return cls(raw.schema, actor, raw.incarnation, raw.sequence, more, tuple(chunks), raw.body)

    @classmethod
    def of_chunks(
        cls,
        layout: ChunkLayout,
        memory: NDArray[np.uint8],
        chunks: Sequence[tuple[int, int, int]],
        *,
        actor: int,
        incarnation: int,
        sequence: int,
        more: bool = False,
    ) -> Self:
        """Chunks in `memory`: (first byte of the body, stream, rows) of each.

        The frames of a single chunk are not copied. Frames of several, small chunks are joined.
        """
        table, row_bytes = _row_table(layout)
        at, first_frame = _RECORD.size * len(chunks), 0
        rest = np.empty(at + row_bytes * sum(rows for _, _, rows in chunks), np.uint8)
        records = as_buffer(rest)
        pushed = []
        for i, (base, stream, rows) in enumerate(chunks):
            _copy_rows_kernel(True, rest, at, table, rows, memory, base)
            largest = _largest_frame_kernel(rest, at, 2 * rows * layout.schema.stack)
            chunk = PushedChunk(stream, rows, 1 + max(0, largest), first_frame, at)
            _RECORD.pack_into(records, i * _RECORD.size, stream, rows, chunk.frames)
            pushed.append(chunk)
            first_frame += chunk.frames
            at += rows * row_bytes
        body, view = [], as_buffer(memory)
        for name, column in layout.schema.obs_columns.items():
            offset, item = layout.sections[name].offset, column.item_bytes
            starts = [base + offset for base, _, _ in chunks]
            pieces = [
                view[start : start + chunk.frames * item]
                for start, chunk in zip(starts, pushed, strict=True)
            ]
            body.append(pieces[0] if len(pieces) == 1 else as_buffer(b"".join(pieces)))
        body.append(records)
        return cls(
            layout.schema.hash, actor, incarnation, sequence, more, tuple(pushed), tuple(body)
        )

    def write(
        self,
        number: int,
        layout: ChunkLayout,
        memory: NDArray[np.uint8],
        base: int,
        *,
        frames: bool = True,
    ) -> None:
        """Copy the whole chunk `number` of this push into the body at byte `base` of `memory`.

        frames: False if the observations are there already.
        """
        chunk = self.chunks[number]
        columns = layout.schema.obs_columns.items() if frames else ()
        for (name, column), buffer in zip(columns, self.body, strict=False):
            start, nbytes = base + layout.sections[name].offset, chunk.frames * column.item_bytes
            first = chunk.first_frame * column.item_bytes
            memory[start : start + nbytes] = np.frombuffer(buffer, np.uint8, nbytes, first)
        rest, (table, _) = np.frombuffer(self.body[-1], np.uint8), _row_table(layout)
        _copy_rows_kernel(False, rest, chunk.rows_at, table, chunk.rows, memory, base)


def claimed_push(head: Buffer, form: Form) -> tuple[int, int, int] | None:
    """Actor, incarnation and sequence that a header claims, before any check of a body.

    None: it is not of a push of one chunk of this schema, as it is in memory.
    """
    if head.nbytes != HEADER.size:
        return None
    _, _, kind, schema, incarnation, sequence, chunks, _, actor, *_ = HEADER.unpack(head)
    if kind != Kind.PUSH or schema != form.schema.hash or chunks != 1 or actor < 0:
        return None
    return actor, incarnation, sequence


def batch_bytes(raw: RawMessage, form: Form) -> list[int]:
    """The bytes that each buffer of a batch with this header has. Raises BadMessage."""
    _check_schema(raw, form)
    schema, rows = form.schema, raw.within("rows", 1, form.batch_size)
    frames = raw.within("frames", 0, 2 * rows * schema.stack)
    return _part_bytes(schema, frames, batch_rows_bytes(schema, rows))


@dataclass(frozen=True)
class BatchMessage:
    """One sampled batch, or a piece of one, each frame once.

    epoch: of the memory. live: transitions in it when the batch was drawn. first: the place of the
    first row in its batch. body: frames of each observation column; then the draw and the columns
    of `batch_rows`.
    """

    kind: ClassVar = Kind.BATCH
    schema: int
    epoch: int
    sequence: int
    live: int
    rows: int
    frames: int
    first: int
    body: tuple[Buffer, ...] = field(repr=False)

    def raw(self) -> RawMessage:
        return RawMessage(
            self.kind,
            self.schema,
            incarnation=self.live,
            sequence=self.sequence,
            value=self.epoch,
            number=self.first,
            rows=self.rows,
            frames=self.frames,
            body=self.body,
        )

    @classmethod
    def read(cls, raw: RawMessage, form: Form) -> Self:
        _check_lengths(raw, batch_bytes(raw, form))
        rows, frames = raw.rows, raw.frames
        first = raw.within("number", 0, form.batch_size - rows)
        dtype = Draw.dtype(rows)
        _check_frames(raw.body[-1], dtype.itemsize, rows, frames, form.schema)
        draw = Draw.read(np.frombuffer(raw.body[-1], dtype, 1)[0])
        if not 0.0 < draw.leaves.min() <= draw.leaves.max() < math.inf:  # false for NaN
            raise BadMessage("a leaf that was drawn is positive and finite")
        if not (0.0 < draw.total < math.inf and 0.0 < draw.smallest < math.inf):
            raise BadMessage("the total and the smallest leaf are positive and finite")
        words = raw.value, raw.sequence, raw.incarnation, rows, frames, first
        return cls(raw.schema, *words, raw.body)

    @property
    def draw(self) -> Draw:
        """What was drawn, as a copy."""
        dtype = Draw.dtype(self.rows)
        return Draw.read(np.frombuffer(self.body[-1], dtype, 1)[0].copy(), self.live)

    def columns(self, schema: Schema) -> dict[str, NDArray[Any]]:
        """The columns of `batch_rows`."""
        rows = self.body[-1][Draw.dtype(self.rows).itemsize :]
        return row_columns(batch_rows(schema), self.rows, rows)
