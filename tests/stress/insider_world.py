"""A replay server, and honest peers of it: two actor hosts, a learner and a reader, with keys."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.relays import Accounts, Relay
from tests.support.transport_rigs import (
    BATCH,
    BETA,
    Memory,
    NetworkReplay,
    make_link,
    until,
    url_of,
)
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.columns import Column
from zapex.chunks.layout import COUNT, HOST, LIVE, STATE, BatchLayout
from zapex.chunks.limits import Limits
from zapex.chunks.schema import Schema
from zapex.host.metrics import EPISODE, RoleMetrics
from zapex.host.parts import PARTS
from zapex.host.plan import HostPlan
from zapex.net import keys as curve_keys
from zapex.net.keys import Security
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.statistics import StatsHandler, StatsSender
from zapex.replay.core import ReplayLayout
from zapex.shm_transport import HostMemory
from zapex.wire import control as m
from zapex.wire.header import Form
from zapex.zmq_transport import ZmqParameterSink, ZmqParameterSource

HONEST, STREAMS, CHUNK, CAPACITY, PARAMETER_BYTES = 2, 2, 8, 4000, 1000
ACTORS = HONEST + 2  # the insider's, and one for a host that joins later
CONFIG = {"env": "game", "gamma": 0.9}
SCHEMA = Schema(
    {"obs": Column((3, 2), np.float32, stack=4), "action": Column((), np.int64),
     "mask": Column((2,), np.float32)},
    n_step=3, gamma=0.9,
)  # fmt: skip
LIMITS = Limits(reward=CHUNK - 1, discount=0.9, priority=20.0, actions=1 << 40, frame=255.0)
LIAR = -7.0  # in the mask of the insider's rows


def layout() -> ReplayLayout:
    return ReplayLayout(SCHEMA, CAPACITY, ACTORS * STREAMS, CHUNK)


def form() -> Form:
    return Form(
        layout().chunk_layout, BATCH, PARAMETER_BYTES, RoleMetrics.required_bytes(),
        EPISODE.itemsize, limits=LIMITS,
    )  # fmt: skip


class Honest(Accounts):
    """The account of the honest hosts' chunks; the insider's are not looked at."""

    def __init__(self, hosts: set[int]) -> None:
        super().__init__()
        self._hosts = hosts

    def check(self, replay: Any, slot: int) -> None:
        if int(replay.store.header_rows[slot, HOST]) in self._hosts:
            super().check(replay, slot)


class Actor:
    """An honest host: its relay, and the counters of its actor."""

    def __init__(self, url: str, host: int, security: Security) -> None:
        self.relay = Relay(layout(), url, host, security=security, form=form())
        # Hosts count their own actors from 0; the account is by host.
        self.relay.incarnation[0] = host
        self.block = RoleMetrics(bytearray(RoleMetrics.required_bytes()), "actor", create=True)
        self.block.enter("environment")
        self.stats: StatsSender | None = None

    def turn(self) -> None:
        before = len(self.relay.offered)
        self.relay.make()
        self.relay.turn()
        if len(self.relay.offered) > before:
            self.block.add("steps", 1)
            self.block.add("frames", 1)
        welcome = self.relay.link.welcome
        if self.stats is None and welcome is not None:
            number = int(welcome.actors["actor"][0])
            self.stats = StatsSender(self.relay.link, {number: self.block})
        if self.stats is not None:
            self.stats.do_work()


class World:
    """A replay server and its honest peers; `turn` is one duty cycle of each."""

    def __init__(self, keys: Path, scheme: str = "tcp") -> None:
        self.security = {
            role: Security(curve_keys.load(keys, role))
            for role in ("replay", "relay", "learner", "reader", "client")
        }
        self.told: list[str] = []
        self.honest = Honest(set(range(1, HONEST + 1)))
        self.server = self.honest.watch(
            NetworkReplay(
                Memory(layout(), ACTORS), url_of(scheme, keys), self.security["replay"],
                form=form(), tell=self.told.append,
            )
        )  # fmt: skip
        plan = HostPlan(
            replay=layout(), actors=ACTORS, envs_per_actor=STREAMS, batch_size=BATCH, prefetch=1,
            parameter_bytes=PARAMETER_BYTES, beta=BETA, eval_episodes=1, part=PARTS["replay"],
        )  # fmt: skip
        self.host = HostMemory(
            plan, aligned_zeros(plan.nbytes), aligned_zeros(8), [-1] * len(plan.roles), create=True
        )
        self.handler = StatsHandler(self.server.server, self.host)
        url = self.url = self.server.url
        self.actors = [Actor(url, host, self.security["relay"]) for host in range(1, HONEST + 1)]
        self.learner = self.link("learner", 8)
        self.source, self.sink = ZmqSampleSource(self.learner, BETA), ZmqParameterSink(self.learner)
        self.reader = self.link("reader", 9)
        self.parameters = ZmqParameterSource(self.reader)
        self.batch = Batch.empty(BatchLayout(SCHEMA, BATCH))
        self.rng = np.random.default_rng(1)
        self.batches = self.version = 0
        # Rows of the insider that were sampled, and how many its share of the memory makes.
        self.won = self.fair = 0.0
        until(self.works, self.turn, "the honest peers")

    def link(self, role: str, host: int, **more: Any) -> Any:
        security = self.security[role]
        return make_link(self.url, role, host, layout(), security=security, form=form(), **more)

    @property
    def counts(self) -> Counter[str]:
        """All that the server has counted."""
        counts = Counter(self.server.server.counts)
        counts.update({f"push {k}": n for k, n in self.server.source.counts.items()})
        counts.update({f"stats {k}": n for k, n in self.handler.counts.items()})
        return counts

    def works(self) -> bool:
        """Everything honest is under way."""
        return self.batches > 0 and self.parameters.version > 0 and len(self.server.replay) > BATCH

    def turn(self) -> None:
        server = self.server
        server.turn()
        for actor in self.actors:
            actor.turn()
        for keys, priorities in server.sink.updates():
            server.replay.reprioritise(keys, priorities.astype(np.float64))
        while len(server.replay) >= BATCH and server.sink.requests():
            server.sink.answer(server.replay.draw(BATCH))
        self._learn()
        assert self.parameters.version >= 0  # it asks for newer ones

    def _learn(self) -> None:
        if self.source.outstanding < 1 and self.learner.is_open:
            self.source.request()
        if not self.source.ready():
            return
        batch, rows = self.batch, self.server.replay.store.header_rows
        self.source.poll(batch)
        live = rows[rows[:, STATE] == LIVE]
        self.fair += BATCH * live[live[:, HOST] == INSIDER, COUNT].sum() / live[:, COUNT].sum()
        self.won += (batch["mask"][:, 0] == LIAR).sum()
        for name in ("obs", "next_obs"):
            assert (np.abs(batch[name]) <= LIMITS.frame).all()
        assert (np.abs(batch.reward) <= LIMITS.reward).all()
        assert ((batch.discount >= 0) & (batch.discount <= LIMITS.discount)).all()
        assert ((batch.action >= 0) & (batch.action < LIMITS.actions)).all()
        assert np.isfinite(batch.weights).all()
        td_errors = self.rng.normal(size=BATCH).astype(np.float32)
        assert self.source.update(batch.keys.copy(), td_errors)
        self.batches += 1
        if self.batches % 20 == 1:
            self.version = max(self.sink.version, self.version) + 1
            self.sink.publish(self.version, np.full(PARAMETER_BYTES, 1, np.uint8))

    def goes_on(self, what: str) -> None:
        """Every honest peer gets further."""
        batches, version = self.batches, self.parameters.version
        before = [actor.relay.acknowledged for actor in self.actors]

        def further() -> bool:
            acknowledged = [actor.relay.acknowledged for actor in self.actors]
            more = all(now > then for now, then in zip(acknowledged, before, strict=True))
            return more and self.batches > batches and self.parameters.version >= version

        until(further, self.turn, f"the honest peers to go on after: {what}")

    def settle(self) -> dict[str, Any]:
        """All that the honest sent is there, once, and a newcomer comes in. Returns numbers."""
        newcomer = self.link("relay", 77, actors=1)
        until(lambda: newcomer.is_open, lambda: (self.turn(), newcomer.do_work()), "a newcomer")
        newcomer.close(bye=m.Bye())
        relays = [actor.relay for actor in self.actors]

        def turn() -> None:
            self.server.turn()
            for relay in relays:
                relay.turn()

        until(lambda: not any(r.sender.unacknowledged for r in relays), turn, "the rest")
        self.server.turn()
        offered = {(r.host, sequence) for r in relays for _, _, sequence in r.offered}
        taken = {(host, sequence): n for (_, host, sequence), n in self.honest.taken.items()}
        assert taken == dict.fromkeys(offered, 1)

        def counted() -> bool:
            return all(self._counted(actor) == len(actor.relay.offered) for actor in self.actors)

        until(counted, self._report, "the honest hosts' counters")
        for link in (*(r.link for r in relays), self.learner, self.reader):
            assert (link.counts["connections"], link.counts["bad"]) == (2, 0), link.counts
        return {
            "chunks": len(offered), "batches": self.batches, "told": len(self.told),
            "won": self.won, "fair": round(self.fair), "counts": dict(self.counts),
        }  # fmt: skip

    def _report(self) -> None:
        self.server.turn()
        for actor in self.actors:
            assert actor.stats is not None
            actor.relay.turn()
            actor.stats.do_work()

    def _counted(self, actor: Actor) -> int:
        assert actor.relay.link.welcome is not None
        number = int(actor.relay.link.welcome.actors["actor"][0])
        return int(self.host.metrics(f"actor {number}").snapshot(alive=False)["frames"])


INSIDER = 1000
"""Its host's number."""
