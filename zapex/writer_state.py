"""What the kernels that write chunks take: one array in place of many, with words and tables in it.

Numba spends about as long on handing over ten arrays as on a whole step of one stream. So all that
such a kernel keeps between calls lies in one int64 array: words first, then parts (tables, arrays
of int64 or float64), which start where their words say.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunk_store import ChunkStore
from zapex.schema import ChunkLayout

# The words that every such state begins with; a writer's own come after them.
(CHUNK, MAX_FRAMES, BODIES, BODY_BYTES, STACK, N_STEP) = range(6)
(OBS_FRAMES, NEXT_FRAMES, REWARD, DISCOUNT, PRIORITY) = range(6, 11)
(FRAME_TABLE, FRAME_COLUMNS, STEP_TABLE, STEP_COLUMNS) = range(11, 15)
FIRST_OWN_WORD = 15
# The tables' columns: where a chunk has its section, the bytes of an item, and
# how many frames make an observation, or where a staged record has the value.
(SECTION, ITEM_BYTES, DEPTH, STAGED) = (0, 1, 2, 2)
TABLE_WORDS = 3


def frame_table(layout: ChunkLayout) -> NDArray[np.int64]:
    """(observation columns, 3): section, bytes of a frame, stack."""
    columns = layout.schema.obs_columns.items()
    rows = [(layout.sections[name].offset, c.item_bytes, c.stack) for name, c in columns]
    return np.array(rows, np.int64)


def step_table(layout: ChunkLayout) -> NDArray[np.int64]:
    """(step columns, 3): section, bytes of a value, where it lies in a staged record."""
    fields: Any = layout.schema.step_dtype.fields
    rows = [
        (layout.sections[name].offset, dtype.itemsize, offset)
        for name, (dtype, offset, *_) in fields.items()
    ]
    return np.array(rows, np.int64)


def new_state(
    store: ChunkStore, words: Mapping[int, int], parts: Mapping[int, NDArray[Any]]
) -> tuple[NDArray[np.int64], dict[int, NDArray[Any]]]:
    """A state with the store's words, these words and these parts; and views of the parts.

    parts: by the word that says where they start; their items have 8 bytes.
    """
    layout = store.layout
    sections = layout.sections
    tables = {FRAME_TABLE: frame_table(layout), STEP_TABLE: step_table(layout)}
    settings = {
        CHUNK: layout.chunk,
        MAX_FRAMES: layout.frames,
        BODIES: store.bodies_offset,
        BODY_BYTES: layout.body_bytes,
        STACK: layout.schema.stack,
        N_STEP: layout.schema.n_step,
        OBS_FRAMES: sections["obs_frames"].offset,
        NEXT_FRAMES: sections["next_obs_frames"].offset,
        REWARD: sections["reward"].offset,
        DISCOUNT: sections["discount"].offset,
        PRIORITY: sections["priority"].offset,
        FRAME_COLUMNS: len(tables[FRAME_TABLE]),
        STEP_COLUMNS: len(tables[STEP_TABLE]),
        **words,
    }
    all_parts = {**tables, **parts}
    start = 1 + max(*settings, *all_parts)
    state = np.zeros(start + sum(part.size for part in all_parts.values()), np.int64)
    for word, value in settings.items():
        state[word] = value
    views = {}
    for word, part in all_parts.items():
        assert part.dtype.itemsize == state.itemsize
        state[word] = start
        view = state[start : start + part.size].view(part.dtype).reshape(part.shape)
        view[...] = part
        views[word] = view
        start += part.size
    return state, views
