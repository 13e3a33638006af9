"""PrioritizedReplay: the replay in the process that uses it."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.arguments import MOST_TIMEOUT_S, whole, within
from zapex.chunks.batch import Batch, SequenceBatch
from zapex.chunks.layout import COUNT, FREE, HEADER_WORDS, STATE
from zapex.chunks.schema import Schema
from zapex.errors import CheckpointError, ConfigError, NotEnoughData, ReplayError
from zapex.library.handle import Handle, check_main_guard
from zapex.library.interface import Extender, ReplayInterface, Rows
from zapex.library.writer import Autoreset, Writer
from zapex.machine.segment import Segment, share_in_place
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.draw import Draw
from zapex.replay.limiter import LimiterConfig, RateLimiter
from zapex.replay.sequences import Sequences, follow, gather, weigh
from zapex.replay.snapshots import (
    UNORDERED_FORMAT,
    UNREADABLE,
    Saves,
    read_manifest,
    read_state,
    restore,
    save,
)
from zapex.sumtree_numba import Method

if TYPE_CHECKING:
    from zapex.library.handle_server import HandleServer


class ForkedLock:
    """The lock of a replay in a fork of its owner, which has only a copy: it can't be taken."""

    def __enter__(self) -> NoReturn:
        raise ReplayError(
            "this process is a fork of the one that owns the replay, and would use a copy of it: "
            "read replay.handle before the fork, and use zapex.connect(handle) here"
        )

    def __exit__(self, *_: object) -> None:
        """Never entered."""


class OwnedReplay(ReplayCore):
    """A ReplayCore with a limiter, whose slots are live while writers fill them.

    It is the SlotProvider of the writers of its own process: they hold `lock` during a call. The
    arguments are those of PrioritizedReplay.
    """

    _SETTINGS = (*ReplayCore._SETTINGS, "samples_per_insert", "tolerance", "timeout_s")

    def __init__(
        self,
        layout: ReplayLayout,
        alpha: float = 0.6,
        eps: float = 1e-6,
        seed: int | None = None,
        min_size_to_sample: int = 1,
        shard: int = 0,
        buffer: NDArray[np.uint8] | None = None,
        *,
        samples_per_insert: float = 0.0,
        tolerance: int = 0,
        timeout_s: float = 0.0,
        floor: float = 0.0,
        recency: float = 0.0,
    ) -> None:
        super().__init__(
            layout, alpha, eps, seed, min_size_to_sample, shard, buffer,
            floor=floor, recency=recency,
        )  # fmt: skip
        self.timeout_s = timeout_s
        self.samples_per_insert, self.tolerance = samples_per_insert, tolerance
        self._limiter: RateLimiter | None = None
        if samples_per_insert:
            limits = LimiterConfig(
                samples_per_insert=samples_per_insert,
                min_size_to_sample=min_size_to_sample,
                tolerance=tolerance or math.ceil(1024 * (1 + samples_per_insert)),
                grant=1,
                batch=1,
                capacity=layout.capacity,
            )
            self._limiter = RateLimiter(limits, committed=len(self))
        self._changed = threading.Condition(self.lock)
        self._streams = 0  # streams with open chunks
        self.issued = 0  # answers given to clients that gather by themselves
        self._segment: Segment | None = None
        self.server: HandleServer | None = None
        _OWNED.add(self)

    def can_sample(self, batch_size: int) -> bool:
        """Whether a batch of this size could be drawn at once."""
        with self.lock:
            self.catch_up()
            allowed = not self.sample_waits(batch_size)
            return allowed and len(self) >= max(batch_size, self.min_size_to_sample)

    def stats(self) -> dict[str, float]:
        """Counters by name. See ReplayInterface.stats."""
        with self.lock:
            self.catch_up()
            size, ledger = len(self), self.ledger
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
                "chunk": self.layout.chunk,
                "effective_capacity": effective,
                **{name: getattr(self, name) for name in self._COUNTERS},
                "total_priority": self.total,
                "bytes": self.layout.nbytes,
                **{f"slots_{name}": count for name, count in counts.items()},
            }

    def fill(self, batch: Batch, beta: float, method: Method, by_memory: bool) -> None:
        """Draw a batch and copy its rows. by_memory: see ReplayInterface. Raises NotEnoughData."""
        rows = batch.layout.batch_size
        with self.lock:
            self.catch_up()
            if self._limiter is not None:
                self._wait_while(lambda: self.sample_waits(rows), NotEnoughData)
            draw = self.draw_counted(rows, method, by_memory)
            draw.gather(self.store, batch, beta, by_memory=by_memory)

    def fill_sequences(self, batch: SequenceBatch, asked: Sequences, beta: float) -> None:
        """Draw sequences and copy them into `batch`. Raises NotEnoughData."""
        rows = batch.layout.batch_size
        with self.lock:
            self.catch_up()
            if self._limiter is not None:
                steps = rows * asked.length
                self._wait_while(lambda: self.sample_waits(steps), NotEnoughData)
            draw = self.draw_sequences(rows, asked)
            gather(draw, self.store, batch, asked.stride)
            weigh(batch, draw.leaves[:: len(draw.leaves) // rows], beta)

    def draw_sequences(self, rows: int, asked: Sequences) -> Draw:
        """Draw sequences, with the lock held. They count as their steps after the burn-in.

        Raises NotEnoughData, ReplayError.
        """
        draw = self.draw(rows, with_smallest=False)
        layout = asked.layout(self.layout.schema, rows)
        draw = follow(draw, layout, asked.stride, self.store, self.shard, self.tree.arrays[0])
        draw.leaves *= self._scale
        self._count_sampled(rows * asked.length)
        return draw

    def draw_counted(self, rows: int, method: Method, by_memory: bool) -> Draw:
        """Draw a batch, with the lock held. by_memory: with the smallest leaf.

        Raises NotEnoughData, ConfigError.
        """
        self.demand(rows)
        draw = self.draw(rows, method, with_smallest=by_memory)
        self._count_sampled(rows)
        return draw

    def _count_sampled(self, rows: int) -> None:
        self.sampled += rows
        if self._limiter is not None:
            self._limiter.sample(rows)
            self._changed.notify_all()

    # For writers, with the lock held; see SlotProvider.

    def reserve_streams(self, streams: int) -> None:
        """Announce `streams` more streams, each with an open chunk. Raises ConfigError."""
        wanted, chunk = self._streams + streams, self.layout.chunk
        if 2 * wanted * chunk > self.layout.capacity:
            raise ConfigError(
                f"{wanted} streams (extend is one) with open chunks of {chunk} transitions take "
                f"more than half of the capacity of {self.layout.capacity}: give the replay "
                f"streams={wanted} for shorter chunks, raise capacity, or close() unused writers"
            )
        self.insert_waits(streams * self.layout.schema.n_step)  # the tolerance fits such steps
        self._streams = wanted

    def release_streams(self, streams: int, slots: NDArray[np.int64]) -> None:
        """Announce streams that open no more chunks; free their open `slots` without a row."""
        self._streams -= streams
        self.ledger.reclaim(slots.tolist())

    def give_up(self) -> None:
        """Nothing to do: there is no link."""

    def admit(self, rows: int) -> None:
        """Wait until the limiter admits `rows` transitions. Raises ReplayError at the deadline."""
        if self._limiter is not None:
            self._wait_while(lambda: self.insert_waits(rows), ReplayError)

    def open_slot(self, *, elsewhere: bool = False) -> int:
        """Get a slot to fill, here or elsewhere. If none is free, evict the oldest chunk."""
        ledger = self.ledger
        if not ledger.free:
            self._evict()
        if not ledger.free:  # a reader still holds its answer: rows of this slot are torn for it
            ledger.release_oldest()
        return ledger.open(elsewhere=elsewhere)

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64],
    ) -> None:
        """Announce whole rows (R,) of open slots, |priorities| (-1: none), and `closed` slots."""
        if len(indices):
            self._add_rows(indices, magnitudes)
        for slot in closed.tolist():
            self.ledger.close(slot)
        self.evict_surplus()

    def _add_rows(self, indices: NDArray[np.int64], magnitudes: NDArray[np.float64]) -> None:
        count = len(indices)
        self._set_leaves(indices, magnitudes)
        self.ledger.live_transitions += count
        self.inserted += count
        if self._limiter is not None:
            self._limiter.insert(count)
            self._limiter.commit(count)
            self._changed.notify_all()

    def evict_surplus(self) -> None:
        """Evict the oldest chunks until the capacity is not exceeded; open chunks stay."""
        ledger = self.ledger
        while ledger.live_transitions > self.layout.capacity and ledger.oldest is not None:
            self._evict()

    def _evict(self) -> None:
        self.evict_oldest(self.issued)
        self.ledger.release(self.issued if self.server is None else self.server.released)

    def settle(self) -> None:
        """Nothing to do: closed chunks can be drawn already."""

    # For other processes.

    @property
    def handle(self) -> Handle:
        """What they connect with. The caller holds the lock. Raises as PrioritizedReplay.handle."""
        if self.server is None or not self.server.serves:
            if self._segment is None:
                self._segment = self._share()
            from zapex.library.handle_server import HandleServer

            self.server = HandleServer(self, self._segment)
        return self.server.handle

    def catch_up(self) -> None:
        """Take in what they have written. The caller holds the lock."""
        if self.server is not None:
            self.server.take_in()

    def take_rows(self) -> None:
        """Let rows be drawn that they have written since the last call."""
        indices = self.ledger.new_rows()
        if len(indices):
            magnitudes = self.store.columns("priority")[np.divmod(indices, self.layout.chunk)]
            self._add_rows(indices, magnitudes.astype(np.float64))

    def accept(self, slot: int) -> int:
        """Take over a slot that one of them has filled. Returns how many transitions it holds."""
        if self.ledger.taken[slot] < 0:  # its rows came over a network, all at once
            return super().accept(slot)
        self.take_rows()  # the last ones
        self.ledger.close(slot)
        return self.store.headers.item(slot * HEADER_WORDS + COUNT)

    # The limiter.

    def insert_waits(self, rows: int) -> str:
        """Why the limiter does not admit `rows` transitions now; "": it does.

        Raises ConfigError: the given tolerance is too small for so many at once.
        """
        limiter = self._limiter
        if limiter is None:
            return ""
        self._fit_tolerance(limiter, grant=rows)
        return "" if limiter.can_insert(rows) else limiter.explain()

    def sample_waits(self, batch_size: int) -> str:
        """Why the limiter does not allow a batch of this size now; "": it does.

        Raises ConfigError: the given tolerance is too small for so many at once.
        """
        limiter = self._limiter
        if limiter is None:
            return ""
        self._fit_tolerance(limiter, batch=batch_size)
        return "" if limiter.can_sample(batch_size) else limiter.explain(batch_size)

    def _fit_tolerance(self, limiter: RateLimiter, grant: int = 0, batch: int = 0) -> None:
        """Take note of the largest grant and batch; without a given tolerance, enlarge it."""
        known = limiter.config
        if grant <= known.grant and batch <= known.batch:
            return
        grant, batch = max(grant, known.grant), max(batch, known.batch)
        least = math.ceil(Fraction(self.samples_per_insert) * grant) + batch
        tolerance = self.tolerance or max(known.tolerance, 2 * least)
        limiter.config = replace(known, grant=grant, batch=batch, tolerance=tolerance)

    def _wait_while(self, waits: Callable[[], str], error: type[ReplayError]) -> None:
        if not self._changed.wait_for(lambda: not waits(), self.timeout_s):
            raise error(f"after {self.timeout_s:g} s: {waits()}")

    def _share(self) -> Segment:
        """Move the memory into a segment, at the same addresses."""
        if not self._owns_memory:
            raise ConfigError(
                "a handle needs memory that the replay allocates: make the replay without buffer="
            )
        store, rows = self.store, self.store.header_rows
        used = [(0, store.bodies_offset), (self.layout.tree_offset, self.layout.nbytes)]
        for slot in np.flatnonzero(rows[:, STATE] != FREE).tolist():
            used.append((store.body(slot), store.body(slot + 1)))
        return share_in_place(self.memory, used)

    def take_over(self, leaves: NDArray[np.float64], facts: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        super().take_over(leaves, facts)
        if self._limiter is not None:
            self._limiter = RateLimiter(self._limiter.config, committed=len(self))


_OWNED: weakref.WeakSet[OwnedReplay] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for replay in list(_OWNED):
        replay.lock = ForkedLock()  # type: ignore[assignment]


os.register_at_fork(after_in_child=_after_fork_in_child)


class PrioritizedReplay(ReplayInterface):
    """Prioritized experience replay (Schaul et al. 2016) that stores each frame once.

    Transitions come in through a `writer` (steps of vector environments; n-step returns are
    computed) or `extend` (whole transitions). `sample` draws a batch by priority,
    `update_priorities` sets new priorities from TD errors. When the memory is full the oldest
    chunk of transitions is evicted. Public methods are thread-safe. For example:

        import numpy as np
        from zapex import Column, PrioritizedReplay, Schema

        schema = Schema({"obs": Column((4,), np.float32), "action": Column((), np.int64)}, n_step=1)
        replay = PrioritizedReplay(100_000, schema, alpha=0.6, seed=1)
        states = np.random.default_rng(0).normal(size=(65, 4)).astype(np.float32)
        replay.extend(
            obs=states[:-1], action=np.zeros(64, np.int64), reward=np.ones(64),
            next_obs=states[1:], terminated=np.zeros(64, bool),
        )
        batch = replay.sample(32, beta=0.4)
        # A target is batch.reward + batch.discount * Q(batch.next_obs).
        # Multiply each loss by batch.weights.
        td_errors = np.ones(32)
        applied, stale = replay.update_priorities(batch.keys, td_errors)

    `Schema.from_spaces` makes the schema of an environment. `batch.torch()` gives tensors. Other
    processes use the same replay through `zapex.connect(replay.handle)`.

    Args:
        capacity: how many transitions to keep. Transitions that share no frames take more memory;
            `stats()["effective_capacity"]` says how many of those fit.
        schema: the columns of a transition.
        alpha: how much priorities matter: a transition is drawn in proportion to
            (|priority| + eps)^alpha. 0 draws uniformly.
        eps: added to each |priority|, so that every transition can be drawn.
        seed: of the draws; None: different each time.
        floor: a |priority| + eps below it counts as this much. With floor=1 and the Huber loss
            without weights (beta=0), this is LAP (Fujimoto et al. 2020, arXiv 2007.06049).
        recency: of transitions with equal priorities, one is drawn exp(-recency age / capacity)
            times as often as a new one, where its age is how many transitions came after it, by
            chunks: the truncated geometric distribution of arXiv 2605.10236, times priority. 0 to
            40; 0: age does not count. Importance weights correct for it as for priorities.
        streams: about how many environments will write; more streams need shorter chunks.
        chunk: transitions per chunk; 0: chosen automatically.
        min_size_to_sample: `sample` raises NotEnoughData with fewer transitions.
        samples_per_insert: how often a transition is drawn on average; 0 sets no limit. The side
            that is ahead by more than `tolerance` waits for the other, at most `timeout_s`. With
            one thread, call `can_sample` first.
        tolerance: of samples_per_insert, in samples; 0: fits the writers and batches in use. It
            must be at least the samples for one insert (the streams of a writer x n_step, or the
            rows of an `extend`) plus one batch.
        timeout_s: how long a call waits for the limiter, in seconds.
        shard: 0 to 127, part of every key; it distinguishes several replays.
        buffer: uint8 memory to use, aligned to a cache line, zero when new; transitions in it are
            kept. None: allocate.

    Raises:
        ConfigError: a value is out of range, or values do not fit together.
        SharedMemoryError: the buffer is too small, read-only or not aligned.
    """

    def __init__(
        self,
        capacity: int,
        schema: Schema,
        alpha: float = 0.6,
        eps: float = 1e-6,
        seed: int | None = None,
        *,
        floor: float = 0.0,
        recency: float = 0.0,
        streams: int = 8,
        chunk: int = 0,
        min_size_to_sample: int = 1,
        samples_per_insert: float = 0.0,
        tolerance: int = 0,
        timeout_s: float = 0.0,
        shard: int = 0,
        buffer: NDArray[np.uint8] | None = None,
    ) -> None:
        super().__init__(schema)
        layout = ReplayLayout(
            schema, whole(capacity, "capacity"), whole(streams, "streams"), whole(chunk, "chunk")
        )
        if seed is not None and whole(seed, "seed") < 0:
            raise ConfigError(f"seed must be 0 or more, got {seed}")
        samples_per_insert = within(samples_per_insert, "samples_per_insert", 0.0, 1e6)
        timeout_s = within(timeout_s, "timeout_s", 0.0, MOST_TIMEOUT_S)
        self.core = OwnedReplay(
            layout,
            alpha,
            eps,
            seed,
            whole(min_size_to_sample, "min_size_to_sample"),
            whole(shard, "shard"),
            buffer,
            samples_per_insert=samples_per_insert,
            tolerance=whole(tolerance, "tolerance"),
            timeout_s=timeout_s,
            floor=floor,
            recency=recency,
        )
        if layout.capacity < 2 * layout.chunk:
            raise ConfigError(
                f"capacity must be at least {2 * layout.chunk}, two chunks of {layout.chunk} "
                f"transitions, got {layout.capacity}"
            )
        self._extender = Extender(self.core)
        self._saves = Saves()

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        return self.core.can_sample(batch_size)

    def stats(self) -> dict[str, float]:
        """Counters by name. See ReplayInterface.stats."""
        return self.core.stats()

    def __repr__(self) -> str:
        capacity = self.core.layout.capacity
        return f"{super().__repr__()[:-1]}; {len(self.core)} of {capacity} transitions>"

    def __len__(self) -> int:
        with self.core.lock:
            self.core.catch_up()
            return len(self.core)

    def _writer(self, num_envs: int, autoreset: Autoreset) -> Writer:
        with self.core.lock:
            self.core.reserve_streams(num_envs)
            return Writer(self.core, num_envs, autoreset)

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        with self.core.lock:
            return self._extender.extend(rows)

    def _holds(self, key: int) -> bool:
        return self.core.store.holds(key)

    def _draw(self, batch: Batch, beta: float, method: Method, by_memory: bool) -> None:
        self.core.fill(batch, beta, method, by_memory)

    def _draw_sequences(self, batch: SequenceBatch, asked: Sequences, beta: float) -> None:
        self.core.fill_sequences(batch, asked, beta)

    def _update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> tuple[int, int]:
        with self.core.lock:
            self.core.catch_up()
            return self.core.reprioritise(keys, priorities)

    # For other processes.

    @property
    def handle(self) -> Handle:
        """A small object that other processes of this host give to `zapex.connect`.

        Send it as an argument of `multiprocessing.Process` or through a pipe. The first access
        moves the memory into shared memory (used parts are copied once) and starts a thread
        that serves clients until `close`.

        Raises:
            SharedMemoryError: there is too little memory.
            ConfigError: the replay was made with `buffer`, or a child process has imported a script
                that has no main guard.
        """
        check_main_guard()
        with self.core.lock:
            return self.core.handle

    @property
    def links(self) -> int:
        """Links of clients: one per sampling client, one per extending client, one per writer."""
        return 0 if self.core.server is None else self.core.server.links

    def close(self) -> None:
        """Stop serving other processes: their next calls raise PeerDied. This one continues."""
        with self.core.lock:
            server = self.core.server
        if server is not None:
            server.close()

    # Snapshots.

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a snapshot into a directory; a later save writes only what is new.

        Other threads may write and sample during the save. The previous snapshot stays valid until
        this one is whole. Steps that wait for their n-step return are not saved.

        Args:
            path: the directory; it is created if it is missing.
            overwrite: also replace a snapshot of another replay, which this one was not loaded
                from.

        Raises:
            CheckpointError: it cannot be written, or has a snapshot of another replay.
        """
        with self.core.lock:
            self.core.catch_up()
            self._extender.close()  # as after a load, so that both replays continue in the same way
        save(self.core, self._saves, path, overwrite=overwrite)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], buffer: NDArray[np.uint8] | None = None
    ) -> PrioritizedReplay:
        """Make a replay from a snapshot. Draws continue bit for bit; old keys are stale.

        Args:
            path: the directory of `save`.
            buffer: as in the constructor.

        Raises:
            CheckpointError: there is no snapshot, or it is damaged.
        """
        loaded, saves = load(cls, path, buffer)
        loaded._saves = saves
        return loaded


# The settings of a replay, besides its schema.
_FRACTIONS = frozenset({"alpha", "eps", "floor", "recency", "samples_per_insert", "timeout_s"})
_COUNTS = frozenset({"capacity", "streams", "chunk", "min_size_to_sample", "tolerance", "shard"})


def load(
    make: type[PrioritizedReplay], path: str | os.PathLike[str], buffer: NDArray[np.uint8] | None
) -> tuple[PrioritizedReplay, Saves]:
    """Make a replay with a snapshot's settings, and fill it. Raises CheckpointError."""
    manifest = read_manifest(path)
    try:
        facts = {"floor": 0.0, "recency": 0.0, **manifest["replay"]}  # older ones have neither
        facts["schema"] = Schema.from_description(facts["schema"])
        for name in _FRACTIONS | _COUNTS:
            if type(facts[name]) not in ((int, float) if name in _FRACTIONS else (int,)):
                raise TypeError(f"{name} is {facts[name]!r}")
        _check_order(manifest["format"], facts["schema"])
        layout = ReplayLayout(*(facts[n] for n in ("schema", "capacity", "streams", "chunk")))
        state = read_state(path, manifest, layout)
        settings = {name: facts[name] for name in ("schema", *_FRACTIONS, *_COUNTS)}
        replay = make(**settings, buffer=buffer)
        return replay, restore(replay.core, path, manifest, state)
    except UNREADABLE as error:
        raise CheckpointError(f"the snapshot in {path} cannot be used: {error}") from error


def _check_order(form: int, schema: Schema) -> None:
    """Raise CheckpointError if the columns of an old snapshot may lie in another order."""
    for columns in (schema.obs_columns, schema.step_columns):
        if form == UNORDERED_FORMAT and len(columns) > 1:
            raise CheckpointError(
                f"the snapshot was written by a version that did not note the order of "
                f"{sorted(columns)}: they may be swapped, so it is not used"
            )
