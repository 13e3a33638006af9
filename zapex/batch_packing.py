"""Sampled batches packed for the network, each frame once, and unpacked into a learner's memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import copy_bytes
from zapex.batch import Batch
from zapex.chunk_store import OFFSET_BITS, SLOT_BITS, ChunkStore, gather_innermost
from zapex.errors import ConfigError
from zapex.experience_messages import (
    BATCH_FACTS,
    BatchMessage,
    batch_rows,
    batch_rows_bytes,
    row_columns,
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
    gather_tables,
)


@kernel
def _take_frames_kernel(mem: Any, starts: Any, size: int, out: Any) -> None:
    for i in range(starts.shape[0]):
        copy_bytes(out, i * size, mem, starts[i], size)


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
    return 2 * rows * schema.stack * frame + batch_rows_bytes(schema, rows)


class BatchPacker:
    """Packs drawn transitions straight from the slots; only the slots' owner may use it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        layout = store.layout
        self._schema = layout.schema
        self._columns = {
            name: self._over_slots(name)
            for name in batch_rows(layout.schema)
            if name in layout.sections
        }

    def _over_slots(self, name: str) -> NDArray[Any]:
        """A section of all slots as one array (slots, K, ...)."""
        store, section = self._store, self._store.layout.sections[name]
        first = section.view(store.mem, store.bodies_offset)
        shape = (store.slots, *first.shape)
        strides = (store.layout.body_bytes, *first.strides)
        return np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)

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
        slots = (keys >> OFFSET_BITS) & ((1 << SLOT_BITS) - 1)
        rows = keys & ((1 << OFFSET_BITS) - 1)
        drawn = {"keys": keys, "indices": indices, "leaves": leaves}
        values = drawn | {name: array[slots, rows] for name, array in self._columns.items()}
        starts = self._renumber(slots, values["obs_frames"], values["next_obs_frames"])
        at, body = 0, []
        for name, column in self._schema.obs_columns.items():
            size = column.item_bytes
            part = memory[at : at + len(starts) * size]
            offset = self._store.layout.sections[name].offset
            _take_frames_kernel(self._store.mem, starts[:, 0] + offset + starts[:, 1] * size, size,
                                part)  # fmt: skip
            body.append(as_part(part))
            at += part.nbytes
        last = memory[at : at + batch_rows_bytes(self._schema, len(keys))]
        last[: BATCH_FACTS.itemsize] = np.array([total, smallest], "<f8").view(np.uint8)
        rest = as_part(last[BATCH_FACTS.itemsize :])
        for name, out in row_columns(batch_rows(self._schema), len(keys), rest).items():
            out[...] = values[name]
        return BatchMessage(
            self._schema.hash, epoch, sequence, live, len(keys), len(starts),
            (*body, as_part(last)),
        )  # fmt: skip

    def _renumber(self, slots: NDArray[np.int64], *tables: NDArray[np.uint16]) -> NDArray[np.int64]:
        """Number the frames that `tables` (B, stack) refer to anew, each once, in place.

        Returns (where its slot's body starts, its number there) of each.
        """
        frames = self._store.layout.frames
        both = np.stack(tables).astype(np.int64)
        there = both != NO_FRAME
        unique, inverse = np.unique(
            (both + slots[None, :, None] * frames)[there], return_inverse=True
        )
        both[there] = inverse
        for table, numbers in zip(tables, both, strict=True):
            table[...] = numbers
        slot, frame = np.divmod(unique, frames)
        bodies = self._store.bodies_offset + slot * self._store.layout.body_bytes
        return np.stack([bodies, frame], axis=1)


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
