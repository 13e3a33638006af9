"""Paced roles: they move real chunks and sleep where a real role would compute.

    upper bar, actor      compute (sleep), push, pull
    lower bar, learner    sample (with waiting for it), compute (sleep), update, set

These are the bars of fig. 3 of arXiv 2110.13506; a priority update is ours.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.transport.paced import Clock

WAITING, MEASURING, OVER = range(3)
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
    """Milliseconds of calls, and phases, while the word says so."""

    def __init__(self, words: Any) -> None:
        self._words, self.clock = words, Clock()
        self.ms: dict[str, list[float]] = {}
        self._measuring = False

    def turn(self) -> None:
        """At the beginning of a cycle: whether it counts is decided here."""
        if self._words[0] == MEASURING and not self._measuring:
            self.clock, self._measuring = Clock(), True

    @property
    def counts(self) -> bool:
        """Whether this cycle counts."""
        return self._measuring and self._words[0] == MEASURING

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


def actor(make: Callable[[], Any], words: Any, index: int, compute_s: float) -> dict[str, Any]:
    """Push, pull, compute. words[0] is the phase of the measurement, words[index] this role's."""
    end, times = make(), _Times(words)
    end.push()  # connected, and all kernels compiled
    end.pull()
    words[index] = MEASURING
    pushes, pushed, pulled, got = 0, 0, 0, 0
    found: dict[str, Any] = {}
    while words[0] != OVER:
        times.turn()
        counted = times.counts
        times.clock.enter("compute")
        time.sleep(compute_s)
        nbytes = times.call("push", end.push)
        here = times.call("pull", end.pull, bool)  # a look that finds nothing newer is no pull
        if counted and times.counts:
            pushes, pushed = pushes + 1, pushed + nbytes
            pulled, got = pulled + here, got + bool(here)
            found = times.result()  # of whole cycles
    words[index] = OVER
    found = found or times.result()
    per_push, per_pull = pushed / max(1, pushes), pulled / max(1, got)
    return {**found, "pushes": pushes, "bytes": {"push": per_push, "pull": per_pull}}


def learner(
    make: Callable[[], Any], words: Any, actors: Sequence[int], index: int, compute_s: float,
    set_every: int,
) -> dict[str, Any]:  # fmt: skip
    """Sample, compute, update, and set parameters after so many steps.

    It goes on until all `actors` (places in words) are over: they may wait for it.
    """
    end, times = make(), _Times(words)
    end.set()
    steps = pulled = 0
    shortest_s = np.inf
    bytes_before, phases_before = 0, dict[str, float]()
    deadline_s = np.inf
    measured: dict[str, Any] = {}
    while not all(words[i] == OVER for i in actors):
        if words[0] == OVER:
            deadline_s = min(deadline_s, time.monotonic() + _DEADLINE_S)
            assert time.monotonic() < deadline_s, "an actor does not end"
        was = times.counts
        times.turn()
        if times.counts and not was:
            bytes_before, phases_before = getattr(end, "batch_bytes", 0), end.phases()
        before, began_s = end.pulled, time.monotonic()
        times.call("sample", end.sample)
        words[index] = MEASURING
        times.clock.enter("compute")
        end.serve(time.monotonic() + compute_s)
        times.call("update", end.update)
        if not steps % set_every:
            times.call("set", end.set)
        if times.counts:
            steps += 1
            pulled += end.pulled - before
            shortest_s = min(shortest_s, time.monotonic() - began_s)
            result = times.result()
            batch_bytes = getattr(end, "batch_bytes", 0) - bytes_before
            measured = {
                **result, "steps": steps, "pulled": pulled, "shortest_step_s": shortest_s,
                "bytes": {"sample": batch_bytes / steps},
                "phases": {k: v - phases_before[k] for k, v in end.phases().items()},
            }  # fmt: skip
    assert steps, "no step of the learner was measured: give more --seconds"
    return measured
