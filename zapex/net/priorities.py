"""Keeps the priorities that hosts give to new transitions fair: no host wins samples by lies.

A transition is drawn by the priority that its host gave it until the learner has sent one.
"""

import statistics

import numpy as np
from numpy.typing import NDArray

_WINDOW = 16  # chunks or updates in a running mean


class InitialPriorities:
    """The mean |priority| of each host, and of the learner.

    A host whose mean is above the learner's and above the median of the other hosts has its
    priorities scaled down to the larger of these two. Their proportions stay. given: whether hosts
    give priorities at all; if not, new transitions have none, whatever a host says.
    """

    def __init__(self, *, given: bool) -> None:
        self._given = given
        self._learned = 0.0
        self._means: dict[int, float] = {}

    def learned(self, priorities: NDArray[np.float32]) -> None:
        """Take priorities that the learner has sent."""
        mean = float(np.abs(priorities).mean())
        self._learned += (mean - self._learned) / _WINDOW if self._learned else mean

    def limit(self, host: int, priorities: NDArray[np.float32]) -> None:
        """Limit the priorities of a host's new chunk, in place. Their signs are dropped."""
        if not self._given:
            priorities.fill(-1)
            return
        np.abs(priorities, out=priorities)
        mean = float(priorities.mean())
        known = self._means.get(host, mean)
        self._means[host] = mean = known + (mean - known) / _WINDOW
        if mean > self._learned and len(self._means) > 1:
            others = statistics.median(m for h, m in self._means.items() if h != host)
            most = max(self._learned, others)
            if mean > most:
                priorities *= most / mean

    def forget(self, host: int) -> None:
        """A host has left."""
        self._means.pop(host, None)
