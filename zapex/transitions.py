"""Whole transitions into chunks: frames that rows share are found and stored once.

A row brings all frames of s and s'. Rows that follow each other in an episode share most of them,
so each frame is looked for among those of the chunk: first where the row before, or the row's own
s, has it if the rows do follow each other, then by a hash over its bytes. A match is always
compared byte by byte. Frames of zeros are not stored at all.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import compare_bytes, copy_bytes
from zapex.chunk_store import ChunkStore, keys_kernel
from zapex.errors import ConfigError
from zapex.jit import kernel
from zapex.nstep_kernels import is_zero
from zapex.schema import COUNT, HEADER_WORDS, NO_FRAME
from zapex.writer_state import (
    BODIES,
    BODY_BYTES,
    CHUNK,
    DEPTH,
    DISCOUNT,
    FIRST_OWN_WORD,
    FRAME_TABLE,
    ITEM_BYTES,
    MAX_FRAMES,
    N_STEP,
    NEXT_FRAMES,
    OBS_FRAMES,
    PRIORITY,
    REWARD,
    SECTION,
    STACK,
    STAGED,
    STEP_COLUMNS,
    STEP_TABLE,
    TABLE_WORDS,
    new_state,
)

_FULL = -1
_UNKNOWN = 0xFFFE  # no guess; a chunk never has so many frames
_WORD_BYTES = 8

# The packer's own words, and the parts of its state.
(_SLOT, _ROWS, _FRAMES) = range(FIRST_OWN_WORD, FIRST_OWN_WORD + 3)
(_LEVELS, _HASHES, _FRAME_LEVELS, _FACTORS, _LAST) = range(FIRST_OWN_WORD + 3, FIRST_OWN_WORD + 8)


@kernel
def _sum_words(words: Any, factors: Any) -> Any:
    # Slices as arguments: LLVM vectorises this loop.
    total = np.uint64(0)
    for k in range(words.shape[0]):
        # The upper half must reach the lower, or a difference in the last byte of a word would
        # be lost but for eight bits of its product.
        total += (words[k] ^ (words[k] >> np.uint64(32))) * factors[k]
    return total


@kernel
def _hash(data: Any, at: int, size: int, state: Any, column: int) -> Any:
    """0 for zeros; otherwise whatever 64 bits tell frames apart mostly."""
    whole = size // _WORD_BYTES
    factors = state[state[_FACTORS] + column :].view(np.uint64)
    words = data[at : at + whole * _WORD_BYTES].view(np.uint64)
    total = _sum_words(words, factors)
    rest = np.uint64(0)
    for k in range(whole * _WORD_BYTES, size):
        rest = (rest << np.uint64(8)) | np.uint64(data[at + k])
    return np.int64(total + rest * factors[whole])


@kernel
def _is_frame(frame: int, row: int, j: int, obs: Any, mem: Any, body: int,
              state: Any) -> bool:  # fmt: skip
    """Whether the chunk's `frame` (NO_FRAME: zeros) is the row's at place j of its stack."""
    for c in range(len(obs)):
        table = state[FRAME_TABLE] + c * TABLE_WORDS
        size, depth = state[table + ITEM_BYTES], state[table + DEPTH]
        k = j - (state[STACK] - depth)
        if k < 0:
            continue
        at = (row * depth + k) * size
        if frame == NO_FRAME:
            if not is_zero(obs[c], at, size):
                return False
        elif compare_bytes(obs[c], at, mem, body + state[table + SECTION] + frame * size, size):
            return False
    return True


@kernel
def _place(guess: int, row: int, j: int, obs: Any, mem: Any, state: Any) -> Any:
    """The chunk's frame for place j of the row's stack: the guess, a known one, or a new one.

    A column with a short stack has no frame at the first places. A frame's level says how short a
    stack may be to be in it, so that no such hole is ever taken for a frame.
    """
    body = state[BODIES] + state[_SLOT] * state[BODY_BYTES]
    level = state[state[_LEVELS] + j]
    levels, hashes = state[_FRAME_LEVELS], state[_HASHES]
    if (
        guess != _UNKNOWN
        and (guess == NO_FRAME or state[levels + guess] <= level)
        and _is_frame(guess, row, j, obs, mem, body, state)
    ):
        return guess
    hashed = np.int64(0)
    for c in range(len(obs)):
        table = state[FRAME_TABLE] + c * TABLE_WORDS
        size, depth = state[table + ITEM_BYTES], state[table + DEPTH]
        k = j - (state[STACK] - depth)
        if k >= 0:
            hashed += _hash(obs[c], (row * depth + k) * size, size, state, c)
    if hashed == 0 and _is_frame(NO_FRAME, row, j, obs, mem, body, state):
        return NO_FRAME
    frames = state[_FRAMES]
    for frame in range(frames):
        if (
            state[hashes + frame] == hashed
            and state[levels + frame] <= level
            and _is_frame(frame, row, j, obs, mem, body, state)
        ):
            return frame
    if frames == state[MAX_FRAMES]:
        return _FULL
    for c in range(len(obs)):
        table = state[FRAME_TABLE] + c * TABLE_WORDS
        size, depth = state[table + ITEM_BYTES], state[table + DEPTH]
        k = j - (state[STACK] - depth)
        if k >= 0:
            copy_bytes(mem, body + state[table + SECTION] + frames * size,
                       obs[c], (row * depth + k) * size, size)  # fmt: skip
    state[hashes + frames] = hashed
    state[levels + frames] = level
    state[_FRAMES] = frames + 1
    return frames


@kernel
def _place_row(b: int, row: int, obs: Any, next_obs: Any, mem: Any, mem16: Any,
               state: Any) -> bool:  # fmt: skip
    """Find or store the row's frames; false where the chunk has no room for them."""
    stack, n, last = state[STACK], state[N_STEP], state[_LAST]
    body = state[BODIES] + state[_SLOT] * state[BODY_BYTES]
    at = (body + state[OBS_FRAMES]) // 2 + row * stack
    next_at = (body + state[NEXT_FRAMES]) // 2 + row * stack
    for j in range(stack):
        guess: Any = _UNKNOWN
        if row > 0 and j < stack - 1:
            guess = state[last + j + 1]
        elif row > 0 and n <= stack:
            guess = state[last + stack + stack - n]
        frame = _place(guess, b, j, obs, mem, state)
        if frame == _FULL:
            return False
        mem16[at + j] = frame
    for j in range(stack):
        guess = _UNKNOWN
        if j + n < stack:
            guess = np.int64(mem16[at + j + n])
        elif row > 0 and j < stack - 1:
            guess = state[last + stack + j + 1]
        frame = _place(guess, b, j, next_obs, mem, state)
        if frame == _FULL:
            return False
        mem16[next_at + j] = frame
    for j in range(stack):
        state[last + j] = mem16[at + j]
        state[last + stack + j] = mem16[next_at + j]
    return True


@kernel
def _pack(start: int, obs: Any, next_obs: Any, staged: Any, reward: Any, discount: Any,
          bootstrap: float, terminated: Any, magnitudes: Any, state: Any, mem: Any,
          indices: Any) -> Any:  # fmt: skip
    """Rows from `start` on into the open slot; the row that needs another slot, or the number."""
    headers, mem16, mem32 = mem.view(np.int64), mem.view(np.uint16), mem.view(np.float32)
    slot = state[_SLOT]
    body = state[BODIES] + slot * state[BODY_BYTES]
    count = len(reward)
    step_bytes = len(staged) // count
    for b in range(start, count):
        row, before = state[_ROWS], state[_FRAMES]
        if row == state[CHUNK]:
            return b
        if not _place_row(b, row, obs, next_obs, mem, mem16, state):
            state[_FRAMES] = before
            return b
        for c in range(state[STEP_COLUMNS]):
            table = state[STEP_TABLE] + c * TABLE_WORDS
            size = state[table + ITEM_BYTES]
            copy_bytes(mem, body + state[table + SECTION] + row * size,
                       staged, b * step_bytes + state[table + STAGED], size)  # fmt: skip
        follows = discount[b] if len(discount) else bootstrap
        if len(terminated) and terminated[b]:
            follows = 0.0
        mem32[(body + state[REWARD]) // 4 + row] = reward[b]
        mem32[(body + state[DISCOUNT]) // 4 + row] = follows
        mem32[(body + state[PRIORITY]) // 4 + row] = magnitudes[b]
        indices[b] = slot * state[CHUNK] + row
        state[_ROWS] = row + 1
        headers[slot * HEADER_WORDS + COUNT] = row + 1
    return count


@kernel
def pack_kernel(start: int, obs: Any, next_obs: Any, staged: Any, reward: Any, discount: Any,
                bootstrap: float, terminated: Any, magnitudes: Any, state: Any, mem: Any,
                shard: int, indices: Any, keys: Any) -> Any:  # fmt: skip
    """Rows from `start` on into the open slot, and their keys; the row that needs another, or B."""
    done = _pack(start, obs, next_obs, staged, reward, discount, bootstrap, terminated, magnitudes,
                 state, mem, indices)  # fmt: skip
    if done > start:
        headers = mem.view(np.int64)
        keys_kernel(indices[start:done], headers, state[CHUNK], shard, keys[start:done])
    return done


_NO_DISCOUNT, _NO_FLAGS = np.empty(0, np.float32), np.empty(0, np.bool_)  # where none are given


class TransitionPacker:
    """Whole transitions into one open slot after the other, which the caller provides.

    The loop that calls it:

        done = packer.pack(0, ...)
        while done < rows:          # the slot is full: another one, and it goes on
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
        # How long a stack is that has a frame at each place.
        levels = [next(d for d in depths if d >= schema.stack - j) for j in range(schema.stack)]
        words = max(c.item_bytes for c in columns) // _WORD_BYTES + 1
        # Odd, and different for each word; a column's start one further on than the last's.
        steps = np.arange(1, words + len(depths) + 1, dtype=np.uint64)
        self._state, _ = new_state(
            store,
            {},
            {
                _LEVELS: np.array(levels, np.int64),
                _HASHES: np.zeros(layout.frames, np.int64),
                _FRAME_LEVELS: np.zeros(layout.frames, np.int64),
                _FACTORS: (steps * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1),
                _LAST: np.zeros(2 * schema.stack, np.int64),
            },
        )
        self._mem = store.mem
        self._bootstrap = schema.gamma**schema.n_step
        self.close()

    @property
    def slot(self) -> int | None:
        """The open slot."""
        slot = self._state.item(_SLOT)
        return None if slot < 0 else slot

    def open(self, slot: int) -> None:
        """Go on in this slot."""
        self._state[[_SLOT, _ROWS, _FRAMES]] = slot, 0, 0

    def close(self) -> None:
        """No more rows into the open slot."""
        self._state[[_SLOT, _ROWS]] = -1, self._state[CHUNK]  # no slot is a full slot

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
        """Rows from `start` on; the row that needs another slot, or B when all are in.

        staged (B * bytes): records of the step columns; magnitudes (B,): |priorities|, -1: none.
        discount, terminated: see PrioritizedReplay.extend. indices, keys (B,) get where each row is
        and what names it.
        """
        done: int = pack_kernel(
            start, obs, next_obs, staged, reward, _NO_DISCOUNT if discount is None else discount,
            self._bootstrap, _NO_FLAGS if terminated is None else terminated, magnitudes,
            self._state, self._mem, shard, indices, keys,
        )  # fmt: skip
        return done
