"""Takes experience from any source into a replay: credit, limiter, eviction, dead actors' slots.

This is the one place that reclaims the slots of a dead client.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    COUNT,
    GRANT_SEQUENCE,
    GRANTED,
    INCARNATION,
    SEQUENCE,
    STATE,
)
from zapex.chunks.ledger import SlotLedger
from zapex.chunks.store import ChunkStore
from zapex.replay.core import ReplayLayout
from zapex.replay.limiter import LimiterConfig, RateLimiter
from zapex.transport import ExperienceSource


class Memory(Protocol):
    """What takes the chunks: a ReplayCore, or a relay's Outbox on an actor host."""

    store: ChunkStore
    ledger: SlotLedger
    layout: ReplayLayout

    def __len__(self) -> int:
        """Transitions that can be drawn."""

    def accept(self, slot: int) -> int:
        """Take over a committed slot. Returns how many transitions it holds."""

    def make_room(self, issued: int) -> None:
        """Evict or free slots that are not needed. issued: answers given to the learner."""


class Intake:
    """Takes over committed chunks and grants free slots; `do_work()` handles all that have come.

    An actor of S streams gets S slots whenever it holds fewer than S, so it never holds more than
    2 S. The limiter is charged when slots are granted. It is refunded when a chunk has fewer
    transitions than a slot can hold.

    The memory may come from an earlier process. Then whole chunks that were not taken over are
    taken over now. Slots whose grant was never sent are free again. Slots whose grant was sent stay
    granted until the live incarnation of the actor is known.
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
        self._last_grant = [0] * actors
        self._grants = 0
        self.granted: list[set[int]] = [set() for _ in range(actors)]  # slots that each actor holds
        self.waiting: set[int] = set()  # living actors that hold fewer slots than a full credit
        self.inserted = self.refused = 0
        rows = replay.store.header_rows
        # Read all states once. A slot that is committed after this counts as granted here, and its
        # commit comes through the actor's link.
        states = rows[:, STATE].copy()
        for slot in self._in_order(np.flatnonzero(states == COMMITTED)):
            self._take_over(slot)
        for slot in np.flatnonzero(states == GRANTED).tolist():
            actor = int(rows[slot, ACTOR])
            if rows[slot, GRANT_SEQUENCE] < source.next_grant(actor):
                self.granted[actor].add(slot)
            else:  # its state was stored, and the replay died before the grant was sent
                replay.ledger.reclaim([slot])
        granted = self._chunk * sum(map(len, self.granted))
        self.limiter = RateLimiter(limiter, committed=len(replay), granted=granted)

    def do_work(self, issued: int, released: int) -> int:
        """Take over, evict, grant. issued, released: the learner's answers given, and read."""
        work = 0
        changed = self._source.take_in()
        for actor in self._source.committers():
            for slot in self._source.committed(actor).tolist():
                self._accept(actor, slot)
                work += 1
        for started in changed:
            self._incarnations[started.actor] = started.incarnation
            self._take_back(started.actor, started.incarnation)
            self._look_at_credit(started.actor)
            work += 1
        self._replay.make_room(issued)
        work += self._replay.ledger.release(released)
        # The actor that waits longest is first: else a fast one could use all of the room.
        waiting = sorted(self.waiting, key=self._last_grant.__getitem__) if self._has_room() else ()
        for actor in waiting:
            work += self._grant(actor)
        return work

    def _look_at_credit(self, actor: int) -> None:
        """Note whether an actor waits, after its slots or its incarnation have changed."""
        if self._incarnations[actor] and len(self.granted[actor]) < self._streams:
            self.waiting.add(actor)
        else:
            self.waiting.discard(actor)

    @property
    def has_slots(self) -> bool:
        """Whether the free slots are enough for a full credit."""
        return self._replay.ledger.free >= self._streams

    def _has_room(self) -> bool:
        """Whether one more actor can be granted a full credit."""
        return self.has_slots and self.limiter.can_insert(self.charge)

    def _take_over(self, slot: int) -> int:
        """Take over a committed slot. Returns its transitions; 0: it is not whole, and free now."""
        if not 1 <= self._replay.store.header_rows[slot, COUNT] <= self._chunk:
            self.refused += 1
            self._replay.ledger.reclaim([slot])
            return 0
        count = self._replay.accept(slot)
        self.inserted += count
        return count

    def _in_order(self, slots: NDArray[np.int64]) -> list[int]:
        """Committed slots in the order in which they were filled, incarnation by incarnation."""
        rows = self._replay.store.header_rows[slots]
        ordered: list[int] = slots[np.lexsort((rows[:, SEQUENCE], rows[:, INCARNATION]))].tolist()
        return ordered

    def _accept(self, actor: int, slot: int) -> None:
        # The slot number comes from another process, so it is checked before it is used.
        if slot not in self.granted[actor] or self._replay.store.state(slot) != COMMITTED:
            self.refused += 1
            return
        self.granted[actor].discard(slot)
        self._look_at_credit(actor)
        count = self._take_over(slot)
        self.limiter.commit(count)
        self.limiter.refund(self._chunk - count)

    def _take_back(self, actor: int, incarnation: int) -> None:
        """Take over whole chunks of an actor's former incarnations; free their other slots.

        An incarnation is reported only when the former one is certainly dead.
        """
        rows = self._replay.store.header_rows
        left = [s for s in self.granted[actor] if rows[s, INCARNATION] != incarnation]
        whole = [s for s in left if self._replay.store.state(s) == COMMITTED]
        for slot in self._in_order(np.array(whole, np.int64)):
            self._accept(actor, slot)
        unpublished = self.granted[actor].intersection(left)
        self.granted[actor] -= unpublished
        self._replay.ledger.reclaim(sorted(unpublished))
        self.limiter.refund(self._chunk * len(unpublished))

    def _grant(self, actor: int) -> int:
        """Grant a full credit to an actor, or nothing."""
        ledger, incarnation = self._replay.ledger, self._incarnations[actor]
        if not self._has_room() or not self._source.has_room(actor, self._streams):
            return 0
        slots: NDArray[np.int64] = ledger.grant(
            self._streams, actor, incarnation, self._source.next_grant(actor)
        )
        self._grants += 1
        self._last_grant[actor] = self._grants
        self.granted[actor].update(slots.tolist())
        self._look_at_credit(actor)
        self.limiter.insert(self.charge)
        self._source.grant(actor, incarnation, slots)
        return 1
