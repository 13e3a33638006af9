"""Every update of priorities comes to the replay once, in order, and to the rows that it is of.

An update carries its number, which is its place in the learner's ring of updates and outlives
every role: a priority is what the row's actor said, and a fraction that grows with the number.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stress.chaos_content import Violation, identity, priorities, stamp_of
from zapex.chunks.keys import slots_and_rows
from zapex.replay.core import ReplayCore, ReplayLayout

STEPS = 1 << 10  # fractions of 1/4 that float32 tells apart: priorities are below 2^12
_ROUND = STEPS - 1  # a fraction of 0 is the actor's own


def fraction(update: int) -> float:
    """What update `update` adds to the priorities that actors gave."""
    return (1 + update % _ROUND) / STEPS / 4


def is_of(leaves: NDArray[np.float64], given: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether leaves (B,) are an actor's priorities, or those with the fraction of an update."""
    return (floor(leaves) == given) & ((leaves * 4 * STEPS) % 1.0 == 0.0)


def floor(leaves: NDArray[np.float64]) -> NDArray[np.float64]:
    """Leaves (B,) without the fraction of an update."""
    return np.floor(4 * leaves) / 4


class Witness:
    """Stands before a replay's `reprioritise` and `draw`, in memory that outlives the replay.

    It knows the next update, and each row's leaf after all updates so far.
    """

    @staticmethod
    def required_bytes(layout: ReplayLayout) -> int:
        """Of its memory."""
        return 8 * (1 + 2 * layout.slots * layout.chunk)

    def __init__(self, replay: ReplayCore, memory: NDArray[np.uint8]) -> None:
        words = memory.view(np.int64)
        self._next, (self._row, told) = words[:1], words[1:].reshape(2, -1)
        self._leaf = told.view(np.float64)
        self._replay, self._first = replay, True
        self._reprioritise, self._draw = replay.reprioritise, replay.draw
        watched: Any = replay
        watched.reprioritise, watched.draw = self.reprioritise, self.draw

    def reprioritise(self, keys: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[int, int]:
        """As the replay's."""
        self._check_number(values)
        live = np.array([key >= 0 and self._replay.store.holds(key) for key in keys], np.bool_)
        indices, stamps = self._rows(keys[live])
        given = priorities(stamps)
        if (floor(values[live]) != given).any():
            raise Violation(
                f"foreign: an update says {values[live]} of rows whose actors said {given}"
            )
        counts = self._reprioritise(keys, values)
        if (self._replay.tree[indices] != values[live]).any():
            raise Violation(f"lost: leaves {self._replay.tree[indices]} after {values[live]}")
        self._row[indices], self._leaf[indices] = identity(stamps), values[live]
        self._next += 1 - self._again
        self._first = False
        return counts

    def draw(self, batch_size: int, method: Any = "stratified", **more: Any) -> Any:
        """As the replay's."""
        found = self._draw(batch_size, method, **more)
        indices, stamps = self._rows(found.keys)
        updated = self._row[indices] == identity(stamps)
        wanted = np.where(updated, self._leaf[indices], priorities(stamps))
        if (found.leaves != wanted).any():
            row = int(np.argmax(found.leaves != wanted))
            kind = "lost" if found.leaves[row] < wanted[row] else "foreign"
            raise Violation(
                f"{kind}: {stamps[row].tolist()} is drawn by {found.leaves[row]}, and its newest "
                f"priority is {wanted[row]}"
            )
        return found

    def _check_number(self, values: NDArray[np.float64]) -> None:
        """The next update; or, first in a life, the one before: its end may have been unseen."""
        places = np.unique(values * 4 % 1.0 * STEPS)
        if len(places) != 1 or places[0] % 1.0 or places[0] == 0:
            raise Violation(f"torn: an update has the numbers {places - 1}")
        expected = int(self._next[0])
        ahead = (int(places[0]) - 1 - expected) % _ROUND
        self._again = int(ahead == _ROUND - 1)
        if ahead and not (self._again and self._first and expected):
            kind = "lost" if ahead < _ROUND // 2 else "doubled"
            raise Violation(f"{kind}: update {expected} should come, and {places[0] - 1:g} did")

    def _rows(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices (B,) and stamps (B, 4) of rows that are live."""
        slots, rows = slots_and_rows(keys)
        store = self._replay.store
        stamps = [
            stamp_of(store, int(slot), int(row)) for slot, row in zip(slots, rows, strict=True)
        ]
        return slots * store.layout.chunk + rows, np.array(stamps, np.int64).reshape(-1, 4)
