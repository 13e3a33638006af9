"""The owner of each slot: the replay's side of a chunk store, read from the headers on attach.

    free --grant--> granted --commit--> committed --accept--> live --evict--> evicted --> free
    replay          an actor's          replay's              replay's        quarantine

A writer of the library fills a slot that is live from the start (`open`, `close`), and its rows can
be drawn as they come. If it is in another process, `new_rows` finds them by the header's count.
Each move ends with one store to the header's state. So the headers are complete at every moment,
also after the replay dies. docs/ring_protocol.md lists the steps and the effect of a death at each
step; tests/stress/slots.pml is the model.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.keys import GENERATION_MASK
from zapex.chunks.layout import (
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
    STREAM,
)
from zapex.chunks.store import ChunkStore, set_state_kernel
from zapex.machine.atomics import fence_release, load_acquire, store_release
from zapex.machine.jit import kernel


@kernel
def _evict_kernel(headers: Any, slot: int) -> None:
    header = slot * HEADER_WORDS
    # SYNC row-whole: the new generation is visible before the first write to the slot
    generation = headers[header + GENERATION] % GENERATION_MASK + 1  # never 0
    store_release(headers, header + GENERATION, generation)
    fence_release()
    # STEP generation-bumped
    store_release(headers, header + STATE, EVICTED)
    # STEP slot-evicted


@kernel
def _open_kernel(headers: Any, slot: int, commit_sequence: int) -> None:
    header = slot * HEADER_WORDS
    for word in (ACTOR, INCARNATION, COUNT, GRANT_SEQUENCE, STREAM):
        headers[header + word] = 0
    headers[header + COMMIT_SEQUENCE] = commit_sequence
    store_release(headers, header + STATE, LIVE)


@kernel
def _new_rows_kernel(slots: Any, headers: Any, chunk: int, taken: Any, indices: Any) -> int:
    count = 0
    for slot in slots:
        place = slot * HEADER_WORDS + COUNT
        rows = load_acquire(headers, place)  # SYNC row-counted
        if not taken[slot] <= rows <= chunk:  # no writer of ours does that
            rows = headers[place] = taken[slot]
        for row in range(taken[slot], rows):
            indices[count] = slot * chunk + row
            count += 1
        taken[slot] = rows
    return count


class SlotLedger:
    """The replay's side of a store. Its state is read from the headers on attach.

    An evicted slot waits in quarantine, with the number of answers that were issued before. The
    learner may still read it for one of them. `release(released)` ends the wait.
    """

    def __init__(self, store: ChunkStore) -> None:
        self.store = store
        rows = store.header_rows
        rows[rows[:, GENERATION] == 0, GENERATION] = 1  # new memory
        states = rows[:, STATE]
        self._free = deque(np.flatnonzero(states == FREE).tolist())
        # A learner asks again for answers from before the attach: no quarantine is needed.
        for slot in np.flatnonzero(states == EVICTED).tolist():
            set_state_kernel(store.headers, slot, FREE)
            # STEP quarantine-ended
            self._free.append(slot)
        live = np.flatnonzero(states == LIVE)
        self._fifo = deque(live[np.argsort(rows[live, COMMIT_SEQUENCE])].tolist())
        self._quarantine: deque[tuple[int, int]] = deque()
        self.next_commit = int(rows[:, COMMIT_SEQUENCE].max(initial=0)) + 1
        self.live_transitions = int(rows[live, COUNT].sum())
        # Called before a slot's bytes may change.
        self.on_evict: Callable[[int], None] | None = None
        # For each slot that another process fills: how many rows `new_rows` returned. Else -1.
        self.taken = np.full(store.slots, -1, np.int64)
        self._filled_elsewhere = self._new_rows = np.empty(0, np.int64)

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
        """Free slots; the first one is granted next."""
        return list(self._free)

    def free_in_order(self, slots: Iterable[int]) -> None:
        """Grant these free slots first, in this order."""
        there = set(self._free)
        first = [slot for slot in dict.fromkeys(slots) if slot in there]
        self._free = deque(first + [slot for slot in self._free if slot not in set(first)])

    @property
    def oldest(self) -> int | None:
        """The live slot that is evicted next."""
        return self._fifo[0] if self._fifo else None

    @property
    def live(self) -> list[int]:
        """Live slots that can be evicted, oldest first."""
        return list(self._fifo)

    @property
    def quarantined(self) -> list[int]:
        """Evicted slots that are not free yet, oldest first."""
        return [slot for _, slot in self._quarantine]

    def grant(
        self, count: int, actor: int, incarnation: int, sequence: int = 0
    ) -> NDArray[np.int64]:
        """Grant `count` free slots to an actor. The caller checks that there are enough.

        sequence: the first slot's number in the link that carries the grants
        (`ExperienceSource.next_grant`). After a restart the replay uses it to find the slots that
        were granted but not sent.
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
        """Make a committed slot live. Returns how many transitions it holds."""
        self._stamp(slot)
        # STEP accept-stamped
        set_state_kernel(self.store.headers, slot, LIVE)
        # STEP slot-live
        self._fifo.append(slot)
        count = int(self.store.header_rows[slot, COUNT])
        self.live_transitions += count
        return count

    def open(self, *, elsewhere: bool = False) -> int:
        """Make a free slot live, to be filled; it is not evicted before `close`. Returns the slot.

        Its rows can be drawn as COUNT grows. The caller adds them to `live_transitions`.
        elsewhere: another process fills it, so `new_rows` returns them.
        """
        slot: int = self._free.popleft()
        # The stamp places the slot in the FIFO even if this process dies before `close`.
        _open_kernel(self.store.headers, slot, self.next_commit)
        self.next_commit += 1
        if elsewhere:
            self._fill_elsewhere(slot, 0)
        return slot

    def new_rows(self) -> NDArray[np.int64]:
        """Indices of the rows that other processes have written since the last call.

        The array is valid until the next call.
        """
        slots, found, store = self._filled_elsewhere, self._new_rows, self.store
        if not len(slots):
            return found
        chunk = store.layout.chunk
        return found[: _new_rows_kernel(slots, store.headers, chunk, self.taken, found)]

    def _fill_elsewhere(self, slot: int, taken: int) -> None:
        self.taken[slot] = taken
        self._filled_elsewhere = np.flatnonzero(self.taken >= 0)
        rows = len(self._filled_elsewhere) * self.store.layout.chunk
        self._new_rows = np.empty(rows, np.int64)

    def close(self, slot: int) -> None:
        """End the filling of an open slot: from now on it can be evicted."""
        if self.taken[slot] >= 0:
            self._fill_elsewhere(slot, -1)
        self._stamp(slot)
        self._fifo.append(slot)

    def _stamp(self, slot: int) -> None:
        self.store.headers[slot * HEADER_WORDS + COMMIT_SEQUENCE] = self.next_commit
        self.next_commit += 1

    def evict(self, issued: int) -> tuple[int, int]:
        """Move the oldest live slot into quarantine. Returns the slot and its transition count."""
        slot = self._fifo.popleft()
        if self.on_evict is not None:
            self.on_evict(slot)
        count = self.store.headers.item(slot * HEADER_WORDS + COUNT)
        _evict_kernel(self.store.headers, slot)
        self._quarantine.append((issued, slot))
        self.live_transitions -= count
        return slot, count

    def release(self, released: int) -> int:
        """Free the slots evicted before answer `released` was issued. Returns how many."""
        freed = 0
        while self._quarantine and self._quarantine[0][0] <= released:
            self.release_oldest()
            freed += 1
        return freed

    def release_oldest(self) -> None:
        """Free the oldest slot in quarantine, even if a reader still uses it."""
        _, slot = self._quarantine.popleft()
        set_state_kernel(self.store.headers, slot, FREE)
        # STEP slot-freed
        self._free.append(slot)

    def reclaim(self, slots: Iterable[int]) -> int:
        """Free granted slots that no actor will fill (the actor is gone). Returns how many."""
        taken = 0
        for slot in slots:
            if self.taken[slot] >= 0:
                self._fill_elsewhere(slot, -1)
            set_state_kernel(self.store.headers, slot, FREE)
            # STEP slot-reclaimed
            self._free.append(slot)
            taken += 1
        return taken
