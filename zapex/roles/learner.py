"""The learner: trains on batches, sends priorities back, publishes parameters."""

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.limits import LARGEST
from zapex.errors import Diverged
from zapex.host.metrics import RoleMetrics
from zapex.transport import ParameterSink, Sampled, SampleSource

if TYPE_CHECKING:
    from zapex.agent.learning import DQN

_REPORT_S = 30.0  # between two lines about rows that cannot be learned from


class Checkpointer(Protocol):
    """Says when a checkpoint is due, and writes one."""

    def due(self) -> bool:
        """Whether a checkpoint is due."""

    def save(self, dqn: "DQN", version: int) -> None:
        """Write one now."""


class Trainer(Protocol):
    """Makes steps, and says later what came of them, in the same order."""

    late: int
    """How many batches may be under way when the next one begins."""

    def begin(self, batch: Batch, enter: Callable[[str], object]) -> None:
        """Begin a step. The batch's memory stays as it is until its `finish`."""

    def finish(self) -> tuple[NDArray[np.float32], dict[str, float], dict[str, float]]:
        """Wait for the oldest step.

        Returns:
            TD errors (B,), the facts of `DQN.learn`, and the time of each phase in any unit; no
            time if `begin` has entered the phases.
        """


class AtOnce:
    """The steps of a DQN that `begin` makes itself, as on a CPU.

    Args:
        dqn: learns.
        complete: makes the DQN's columns from a batch; None: the batch has them.
        after: called after each step.
    """

    late = 0

    def __init__(
        self,
        dqn: "DQN",
        complete: Callable[[Batch], Any] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._dqn, self._complete, self._after = dqn, complete, after
        self._done: deque[tuple[NDArray[np.float32], dict[str, float]]] = deque()

    def begin(self, batch: Batch, enter: Callable[[str], object]) -> None:
        """Learn from a batch."""
        columns = batch if self._complete is None else self._complete(batch)
        self._done.append(self._dqn.learn(columns, enter))

    def finish(self) -> tuple[NDArray[np.float32], dict[str, float], dict[str, float]]:
        """What came of the oldest step."""
        if self._after is not None:
            self._after()
        return *self._done.popleft(), {}


class Learner:
    """One batch is one duty cycle; it asks for `prefetch` batches ahead.

    Args:
        dqn: learns.
        source: its batches.
        parameters: where it publishes.
        batches: memory of `trainer.late` + 1 batches, used in turn. With one more, the source may
            fill the next batch while this one is learned from.
        metrics: of the role.
        checkpointer: says when a checkpoint is due, and writes it.
        prefetch: batches requested ahead.
        publish_period_s: the least seconds between two publications.
        clock_s: seconds from any origin.
        first_version: the largest version of parameters that is known from before.
        trainer: makes the steps of `dqn`; None: at once.
    """

    def __init__(
        self,
        dqn: "DQN",
        source: SampleSource,
        parameters: ParameterSink,
        batches: Sequence[Batch],
        metrics: RoleMetrics,
        checkpointer: Checkpointer,
        *,
        prefetch: int,
        publish_period_s: float,
        clock_s: Callable[[], float],
        first_version: int = 0,
        trainer: Trainer | None = None,
    ) -> None:
        self._dqn, self._source, self._parameters = dqn, source, parameters
        self._trainer: Trainer = trainer or AtOnce(dqn)
        self._free = deque(batches)
        self._under_way: deque[tuple[Batch, Sampled]] = deque()
        self._metrics, self._checkpointer = metrics, checkpointer
        self._publish_period_s, self._clock_s = publish_period_s, clock_s
        self._left_out, self._report_due_s = 0, -math.inf
        self._unsent: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
        self.version = first_version
        metrics.enter("other")
        self.publish()
        self._learned = 0
        self._asked_at = deque([0] * source.outstanding)  # per request: batches learned
        for _ in range(source.outstanding, prefetch):
            self._request()
        metrics.enter("fill")

    def do_work(self) -> int:
        """Learn from one batch; 0 while there is none.

        Raises:
            Diverged: a TD error or the loss is not finite; nothing of that batch is sent or
                published.
        """
        metrics = self._metrics
        if self._checkpointer.due():
            self.checkpoint()
        if self._unsent is not None and not self._send(*self._unsent):
            return 0
        metrics.enter("gather")
        batch, following = self._free[0], self._free[1] if len(self._free) > 1 else None
        sampled = self._source.poll(batch, following)
        if sampled is not None:
            self._free.popleft()
            self._trainer.begin(batch, metrics.enter)
            self._under_way.append((batch, sampled))
        is_full = len(self._under_way) > self._trainer.late
        finishes = is_full or (sampled is None and bool(self._under_way))
        if finishes:
            self._finish()
        if self._clock_s() - self._published_s >= self._publish_period_s and finishes:
            self.publish()
        metrics.enter("wait" if self._learned or self._under_way else "fill")
        return int(finishes or sampled is not None)

    def _finish(self) -> None:
        """Wait for the oldest step, send its priorities, and ask for one more batch."""
        metrics = self._metrics
        if self._trainer.late:
            metrics.enter("forward")
        td_errors, facts, times = self._trainer.finish()
        metrics.divide(times)
        batch, sampled = self._under_way.popleft()
        sizes = np.abs(td_errors)
        largest = float(sizes.max())
        if not math.isfinite(largest):
            raise Diverged(
                f"a TD error is {largest}: learning has diverged. Lower --lr, clip rewards, or "
                "look for infinite rewards or observations; the newest checkpoint is from before"
            )
        self._report_left_out(facts.get("left_out", 0.0))
        metrics.add("batches")
        metrics.add("samples", len(td_errors))
        metrics.add("torn_rows", sampled.torn)
        for gauge, name in _GAUGES.items():
            metrics.set(gauge, facts[name])
        metrics.set("priority_mean", float(sizes.mean()))
        metrics.set("priority_max", largest)
        metrics.enter("update")
        self._send(batch.keys.copy(), td_errors)
        self._free.append(batch)
        metrics.set("staleness", self._learned - self._asked_at.popleft())
        self._learned += 1
        self._request()

    def _report_left_out(self, left_out: float) -> None:
        self._left_out += int(left_out)
        now_s = self._clock_s()
        if left_out and now_s >= self._report_due_s:
            self._report_due_s = now_s + _REPORT_S
            print(
                f"{self._left_out:,} sampled rows so far had numbers that are not finite, or "
                f"above {LARGEST:.0e}, and are not learned from: look for them in the rewards and "
                "observations of the environment",
                file=sys.stderr,
                flush=True,
            )

    def ready(self) -> bool:
        """Whether a batch is there, or a step under way: for `wait(ready, timeout_s)`."""
        return bool(self._under_way) or self._source.ready()

    def publish(self) -> None:
        """Publish the current parameters."""
        self._metrics.enter("publish")
        # Above any version seen, so that readers accept a restarted learner's parameters; another
        # one may have had its place while the network was cut.
        self.version = max(self.version, self._parameters.version) + 1
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
