"""Compute n-step returns and build chunks: steps of S streams become chunks in slots.

The builder uses only memory and numbers. It starts no process and reads no clock. For stream i and
step t

    R = r_t + gamma r_{t+1} + ... + gamma^{m-1} r_{t+m-1},   discount = gamma^m, or 0 when cut

where m = n_step; m is smaller at the end of an episode (Sutton & Barto, eq. 7.1; Ape-X, eq. 2).
A truncated episode bootstraps from its last observation. A lost life is a cut: the return ends
there, and the episode continues.

The builder commits one slot before it opens the next. It keeps the frames that both chunks need in
private memory. If there is no free slot, it stops before the stream that needs one. The next call
continues with that stream.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.arguments import column
from zapex.chunks.layout import COMMITTED, NO_FRAME
from zapex.chunks.rows import new_state
from zapex.chunks.schema import Schema
from zapex.chunks.step_kernels import (
    BUILDER,
    CUT,
    END,
    NO_SLOT,
    STEP_NUMBERS,
    STREAM_STATE,
    add_kernel,
    begin_kernel,
    flush_kernel,
    step_kernel,
)
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError, SchemaError
from zapex.machine.memory import places

__all__ = ["CUT", "END", "NOTHING", "ChunkBuilder", "flat_observations"]

_BYTE = np.dtype(np.uint8)
_NO_SLOTS = np.empty(0, np.int64)
NOTHING = np.empty(0)  # in place of one number for each stream: not given
_SPARES, _SLOTLESS, _CLOSED, _COMPLETED = places(BUILDER, "spares slotless closed completed")


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
    """(S,) STREAM_STATE without slots. `stagger` makes the first chunks shorter."""
    new = np.zeros(streams, STREAM_STATE)
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
        while builder.add(mask, flags, ...) < S:       # no slot left in the middle of a step
            builder.provide(slots)                     # give more slots; add() then continues
        for slot in builder.take_closed(): ...         # committed slots: send them to the replay

    closed_state: the state of a closed slot: COMMITTED if the replay is in another process, LIVE
    if it is in this one.
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
            "first_stream": first_stream,
            "closed_state": closed_state,
            "max_age": max_chunk_age_steps,
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
            "staged": np.zeros(s * step_bytes, np.uint8),
            "pending_records": np.zeros(s * n * step_bytes, np.uint8),
            "overlaps": np.zeros(s * overlap_bytes, np.uint8),
        }
        self._state, views = new_state(store, BUILDER, words, parts)
        streams = views["streams"]
        for own, part in (
            ("pending_frames", "pending_frames"),
            ("pending_numbers", "pending_numbers"),
            ("pending_records", "pending_records"),
            ("kept_frames", "overlaps"),
        ):
            start, share = self._state.item(*places(BUILDER, part)), parts[part].size // s
            streams[own] = start + np.arange(s) * share
        self.staged = views["staged"].view(schema.step_dtype)
        self._stream_slots = streams["slot"]
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
        flat = self._flat(obs)
        begun = begin_kernel(self._begun, mask, flat, self._state, self._mem)
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
        """Take one step of the streams in `mask`; `staged` holds its action and extra columns.

        flags (S,): CUT and END. value, next_value (S,): Q(s, a) and max Q(s') from the actor's own
        forward pass. They give the initial priority |R + discount * max Q(s') - Q(s, a)|, unless
        `priority` (S,) gives it. NaN means that there is no value.

        Returns S when done. Returns less if a slot is missing: provide slots and call again.
        """
        self._check_taken()
        flat = self._flat(next_obs)
        added = add_kernel(
            self._added, mask, flags, flat, reward, NOTHING if value is None else value,
            NOTHING if next_value is None else next_value,
            NOTHING if priority is None else priority, self._state, self._mem,
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
        """`add` for a step of a vector environment, for the streams that are not `over` (S,).

        next_obs: the result of `flat_observations`. ends (S,) is written: which episodes are over
        after the step. Returns what `add` returns, and whether any episode is over.
        """
        self._check_taken()
        added, some = step_kernel(
            self._added, terminated, truncated, over, ends, next_obs, reward,
            NOTHING if priority is None else priority, self._state, self._mem,
        )  # fmt: skip
        if added < 0:
            stream = -1 - added
            raise ConfigError(
                f"a reward must be a finite float32, got {reward[stream]} of stream {stream}; "
                "nothing was added"
            )
        self._added = added % self.num_streams
        return added, some

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

    def _flat(self, obs: dict[str, NDArray[Any]]) -> tuple[NDArray[np.uint8], ...]:
        """`flat_observations`, checked. Raises SchemaError for a wrong shape or dtype."""
        checked = {
            name: column(obs[name], c.dtype, (self.num_streams, *c.value_shape), name)
            for name, c in self.schema.obs_columns.items()
        }
        return flat_observations(self.schema, checked)

    def _check_taken(self) -> None:
        closed = self._state.item(_CLOSED)
        assert closed <= 2 * self.num_streams, "take_closed() was never called"
