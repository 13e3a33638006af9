"""Sampled batches packed for the network, each frame once, and unpacked into a learner's memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import copy_bytes
from zapex.batch import Batch
from zapex.chunk_store import (
    MAX_SLOTS,
    OFFSET_BITS,
    ChunkStore,
    gather_columns,
    gather_innermost,
)
from zapex.errors import ConfigError
from zapex.experience_messages import (
    BATCH_FACTS,
    BatchMessage,
    batch_rows,
    batch_rows_bytes,
)
from zapex.jit import kernel
from zapex.message_header import as_part
from zapex.schema import (
    F_BYTES,
    F_INNERMOST,
    F_ITEM,
    F_NEXT_OBS,
    F_OBS,
    F_STACK,
    NO_FRAME,
    BatchLayout,
    ChunkLayout,
    Schema,
    align,
    gather_tables,
)

_SPREAD = 0x9E3779B97F4A7C1  # a large odd number: bodies lie far apart, frames close together


_NONE = -1


@kernel
def _number_frames(keys: Any, numbers: Any, stack: int, bodies: int, body_bytes: int,
                   packed: Any, obs_at: int, next_at: int, places: Any) -> int:  # fmt: skip
    """Number the frames anew in the order in which rows need them, each once; how many there are.

    numbers: (rows * 2 * stack), those in their chunks, of s and of s' by turns. The new ones go to
    `packed`, u16, those of s from byte `obs_at` on, those of s' from `next_at` on. places[i]: where
    the body of frame i's slot starts, and its number there.
    """
    cells = 1
    while cells < 2 * numbers.shape[0]:
        cells *= 2
    # Open addressing: a cell holds a frame's new number. At most half of the cells are ever taken.
    known = np.full(cells, _NONE, np.int64)
    count = 0
    for b in range(keys.shape[0]):
        body = bodies + ((keys[b] >> OFFSET_BITS) & (MAX_SLOTS - 1)) * body_bytes
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
            at = obs_at + 2 * (stack * b + j)
            if j >= stack:
                at = next_at + 2 * (stack * b + j - stack)
            packed[at] = fresh & 255
            packed[at + 1] = fresh >> 8
    return count


@kernel
def _pack_kernel(keys: Any, mem: Any, mem16: Any, bodies: int, body_bytes: int, obs_frames: int,
                 next_frames: int, stack: int, frame_table: Any, step_table: Any, obs_at: int,
                 next_at: int, frames_at: int, packed: Any) -> int:  # fmt: skip
    """Rows and frames of `keys` into `packed`; how many frames there are.

    frame_table: (offset in a chunk, bytes) of each observation column; its frames go to `packed`
    from byte `frames_at` on, one column behind another.
    """
    count = keys.shape[0]
    numbers = np.empty(2 * stack * count, np.int64)
    gather_columns(keys, mem, mem16, bodies, body_bytes, obs_frames, next_frames, stack,
                   step_table, packed, numbers)  # fmt: skip
    places = np.empty((2 * stack * count, 2), np.int64)
    frames = _number_frames(keys, numbers, stack, bodies, body_bytes, packed, obs_at, next_at,
                            places)  # fmt: skip
    target = frames_at
    for c in range(frame_table.shape[0]):
        offset, size = frame_table[c, 0], frame_table[c, 1]
        start = 0
        while start < frames:
            # A row's frames mostly lie one behind another: one copy for each such run.
            stop = start + 1
            while stop < frames and places[stop, 0] == places[start, 0] and (
                places[stop, 1] == places[stop - 1, 1] + 1
            ):  # fmt: skip
                stop += 1
            nbytes = (stop - start) * size
            copy_bytes(packed, target, mem, places[start, 0] + offset + places[start, 1] * size,
                       nbytes)  # fmt: skip
            target += nbytes
            start = stop
    return frames


@kernel
def _unpack_kernel(frames: Any, column: int, tables: Any, frame_table: Any, zeros: Any,
                   batch: Any) -> None:  # fmt: skip
    """Both sides (s, s') of one observation column, out of its frames, into the batch's memory."""
    size, depth = frame_table[column, F_BYTES], frame_table[column, F_STACK]
    innermost, item = frame_table[column, F_INNERMOST], frame_table[column, F_ITEM]
    stack = tables.shape[2]
    for side in range(2):
        start = frame_table[column, F_NEXT_OBS] if side else frame_table[column, F_OBS]
        for b in range(tables.shape[1]):
            at = tables[side, b, stack - depth :]
            target = start + b * depth * size
            if innermost:
                gather_innermost(frames, 0, at, size, depth, item, zeros, batch, target)
                continue
            for j in range(depth):
                if at[j] == NO_FRAME:
                    copy_bytes(batch, target + j * size, zeros, 0, size)
                else:
                    copy_bytes(batch, target + j * size, frames, at[j] * size, size)


def check_batch_size(batch_size: int, stack: int) -> None:
    """Raises ConfigError where a packed batch's frames could not be told apart in 16 bits."""
    most = (NO_FRAME - 1) // (2 * stack)
    if batch_size > most:
        raise ConfigError(
            f"--batch-size must be at most {most:,} over a network (two observations of {stack} "
            f"frames a row, numbered in 16 bits), got {batch_size:,}"
        )


def packed_bytes(schema: Schema, rows: int) -> int:
    """The most that a batch of `rows` can take."""
    frame = sum(column.item_bytes for column in schema.obs_columns.values())
    return 2 * rows * schema.stack * frame + align(batch_rows_bytes(schema, rows))


class BatchPacker:
    """Packs drawn transitions straight from the slots; only the slots' owner may use it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        sections, schema = store.layout.sections, store.layout.schema
        self._schema = schema
        self._frame_table = np.array(
            [(sections[name].offset, c.item_bytes) for name, c in schema.obs_columns.items()],
            np.int64,
        )
        self._layouts: dict[int, _Layout] = {}

    def pack(
        self,
        keys: NDArray[np.int64],
        indices: NDArray[np.int64],
        leaves: NDArray[np.float64],
        total: float,
        smallest: float,
        live: int,
        *,
        epoch: int,
        sequence: int,
        memory: NDArray[np.uint8],
    ) -> BatchMessage:
        """The batch of `keys` (B,), in `memory` (at least `packed_bytes`), which stays in use.

        indices, leaves, total, smallest, live: as `replay.Draw` has them.
        """
        store, rows = self._store, len(keys)
        layout = self._layouts.get(rows)
        if layout is None:
            layout = self._layouts[rows] = _Layout.of(store.layout, rows)
        at = BATCH_FACTS.itemsize
        memory[:at].view(np.float64)[:] = total, smallest
        for values in (keys, indices, leaves):
            memory[at : at + values.nbytes] = values.view(np.uint8)
            at += values.nbytes
        sections = store.layout.sections
        frames = _pack_kernel(
            keys, store.mem, store.mem16, store.bodies_offset, store.layout.body_bytes,
            sections["obs_frames"].offset, sections["next_obs_frames"].offset, self._schema.stack,
            self._frame_table, layout.step_table, layout.obs_at, layout.next_at, layout.frames_at,
            memory,
        )  # fmt: skip
        at, body = layout.frames_at, []
        for column in self._schema.obs_columns.values():
            body.append(as_part(memory[at : at + frames * column.item_bytes]))
            at += frames * column.item_bytes
        last = as_part(memory[: layout.rows_bytes])
        return BatchMessage(
            self._schema.hash, epoch, sequence, live, rows, frames, (*body, last)
        )  # fmt: skip


@dataclass(frozen=True)
class _Layout:
    """Where a batch of some rows is packed in its memory: the rows first, then the frames."""

    step_table: NDArray[np.int64]  # as gather_columns takes it
    obs_at: int
    next_at: int
    rows_bytes: int
    frames_at: int

    @classmethod
    def of(cls, chunk: ChunkLayout, rows: int) -> "_Layout":
        at, offsets, step_rows = BATCH_FACTS.itemsize, {}, []
        for name, (dtype, shape) in batch_rows(chunk.schema).items():
            offsets[name], size = at, int(dtype.itemsize * np.prod(shape, dtype=np.int64))
            if name in (*chunk.schema.step_columns, "reward", "discount"):
                step_rows.append((chunk.sections[name].offset, size, at))
            at += rows * size
        return cls(
            np.array(step_rows, np.int64), offsets["obs_frames"], offsets["next_obs_frames"],
            at, align(at),
        )  # fmt: skip


class BatchUnpacker:
    """Puts packed batches into a learner's own memory."""

    def __init__(self, layout: BatchLayout, chunk: ChunkLayout) -> None:
        self._frame_table, _ = gather_tables(chunk, layout)
        self._schema = layout.schema
        longest = max(c.item_bytes for c in layout.schema.obs_columns.values())
        self._zeros = np.zeros(longest, np.uint8)

    def unpack(
        self, message: BatchMessage, batch: Batch
    ) -> tuple[NDArray[np.float64], float, float]:
        """Fill `batch`, weights apart. Returns leaves (B,), total and smallest leaf."""
        columns, (total, smallest) = message.columns(self._schema)
        tables = np.stack([columns["obs_frames"], columns["next_obs_frames"]])
        for c, part in enumerate(message.body[:-1]):
            frames = np.frombuffer(part, np.uint8)
            _unpack_kernel(frames, c, tables, self._frame_table, self._zeros, batch.memory)
        sections = batch.layout.sections
        for name, values in columns.items():
            if name in sections:
                sections[name].view(batch.memory)[...] = values
        return columns["leaves"].copy(), float(total), float(smallest)
