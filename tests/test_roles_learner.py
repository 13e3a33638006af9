"""The learner: what it asks for, sends back, publishes and saves."""

from typing import Any

import numpy as np
import pytest

from zapex.batch import Batch
from zapex.errors import ZapexError
from zapex.metrics import RoleMetrics
from zapex.roles.learner import Learner
from zapex.schema import BatchLayout, Column, Schema
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


class Desk:
    def __init__(
        self, *, version: int = 0, first_version: int = 0, outstanding: int = 0,
        spare: Batch | None = None,
    ) -> None:  # fmt: skip
        self.source, self.sink = FakeSource(), FakeSink(version)
        self.source.outstanding = outstanding
        self.dqn, self.checkpointer = FakeDqn(), FakeCheckpointer()
        self.now_s = 0.0
        block = bytearray(RoleMetrics.required_bytes())
        self.metrics = RoleMetrics(block, "learner", create=True)
        dqn: Any = self.dqn
        self.learner = Learner(
            dqn, self.source, self.sink, Batch.empty(LAYOUT), self.metrics, self.checkpointer,
            prefetch=3, publish_period_s=1.0, clock_s=lambda: self.now_s,
            first_version=first_version, spare=spare,
        )  # fmt: skip


def test_it_begins_by_publishing_and_by_asking_for_what_is_to_be_ahead() -> None:
    desk = Desk()
    assert desk.sink.published == [1]
    assert desk.source.outstanding == 3
    assert desk.learner.do_work() == 0
    assert not desk.learner.ready()
    desk.source.there = 1
    assert desk.learner.ready()


@pytest.mark.parametrize(("version", "first_version", "then"), [(7, 0, 8), (0, 9, 10), (4, 2, 5)])
def test_no_life_publishes_a_version_that_was_there_before(
    version: int, first_version: int, then: int
) -> None:
    assert Desk(version=version, first_version=first_version).sink.published == [then]


def test_what_a_former_life_asked_for_is_not_asked_for_again() -> None:
    assert Desk(outstanding=2).source.outstanding == 3
    assert Desk(outstanding=6).source.outstanding == 6


def test_each_batch_sends_its_keys_back_with_its_errors_and_asks_for_another() -> None:
    desk = Desk()
    desk.source.there = 2
    assert desk.learner.do_work() == 1
    assert desk.learner.do_work() == 1
    assert desk.learner.do_work() == 0
    assert desk.source.updates == [
        ([4, 5, 6, 7], [-3.0, 1.0, 2.0, 0.0]),
        ([8, 9, 10, 11], [-6.0, 2.0, 4.0, 0.0]),
    ]
    assert desk.source.outstanding == 3
    counts = desk.metrics.snapshot(alive=False)
    assert (counts["batches"], counts["samples"], counts["torn_rows"]) == (2, 8, 2)
    assert (counts["loss"], counts["priority_max"]) == (0.25, 6.0)


def test_two_memories_take_turns_and_the_source_is_told_which_is_next() -> None:
    spare = Batch.empty(LAYOUT)
    desk = Desk(spare=spare)
    desk.source.there = 3
    for _ in range(4):
        desk.learner.do_work()
    (first, second), *_ = desk.source.memories
    assert second is spare
    assert desk.source.memories == [(first, spare), (spare, first), (first, spare)]
    assert [keys for keys, _ in desk.source.updates] == [[4, 5, 6, 7], [8, 9, 10, 11],
                                                         [12, 13, 14, 15]]  # fmt: skip


def test_it_says_how_many_batches_were_learned_since_the_last_one_was_asked_for() -> None:
    desk = Desk()
    desk.source.there = 4
    seen = []
    while desk.learner.do_work():
        seen.append(desk.metrics.snapshot(alive=False)["staleness"])
    # Three are asked for ahead, so from the fourth on two were learned in between.
    assert seen == [0, 1, 2, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_td_error_that_is_not_finite_ends_it_and_is_never_sent(bad: float) -> None:
    desk = Desk()
    desk.source.there = 2
    desk.learner.do_work()
    desk.dqn.factor = bad
    with pytest.raises(ZapexError, match=r"TD error is (nan|inf): learning has diverged. Lower"):
        desk.learner.do_work()
    assert len(desk.source.updates) == 1
    assert desk.sink.published == [1]


def test_priorities_that_find_no_room_wait_and_no_batch_overtakes_them() -> None:
    desk = Desk()
    desk.source.there, desk.source.room = 3, 0
    assert desk.learner.do_work() == 1
    assert desk.learner.do_work() == 0
    assert desk.dqn.learned == 1
    desk.source.room = 5
    assert desk.learner.do_work() == 1
    assert [keys[0] for keys, _ in desk.source.updates] == [4, 8]


def test_parameters_are_published_at_most_so_often() -> None:
    desk = Desk()
    for _ in range(25):
        desk.now_s += 0.1
        desk.source.there = 1
        desk.learner.do_work()
    assert desk.sink.published == [1, 2, 3]
    assert desk.metrics.snapshot(alive=False)["params_version"] == 3


def test_a_checkpoint_is_saved_when_it_is_due_and_at_the_end() -> None:
    desk = Desk()
    desk.checkpointer.wanted = True
    desk.learner.do_work()
    assert desk.checkpointer.saved == [1], "even while there is no batch"
    desk.learner.close()
    assert desk.checkpointer.saved == [1, 1]
    assert desk.metrics.pid == 0
