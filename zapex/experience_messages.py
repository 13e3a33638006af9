"""Experience between hosts: closed chunks and sampled batches, each frame once."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import copy_bytes
from zapex.errors import BadMessage
from zapex.jit import kernel
from zapex.message_header import Form, Kind, Message, Part, as_part, check_actor, formed
from zapex.schema import NO_FRAME, ChunkLayout, Schema


@kernel
def _pack_rows_kernel(chunk: Any, body: int, table: Any, rows: int, part: Any, start: int) -> None:
    at = start
    for c in range(table.shape[0]):
        n = rows * table[c, 1]
        copy_bytes(part, at, chunk, body + table[c, 0], n)
        at += n


@kernel
def _unpack_rows_kernel(
    part: Any, start: int, table: Any, rows: int, chunk: Any, body: int
) -> None:
    at = start
    for c in range(table.shape[0]):
        n = rows * table[c, 1]
        copy_bytes(chunk, body + table[c, 0], part, at, n)
        at += n


@kernel
def _largest_frame_kernel(part: Any, start: int, count: int) -> int:
    """The largest of `count` frame numbers (u16) from byte `start` on; -1: only zero frames."""
    largest = np.int64(-1)
    for i in range(start, start + 2 * count, 2):
        frame = np.int64(part[i]) | np.int64(part[i + 1]) << 8
        if frame != NO_FRAME and frame > largest:
            largest = frame
    return largest  # type: ignore[return-value]


RowColumns = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


def _frame_tables(schema: Schema) -> RowColumns:
    table = (np.dtype("<u2"), (schema.stack,))
    return {"obs_frames": table, "next_obs_frames": table}


def _step_columns(schema: Schema) -> RowColumns:
    return {name: (np.dtype(c.dtype), c.shape) for name, c in schema.step_columns.items()}


_FLOAT = (np.dtype("<f4"), ())


def _chunk_rows(schema: Schema) -> RowColumns:
    """The columns of a chunk that have a value for each row, in their order on the wire."""
    numbers: RowColumns = dict.fromkeys(("reward", "discount", "priority"), _FLOAT)
    return _frame_tables(schema) | _step_columns(schema) | numbers


def batch_rows(schema: Schema) -> RowColumns:
    """The columns of a batch that have a value for each row, in their order on the wire."""
    word = (np.dtype("<i8"), ())
    drawn: RowColumns = {"keys": word, "indices": word, "leaves": (np.dtype("<f8"), ())}
    numbers: RowColumns = dict.fromkeys(("reward", "discount"), _FLOAT)
    return drawn | _frame_tables(schema) | _step_columns(schema) | numbers


def _row_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _rows_bytes(columns: RowColumns, rows: int) -> int:
    return rows * sum(_row_bytes(*column) for column in columns.values())


BATCH_FACTS = np.dtype([("total", "<f8"), ("smallest", "<f8")])


def batch_rows_bytes(schema: Schema, rows: int) -> int:
    """Bytes of a batch's last part."""
    return BATCH_FACTS.itemsize + _rows_bytes(batch_rows(schema), rows)


def row_columns(columns: RowColumns, rows: int, part: Part) -> dict[str, NDArray[Any]]:
    """`part` as arrays of `rows` values each; views, not aligned."""
    arrays, at = {}, 0
    data = np.frombuffer(part, np.uint8)
    for name, (dtype, shape) in columns.items():
        nbytes = rows * _row_bytes(dtype, shape)
        arrays[name] = data[at : at + nbytes].view(dtype).reshape(rows, *shape)
        at += nbytes
    return arrays


def _check_lengths(message: Message, schema: Schema, frames: int, rows_bytes: int) -> None:
    sizes = [frames * c.item_bytes for c in schema.obs_columns.values()]
    wanted = [*sizes, rows_bytes]
    if [part.nbytes for part in message.body] != wanted:
        raise BadMessage(
            f"{message.kind.name} of {message.rows} rows and {frames} frames has parts of "
            f"{wanted} bytes, got {[part.nbytes for part in message.body]}"
        )


def _check_frames(part: Part, start: int, rows: int, frames: int, schema: Schema) -> None:
    """Both tables of frame numbers, one behind the other from byte `start` on."""
    numbers = 2 * rows * schema.stack
    if _largest_frame_kernel(np.frombuffer(part, np.uint8), start, numbers) >= frames:
        raise BadMessage(f"a row refers to a frame that is not among the {frames} sent")


_tables: dict[int, tuple[ChunkLayout, NDArray[np.int64], int]] = {}


def _row_table(layout: ChunkLayout) -> tuple[NDArray[np.int64], int]:
    """(offset in a chunk's body, bytes a row) of each column of `_chunk_rows`; bytes of a row."""
    known = _tables.get(id(layout))  # by identity: hashing a layout takes longer than the copying
    if known is None:
        columns = _chunk_rows(layout.schema)
        table = np.array(
            [(layout.sections[name].offset, _row_bytes(*columns[name])) for name in columns],
            np.int64,
        )
        known = _tables[id(layout)] = layout, table, int(table[:, 1].sum())
    return known[1:]


_RECORD = struct.Struct("<qII")  # of a chunk in a push: stream, rows, frames


class PushedChunk(NamedTuple):
    """One chunk of a push. first_frame: how many frames are before its own in the body's parts;
    rows_at: at which byte of the last part its rows begin."""

    stream: int
    rows: int
    frames: int
    first_frame: int
    rows_at: int


@dataclass(frozen=True)
class Push:
    """Closed chunks of one actor with consecutive sequences: what they hold of each column.

    sequence: the first chunk's. body: of each observation column the frames that are used, chunk
    by chunk; then a record of each chunk, and the used rows of every other column of the chunk, one
    behind another, chunk by chunk. more: another push of the actor follows at once.
    """

    kind: ClassVar[Kind] = Kind.PUSH
    schema: int
    actor: int
    incarnation: int
    sequence: int
    chunks: tuple[PushedChunk, ...]
    body: tuple[Part, ...] = field(repr=False)
    more: bool = False

    def message(self) -> Message:
        """As a message."""
        rows = sum(chunk.rows for chunk in self.chunks)
        return Message(
            self.kind, self.schema, self.incarnation, self.sequence, len(self.chunks), self.actor,
            rows, int(self.more), self.body,
        )  # fmt: skip

    @classmethod
    def of_chunks(
        cls, layout: ChunkLayout, memory: NDArray[np.uint8], chunks: Sequence[tuple[int, int, int]],
        *, actor: int, incarnation: int, sequence: int, more: bool = False,
    ) -> "Push":  # fmt: skip
        """Chunks in `memory`: (first byte of the body, stream, rows) of each.

        The frames of one chunk are not copied; those of several, which are small, are put together.
        """
        table, row_bytes = _row_table(layout)
        at, first_frame = _RECORD.size * len(chunks), 0
        rest = np.empty(at + row_bytes * sum(rows for _, _, rows in chunks), np.uint8)
        records = as_part(rest)
        pushed = []
        for i, (base, stream, rows) in enumerate(chunks):
            _pack_rows_kernel(memory, base, table, rows, rest, at)
            largest = _largest_frame_kernel(rest, at, 2 * rows * layout.schema.stack)
            chunk = PushedChunk(stream, rows, 1 + max(0, largest), first_frame, at)
            _RECORD.pack_into(records, i * _RECORD.size, stream, rows, chunk.frames)
            pushed.append(chunk)
            first_frame += chunk.frames
            at += rows * row_bytes
        body, view = [], as_part(memory)
        for name, column in layout.schema.obs_columns.items():
            offset, item = layout.sections[name].offset, column.item_bytes
            starts = [base + offset for base, _, _ in chunks]
            pieces = [
                view[start : start + chunk.frames * item]
                for start, chunk in zip(starts, pushed, strict=True)
            ]
            body.append(pieces[0] if len(pieces) == 1 else as_part(b"".join(pieces)))
        body.append(records)
        return cls(
            layout.schema.hash, actor, incarnation, sequence, tuple(pushed), tuple(body), more
        )

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Push":
        """Checked: lengths, and that no row refers to a frame that did not come with its chunk."""
        form = formed(message, form)
        layout, count, body = form.layout, message.value, message.body
        if not 1 <= count <= form.most_pushed:
            raise BadMessage(f"a push has 1 to {form.most_pushed} chunks, got {count}")
        at, first_frame = count * _RECORD.size, 0
        if not body or body[-1].nbytes < at:
            raise BadMessage(
                f"a push of {count} chunks has as many records of {_RECORD.size} bytes"
            )
        row_bytes, pushed = _row_table(layout)[1], []
        for stream, rows, frames in _RECORD.iter_unpack(body[-1][:at]):
            if not 1 <= rows <= layout.chunk or not 1 <= frames <= layout.frames or stream < 0:
                raise BadMessage(
                    f"a chunk has 1 to {layout.chunk} rows and 1 to {layout.frames} frames of a "
                    f"stream from 0 on, got {rows}, {frames} and {stream}"
                )
            pushed.append(PushedChunk(stream, rows, frames, first_frame, at))
            first_frame += frames
            at += rows * row_bytes
        if message.rows != sum(chunk.rows for chunk in pushed) or message.frames > 1:
            raise BadMessage("the header has the sum of the chunks' rows, and 1 or 0 for more")
        _check_lengths(message, layout.schema, first_frame, at)
        for chunk in pushed:
            _check_frames(body[-1], chunk.rows_at, chunk.rows, chunk.frames, layout.schema)
        return cls(
            message.schema, check_actor(message.number), message.incarnation, message.sequence,
            tuple(pushed), body, bool(message.frames),
        )  # fmt: skip

    def write(self, number: int, layout: ChunkLayout, memory: NDArray[np.uint8], base: int) -> None:
        """Put chunk `number` of these into the body at byte `base` of `memory`, whole."""
        chunk = self.chunks[number]
        for (name, column), part in zip(layout.schema.obs_columns.items(), self.body, strict=False):
            start, nbytes = base + layout.sections[name].offset, chunk.frames * column.item_bytes
            first = chunk.first_frame * column.item_bytes
            memory[start : start + nbytes] = np.frombuffer(part, np.uint8, nbytes, first)
        rest = np.frombuffer(self.body[-1], np.uint8)
        _unpack_rows_kernel(rest, chunk.rows_at, _row_table(layout)[0], chunk.rows, memory, base)


@dataclass(frozen=True)
class BatchMessage:
    """One sampled batch, each frame once.

    epoch: of the memory. live: transitions in it when the batch was drawn. body: frames of each
    observation column; then BATCH_FACTS and the columns of `batch_rows`.
    """

    kind: ClassVar[Kind] = Kind.BATCH
    schema: int
    epoch: int
    sequence: int
    live: int
    rows: int
    frames: int
    body: tuple[Part, ...] = field(repr=False)

    def message(self) -> Message:
        """As a message."""
        return Message(
            self.kind, self.schema, self.live, self.sequence, self.epoch, 0, self.rows,
            self.frames, self.body,
        )  # fmt: skip

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "BatchMessage":
        """Checked: lengths, and that no row refers to a frame that did not come."""
        form = formed(message, form)
        least = 1 if form.any_rows else form.batch_size
        if not least <= message.rows <= form.batch_size:
            raise BadMessage(f"a batch has {form.batch_size} rows, got {message.rows}")
        if message.frames > 2 * message.rows * form.schema.stack:
            raise BadMessage(f"{message.frames} frames are more than {message.rows} rows can need")
        _check_lengths(
            message, form.schema, message.frames, batch_rows_bytes(form.schema, message.rows)
        )
        batch = cls(
            message.schema, message.value, message.sequence, message.incarnation, message.rows,
            message.frames, message.body,
        )  # fmt: skip
        drawn_bytes = BATCH_FACTS.itemsize + 3 * 8 * message.rows
        _check_frames(message.body[-1], drawn_bytes, message.rows, message.frames, form.schema)
        columns, facts = batch.columns(form.schema)
        leaves = columns["leaves"]
        if not (leaves > 0).all() or not np.isfinite(leaves).all():
            raise BadMessage("a leaf that was drawn is positive and finite")
        if not (facts > 0).all() or not np.isfinite(facts).all():
            raise BadMessage("the total and the smallest leaf are positive and finite")
        return batch

    def columns(self, schema: Schema) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
        """The columns with a value for each row; and the total and the smallest leaf."""
        facts = np.frombuffer(self.body[-1][: BATCH_FACTS.itemsize], np.float64)
        rows = self.body[-1][BATCH_FACTS.itemsize :]
        return row_columns(batch_rows(schema), self.rows, rows), facts
