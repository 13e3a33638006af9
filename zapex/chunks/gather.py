"""Gather rows: copy the transitions of keys from their chunks into the memory of a batch.

A gather's plan is the state of its kernels: where each column lies in a chunk, and where it goes in
a batch.

    SYNC row-whole:   evict (release generation)   -> gather (copy; acquire fence; generation again)
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.keys import (
    GENERATION_MASK,
    GENERATION_SHIFT,
    NO_KEY,
    row_of,
    slot_of,
)
from zapex.chunks.layout import (
    GENERATION,
    HEADER_WORDS,
    NO_FRAME,
    BatchLayout,
    ChunkLayout,
    chunk_words,
)
from zapex.machine.atomics import (
    copy_bytes,
    fence_acquire,
    fence_full,
    prefetch,
    record_at,
    stream_bytes,
)
from zapex.machine.jit import kernel
from zapex.machine.memory import RecordType, count, words

GatherArguments = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""A store's memory, and a plan: the copies that a gather makes."""

_STREAMED_BYTES = 4 << 20  # a batch of this size or more does not stay in a cache
_BYTES_AHEAD = 1024  # prefetched of the next row's first frame, while a row is copied

# How a gather copies a column: the place in a chunk, the bytes, the place in a batch.
FRAME_COPY = words("source nbytes depth obs next_obs innermost item")
STEP_COPY = words("source nbytes target")
_GATHER_WORDS = "num_frame_copies frame_copies num_step_copies step_copies zeros "


def gather_words(own: str) -> RecordType:
    """The record of a gather's state (its plan): the shared words, then its own."""
    return chunk_words(_GATHER_WORDS + own)


GATHER = gather_words("")
# Of a gather into a batch: the slots of the store, and where the first row of these columns goes in
# the batch, in elements.
BATCH_GATHER = gather_words("slots keys indices weights")
FRAME_COPY_WORDS, _STEP_COPY_WORDS = count(FRAME_COPY), count(STEP_COPY)


def row_offset(batch: BatchLayout, name: str, row: int) -> int:
    """Where a row of a column starts in a batch's memory, in bytes."""
    section = batch.sections[name]
    return section.offset + row * (section.nbytes // batch.batch_size)


def gather_tables(
    chunk: ChunkLayout, batch: BatchLayout, first: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One FRAME_COPY for each observation column, one STEP_COPY for each step column, as words.

    first: the row of the batch where the gather begins.
    """

    def place(name: str) -> int:
        return row_offset(batch, name, first)

    frame_rows = []
    for name, column in () if batch.frames_apart else chunk.schema.obs_columns.items():
        suffix = name.removeprefix("obs")
        frame_rows.append(
            (
                chunk.sections[name].offset,
                column.item_bytes,
                column.stack,
                place("obs" + suffix),
                place("next_obs" + suffix),
                int(batch._stack_innermost(column)),
                np.dtype(column.dtype).itemsize,
            )
        )
    targets = {name: place(name) for name in (*chunk.schema.step_columns, "reward", "discount")}
    return np.array(frame_rows, np.int64), step_copies(chunk, targets)


def step_copies(chunk: ChunkLayout, targets: Mapping[str, int]) -> NDArray[np.int64]:
    """One STEP_COPY for each column. targets: the column's start in the destination, by name."""
    rows = [
        (chunk.sections[name].offset, chunk.sections[name].nbytes // chunk.chunk, target)
        for name, target in targets.items()
    ]
    return np.array(rows, np.int64)


@kernel
def _interleave4(target: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    # Slices as arguments: LLVM vectorises this loop, but not a loop over flat indices.
    for p in range(a.shape[0]):
        target[4 * p] = a[p]
        target[4 * p + 1] = b[p]
        target[4 * p + 2] = c[p]
        target[4 * p + 3] = d[p]


@kernel
def gather_innermost(
    mem: Any,
    base: int,
    at: Any,
    size: int,
    stack: int,
    item: int,
    zeros: Any,
    batch: Any,
    target: int,
) -> None:
    """Copy one observation with the stack innermost; `at` (stack,): its frame numbers."""
    if stack == 4 and item == 1:
        f0 = zeros[:size] if at[0] == NO_FRAME else mem[base + at[0] * size :][:size]
        f1 = zeros[:size] if at[1] == NO_FRAME else mem[base + at[1] * size :][:size]
        f2 = zeros[:size] if at[2] == NO_FRAME else mem[base + at[2] * size :][:size]
        f3 = zeros[:size] if at[3] == NO_FRAME else mem[base + at[3] * size :][:size]
        _interleave4(batch[target : target + 4 * size], f0, f1, f2, f3)
        return
    for j in range(stack):
        frame = base + at[j] * size
        for p in range(size // item):
            place = target + (p * stack + j) * item
            for k in range(item):
                batch[place + k] = 0 if at[j] == NO_FRAME else mem[frame + p * item + k]


@kernel
def gather_columns(keys: Any, mem: Any, plan: Any, batch: Any, numbers: Any) -> None:
    """Copy all columns without the frames; write frame numbers to `numbers` (B * 2 * stack).

    This is a separate loop because each value is on another cache line: the cache misses overlap.
    """
    w, mem16 = record_at(plan, 0, GATHER), mem.view(np.uint16)
    stack, num_step_copies = w.stack, w.num_step_copies
    for b in range(keys.shape[0]):
        row = row_of(keys[b])
        body = w.bodies + slot_of(keys[b]) * w.body_bytes
        at = 2 * stack * b
        obs_at = (body + w.obs_frames) // 2 + row * stack
        next_at = (body + w.next_obs_frames) // 2 + row * stack
        for j in range(stack):
            numbers[at + j] = mem16[obs_at + j]
            numbers[at + stack + j] = mem16[next_at + j]
        for c in range(num_step_copies):
            column = record_at(plan, w.step_copies + c * _STEP_COPY_WORDS, STEP_COPY)
            size = column.nbytes
            copy_bytes(
                batch, column.target + b * size, mem, body + column.source + row * size, size
            )


@kernel
def _gather_frames(keys: Any, numbers: Any, mem: Any, plan: Any, batch: Any) -> None:
    """Copy s and s' of the rows. numbers: the frame numbers from `gather_columns`."""
    w = record_at(plan, 0, GATHER)
    ahead = record_at(plan, w.frame_copies, FRAME_COPY)
    stack, bodies, body_bytes, columns = w.stack, w.bodies, w.body_bytes, w.num_frame_copies
    zeros, streaming = plan.view(np.uint8)[w.zeros :], batch.shape[0] >= _STREAMED_BYTES
    for b in range(keys.shape[0]):
        body = bodies + slot_of(keys[b]) * body_bytes
        if b + 1 < keys.shape[0]:  # prefetch the next row's first frame
            place = bodies + slot_of(keys[b + 1]) * body_bytes + ahead.source
            place += numbers[2 * stack * (b + 1)] * ahead.nbytes
            for line in range(place, place + min(ahead.nbytes, _BYTES_AHEAD), 64):
                prefetch(mem, line)
        for side in range(2):
            for c in range(columns):
                column = record_at(plan, w.frame_copies + c * FRAME_COPY_WORDS, FRAME_COPY)
                size, depth = column.nbytes, column.depth
                base = body + column.source
                target = (column.next_obs if side else column.obs) + b * depth * size
                # No slices for each frame: a slice counts references with a locked instruction,
                # and this waits until all stores before it are done.
                first = (2 * b + side + 1) * stack - depth
                if column.innermost:
                    at = numbers[first : first + depth]
                    gather_innermost(mem, base, at, size, depth, column.item, zeros, batch, target)
                    continue
                for j in range(depth):
                    number = numbers[first + j]
                    if number == NO_FRAME:
                        copy_bytes(batch, target + j * size, zeros, 0, size)
                    elif streaming:
                        stream_bytes(batch, target + j * size, mem, base + number * size, size)
                    else:
                        copy_bytes(batch, target + j * size, mem, base + number * size, size)
    if streaming:
        fence_full()


@kernel
def gather_kernel(keys: Any, mem: Any, plan: Any, batch: Any, out_keys: Any) -> int:
    """Copy the rows of `keys` into `batch`. Torn rows get key -1. Returns how many are torn.

    A row is torn if its slot's generation differs from the key's after the copy. The caller checks
    that the keys lie inside the store. plan: see `ChunkStore.new_gather_plan`.
    """
    count = keys.shape[0]
    numbers = np.empty(2 * record_at(plan, 0, GATHER).stack * count, np.int64)
    gather_columns(keys, mem, plan, batch, numbers)
    # STEP columns-copied
    _gather_frames(keys, numbers, mem, plan, batch)
    # STEP rows-copied
    return _count_torn(keys, mem, out_keys)


@kernel
def _count_torn(keys: Any, mem: Any, out_keys: Any) -> int:
    # SYNC row-whole: the caller's copies come before this second look at the generations
    fence_acquire()
    torn, headers = 0, mem.view(np.int64)
    for b in range(keys.shape[0]):
        key = keys[b]
        now = headers[slot_of(key) * HEADER_WORDS + GENERATION]
        if (key >> GENERATION_SHIFT) & GENERATION_MASK == now:
            out_keys[b] = key
        else:
            out_keys[b] = NO_KEY
            torn += 1
    return torn


@kernel
def gather_numbers_kernel(
    keys: Any, mem: Any, plan: Any, batch: Any, out_keys: Any, numbers: Any
) -> int:
    """As `gather_kernel`, but of the frames only their numbers (B * 2 * stack)."""
    gather_columns(keys, mem, plan, batch, numbers)
    return _count_torn(keys, mem, out_keys)
