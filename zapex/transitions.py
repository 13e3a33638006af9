"""Whole transitions into chunks: frames that rows share are found and stored once.

A row brings all frames of s and s'. Rows that follow each other in an episode share most of them,
so each frame is looked for among those of the chunk: first where the row before, or the row's own
s, has it if the rows do follow each other, then by a hash over its bytes. A match is always
compared byte by byte. Frames of zeros are not stored at all.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import copy_bytes
from zapex.chunk_store import ChunkStore
from zapex.errors import ConfigError
from zapex.jit import kernel
from zapex.nstep import flat_observations
from zapex.schema import COUNT, HEADER_WORDS, NO_FRAME

_FULL = -1
_UNKNOWN = 0xFFFE  # no guess; a chunk never has so many frames
_BLOCK = 4096  # bytes compared between two looks at whether they differ

# The builder's words.
(_SLOT, _ROWS, _FRAMES, _CHUNK, _MAX_FRAMES, _BODIES, _BODY_BYTES) = range(7)
(_OBS_FRAMES, _NEXT_FRAMES, _REWARD, _DISCOUNT, _PRIORITY, _N_STEP) = range(7, 13)
_WORDS = 13
# The tables of columns.
(_F_SECTION, _F_BYTES, _F_STACK) = range(3)
(_S_SECTION, _S_BYTES, _S_STAGED) = range(3)


@kernel
def _block_differs(a: Any, b: Any) -> Any:
    # Slices as arguments and no way out in the middle: LLVM vectorises this loop.
    difference = np.uint8(0)
    for k in range(a.shape[0]):
        difference |= a[k] ^ b[k]
    return difference != 0


@kernel
def _block_sum(a: Any, factors: Any) -> Any:
    total = np.uint32(0)
    for k in range(a.shape[0]):
        total += np.uint32(a[k]) * factors[k]
    return total


@kernel
def _same_bytes(a: Any, a_at: int, b: Any, b_at: int, size: int) -> bool:
    done = 0
    while done < size:
        n = min(_BLOCK, size - done)
        if _block_differs(a[a_at + done : a_at + done + n], b[b_at + done : b_at + done + n]):
            return False
        done += n
    return True


@kernel
def _is_frame(frame: int, row: int, j: int, stack: int, obs: Any, mem: Any, zeros: Any, body: int,
              frame_table: Any) -> bool:  # fmt: skip
    """Whether the chunk's `frame` (NO_FRAME: zeros) is the row's at place j of its stack."""
    for c in range(frame_table.shape[0]):
        size, depth = frame_table[c, _F_BYTES], frame_table[c, _F_STACK]
        k = j - (stack - depth)
        if k < 0:
            continue
        at = (row * depth + k) * size
        if frame == NO_FRAME:
            if not _same_bytes(obs[c], at, zeros, 0, size):
                return False
        elif not _same_bytes(obs[c], at, mem, body + frame_table[c, _F_SECTION] + frame * size,
                             size):  # fmt: skip
            return False
    return True


@kernel
def _place(guess: Any, row: int, j: int, stack: int, obs: Any, mem: Any, zeros: Any, words: Any,
           frame_table: Any, levels: Any, hashes: Any, chunk_levels: Any,
           factors: Any) -> Any:  # fmt: skip
    """The chunk's frame for place j of the row's stack: the guess, a known one, or a new one.

    A column with a short stack has no frame at the first places. A frame's level says how short a
    stack may be to be in it, so that no such hole is ever taken for a frame.
    """
    body = words[_BODIES] + words[_SLOT] * words[_BODY_BYTES]
    level = levels[j]
    if (
        guess != _UNKNOWN
        and (guess == NO_FRAME or chunk_levels[guess] <= level)
        and _is_frame(guess, row, j, stack, obs, mem, zeros, body, frame_table)
    ):
        return guess
    hashed = np.uint32(0)
    for c in range(frame_table.shape[0]):
        size, depth = frame_table[c, _F_BYTES], frame_table[c, _F_STACK]
        k = j - (stack - depth)
        if k >= 0:
            at = (row * depth + k) * size
            hashed += _block_sum(obs[c][at : at + size], factors[c : c + size])
    if hashed == 0 and _is_frame(NO_FRAME, row, j, stack, obs, mem, zeros, body, frame_table):
        return NO_FRAME
    frames = words[_FRAMES]
    for frame in range(frames):
        if (
            hashes[frame] == hashed
            and chunk_levels[frame] <= level
            and _is_frame(frame, row, j, stack, obs, mem, zeros, body, frame_table)
        ):
            return frame
    if frames == words[_MAX_FRAMES]:
        return _FULL
    for c in range(frame_table.shape[0]):
        size, depth = frame_table[c, _F_BYTES], frame_table[c, _F_STACK]
        k = j - (stack - depth)
        if k >= 0:
            copy_bytes(mem, body + frame_table[c, _F_SECTION] + frames * size,
                       obs[c], (row * depth + k) * size, size)  # fmt: skip
    hashes[frames] = hashed
    chunk_levels[frames] = level
    words[_FRAMES] = frames + 1
    return frames


@kernel
def pack_kernel(start: int, obs: Any, next_obs: Any, staged: Any, numbers: Any, words: Any,
                headers: Any, mem: Any, mem16: Any, mem32: Any, frame_table: Any, step_table: Any,
                levels: Any, hashes: Any, chunk_levels: Any, factors: Any, last: Any, zeros: Any,
                indices: Any) -> Any:  # fmt: skip
    """Rows from `start` on into the open slot; the row that needs another slot, or the number."""
    stack = levels.shape[0]
    count = numbers.shape[0]
    n = words[_N_STEP]
    slot = words[_SLOT]
    body = words[_BODIES] + slot * words[_BODY_BYTES]
    for b in range(start, count):
        row = words[_ROWS]
        before = words[_FRAMES]
        if row == words[_CHUNK]:
            return b
        at = (body + words[_OBS_FRAMES]) // 2 + row * stack
        next_at = (body + words[_NEXT_FRAMES]) // 2 + row * stack
        for j in range(2 * stack):
            guess = np.int64(_UNKNOWN)
            if j < stack:
                if row > 0 and j < stack - 1:
                    guess = np.int64(last[0, j + 1])
                elif row > 0 and n <= stack:
                    guess = np.int64(last[1, stack - n])
                frame = _place(guess, b, j, stack, obs, mem, zeros, words, frame_table, levels,
                               hashes, chunk_levels, factors)  # fmt: skip
            else:
                k = j - stack
                if k + n < stack:
                    guess = np.int64(mem16[at + k + n])
                elif row > 0 and k < stack - 1:
                    guess = np.int64(last[1, k + 1])
                frame = _place(guess, b, k, stack, next_obs, mem, zeros, words, frame_table,
                               levels, hashes, chunk_levels, factors)  # fmt: skip
            if frame == _FULL:
                words[_FRAMES] = before
                return b
            if j < stack:
                mem16[at + j] = frame
            else:
                mem16[next_at + j - stack] = frame
        for j in range(stack):
            last[0, j] = mem16[at + j]
            last[1, j] = mem16[next_at + j]
        for c in range(step_table.shape[0]):
            size = step_table[c, _S_BYTES]
            copy_bytes(mem, body + step_table[c, _S_SECTION] + row * size,
                       staged[b], step_table[c, _S_STAGED], size)  # fmt: skip
        mem32[(body + words[_REWARD]) // 4 + row] = numbers[b, 0]
        mem32[(body + words[_DISCOUNT]) // 4 + row] = numbers[b, 1]
        mem32[(body + words[_PRIORITY]) // 4 + row] = numbers[b, 2]
        indices[b] = slot * words[_CHUNK] + row
        words[_ROWS] = row + 1
        headers[slot * HEADER_WORDS + COUNT] = row + 1
    return count


class TransitionPacker:
    """Whole transitions into one open slot after the other, which the caller provides.

    The loop that calls it:

        done = packer.pack(0, obs, next_obs, staged, numbers, indices)
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
        self.schema = schema
        sections = layout.sections
        columns = schema.obs_columns
        self._frame_table = np.array(
            [(sections[name].offset, c.item_bytes, c.stack) for name, c in columns.items()],
            np.int64,
        )
        fields: Any = schema.step_dtype.fields
        self._step_table = np.array(
            [
                (sections[name].offset, dtype.itemsize, offset)
                for name, (dtype, offset, *_) in fields.items()
            ],
            np.int64,
        )
        depths = sorted(c.stack for c in columns.values())
        self._levels = np.array(
            [next(d for d in depths if d >= schema.stack - j) for j in range(schema.stack)],
            np.int64,
        )
        self._hashes = np.zeros(layout.frames, np.uint32)
        self._chunk_levels = np.zeros(layout.frames, np.int64)
        longest = max(c.item_bytes for c in columns.values())
        # Odd, and different for each byte; a column's start one further on than the last's.
        steps = np.arange(longest + len(columns), dtype=np.uint32)
        self._factors = (steps * np.uint32(2654435761)) | np.uint32(1)
        self._zeros = np.zeros(longest, np.uint8)
        self._last = np.zeros((2, schema.stack), np.uint16)
        self._words = np.zeros(_WORDS, np.int64)
        for word, value in {
            _CHUNK: layout.chunk,
            _MAX_FRAMES: layout.frames,
            _BODIES: store.bodies_offset,
            _BODY_BYTES: layout.body_bytes,
            _OBS_FRAMES: sections["obs_frames"].offset,
            _NEXT_FRAMES: sections["next_obs_frames"].offset,
            _REWARD: sections["reward"].offset,
            _DISCOUNT: sections["discount"].offset,
            _PRIORITY: sections["priority"].offset,
            _N_STEP: schema.n_step,
        }.items():
            self._words[word] = value
        self.close()
        self._store = store
        self._mem32 = store.mem.view(np.float32)

    @property
    def slot(self) -> int | None:
        """The open slot."""
        slot = int(self._words[_SLOT])
        return None if slot < 0 else slot

    def open(self, slot: int) -> None:
        """Go on in this slot."""
        self._words[[_SLOT, _ROWS, _FRAMES]] = slot, 0, 0

    def close(self) -> None:
        """No more rows into the open slot."""
        self._words[[_SLOT, _ROWS]] = -1, self._words[_CHUNK]  # no slot is a full slot

    def flat(self, obs: dict[str, NDArray[Any]], rows: int) -> tuple[NDArray[np.uint8], ...]:
        """Each observation column as contiguous bytes. Raises SchemaError for another shape."""
        return flat_observations(self.schema, obs, rows)

    def pack(
        self,
        start: int,
        obs: tuple[NDArray[np.uint8], ...],
        next_obs: tuple[NDArray[np.uint8], ...],
        staged: NDArray[np.uint8],
        numbers: NDArray[np.float32],
        indices: NDArray[np.int64],
    ) -> int:
        """Rows from `start` on; the row that needs another slot, or B when all are in.

        staged (B, bytes): step columns; numbers (B, 3): reward, discount, |priority| (-1: none).
        indices (B,) gets where each row is.
        """
        store = self._store
        done: int = pack_kernel(
            start, obs, next_obs, staged, numbers, self._words, store.headers, store.mem,
            store.mem16, self._mem32, self._frame_table, self._step_table, self._levels,
            self._hashes, self._chunk_levels, self._factors, self._last, self._zeros, indices,
        )  # fmt: skip
        return done
