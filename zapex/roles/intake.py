"""Takes experience from any source into a replay: credit, limiter, eviction, dead actors' slots.

This is the one place that reclaims the slots of a dead client.
"""

from collections import defaultdict
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
    LIVE,
    SEQUENCE,
    STATE,
)
from zapex.chunks.ledger import SlotLedger
from zapex.chunks.store import ChunkStore
from zapex.replay.core import ReplayLayout
from zapex.replay.limiter import LimiterConfig, RateLimiter
from zapex.transport import CommitSource, ExperienceSource

_FILLED = (COMMITTED, LIVE)  # LIVE: a slot whose rows could be drawn as they came


class Memory(Protocol):
    """What takes the chunks: a ReplayCore, or a relay's Outbox on an actor host."""

    store: ChunkStore
    ledger: SlotLedger
    layout: ReplayLayout

    def __len__(self) -> int:
        """Transitions that can be drawn."""

    def accept(self, slot: int) -> int:
        """Take over a filled slot. Returns how many transitions it holds."""

    def make_room(self, issued: int) -> None:
        """Evict or free slots that are not needed. issued: answers given to the learner."""


class Reclaimer:
    """Takes over the slots that clients have filled; frees or takes over those of dead clients.

    `granted`: the slots that each client holds. Clients are actors, or links of a replay's handle.
    """

    def __init__(self, source: CommitSource, replay: Memory) -> None:
        self._commits, self._replay = source, replay
        self.granted: defaultdict[int, set[int]] = defaultdict(set)
        self.inserted = self.refused = 0

    def take_in(self) -> int:
        """Take over what was committed, and what dead clients left. Returns how much that was."""
        changed, work = self._commits.take_in(), 0
        for client in self._commits.committers():
            for slot in self._commits.committed(client).tolist():
                self._accept(client, slot)
                work += 1
        for started in changed:
            self._take_back(started.actor, started.incarnation)
        return work + len(changed)

    def _take_over(self, slot: int) -> int:
        """Take over a filled slot. Returns its transitions; 0: it is not whole, and free now."""
        if not 1 <= self._replay.store.header_rows[slot, COUNT] <= self._replay.layout.chunk:
            self.refused += 1
            self._replay.ledger.reclaim([slot])
            return 0
        count = self._replay.accept(slot)
        self.inserted += count
        return count

    def _in_order(self, slots: NDArray[np.int64]) -> list[int]:
        """Filled slots in the order in which they were filled, incarnation by incarnation."""
        rows = self._replay.store.header_rows[slots]
        ordered: list[int] = slots[np.lexsort((rows[:, SEQUENCE], rows[:, INCARNATION]))].tolist()
        return ordered

    def _accept(self, client: int, slot: int) -> None:
        # The slot number comes from another process, so it is checked before it is used.
        if slot not in self.granted[client] or self._replay.store.state(slot) not in _FILLED:
            self.refused += 1
            return
        self.granted[client].discard(slot)
        self._settle(client, 1, self._take_over(slot))

    def _take_back(self, client: int, incarnation: int) -> None:
        """Take over what a client's former incarnations filled; free their other slots.

        An incarnation is reported only when the former one is certainly dead.
        """
        store = self._replay.store
        rows, granted = store.header_rows, self.granted[client]
        former = (s for s in granted if not incarnation or rows[s, INCARNATION] != incarnation)
        left = sorted(former)
        filled = [s for s in left if store.state(s) in _FILLED and rows[s, COUNT]]
        for slot in self._in_order(np.array(filled, np.int64)):
            self._accept(client, slot)
        unpublished = granted.intersection(left)
        granted -= unpublished
        self._replay.ledger.reclaim(sorted(unpublished))
        self._settle(client, len(unpublished), 0)

    def _settle(self, client: int, slots: int, transitions: int) -> None:
        """Called when a client holds some slots less, which brought these transitions."""


class Intake(Reclaimer):
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
        streams_per_actor: int,
    ) -> None:
        super().__init__(source, replay)
        self._source = source
        self._streams = streams_per_actor
        self._chunk = replay.layout.chunk
        self.charge = self._streams * self._chunk  # transitions that one grant may bring
        self._incarnations: defaultdict[int, int] = defaultdict(int)
        self._last_grant: defaultdict[int, int] = defaultdict(int)
        self._grants = 0
        self.waiting: set[int] = set()  # living actors that hold fewer slots than a full credit
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
        granted = self._chunk * sum(map(len, self.granted.values()))
        self.limiter = RateLimiter(limiter, committed=len(replay), granted=granted)

    def do_work(self, issued: int, released: int) -> int:
        """Take over, evict, grant. issued, released: the learner's answers given, and read."""
        work = self.take_in()
        self._replay.make_room(issued)
        work += self._replay.ledger.release(released)
        # The actor that waits longest is first: else a fast one could use all of the room.
        waiting = sorted(self.waiting, key=self._last_grant.__getitem__) if self._has_room() else ()
        for actor in waiting:
            work += self._grant(actor)
        return work

    def _take_back(self, client: int, incarnation: int) -> None:
        self._incarnations[client] = incarnation
        super()._take_back(client, incarnation)

    def _settle(self, client: int, slots: int, transitions: int) -> None:
        self.limiter.commit(transitions)
        self.limiter.refund(slots * self._chunk - transitions)
        self._look_at_credit(client)

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
