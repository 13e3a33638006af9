"""Prioritized replay: the library's front door."""

import os
import threading
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex import arguments, snapshot
from zapex.batch import Batch
from zapex.errors import CheckpointError, ConfigError, NotEnoughData, ReplayError, SchemaError
from zapex.rate_limiter import LimiterConfig, RateLimiter
from zapex.replay_core import Draw, Method, ReplayCore, ReplayLayout, importance_weights
from zapex.sampling import batch_kernel
from zapex.schema import COUNT, BatchLayout, Schema
from zapex.transitions import TransitionPacker
from zapex.writer import Autoreset, Writer

__all__ = ["Draw", "Method", "PrioritizedReplay", "ReplayLayout", "importance_weights"]

Normalise = Literal["batch", "memory"]
_METHODS, _NORMALISE = get_args(Method), get_args(Normalise)  # in the order of sampling.py


class PrioritizedReplay(ReplayCore):
    """Prioritized experience replay over chunks (Schaul et al. 2016; Horgan et al. 2018).

    capacity: transitions, or where they share no frames, frames' worth: `stats()` says what fits.
    schema: their columns. alpha: how much priorities matter. eps: added to each |priority|.
    streams: about how many streams will write; chunks are the shorter the more there are.
    min_size_to_sample: `sample` raises NotEnoughData below it.

    samples_per_insert: how many transitions are drawn for each that comes in, 0 for any number.
    Neither side gets more than `tolerance` samples ahead (0: chosen); where one would, it waits for
    the other at most timeout_s and then raises ReplayError. In a single thread, ask `can_sample`.

    buffer: memory to live in (uint8, cache-line aligned, `layout.nbytes`; zero when new); what it
    holds is taken over. Public methods are thread-safe.
    """

    _SETTINGS = (
        "capacity", "schema", "alpha", "eps", "streams", "chunk", "min_size_to_sample",
        "samples_per_insert", "tolerance", "timeout_s", "shard",
    )  # fmt: skip

    def __init__(
        self,
        capacity: int,
        schema: Schema,
        alpha: float = 0.6,
        eps: float = 1e-6,
        seed: int | None = None,
        *,
        streams: int = 8,
        chunk: int = 0,
        min_size_to_sample: int = 1,
        samples_per_insert: float = 0.0,
        tolerance: int = 0,
        timeout_s: float = 0.0,
        shard: int = 0,
        buffer: NDArray[np.uint8] | None = None,
    ) -> None:
        layout = ReplayLayout(schema, capacity, streams, chunk)
        super().__init__(layout, alpha, eps, seed, min_size_to_sample, shard, buffer)
        self.timeout_s = timeout_s
        self.samples_per_insert, self.tolerance = samples_per_insert, tolerance
        self._limiter: RateLimiter | None = None
        if samples_per_insert:
            tolerance = tolerance or int(np.ceil(1024 * (1 + samples_per_insert)))
            insert = max(1, int(tolerance / 2 / samples_per_insert))
            limits = LimiterConfig(
                samples_per_insert=samples_per_insert,
                min_size=min_size_to_sample,
                tolerance=tolerance,
                grant=insert,
                batch=max(1, int(tolerance - samples_per_insert * insert)),
                capacity=capacity,
            )
            self._limiter = RateLimiter(limits, committed=len(self))
        self._changed = threading.Condition(self.lock)
        self._batch_layouts: dict[tuple[int, bool], BatchLayout] = {}
        self._streams = 0  # whose chunks are open
        self._packer: TransitionPacker | None = None

    # In: streams of steps, or whole transitions.

    def writer(self, num_envs: int, autoreset: Autoreset = "next_step") -> Writer:
        """Streams of steps of vectorised environments; see Writer."""
        with self.lock:
            if num_envs < 1:
                raise ConfigError(f"num_envs must be at least 1, got {num_envs}")
            self._reserve_streams(num_envs)
            return Writer(self, num_envs, autoreset)

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
        schema = self.layout.schema
        returns = np.asarray(reward)
        rows = returns.size
        numbers = np.empty((rows, 3), np.float32)
        numbers[:, 0] = arguments.column(returns, arguments.FLOAT32, (rows,), "reward")
        if terminated is None and discount is None:
            raise SchemaError(
                "extend needs terminated or discount: where does no bootstrap follow?"
            )
        numbers[:, 1] = schema.gamma**schema.n_step
        if discount is not None:
            numbers[:, 1] = arguments.column(discount, arguments.FLOAT32, (rows,), "discount")
        if terminated is not None:
            numbers[arguments.column(terminated, arguments.BOOL, (rows,), "terminated"), 1] = 0.0
        if truncated is not None:
            arguments.column(truncated, arguments.BOOL, (rows,), "truncated")
        magnitudes = np.full(rows, -1.0)
        if priorities is not None:
            magnitudes = arguments.magnitudes(priorities, rows)
        numbers[:, 2] = magnitudes
        staged = np.empty(rows, schema.step_dtype)
        arguments.stage(schema, action, extras, staged)
        before = arguments.observations(schema, obs, rows, "obs")
        after = arguments.observations(schema, next_obs, rows, "next_obs")
        with self.lock:
            return self._pack(before, after, staged, numbers, magnitudes)

    def _pack(
        self,
        obs: dict[str, NDArray[Any]],
        next_obs: dict[str, NDArray[Any]],
        staged: NDArray[Any],
        numbers: NDArray[np.float32],
        magnitudes: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        if self._packer is None:
            packer = TransitionPacker(self.store)
            self._reserve_streams(1)
            self._packer = packer
        packer = self._packer
        rows = len(numbers)
        self.admit(rows)
        columns = packer.flat(obs, rows), packer.flat(next_obs, rows)
        records = staged.view(np.uint8).reshape(rows, staged.dtype.itemsize)
        indices, keys = np.empty(rows, np.int64), np.empty(rows, np.int64)
        done = 0
        while True:
            first = done
            done = packer.pack(first, *columns, records, numbers, indices)
            # Before the next slot: its eviction may take these rows already.
            keys[first:done] = self.store.keys_of(indices[first:done], self.shard)
            self.grown(indices[first:done], magnitudes[first:done])
            if done == rows:
                return keys
            self._close_packed()
            packer.open(self.open_slot())

    def _close_packed(self) -> None:
        """The chunk that `extend` fills is full, or taken for full."""
        if self._packer is not None and self._packer.slot is not None:
            self.ledger.close(self._packer.slot)
            self._packer.close()

    # What writers call, with the lock held.

    def _reserve_streams(self, streams: int) -> None:
        wanted, chunk = self._streams + streams, self.layout.chunk
        if 2 * wanted * chunk > self.layout.capacity:
            raise ConfigError(
                f"{wanted} streams (extend is one) with open chunks of {chunk} transitions take "
                f"more than half of the capacity of {self.layout.capacity}: give the replay "
                f"streams={wanted} for shorter chunks, raise capacity, or close() unused writers"
            )
        self._streams = wanted

    def release_streams(self, streams: int) -> None:
        """Streams that will open no more chunks."""
        self._streams -= streams

    def admit(self, rows: int) -> None:
        """Wait until so many transitions may come in. Raises ReplayError past the deadline."""
        limiter = self._limiter
        if limiter is not None:
            self._wait_until(lambda: limiter.can_insert(rows), ReplayError)

    def open_slot(self) -> int:
        """A slot to fill; where none is free, the oldest chunk's."""
        if not self.ledger.free:
            self._evict_oldest()
            self.ledger.release(0)
        return self.ledger.open()

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64] | None = None,
    ) -> None:
        """Rows (R,) of open slots are whole, with |priorities| (-1: none); `closed` are full."""
        count = len(indices)
        if count:
            self._set_leaves(indices, magnitudes)
            self.ledger.live_transitions += count
            self.inserted += count
            if self._limiter is not None:
                self._limiter.insert(count)
                self._limiter.commit(count)
                self._changed.notify_all()
        if closed is not None:
            for slot in closed.tolist():
                self.ledger.close(slot)
        while (
            self.ledger.live_transitions > self.layout.capacity and self.ledger.oldest is not None
        ):
            self._evict_oldest()
            self.ledger.release(0)

    def _wait_until(self, ready: Callable[[], bool], error: type[ReplayError]) -> None:
        assert self._limiter is not None
        if not self._changed.wait_for(ready, self.timeout_s):
            raise error(f"after {self.timeout_s:g} s: {self._limiter.explain()}")

    # Out: batches.

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        with self.lock:
            enough = len(self) >= max(batch_size, self.min_size_to_sample)
            return enough and (self._limiter is None or self._limiter.can_sample(batch_size))

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
            self._batch_layouts[wanted] = BatchLayout(self.layout.schema, *wanted)
        return Batch.empty(self._batch_layouts[wanted], pin_memory)

    def sample(
        self,
        batch_size: int,
        beta: float = 0.4,
        out: Batch | None = None,
        *,
        method: Method = "stratified",
        normalise: Normalise = "batch",
    ) -> Batch:
        """`batch_size` transitions by priority, in `out` (of `empty_batch`) if given.

        Weights are (N q)^-beta, q the probability really used, divided by the largest of the batch
        or of the memory (Schaul et al. 2016, sec. 3.4). method: see SumTree.sample.

        Raises NotEnoughData below `min_size_to_sample` or where there are less than `batch_size`.
        """
        batch = self.empty_batch(batch_size) if out is None else out
        if out is not None and (
            out.layout.batch_size != batch_size or out.layout.schema is not self.layout.schema
        ):
            self._check_out(out, batch_size)
        if method not in _METHODS or normalise not in _NORMALISE:
            raise ConfigError(
                f"method must be one of {_METHODS} and normalise one of {_NORMALISE}, "
                f"got {method!r} and {normalise!r}"
            )
        with self.lock:
            limiter = self._limiter
            if limiter is not None:
                self._wait_until(lambda: limiter.can_sample(batch_size), NotEnoughData)
            self._demand(max(self.min_size_to_sample, batch_size))
            self._fill(batch, method, beta, normalise)
            self.sampled += batch_size
            if limiter is not None:
                limiter.sample(batch_size)
                self._changed.notify_all()
        return batch

    def _check_out(self, out: Batch, batch_size: int) -> None:
        if out.layout.batch_size != batch_size:
            raise ConfigError(f"out has {out.layout.batch_size} rows, not {batch_size}")
        if out.layout.schema != self.layout.schema:
            raise SchemaError("out is of another schema: make it with empty_batch of this replay")

    def _fill(self, batch: Batch, method: Method, beta: float, normalise: Normalise) -> None:
        store, tree = self.store, self.tree
        rows = batch.layout.batch_size
        distinct = method == "without_replacement"
        before = self.rng.bit_generator.state if distinct else {}
        if not tree.total > 0.0:
            raise NotEnoughData("every priority is 0: there is nothing to draw")
        drawn = batch_kernel(
            _METHODS.index(method), beta, normalise == "memory", tree._nodes,
            tree._offsets, tree.capacity, self.rng.random(rows), self.shard, self.layout.chunk,
            *store.gather_arguments(batch.layout), batch.memory, batch.indices, batch.keys,
            batch.weights,
        )  # fmt: skip
        if drawn < rows:
            self.rng.bit_generator.state = before
            raise NotEnoughData(
                f"{rows} different transitions were asked for, only {drawn} have a priority > 0"
            )

    # To disk and back.

    def save(self, path: str | os.PathLike[str]) -> None:
        """A snapshot in the directory `path`; a later one writes only what is new.

        Others may go on writing and sampling. The snapshot before is there until this one is whole.
        Steps that wait for their n-step return are not in it. Raises CheckpointError.
        """
        with self.lock:
            self._close_packed()  # as a restore has it: what comes next goes the same way
        snapshot.save(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], buffer: NDArray[np.uint8] | None = None
    ) -> "PrioritizedReplay":
        """The replay of a snapshot; its draws go on bit for bit, its old keys are stale.

        Raises CheckpointError where there is none, or it is damaged.
        """
        manifest = snapshot.read_manifest(path)
        try:
            facts = dict(manifest["replay"])
            facts["schema"] = Schema.from_description(facts["schema"])
            settings = {name: facts[name] for name in cls._SETTINGS}
            replay = cls(**settings, buffer=buffer)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the snapshot in {path} is of no replay: {error}") from error
        snapshot.restore(replay, path, manifest)
        return replay

    def facts(self) -> dict[str, Any]:
        """What a snapshot holds of it besides memory and random state; JSON."""
        limits = ("samples_per_insert", "tolerance", "timeout_s")
        return {**super().facts(), **{name: getattr(self, name) for name in limits}}

    def take_over(self, leaves: NDArray[np.float64], facts: dict[str, Any]) -> None:
        """Go on from a snapshot."""
        super().take_over(leaves, facts)
        if self._limiter is not None:
            self._limiter = RateLimiter(self._limiter.config, committed=len(self))

    def stats(self) -> dict[str, float]:
        """Counters, by name.

        size: transitions that can be drawn; capacity: as given; effective_capacity: how many fit if
        those to come share frames like those that are there; bytes: of the memory.
        """
        with self.lock:
            ledger, size = self.ledger, len(self)
            counts = ledger.counts
            open_rows = 0
            if counts["granted"]:
                rows = self.store.header_rows
                open_rows = size - int(rows[ledger.live, COUNT].sum())
            effective = self.layout.capacity
            if counts["live"]:
                per_chunk = (size - open_rows) / counts["live"]
                most = open_rows + per_chunk * (self.store.slots - counts["granted"])
                effective = min(effective, int(most))
            return {
                "size": size,
                "capacity": self.layout.capacity,
                "effective_capacity": effective,
                "inserted": self.inserted,
                "sampled": self.sampled,
                "updates_applied": self.updates_applied,
                "updates_stale": self.updates_stale,
                "total_priority": self.tree.total,
                "bytes": self.layout.nbytes,
                **{f"slots_{name}": count for name, count in counts.items()},
            }
