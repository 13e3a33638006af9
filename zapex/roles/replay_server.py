"""The replay server: takes chunks in, answers sample requests by priority, applies priorities."""

import sys
from functools import partial

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError, InvalidPriority
from zapex.host.metrics import LIMITER_STATES, RoleMetrics
from zapex.replay.core import ReplayCore
from zapex.roles.intake import Intake
from zapex.sumtree_numba import Method
from zapex.transport import ExperienceSource, SampleSink


class ReplayServer:
    """Takes in chunks, then priorities, then answers requests, from the newest state.

    Args:
        replay: the memory.
        intake: takes chunks of `source` into `replay`.
        source: the links of all actors.
        sink: the learner's link.
        metrics: of the role.
        method: how batches are drawn.
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
        replay.warn = partial(print, file=sys.stderr, flush=True)
        self._source, self._sink, self._metrics = source, sink, metrics
        self._method = method
        self._released = 0
        self._state = 0  # an index of LIMITER_STATES
        self._updates_refused = 0
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
            self._reprioritise(keys, priorities)
            work += 1
        metrics.enter("sample")
        requests = self._sink.requests()
        while requests and self._limiter.can_sample(rows := self._sink.rows()):
            self._limiter.sample(rows)
            self._sink.answer(self.replay.draw(rows, self._method))
            metrics.add("batches")
            metrics.add("sampled", rows)
            work += 1
            requests -= 1
        metrics.enter("idle")
        state = self._limiter_state(learner_waits=requests > 0)
        before, self._state = self._state, LIMITER_STATES.index(state)
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

    def _reprioritise(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> None:
        """Apply new priorities. A learner that has diverged must not damage the memory."""
        try:
            self.replay.reprioritise(keys, priorities.astype(np.float64))
        except (InvalidPriority, ConfigError) as error:
            if not self._updates_refused:
                print(f"a priority update is refused, more are counted: {error}", file=sys.stderr)
            self._updates_refused += 1

    def _publish_counts(self) -> None:
        metrics, replay = self._metrics, self.replay
        counts = replay.ledger.counts
        metrics.add_up(
            inserted=self.intake.inserted,
            updates_refused=self._updates_refused,
            evicted=replay.evicted,
            updates_applied=replay.updates_applied,
            updates_stale=replay.updates_stale,
        )
        metrics.set("live", len(replay))
        metrics.set("bytes_used", counts["live"] * replay.store.layout.body_bytes)
        for state, count in counts.items():
            metrics.set(f"slots_{state}", count)
        metrics.set("limiter", self._state)
        metrics.set("owed", self._limiter.owed)

    def _limiter_state(self, learner_waits: bool) -> str:
        """Which side waits now: one of LIMITER_STATES."""
        if not self._limiter.open:
            return "filling"
        if self.intake.waiting and not self._limiter.can_insert(self.intake.charge):
            return "actors wait"
        if self.intake.waiting and not self.intake.has_slots:
            return "no free slots"
        if learner_waits:
            return "learner waits"
        return "no role waits"
