"""The kernels that build chunks: they write one step of each stream into the stream's chunk.

Each stream has up to n pending steps: their n-step returns are not known yet. A step goes from
s_tm1 to s_t, with a_tm1 and r_t. A kernel takes the step, emits each transition that the step
completes, and shifts the other pending steps down.

`state` is the one array of ChunkBuilder's state (`pack` in machine/memory.py). Each kernel loops
over the streams. It stops before a stream that needs a slot if there is no spare slot.
"""

from typing import Any

import numpy as np

from zapex.chunks.layout import (
    ACTOR,
    COUNT,
    HEADER_WORDS,
    INCARNATION,
    NO_FRAME,
    SEQUENCE,
    STATE,
    STREAM,
)
from zapex.chunks.rows import (
    frame_column,
    is_blank,
    put_frame,
    put_numbers,
    put_step,
    writer_words,
)
from zapex.machine.atomics import compare_bytes, copy_bytes, prefetch, record_at, store_release
from zapex.machine.jit import kernel
from zapex.machine.memory import count, words

NO_SLOT = -1
NOT_GIVEN = np.float32(-1.0)  # in the priority column: the actor gave no priority

BUILDER = writer_words(
    "actor incarnation first_stream closed_state max_age step_bytes num_streams "
    "sequence spares slotless closed completed "
    # The starts of the parts: arrays of words, then of bytes.
    "streams pending_frames pending_numbers gammas spare_slots closed_slots "
    "completed_indices completed_magnitudes "
    "staged pending_records overlaps"
)
STREAM_STATE = words(
    "slot rows frames pending limit age overlap in_episode "
    # The starts of the stream's own parts: frame numbers of s_tm1 of each pending step and of s_t,
    # (n + 1, stack); the numbers of the steps, (n, 3); their staged records; kept frames (bytes).
    "pending_frames pending_numbers pending_records kept_frames"
)
REWARD, VALUE, PRIORITY = range(3)  # of a pending step: r_t, Q(s_tm1, a_tm1), |priority|
STEP_NUMBERS = 3
MOST_REWARD = float(np.finfo(np.float32).max) / 64  # 64: the largest n_step
_STREAM_WORDS = count(STREAM_STATE)
_BYTES_AHEAD = 1024  # prefetched of the next stream's frame; the processor then sees the order

# A step's flags.
CUT = 1  # no bootstrap after this step: terminated, or a life lost
END = 2  # the episode is over: terminated or truncated


@kernel
def _stream(w: Any, state: Any, i: int) -> Any:
    return record_at(state, w.streams + i * _STREAM_WORDS, STREAM_STATE)


@kernel
def _keep_frames(w: Any, stream: Any, state: Any, mem: Any) -> None:
    """Keep the frames that the next chunk needs for pending steps, and renumber them."""
    numbers = end = stream.pending_frames
    if stream.in_episode:
        end += (stream.pending + 1) * w.stack
    first = stream.frames
    for k in range(numbers, end):
        if state[k] != NO_FRAME:
            first = min(first, state[k])
    stream.overlap = stream.frames - first
    body, place = w.bodies + stream.slot * w.body_bytes, stream.kept_frames
    for c in range(w.num_frame_columns):
        column = frame_column(w, state, c)
        nbytes = stream.overlap * column.nbytes
        source = body + column.section + first * column.nbytes
        copy_bytes(state.view(np.uint8), place, mem, source, nbytes)
        place += nbytes
    for k in range(numbers, end):
        if state[k] != NO_FRAME:
            state[k] -= first


@kernel
def _put_back_frames(w: Any, stream: Any, state: Any, mem: Any) -> None:
    """Copy the kept frames to the start of the stream's slot."""
    body, place = w.bodies + stream.slot * w.body_bytes, stream.kept_frames
    for c in range(w.num_frame_columns):
        column = frame_column(w, state, c)
        nbytes = stream.overlap * column.nbytes
        copy_bytes(mem, body + column.section, state.view(np.uint8), place, nbytes)
        place += nbytes
    stream.frames = stream.overlap


@kernel
def _close(i: int, w: Any, stream: Any, state: Any, mem: Any) -> None:
    """Commit the stream's slot."""
    _keep_frames(w, stream, state, mem)
    headers, header = mem.view(np.int64), stream.slot * HEADER_WORDS
    headers[header + ACTOR] = w.actor
    headers[header + INCARNATION] = w.incarnation
    headers[header + SEQUENCE] = w.sequence
    headers[header + STREAM] = w.first_stream + i
    w.sequence += 1
    # STEP chunk-stamped
    # SYNC chunk-whole: commit (release state) -> the replay's accept (acquire state)
    store_release(headers, header + STATE, w.closed_state)
    # STEP chunk-committed
    state[w.closed_slots + w.closed] = stream.slot
    w.closed += 1
    stream.slot = NO_SLOT
    stream.limit = w.chunk
    w.slotless += 1


@kernel
def _open(w: Any, stream: Any, state: Any, mem: Any) -> bool:
    """Open a spare slot for the stream and copy the kept frames; false if there is none."""
    if w.spares == 0:
        return False
    w.spares -= 1
    w.slotless -= 1
    slot = state[w.spare_slots + w.spares]
    stream.slot = slot
    _put_back_frames(w, stream, state, mem)
    stream.rows = stream.age = 0
    mem.view(np.int64)[slot * HEADER_WORDS + COUNT] = 0
    # STEP slot-opened
    return True


@kernel
def _room(i: int, frames: int, rows: int, w: Any, stream: Any, state: Any,
          mem: Any) -> bool:  # fmt: skip
    """Make room for `frames` and `rows`, if needed in a new slot; false if there is none."""
    if stream.slot != NO_SLOT:
        if stream.frames + frames > w.max_frames and stream.rows == 0:
            # A chunk without a row is never closed: frames of episodes that were reset go.
            _keep_frames(w, stream, state, mem)
            _put_back_frames(w, stream, state, mem)
        if stream.frames + frames <= w.max_frames and stream.rows + rows <= w.chunk:
            return True
        _close(i, w, stream, state, mem)
    return _open(w, stream, state, mem)


@kernel
def _repeats(w: Any, state: Any, obs: Any, i: int, j: int) -> bool:
    """Whether places j and j - 1 of observation i have equal frames, in all columns; j > 0."""
    for c in range(w.num_frame_columns):
        column = frame_column(w, state, c)
        k = j - (w.stack - column.depth)
        at, nbytes = (i * column.depth + k) * column.nbytes, column.nbytes
        if k == 0 or (k > 0 and compare_bytes(obs[c], at, obs[c], at - nbytes, nbytes) != 0):
            return False
    return True


@kernel
def begin_kernel(start: int, mask: Any, obs: Any, state: Any, mem: Any) -> int:
    """Take the first observations. Returns the stream that needs a slot, or S when done."""
    w = record_at(state, 0, BUILDER)
    for i in range(start, len(mask)):
        if not mask[i]:
            continue
        stream = _stream(w, state, i)
        stream.in_episode = stream.pending = 0
        if stream.slot == NO_SLOT:
            stream.overlap = 0
        if not _room(i, w.stack, 0, w, stream, state, mem):
            return i
        body = w.bodies + stream.slot * w.body_bytes
        frame = np.int64(NO_FRAME)
        for j in range(w.stack):
            # Padding is a zero frame or a repeated frame: no new frame is stored.
            if j < w.stack - 1 and is_blank(w, state, obs, i, j):
                frame = np.int64(NO_FRAME)
            elif frame == NO_FRAME or not _repeats(w, state, obs, i, j):
                frame = stream.frames
                stream.frames = frame + 1
                put_frame(w, state, mem, body, frame, obs, i, j)
            state[stream.pending_frames + j] = frame
        stream.in_episode = 1
    return len(mask)


@kernel
def _take(i: int, s_t: Any, w: Any, stream: Any, state: Any, private: Any,
          mem: Any) -> None:  # fmt: skip
    """Make the step the last pending one: its staged record and the new frame of s_t."""
    staged = w.staged + i * w.step_bytes
    record = stream.pending_records + stream.pending * w.step_bytes
    copy_bytes(private, record, private, staged, w.step_bytes)
    frame, body = stream.frames, w.bodies + stream.slot * w.body_bytes
    put_frame(w, state, mem, body, frame, s_t, i, w.stack - 1)
    stream.frames = frame + 1
    # STEP frame-written
    s_tm1 = stream.pending_frames + stream.pending * w.stack
    for k in range(s_tm1, s_tm1 + w.stack - 1):
        state[k + w.stack] = state[k + 1]
    state[s_tm1 + 2 * w.stack - 1] = frame
    stream.pending += 1


@kernel
def _prefetch(i: int, s_t: Any, w: Any, state: Any, mem: Any) -> None:
    """Load the first lines of stream i's new frame, and of its place, before they are needed."""
    stream = _stream(w, state, i)
    body = w.bodies + max(stream.slot, 0) * w.body_bytes
    for c in range(w.num_frame_columns):
        column = frame_column(w, state, c)
        source = (i * column.depth + column.depth - 1) * column.nbytes
        target = body + column.section + stream.frames * column.nbytes
        for at in range(0, min(column.nbytes, _BYTES_AHEAD), 64):
            prefetch(s_t[c], source + at)
            prefetch(mem, target + at)


@kernel
def _n_step_return(first: int, m: int, gammas: int, reals: Any) -> float:
    """G = R_{t+1} + gamma R_{t+2} + ... + gamma^(m-1) R_{t+m} (Sutton and Barto 2018, eq. 7.1).

    first: the place of the numbers of the step with R_{t+1}.
    """
    g = 0.0
    for k in range(m):
        g += reals[gammas + k] * reals[first + k * STEP_NUMBERS + REWARD]
    return g


@kernel
def _emit(q: int, m: int, w: Any, stream: Any, state: Any, private: Any, mem: Any,
          mem16: Any) -> None:  # fmt: skip
    """Write the next row: s_tm1 and a_tm1 of pending step q, and s_t, m steps later."""
    row, body = stream.rows, w.bodies + stream.slot * w.body_bytes
    s_tm1 = stream.pending_frames + q * w.stack
    s_t = s_tm1 + m * w.stack
    obs, next_obs = (body + w.obs_frames) // 2, (body + w.next_obs_frames) // 2
    for j in range(w.stack):
        mem16[obs + row * w.stack + j] = state[s_tm1 + j]
        mem16[next_obs + row * w.stack + j] = state[s_t + j]
    record = stream.pending_records + q * w.step_bytes
    put_step(w, state, mem, body, row, private, record)
    state[w.completed_indices + w.completed] = stream.slot * w.chunk + row


@kernel
def _shift(done: int, w: Any, stream: Any, state: Any, reals: Any, private: Any) -> None:
    """Remove the first `done` pending steps, which were emitted, and move the others down."""
    stream.pending -= done
    frames, numbers, records = (
        stream.pending_frames, stream.pending_numbers, stream.pending_records
    )  # fmt: skip
    for k in range(frames, frames + (stream.pending + 1) * w.stack):
        state[k] = state[k + done * w.stack]
    for k in range(numbers, numbers + stream.pending * STEP_NUMBERS):
        reals[k] = reals[k + done * STEP_NUMBERS]
    for k in range(records, records + stream.pending * w.step_bytes):
        private[k] = private[k + done * w.step_bytes]


@kernel
def add_kernel(start: int, mask: Any, flags: Any, s_t: Any, r_t: Any, value: Any,
               next_value: Any, priority: Any, state: Any, mem: Any) -> int:  # fmt: skip
    """Take one step of the streams in `mask`. Returns the stream that needs a slot, or S.

    value: Q(s_tm1, a_tm1); next_value: max Q(s_t). An empty array means: not given. Without a given
    `priority`, a transition's priority is |G + discount max Q(s_t) - Q(s_tm1, a_tm1)| (Horgan et
    al. 2018).
    """
    w = record_at(state, 0, BUILDER)
    headers, mem16, mem32 = mem.view(np.int64), mem.view(np.uint16), mem.view(np.float32)
    reals, private = state.view(np.float64), state.view(np.uint8)
    if start == 0:
        w.completed = 0
    for i in range(start, len(mask)):
        stream = _stream(w, state, i)
        if not mask[i] or not stream.in_episode:
            continue
        if i + 1 < len(mask):
            _prefetch(i + 1, s_t, w, state, mem)
        steps = stream.pending + 1
        done: Any = steps if flags[i] else np.int64(steps == w.n_step)
        if not _room(i, 1, done, w, stream, state, mem):
            return i
        step = stream.pending_numbers + stream.pending * STEP_NUMBERS
        reals[step + REWARD] = r_t[i]
        reals[step + VALUE] = value[i] if len(value) else np.nan
        reals[step + PRIORITY] = priority[i] if len(priority) else np.nan
        _take(i, s_t, w, stream, state, private, mem)
        body = w.bodies + stream.slot * w.body_bytes
        for q in range(done):
            m, step = steps - q, stream.pending_numbers + q * STEP_NUMBERS
            g = _n_step_return(step, m, w.gammas, reals)
            discount = 0.0 if flags[i] & CUT else reals[w.gammas + m]
            magnitude = reals[step + PRIORITY]
            if np.isnan(magnitude) and len(next_value):
                bootstrap = discount * next_value[i] if discount != 0.0 else 0.0
                magnitude = g + bootstrap - reals[step + VALUE]
            magnitude = np.float64(NOT_GIVEN) if np.isnan(magnitude) else abs(magnitude)
            _emit(q, m, w, stream, state, private, mem, mem16)
            put_numbers(w, mem32, body, stream.rows, g, discount, magnitude)
            reals[w.completed_magnitudes + w.completed] = magnitude
            w.completed += 1
            # STEP row-written
            stream.rows += 1
        headers[stream.slot * HEADER_WORDS + COUNT] = stream.rows
        if done:
            _shift(done, w, stream, state, reals, private)
        if flags[i] & END:
            stream.in_episode = 0
        stream.age += 1
        aged = 0 < w.max_age <= stream.age
        if stream.rows >= stream.limit or (aged and stream.rows > 0):
            _close(i, w, stream, state, mem)
    return len(mask)


@kernel
def step_kernel(start: int, terminated: Any, truncated: Any, over: Any, ends: Any, s_t: Any,
                r_t: Any, priority: Any, state: Any, mem: Any) -> tuple[int, bool]:  # fmt: skip
    """`add_kernel` for a step of a vector environment, for the streams that are not `over`.

    ends (S,) is written: which episodes are over after the step. Also returns whether any is. If
    the reward of stream i is no number, or its return could be none: -1 - i, and no change.
    """
    streams = len(over)
    for i in range(streams):
        if not over[i] and not abs(r_t[i]) <= MOST_REWARD:
            return -1 - i, False
    mask, flags = np.empty(streams, np.bool_), np.empty(streams, np.int64)
    some = False
    for i in range(streams):
        end = terminated[i] | truncated[i]
        flags[i] = terminated[i] * CUT + end * END
        mask[i] = not over[i]
        ends[i] = end and mask[i]
        some |= ends[i]
    none = priority[:0]
    done = add_kernel(start, mask, flags, s_t, r_t, none, none, priority, state, mem)
    return done, some


@kernel
def flush_kernel(state: Any, mem: Any) -> None:
    """Close each chunk that has a row."""
    w = record_at(state, 0, BUILDER)
    for i in range(w.num_streams):
        stream = _stream(w, state, i)
        if stream.slot != NO_SLOT and stream.rows > 0:
            _close(i, w, stream, state, mem)
