"""Experience between hosts: closed chunks and sampled batches, each frame once."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import copy_bytes
from zapex.errors import BadMessage
from zapex.jit import kernel
from zapex.message_header import Form, Kind, Message, Part, as_part, check_actor, formed
from zapex.schema import NO_FRAME, ChunkLayout, Schema


@kernel
def _pack_rows_kernel(chunk: Any, body: int, table: Any, rows: int, part: Any) -> None:
    at = 0
    for c in range(table.shape[0]):
        n = rows * table[c, 1]
        copy_bytes(part, at, chunk, body + table[c, 0], n)
        at += n


@kernel
def _unpack_rows_kernel(part: Any, table: Any, rows: int, chunk: Any, body: int) -> None:
    at = 0
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


def _check_lengths(message: Message, schema: Schema, rows_bytes: int) -> None:
    sizes = [message.frames * c.item_bytes for c in schema.obs_columns.values()]
    wanted = [*sizes, rows_bytes]
    if [part.nbytes for part in message.body] != wanted:
        raise BadMessage(
            f"{message.kind.name} of {message.rows} rows and {message.frames} frames has parts of "
            f"{wanted} bytes, got {[part.nbytes for part in message.body]}"
        )


def _check_frames(part: Part, start: int, message: Message, schema: Schema) -> None:
    """Both tables of frame numbers, one behind the other from byte `start` on."""
    numbers = 2 * message.rows * schema.stack
    if _largest_frame_kernel(np.frombuffer(part, np.uint8), start, numbers) >= message.frames:
        raise BadMessage(f"a row refers to a frame that is not among the {message.frames} sent")


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


@dataclass(frozen=True)
class Push:
    """One closed chunk: what it holds of each column.

    body: the frames of each observation column that are used, then the used rows of every other
    column of the chunk, one behind another.
    """

    kind: ClassVar[Kind] = Kind.PUSH
    schema: int
    actor: int
    incarnation: int
    sequence: int
    stream: int
    rows: int
    frames: int
    body: tuple[Part, ...] = field(repr=False)

    def message(self) -> Message:
        """As a message."""
        return Message(
            self.kind, self.schema, self.incarnation, self.sequence, self.stream, self.actor,
            self.rows, self.frames, self.body,
        )  # fmt: skip

    @classmethod
    def of_chunk(
        cls, layout: ChunkLayout, memory: NDArray[np.uint8], base: int, *, actor: int,
        incarnation: int, sequence: int, stream: int, rows: int,
    ) -> "Push":  # fmt: skip
        """The chunk of `rows` transitions at byte `base` of `memory`; frames are not copied."""
        table, row_bytes = _row_table(layout)
        rest = np.empty(rows * row_bytes, np.uint8)
        _pack_rows_kernel(memory, base, table, rows, rest)
        frames = 1 + max(0, _largest_frame_kernel(rest, 0, 2 * rows * layout.schema.stack))
        body = []
        for name, column in layout.schema.obs_columns.items():
            start = base + layout.sections[name].offset
            body.append(as_part(memory[start : start + frames * column.item_bytes]))
        return cls(
            layout.schema.hash, actor, incarnation, sequence, stream, rows, frames,
            (*body, as_part(rest)),
        )  # fmt: skip

    @classmethod
    def read(cls, message: Message, form: Form | None) -> "Push":
        """Checked: lengths, and that no row refers to a frame that did not come."""
        layout = formed(message, form).layout
        rows, frames, body = message.rows, message.frames, message.body
        if not 1 <= rows <= layout.chunk or not 1 <= frames <= layout.frames:
            raise BadMessage(
                f"a chunk has 1 to {layout.chunk} rows and 1 to {layout.frames} frames, "
                f"got {rows} and {frames}"
            )
        _check_lengths(message, layout.schema, rows * _row_table(layout)[1])
        _check_frames(body[-1], 0, message, layout.schema)
        return cls(
            message.schema, check_actor(message.number), message.incarnation, message.sequence,
            message.value, rows, frames, body,
        )  # fmt: skip

    def write(self, layout: ChunkLayout, memory: NDArray[np.uint8], base: int) -> None:
        """Put the chunk into the body at byte `base` of `memory`, whole."""
        for name, part in zip(layout.schema.obs_columns, self.body, strict=False):
            start = base + layout.sections[name].offset
            memory[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
        rest = np.frombuffer(self.body[-1], np.uint8)
        _unpack_rows_kernel(rest, _row_table(layout)[0], self.rows, memory, base)


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
        _check_lengths(message, form.schema, batch_rows_bytes(form.schema, message.rows))
        batch = cls(
            message.schema, message.value, message.sequence, message.incarnation, message.rows,
            message.frames, message.body,
        )  # fmt: skip
        drawn_bytes = BATCH_FACTS.itemsize + 3 * 8 * message.rows
        _check_frames(message.body[-1], drawn_bytes, message, form.schema)
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
