"""Experience between hosts: closed chunks and sampled batches, each frame once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from zapex.errors import BadMessage
from zapex.message_header import Form, Kind, Message, Part, as_part, check_actor, formed
from zapex.schema import NO_FRAME, ChunkLayout, Schema


def frames_used(*tables: NDArray[np.uint16]) -> int:
    """One more than the largest frame that any row refers to, and at least 1."""
    largest = [int(table[table != NO_FRAME].max(initial=0)) for table in tables]
    return max(largest) + 1


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
    return int(dtype.itemsize * np.prod(shape, dtype=np.int64))


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


def _check_frames(columns: Mapping[str, NDArray[Any]], frames: int) -> None:
    for name in ("obs_frames", "next_obs_frames"):
        table = columns[name]
        if ((table >= frames) & (table != NO_FRAME)).any():
            raise BadMessage(f"{name} refers to a frame that is not among the {frames} sent")


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
        used = [layout.column(name, memory, base)[:rows] for name in _chunk_rows(layout.schema)]
        frames = frames_used(*used[:2])
        body = [
            as_part(layout.column(name, memory, base)[:frames].reshape(-1).view(np.uint8))
            for name in layout.schema.obs_columns
        ]
        steps = np.concatenate([column.reshape(-1).view(np.uint8) for column in used])
        return cls(
            layout.schema.hash, actor, incarnation, sequence, stream, rows, frames,
            (*body, as_part(steps)),
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
        _check_lengths(message, layout.schema, _rows_bytes(_chunk_rows(layout.schema), rows))
        push = cls(
            message.schema, check_actor(message.number), message.incarnation, message.sequence,
            message.value, rows, frames, body,
        )  # fmt: skip
        columns = row_columns(_chunk_rows(layout.schema), rows, body[-1])
        _check_frames(columns, frames)
        return push

    def write(self, layout: ChunkLayout, memory: NDArray[np.uint8], base: int) -> None:
        """Put the chunk into the body at byte `base` of `memory`, whole."""
        for name, part in zip(layout.schema.obs_columns, self.body, strict=False):
            start = base + layout.sections[name].offset
            memory[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
        columns = row_columns(_chunk_rows(layout.schema), self.rows, self.body[-1])
        for name, column in columns.items():
            layout.column(name, memory, base)[: self.rows] = column


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
        if message.rows != form.batch_size:
            raise BadMessage(f"a batch has {form.batch_size} rows, got {message.rows}")
        if message.frames > 2 * message.rows * form.schema.stack:
            raise BadMessage(f"{message.frames} frames are more than {message.rows} rows can need")
        _check_lengths(message, form.schema, batch_rows_bytes(form.schema, message.rows))
        batch = cls(
            message.schema, message.value, message.sequence, message.incarnation, message.rows,
            message.frames, message.body,
        )  # fmt: skip
        columns, facts = batch.columns(form.schema)
        _check_frames(columns, message.frames)
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
