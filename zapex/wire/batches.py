"""Packs sampled batches for the network, each frame once, and unpacks them for a learner."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch, SequenceBatch, aligned_zeros
from zapex.chunks.gather import (
    FRAME_COPY,
    FRAME_COPY_WORDS,
    gather_columns,
    gather_innermost,
    gather_tables,
    gather_words,
    step_copies,
)
from zapex.chunks.keys import slot_of
from zapex.chunks.layout import NO_FRAME, BatchLayout, ChunkLayout
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import BadMessage, ConfigError
from zapex.machine.atomics import copy_bytes, record_at
from zapex.machine.jit import kernel
from zapex.machine.memory import align, lay_out
from zapex.replay.draw import Draw
from zapex.replay.sequences import Sequences, gather
from zapex.wire.experience import BatchMessage, batch_rows, batch_rows_bytes
from zapex.wire.protocol import Buffer, Form, as_buffer

# A large odd number: a hash for bodies far apart and frames close together.
_SPREAD = 0x9E3779B97F4A7C1
_NONE = -1
# A batch's plan: how its rows are gathered, and where in the packed memory the frames' numbers and
# the frames go.
_PACK = gather_words("obs_at next_at frames_at")


@kernel
def _number_frames(keys: Any, numbers: Any, plan: Any, packed: Any, places: Any) -> int:
    """Give frames new numbers, each one number, in the order of the rows. Returns how many.

    numbers: (rows * 2 * stack), the numbers in their chunks: for each row those of s, then of s'.
    The new numbers go to `packed`, u16. places[i]: where the body of frame i's slot starts, and the
    frame's number there.
    """
    w = record_at(plan, 0, _PACK)
    stack = w.stack
    cells = 1
    while cells < 2 * numbers.shape[0]:
        cells *= 2
    # Open addressing: a cell holds a frame's new number. At most half of the cells are ever taken.
    known = np.full(cells, _NONE, np.int64)
    count = 0
    for b in range(keys.shape[0]):
        body = w.bodies + slot_of(keys[b]) * w.body_bytes
        for j in range(2 * stack):
            number = numbers[2 * stack * b + j]
            fresh = NO_FRAME
            if number != NO_FRAME:
                cell = ((body + number) * _SPREAD >> 20) & (cells - 1)
                while True:
                    fresh = known[cell]
                    if fresh == _NONE:
                        known[cell] = fresh = count
                        places[count, 0], places[count, 1] = body, number
                        count += 1
                        break
                    if places[fresh, 0] == body and places[fresh, 1] == number:
                        break
                    cell = (cell + 1) & (cells - 1)
            at = w.obs_at + 2 * (stack * b + j)
            if j >= stack:
                at = w.next_at + 2 * (stack * b + j - stack)
            packed[at] = fresh & 255
            packed[at + 1] = fresh >> 8
    return count


@kernel
def _pack_kernel(keys: Any, mem: Any, plan: Any, packed: Any) -> int:
    """Copy rows, then frames by column, of `keys` into `packed`. Returns the number of frames."""
    w, count = record_at(plan, 0, _PACK), keys.shape[0]
    numbers = np.empty(2 * w.stack * count, np.int64)
    gather_columns(keys, mem, plan, packed, numbers)
    places = np.empty((2 * w.stack * count, 2), np.int64)
    frames = _number_frames(keys, numbers, plan, packed, places)
    target = w.frames_at
    for c in range(w.num_frame_copies):
        column = record_at(plan, w.frame_copies + c * FRAME_COPY_WORDS, FRAME_COPY)
        offset, size = column.source, column.nbytes
        start = 0
        while start < frames:
            # A row's frames are mostly contiguous: one copy for each contiguous run.
            stop = start + 1
            while (
                stop < frames
                and places[stop, 0] == places[start, 0]
                and places[stop, 1] == places[stop - 1, 1] + 1
            ):
                stop += 1
            nbytes = (stop - start) * size
            copy_bytes(
                packed, target, mem, places[start, 0] + offset + places[start, 1] * size, nbytes
            )
            target += nbytes
            start = stop
    return frames


@kernel
def _unpack_kernel(
    frames: Any, column: int, tables: Any, frame_table: Any, zeros: Any, batch: Any, first: int
) -> None:
    """Copy one observation column's frames, for s and s', into the batch from row `first` on."""
    copy = record_at(frame_table, column * FRAME_COPY_WORDS, FRAME_COPY)
    size, depth = copy.nbytes, copy.depth
    stack = tables.shape[2]
    for side in range(2):
        start = copy.next_obs if side else copy.obs
        for b in range(tables.shape[1]):
            at = tables[side, b, stack - depth :]
            target = start + (first + b) * depth * size
            if copy.innermost:
                gather_innermost(frames, 0, at, size, depth, copy.item, zeros, batch, target)
                continue
            for j in range(depth):
                if at[j] == NO_FRAME:
                    copy_bytes(batch, target + j * size, zeros, 0, size)
                else:
                    copy_bytes(batch, target + j * size, frames, at[j] * size, size)


def check_batch_size(batch_size: int, stack: int) -> None:
    """Raises ConfigError if 16 bits are too few to number a packed batch's frames."""
    most = (NO_FRAME - 1) // (2 * stack)
    if batch_size > most:
        raise ConfigError(
            f"--batch-size must be at most {most:,} over a network (two observations of {stack} "
            f"frames a row, numbered in 16 bits), got {batch_size:,}"
        )


def packed_bytes(schema: Schema, rows: int) -> int:
    """The most bytes that a batch of `rows` can take."""
    frame = sum(column.item_bytes for column in schema.obs_columns.values())
    return 2 * rows * schema.stack * frame + align(batch_rows_bytes(schema, rows))


class BatchPacker:
    """Packs drawn transitions straight from the slots; only the slots' owner may use it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._schema = store.layout.schema
        self._layouts: dict[int, _Layout] = {}

    def pack(
        self, draw: Draw, *, epoch: int, sequence: int, memory: NDArray[np.uint8], first: int = 0
    ) -> BatchMessage:
        """The batch of `draw` in `memory` (at least `packed_bytes`); it refers to `memory`.

        first: where its rows go in the batch, if `draw` is a piece of it.
        """
        store, rows = self._store, len(draw.keys)
        layout = self._layouts.get(rows)
        if layout is None:
            layout = self._layouts[rows] = _Layout.of(store, rows)
        dtype = Draw.dtype(rows)
        draw.write(memory[: dtype.itemsize].view(dtype)[0])
        frames = _pack_kernel(draw.keys, store.mem, layout.plan, memory)
        at, body = layout.frames_at, []
        for column in self._schema.obs_columns.values():
            body.append(as_buffer(memory[at : at + frames * column.item_bytes]))
            at += frames * column.item_bytes
        last = as_buffer(memory[: layout.rows_bytes])
        return BatchMessage(
            self._schema.hash, epoch, sequence, draw.count, rows, frames, first, (*body, last)
        )


_PIECE_BYTES = 4 << 20  # of one message with sequences, if more than one fits


class PackedSequences:
    """Sequences as bytes: the leaves of each and the total (f64), then a batch's memory.

    The memory is of a SequenceLayout of so many sequences; its weights are zero.
    """

    def __init__(self, form: Form, sequences: int, asked: Sequences) -> None:
        """Raises ConfigError: a message holds fewer."""
        if not 1 <= sequences <= self.most(form, asked):
            raise ConfigError(f"a message has {self.most(form, asked)} sequences, not {sequences}")
        self._asked, self._rows = asked, sequences
        self._layout = asked.layout(form.schema, sequences)
        self._head = align(8 * (sequences + 1))
        self.nbytes = self._head + self._layout.nbytes

    @staticmethod
    def most(form: Form, asked: Sequences) -> int:
        """How many sequences a message holds. Raises ConfigError: not even one fits."""
        room = form.largest_answer_bytes - align(8 * (form.batch_size + 1))
        one = asked.layout(form.schema, 1).nbytes
        if one > room or asked.length > form.batch_size:
            raise ConfigError(
                f"a sequence over a network has at most {form.batch_size} steps and {room} bytes, "
                f"got {asked.length} steps and {one} bytes"
            )
        fit = max(1, min(room, _PIECE_BYTES) // one)
        return min(fit, form.batch_size // asked.length)

    def pack(self, draw: Draw, store: ChunkStore) -> NDArray[np.uint8]:
        """The bytes of what `follow` found."""
        memory = aligned_zeros(self.nbytes)
        head = memory[: 8 * (self._rows + 1)].view(np.float64)
        head[:-1], head[-1] = draw.leaves[:: len(draw.leaves) // self._rows], draw.total
        gather(draw, store, SequenceBatch(self._layout, memory[self._head :]), self._asked.stride)
        return memory

    def unpack(
        self, body: Buffer, batch: SequenceBatch, first: int
    ) -> tuple[NDArray[np.float64], float]:
        """Fill the rows of `batch` from `first` on. Returns the leaves, and the total.

        Raises BadMessage.
        """
        if body.nbytes != self.nbytes:
            raise BadMessage(f"{self._rows} sequences have {self.nbytes} bytes, got {body.nbytes}")
        memory = np.frombuffer(body, np.uint8)
        for name, section in self._layout.sections.items():
            rows = batch.layout.sections[name].view(batch.memory)[first : first + self._rows]
            rows[...] = section.view(memory, self._head)
        head = memory[: 8 * (self._rows + 1)].view(np.float64)
        if not (0.0 <= head.min() <= head.max() < np.inf and head[-1] > 0.0):  # false for NaN
            raise BadMessage("leaves and their total are positive and finite")
        return head[:-1], float(head[-1])


@dataclass(frozen=True)
class _Layout:
    """Where a batch of some rows is packed in its memory: the rows first, then the frames."""

    plan: NDArray[np.int64]  # as `gather_columns` takes it
    rows_bytes: int
    frames_at: int

    @classmethod
    def of(cls, store: ChunkStore, rows: int) -> "_Layout":
        schema = store.layout.schema
        row = batch_rows(schema)
        wanted = [("draw", (), Draw.dtype(rows)), *((n, (rows,), row[n]) for n in row.names or ())]
        sections, rows_bytes = lay_out(wanted, boundary=1)
        frames_at = align(rows_bytes)
        steps = {n: sections[n].offset for n in (*schema.step_columns, "reward", "discount")}
        frame_copies = np.zeros((len(schema.obs_columns), FRAME_COPY_WORDS), np.int64)
        for copy, (name, column) in zip(frame_copies, schema.obs_columns.items(), strict=True):
            copy[:2] = store.layout.sections[name].offset, column.item_bytes
        places = {
            "obs_at": sections["obs_frames"].offset,
            "next_at": sections["next_obs_frames"].offset,
            "frames_at": frames_at,
        }
        plan = store.new_gather_plan(_PACK, places, frame_copies, step_copies(store.layout, steps))
        return cls(plan, rows_bytes, frames_at)


class BatchUnpacker:
    """Puts packed batches into a learner's own memory."""

    def __init__(self, layout: BatchLayout, chunk: ChunkLayout) -> None:
        self._frame_table = gather_tables(chunk, layout)[0].reshape(-1)
        self._schema = layout.schema
        longest = max(c.item_bytes for c in layout.schema.obs_columns.values())
        self._zeros = np.zeros(longest, np.uint8)

    def unpack(self, message: BatchMessage, batch: Batch, first: int = 0) -> Draw:
        """Fill the rows of `batch` from `first` on, except weights. Returns what was drawn."""
        columns, draw = message.columns(self._schema), message.draw
        tables = np.stack([columns["obs_frames"], columns["next_obs_frames"]])
        for c, buffer in enumerate(message.body[:-1]):
            frames = np.frombuffer(buffer, np.uint8)
            _unpack_kernel(frames, c, tables, self._frame_table, self._zeros, batch.memory, first)
        rows = slice(first, first + message.rows)
        sections = batch.layout.sections
        for name, values in columns.items():
            if name in sections:
                sections[name].view(batch.memory)[rows] = values
        batch.keys[rows], batch.indices[rows] = draw.keys, draw.indices
        return draw
