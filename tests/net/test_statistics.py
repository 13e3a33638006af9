"""Who is told of the whole run's counts, and in which order."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.transport_rigs import SCHEMA
from zapex.chunks.batch import aligned_zeros
from zapex.host.metrics import RoleMetrics
from zapex.host.parts import PARTS
from zapex.host.plan import HostPlan
from zapex.net.sessions import Session
from zapex.net.statistics import StatsHandler, StatsReader
from zapex.replay.core import ReplayLayout
from zapex.shm_transport import HostMemory
from zapex.wire.messages import REPLAY, Stats
from zapex.wire.protocol import Kind, as_buffer

ACTORS = 2


def layout() -> ReplayLayout:
    return ReplayLayout(SCHEMA, 64, 2 * ACTORS, 8)


def memory_of(part: str) -> HostMemory:
    plan = HostPlan(
        replay=layout(), actors=ACTORS, envs_per_actor=2, batch_size=8, prefetch=1,
        parameter_bytes=1000, beta=0.4, eval_episodes=1, part=PARTS[part],
    )  # fmt: skip
    pids = [-1] * len(plan.roles)
    return HostMemory(plan, aligned_zeros(plan.nbytes), aligned_zeros(8), pids, create=True)


class FakeServer:
    """A link server whose messages arrive at once, or not at all."""

    def __init__(self) -> None:
        self.learner: Session | None = None
        self.refuses: set[int] = set()  # numbers that cannot be sent now
        self.sent: list[tuple[Session, Stats]] = []
        self.relay = Session("relay", 1, 1, 0.0, actors=(0, 1))

    @property
    def sessions(self) -> Any:
        return SimpleNamespace(learner=self.learner, of_actor=lambda number: self.relay)

    def send(self, session: Session, channel: int, stats: Stats) -> object:
        if stats.number in self.refuses:
            return None
        self.sent.append((session, stats))
        return object()


class FakeLink:
    """A learner's link whose messages come by hand."""

    def register(self, handlers: Any, *, on_welcome: Any) -> None:
        self.handlers, self.on_welcome = handlers, on_welcome


def test_a_new_learner_counts_nothing_twice() -> None:
    server, now_s = FakeServer(), [0.0]
    handler = StatsHandler(server, memory_of("replay"), lambda: now_s[0])  # type: ignore[arg-type]
    for number in range(ACTORS):
        block = RoleMetrics(bytearray(RoleMetrics.required_bytes()), "actor", create=True)
        block.enter("environment")
        block.add("frames", 500)
        stats = Stats(number, 0, as_buffer(block.as_bytes()), as_buffer(np.empty(0, np.uint8)))
        handler.handlers[Kind.STATS](server.relay, stats)
    first = Session("learner", 8, 1, 0.0)
    server.learner, server.refuses = first, {REPLAY}
    for _ in range(3):
        handler.do_work()
    assert [stats.number for _, stats in server.sent] == [0, 1]  # the replay's own is left

    second, link, host = Session("learner", 9, 1, 0.0), FakeLink(), memory_of("learner")
    StatsReader(link, host)  # type: ignore[arg-type]
    link.on_welcome(SimpleNamespace(epoch=5), 0)
    server.learner, server.refuses = second, set()
    for _ in range(3):
        now_s[0] += 1.0
        handler.do_work()
    for session, stats in server.sent:
        if session is second:
            link.handlers[Kind.STATS](stats)
    # What was played before this learner's run began is in its base already.
    assert [host.metrics(f"actor {i}").snapshot(alive=True)["frames"] for i in range(2)] == [0, 0]
