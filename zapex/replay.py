"""Prioritized replay: the library's front door."""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from zapex import snapshot
from zapex.batch import Batch
from zapex.errors import CheckpointError, ConfigError, NotEnoughData, ReplayError
from zapex.handle import Handle, check_main_guard
from zapex.rate_limiter import LimiterConfig, RateLimiter
from zapex.replay_core import Draw, Method, ReplayCore, ReplayLayout, importance_weights
from zapex.replay_face import Extender, Normalise, ReplayFace, Rows
from zapex.sampling import batch_kernel
from zapex.schema import COUNT, FREE, STATE, Schema
from zapex.shm_segment import Segment, share_in_place
from zapex.writer import Autoreset, Writer

if TYPE_CHECKING:
    from zapex.handle_server import HandleServer

__all__ = ["Draw", "Method", "PrioritizedReplay", "ReplayLayout", "importance_weights"]

_METHODS = get_args(Method)  # in the order of sampling.py


class PrioritizedReplay(ReplayCore, ReplayFace):
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

    _FRACTIONS = frozenset({"alpha", "eps", "samples_per_insert", "timeout_s"})
    _SETTINGS = _FRACTIONS | {
        "capacity", "schema", "streams", "chunk", "min_size_to_sample", "tolerance", "shard",
    }  # fmt: skip

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
        self._segment: Segment | None = None
        self._server: HandleServer | None = None
        layout = ReplayLayout(schema, capacity, streams, chunk)
        ReplayCore.__init__(self, layout, alpha, eps, seed, min_size_to_sample, shard, buffer)
        ReplayFace.__init__(self, schema)
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
        self._streams = 0  # whose chunks are open
        self._extender = Extender(self)

    # In: streams of steps, or whole transitions.

    def writer(self, num_envs: int, autoreset: Autoreset = "next_step") -> Writer:
        """Streams of steps of vectorised environments; see Writer."""
        with self.lock:
            if num_envs < 1:
                raise ConfigError(f"num_envs must be at least 1, got {num_envs}")
            self.reserve_streams(num_envs)
            return Writer(self, num_envs, autoreset)

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        with self.lock:
            return self._extender.extend(rows)

    # What writers call, with the lock held.

    def reserve_streams(self, streams: int) -> None:
        """So many more streams will hold an open chunk each. Raises ConfigError."""
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
        ledger = self.ledger
        if not ledger.free:
            self._evict_oldest(self.issued)
            ledger.release(self.released())
        if not ledger.free:  # a reader holds on to its answer: rows of this slot come back torn
            ledger.release_oldest()
        return ledger.open()

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Open slots without a row are free again."""
        self.ledger.reclaim(slots.tolist())

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
                self._limiter.charge(count)
                self._limiter.commit(count)
                self._changed.notify_all()
        if closed is not None:
            for slot in closed.tolist():
                self.ledger.close(slot)
        while (
            self.ledger.live_transitions > self.layout.capacity and self.ledger.oldest is not None
        ):
            self._evict_oldest(self.issued)
            self.ledger.release(self.released())

    def _wait_until(self, ready: Callable[[], bool], error: type[ReplayError]) -> None:
        assert self._limiter is not None
        if not self._changed.wait_for(ready, self.timeout_s):
            raise error(f"after {self.timeout_s:g} s: {self._limiter.explain()}")

    def settle(self) -> None:
        """What was closed is there for everybody already."""

    # Out: batches.

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        with self.lock:
            enough = len(self) >= max(batch_size, self.min_size_to_sample)
            return enough and (self._limiter is None or self._limiter.can_sample(batch_size))

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
        batch = self._batch_for(out, batch_size, method, normalise, _METHODS)
        with self.lock:
            self.catch_up()
            limiter = self._limiter
            if limiter is not None:
                self._wait_until(lambda: limiter.can_sample(batch_size), NotEnoughData)
            self.demand(max(self.min_size_to_sample, batch_size))
            self._fill(batch, method, beta, normalise)
            self._count_sampled(batch_size)
        return batch

    # What the server of a handle calls, with the lock held.

    def insert_waits(self, rows: int) -> str:
        """Why the limiter does not let so many transitions in now; "": it does."""
        limiter = self._limiter
        return "" if limiter is None or limiter.can_insert(rows) else limiter.explain()

    def sample_waits(self, batch_size: int) -> str:
        """Why the limiter does not let so many be drawn now; "": it does."""
        limiter = self._limiter
        return "" if limiter is None or limiter.can_sample(batch_size) else limiter.explain()

    def issue(
        self, batch_size: int, method: Method, by_memory: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        """Draw for a reader that gathers by itself: keys, probabilities, smallest probability.

        The last is of the memory where asked for, else 0. Slots of these keys that are evicted from
        now on wait in quarantine until `released()` counts this answer. Raises NotEnoughData.
        """
        self.demand(max(self.min_size_to_sample, batch_size))
        indices, probabilities = self.draw_indices(batch_size, method)
        self._count_sampled(batch_size)
        self.issued += 1
        smallest = self.tree.min_positive / self.tree.total if by_memory else 0.0
        return self.store.keys_of(indices, self.shard), probabilities, smallest

    def _count_sampled(self, batch_size: int) -> None:
        self.sampled += batch_size
        if self._limiter is not None:
            self._limiter.sample(batch_size)
            self._changed.notify_all()

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

    # To other processes.

    def catch_up(self) -> None:
        """Take in what clients have committed, with the lock held."""
        if self._server is not None:
            self._server.take_in()

    def __len__(self) -> int:
        if self._server is not None:
            with self.lock:
                self.catch_up()
        return super().__len__()

    @property
    def handle(self) -> Handle:
        """What other processes of this host need for `zapex.connect`: send it to them.

        From the first time on, the memory is shared (once for all: what is in it is copied) and a
        thread of this process serves clients, until `close`. Raises SharedMemoryError where there
        is too little memory, ConfigError under `buffer`, or where a new process imports the script.
        """
        check_main_guard()
        with self.lock:
            if self._server is None or not self._server.serves:
                if self._segment is None:
                    self._segment = self._share()
                from zapex.handle_server import HandleServer

                self._server = HandleServer(self, self._segment)
            return self._server.handle

    def _share(self) -> Segment:
        if not self._owns_memory:
            raise ConfigError(
                "a handle needs memory of the replay's own: make the replay without buffer="
            )
        store, rows = self.store, self.store.header_rows
        bodies = store.bodies_offset
        used = [(0, bodies), (self.layout.tree_offset, self.layout.nbytes)]
        for slot in np.flatnonzero(rows[:, STATE] != FREE).tolist():
            used.append((store.body(slot), store.body(slot + 1)))
        return share_in_place(self.memory, used)

    def close(self) -> None:
        """Serve other processes no more; their next calls raise PeerDied. The rest goes on."""
        with self.lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    # To disk and back.

    def save(self, path: str | os.PathLike[str]) -> None:
        """A snapshot in the directory `path`; a later one writes only what is new.

        Others may go on writing and sampling. The snapshot before is there until this one is whole.
        Steps that wait for their n-step return are not in it. Raises CheckpointError.
        """
        with self.lock:
            self.catch_up()
            self._extender.close()  # as a restore has it: what comes next goes the same way
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
            for name in cls._SETTINGS - {"schema"}:
                kinds = (int, float) if name in cls._FRACTIONS else (int,)
                if type(settings[name]) not in kinds:
                    raise TypeError(f"{name} is {settings[name]!r}")
            layout = ReplayLayout(*(facts[n] for n in ("schema", "capacity", "streams", "chunk")))
            state = snapshot.read_state(path, manifest, layout)
            replay = cls(**settings, buffer=buffer)
            snapshot.restore(replay, path, manifest, state)
        except snapshot.UNREADABLE as error:
            raise CheckpointError(f"the snapshot in {path} cannot be used: {error}") from error
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
                "effective_capacity": effective,
                "inserted": self.inserted,
                "sampled": self.sampled,
                "updates_applied": self.updates_applied,
                "updates_stale": self.updates_stale,
                "total_priority": self.tree.total,
                "bytes": self.layout.nbytes,
                **{f"slots_{name}": count for name, count in counts.items()},
            }
