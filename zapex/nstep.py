"""n-step returns and chunk building: steps of S streams become chunks in claimed slots.

Pure: it knows memory and numbers, no process and no clock. For stream i and step t

    R = r_t + gamma r_{t+1} + ... + gamma^{m-1} r_{t+m-1},   discount = gamma^m, or 0 when cut

where m = n_step, less at the end of an episode (Sutton & Barto, eq. 7.1; Ape-X, eq. 2). An episode
that was truncated bootstraps from its last observation; a lost life is a cut, and the stream goes
on.

The builder commits one slot before it claims the next: the frames that both chunks need wait in
private memory. Out of slots, it stops before the stream that needs one and goes on from there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunk_store import ChunkStore
from zapex.errors import SchemaError
from zapex.nstep_kernels import (
    CLOSED,
    CLOSED_SLOTS,
    CLOSED_STATE,
    COMPLETED,
    COMPLETED_INDICES,
    COMPLETED_PRIORITIES,
    CUT,
    END,
    FIRST_STREAM,
    GAMMAS,
    ITS_INCARNATION,
    LIMIT,
    MAX_AGE,
    NO_SLOT,
    NUMBERS,
    OVERLAP_BYTES,
    OVERLAPS_AT,
    PENDING_FRAMES,
    PENDING_STEPS_AT,
    SLOT,
    SLOTLESS,
    SPARE_SLOTS,
    SPARES,
    STEP_BYTES,
    STEP_NUMBERS,
    STREAM_WORDS,
    STREAMS,
    WRITING_ACTOR,
    add_kernel,
    begin_kernel,
    flush_kernel,
    step_kernel,
)
from zapex.schema import COMMITTED, NO_FRAME, Schema
from zapex.writer_state import new_state

__all__ = ["CUT", "END", "NOTHING", "ChunkBuilder", "flat_observations"]

_BYTE = np.dtype(np.uint8)
_NO_SLOTS = np.empty(0, np.int64)
NOTHING = np.empty(0)  # of a number for each stream: not given


def flat_observations(
    schema: Schema, obs: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.uint8], ...]:
    """Each observation column as contiguous bytes, the stack axis first; shapes are not checked."""
    flat: tuple[NDArray[np.uint8], ...] = ()
    for name, column in schema.obs_columns.items():
        array = np.moveaxis(obs[name], -1, 1) if column.stack_innermost else obs[name]
        flat = (*flat, array.ravel().view(_BYTE))
    return flat


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
        s, n, stack, chunk = num_streams, schema.n_step, schema.stack, layout.chunk
        # An overlap is n + stack - 1 frames; one more while a step is half done.
        overlap_bytes = (n + stack) * sum(c.item_bytes for c in schema.obs_columns.values())
        step_bytes = schema.step_dtype.itemsize
        overlaps_at = s * (1 + n) * step_bytes
        self._private = np.zeros(overlaps_at + s * overlap_bytes, np.uint8)
        self.staged = self._private[: s * step_bytes].view(schema.step_dtype)
        streams = np.zeros((s, STREAM_WORDS), np.int64)
        streams[:, SLOT] = NO_SLOT
        streams[:, LIMIT] = chunk
        if stagger:  # streams that start together commit spread out
            shares = -(-chunk * (np.arange(s) + 1) // s)
            streams[:, LIMIT] = np.clip(shares, n, chunk)
        self._state, parts = new_state(
            store,
            {
                WRITING_ACTOR: actor,
                ITS_INCARNATION: incarnation,
                CLOSED_STATE: closed_state,
                MAX_AGE: max_chunk_age_steps,
                FIRST_STREAM: first_stream,
                SLOTLESS: s,
                STEP_BYTES: step_bytes,
                PENDING_STEPS_AT: s * step_bytes,
                OVERLAPS_AT: overlaps_at,
                OVERLAP_BYTES: overlap_bytes,
            },
            {
                STREAMS: streams,
                PENDING_FRAMES: np.full((s, n + 1, stack), NO_FRAME, np.int64),
                NUMBERS: np.zeros((s, n, STEP_NUMBERS)),
                GAMMAS: np.float64(schema.gamma) ** np.arange(n + 1),
                # A step closes and opens at most one chunk a stream, a begin another.
                SPARE_SLOTS: np.zeros(4 * s, np.int64),
                CLOSED_SLOTS: np.zeros(4 * s, np.int64),
                COMPLETED_INDICES: np.zeros(s * n, np.int64),
                COMPLETED_PRIORITIES: np.zeros(s * n),
            },
        )
        self._streams = parts[STREAMS]
        self._spares, self._closed = parts[SPARE_SLOTS], parts[CLOSED_SLOTS]
        self._completed = parts[COMPLETED_INDICES]
        self._completed_priority = parts[COMPLETED_PRIORITIES]
        self._mem = store.mem
        self._begun = self._added = 0

    @property
    def spares(self) -> int:
        """Slots provided and not yet opened."""
        return self._state.item(SPARES)

    @property
    def wanted(self) -> int:
        """Slots that are missing for every stream to have one."""
        return self._state.item(SLOTLESS) - self._state.item(SPARES)

    def provide(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Give it free slots to open when it needs them. Raises SchemaError past 4 a stream."""
        have, more = self.spares, len(slots)
        if have + more > len(self._spares):
            raise SchemaError(f"{have} spare slots and {more} more exceed {len(self._spares)}")
        self._spares[have : have + more] = slots
        self._state[SPARES] = have + more

    def begin(self, mask: NDArray[np.bool_], obs: dict[str, NDArray[Any]]) -> int:
        """First observations of new episodes of the streams in `mask` (S,).

        Returns S when done; less when it ran out of slots: provide some and call it again.
        """
        self._check_taken()
        flat = self._flat(obs)
        begun = begin_kernel(self._begun, mask, flat, self._state, self._private, self._mem)
        self._begun = begun % self.num_streams
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
        self._check_taken()
        flat = self._flat(next_obs)
        added = add_kernel(
            self._added, mask, flags, flat, reward, NOTHING if value is None else value,
            NOTHING if next_value is None else next_value,
            NOTHING if priority is None else priority, self._state, self._private, self._mem,
        )  # fmt: skip
        self._added = added % self.num_streams
        return added

    def step(
        self,
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        over: NDArray[np.bool_],
        ends: NDArray[np.bool_],
        next_obs: tuple[NDArray[np.uint8], ...],
        reward: NDArray[np.float64],
        priority: NDArray[np.float64] | None,
    ) -> tuple[int, bool]:
        """`add` of a step as vector environments return it, for the streams that are not `over`.

        next_obs: of `flat_observations`. ends (S,) says then whose episode is over after the step;
        returned beside what `add` returns: whether there is one.
        """
        self._check_taken()
        added, some = step_kernel(
            self._added, terminated, truncated, over, ends, next_obs, reward,
            NOTHING if priority is None else priority, self._state, self._private, self._mem,
        )  # fmt: skip
        self._added = added % self.num_streams
        return added, some

    def flush(self) -> None:
        """Close every chunk that has a transition; steps without their return stay pending."""
        flush_kernel(self.num_streams, self._state, self._private, self._mem)

    def take_closed(self) -> NDArray[np.int64]:
        """Slots committed since the last call, in order."""
        count = self._state.item(CLOSED)
        if not count:
            return _NO_SLOTS
        self._state[CLOSED] = 0
        return self._closed[:count].copy()

    def last_completed(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Transitions that the last `add` completed: indices and |priorities| (-1: none).

        Views, good until the next `add`.
        """
        count = self._state.item(COMPLETED)
        return self._completed[:count], self._completed_priority[:count]

    @property
    def held(self) -> NDArray[np.int64]:
        """Slots that it holds: the open ones and the spares."""
        slots = self._streams[:, SLOT]
        return np.concatenate([slots[slots != NO_SLOT], self._spares[: self.spares]])

    def _flat(self, obs: dict[str, NDArray[Any]]) -> tuple[NDArray[np.uint8], ...]:
        """Raises SchemaError for another shape than (S, *space shape) or another dtype."""
        for name, column in self.schema.obs_columns.items():
            array, wanted = obs[name], (self.num_streams, *column.value_shape)
            if array.shape != wanted or array.dtype != column.dtype:
                raise SchemaError(
                    f"{name} must be {np.dtype(column.dtype)} of shape {wanted}, "
                    f"got {array.dtype} of shape {array.shape}"
                )
        return flat_observations(self.schema, obs)

    def _check_taken(self) -> None:
        closed = self._state.item(CLOSED)
        assert closed <= 2 * self.num_streams, "take_closed() was never called"
