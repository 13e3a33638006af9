"""Write rows and frames into a chunk's body: the code that both writing kernels share.

A kernel gets an observation as a tuple of byte arrays, one for each column, each of
(rows, stack, frame bytes). If a column's stack is shorter than the longest, the column has no frame
at the first places of the longest.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import chunk_words
from zapex.chunks.store import ChunkStore
from zapex.machine.atomics import compare_bytes, copy_bytes, record_at
from zapex.machine.jit import kernel
from zapex.machine.memory import RecordType, count, words

_WRITER_WORDS = "num_frame_columns frame_columns num_step_columns step_columns "
FRAME_COLUMN = words("section nbytes depth")  # depth: frames in an observation
STEP_COLUMN = words("section nbytes staged")  # staged: the value's offset in a record
_COLUMN_WORDS = count(FRAME_COLUMN)


def writer_words(own: str) -> RecordType:
    """The record of a writer's state: the words of all writers, then the writer's own words."""
    return chunk_words(_WRITER_WORDS + own)


def new_state(
    store: ChunkStore,
    record: RecordType,
    values: Mapping[str, int],
    parts: Mapping[str, NDArray[Any]],
) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    """A writer's state over `store`, as `pack` returns it. record: made by `writer_words`."""
    sections, schema = store.layout.sections, store.layout.schema
    fields: Any = schema.step_dtype.fields
    frames = [(sections[k].offset, c.item_bytes, c.stack) for k, c in schema.obs_columns.items()]
    steps = [(sections[k].offset, dtype.itemsize, at) for k, (dtype, at, *_) in fields.items()]
    tables = {
        "frame_columns": np.array(frames, np.int64),
        "step_columns": np.array(steps, np.int64),
    }
    return store.new_state(record, values, {**tables, **parts})


@kernel
def frame_column(w: Any, state: Any, c: int) -> Any:
    """Observation column c."""
    return record_at(state, w.frame_columns + c * _COLUMN_WORDS, FRAME_COLUMN)


@kernel
def put_numbers(
    w: Any, mem32: Any, body: int, row: int, reward: float, discount: float, priority: float
) -> None:
    """Write the row's n-step return, its discount and its |priority|."""
    mem32[(body + w.reward) // 4 + row] = reward
    mem32[(body + w.discount) // 4 + row] = discount
    mem32[(body + w.priority) // 4 + row] = priority


@kernel
def put_step(w: Any, state: Any, mem: Any, body: int, row: int, records: Any, at: int) -> None:
    """Write the row's action and extra columns, from the record at byte `at` of `records`."""
    for c in range(w.num_step_columns):
        column = record_at(state, w.step_columns + c * _COLUMN_WORDS, STEP_COLUMN)
        target = body + column.section + row * column.nbytes
        copy_bytes(mem, target, records, at + column.staged, column.nbytes)


@kernel
def put_frame(
    w: Any, state: Any, mem: Any, body: int, frame: int, obs: Any, i: int, j: int
) -> None:
    """Copy the frame at place j of observation i to the chunk's `frame`."""
    for c in range(w.num_frame_columns):
        column = frame_column(w, state, c)
        k = j - (w.stack - column.depth)
        if k >= 0:
            target = body + column.section + frame * column.nbytes
            source = (i * column.depth + k) * column.nbytes
            copy_bytes(mem, target, obs[c], source, column.nbytes)


@kernel
def _all_zero(data: Any, at: int, nbytes: int) -> bool:
    # The first byte is 0, and each byte equals the one before it.
    return data[at] == 0 and compare_bytes(data, at, data, at + 1, nbytes - 1) == 0


@kernel
def is_blank(w: Any, state: Any, obs: Any, i: int, j: int) -> bool:
    """Whether the frame at place j of observation i is all zeros: such a frame is not stored."""
    for c in range(w.num_frame_columns):
        column = frame_column(w, state, c)
        k = j - (w.stack - column.depth)
        if k >= 0 and not _all_zero(obs[c], (i * column.depth + k) * column.nbytes, column.nbytes):
            return False
    return True
