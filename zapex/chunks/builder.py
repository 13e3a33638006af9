"""Compute n-step returns and build chunks: steps of S streams become chunks in slots.

The builder uses only memory and numbers. It starts no process and reads no clock. For stream i and
step t

    R = r_t + gamma r_{t+1} + ... + gamma^{m-1} r_{t+m-1},   discount = gamma^m, or 0 when cut

where m = n_step; m is smaller at the end of an episode (Sutton & Barto, eq. 7.1; Ape-X, eq. 2).
A truncated episode bootstraps from its last observation. A lost life is a cut: the return ends
there, and the episode continues. A return may also end, with a bootstrap, before an exploratory
action (Watkins 1989; Sutton & Barto, section 12.10): no other action than the first of a return is
then worse than the policy that is learned.

The builder commits one slot before it opens the next. It keeps the frames that both chunks need in
private memory. If there is no free slot, it stops before the stream that needs one. The next call
continues with that stream.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    COUNT,
    HEADER_WORDS,
    INCARNATION,
    LINKED,
    LINKS_APART,
    NO_FRAME,
    SEQUENCE,
    STATE,
    STREAM,
)
from zapex.chunks.rows import (
    frame_column,
    is_blank,
    new_state,
    put_frame,
    put_numbers,
    put_step,
    writer_words,
)
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError, SchemaError
from zapex.machine.atomics import (
    compare_bytes,
    copy_bytes,
    prefetch,
    record_at,
    store_release,
)
from zapex.machine.jit import kernel
from zapex.machine.memory import count, places, words

NO_SLOT = -1
NOT_GIVEN = np.float32(-1.0)  # in the priority column: the actor gave no priority

BUILDER = writer_words(
    "actor incarnation linked closed_state max_age finite_rewards step_bytes num_streams "
    "sequence spares slotless closed completed ended "
    # The starts of the parts: arrays of words, then of bytes.
    "streams pending_frames pending_numbers gammas spare_slots closed_slots "
    "completed_indices completed_magnitudes next_values "
    "staged pending_records overlaps"
)
_STREAM_STATE = words(
    "slot rows frames pending limit age overlap in_episode "
    "number fresh "  # what STREAM gets; whether the next row is the first one of its episode
    # The starts of the stream's own parts: frame numbers of s_tm1 of each pending step and of s_t,
    # (n + 1, stack); the numbers of the steps, (n, 3); their staged records; kept frames (bytes).
    "pending_frames pending_numbers pending_records kept_frames"
)
REWARD, VALUE, PRIORITY = range(3)  # of a pending step: r_t, Q(s_tm1, a_tm1), |priority|
STEP_NUMBERS = 3
MOST_REWARD = float(np.finfo(np.float32).max) / 64  # 64: the largest n_step
_STREAM_WORDS = count(_STREAM_STATE)
_BYTES_AHEAD = 1024  # prefetched of the next stream's frame; the processor then sees the order


@kernel
def _stream(w: Any, state: Any, i: int) -> Any:
    return record_at(state, w.streams + i * _STREAM_WORDS, _STREAM_STATE)


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
    w.sequence += 1
    # STEP chunk-stamped
    # SYNC chunk-whole: commit (release state) -> the replay's accept (acquire state)
    store_release(headers, header + STATE, w.closed_state)
    # STEP chunk-committed
    state[w.closed_slots + w.closed] = stream.slot
    w.closed += 1
    stream.slot = NO_SLOT
    stream.limit = w.chunk
    stream.number += 2 * w.linked
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
def _room(i: int, frames: int, rows: int, w: Any, stream: Any, state: Any, mem: Any) -> bool:
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
        stream.in_episode = stream.fresh = 1
    return len(mask)


@kernel
def _take(i: int, s_t: Any, w: Any, stream: Any, state: Any, private: Any, mem: Any) -> None:
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
def _emit(
    q: int, m: int, w: Any, stream: Any, state: Any, private: Any, mem: Any, mem16: Any
) -> None:
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
    if row == 0:
        place = stream.slot * HEADER_WORDS + STREAM
        mem.view(np.int64)[place] = stream.number + stream.fresh * w.linked
    stream.fresh = 0
    state[w.completed_indices + w.completed] = stream.slot * w.chunk + row


@kernel
def _shift(done: int, w: Any, stream: Any, state: Any, reals: Any, private: Any) -> None:
    """Remove the first `done` pending steps, which were emitted, and move the others down."""
    stream.pending -= done
    frames, numbers, records = (
        stream.pending_frames,
        stream.pending_numbers,
        stream.pending_records,
    )
    for k in range(frames, frames + (stream.pending + 1) * w.stack):
        state[k] = state[k + done * w.stack]
    for k in range(numbers, numbers + stream.pending * STEP_NUMBERS):
        reals[k] = reals[k + done * STEP_NUMBERS]
    for k in range(records, records + stream.pending * w.step_bytes):
        private[k] = private[k + done * w.step_bytes]


@kernel
def add_kernel(
    start: int,
    terminated: Any,
    truncated: Any,
    cut: Any,
    exploratory: Any,
    s_t: Any,
    r_t: Any,
    values: Any,
    priority: Any,
    state: Any,
    mem: Any,
) -> int:
    """Take one step of the streams that have an episode; see `ChunkBuilder.add`.

    An array without elements means: not given. Returns the stream that needs a slot, or S; or, if
    the reward of stream i is refused, -1 - i, and nothing has changed.
    """
    w = record_at(state, 0, BUILDER)
    streams: int = w.num_streams
    headers, mem16, mem32 = mem.view(np.int64), mem.view(np.uint16), mem.view(np.float32)
    reals, private = state.view(np.float64), state.view(np.uint8)
    if start == 0:
        w.completed = w.ended = 0
        for i in range(streams if w.finite_rewards else 0):
            if _stream(w, state, i).in_episode and not abs(r_t[i]) <= MOST_REWARD:
                return -1 - i
    for i in range(start, streams):
        stream = _stream(w, state, i)
        if not stream.in_episode:
            continue
        if i + 1 < streams:
            _prefetch(i + 1, s_t, w, state, mem)
        over = terminated[i] or truncated[i]
        no_bootstrap = terminated[i] or (len(cut) > 0 and cut[i])
        ended: Any = stream.pending if len(exploratory) > 0 and exploratory[i] else 0
        steps = stream.pending - ended + 1
        done: Any = steps if over or no_bootstrap else np.int64(steps == w.n_step)
        if not _room(i, 1, ended + done, w, stream, state, mem):
            return i
        body = w.bodies + stream.slot * w.body_bytes
        for with_step in range(np.int64(ended == 0), 2):  # first the returns that end before it
            count, bootstraps = ended, True
            if with_step:
                count, bootstraps = done, not no_bootstrap
                step = stream.pending_numbers + stream.pending * STEP_NUMBERS
                reals[step + REWARD] = r_t[i]
                reals[step + VALUE] = values[0, i] if values.shape[1] else np.nan
                reals[step + PRIORITY] = priority[i] if len(priority) else np.nan
                if values.shape[1]:
                    reals[w.next_values + i] = values[1, i]
                _take(i, s_t, w, stream, state, private, mem)
            for q in range(count):
                m, step = stream.pending - q, stream.pending_numbers + q * STEP_NUMBERS
                g = _n_step_return(step, m, w.gammas, reals)
                discount = reals[w.gammas + m] if bootstraps else 0.0
                magnitude = reals[step + PRIORITY]
                if np.isnan(magnitude) and values.shape[1]:
                    bootstrap = discount * reals[w.next_values + i] if discount != 0.0 else 0.0
                    magnitude = g + bootstrap - reals[step + VALUE]
                magnitude = np.float64(NOT_GIVEN) if np.isnan(magnitude) else abs(magnitude)
                _emit(q, m, w, stream, state, private, mem, mem16)
                put_numbers(w, mem32, body, stream.rows, g, discount, magnitude)
                reals[w.completed_magnitudes + w.completed] = magnitude
                w.completed += 1
                # STEP row-written
                stream.rows += 1
            if count:
                _shift(count, w, stream, state, reals, private)
        # SYNC row-counted: the rows are whole -> the owner's look for new rows (ledger.py)
        store_release(headers, stream.slot * HEADER_WORDS + COUNT, stream.rows)
        if over:
            stream.in_episode = 0
            w.ended += 1
        stream.age += 1
        aged = 0 < w.max_age <= stream.age
        if stream.rows >= stream.limit or (aged and stream.rows > 0):
            _close(i, w, stream, state, mem)
    return streams


@kernel
def flush_kernel(state: Any, mem: Any) -> None:
    """Close each chunk that has a row."""
    w = record_at(state, 0, BUILDER)
    for i in range(w.num_streams):
        stream = _stream(w, state, i)
        if stream.slot != NO_SLOT and stream.rows > 0:
            _close(i, w, stream, state, mem)


_BYTE = np.dtype(np.uint8)
_NO_SLOTS = np.empty(0, np.int64)
# Not given.
_NO_FLAGS, _NO_VALUES, _NO_PRIORITY = np.empty(0, np.bool_), np.empty((2, 0)), np.empty(0)
_SPARES, _SLOTLESS, _CLOSED, _COMPLETED, _ENDED = places(
    BUILDER, "spares slotless closed completed ended"
)


def flat_observations(
    schema: Schema, obs: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.uint8], ...]:
    """Each observation column as contiguous bytes, stack axis first. Shapes are not checked."""
    flat: tuple[NDArray[np.uint8], ...] = ()
    for name, c in schema.obs_columns.items():
        array = np.moveaxis(obs[name], -1, 1) if c.stack_innermost else obs[name]
        flat = (*flat, array.ravel().view(_BYTE))
    return flat


def _new_streams(streams: int, n_step: int, chunk: int, stagger: bool) -> NDArray[Any]:
    """(S,) _STREAM_STATE without slots. `stagger` makes the first chunks shorter."""
    new = np.zeros(streams, _STREAM_STATE)
    new["slot"] = NO_SLOT
    new["limit"] = chunk
    if stagger:  # streams that start together commit at different times
        shares = -(-chunk * (np.arange(streams) + 1) // streams)
        new["limit"] = np.clip(shares, n_step, chunk)
    return new


class ChunkBuilder:
    """Write steps of `num_streams` streams into chunks, in slots that the caller provides.

    The caller's loop:

        builder.begin(mask, obs)                       # first observations
        while builder.add(next_obs, reward, ...) < S:  # no slot left in the middle of a step
            builder.provide(slots)                     # give more slots; add() then continues
        for slot in builder.take_closed(): ...         # committed slots: send them to the replay

    Observations are dicts by column name, of the schema's dtypes and shapes, which the caller
    checks.

    closed_state: the state of a closed slot: COMMITTED if the replay is in another process, LIVE
    if it is in this one. finite_rewards: refuse rewards whose return might be no finite float32.
    linked: chunks of a stream are linked (layout.py), so that sequences are found.
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
        finite_rewards: bool = False,
        linked: bool = False,
        stagger: bool = True,
    ) -> None:
        schema = store.layout.schema
        self.schema: Schema = schema
        self.num_streams = num_streams
        s, n, stack = num_streams, schema.n_step, schema.stack
        # An overlap is n + stack - 1 frames, and one more in the middle of a step.
        overlap_bytes = (n + stack) * sum(c.item_bytes for c in schema.obs_columns.values())
        step_bytes = schema.step_dtype.itemsize
        words = {
            "actor": actor,
            "incarnation": incarnation,
            "linked": linked,
            "closed_state": closed_state,
            "max_age": max_chunk_age_steps,
            "finite_rewards": finite_rewards,
            "step_bytes": step_bytes,
            "num_streams": s,
            "slotless": s,
        }
        parts: dict[str, NDArray[Any]] = {
            "streams": _new_streams(s, n, store.layout.chunk, stagger),
            "pending_frames": np.full((s, n + 1, stack), NO_FRAME, np.int64),
            "pending_numbers": np.zeros((s, n, STEP_NUMBERS)),
            "gammas": np.float64(schema.gamma) ** np.arange(n + 1),
            # For each stream, a step closes and opens at most one chunk, and so does a begin.
            "spare_slots": np.zeros(4 * s, np.int64),
            "closed_slots": np.zeros(4 * s, np.int64),
            "completed_indices": np.zeros(s * n, np.int64),
            "completed_magnitudes": np.zeros(s * n),
            "next_values": np.zeros(s),  # max Q(s_t)
            "staged": np.zeros(s * step_bytes, np.uint8),
            "pending_records": np.zeros(s * n * step_bytes, np.uint8),
            "overlaps": np.zeros(s * overlap_bytes, np.uint8),
        }
        self._state, views = new_state(store, BUILDER, words, parts)
        streams = views["streams"]
        # A random start: writers of several processes need not know each other's.
        first, apart = (
            (LINKED | secrets.randbits(59) & -2, LINKS_APART) if linked else (first_stream, 1)
        )
        streams["number"] = first + apart * np.arange(s)
        for own, part in (
            ("pending_frames", "pending_frames"),
            ("pending_numbers", "pending_numbers"),
            ("pending_records", "pending_records"),
            ("kept_frames", "overlaps"),
        ):
            start, share = self._state.item(*places(BUILDER, part)), parts[part].size // s
            streams[own] = start + np.arange(s) * share
        self.staged = views["staged"].view(schema.step_dtype)
        self._stream_slots, self._in_episode = streams["slot"], streams["in_episode"]
        self._spares, self._closed = views["spare_slots"], views["closed_slots"]
        self._completed = views["completed_indices"], views["completed_magnitudes"]
        self._mem = store.mem
        self._begun = self._added = 0

    @property
    def spares(self) -> int:
        """How many provided slots are not opened yet."""
        return self._state.item(_SPARES)

    @property
    def wanted(self) -> int:
        """How many slots are missing until each stream has one."""
        return self._state.item(_SLOTLESS) - self._state.item(_SPARES)

    def provide(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Add free slots. Raises SchemaError if there would be more than 4 for each stream."""
        have, more = self.spares, len(slots)
        if have + more > len(self._spares):
            raise SchemaError(f"{have} spare slots and {more} more exceed {len(self._spares)}")
        self._spares[have : have + more] = slots
        self._state[_SPARES] = have + more

    def begin(self, mask: NDArray[np.bool_], obs: dict[str, NDArray[Any]]) -> int:
        """Take the first observations of new episodes, for the streams in `mask` (S,).

        Returns S when done. Returns less if a slot is missing: provide slots and call again.
        """
        self._check_taken()
        flat = flat_observations(self.schema, obs)
        begun = begin_kernel(self._begun, mask, flat, self._state, self._mem)
        self._begun = begun % self.num_streams
        return begun

    def add(
        self,
        next_obs: dict[str, NDArray[Any]],
        reward: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        *,
        cut: NDArray[np.bool_] | None = None,
        exploratory: NDArray[np.bool_] | None = None,
        values: NDArray[np.float64] | None = None,
        priority: NDArray[np.float64] | None = None,
    ) -> int:
        """Take one step of the streams that have an episode; the others' values are not read.

        `staged` holds the step's action and extra columns.

        Args:
            next_obs: observations after the step.
            reward: (S,).
            terminated: (S,) the episode is over, without a bootstrap.
            truncated: (S,) the episode is over, with a bootstrap from its last observation.
            cut: (S,) no bootstrap after this step, but the episode continues: a life is lost.
            exploratory: (S,) the returns of earlier steps end before this one, with a bootstrap.
            values: (2, S), Q(s_tm1, a_tm1) and max Q(s_t) from the actor's own forward pass, NaN:
                not known. Without `priority` they give the transition's: |G + discount max Q(s_t) -
                Q(s_tm1, a_tm1)| (Horgan et al. 2018).
            priority: (S,) |TD errors| of the transitions that start with this step.

        Returns:
            S when done. Less if a slot is missing: provide slots and call again.

        Raises:
            ConfigError: with `finite_rewards`, a reward is refused; nothing was added.
        """
        self._check_taken()
        added = add_kernel(
            self._added,
            terminated,
            truncated,
            _NO_FLAGS if cut is None else cut,
            _NO_FLAGS if exploratory is None else exploratory,
            flat_observations(self.schema, next_obs),
            reward,
            _NO_VALUES if values is None else values,
            _NO_PRIORITY if priority is None else priority,
            self._state,
            self._mem,
        )
        if added < 0:
            stream = -1 - added
            raise ConfigError(
                f"a reward must be a finite float32, got {reward[stream]} of stream {stream}; "
                "nothing was added"
            )
        self._added = added % self.num_streams
        return added

    @property
    def ended(self) -> int:
        """How many episodes ended in the last step."""
        count: int = self._state.item(_ENDED)
        return count

    def idle(self) -> NDArray[np.bool_]:
        """(S,) which streams have no episode."""
        found: NDArray[np.bool_] = self._in_episode == 0
        return found

    def flush(self) -> None:
        """Close each chunk that has a transition. Steps without an n-step return stay pending."""
        flush_kernel(self._state, self._mem)

    def take_closed(self) -> NDArray[np.int64]:
        """Slots committed since the last call, in order."""
        count = self._state.item(_CLOSED)
        if not count:
            return _NO_SLOTS
        self._state[_CLOSED] = 0
        return self._closed[:count].copy()

    def last_completed(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Transitions that the last `add` completed: indices and |priorities| (-1: not given).

        The arrays are views, valid until the next `add`.
        """
        count = self._state.item(_COMPLETED)
        indices, magnitudes = self._completed
        return indices[:count], magnitudes[:count]

    @property
    def held(self) -> NDArray[np.int64]:
        """The slots of this builder: the open ones and the spare ones."""
        slots = self._stream_slots
        return np.concatenate([slots[slots != NO_SLOT], self._spares[: self.spares]])

    def _check_taken(self) -> None:
        closed = self._state.item(_CLOSED)
        assert closed <= 2 * self.num_streams, "take_closed() was never called"
