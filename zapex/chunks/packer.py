"""Write whole transitions into chunks. A frame that several rows share is stored once.

A row has all frames of s and s'. Successive rows of an episode share most of them, so each frame is
searched in the chunk. First the packer guesses a frame: that of the row before, or of the row's own
s, as if the rows were successive. Then it searches by a hash over the bytes. A match is always
compared byte by byte. Frames of zeros are not stored.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.keys import keys_kernel
from zapex.chunks.layout import COUNT, HEADER_WORDS, NO_FRAME
from zapex.chunks.rows import (
    frame_column,
    is_blank,
    new_state,
    put_frame,
    put_numbers,
    put_step,
    writer_words,
)
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError
from zapex.machine.atomics import compare_bytes, record_at, store_release
from zapex.machine.jit import kernel
from zapex.machine.memory import places

_FULL = -1
_UNKNOWN = 0xFFFE  # no guess; a chunk has fewer frames
_WORD_BYTES = 8

PACKER = writer_words(
    "slot rows frames "
    # Where its parts start.
    "levels hashes frame_levels factors last"
)
_CHUNK, _SLOT, _ROWS, _FRAMES = places(PACKER, "chunk slot rows frames")


@kernel
def _sum_words(words: Any, factors: Any) -> Any:
    # Slices as arguments: LLVM vectorises this loop.
    total = np.uint64(0)
    for k in range(words.shape[0]):
        # Mix the upper half into the lower. Otherwise a difference in the last byte of a word
        # changes only eight bits of the product.
        total += (words[k] ^ (words[k] >> np.uint64(32))) * factors[k]
    return total


@kernel
def _hash(data: Any, at: int, size: int, factors: Any) -> Any:
    """A 64-bit hash of a frame: 0 for zeros; different frames mostly have different hashes."""
    whole = size // _WORD_BYTES
    words = data[at : at + whole * _WORD_BYTES].view(np.uint64)
    total = _sum_words(words, factors)
    rest = np.uint64(0)
    for k in range(whole * _WORD_BYTES, size):
        rest = (rest << np.uint64(8)) | np.uint64(data[at + k])
    return np.int64(total + rest * factors[whole])


@kernel
def _is_frame(frame: int, obs: Any, i: int, j: int, w: Any, state: Any, mem: Any) -> bool:
    """Whether the chunk's `frame` (NO_FRAME: zeros) equals the one at place j of observation i."""
    if frame == NO_FRAME:
        return is_blank(w, state, obs, i, j)
    body = w.bodies + w.slot * w.body_bytes
    for c in range(w.num_frame_columns):
        column = frame_column(w, state, c)
        k = j - (w.stack - column.depth)
        at, nbytes = (i * column.depth + k) * column.nbytes, column.nbytes
        if k >= 0 and compare_bytes(
            obs[c], at, mem, body + column.section + frame * nbytes, nbytes
        ):
            return False
    return True


@kernel
def _place(guess: int, obs: Any, i: int, j: int, w: Any, state: Any, mem: Any) -> Any:
    """The chunk's frame for place j of observation i: the guess, a known one, or a new one.

    A column with a short stack has no frame at the first places. A frame's level is the shortest
    stack that has a frame there. So a frame is not used where it would lack a column.
    """
    level = state[w.levels + j]
    if (
        guess != _UNKNOWN
        and (guess == NO_FRAME or state[w.frame_levels + guess] <= level)
        and _is_frame(guess, obs, i, j, w, state, mem)
    ):
        return guess
    hashed = np.int64(0)
    for c in range(w.num_frame_columns):
        column = frame_column(w, state, c)
        k = j - (w.stack - column.depth)
        if k >= 0:
            factors = state[w.factors + c :].view(np.uint64)
            at = (i * column.depth + k) * column.nbytes
            hashed += _hash(obs[c], at, column.nbytes, factors)
    if hashed == 0 and is_blank(w, state, obs, i, j):
        return NO_FRAME
    for frame in range(w.frames):
        if (
            state[w.hashes + frame] == hashed
            and state[w.frame_levels + frame] <= level
            and _is_frame(frame, obs, i, j, w, state, mem)
        ):
            return frame
    new = w.frames
    if new == w.max_frames:
        return _FULL
    put_frame(w, state, mem, w.bodies + w.slot * w.body_bytes, new, obs, i, j)
    state[w.hashes + new] = hashed
    state[w.frame_levels + new] = level
    w.frames = new + 1
    return new


@kernel
def _place_row(b: int, obs: Any, next_obs: Any, w: Any, state: Any, mem: Any, mem16: Any) -> bool:
    """Find or store the frames of row b; false if the chunk has no room for them."""
    row, stack, n, last = w.rows, w.stack, w.n_step, w.last
    body = w.bodies + w.slot * w.body_bytes
    at = (body + w.obs_frames) // 2 + row * stack
    next_at = (body + w.next_obs_frames) // 2 + row * stack
    for j in range(stack):
        guess: Any = _UNKNOWN
        if row > 0 and j < stack - 1:
            guess = state[last + j + 1]
        elif row > 0 and n <= stack:
            guess = state[last + stack + stack - n]
        frame = _place(guess, obs, b, j, w, state, mem)
        if frame == _FULL:
            return False
        mem16[at + j] = frame
    for j in range(stack):
        guess = _UNKNOWN
        if j + n < stack:
            guess = np.int64(mem16[at + j + n])
        elif row > 0 and j < stack - 1:
            guess = state[last + stack + j + 1]
        frame = _place(guess, next_obs, b, j, w, state, mem)
        if frame == _FULL:
            return False
        mem16[next_at + j] = frame
    for j in range(stack):
        state[last + j] = mem16[at + j]
        state[last + stack + j] = mem16[next_at + j]
    return True


@kernel
def pack_kernel(
    start: int,
    obs: Any,
    next_obs: Any,
    staged: Any,
    reward: Any,
    discount: Any,
    bootstrap: float,
    terminated: Any,
    magnitudes: Any,
    state: Any,
    mem: Any,
    shard: int,
    indices: Any,
    keys: Any,
) -> Any:
    """Write rows from `start` on, and their keys. Returns the row that needs a new slot, or B."""
    w = record_at(state, 0, PACKER)
    headers, mem16, mem32 = mem.view(np.int64), mem.view(np.uint16), mem.view(np.float32)
    body = w.bodies + w.slot * w.body_bytes
    step_bytes = len(staged) // len(reward)
    b = start
    while b < len(reward) and w.rows < w.chunk:
        row, before = w.rows, w.frames
        if not _place_row(b, obs, next_obs, w, state, mem, mem16):
            w.frames = before
            break
        put_step(w, state, mem, body, row, staged, b * step_bytes)
        follows = discount[b] if len(discount) else bootstrap
        if len(terminated) and terminated[b]:
            follows = 0.0
        put_numbers(w, mem32, body, row, reward[b], follows, magnitudes[b])
        indices[b] = w.slot * w.chunk + row
        w.rows = row + 1
        # SYNC row-counted: the row is whole -> the owner's look for new rows (ledger.py)
        store_release(headers, w.slot * HEADER_WORDS + COUNT, row + 1)
        b += 1
    if b > start:
        keys_kernel(indices[start:b], headers, w.chunk, shard, keys[start:b])
    return b


# Not given.
_NO_DISCOUNT, _NO_FLAGS = np.empty(0, np.float32), np.empty(0, np.bool_)


class TransitionPacker:
    """Write whole transitions into one open slot at a time; the caller provides the slots.

    The caller's loop:

        done = packer.pack(0, ...)
        while done < rows:          # the slot is full: open another and continue
            packer.open(slot)
            done = packer.pack(done, ...)
    """

    def __init__(self, store: ChunkStore) -> None:
        layout, schema = store.layout, store.layout.schema
        if layout.frames < 2 * schema.stack:
            raise ConfigError(
                f"a chunk of {layout.chunk} transitions has room for {layout.frames} frames and a "
                f"whole transition needs {2 * schema.stack}: give the replay chunk={schema.stack} "
                "or more, or a larger capacity"
            )
        columns = schema.obs_columns.values()
        depths = sorted(c.stack for c in columns)
        # For each place, the shortest stack that has a frame there.
        levels = [next(d for d in depths if d >= schema.stack - j) for j in range(schema.stack)]
        words = max(c.item_bytes for c in columns) // _WORD_BYTES + 1
        # Odd, and different for each word. Each column starts one factor after the column before.
        steps = np.arange(1, words + len(depths) + 1, dtype=np.uint64)
        parts: dict[str, NDArray[Any]] = {
            "levels": np.array(levels, np.int64),
            "hashes": np.zeros(layout.frames, np.int64),
            "frame_levels": np.zeros(layout.frames, np.int64),
            "factors": (steps * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1),
            "last": np.zeros(2 * schema.stack, np.int64),
        }
        self._state, _ = new_state(store, PACKER, {}, parts)
        self._mem = store.mem
        self._bootstrap = schema.gamma**schema.n_step
        self.close()

    @property
    def slot(self) -> int | None:
        """The open slot, or None."""
        slot = self._state.item(_SLOT)
        return None if slot < 0 else slot

    def open(self, slot: int) -> None:
        """Write the next rows into this slot."""
        self._state[[_SLOT, _ROWS, _FRAMES]] = slot, 0, 0

    def close(self) -> None:
        """Write no more rows into the open slot."""
        self._state[[_SLOT, _ROWS]] = -1, self._state[_CHUNK]  # without a slot: as if it were full

    def pack(
        self,
        start: int,
        obs: tuple[NDArray[np.uint8], ...],
        next_obs: tuple[NDArray[np.uint8], ...],
        staged: NDArray[np.uint8],
        reward: NDArray[np.float32],
        discount: NDArray[np.float32] | None,
        terminated: NDArray[np.bool_] | None,
        magnitudes: NDArray[np.float64],
        shard: int,
        indices: NDArray[np.int64],
        keys: NDArray[np.int64],
    ) -> int:
        """Write rows from `start` on. Returns the row that needs another slot, or B when done.

        staged (B * bytes): records of the step columns. magnitudes (B,): |priorities|, -1: not
        given. discount, terminated: see PrioritizedReplay.extend. indices, keys (B,) are written:
        the index and the key of each row.
        """
        done: int = pack_kernel(
            start,
            obs,
            next_obs,
            staged,
            reward,
            _NO_DISCOUNT if discount is None else discount,
            self._bootstrap,
            _NO_FLAGS if terminated is None else terminated,
            magnitudes,
            self._state,
            self._mem,
            shard,
            indices,
            keys,
        )
        return done
