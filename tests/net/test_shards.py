"""A relay and a learner with two replays: who gets what, and what happens when one is gone."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.relays import Relay
from tests.support.transport_rigs import (
    BATCH,
    BETA,
    SCHEMA,
    Memory,
    NetworkReplay,
    layout_of,
    make_link,
    nothing_left_open,
    until,
)
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.keys import by_shard, without_shard
from zapex.chunks.layout import STATE, BatchLayout
from zapex.host.metrics import RoleMetrics
from zapex.host.roster import Routes
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.shard_samples import LATE_S, ShardedSampleSource
from zapex.run.networked import count_shares
from zapex.zmq_transport import GONE_S, ShardedChunkSender, preferences

__all__ = ["nothing_left_open"]  # a fixture of every test here

ACTORS = 4
LAYOUT = layout_of(2000, 2 * ACTORS)


class Clock:
    """A monotonic clock that tests may move on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Shards:
    """Two replays on memories of their own, each of which may be away."""

    def __init__(self, folder: Path) -> None:
        self.urls = [f"ipc://{folder}/{s}" for s in range(2)]
        self.memories = [Memory(LAYOUT, ACTORS) for _ in self.urls]
        self.servers: list[NetworkReplay | None] = [None, None]
        for shard in range(2):
            self.start(shard)

    def start(self, shard: int) -> None:
        self.servers[shard] = NetworkReplay(self.memories[shard], self.urls[shard])

    def stop(self, shard: int, *, empty: bool = False) -> None:
        server = self.servers[shard]
        assert server is not None
        server.close()
        self.servers[shard] = None
        if empty:
            self.memories[shard] = Memory(LAYOUT, ACTORS)

    def turn(self) -> None:
        for server in self.servers:
            if server is not None:
                server.turn()
                for _ in range(server.sink.requests() if len(server.replay) else 0):
                    server.sink.answer(server.replay.draw(server.sink.rows()))
                for keys, priorities in server.sink.updates():
                    server.replay.reprioritise(keys, priorities.astype(np.float64))


class ShardedRelay(Relay):
    """A relay's memory, and its sender to all shards."""

    def __init__(self, shards: Shards, clock: Clock) -> None:
        self.shards, self.clock, self.said = shards, clock, list[str]()
        super().__init__(LAYOUT, "", host=1, actors=ACTORS)

    def connect(self, url: str) -> None:
        links = [
            make_link(url, "relay", self.host, LAYOUT, actors=ACTORS, clock_s=self.clock)
            for url in self.shards.urls
        ]
        routes = Routes(aligned_zeros(Routes.required_bytes(ACTORS)), ACTORS)
        self.sender: Any = ShardedChunkSender(
            links, self.store, routes, range(ACTORS), self.said.append, self.clock
        )

    def turn(self) -> None:
        self.sender.do_work()
        for slot in self.sender.take_freed():
            self.store.header_rows[slot, STATE] = 0
            self.free.append(slot)


class World:
    def __init__(self, folder: Path) -> None:
        self.shards, self.clock = Shards(folder), Clock()
        self.relay = ShardedRelay(self.shards, self.clock)

    def turn(self) -> None:
        self.relay.turn()
        self.shards.turn()

    def play(self, chunks: int) -> None:
        for n in range(chunks):
            until(lambda n=n: self.relay.make(n % ACTORS), self.turn, "a slot")
        self.settle()

    def pass_s(self, seconds: float, look: Any = lambda: None) -> None:
        """So much time passes; everyone looks often meanwhile."""
        for _ in range(int(2 * seconds)):
            self.clock.ahead_s += 0.5
            for _ in range(3):
                self.turn()
                look()
                time.sleep(0.002)

    def settle(self) -> None:
        until(lambda: not self.relay.sender.unacknowledged, self.turn, "acknowledgements")

    def held(self) -> list[Counter[tuple[int, int, int]]]:
        """What each shard's memory holds, by who made it."""
        found = []
        for server in self.shards.servers:
            held: Counter[tuple[int, int, int]] = Counter()
            if server is not None:
                store = server.replay.store
                for slot in np.flatnonzero(store.header_rows[:, STATE] == 3).tolist():
                    actor, incarnation = store.column(slot, "mask")[0].astype(int).tolist()
                    held[actor, incarnation, int(store.column(slot, "action")[0])] += 1
            found.append(held)
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_preferences_spread_actors_evenly() -> None:
    orders = [preferences(number, 4) for number in range(400)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert [order[0] for order in orders[:8]] == [0, 1, 2, 3, 0, 1, 2, 3]
    second = Counter(order[1] for order in orders if order[0] == 2)
    assert set(second) == {0, 1, 3}
    assert min(second.values()) > 15


def test_actors_leave_a_lost_shard_and_return(world: World) -> None:
    world.play(20)
    before = world.held()[1]
    world.shards.stop(1)
    for actor in range(ACTORS):
        world.relay.make(actor)
    for _ in range(50):
        world.turn()
    assert world.relay.sender.unacknowledged == 2  # of the two actors there
    world.pass_s(GONE_S + 1)
    world.settle()
    assert world.relay.sender.moved == 2
    assert "its actors go to the others, with 2 chunks" in world.relay.said[0]
    world.play(20)
    assert {who[0] for who in world.held()[0]} == set(range(ACTORS))
    world.shards.start(1)
    until(lambda: len(world.relay.said) == 2, world.turn, "its return")
    assert "answers again" in world.relay.said[1]
    world.play(20)
    held = world.held()
    assert held[1].keys() > before.keys()
    assert (held[0] | held[1]).keys() == world.relay.offered
    assert set((held[0] + held[1]).values()) == {1}


def test_the_first_shard_that_answers_again_gets_what_waits_for_the_others(world: World) -> None:
    world.play(4)
    for shard in range(2):
        world.shards.stop(shard)
    for actor in range(ACTORS):
        world.relay.make(actor)
    world.pass_s(GONE_S + 1)
    assert world.relay.sender.unacknowledged == ACTORS
    world.shards.start(0)
    world.settle()
    assert {who[0] for who in world.held()[0]} == set(range(ACTORS))


# The learner.


class Learning:
    def __init__(self, world: World, urls: list[str] | None = None) -> None:
        self.world, self.said = world, list[str]()
        links = [
            make_link(url, "learner", 7, LAYOUT, clock_s=world.clock)
            for url in urls or world.shards.urls
        ]
        self.source = ShardedSampleSource(
            [ZmqSampleSource(link, BETA) for link in links],
            BETA,
            "stratified",
            3,
            self.said.append,
            world.clock,
        )
        self.batches = [Batch.empty(BatchLayout(SCHEMA, BATCH, False)) for _ in range(2)]

    def poll(self) -> Batch:
        batch, spare = self.batches
        until(lambda: self.source.poll(batch, spare), self.world.turn, "a batch")
        self.batches = [spare, batch]
        return batch

    def check(self, batch: Batch) -> None:
        """Each row is what its shard's store has under its key; the weights are of all totals."""
        leaves = np.empty(BATCH)
        for shard, rows in by_shard(batch.keys).items():
            server = self.world.shards.servers[shard]
            assert server is not None
            layout = BatchLayout(SCHEMA, len(rows), False)
            wanted = Batch.empty(layout)
            server.replay.store.gather(
                without_shard(batch.keys[rows]), layout, wanted.memory, wanted.keys
            )
            assert (wanted.keys >= 0).all()
            for name in ("obs", "next_obs", "action", "reward", "discount", "mask"):
                np.testing.assert_array_equal(batch[name][rows], wanted[name])
            leaves[rows] = server.replay.tree[batch.indices[rows]]
        weights = (leaves / leaves.min()) ** -BETA
        np.testing.assert_allclose(batch.weights, weights, rtol=1e-6)


def test_a_batch_is_of_both_shards_by_their_totals(world: World) -> None:
    learning = of_both_shards(world)
    for _ in range(3):
        learning.source.request()
    counts = Counter[int]()
    for _ in range(30):
        batch = learning.poll()
        learning.check(batch)
        counts.update({s: len(rows) for s, rows in by_shard(batch.keys).items()})
        learning.source.request()
    totals = np.array([s.replay.tree.total for s in world.shards.servers if s is not None])
    share = totals[0] / totals.sum()
    assert abs(counts[0] / (30 * BATCH) - share) < 1 / BATCH
    assert learning.source.outstanding == 3
    assert not learning.said


def test_a_silent_shard_loses_its_share_after_the_deadline(world: World) -> None:
    learning = of_both_shards(world)
    world.shards.stop(1)
    for _ in range(3):
        learning.source.request()
    for _ in range(50):
        assert not learning.source.ready()
        world.turn()
    world.pass_s(3.5, learning.source.ready)
    for _ in range(3):
        batch = learning.poll()
        assert set(by_shard(batch.keys)) == {0}
        learning.check(batch)
    assert "shard 1" in learning.said[0]
    assert "silent" in learning.said[0]
    assert (learning.source.shares.lost, learning.source.shares.away) == (1, [1])
    metrics = RoleMetrics(aligned_zeros(RoleMetrics.required_bytes()), "learner", create=True)
    count_shares(learning.source.shares, metrics)
    assert metrics.snapshot(alive=False)["shards_away"] == 1
    foreign = batch.keys | 1 << 55
    assert learning.source.update(foreign, np.ones(BATCH, np.float32))
    assert learning.source.dropped == BATCH
    world.shards.start(1)
    until(
        lambda: not learning.source.ready() and not learning.source.shares.away,
        world.turn, "its return",
    )  # fmt: skip
    assert learning.source.shares.back == 1
    for _ in range(2):  # totals, each counted once
        count_shares(learning.source.shares, metrics)
    found = metrics.snapshot(alive=False)
    assert [found[f"shards_{name}"] for name in ("away", "lost", "back")] == [0, 1, 1]
    assert "shard 1 answers again" in learning.said[1]
    learning.source.request()
    assert set(by_shard(learning.poll().keys)) == {0, 1}


def of_both_shards(world: World) -> Learning:
    """A learner that knows the totals of both shards, which have transitions."""
    world.play(40)
    learning = Learning(world)
    until(
        lambda: not learning.source.ready() and learning.source.shares.totals.all(),
        world.turn, "both totals",
    )  # fmt: skip
    return learning


def test_a_live_shard_without_rows_gets_a_longer_deadline(world: World) -> None:
    learning = of_both_shards(world)
    server = world.shards.servers[1]
    assert server is not None
    held, server.sink.requests = server.sink.requests, lambda: 0  # type: ignore[method-assign]
    learning.source.request()
    for _ in range(50):
        assert not learning.source.ready()
        world.turn()
    world.pass_s(LATE_S + 1, learning.source.ready)
    # Hellos are answered, so it is not silent.
    assert set(by_shard(learning.poll().keys)) == {0}
    assert learning.source.shares.away == [1]
    server.sink.requests = held  # type: ignore[method-assign]
    until(
        lambda: not learning.source.ready() and not learning.source.shares.away,
        world.turn, "its return",
    )  # fmt: skip


def test_a_batch_asked_of_one_shard_alone_does_not_wait_for_it_forever(world: World) -> None:
    learning = of_both_shards(world)
    server = world.shards.servers[1]
    assert server is not None
    server.sink.requests = lambda: 0  # type: ignore[method-assign]
    learning.source.lose(0, "is away")
    learning.source.request()
    until(
        lambda: not learning.source.ready() and not learning.source.shares.away,
        world.turn, "the other's return",
    )  # fmt: skip
    world.pass_s(LATE_S + 1, learning.source.ready)
    assert set(by_shard(learning.poll().keys)) == {0}


def test_an_empty_shard_has_no_share(world: World) -> None:
    for n in range(20):
        world.relay.make(2 * (n % 2))  # actors of shard 0
    world.settle()
    learning = Learning(world)
    learning.source.request()
    assert set(by_shard(learning.poll().keys)) == {0}
    assert not learning.said
    world.play(40)
    until(
        lambda: not learning.source.ready() and learning.source.shares.totals.all(),
        world.turn, "both totals",
    )  # fmt: skip
    world.shards.stop(1, empty=True)
    world.shards.start(1)
    until(
        lambda: learning.source.ready() or learning.source.shares.away == [1],
        world.turn, "its new memory",
    )  # fmt: skip
    assert "restarted" in learning.said[0]
    learning.source.request()
    assert set(by_shard(learning.poll().keys)) == {0}
