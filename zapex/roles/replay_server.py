"""The replay server: takes chunks in, answers sample requests by priority, applies priorities."""

import sys

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError, InvalidPriority
from zapex.host.metrics import LIMITER_STATES, RoleMetrics
from zapex.replay.core import ReplayCore
from zapex.roles.intake import Intake
from zapex.sumtree_numba import Method
from zapex.transport import ExperienceSource, SampleSink


class ReplayCounts:
    """Applies priorities to a memory, and publishes what it holds and what was done to it."""

    def __init__(self, replay: ReplayCore, intake: Intake, metrics: RoleMetrics) -> None:
        self._replay, self._intake, self._metrics = replay, intake, metrics
        self.updates_refused = 0

    def reprioritise(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> None:
        """Apply new priorities. A learner that has diverged must not damage the memory."""
        try:
            self._replay.reprioritise(keys, priorities.astype(np.float64))
        except (InvalidPriority, ConfigError) as error:
            if not self.updates_refused:
                print(f"an update is refused, more are only counted: {error}", file=sys.stderr)
            self.updates_refused += 1

    def publish(self) -> None:
        """Write the present numbers into the metrics."""
        metrics, replay = self._metrics, self._replay
        metrics.add_up(
            inserted=self._intake.inserted,
            updates_refused=self.updates_refused,
            **{n: getattr(replay, n) for n in ("evicted", "updates_applied", "updates_stale")},
        )
        for name, value in {
            "live": len(replay),
            "bytes_used": replay.ledger.counts["live"] * replay.store.layout.body_bytes,
            **{f"slots_{state}": count for state, count in replay.ledger.counts.items()},
        }.items():
            metrics.set(name, value)


class ReplayServer:
    """One duty cycle over a source of experience and the learner's requests.

    It handles chunks first, then priorities, then samples. So a request is answered from the newest
    state.
    """

    def __init__(
        self,
        replay: ReplayCore,
        intake: Intake,
        source: ExperienceSource,
        sink: SampleSink,
        metrics: RoleMetrics,
        *,
        method: Method,
    ) -> None:
        self.replay, self._limiter, self.intake = replay, intake.limiter, intake
        self._source, self._sink, self._metrics = source, sink, metrics
        self._method = method
        self._released = 0
        self._state = 0  # an index of LIMITER_STATES
        self._counts = ReplayCounts(replay, intake, metrics)
        metrics.enter("other")
        metrics.set("capacity", replay.layout.capacity)

    def do_work(self) -> int:
        """Do all work that is due now. Returns how much it was."""
        metrics = self._metrics
        metrics.enter("insert")
        self._released = self._sink.released
        work = self.intake.do_work(self._sink.issued, self._released)
        metrics.enter("update")
        for keys, priorities in self._sink.updates():
            self._counts.reprioritise(keys, priorities)
            work += 1
        metrics.enter("sample")
        for _ in range(self._sink.requests()):
            rows = self._sink.rows()
            if not self._limiter.can_sample(rows):
                break
            self._limiter.sample(rows)
            self._sink.answer(self.replay.draw(rows, self._method))
            metrics.add("batches")
            metrics.add("sampled", rows)
            work += 1
        metrics.enter("idle")
        before, self._state = self._state, LIMITER_STATES.index(self._limiter_state())
        if work or self._state != before:
            self._publish_counts()
        return work

    def ready(self) -> bool:
        """Whether there is something to do: for `wait(ready, timeout_s)`."""
        return (
            self._source.ready()
            or self._sink.ready()
            or (self._sink.requests() > 0 and self._limiter.can_sample(self._sink.rows()))
            # Slots may have left quarantine, and actors wait for slots.
            or (self._sink.released > self._released and bool(self.intake.waiting))
        )

    def close(self) -> None:
        """Stop; the memory does not change."""
        self._publish_counts()
        self._metrics.leave()

    def _publish_counts(self) -> None:
        self._counts.publish()
        self._metrics.set("limiter", self._state)
        self._metrics.set("owed", self._limiter.owed)

    def _limiter_state(self) -> str:
        """Which side waits now: one of LIMITER_STATES."""
        if not self._limiter.open:
            return "filling"
        if self.intake.waiting and not self._limiter.can_insert(self.intake.charge):
            return "actors wait"
        if self.intake.waiting and not self.intake.has_slots:
            return "no free slots"
        if self._sink.requests() and not self._limiter.can_sample(self._sink.rows()):
            return "learner waits"
        return "no role waits"
