"""The learner: what it asks for, sends back, publishes and saves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from zapex.chunks.batch import Batch
from zapex.chunks.layout import BatchLayout
from zapex.chunks.schema import Column, Schema
from zapex.errors import ZapexError
from zapex.host.metrics import RoleMetrics
from zapex.roles.learner import Learner
from zapex.transport import Sampled

COLUMNS = {"obs": Column((2,), np.float32), "action": Column((), np.int64)}
LAYOUT = BatchLayout(Schema(COLUMNS, n_step=1), 4)


class FakeSource:
    """Batches on demand; `room` says how many updates it takes."""

    def __init__(self) -> None:
        self.outstanding = 0
        self.there = 0
        self.room = 1000
        self.updates: list[tuple[list[int], list[float]]] = []
        self.polled = 0
        self.memories: list[tuple[Batch, Batch | None]] = []

    def request(self) -> None:
        self.outstanding += 1

    def ready(self) -> bool:
        return self.there > 0

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        if not self.there:
            return None
        self.there -= 1
        self.outstanding -= 1
        self.polled += 1
        self.memories.append((batch, following))
        batch.keys[:] = np.arange(4) + 4 * self.polled
        return Sampled(torn=1, live=9)

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.updates.append((keys.tolist(), priorities.tolist()))
        return True


class FakeSink:
    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.published: list[int] = []

    def publish(self, version: int, parameters: np.ndarray) -> None:
        assert version > self.version
        assert parameters.dtype == np.uint8
        self.version = version
        self.published.append(version)


class FakeDqn:
    learned = 0
    factor = 1.0

    def flat_parameters(self) -> np.ndarray:
        return np.zeros(3, np.float32)

    def learn(self, batch: Batch, phase: Any) -> Any:
        phase("forward")
        self.learned += 1
        facts = {"td_loss": 0.25, "q_values": 2.0, "td_error": 1.0, "gradient_norm": 3.0}
        td_errors = np.array([-3.0, 1.0, 2.0, 0.0], np.float32) * self.learned
        td_errors[1] *= self.factor
        return td_errors, facts


class FakeCheckpointer:
    wanted = False

    def __init__(self) -> None:
        self.saved: list[int] = []

    def due(self) -> bool:
        return self.wanted

    def save(self, dqn: Any, version: int) -> None:
        self.wanted = False
        self.saved.append(version)


class Rig:
    def __init__(
        self, *, version: int = 0, first_version: int = 0, outstanding: int = 0,
        spare: Sequence[Batch] = (), trainer: Any = None,
    ) -> None:  # fmt: skip
        self.source, self.sink = FakeSource(), FakeSink(version)
        self.source.outstanding = outstanding
        self.dqn, self.checkpointer = FakeDqn(), FakeCheckpointer()
        self.now_s = 0.0
        block = bytearray(RoleMetrics.required_bytes())
        self.metrics = RoleMetrics(block, "learner", create=True)
        dqn: Any = self.dqn
        self.learner = Learner(
            dqn, self.source, self.sink, [Batch.empty(LAYOUT), *spare], self.metrics,
            self.checkpointer, prefetch=3, publish_period_s=1.0, clock_s=lambda: self.now_s,
            first_version=first_version, trainer=trainer,
        )  # fmt: skip


def test_learner_starts_by_publishing_and_prefetching() -> None:
    rig = Rig()
    assert rig.sink.published == [1]
    assert rig.source.outstanding == 3
    assert rig.learner.do_work() == 0
    assert not rig.learner.ready()
    rig.source.there = 1
    assert rig.learner.ready()


def test_wait_for_the_first_batch_is_a_phase_of_its_own() -> None:
    rig = Rig()
    rig.learner.do_work()
    assert rig.metrics.phase == "fill"
    rig.source.there = 1
    assert rig.learner.do_work() == 1
    assert rig.learner.do_work() == 0
    assert rig.metrics.phase == "wait"


@pytest.mark.parametrize(("version", "first_version", "then"), [(7, 0, 8), (0, 9, 10), (4, 2, 5)])
def test_published_versions_only_grow(version: int, first_version: int, then: int) -> None:
    assert Rig(version=version, first_version=first_version).sink.published == [then]


def test_requests_of_a_former_incarnation_count() -> None:
    assert Rig(outstanding=2).source.outstanding == 3
    assert Rig(outstanding=6).source.outstanding == 6


def test_each_batch_returns_td_errors_and_requests_another() -> None:
    rig = Rig()
    rig.source.there = 2
    assert rig.learner.do_work() == 1
    assert rig.learner.do_work() == 1
    assert rig.learner.do_work() == 0
    assert rig.source.updates == [
        ([4, 5, 6, 7], [-3.0, 1.0, 2.0, 0.0]),
        ([8, 9, 10, 11], [-6.0, 2.0, 4.0, 0.0]),
    ]
    assert rig.source.outstanding == 3
    counts = rig.metrics.snapshot(alive=False)
    assert (counts["batches"], counts["samples"], counts["torn_rows"]) == (2, 8, 2)
    assert (counts["loss"], counts["priority_max"]) == (0.25, 6.0)


def test_batches_take_turns() -> None:
    spare = Batch.empty(LAYOUT)
    rig = Rig(spare=[spare])
    rig.source.there = 3
    for _ in range(4):
        rig.learner.do_work()
    (first, second), *_ = rig.source.memories
    assert second is spare
    assert rig.source.memories == [(first, spare), (spare, first), (first, spare)]
    assert [keys for keys, _ in rig.source.updates] == [[4, 5, 6, 7], [8, 9, 10, 11],
                                                         [12, 13, 14, 15]]  # fmt: skip


def test_staleness_counts_batches_since_the_request() -> None:
    rig = Rig()
    rig.source.there = 4
    seen = []
    while rig.learner.do_work():
        seen.append(rig.metrics.snapshot(alive=False)["staleness"])
    # Three are asked for ahead, so from the fourth on two were learned in between.
    assert seen == [0, 1, 2, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_td_error_raises_and_is_not_sent(bad: float) -> None:
    rig = Rig()
    rig.source.there = 2
    rig.learner.do_work()
    rig.dqn.factor = bad
    with pytest.raises(ZapexError, match=r"TD error is (nan|inf): learning has diverged. Lower"):
        rig.learner.do_work()
    assert len(rig.source.updates) == 1
    assert rig.sink.published == [1]


def test_priorities_wait_for_room_before_the_next_batch() -> None:
    rig = Rig()
    rig.source.there, rig.source.room = 3, 0
    assert rig.learner.do_work() == 1
    assert rig.learner.do_work() == 0
    assert rig.dqn.learned == 1
    rig.source.room = 5
    assert rig.learner.do_work() == 1
    assert [keys[0] for keys, _ in rig.source.updates] == [4, 8]


def test_parameters_are_published_at_most_once_a_period() -> None:
    rig = Rig()
    for _ in range(25):
        rig.now_s += 0.1
        rig.source.there = 1
        rig.learner.do_work()
    assert rig.sink.published == [1, 2, 3]
    assert rig.metrics.snapshot(alive=False)["params_version"] == 3


def test_checkpoint_is_saved_when_due_and_on_close() -> None:
    rig = Rig()
    rig.checkpointer.wanted = True
    rig.learner.do_work()
    assert rig.checkpointer.saved == [1], "even while there is no batch"
    rig.learner.close()
    assert rig.checkpointer.saved == [1, 1]
    assert rig.metrics.pid == 0


class LateTrainer:
    """Its results come a batch late."""

    late = 1

    def __init__(self) -> None:
        self.begun: list[Batch] = []
        self.finished = 0

    def begin(self, batch: Batch, enter: Any) -> None:
        enter("forward")
        self.begun.append(batch)

    def finish(self) -> Any:
        self.finished += 1
        facts = {"td_loss": 0.25, "q_values": 2.0, "td_error": 1.0, "gradient_norm": 3.0}
        facts["left_out"] = 2.0 if self.finished == 1 else 0.0
        times = {"forward": 1.0, "backward": 2.0, "optimiser": 1.0}
        return np.full(4, float(self.finished), np.float32), facts, times


def test_late_results_go_to_their_own_batch() -> None:
    trainer = LateTrainer()
    rig = Rig(spare=[Batch.empty(LAYOUT), Batch.empty(LAYOUT)], trainer=trainer)
    rig.source.there = 3
    assert rig.learner.do_work() == 1
    assert not rig.source.updates, "the first step is under way"
    assert rig.source.outstanding == 2, "its request is made again when it is done"
    for _ in range(3):
        assert rig.learner.ready()
        assert rig.learner.do_work() == 1
    assert rig.source.updates == [([4, 5, 6, 7], [1.0] * 4), ([8, 9, 10, 11], [2.0] * 4),
                                  ([12, 13, 14, 15], [3.0] * 4)]  # fmt: skip
    assert not rig.learner.ready(), "without a next batch, the last step is finished all the same"
    assert rig.learner.do_work() == 0
    assert rig.source.outstanding == 3


def test_batch_in_use_by_a_late_trainer_is_not_refilled() -> None:
    trainer = LateTrainer()
    rig = Rig(spare=[Batch.empty(LAYOUT), Batch.empty(LAYOUT)], trainer=trainer)
    rig.source.there = 20
    for _ in range(10):
        rig.learner.do_work()
        batch, following = rig.source.memories[-1]
        assert following is not None
        assert all(following is not each for each in (batch, *trainer.begun[trainer.finished :]))


def test_left_out_rows_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    rig = Rig(spare=[Batch.empty(LAYOUT)], trainer=LateTrainer())
    rig.source.there = 4
    for _ in range(4):
        rig.learner.do_work()
    assert capsys.readouterr().err.startswith("2 sampled rows so far had numbers")
