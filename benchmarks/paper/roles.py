"""Paced roles: they move real chunks and sleep where a real role would compute.

    upper bar, actor      compute (sleep), push, pull
    lower bar, learner    sample (with waiting for it), compute (sleep), update, set

These are the bars of fig. 3 of arXiv 2110.13506; a priority update is ours. What a role returns is
of each window by itself, by its number: cycles that begin and end in it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.support.harness import Clock

WAITING, READY, OVER = 0, 1, -1  # words[0] is the number of the window, from 1, while there is one
ACTOR_COMMUNICATION = ("push", "pull")
LEARNER_COMMUNICATION = ("sample", "update", "set")
_DEADLINE_S = 60.0


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; empty if there is no value."""
    if not values:
        return {}
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "q25": float(low), "q75": float(high), "n": len(values)}


class _Times:
    """Milliseconds of calls, and phases, of the window that words[0] names."""

    def __init__(self, words: Any) -> None:
        self._words, self.window, self.clock = words, WAITING, Clock()
        self.ms: dict[str, list[float]] = {}

    def turn(self) -> bool:
        """At the beginning of a cycle: whether it is the first of a window."""
        now = int(self._words[0])
        begins = now > WAITING and now != self.window
        if begins:
            self.window, self.clock, self.ms = now, Clock(), {}
        return begins

    @property
    def counts(self) -> bool:
        """Whether this cycle counts."""
        return WAITING < self.window == self._words[0]

    def call(
        self, phase: str, call: Callable[[], Any], noted: Callable[[Any], object] = lambda _: True
    ) -> Any:
        """Make a call in its phase. noted: whether its milliseconds are, by what it returned."""
        self.clock.enter(phase)
        began = time.perf_counter()
        found = call()
        if self.counts and noted(found):
            self.ms.setdefault(phase, []).append(1000 * (time.perf_counter() - began))
        return found

    def result(self) -> dict[str, Any]:
        """Seconds by phase, and each call's spread."""
        self.clock.enter("over")
        spent = {k: v for k, v in self.clock.spent.items() if k not in ("other", "over")}
        return {"seconds": spent, "ms": {name: spread(ms) for name, ms in self.ms.items()}}


def actor(make: Callable[[], Any], words: Any, index: int, compute_s: float) -> dict[int, Any]:
    """Push, pull, compute. words[index] is this role's state."""
    end, times = make(), _Times(words)
    end.push()  # connected, and all kernels compiled
    end.pull()
    words[index] = READY
    pushes, pushed, pulled, got = 0, 0, 0, 0
    found: dict[int, Any] = {}
    while words[0] != OVER:
        if times.turn():
            pushes, pushed, pulled, got = 0, 0, 0, 0
        counted = times.counts
        times.clock.enter("compute")
        time.sleep(compute_s)
        nbytes = times.call("push", end.push)
        here = times.call("pull", end.pull, bool)  # a look that finds nothing newer is no pull
        if counted and times.counts:
            pushes, pushed = pushes + 1, pushed + nbytes
            pulled, got = pulled + here, got + bool(here)
            nbytes_each = {"push": pushed / pushes, "pull": pulled / max(1, got)}
            found[times.window] = {**times.result(), "pushes": pushes, "bytes": nbytes_each}
    words[index] = OVER
    return found


def learner(
    make: Callable[[], Any], words: Any, actors: Sequence[int], index: int, compute_s: float,
    set_every: int,
) -> dict[int, Any]:  # fmt: skip
    """Sample, compute, update, and set parameters after so many steps.

    It goes on until all `actors` (places in words) are over: they may wait for it.
    """
    end, times = make(), _Times(words)
    end.set()
    made = steps = pulled = 0
    shortest_s = np.inf
    bytes_before, phases_before = 0, dict[str, float]()
    deadline_s = np.inf
    found: dict[int, Any] = {}
    while not all(words[i] == OVER for i in actors):
        if words[0] == OVER:
            deadline_s = min(deadline_s, time.monotonic() + _DEADLINE_S)
            assert time.monotonic() < deadline_s, "an actor does not end"
        if times.turn():
            steps = pulled = 0
            shortest_s = np.inf
            bytes_before, phases_before = getattr(end, "batch_bytes", 0), end.phases()
        counted = times.counts
        before, began_s = end.pulled, time.monotonic()
        times.call("sample", end.sample)
        words[index] = READY
        times.clock.enter("compute")
        end.serve(time.monotonic() + compute_s)
        times.call("update", end.update)
        if not made % set_every:
            times.call("set", end.set)
        made += 1
        if counted and times.counts:
            steps += 1
            pulled += end.pulled - before
            shortest_s = min(shortest_s, time.monotonic() - began_s)
            batch_bytes = getattr(end, "batch_bytes", 0) - bytes_before
            found[times.window] = {
                **times.result(), "steps": steps, "pulled": pulled, "shortest_step_s": shortest_s,
                "bytes": {"sample": batch_bytes / steps},
                "phases": {k: v - phases_before[k] for k, v in end.phases().items()},
            }  # fmt: skip
    return found
