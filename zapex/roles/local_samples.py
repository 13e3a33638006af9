"""A learner that keeps the replay itself: it pulls all experience and draws its own batches.

The baseline of Furukawa & Matsutani (arXiv 2110.13506) does so. Every batch waits until all that
has come is taken in. A replay in another process does that beside the learner.
"""

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.host.metrics import RoleMetrics
from zapex.replay.core import ReplayCore
from zapex.roles.intake import Intake
from zapex.roles.replay_server import ReplayCounts
from zapex.sumtree_numba import Method
from zapex.transport import Sampled

_ROUNDS = 8  # of grants and chunks before a batch: a learner must not only take in


class LocalSampleSource:
    """Drains any ExperienceSource into a replay of this process, and samples there.

    intake: of the source, into `replay`. metrics: of a replay; its phases show what part of the
    learner's time the memory takes.
    """

    def __init__(
        self, replay: ReplayCore, intake: Intake, metrics: RoleMetrics, *, batch_size: int,
        method: Method, beta: float,
    ) -> None:  # fmt: skip
        self.replay, self.intake, self._metrics = replay, intake, metrics
        self._batch_size, self._method, self._beta = batch_size, method, beta
        self._counts = ReplayCounts(replay, intake, metrics)
        self.outstanding = 0
        metrics.enter("other")
        metrics.set("capacity", replay.layout.capacity)

    def drain(self) -> int:
        """Take in what has come, as far as the limiter lets it. Returns how much it was."""
        self._metrics.enter("insert")
        work = 0
        for _ in range(_ROUNDS):
            # No batch is under way: each is gathered as soon as it is drawn.
            done = self.intake.do_work(0, 0)
            work += done
            if not done:
                break
        if work:
            self._counts.publish()
        self._metrics.enter("idle")
        return work

    def request(self) -> None:
        """Ask for one more batch."""
        self.outstanding += 1

    def ready(self) -> bool:
        """Whether a batch can be polled, or something has come since the last call."""
        return self.drain() > 0 or self._can_sample()

    def _can_sample(self) -> bool:
        return self.outstanding > 0 and self.intake.limiter.can_sample(self._batch_size)

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        """Pull what has come, then draw and gather a batch; None while there is too little."""
        self.drain()
        if not self._can_sample():
            return None
        metrics = self._metrics
        metrics.enter("sample")
        self.intake.limiter.sample(self._batch_size)
        self.outstanding -= 1
        draw = self.replay.draw(self._batch_size, self._method)
        torn = draw.gather(self.replay.store, batch, self._beta)
        metrics.add("batches")
        metrics.add("sampled", self._batch_size)
        metrics.enter("idle")
        return Sampled(torn, draw.count)

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> bool:
        """Apply new priorities now."""
        self._metrics.enter("update")
        self._counts.reprioritise(keys, priorities)
        self._metrics.enter("idle")
        return True

    def close(self) -> None:
        """Stop; the memory does not change."""
        self._counts.publish()
        self._metrics.leave()
