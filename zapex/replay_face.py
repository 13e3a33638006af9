"""The calls that a replay has for its users, wherever it lies: what they pass in, checked.

PrioritizedReplay   the memory is this process's own
HandleClient        another process's of this host
UrlClient           another host's
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex.arguments import BOOL, FLOAT32, column, magnitudes, observations, stage
from zapex.batch import Batch
from zapex.errors import ConfigError, SchemaError
from zapex.nstep import flat_observations
from zapex.schema import BatchLayout, Schema
from zapex.transitions import TransitionPacker

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from zapex.chunk_store import ChunkStore
    from zapex.replay_core import ReplayLayout

Normalise = Literal["batch", "memory"]
_NORMALISE = get_args(Normalise)
_BYTE = np.dtype(np.uint8)


class Home(Protocol):
    """Whose slots a writer fills; `lock` is held around all but `lock` itself."""

    layout: "ReplayLayout"
    store: "ChunkStore"
    shard: int

    @property
    def lock(self) -> "AbstractContextManager[Any]":
        """Held by whoever calls the rest."""

    def reserve_streams(self, streams: int) -> None:
        """So many more streams will hold a slot each. Raises ConfigError."""

    def release_streams(self, streams: int) -> None:
        """Streams that will open no more chunks."""

    def admit(self, rows: int) -> None:
        """Wait until so many transitions may come in. Raises ReplayError past the deadline."""

    def open_slot(self) -> int:
        """A slot to fill."""

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64] | None = None,
    ) -> None:
        """Rows (R,) of open slots are whole, with |priorities| (-1: none); `closed` are full."""

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Open slots without a row."""

    def settle(self) -> None:
        """Wait until what was closed is there for everybody. Raises PeerTimeout."""


class Rows(NamedTuple):
    """Whole transitions, checked: B rows by the schema's column names.

    staged (B,): records of the step columns. magnitudes (B,) float64: |priority|, -1 where none is
    given. The rest is as `extend` takes it.
    """

    obs: dict[str, NDArray[Any]]
    next_obs: dict[str, NDArray[Any]]
    staged: NDArray[Any]
    reward: NDArray[np.float32]
    discount: NDArray[np.float32] | None
    terminated: NDArray[np.bool_] | None
    magnitudes: NDArray[np.float64]


class ReplayFace:
    """What does not depend on where the replay lies."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._not_given = np.empty(0)  # the last |priorities| of rows that had none; never written
        self._batch_layouts: dict[tuple[int, bool], BatchLayout] = {}

    def extend(
        self,
        *,
        obs: Any,
        action: ArrayLike,
        reward: ArrayLike,
        next_obs: Any,
        terminated: ArrayLike | None = None,
        truncated: ArrayLike | None = None,
        discount: ArrayLike | None = None,
        priorities: ArrayLike | None = None,
        **extras: ArrayLike,
    ) -> NDArray[np.int64]:
        """Whole transitions, stored as they are; their keys (B,) int64.

        obs, next_obs (B, ...); action, extras (B, ...): the schema's columns. reward (B,): the
        n-step return, with next_obs the observation n_step steps later. discount (B,): what the
        bootstrap is multiplied by; None is gamma ** n_step. Rows that are `terminated` (B,) do not
        bootstrap; those `truncated` (B,) do, like all others, from next_obs. priorities (B,): TD
        errors, their sign is ignored; None is the largest so far.

        Frames that rows share are stored once where the rows lie in one chunk: give rows in the
        order in which they were played. Raises SchemaError, InvalidPriority, and stores nothing.
        """
        schema = self.schema
        returns = np.asarray(reward)
        rows = returns.size
        returns = column(returns, FLOAT32, (rows,), "reward")
        if terminated is None and discount is None:
            raise SchemaError(
                "extend needs terminated or discount: where does no bootstrap follow?"
            )
        follows = None if discount is None else column(discount, FLOAT32, (rows,), "discount")
        ends = None if terminated is None else column(terminated, BOOL, (rows,), "terminated")
        if truncated is not None:
            column(truncated, BOOL, (rows,), "truncated")
        if priorities is not None:
            given = magnitudes(priorities, rows)
        else:
            given = self._not_given = (
                self._not_given if len(self._not_given) == rows else np.full(rows, -1.0)
            )
        staged = np.empty(rows, schema.step_dtype)
        stage(schema, action, extras, staged)
        before = observations(schema, obs, rows, "obs")
        after = observations(schema, next_obs, rows, "next_obs")
        return self._take(Rows(before, after, staged, returns, follows, ends, given))

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        """Store them; their keys (B,)."""
        raise NotImplementedError

    def empty_batch(
        self, batch_size: int, layout: str = "channels_first", pin_memory: bool = False
    ) -> Batch:
        """Memory for `sample(out=...)`; pinned where a GPU will copy from it.

        layout: "channels_last" stores stacked frames with the stack innermost; shapes are the same.
        """
        if layout not in ("channels_first", "channels_last"):
            raise ConfigError(f'layout must be "channels_first" or "channels_last", got "{layout}"')
        wanted = batch_size, layout == "channels_last"
        if wanted not in self._batch_layouts:
            self._batch_layouts[wanted] = BatchLayout(self.schema, *wanted)
        return Batch.empty(self._batch_layouts[wanted], pin_memory)

    def _batch_for(
        self, out: Batch | None, batch_size: int, method: str, normalise: str, methods: Any
    ) -> Batch:
        """`out`, or a new one, for so many rows; and what else `sample` is asked for, checked."""
        if method not in methods or normalise not in _NORMALISE:
            raise ConfigError(
                f"method must be one of {methods} and normalise one of {_NORMALISE}, "
                f"got {method!r} and {normalise!r}"
            )
        if out is None:
            return self.empty_batch(batch_size)
        if out.layout.batch_size != batch_size:
            raise ConfigError(f"out has {out.layout.batch_size} rows, not {batch_size}")
        if out.layout.schema is not self.schema and out.layout.schema != self.schema:
            raise SchemaError("out is of another schema: make it with empty_batch of this replay")
        return out


class Extender:
    """Whole transitions into the slots of a home, one open slot after the other."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._packer: TransitionPacker | None = None

    def extend(self, rows: Rows) -> NDArray[np.int64]:
        """Store them, the home's lock held; their keys (B,)."""
        home = self._home
        if self._packer is None:
            packer = TransitionPacker(home.store)
            home.reserve_streams(1)
            self._packer = packer
        packer = self._packer
        count = len(rows.reward)
        if not count:
            return np.empty(0, np.int64)
        home.admit(count)
        schema = home.layout.schema
        columns = flat_observations(schema, rows.obs), flat_observations(schema, rows.next_obs)
        records = rows.staged.view(_BYTE)
        indices, keys = np.empty(count, np.int64), np.empty(count, np.int64)
        done = 0
        while True:
            first = done
            done = packer.pack(
                first, *columns, records, rows.reward, rows.discount, rows.terminated,
                rows.magnitudes, home.shard, indices, keys,
            )  # fmt: skip
            # Before the next slot: its eviction may take these rows already.
            if done - first == count:
                home.grown(indices, rows.magnitudes)
                return keys
            home.grown(indices[first:done], rows.magnitudes[first:done])
            if done == count:
                return keys
            self.close()
            packer.open(home.open_slot())

    def close(self) -> None:
        """The chunk that is open is full, or taken for full."""
        if self._packer is not None and self._packer.slot is not None:
            none = np.empty(0, np.int64)
            self._home.grown(none, np.empty(0), np.array([self._packer.slot]))
            self._packer.close()
