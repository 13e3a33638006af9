"""The memory of a PrioritizedReplay, as writers, the server of its handle and snapshots use it."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.layout import COUNT, FREE, STATE
from zapex.errors import ConfigError, NotEnoughData, ReplayError
from zapex.library.handle import DrawPlace
from zapex.machine.segment import Segment, share_in_place
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.limiter import LimiterConfig, RateLimiter
from zapex.sumtree_numba import Method


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
    ) -> None:
        super().__init__(layout, alpha, eps, seed, min_size_to_sample, shard, buffer)
        self.timeout_s = timeout_s
        self.samples_per_insert, self.tolerance = samples_per_insert, tolerance
        self._limiter: RateLimiter | None = None
        if samples_per_insert:
            tolerance = tolerance or int(np.ceil(1024 * (1 + samples_per_insert)))
            insert = max(1, int(tolerance / 2 / samples_per_insert))
            limits = LimiterConfig(
                samples_per_insert=samples_per_insert,
                min_size_to_sample=min_size_to_sample,
                tolerance=tolerance,
                grant=insert,
                batch=max(1, int(tolerance - samples_per_insert * insert)),
                capacity=layout.capacity,
            )
            self._limiter = RateLimiter(limits, committed=len(self))
        self._changed = threading.Condition(self.lock)
        self._streams = 0  # streams with open chunks

    def can_sample(self, batch_size: int) -> bool:
        """Whether a batch of this size could be drawn at once."""
        with self.lock:
            self.catch_up()
            enough = len(self) >= max(batch_size, self.min_size_to_sample)
            return enough and (self._limiter is None or self._limiter.can_sample(batch_size))

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
                "total_priority": self.tree.total,
                "bytes": self.layout.nbytes,
                **{f"slots_{name}": count for name, count in counts.items()},
            }

    def fill(self, batch: Batch, beta: float, method: Method, by_memory: bool) -> None:
        """Draw a batch and copy its rows. by_memory: see ReplayInterface. Raises NotEnoughData."""
        rows = batch.layout.batch_size
        with self.lock:
            self.catch_up()
            limiter = self._limiter
            if limiter is not None:
                self._wait_until(lambda: limiter.can_sample(rows), NotEnoughData)
            self.demand(rows)
            draw = self.draw(rows, method, with_smallest=by_memory)
            draw.gather(self.store, batch, beta, by_memory=by_memory)
            self._count_sampled(rows)

    def issue(self, place: DrawPlace, method: Method, by_memory: bool) -> None:
        """Draw into `place`, for a reader that gathers by itself. The caller holds the lock.

        by_memory: the reader needs the smallest leaf. If slots of these keys are evicted later,
        they wait in quarantine until `released()` counts this answer. Raises NotEnoughData,
        ConfigError.
        """
        rows = len(place.keys)
        self.demand(rows)
        draw = self.draw(rows, method, with_smallest=by_memory)
        place.total[0], place.smallest[0] = draw.total, draw.smallest
        place.keys[:], place.indices[:], place.leaves[:] = draw.keys, draw.indices, draw.leaves
        self._count_sampled(rows)
        self.issued += 1

    def _count_sampled(self, batch_size: int) -> None:
        self.sampled += batch_size
        if self._limiter is not None:
            self._limiter.sample(batch_size)
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
        self._streams = wanted

    def release_streams(self, streams: int) -> None:
        """Announce streams that open no more chunks."""
        self._streams -= streams

    def admit(self, rows: int) -> None:
        """Wait until the limiter admits `rows` transitions. Raises ReplayError at the deadline."""
        limiter = self._limiter
        if limiter is not None:
            self._wait_until(lambda: limiter.can_insert(rows), ReplayError)

    def open_slot(self) -> int:
        """Get a slot to fill. If none is free, evict the oldest chunk."""
        ledger = self.ledger
        if not ledger.free:
            self.evict_oldest(self.issued)
            ledger.release(self.released())
        if not ledger.free:  # a reader still holds its answer: rows of this slot are torn for it
            ledger.release_oldest()
        return ledger.open()

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Free open slots without a row."""
        self.ledger.reclaim(slots.tolist())

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64],
    ) -> None:
        """Announce whole rows (R,) of open slots, |priorities| (-1: none), and `closed` slots."""
        count, ledger = len(indices), self.ledger
        if count:
            self._set_leaves(indices, magnitudes)
            ledger.live_transitions += count
            self.inserted += count
            if self._limiter is not None:
                self._limiter.insert(count)
                self._limiter.commit(count)
                self._changed.notify_all()
        for slot in closed.tolist():
            ledger.close(slot)
        while ledger.live_transitions > self.layout.capacity and ledger.oldest is not None:
            self.evict_oldest(self.issued)
            ledger.release(self.released())

    def settle(self) -> None:
        """Nothing to do: closed chunks can be drawn already."""

    # For the server of the handle, and for snapshots.

    def insert_waits(self, rows: int) -> str:
        """Why the limiter does not admit `rows` transitions now; "": it does."""
        limiter = self._limiter
        return "" if limiter is None or limiter.can_insert(rows) else limiter.explain()

    def sample_waits(self, batch_size: int) -> str:
        """Why the limiter does not allow a batch of this size now; "": it does."""
        limiter = self._limiter
        return "" if limiter is None or limiter.can_sample(batch_size) else limiter.explain()

    def share(self) -> Segment:
        """Move the memory into a segment, at the same addresses.

        Raises ConfigError if the memory is a user's buffer, SharedMemoryError if there is too
        little.
        """
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

    def _wait_until(self, ready: Callable[[], bool], error: type[ReplayError]) -> None:
        assert self._limiter is not None
        if not self._changed.wait_for(ready, self.timeout_s):
            raise error(f"after {self.timeout_s:g} s: {self._limiter.explain()}")
