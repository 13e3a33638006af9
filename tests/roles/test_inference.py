"""The inference role: one pass for all that wait."""

from typing import Any

import numpy as np

from tests.test_shm_ring import aligned
from zapex.host.metrics import RoleMetrics
from zapex.machine.exchange import Exchange, ExchangeShape
from zapex.roles.values import Inference, Pull

ACTORS, STREAMS = 3, 2
SHAPE = ExchangeShape(ACTORS, STREAMS, (3,), "<f4", 4)


class Policy:
    """Values that say which parameters and which items they are of."""

    def __init__(self) -> None:
        self.loaded, self.passes = 0, []

    def load_flat(self, buffer: Any) -> None:
        self.loaded = int(np.frombuffer(buffer, np.uint8)[0])

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        self.passes.append(len(obs))
        return (self.loaded + obs.sum(axis=1)[:, None] * np.ones(4)).astype(np.float32)


class Parameters:
    version = 0

    def newer_than(self, version: int, out: np.ndarray) -> int:
        out[:] = self.version
        return self.version if self.version > version else 0


class Desk:
    """The role among actors of this process."""

    def __init__(self, period: int = 1) -> None:
        self.exchange = Exchange(aligned(SHAPE.nbytes), SHAPE, create=True)
        memory = aligned(RoleMetrics.required_bytes())
        self.metrics = RoleMetrics(memory, "inference", create=True)
        self.asks = [self.exchange.asker(i, lambda: None) for i in range(ACTORS)]
        self.parameters, self.policy = Parameters(), Policy()
        self.period = period
        self.start()

    def start(self) -> None:
        pull = Pull(
            self.policy, self.parameters, self.metrics, period=self.period, parameter_bytes=8
        )
        self.role = Inference(
            self.exchange.answerer([lambda: None] * ACTORS), self.policy, pull, self.metrics,
            streams=STREAMS,
        )  # fmt: skip

    def ask(self, actor: int, value: float = 1.0) -> None:
        self.asks[actor].ask(np.full((STREAMS, 3), value, np.float32))

    def count(self, name: str) -> int:
        return int(self.metrics.value(name))


def test_one_pass_answers_all_waiting_actors() -> None:
    desk = Desk()
    desk.parameters.version = 5
    desk.ask(0, 1.0)
    desk.ask(2, 2.0)
    assert desk.role.ready()
    assert desk.role.do_work() == 2 * STREAMS
    assert desk.policy.passes == [2 * STREAMS]
    for actor, value in ((0, 1.0), (2, 2.0)):
        q, version = desk.asks[actor].take() or (None, 0)
        np.testing.assert_array_equal(q, np.full((STREAMS, 4), 5 + 3 * value))
        assert version == 5
    assert not desk.role.ready()
    assert desk.role.do_work() == 0
    assert [desk.count(n) for n in ("passes", "answers", "streams")] == [1, 2, 4]
    assert desk.count("params_version") == 5


def test_no_answer_before_the_first_parameters() -> None:
    desk = Desk()
    desk.ask(1)
    assert not desk.role.ready()
    assert desk.role.do_work() == 0
    assert not desk.asks[1].answered()
    desk.parameters.version = 1
    assert desk.role.ready()
    assert desk.role.do_work() == STREAMS


def test_parameters_are_pulled_every_few_answers() -> None:
    desk = Desk(period=4)
    pulled = []
    for version in range(1, 13):
        desk.parameters.version = version
        desk.ask(0)
        desk.role.do_work()
        pulled.append((desk.asks[0].take() or (0, 0))[1])
    assert pulled == [1] * 4 + [5] * 4 + [9] * 4
