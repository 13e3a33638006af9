"""Experience from any source into a replay: credit, limiter, eviction, what the dead left."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.chunk_store import ChunkStore
from zapex.rate_limiter import LimiterConfig, RateLimiter
from zapex.replay import ReplayLayout
from zapex.schema import (
    ACTOR,
    COMMITTED,
    COUNT,
    GRANT_SEQUENCE,
    GRANTED,
    INCARNATION,
    SEQUENCE,
    STATE,
)
from zapex.slot_ledger import SlotLedger
from zapex.transport import ExperienceSource


class Memory(Protocol):
    """Where chunks are taken over to: a ReplayCore, or what stands for one on an actor host."""

    store: ChunkStore
    ledger: SlotLedger
    layout: ReplayLayout

    def __len__(self) -> int:
        """Transitions that can be drawn."""

    def accept(self, slot: int) -> int:
        """A committed slot is its own from now on; how many transitions it holds."""

    def evict_excess(self, issued: int) -> int:
        """Let go of what is too much; how many transitions went."""


class Intake:
    """Takes over committed chunks and grants free slots; `do_work()` is one look at everything.

    An actor of S streams gets S slots whenever it holds fewer than that, so at most 2 S are out
    with it. The limiter is charged when slots are granted, and refunded when a chunk comes back
    short.

    On memory that was in use, whole chunks that nobody took over are taken over now, what was
    granted and never sent is free again, and what was sent stays granted until its actor's life is
    known.
    """

    def __init__(
        self,
        source: ExperienceSource,
        replay: Memory,
        limiter: LimiterConfig,
        *,
        actors: int,
        streams_per_actor: int,
    ) -> None:
        self._source, self._replay = source, replay
        self._streams = streams_per_actor
        self._chunk = replay.layout.chunk
        self.charge = self._streams * self._chunk  # transitions that one grant may bring
        self._incarnations = [0] * actors
        self._granted: list[set[int]] = [set() for _ in range(actors)]
        self.inserted = self.evicted = self.refused = 0
        rows = replay.store.header_rows
        # One look at all states: who commits meanwhile is granted here, and heard through its link.
        states = rows[:, STATE].copy()
        for slot in self._in_order(np.flatnonzero(states == COMMITTED)):
            if self._is_whole(slot):
                self.inserted += replay.accept(slot)
            else:
                self.refused += 1
                replay.ledger.reclaim([slot])
        granted = 0
        for slot in np.flatnonzero(states == GRANTED).tolist():
            actor = int(rows[slot, ACTOR])
            if rows[slot, GRANT_SEQUENCE] < source.next_grant(actor):
                self._granted[actor].add(slot)
                granted += 1
            else:  # its state was stored, and the replay died before the link carried it
                replay.ledger.reclaim([slot])
        self.limiter = RateLimiter(limiter, committed=len(replay), granted=granted * self._chunk)

    @property
    def waiting(self) -> list[int]:
        """Actors that have less than a full credit."""
        return [
            actor
            for actor, incarnation in enumerate(self._incarnations)
            if incarnation and len(self._granted[actor]) < self._streams
        ]

    def do_work(self, issued: int, released: int) -> int:
        """Take over, evict, grant. `issued`, `released`: answers given to the learner and done."""
        work = 0
        changed = self._source.lives()
        for actor in range(len(self._incarnations)):
            for slot in self._source.committed(actor).tolist():
                self._accept(actor, slot)
                work += 1
        for life in changed:
            self._incarnations[life.actor] = life.incarnation
            self._take_back(life.actor, life.incarnation)
            work += 1
        self.evicted += self._replay.evict_excess(issued)
        work += self._replay.ledger.release(released)
        for actor in self.waiting:
            work += self._grant(actor)
        return work

    def _is_whole(self, slot: int) -> bool:
        """The count of a committed slot is one that a chunk can have."""
        return 1 <= int(self._replay.store.header_rows[slot, COUNT]) <= self._chunk

    def _in_order(self, slots: NDArray[np.int64]) -> list[int]:
        """Committed slots as their actors filled them, life by life."""
        rows = self._replay.store.header_rows[slots]
        ordered: list[int] = slots[np.lexsort((rows[:, SEQUENCE], rows[:, INCARNATION]))].tolist()
        return ordered

    def _accept(self, actor: int, slot: int) -> None:
        # A slot number came from another process: it is checked before anything follows it.
        if slot not in self._granted[actor] or self._replay.store.state(slot) != COMMITTED:
            self.refused += 1
            return
        self._granted[actor].discard(slot)
        if not self._is_whole(slot):
            self.refused += 1
            self._reclaim([slot])
            return
        count = self._replay.accept(slot)
        self.inserted += count
        self.limiter.commit(count)
        self.limiter.refund(self._chunk - count)

    def _take_back(self, actor: int, incarnation: int) -> None:
        """What former lives of an actor held: whole chunks are taken over, the rest is free again.

        Whoever reports lives does so only when the former one is dead for sure.
        """
        rows = self._replay.store.header_rows
        left = [s for s in self._granted[actor] if rows[s, INCARNATION] != incarnation]
        whole = [s for s in left if self._replay.store.state(s) == COMMITTED]
        for slot in self._in_order(np.array(whole, np.int64)):
            self._accept(actor, slot)
        unpublished = self._granted[actor].intersection(left)
        self._granted[actor] -= unpublished
        self._reclaim(sorted(unpublished))

    def _reclaim(self, slots: list[int]) -> None:
        self._replay.ledger.reclaim(slots)
        for _ in slots:
            self.limiter.refund(self._chunk)

    def _grant(self, actor: int) -> int:
        """A full credit for an actor, or nothing."""
        ledger, incarnation = self._replay.ledger, self._incarnations[actor]
        if ledger.free < self._streams or not self.limiter.can_insert(self.charge):
            return 0
        if not self._source.has_room(actor, self._streams):
            return 0
        slots: NDArray[np.int64] = ledger.grant(
            self._streams, actor, incarnation, self._source.next_grant(actor)
        )
        self._granted[actor].update(slots.tolist())
        self.limiter.insert(self.charge)
        self._source.grant(actor, incarnation, slots)
        return 1
