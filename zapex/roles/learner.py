"""The learner: trains on sampled batches, sends priorities back, publishes parameters."""

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.batch import Batch
from zapex.errors import ZapexError
from zapex.metrics import RoleMetrics
from zapex.transport import ParameterSink, SampleSource

if TYPE_CHECKING:
    from zapex.agent.learning import DQN


class Checkpointer(Protocol):
    """Says when a checkpoint is due, and writes one."""

    def due(self) -> bool:
        """It is time."""

    def save(self, dqn: "DQN", version: int) -> None:
        """Write one now."""


class Learner:
    """One batch is one duty cycle; `prefetch` batches are asked for ahead.

    spare: a second batch's memory, in turn with the first: the source may fill one while the other
    is learned from.
    publish_period_s: parameters are published at most this often. clock_s: seconds, of any origin.
    """

    def __init__(
        self,
        dqn: "DQN",
        source: SampleSource,
        parameters: ParameterSink,
        batch: Batch,
        metrics: RoleMetrics,
        checkpointer: Checkpointer,
        *,
        prefetch: int,
        publish_period_s: float,
        clock_s: Callable[[], float],
        first_version: int = 0,
        spare: Batch | None = None,
    ) -> None:
        self._dqn, self._source, self._parameters = dqn, source, parameters
        self._batch, self._spare = batch, spare
        self._metrics, self._checkpointer = metrics, checkpointer
        self._publish_period_s, self._clock_s = publish_period_s, clock_s
        self._unsent: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
        # Above any version seen, so that no reader takes a restarted learner's for old.
        self.version = max(first_version, parameters.version)
        metrics.enter("other")
        self.publish()
        self._learned = 0
        self._asked_at = deque([0] * source.outstanding)  # of each request: batches learned by then
        for _ in range(source.outstanding, prefetch):
            self._request()
        metrics.enter("wait")

    def do_work(self) -> int:
        """Learn from one batch; 0 while there is none.

        Raises ZapexError where learning has diverged; nothing of that batch is sent or published.
        """
        metrics, dqn, batch = self._metrics, self._dqn, self._batch
        if self._checkpointer.due():
            self.checkpoint()
        if self._unsent is not None and not self._send(*self._unsent):
            return 0
        metrics.enter("gather")
        sampled = self._source.poll(batch, self._spare)
        if sampled is None:
            metrics.enter("wait")
            return 0
        if self._spare is not None:
            self._batch, self._spare = self._spare, batch
        td_errors, facts = dqn.learn(batch, metrics.enter)
        sizes = np.abs(td_errors)
        largest = float(sizes.max())
        if not math.isfinite(largest):
            raise ZapexError(
                f"a TD error is {largest}: learning has diverged. Lower --lr, clip rewards, or "
                "look for infinite rewards or observations; the newest checkpoint is from before"
            )
        metrics.add("batches")
        metrics.add("samples", len(td_errors))
        metrics.add("torn_rows", sampled.torn)
        for gauge, name in _GAUGES.items():
            metrics.set(gauge, facts[name])
        metrics.set("priority_mean", float(sizes.mean()))
        metrics.set("priority_max", largest)
        metrics.enter("update")
        self._send(batch.keys.copy(), td_errors)
        metrics.set("staleness", self._learned - self._asked_at.popleft())
        self._learned += 1
        self._request()
        if self._clock_s() - self._published_s >= self._publish_period_s:
            self.publish()
        metrics.enter("wait")
        return 1

    def ready(self) -> bool:
        """A batch is there: for `wait(ready, timeout_s)`."""
        return self._source.ready()

    def publish(self) -> None:
        """Make the parameters as they are now the newest."""
        self._metrics.enter("publish")
        self.version += 1
        self._parameters.publish(self.version, self._dqn.flat_parameters().view(np.uint8))
        self._published_s = self._clock_s()
        self._metrics.set("params_version", self.version)

    def checkpoint(self) -> None:
        """Save everything that a resumed run needs."""
        self._metrics.enter("checkpoint")
        self._checkpointer.save(self._dqn, self.version)
        self._metrics.enter("other")

    def close(self) -> None:
        """Save a last checkpoint, and stop."""
        self.checkpoint()
        self._metrics.leave()

    def _request(self) -> None:
        self._asked_at.append(self._learned)
        self._source.request()

    def _send(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> bool:
        sent = self._source.update(keys, priorities)
        self._unsent = None if sent else (keys, priorities)
        return sent


_GAUGES = {
    "loss": "td_loss",
    "q_mean": "q_values",
    "td_abs_mean": "td_error",
    "grad_norm": "gradient_norm",
}
