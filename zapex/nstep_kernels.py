"""Kernels of chunk building: one step of every stream into the chunks that the streams fill.

`state` and `private` are ChunkBuilder's: state is words and parts (writer_state.py), private holds
bytes: the records of this step (S), those of pending steps (S, n), and for each stream the frames
that its next chunk needs too. Each kernel runs through the streams and stops before one that needs
a slot when there is no spare one.
"""

from typing import Any

import numpy as np

from zapex.atomics import compare_bytes, copy_bytes, store_release
from zapex.jit import kernel
from zapex.schema import (
    ACTOR,
    COUNT,
    HEADER_WORDS,
    INCARNATION,
    NO_FRAME,
    SEQUENCE,
    STATE,
    STREAM,
)
from zapex.writer_state import (
    BODIES,
    BODY_BYTES,
    CHUNK,
    DEPTH,
    DISCOUNT,
    FIRST_OWN_WORD,
    FRAME_COLUMNS,
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
)

NO_SLOT = -1
NOT_GIVEN = np.float32(-1.0)  # a chunk's priority column where the actor gave none

# The builder's own words.
_OWN = FIRST_OWN_WORD
(_SEQUENCE, SPARES, CLOSED, COMPLETED, WRITING_ACTOR, ITS_INCARNATION, CLOSED_STATE) = range(
    _OWN, _OWN + 7
)
(MAX_AGE, FIRST_STREAM, SLOTLESS, STEP_BYTES) = range(_OWN + 7, _OWN + 11)
(PENDING_STEPS_AT, OVERLAPS_AT, OVERLAP_BYTES) = range(_OWN + 11, _OWN + 14)  # in `private`
# The parts of its state.
(STREAMS, PENDING_FRAMES, NUMBERS, GAMMAS, SPARE_SLOTS) = range(_OWN + 14, _OWN + 19)
(CLOSED_SLOTS, COMPLETED_INDICES, COMPLETED_PRIORITIES) = range(_OWN + 19, _OWN + 22)
# A stream's words.
(SLOT, _ROWS, _FRAMES, _PENDING, LIMIT, _AGE, _OVERLAP, _IN_EPISODE) = range(8)
STREAM_WORDS = 8
STEP_NUMBERS = 3  # of a pending step: reward, value, |priority|

# A step's flags.
CUT = 1  # no bootstrapping past this step: terminated, or a life lost
END = 2  # the episode is over: terminated for good, or truncated


@kernel
def _close(i: int, state: Any, private: Any, mem: Any, headers: Any) -> None:
    """Keep the frames that pending steps need, then commit the stream's slot (if it has rows)."""
    stream = state[STREAMS] + i * STREAM_WORDS
    slot = state[stream + SLOT]
    body = state[BODIES] + slot * state[BODY_BYTES]
    first = state[stream + _FRAMES]
    stack = state[STACK]
    numbers = state[PENDING_FRAMES] + i * (state[N_STEP] + 1) * stack
    end = numbers
    if state[stream + _IN_EPISODE]:
        end += (state[stream + _PENDING] + 1) * stack
    for k in range(numbers, end):
        if state[k] != NO_FRAME:
            first = min(first, state[k])
    kept = state[stream + _FRAMES] - first
    place = state[OVERLAPS_AT] + i * state[OVERLAP_BYTES]
    for c in range(state[FRAME_COLUMNS]):
        table = state[FRAME_TABLE] + c * TABLE_WORDS
        size = state[table + ITEM_BYTES]
        copy_bytes(private, place, mem, body + state[table + SECTION] + first * size, kept * size)
        place += kept * size
    for k in range(numbers, end):
        if state[k] != NO_FRAME:
            state[k] -= first
    state[stream + _OVERLAP] = kept
    header = slot * HEADER_WORDS
    headers[header + COUNT] = state[stream + _ROWS]
    headers[header + ACTOR] = state[WRITING_ACTOR]
    headers[header + INCARNATION] = state[ITS_INCARNATION]
    headers[header + SEQUENCE] = state[_SEQUENCE]
    headers[header + STREAM] = state[FIRST_STREAM] + i
    state[_SEQUENCE] += 1
    # STEP chunk-stamped
    # SYNC chunk-whole: commit (release state) -> the replay's accept (acquire state)
    store_release(headers, header + STATE, state[CLOSED_STATE])
    # STEP chunk-committed
    state[state[CLOSED_SLOTS] + state[CLOSED]] = slot
    state[CLOSED] += 1
    state[stream + SLOT] = NO_SLOT
    state[stream + LIMIT] = state[CHUNK]
    state[SLOTLESS] += 1


@kernel
def _open(i: int, state: Any, private: Any, mem: Any, headers: Any) -> bool:
    """Take a spare slot for the stream, with the frames carried over; false when there is none."""
    if state[SPARES] == 0:
        return False
    state[SPARES] -= 1
    state[SLOTLESS] -= 1
    stream = state[STREAMS] + i * STREAM_WORDS
    slot = state[state[SPARE_SLOTS] + state[SPARES]]
    kept = state[stream + _OVERLAP]
    place = state[OVERLAPS_AT] + i * state[OVERLAP_BYTES]
    for c in range(state[FRAME_COLUMNS]):
        table = state[FRAME_TABLE] + c * TABLE_WORDS
        n = kept * state[table + ITEM_BYTES]
        body = state[BODIES] + slot * state[BODY_BYTES]
        copy_bytes(mem, body + state[table + SECTION], private, place, n)
        place += n
    state[stream + SLOT] = slot
    state[stream + _FRAMES] = kept
    state[stream + _ROWS] = 0
    state[stream + _AGE] = 0
    headers[slot * HEADER_WORDS + COUNT] = 0
    # STEP slot-opened
    return True


@kernel
def _room(i: int, frames: int, rows: int, state: Any, private: Any, mem: Any,
          headers: Any) -> bool:  # fmt: skip
    """Make room for so many frames and rows, in a new slot if need be; false when out of slots."""
    stream = state[STREAMS] + i * STREAM_WORDS
    if state[stream + SLOT] != NO_SLOT:
        fits = state[stream + _FRAMES] + frames <= state[MAX_FRAMES]
        if not fits and state[stream + _ROWS] == 0 and not state[stream + _IN_EPISODE]:
            state[stream + _FRAMES] = 0  # no row and no pending step refers to what is there
            fits = True
        if fits and state[stream + _ROWS] + rows <= state[CHUNK]:
            return True
        _close(i, state, private, mem, headers)
    return _open(i, state, private, mem, headers)


@kernel
def begin_kernel(start: int, mask: Any, obs: Any, state: Any, private: Any, mem: Any) -> int:
    """First observations of the episodes in `mask`; the stream that wants a slot, or S."""
    headers = mem.view(np.int64)
    stack = state[STACK]
    for i in range(start, len(mask)):
        if not mask[i]:
            continue
        stream = state[STREAMS] + i * STREAM_WORDS
        state[stream + _IN_EPISODE] = 0
        state[stream + _PENDING] = 0
        if state[stream + SLOT] == NO_SLOT:
            state[stream + _OVERLAP] = 0
        if not _room(i, stack, 0, state, private, mem, headers):
            return i
        body = state[BODIES] + state[stream + SLOT] * state[BODY_BYTES]
        numbers = state[PENDING_FRAMES] + i * (state[N_STEP] + 1) * stack
        previous = np.int64(NO_FRAME)
        for j in range(stack):
            # A frame of padding is zero, or a repetition of the one before it: kept as that.
            zero = True
            same = j > 0 and previous != NO_FRAME
            for c in range(len(obs)):
                table = state[FRAME_TABLE] + c * TABLE_WORDS
                size, depth = state[table + ITEM_BYTES], state[table + DEPTH]
                k = j - (stack - depth)
                if k < 0:
                    continue
                at = (i * depth + k) * size
                zero = zero and is_zero(obs[c], at, size)
                same = same and k > 0 and compare_bytes(obs[c], at, obs[c], at - size, size) == 0
            if zero and j < stack - 1:
                previous = np.int64(NO_FRAME)
            elif not same:
                previous = state[stream + _FRAMES]
                state[stream + _FRAMES] += 1
                for c in range(len(obs)):
                    table = state[FRAME_TABLE] + c * TABLE_WORDS
                    size, depth = state[table + ITEM_BYTES], state[table + DEPTH]
                    k = j - (stack - depth)
                    if k >= 0:
                        target = body + state[table + SECTION] + previous * size
                        copy_bytes(mem, target, obs[c], (i * depth + k) * size, size)
            state[numbers + j] = previous
        state[stream + _IN_EPISODE] = 1
    return len(mask)


@kernel
def is_zero(data: Any, at: int, size: int) -> bool:
    """Whether these bytes (at least one) are all 0."""
    return data[at] == 0 and compare_bytes(data, at, data, at + 1, size - 1) == 0


@kernel
def add_kernel(start: int, mask: Any, flags: Any, obs: Any, reward: Any, value: Any,
               next_value: Any, priority: Any, state: Any, private: Any,
               mem: Any) -> int:  # fmt: skip
    """One step of the streams in `mask`; the stream that wants a slot, or S when all are done.

    value, next_value, priority may be empty: not given.
    """
    if start == 0:
        state[COMPLETED] = 0
    headers, mem16, mem32 = mem.view(np.int64), mem.view(np.uint16), mem.view(np.float32)
    reals = state.view(np.float64)
    stack, n, step_bytes = state[STACK], state[N_STEP], state[STEP_BYTES]
    gammas = state[GAMMAS]
    for i in range(start, len(mask)):
        stream = state[STREAMS] + i * STREAM_WORDS
        if not mask[i] or not state[stream + _IN_EPISODE]:
            continue
        p = state[stream + _PENDING]
        cut = flags[i] & CUT
        done = p + 1 if flags[i] else (1 if p + 1 == n else 0)
        if not _room(i, 1, done, state, private, mem, headers):
            return i
        slot = state[stream + SLOT]
        body = state[BODIES] + slot * state[BODY_BYTES]
        # The step itself, and the frame it led to.
        frames = state[PENDING_FRAMES] + i * (n + 1) * stack
        numbers = state[NUMBERS] + i * n * STEP_NUMBERS
        steps = state[PENDING_STEPS_AT] + i * n * step_bytes
        at = numbers + p * STEP_NUMBERS
        reals[at] = reward[i]
        reals[at + 1] = value[i] if len(value) else np.nan
        reals[at + 2] = priority[i] if len(priority) else np.nan
        copy_bytes(private, steps + p * step_bytes,
                   private, i * step_bytes, step_bytes)  # fmt: skip
        frame = state[stream + _FRAMES]
        state[stream + _FRAMES] = frame + 1
        for c in range(len(obs)):
            table = state[FRAME_TABLE] + c * TABLE_WORDS
            size, depth = state[table + ITEM_BYTES], state[table + DEPTH]
            copy_bytes(mem, body + state[table + SECTION] + frame * size,
                       obs[c], ((i + 1) * depth - 1) * size, size)  # fmt: skip
        # STEP frame-written
        now = frames + (p + 1) * stack
        for j in range(stack - 1):
            state[now + j] = state[now - stack + j + 1]
        state[now + stack - 1] = frame
        # Transitions whose n-step return is now known.
        row = state[stream + _ROWS]
        for q in range(done):
            m = p + 1 - q
            total = 0.0
            for k in range(m):
                total += reals[gammas + k] * reals[numbers + (q + k) * STEP_NUMBERS]
            discount = 0.0 if cut else reals[gammas + m]
            obs_at = (body + state[OBS_FRAMES]) // 2 + row * stack
            next_at = (body + state[NEXT_FRAMES]) // 2 + row * stack
            for j in range(stack):
                mem16[obs_at + j] = state[frames + q * stack + j]
                mem16[next_at + j] = state[now + j]
            for c in range(state[STEP_COLUMNS]):
                table = state[STEP_TABLE] + c * TABLE_WORDS
                size = state[table + ITEM_BYTES]
                copy_bytes(mem, body + state[table + SECTION] + row * size, private,
                           steps + q * step_bytes + state[table + STAGED], size)  # fmt: skip
            mem32[(body + state[REWARD]) // 4 + row] = total
            mem32[(body + state[DISCOUNT]) // 4 + row] = discount
            given = reals[numbers + q * STEP_NUMBERS + 2]
            if np.isnan(given) and len(next_value):
                bootstrap = discount * next_value[i] if discount != 0.0 else 0.0
                given = abs(total + bootstrap - reals[numbers + q * STEP_NUMBERS + 1])
            given = np.float64(NOT_GIVEN) if np.isnan(given) else abs(given)
            mem32[(body + state[PRIORITY]) // 4 + row] = given
            count = state[COMPLETED]
            state[state[COMPLETED_INDICES] + count] = slot * state[CHUNK] + row
            reals[state[COMPLETED_PRIORITIES] + count] = given
            state[COMPLETED] = count + 1
            # STEP row-written
            row += 1
        state[stream + _ROWS] = row
        headers[slot * HEADER_WORDS + COUNT] = row
        state[stream + _PENDING] = p + 1 - done
        if done:
            for k in range((p + 2 - done) * stack):
                state[frames + k] = state[frames + done * stack + k]
            for k in range((p + 1 - done) * STEP_NUMBERS):
                reals[numbers + k] = reals[numbers + done * STEP_NUMBERS + k]
            for k in range((p + 1 - done) * step_bytes):
                private[steps + k] = private[steps + done * step_bytes + k]
        if flags[i] & END:
            state[stream + _IN_EPISODE] = 0
        state[stream + _AGE] += 1
        aged = state[MAX_AGE] > 0 and state[stream + _AGE] >= state[MAX_AGE]
        if row >= state[stream + LIMIT] or (aged and row > 0):
            _close(i, state, private, mem, headers)
    return len(mask)


@kernel
def step_kernel(start: int, terminated: Any, truncated: Any, over: Any, ends: Any, obs: Any,
                reward: Any, priority: Any, state: Any, private: Any,
                mem: Any) -> tuple[int, bool]:  # fmt: skip
    """`add_kernel` of a step as vector environments return it, for the streams that are not over.

    ends (S,): whose episode is over after it. Returns also whether there is one.
    """
    streams = len(over)
    mask, flags = np.empty(streams, np.bool_), np.empty(streams, np.int64)
    some = False
    for i in range(streams):
        end = terminated[i] | truncated[i]
        flags[i] = terminated[i] * CUT + end * END
        mask[i] = not over[i]
        ends[i] = end and mask[i]
        some |= ends[i]
    none = priority[:0]
    done = add_kernel(start, mask, flags, obs, reward, none, none, priority, state, private, mem)
    return done, some


@kernel
def flush_kernel(streams: int, state: Any, private: Any, mem: Any) -> None:
    """Close every chunk that has a row."""
    headers = mem.view(np.int64)
    for i in range(streams):
        stream = state[STREAMS] + i * STREAM_WORDS
        if state[stream + SLOT] != NO_SLOT and state[stream + _ROWS] > 0:
            _close(i, state, private, mem, headers)
