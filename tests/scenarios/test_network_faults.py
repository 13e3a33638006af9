"""Servers die, links break, peers lie: what was acknowledged is there exactly once."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support.lossy_link import LossyLink
from tests.support.relays import Accounts, Relay, serving
from tests.support.transport_rigs import (
    BATCH,
    BETA,
    NO_KEYS,
    OPEN,
    PARAMETER_BYTES,
    SCHEMA,
    Memory,
    NetworkReplay,
    form_of,
    layout_of,
    make_link,
    nothing_left_open,
    until,
    url_of,
)
from zapex.chunks.batch import Batch
from zapex.chunks.layout import COMMITTED, STATE, BatchLayout
from zapex.errors import Fenced, PeerTimeout, Refused
from zapex.host.roster import Roster
from zapex.net import replay_ends as zmq_replay
from zapex.net.link import ZmqLink
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.server import LinkServer
from zapex.transport import Incarnation
from zapex.wire import messages as m
from zapex.wire import protocol as message_header
from zapex.zmq_transport import ZmqParameterSink, ZmqParameterSource

STREAMS = 2

__all__ = ["nothing_left_open"]  # a fixture of every test here


class Place:
    """Where a server listens, over one transport."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind, self.url = kind, url_of(kind, directory)

    def again(self, server: NetworkReplay) -> str:
        """The same place, for the next server."""
        return f"{self.kind}://{server.url.removeprefix('tcp://')}"

    def behind_a_bad_link(self, server: NetworkReplay) -> LossyLink:
        """A link to the server that tests can break."""
        host, port = server.url.removeprefix("tcp://").rsplit(":", 1)
        return LossyLink(int(port), target_host=host)


@pytest.fixture(params=["tcp", "zmtp", "fstack"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """F-Stack: the library that the environment names, or the stand-in."""
    return Place(request.param, tmp_path)


class Killed(BaseException):
    """The server's process is gone, at this very instruction."""


def die_at(name: str, after: bool) -> Any:
    """The next commit of a chunk dies before or after the call of `name` in its protocol."""
    owner, attribute = {
        "write": (m.Push, "write"),
        "commit": (zmq_replay, "set_state_kernel"),
        "advance": (Roster, "advance"),
        "acknowledge": (LinkServer, "send"),
    }[name]
    real = getattr(owner, attribute)
    left = [3]

    def call(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise Killed
        result = real(*args, **more)
        if left[0] == 0:
            raise Killed
        return result

    return mock.patch.object(owner, attribute, call)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["write", "commit", "advance", "acknowledge"])
def test_a_server_killed_at_any_step_of_a_commit_loses_and_doubles_nothing(
    name: str, after: bool, tmp_path: Path
) -> None:
    place = Place("tcp", tmp_path)
    layout = layout_of(400)
    memory, accounts = Memory(layout, 1), Accounts()
    server = accounts.watch(NetworkReplay(memory, place.url))
    relay = Relay(layout, server.url)
    for _ in range(10):
        relay.make()
    with die_at(name, after), pytest.raises(Killed):
        until(lambda: False, lambda: (relay.turn(), server.turn()))
    server.close()
    # Whole chunks that the dead server's intake had not seen are what the next one begins with.
    replay = memory.replay()
    for slot in np.flatnonzero(replay.store.header_rows[:, STATE] == COMMITTED).tolist():
        accounts.check(replay, slot)
    with serving(memory, accounts, place.again(server)) as server:
        for _ in range(5):
            relay.make()
        until(
            lambda: relay.sender.unacknowledged == 0,
            lambda: (relay.turn(), server.turn()),
            "acknowledgements",
        )
        server.turn()
        accounts.settle([relay])
        relay.kill()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("chunks", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_relays_killed_and_links_cut_at_random_lose_and_double_nothing(
    place: Place, chunks: int
) -> None:
    rng = np.random.default_rng(7)
    layout = layout_of(600, streams=4)
    memory, accounts = Memory(layout, 2), Accounts()
    with (
        serving(memory, accounts, place.url) as server,
        place.behind_a_bad_link(server) as link,
    ):
        relays = [Relay(layout, link.url, host) for host in (1, 2)]
        kills = cuts = due = 0
        deadline = time.monotonic() + 100 + chunks

        def turn() -> None:
            server.turn()
            for relay in relays:
                relay.turn()

        while min(len(r.offered) for r in relays) < chunks:
            assert time.monotonic() < deadline
            for relay in relays:
                relay.make()
            turn()
            # A fault by what has come, not by time: else nothing comes where turns are quick.
            if len(accounts.taken) < due:
                continue
            due = len(accounts.taken) + int(rng.integers(0, 10))
            chance = rng.random()
            if chance < 0.4:
                victim = relays[int(rng.integers(2))]
                victim.kill()
                victim.connect(link.url)
                kills += 1
            elif chance < 0.8:
                link.cut()
                link.heal()
                cuts += 1
            else:  # an actor behind the relay is started again
                relays[0].incarnation[0] += 1
                relays[0].next[0] = 0
        until(lambda: not any(r.sender.unacknowledged for r in relays), turn, "the rest")
        server.turn()
        assert min(kills, cuts) > chunks / 50
        # The number that the replay gave is what it files them under.
        numbers = {r.host: server.roster.actors_of(r.host)[0] for r in relays}
        offered = {
            (numbers[r.host], incarnation, sequence)
            for r in relays
            for _, incarnation, sequence in r.offered
        }
        assert accounts.taken.keys() == offered
        assert set(accounts.taken.values()) == {1}
        for relay in relays:
            relay.kill()


@pytest.mark.parametrize("fault", ["frozen", "truncated"])
def test_a_link_that_hangs_or_tears_messages_is_left_behind_and_nothing_is_lost(
    place: Place, fault: str
) -> None:
    layout = layout_of(400)
    memory, accounts = Memory(layout, 1), Accounts()
    with (
        serving(memory, accounts, place.url) as server,
        place.behind_a_bad_link(server) as link,
    ):
        relay = Relay(layout, link.url)

        def turn() -> None:
            server.turn()
            relay.turn()

        until(lambda: relay.link.is_open, turn, "a welcome")
        if fault == "truncated":
            link.truncate_after = 3000
        for _ in range(30):
            relay.make()
            turn()
        if fault == "frozen":
            link.freeze()
            until(lambda: "waiting for the replay" in relay.link.waiting, turn, "silence")
        link.heal()
        until(lambda: relay.sender.unacknowledged == 0, turn, "the rest")
        server.turn()
        accounts.settle([relay])
        assert relay.link.waiting == ""
        relay.kill()


def test_batches_updates_and_parameters_survive_a_server_that_comes_back(place: Place) -> None:
    layout = layout_of(400)
    memory, accounts = Memory(layout, 1), Accounts()
    server = accounts.watch(NetworkReplay(memory, place.url))
    url, here = server.url, place.again(server)
    relay = Relay(layout, url)
    learner = make_link(url, "learner", 2, layout)
    source, sink = ZmqSampleSource(learner, BETA), ZmqParameterSink(learner)
    reader = make_link(url, "reader", 3, layout)
    parameters = ZmqParameterSource(reader)

    def turn() -> None:
        server.turn()
        relay.turn()
        learner.do_work()
        assert parameters.version >= 0

    for _ in range(20):
        relay.make()
    until(lambda: relay.sender.unacknowledged == 0 and learner.is_open, turn, "chunks")
    server.turn()
    sink.publish(1, np.full(PARAMETER_BYTES, 1, np.uint8))
    until(lambda: parameters.version == 1, turn, "version 1")
    for _ in range(3):
        source.request()
    until(lambda: server.sink.requests() == 3, turn, "requests")
    server.sink.answer(server.replay.draw(BATCH))
    server.close()

    server = accounts.watch(NetworkReplay(memory, here))
    batch = Batch.empty(BatchLayout(SCHEMA, BATCH))
    got: list[Any] = []

    def serve() -> None:
        turn()
        if server.sink.requests():
            server.sink.answer(server.replay.draw(BATCH))
        if source.ready():
            got.append(source.poll(batch))
            assert source.update(batch.keys, np.ones(BATCH, np.float32))
        for keys, priorities in server.sink.updates():
            server.replay.reprioritise(keys, priorities.astype(np.float64))

    until(lambda: len(got) == 3 and server.replay.updates_applied == 3 * BATCH, serve, "batches")
    assert source.outstanding == 0
    assert learner.welcome is not None
    assert learner.welcome.params_version == 1  # it outlived the server
    out = np.zeros(PARAMETER_BYTES, np.uint8)
    assert parameters.newer_than(0, out) == 1
    sink.publish(2, np.full(PARAMETER_BYTES, 2, np.uint8))
    until(lambda: parameters.newer_than(1, out) == 2, turn, "version 2")
    assert (out == 2).all()
    for link in (learner, reader):
        link.close()
    relay.kill()
    server.close()


def test_hosts_come_and_go_and_a_newer_life_fences_an_older_one(place: Place) -> None:
    layout = layout_of(600, streams=4)
    memory = Memory(layout, 2)
    server = NetworkReplay(memory, place.url)
    first, second = (Relay(layout, server.url, host) for host in (1, 2))

    def turn() -> None:
        server.turn()
        for relay in (first, second):
            relay.turn()

    until(lambda: first.link.is_open and second.link.is_open, turn, "welcomes")
    numbers = {h: server.roster.actors_of(h) for h in (1, 2)}
    assert sorted([*numbers[1], *numbers[2]]) == [0, 1]

    third = make_link(server.url, "relay", 3, layout, actors=1)
    until(
        lambda: "all 2 actor numbers" in third.waiting,
        lambda: (turn(), third.do_work()),
        "a refusal",
    )
    first.link.close(bye=m.Bye())
    until(
        lambda: third.is_open,
        lambda: (server.turn(), second.turn(), third.do_work()),
        "the free number",
    )
    assert server.roster.actors_of(3) == numbers[1]
    assert Incarnation(numbers[1][0], 3) not in server.source.take_in()  # told already

    newer = make_link(server.url, "relay", 2, layout, actors=1, incarnation=99)
    until(lambda: newer.is_open, lambda: (server.turn(), newer.do_work()), "the newer life")
    with pytest.raises(Fenced, match="newer relay"):
        until(lambda: False, lambda: (server.turn(), second.turn()))
    for link in (second.link, third, newer):
        link.close()
    server.close()


def test_another_config_schema_or_role_is_refused_in_words() -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")

    def refused(link: ZmqLink, words: str) -> None:
        with pytest.raises(Refused, match=words):
            until(lambda: False, lambda: (server.turn(), link.do_work()))
        link.close()

    other = {"env": "game", "gamma": 0.5, "lr": 1}
    words = "gamma is 0.9 at the replay and 0.5 here, lr is None at the replay and 1 here"
    refused(make_link(server.url, "learner", 1, layout, config=other), words)
    link = ZmqLink(
        server.url, "learner", 1, 1, form_of(layout), {}, NO_KEYS, schema_hash=77
    )  # fmt: skip
    OPEN.append(link)
    refused(link, f"{77:#018x}.*{layout.schema.hash:#018x}")
    link = make_link(server.url, "reader", 1, layout)
    until(lambda: link.is_open, lambda: (server.turn(), link.do_work()))
    link.send(m.SMALL, m.Sample(0, BATCH))
    refused(link, "a reader may not send SAMPLE")
    server.close()


def test_another_version_of_the_protocol_is_refused_by_either_end() -> None:
    layout = layout_of(400)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    link = make_link(server.url, "reader", 1, layout)
    real, ours = message_header.HEADER.pack, message_header.VERSION

    def of_the_next(magic: bytes, version: int, *rest: int) -> bytes:
        return real(magic, version + 1, *rest)

    packed = mock.Mock(wraps=message_header.HEADER)
    packed.pack, packed.size = of_the_next, message_header.HEADER.size
    with (
        mock.patch.object(message_header, "HEADER", packed),
        pytest.raises(Refused, match=f"speaks version {ours}, the peer version {ours + 1}"),
    ):
        until(lambda: False, lambda: (server.turn(), link.do_work()))
    assert server.server.counts["bad"] > 0
    link.close()
    server.close()


def test_nobody_there_is_a_timeout_that_says_whom_it_waited_for(tmp_path: Path) -> None:
    link = make_link(f"ipc://{tmp_path}/none", "reader", 1, layout_of(400))
    with pytest.raises(PeerTimeout, match=r"replay at ipc://"):
        link.open(0.2)
    link.close()
