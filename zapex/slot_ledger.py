"""Who owns which slot: the replay's side of a chunk store, derived from the headers on attach.

    free --grant--> granted --commit--> committed --accept--> live --evict--> evicted --> free
    replay          an actor's          replay's              replay's        quarantine

(A writer in the replay's own process fills a slot that is live from the start: `open`, `close`.)
Every move is one store to the header's state, the last of that move: a replay that dies anywhere
leaves headers that say all there is to know. docs/ring_protocol.md has the list of steps and what a
death at each means; tests/stress/slots.pml is the model.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import fence_release, store_release
from zapex.chunk_store import GENERATION_MASK, ChunkStore, set_state_kernel
from zapex.jit import kernel
from zapex.schema import (
    ACTOR,
    COMMIT_SEQUENCE,
    COUNT,
    EVICTED,
    FREE,
    GENERATION,
    GRANT_SEQUENCE,
    GRANTED,
    HEADER_WORDS,
    INCARNATION,
    LIVE,
    STATE,
)


@kernel
def _evict_kernel(headers: Any, slot: int) -> None:
    header = slot * HEADER_WORDS
    # SYNC row-whole: nobody writes to the slot before the new generation can be seen
    generation = (headers[header + GENERATION] + 1) & GENERATION_MASK
    store_release(headers, header + GENERATION, generation)
    fence_release()
    # STEP generation-bumped
    store_release(headers, header + STATE, EVICTED)
    # STEP slot-evicted


@kernel
def _open_kernel(headers: Any, slot: int, commit_sequence: int) -> None:
    header = slot * HEADER_WORDS
    for word in (ACTOR, INCARNATION, COUNT, GRANT_SEQUENCE):
        headers[header + word] = 0
    headers[header + COMMIT_SEQUENCE] = commit_sequence
    store_release(headers, header + STATE, LIVE)


class SlotLedger:
    """The replay's side of a store: it alone moves slots on. Derived from the headers on attach.

    Slots that the FIFO evicts wait in quarantine, tagged by how many answers had been issued, until
    `release(released)` says that the learner is done with those.
    """

    def __init__(self, store: ChunkStore) -> None:
        self.store = store
        rows = store.header_rows
        states = rows[:, STATE]
        self._free = deque(np.flatnonzero(states == FREE).tolist())
        # Whoever held an answer from before the attach asks again: quarantine is over for these.
        for slot in np.flatnonzero(states == EVICTED).tolist():
            set_state_kernel(store.headers, slot, FREE)
            # STEP quarantine-ended
            self._free.append(slot)
        live = np.flatnonzero(states == LIVE)
        self._fifo = deque(live[np.argsort(rows[live, COMMIT_SEQUENCE])].tolist())
        self._quarantine: deque[tuple[int, int]] = deque()
        self._commit_sequence = int(rows[:, COMMIT_SEQUENCE].max(initial=0)) + 1
        self.live_transitions = int(rows[live, COUNT].sum())
        self.on_evict: Callable[[int], None] | None = (
            None  # called before a slot's bytes may change
        )
        # Slots that other processes fill: how many rows they said are whole; -1: none such.
        self.announced = np.full(store.slots, -1, np.int64)

    @property
    def counts(self) -> dict[str, int]:
        """Slots by state."""
        free, live, quarantined = len(self._free), len(self._fifo), len(self._quarantine)
        held = self.store.slots - free - live - quarantined
        return {"free": free, "granted": held, "live": live, "quarantined": quarantined}

    @property
    def free(self) -> int:
        """Slots that can be granted now."""
        return len(self._free)

    @property
    def free_slots(self) -> list[int]:
        """Free slots, the next to be granted first."""
        return list(self._free)

    def free_in_order(self, slots: Iterable[int]) -> None:
        """Grant these free slots first, in this order."""
        there = set(self._free)
        first = [slot for slot in dict.fromkeys(slots) if slot in there]
        self._free = deque(first + [slot for slot in self._free if slot not in set(first)])

    @property
    def oldest(self) -> int | None:
        """The live slot that goes first."""
        return self._fifo[0] if self._fifo else None

    @property
    def live(self) -> list[int]:
        """Live slots that can be evicted, oldest first."""
        return list(self._fifo)

    def grant(
        self, count: int, actor: int, incarnation: int, sequence: int = 0
    ) -> NDArray[np.int64]:
        """`count` free slots for an actor; the caller has seen that there are as many.

        sequence: the first one's in the link that will carry them (`ExperienceSource.next_grant`):
        by it a replay that attaches can tell which were granted and never sent.
        """
        rows = self.store.header_rows
        slots = np.array([self._free.popleft() for _ in range(count)], np.int64)
        for i, slot in enumerate(slots.tolist()):
            header = rows[slot]
            header[ACTOR], header[INCARNATION], header[COUNT] = actor, incarnation, 0
            header[GRANT_SEQUENCE] = sequence + i
            # STEP grant-written
            set_state_kernel(self.store.headers, slot, GRANTED)
            # STEP slot-granted
        return slots

    def accept(self, slot: int) -> int:
        """Take over a committed slot: it is live now. Returns how many transitions it holds."""
        self._stamp(slot)
        # STEP accept-stamped
        set_state_kernel(self.store.headers, slot, LIVE)
        # STEP slot-live
        self._fifo.append(slot)
        count = int(self.store.header_rows[slot, COUNT])
        self.live_transitions += count
        return count

    def open(self) -> int:
        """A free slot that is live while it is filled; not evicted before `close`.

        Its rows can be drawn as COUNT grows; whoever fills it adds them to `live_transitions`.
        """
        slot: int = self._free.popleft()
        # Stamped, so that a process that dies leaves it closed, in this order.
        _open_kernel(self.store.headers, slot, self._commit_sequence)
        self._commit_sequence += 1
        return slot

    def close(self, slot: int) -> None:
        """An open slot is full, or will not be filled further: the FIFO may evict it."""
        self._stamp(slot)
        self._fifo.append(slot)

    def _stamp(self, slot: int) -> None:
        self.store.headers[slot * HEADER_WORDS + COMMIT_SEQUENCE] = self._commit_sequence
        self._commit_sequence += 1

    def evict(self, issued: int) -> tuple[int, int]:
        """The oldest live slot into quarantine: it and how many transitions went."""
        slot = self._fifo.popleft()
        if self.on_evict is not None:
            self.on_evict(slot)
        count = self.store.headers.item(slot * HEADER_WORDS + COUNT)
        _evict_kernel(self.store.headers, slot)
        self._quarantine.append((issued, slot))
        self.live_transitions -= count
        return slot, count

    def release(self, released: int) -> int:
        """Free what was evicted before answer number `released` was issued; how many."""
        freed = 0
        while self._quarantine and self._quarantine[0][0] <= released:
            self.release_oldest()
            freed += 1
        return freed

    def release_oldest(self) -> None:
        """Free the slot that has been in quarantine for longest, whoever may still read it."""
        _, slot = self._quarantine.popleft()
        set_state_kernel(self.store.headers, slot, FREE)
        # STEP slot-freed
        self._free.append(slot)

    def reclaim(self, slots: Iterable[int]) -> int:
        """Slots that nobody will fill become free, those of an actor that is gone; how many."""
        taken = 0
        for slot in slots:
            set_state_kernel(self.store.headers, slot, FREE)
            # STEP slot-reclaimed
            self._free.append(slot)
            taken += 1
        return taken
