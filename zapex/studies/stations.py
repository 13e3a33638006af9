"""What messages pass in a simulated cluster: links and threads that serve first come, first served.

A message passes several stations at once, as its first bytes run ahead of its last: it begins at
each when its first byte is there, and is through when its last byte is, or when the station has
done all of its work, whichever is later. So one event is enough for a whole way.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Station:
    """One server. free_s: when it has done all that it was given."""

    free_s: float = 0.0
    _done_s: float = 0.0
    _counted_s: float = 0.0
    _given: deque[tuple[float, float]] = field(default_factory=deque)  # when it begins, its work

    def begin(self, now_s: float, first_s: float, work_s: float) -> float:
        """Take work that is there at `first_s`. Returns when it begins."""
        begins_s = max(first_s, self.free_s)
        self.free_s = begins_s + work_s
        if work_s:
            self.done_s(now_s)
            self._given.append((begins_s, work_s))
        return begins_s

    def done_s(self, now_s: float) -> float:
        """Work done until now."""
        while self._given and sum(self._given[0]) <= now_s:
            self._done_s += self._given.popleft()[1]
        return self._done_s + (max(0.0, now_s - self._given[0][0]) if self._given else 0.0)

    def mark(self, now_s: float) -> None:
        """Count from now on."""
        self._counted_s = self.done_s(now_s)

    def load(self, began_s: float, now_s: float) -> float:
        """The share of the time since `mark` in which it worked."""
        return (self.done_s(now_s) - self._counted_s) / (now_s - began_s)


def through(now_s: float, way: Sequence[tuple[Station, float]], late_s: float = 0.0) -> float:
    """When a message that leaves now is through all stations of its way, each with its work.

    late_s: how long a byte is under way, besides.
    """
    first_s = last_s = now_s
    for station, work_s in way:
        first_s = station.begin(now_s, first_s, work_s)
        last_s = max(last_s, first_s + work_s)
    return last_s + late_s
