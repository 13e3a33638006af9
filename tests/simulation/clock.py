"""Simulated time: what will happen, in order, and one random generator for all that is drawn."""

import heapq
import itertools
import random
import time
from collections.abc import Callable


def install() -> None:
    """From now on time.monotonic() is the time of the newest Timeline."""
    time.monotonic = lambda: Timeline.newest.now_s


class Timeline:
    """Calls functions at their times. `now_s`: seconds since the run began."""

    newest: "Timeline"

    def __init__(self, seed: int) -> None:
        Timeline.newest = self
        self.now_s = 0.0
        self.seed, self.rng = seed, random.Random(seed)
        self.history: list[str] = []
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._between = self.rng.uniform

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call a function, after all that is due earlier."""
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._order), call))

    def soon(self, least_s: float, most_s: float, call: Callable[[], object]) -> None:
        """The same, after a time between the two."""
        self.after(self._between(least_s, most_s), call)

    def say(self, text: str) -> None:
        """A line of the history."""
        self.history.append(f"{self.now_s:.6f} {text}")

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until `done()`, asked each tenth of a second. False: it never was."""
        look_s = self.now_s
        due = self._due
        while due and due[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(due)
            call()
            if self.now_s >= look_s:
                look_s = self.now_s + 0.1
                if done():
                    return True
        self.now_s = until_s
        return done()
