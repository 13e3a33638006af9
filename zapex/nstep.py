"""n-step returns and chunk building: steps of S streams become chunks in claimed slots.

Pure: it knows memory and numbers, no process and no clock. For stream i and step t

    R = r_t + gamma r_{t+1} + ... + gamma^{m-1} r_{t+m-1},   discount = gamma^m, or 0 when cut

where m = n_step, less at the end of an episode (Sutton & Barto, eq. 7.1; Ape-X, eq. 2). An episode
that was truncated bootstraps from its last observation; a lost life is a cut, and the stream goes
on.

The builder commits one slot before it claims the next: the frames that both chunks need wait in
private memory. Out of slots, it stops before the stream that needs one and goes on from there.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import copy_bytes, store_release
from zapex.chunk_store import ChunkStore
from zapex.errors import SchemaError
from zapex.jit import kernel
from zapex.schema import (
    ACTOR,
    COMMITTED,
    COUNT,
    HEADER_WORDS,
    INCARNATION,
    NO_FRAME,
    SEQUENCE,
    STATE,
    STREAM,
    Schema,
)

_NO_SLOT = -1
NOT_GIVEN = np.float32(-1.0)  # a chunk's priority column where the actor gave none

# A stream's words.
(_SLOT, _ROWS, _FRAMES, _PENDING, _LIMIT, _AGE, _OVERLAP, _IN_EPISODE) = range(8)
# The builder's words.
(_SEQUENCE, _SPARES, _CLOSED, _COMPLETED, _ACTOR, _INCARNATION, _CLOSED_STATE, _MAX_AGE) = range(8)
(_CHUNK, _MAX_FRAMES, _BODIES, _BODY_BYTES, _OBS_FRAMES, _NEXT_FRAMES) = range(8, 14)
(_REWARD, _DISCOUNT, _PRIORITY, _FIRST_STREAM) = range(14, 18)
_WORDS = 18
# The tables of columns.
(_F_SECTION, _F_BYTES, _F_STACK, _F_OVERLAP) = range(4)
(_S_SECTION, _S_BYTES, _S_STAGED) = range(3)

# A step's flags.
CUT = 1  # no bootstrapping past this step: terminated, or a life lost
END = 2  # the episode is over: terminated for good, or truncated


@kernel
def _close(i: int, words: Any, streams: Any, headers: Any, mem: Any, frame_table: Any,
           overlap: Any, pending_frames: Any, closed: Any) -> None:  # fmt: skip
    """Keep the frames that pending steps need, then commit the stream's slot (if it has rows)."""
    stream = streams[i]
    body = words[_BODIES] + stream[_SLOT] * words[_BODY_BYTES]
    first = stream[_FRAMES]
    if stream[_IN_EPISODE]:
        for p in range(stream[_PENDING] + 1):
            for frame in pending_frames[i, p]:
                if frame != NO_FRAME:
                    first = min(first, np.int64(frame))
    kept = stream[_FRAMES] - first
    for c in range(frame_table.shape[0]):
        size = frame_table[c, _F_BYTES]
        copy_bytes(overlap[i], frame_table[c, _F_OVERLAP],
                   mem, body + frame_table[c, _F_SECTION] + first * size, kept * size)  # fmt: skip
    if stream[_IN_EPISODE]:
        for p in range(stream[_PENDING] + 1):
            for j in range(pending_frames.shape[2]):
                if pending_frames[i, p, j] != NO_FRAME:
                    pending_frames[i, p, j] -= np.uint16(first)
    stream[_OVERLAP] = kept
    slot = stream[_SLOT]
    header = slot * HEADER_WORDS
    headers[header + COUNT] = stream[_ROWS]
    headers[header + ACTOR] = words[_ACTOR]
    headers[header + INCARNATION] = words[_INCARNATION]
    headers[header + SEQUENCE] = words[_SEQUENCE]
    headers[header + STREAM] = words[_FIRST_STREAM] + i
    words[_SEQUENCE] += 1
    # SYNC chunk-whole: commit (release state) -> the replay's accept (acquire state)
    store_release(headers, header + STATE, words[_CLOSED_STATE])
    closed[words[_CLOSED]] = slot
    words[_CLOSED] += 1
    stream[_SLOT] = _NO_SLOT
    stream[_LIMIT] = words[_CHUNK]


@kernel
def _open(i: int, words: Any, streams: Any, headers: Any, mem: Any, frame_table: Any, overlap: Any,
          spares: Any) -> bool:  # fmt: skip
    """Take a spare slot for the stream, with the frames carried over; false when there is none."""
    if words[_SPARES] == 0:
        return False
    words[_SPARES] -= 1
    stream = streams[i]
    stream[_SLOT] = spares[words[_SPARES]]
    body = words[_BODIES] + stream[_SLOT] * words[_BODY_BYTES]
    for c in range(frame_table.shape[0]):
        copy_bytes(mem, body + frame_table[c, _F_SECTION], overlap[i], frame_table[c, _F_OVERLAP],
                   stream[_OVERLAP] * frame_table[c, _F_BYTES])  # fmt: skip
    stream[_FRAMES] = stream[_OVERLAP]
    stream[_ROWS] = 0
    stream[_AGE] = 0
    headers[stream[_SLOT] * HEADER_WORDS + COUNT] = 0
    return True


@kernel
def _room(i: int, frames: int, rows: int, words: Any, streams: Any, headers: Any, mem: Any,
          frame_table: Any, overlap: Any, pending_frames: Any, spares: Any,
          closed: Any) -> bool:  # fmt: skip
    """Make room for so many frames and rows, in a new slot if need be; false when out of slots."""
    stream = streams[i]
    if stream[_SLOT] != _NO_SLOT:
        fits = stream[_FRAMES] + frames <= words[_MAX_FRAMES]
        if not fits and stream[_ROWS] == 0 and not stream[_IN_EPISODE]:
            stream[_FRAMES] = 0  # no row and no pending step refers to what is there
            fits = True
        if fits and stream[_ROWS] + rows <= words[_CHUNK]:
            return True
        _close(i, words, streams, headers, mem, frame_table, overlap, pending_frames, closed)
    return _open(i, words, streams, headers, mem, frame_table, overlap, spares)


@kernel
def begin_kernel(start: int, mask: Any, obs: Any, words: Any, streams: Any, headers: Any, mem: Any,
                 frame_table: Any, overlap: Any, pending_frames: Any, spares: Any,
                 closed: Any) -> int:  # fmt: skip
    """First observations of the episodes in `mask`; the stream that wants a slot, or S."""
    stack = pending_frames.shape[2]
    for i in range(start, streams.shape[0]):
        if not mask[i]:
            continue
        stream = streams[i]
        stream[_IN_EPISODE] = 0
        stream[_PENDING] = 0
        if stream[_SLOT] == _NO_SLOT:
            stream[_OVERLAP] = 0
        if not _room(i, stack, 0, words, streams, headers, mem, frame_table, overlap,
                     pending_frames, spares, closed):  # fmt: skip
            return i
        body = words[_BODIES] + stream[_SLOT] * words[_BODY_BYTES]
        previous = np.int64(NO_FRAME)
        for j in range(stack):
            # A frame of padding is zero, or a repetition of the one before it: kept as that.
            zero = True
            same = j > 0 and previous != NO_FRAME
            for c in range(frame_table.shape[0]):
                size, depth = frame_table[c, _F_BYTES], frame_table[c, _F_STACK]
                k = j - (stack - depth)
                if k < 0:
                    continue
                at = (i * depth + k) * size
                for b in range(at, at + size):
                    if obs[c][b] != 0:
                        zero = False
                        break
                if k > 0 and same:
                    for b in range(at, at + size):
                        if obs[c][b] != obs[c][b - size]:
                            same = False
                            break
                elif k == 0:
                    same = False
            if zero and j < stack - 1:
                previous = np.int64(NO_FRAME)
            elif not same:
                previous = stream[_FRAMES]
                stream[_FRAMES] += 1
                for c in range(frame_table.shape[0]):
                    size, depth = frame_table[c, _F_BYTES], frame_table[c, _F_STACK]
                    k = j - (stack - depth)
                    if k >= 0:
                        target = body + frame_table[c, _F_SECTION] + previous * size
                        copy_bytes(mem, target, obs[c], (i * depth + k) * size, size)
            pending_frames[i, 0, j] = previous
        stream[_IN_EPISODE] = 1
    return len(streams)


@kernel
def add_kernel(start: int, mask: Any, flags: Any, obs: Any, staged: Any, reward: Any, value: Any,
               next_value: Any, priority: Any, gammas: Any, words: Any, streams: Any, headers: Any,
               mem: Any, mem16: Any, mem32: Any, frame_table: Any, step_table: Any, overlap: Any,
               pending_frames: Any, pending_step: Any, pending_number: Any, spares: Any,
               closed: Any, completed: Any, completed_priority: Any) -> int:  # fmt: skip
    """One step of the streams in `mask`; the stream that wants a slot, or S when all are done."""
    stack = pending_frames.shape[2]
    n = pending_step.shape[1]
    for i in range(start, streams.shape[0]):
        stream = streams[i]
        if not mask[i] or not stream[_IN_EPISODE]:
            continue
        p = stream[_PENDING]
        cut = flags[i] & CUT
        done = p + 1 if flags[i] else (1 if p + 1 == n else 0)
        if not _room(i, 1, done, words, streams, headers, mem, frame_table, overlap,
                     pending_frames, spares, closed):  # fmt: skip
            return i
        body = words[_BODIES] + stream[_SLOT] * words[_BODY_BYTES]
        # The step itself, and the frame it led to.
        pending_number[i, p, 0] = reward[i]
        pending_number[i, p, 1] = value[i]
        pending_number[i, p, 2] = priority[i]
        copy_bytes(pending_step[i, p], 0, staged, i * pending_step.shape[2], pending_step.shape[2])
        frame = stream[_FRAMES]
        stream[_FRAMES] += 1
        for c in range(frame_table.shape[0]):
            size, depth = frame_table[c, _F_BYTES], frame_table[c, _F_STACK]
            copy_bytes(mem, body + frame_table[c, _F_SECTION] + frame * size,
                       obs[c], ((i + 1) * depth - 1) * size, size)  # fmt: skip
        for j in range(stack - 1):
            pending_frames[i, p + 1, j] = pending_frames[i, p, j + 1]
        pending_frames[i, p + 1, stack - 1] = frame
        # Transitions whose n-step return is now known.
        for q in range(done):
            m = p + 1 - q
            total = 0.0
            for k in range(m):
                total += gammas[k] * pending_number[i, q + k, 0]
            discount = 0.0 if cut else gammas[m]
            row = stream[_ROWS]
            at = (body + words[_OBS_FRAMES]) // 2 + row * stack
            next_at = (body + words[_NEXT_FRAMES]) // 2 + row * stack
            for j in range(stack):
                mem16[at + j] = pending_frames[i, q, j]
                mem16[next_at + j] = pending_frames[i, p + 1, j]
            for c in range(step_table.shape[0]):
                size = step_table[c, _S_BYTES]
                copy_bytes(mem, body + step_table[c, _S_SECTION] + row * size,
                           pending_step[i, q], step_table[c, _S_STAGED], size)  # fmt: skip
            mem32[(body + words[_REWARD]) // 4 + row] = total
            mem32[(body + words[_DISCOUNT]) // 4 + row] = discount
            given = pending_number[i, q, 2]
            if np.isnan(given):
                bootstrap = discount * next_value[i] if discount != 0.0 else 0.0
                given = abs(total + bootstrap - pending_number[i, q, 1])
            given = np.float64(NOT_GIVEN) if np.isnan(given) else abs(given)
            mem32[(body + words[_PRIORITY]) // 4 + row] = given
            completed[words[_COMPLETED]] = stream[_SLOT] * words[_CHUNK] + row
            completed_priority[words[_COMPLETED]] = given
            words[_COMPLETED] += 1
            stream[_ROWS] = row + 1
        headers[stream[_SLOT] * HEADER_WORDS + COUNT] = stream[_ROWS]
        stream[_PENDING] = p + 1 - done
        for q in range(done, p + 2):
            for j in range(stack):
                pending_frames[i, q - done, j] = pending_frames[i, q, j]
        for q in range(done, p + 1):
            for k in range(3):
                pending_number[i, q - done, k] = pending_number[i, q, k]
            for k in range(pending_step.shape[2]):
                pending_step[i, q - done, k] = pending_step[i, q, k]
        if flags[i] & END:
            stream[_IN_EPISODE] = 0
        stream[_AGE] += 1
        aged = words[_MAX_AGE] > 0 and stream[_AGE] >= words[_MAX_AGE]
        if stream[_ROWS] >= stream[_LIMIT] or (aged and stream[_ROWS] > 0):
            _close(i, words, streams, headers, mem, frame_table, overlap, pending_frames, closed)
    return len(streams)


@kernel
def flush_kernel(words: Any, streams: Any, headers: Any, mem: Any, frame_table: Any, overlap: Any,
                 pending_frames: Any, closed: Any) -> None:  # fmt: skip
    """Close every chunk that has a row."""
    for i in range(streams.shape[0]):
        if streams[i, _SLOT] != _NO_SLOT and streams[i, _ROWS] > 0:
            _close(i, words, streams, headers, mem, frame_table, overlap, pending_frames, closed)


def flat_observations(
    schema: Schema, obs: dict[str, NDArray[Any]], rows: int
) -> tuple[NDArray[np.uint8], ...]:
    """Each observation column as contiguous bytes, the stack axis first.

    Raises SchemaError for another shape than (rows, *space shape) or another dtype.
    """
    flat = []
    for name, column in schema.obs_columns.items():
        array = obs[name]
        wanted = (rows, *column.value_shape)
        if array.shape != wanted or array.dtype != column.dtype:
            raise SchemaError(
                f"{name} must be {np.dtype(column.dtype)} of shape {wanted}, "
                f"got {array.dtype} of shape {array.shape}"
            )
        if column.stack > 1 and column.stack_axis == -1:
            array = np.moveaxis(array, -1, 1)
        flat.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return tuple(flat)


class ChunkBuilder:
    """Steps of `num_streams` streams into chunks, in slots that the caller provides.

    The loop that calls it:

        builder.begin(mask, obs)                       # first observations
        while builder.add(mask, flags, ...) < S:       # out of slots in the middle of a step
            builder.provide(slots)                     # more slots, then add() again: it goes on
        for slot in builder.take_closed(): ...         # committed; hand them over

    closed_state: the state that a closed slot gets (COMMITTED across processes, LIVE within one).
    """

    def __init__(
        self,
        store: ChunkStore,
        num_streams: int,
        *,
        actor: int = 0,
        incarnation: int = 0,
        first_stream: int = 0,
        max_chunk_age_steps: int = 0,
        closed_state: int = COMMITTED,
        stagger: bool = True,
    ) -> None:
        layout = store.layout
        schema = layout.schema
        self.schema: Schema = schema
        self.num_streams = num_streams
        s, n, stack = num_streams, schema.n_step, schema.stack
        columns = schema.obs_columns
        kept = n + stack  # an overlap is n + stack - 1 frames; one more while a step is half done
        frame_rows, at = [], 0
        for name, column in columns.items():
            size = column.item_bytes
            frame_rows.append((layout.sections[name].offset, size, column.stack, at))
            at += kept * size
        self._frame_table = np.array(frame_rows, np.int64)
        self._overlap = np.zeros((s, at), np.uint8)
        step_dtype = schema.step_dtype
        fields: Any = step_dtype.fields
        self._step_table = np.array(
            [
                (layout.sections[name].offset, dtype.itemsize, offset)
                for name, (dtype, offset, *_) in fields.items()
            ],
            np.int64,
        )
        self.staged = np.zeros(s, step_dtype)
        self._staged_bytes = self.staged.view(np.uint8)
        self._streams = np.zeros((s, 8), np.int64)
        self._streams[:, _SLOT] = _NO_SLOT
        chunk = layout.chunk
        self._streams[:, _LIMIT] = chunk
        if stagger:  # streams that start together commit spread out
            shares = -(-chunk * (np.arange(s) + 1) // s)
            self._streams[:, _LIMIT] = np.clip(shares, n, chunk)
        self._words = np.zeros(_WORDS, np.int64)
        sections = layout.sections
        for word, setting in {
            _ACTOR: actor,
            _INCARNATION: incarnation,
            _CLOSED_STATE: closed_state,
            _MAX_AGE: max_chunk_age_steps,
            _CHUNK: chunk,
            _MAX_FRAMES: layout.frames,
            _BODIES: store.bodies_offset,
            _BODY_BYTES: layout.body_bytes,
            _OBS_FRAMES: sections["obs_frames"].offset,
            _NEXT_FRAMES: sections["next_obs_frames"].offset,
            _REWARD: sections["reward"].offset,
            _DISCOUNT: sections["discount"].offset,
            _PRIORITY: sections["priority"].offset,
            _FIRST_STREAM: first_stream,
        }.items():
            self._words[word] = setting
        self._gammas = np.float64(schema.gamma) ** np.arange(n + 1)
        self._pending_frames = np.full((s, n + 1, stack), NO_FRAME, np.uint16)
        self._pending_step = np.zeros((s, n, step_dtype.itemsize), np.uint8)
        self._pending_number = np.zeros((s, n, 3))
        # A step closes and opens at most one chunk a stream, a begin another.
        self._spares = np.zeros(4 * s, np.int64)
        self._closed = np.zeros(4 * s, np.int64)
        self._completed = np.zeros(s * n, np.int64)
        self._completed_priority = np.zeros(s * n)
        self._nan = np.full(s, np.nan)
        self._mem, self._headers = store.mem, store.headers
        self._mem16 = store.mem.view(np.uint16)
        self._mem32 = store.mem.view(np.float32)
        self._begun = self._added = 0

    def _check_taken(self) -> None:
        assert self._words[_CLOSED] <= 2 * self.num_streams, "take_closed() was never called"

    @property
    def spares(self) -> int:
        """Slots provided and not yet opened."""
        return int(self._words[_SPARES])

    def provide(self, slots: NDArray[np.int64]) -> None:
        """Give it free slots to open when it needs them. Raises SchemaError past 4 a stream."""
        have, more = self.spares, len(slots)
        if have + more > len(self._spares):
            raise SchemaError(f"{have} spare slots and {more} more exceed {len(self._spares)}")
        self._spares[have : have + more] = slots
        self._words[_SPARES] = have + more

    def begin(self, mask: NDArray[np.bool_], obs: dict[str, NDArray[Any]]) -> int:
        """First observations of new episodes of the streams in `mask` (S,).

        Returns S when done; less when it ran out of slots: provide some and call it again.
        """
        self._check_taken()
        flat = flat_observations(self.schema, obs, self.num_streams)
        self._begun = begin_kernel(
            self._begun, mask, flat, self._words, self._streams, self._headers, self._mem,
            self._frame_table, self._overlap, self._pending_frames, self._spares, self._closed,
        )  # fmt: skip
        begun = self._begun
        self._begun %= self.num_streams
        return begun

    def add(
        self,
        mask: NDArray[np.bool_],
        flags: NDArray[np.int64],
        next_obs: dict[str, NDArray[Any]],
        reward: NDArray[np.float64],
        *,
        value: NDArray[np.float64] | None = None,
        next_value: NDArray[np.float64] | None = None,
        priority: NDArray[np.float64] | None = None,
    ) -> int:
        """One step of the streams in `mask`; `staged` holds its action and extra columns.

        flags (S,): CUT and END. value, next_value (S,): Q(s, a) and max Q(s') from the actor's own
        forward pass; from them comes the initial priority |R + discount * max Q(s') - Q(s, a)|
        unless `priority` gives it; NaN where there is none.

        Returns S when done; less when it ran out of slots: provide some and call it again.
        """
        nan = self._nan
        self._check_taken()
        if self._added == 0:
            self._words[_COMPLETED] = 0
        flat = flat_observations(self.schema, next_obs, self.num_streams)
        self._added = add_kernel(
            self._added, mask, flags, flat, self._staged_bytes, reward,
            nan if value is None else value, nan if next_value is None else next_value,
            nan if priority is None else priority, self._gammas, self._words, self._streams,
            self._headers, self._mem, self._mem16, self._mem32, self._frame_table,
            self._step_table, self._overlap, self._pending_frames, self._pending_step,
            self._pending_number, self._spares, self._closed, self._completed,
            self._completed_priority,
        )  # fmt: skip
        added = self._added
        self._added %= self.num_streams
        return added

    def flush(self) -> None:
        """Close every chunk that has a transition; steps without their return stay pending."""
        flush_kernel(self._words, self._streams, self._headers, self._mem, self._frame_table,
                     self._overlap, self._pending_frames, self._closed)  # fmt: skip

    def take_closed(self) -> NDArray[np.int64]:
        """Slots committed since the last call, in order."""
        count = self._words.item(_CLOSED)
        self._words[_CLOSED] = 0
        return self._closed[:count].copy()

    def last_completed(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Transitions that the last `add` completed: indices and |priorities| (-1: none).

        Views, good until the next `add`.
        """
        count = self._words.item(_COMPLETED)
        return self._completed[:count], self._completed_priority[:count]

    @property
    def held(self) -> NDArray[np.int64]:
        """Slots that it holds: the open ones and the spares."""
        slots = self._streams[:, _SLOT]
        return np.concatenate([slots[slots != _NO_SLOT], self._spares[: self.spares]])
