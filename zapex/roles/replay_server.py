"""The replay server: takes chunks in, answers sample requests by priority, applies priorities."""

import sys

import numpy as np
from numpy.typing import NDArray

from zapex.errors import InvalidPriority
from zapex.intake import Intake
from zapex.metrics import LIMITER_STATES, RoleMetrics
from zapex.replay import Method, PrioritizedReplay
from zapex.transport import ExperienceSource, SampleSink


class ReplayServer:
    """One duty cycle over a source of experience and the learner's requests.

    Chunks first, then priorities, then samples: a request is answered from the newest state.
    """

    def __init__(
        self,
        replay: PrioritizedReplay,
        intake: Intake,
        source: ExperienceSource,
        sink: SampleSink,
        metrics: RoleMetrics,
        *,
        batch_size: int,
        method: Method,
    ) -> None:
        self._replay, self._limiter, self._intake = replay, intake.limiter, intake
        self._source, self._sink, self._metrics = source, sink, metrics
        self._batch_size, self._method = batch_size, method
        self._released = 0
        self.updates_refused = 0
        self._counted: dict[str, int] = {}
        metrics.enter("other")
        metrics.set("capacity", replay.layout.capacity)

    def do_work(self) -> int:
        """Everything that there is to do now; how much it was."""
        metrics = self._metrics
        metrics.enter("insert")
        self._released = self._sink.released
        work = self._intake.do_work(self._sink.issued, self._released)
        metrics.enter("update")
        for keys, priorities in self._sink.updates():
            self._update(keys, priorities)
            work += 1
        metrics.enter("sample")
        for _ in range(self._sink.requests()):
            if not self._limiter.can_sample(self._batch_size):
                break
            self._limiter.sample(self._batch_size)
            self._sink.answer(self._replay.draw(self._batch_size, self._method))
            metrics.add("batches")
            metrics.add("sampled", self._batch_size)
            work += 1
        metrics.enter("idle")
        if work:
            self._publish_counts()
        return work

    def ready(self) -> bool:
        """There is something to do: for `wait(ready, timeout_s)`."""
        return (
            self._source.ready()
            or self._sink.ready()
            or (self._sink.requests() > 0 and self._limiter.can_sample(self._batch_size))
            # Slots that actors wait for may be out of quarantine now.
            or (self._sink.released > self._released and bool(self._intake.waiting))
        )

    def close(self) -> None:
        """Stop; the memory stays as it is."""
        self._publish_counts()
        self._metrics.leave()

    def _update(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> None:
        """Apply new priorities. A learner that has diverged must not take the memory with it."""
        try:
            self._replay.update_priorities(keys, priorities)
        except InvalidPriority as error:
            if not self.updates_refused:
                print(f"an update is refused, more are only counted: {error}", file=sys.stderr)
            self.updates_refused += 1

    def _publish_counts(self) -> None:
        metrics, replay = self._metrics, self._replay
        counted = {
            "inserted": self._intake.inserted,
            "evicted": self._intake.evicted,
            "updates_applied": replay.updates_applied,
            "updates_stale": replay.updates_stale,
            "updates_refused": self.updates_refused,
        }
        for name, count in counted.items():
            # What a former life counted stays.
            metrics.add(name, count - self._counted.get(name, 0))
        self._counted = counted
        for name, value in {
            "live": len(replay),
            "bytes_used": replay.ledger.counts["live"] * replay.store.layout.body_bytes,
            **{f"slots_{state}": count for state, count in replay.ledger.counts.items()},
        }.items():
            metrics.set(name, value)
        metrics.set("limiter", self._limiter_state())

    def _limiter_state(self) -> int:
        """Who waits now, as LIMITER_STATES names it."""
        charge = self._intake.charge
        filling, nobody = LIMITER_STATES.index("filling"), LIMITER_STATES.index("nobody waits")
        if not self._limiter.open:
            return filling
        if self._intake.waiting and not self._limiter.can_insert(charge):
            return LIMITER_STATES.index("actors wait")
        if self._sink.requests() and not self._limiter.can_sample(self._batch_size):
            return LIMITER_STATES.index("learner waits")
        return nobody
