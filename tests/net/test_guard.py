"""Peers that break rules, ignore credit or read nothing: disconnected, within bounded memory."""

import select
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zmq

from tests.support import fstack
from tests.support.lossy_link import LossyLink
from tests.support.relays import Accounts, Relay, serving
from tests.support.transport_rigs import (
    BATCH,
    PARAMETER_BYTES,
    SCHEMA,
    Memory,
    NetworkReplay,
    form_of,
    goes_on,
    layout_of,
    nothing_left_open,
    until,
    url_of,
)
from zapex.chunks.layout import ACTOR, INCARNATION, SEQUENCE
from zapex.errors import ConfigError
from zapex.net import server as net_server
from zapex.net import sockets as net_sockets
from zapex.net.server import own_bytes
from zapex.net.sessions import Session
from zapex.wire import messages as m
from zapex.wire.protocol import MAY_SEND, Kind, RawMessage

__all__ = ["nothing_left_open"]  # a fixture of every test here
MIB = 1 << 20


@pytest.fixture
def peer():
    """Makes bare DEALERs: clients that follow no rules."""
    context: Any = zmq.Context()

    def connected(url: str) -> Any:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(url)
        return dealer

    yield connected
    context.destroy(linger=0)


def hello(role: str, channel: int, host: int = 9) -> m.Hello:
    return m.Hello(role, host, 1, channel, SCHEMA.hash, 1, {"env": "game", "gamma": 0.9})


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "zmtp", "fstack"])
def test_only_a_peer_that_breaks_the_rules_three_times_is_disconnected(
    peer: Any, tmp_path: Path, scheme: str
) -> None:
    memory, accounts = Memory(layout_of(400), 1), Accounts()
    with serving(memory, accounts, url_of(scheme, tmp_path)) as server:
        relay = Relay(memory.layout, server.url)
        bad = peer(server.url)
        monitor = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for _ in range(3):
            bad.send_multipart([b"no header", b"no body"])
        for _ in range(10):
            relay.make()
        until(
            lambda: monitor.poll(0) and relay.sender.unacknowledged == 0,
            lambda: (server.turn(), relay.turn()),
            "the end of the bad one, and the other's chunks",
        )
        server.turn()
        assert server.server.guard.hung_up == 1
        assert relay.link.counts["connections"] == 2
        accounts.settle([relay])
        relay.kill()


@pytest.mark.parametrize("role", sorted(MAY_SEND))
def test_a_role_may_send_only_its_own_kinds(peer: Any, role: str) -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
    counts = server.server.counts
    for number, kind in enumerate(set(Kind) - {Kind.HELLO}, start=1):
        client = peer(server.url)  # a peer that breaks rules is soon disconnected
        client.send_multipart(m.encode(hello(role, m.BULK)))
        before = dict(counts)
        client.send_multipart(RawMessage(kind).encode())
        until(lambda n=number: counts["messages"] == 2 * n, server.turn, kind.name)
        assert counts["forbidden"] - before["forbidden"] == (kind not in MAY_SEND[role]), kind
    server.close()


def harm_seen(behaviour: str, server: NetworkReplay) -> bool:
    """That the hostile peer did what it is there for."""
    counts, source = server.server.counts, server.source.counts
    return {
        "garbage": True,
        "half-open": True,
        "noise": counts["bad"] >= 3 and server.server.guard.hung_up > 0,
        "endless": server.server.guard.hung_up > 0,
        "pushes": source["uncredited"] + source["early"] + counts["unknown"] > 100,
        "deaf": server.sink.counts["batches"] > 10,
    }[behaviour]


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("scheme", "behaviour"),
    [("tcp", one) for one in ("garbage", "noise", "endless", "pushes", "deaf", "half-open")]
    + [(scheme, one) for scheme in ("zmtp", "fstack") for one in ("noise", "deaf")]
    + [("fstack", "garbage")],
)
def test_a_hostile_peer_neither_stops_the_run_nor_exhausts_memory(
    tmp_path: Path, scheme: str, behaviour: str
) -> None:
    bound = 320 * MIB  # a thread on a busy machine needs its time to look
    memory, accounts = Memory(layout_of(600, streams=4), 2), Watched()
    url = url_of(scheme, tmp_path)
    fstack.in_this_process(url)  # its packet buffers are none of the messages' memory
    before = own_bytes()
    with serving(memory, accounts, url, memory_bytes=bound) as server:
        relay = Relay(memory.layout, server.url)
        most = 0

        def turn() -> None:
            nonlocal most
            relay.make()
            server.turn()
            relay.turn()
            for _ in range(server.sink.requests()):
                server.sink.answer(server.replay.draw(BATCH))
            most = max(most, own_bytes())

        until(lambda: len(server.replay) >= BATCH, turn, "enough to sample")
        command = [
            sys.executable,
            "-m",
            "tests.support.hostile_peers",
            behaviour,
            server.url,
            "100",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as hostile:
            try:
                assert hostile.stdout is not None
                ready = select.poll()
                ready.register(hostile.stdout, select.POLLIN)
                until(lambda: ready.poll(0), turn, "the hostile peer")
                begun, served = time.monotonic(), relay.acknowledged
                until(
                    lambda: time.monotonic() > begun + 1.5 and harm_seen(behaviour, server)
                    and relay.acknowledged > served + 20, turn, "service beside it",
                )  # fmt: skip
            finally:
                hostile.kill()
        until(lambda: relay.sender.unacknowledged == 0, lambda: (server.turn(), relay.turn()))
        server.turn()
        assert most - before <= 1.05 * bound
        if behaviour in ("garbage", "half-open"):
            assert not any(server.server.counts[name] for name in ("bad", "unknown", "forbidden"))
        # The hostile relay's own chunks are filed under another number.
        (number,) = server.roster.actors_of(relay.host)
        mine = [taken for (actor, *_), taken in accounts.taken.items() if actor == number]
        assert mine == [1] * len(relay.offered)
        relay.kill()


class Watched(Accounts):
    """Without a look at the rows: a hostile relay's say nothing."""

    def check(self, replay: Any, slot: int) -> None:
        header = replay.store.header_rows[slot]
        self.taken[int(header[ACTOR]), int(header[INCARNATION]), int(header[SEQUENCE])] += 1


def test_a_client_lost_before_its_answer_is_harmless(peer: Any) -> None:
    memory = Memory(layout_of(400), 1)
    server = NetworkReplay(memory, "tcp://127.0.0.1:0")
    relay = Relay(memory.layout, server.url)
    until(
        lambda: relay.make() and len(server.replay) >= BATCH,
        lambda: (server.turn(), relay.turn()),
        "enough to sample",
    )
    client = peer(server.url)
    client.send_multipart(m.encode(hello("learner", m.BULK)))
    for sequence in range(3):
        client.send_multipart(m.encode(m.Sample(sequence, BATCH)))
    until(lambda: server.sink.requests() == 3, server.turn, "requests")
    client.close()
    time.sleep(0.2)
    for _ in range(3):
        server.sink.answer(server.replay.draw(BATCH))
    assert server.sink.counts["dropped"] >= 1
    assert server.sink.requests() == 0
    relay.kill()
    server.close()


def test_a_learner_that_reads_nothing_gets_four_batches(
    peer: Any,
) -> None:
    memory = Memory(layout_of(400), 1)
    server = NetworkReplay(memory, "tcp://127.0.0.1:0", large_bytes=1)
    relay, sink = Relay(memory.layout, server.url), server.sink
    until(
        lambda: relay.make() and len(server.replay) >= BATCH,
        lambda: (server.turn(), relay.turn()),
        "enough to sample",
    )
    trackers: list[SimpleNamespace] = []
    memories: list[weakref.ref[Any]] = []  # that batches were packed into

    def send(socket: Any, buffers: Any) -> SimpleNamespace:
        trackers.append(SimpleNamespace(done=False))
        memories.append(weakref.ref(buffers[-1].obj.base))
        return trackers[-1]

    for connection in range(1, 4):  # the learner comes anew each time, and does not read again
        client = peer(server.url)
        client.send_multipart(m.encode(hello("learner", m.BULK)))
        for sequence in range(20):
            client.send_multipart(m.encode(m.Sample(100 * connection + sequence, BATCH)))
        until(lambda: sink.requests() == 4, server.turn, "requests")
        asked = sum(len(s.requests) for s in server.server.sessions.of_roles("learner"))
        with mock.patch.object(net_sockets, "send", send):
            while requests := sink.requests():
                for _ in range(requests):
                    sink.answer(server.replay.draw(BATCH))
        assert len(trackers) == 4 * connection
        assert sum(len(s.requests) for s in server.server.sessions.of_roles("learner")) == asked - 4
    assert sink.counts["dropped"] == 0
    for tracker in trackers:
        tracker.done = True
    assert sink.requests() == 4
    sink.answer(server.replay.draw(BATCH))
    assert len({id(memory()) for memory in memories} - {id(None)}) == 4  # one is used, three wait
    relay.kill()
    server.close()


RESET = """
import socket, struct, sys, time
import zmq
from tests.support.hostile_peers import _greeted
from tests.support.transport_rigs import Memory, NetworkReplay, layout_of
server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
sock = _greeted(server.url)
for _ in range(100):  # until it is admitted
    server.listener.do_work()
    time.sleep(0.01)
sock.settimeout(1)
size = 1 << 17
for _ in range(200):  # more than may wait: the rest stays in the kernel
    try:
        sock.sendall(b"\\x02" + size.to_bytes(8, "big") + bytes(size))
    except TimeoutError:
        break
else:
    sys.exit("nothing was held back")
sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
sock.close()
time.sleep(2.5)
server.turn()
server.close()
"""


def test_a_reset_with_waiting_messages_does_not_abort_the_server() -> None:
    assert goes_on(RESET)


def test_an_unanswered_client_reconnects_and_loses_nothing() -> None:
    memory, accounts = Memory(layout_of(400), 1), Accounts()
    with (
        serving(memory, accounts, "tcp://127.0.0.1:0") as server,
        LossyLink(int(server.url.rpartition(":")[2])) as wire,
    ):
        relay = Relay(memory.layout, wire.url)

        def turn() -> None:
            server.turn()
            relay.turn()

        until(lambda: relay.link.is_open, turn, "a welcome")
        wire.freeze()
        relay.make()
        until(lambda: relay.link.counts["renewed"] == 2, turn, "new connections")
        assert not relay.link.is_open
        wire.heal()
        until(lambda: relay.sender.unacknowledged == 0 and relay.link.is_open, turn, "the chunk")
        assert relay.link.counts["connections"] == 4
        server.turn()
        accounts.settle([relay])
        relay.kill()


def test_a_new_connection_of_a_client_closes_its_old_one(peer: Any) -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
    first, second = peer(server.url), peer(server.url)
    monitor = first.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    first.send_multipart(m.encode(hello("learner", m.SMALL)))
    until(lambda: first.poll(0), server.turn, "a welcome")
    second.send_multipart(m.encode(hello("learner", m.SMALL)))
    until(lambda: monitor.poll(0), server.turn, "the end of the first")
    assert server.server.guard.hung_up == 1
    server.close()


def test_a_connection_belongs_to_one_client(peer: Any) -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
    client = peer(server.url)
    for host in (9, 10):
        client.send_multipart(m.encode(hello("reader", m.SMALL, host)))
    until(lambda: server.server.counts["bad"] == 1, server.turn, "the second hello")
    assert not any(server.server.sessions.of_roles("reader"))  # it has to say hello again
    client.send_multipart(m.encode(hello("reader", m.SMALL)))
    until(lambda: any(server.server.sessions.of_roles("reader")), server.turn, "a welcome")
    server.close()


def test_held_counts_what_waits_for_a_peer_that_reads_nothing(peer: Any) -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
    client = peer(server.url)
    client.rcvhwm, client.rcvbuf = 1, 4096
    client.disconnect(server.url)
    client.connect(server.url)
    client.send_multipart(m.encode(hello("reader", m.BULK)))
    until(lambda: any(server.server.sessions.of_roles("reader")), server.turn, "the hello")
    (session,) = server.server.sessions.of_roles("reader")
    nbytes, many = 1 << 17, 50
    parts = m.encode(m.Params(1, memoryview(np.zeros(nbytes, np.uint8))))
    for _ in range(many):
        assert server.server.send_encoded(session, m.BULK, parts) is not None

    def held() -> int:
        found = [n for n, peer in server.listener.held() if peer == session.peers[m.BULK]]
        return sum(found)

    until(lambda: held() >= many * nbytes // 4, server.turn, "a look")
    server.close()


def test_network_memory_must_hold_four_batches() -> None:
    memory = Memory(layout_of(400), 1)
    with pytest.raises(ConfigError, match=r"--network-memory must be at least \d+ MiB .* got 0"):
        net_server.check_memory(form_of(memory.layout), 1 << 19)
    with mock.patch.object(net_server, "MEMORY_BYTES", 1 << 10):
        server = NetworkReplay(memory, "tcp://127.0.0.1:0")
    assert server.server.guard.bound_bytes >= 4 * server.server.form.largest_answer_bytes
    server.close()


def test_a_session_ends_with_its_connections_but_hosts_keep_their_numbers(
    peer: Any,
) -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
    sessions = server.server.sessions
    readers = []
    for host in range(10, 40):
        readers.append(peer(server.url))
        readers[-1].send_multipart(m.encode(hello("reader", m.SMALL, host)))
    relay = peer(server.url)
    relay.send_multipart(m.encode(hello("relay", m.SMALL)))
    until(lambda: len(list(sessions.of_roles("reader", "relay"))) == 31, server.turn, "hellos")
    for client in (*readers, relay):
        client.close()
    until(lambda: not any(sessions.of_roles("reader")), server.turn, "the end of the sessions")
    assert [s.host for s in sessions.of_roles("relay")] == [9]
    assert server.roster.actors_of(9) == [0]
    server.close()


def test_sending_parameters_to_gone_readers_is_harmless(peer: Any) -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0")
    sessions = server.server.sessions
    readers = [peer(server.url) for _ in range(5)]
    for host, reader in enumerate(readers, start=10):
        for channel in (m.SMALL, m.BULK):
            reader.send_multipart(m.encode(hello("reader", channel, host)))
        reader.send_multipart(m.encode(m.Pull(0, 0)))

    def asked() -> bool:
        wanted = [s.wants_newer_than is not None for s in sessions.of_roles("reader")]
        return wanted == [True] * 5

    until(asked, server.turn, "pulls")
    for reader in readers:
        reader.close()
    time.sleep(0.3)  # libzmq notices; the server has not looked yet
    server.mailbox.publish(1, np.zeros(PARAMETER_BYTES, np.uint8))
    server.parameters.do_work()
    assert not any(sessions.of_roles("reader"))
    server.close()


def test_impossible_values_are_reported_once_for_each_session_and_never_in_a_flood() -> None:
    now_s, lines = [0.0], list[str]()
    server = NetworkReplay(
        Memory(layout_of(100, 2), 1),
        "tcp://127.0.0.1:0",
        tell=lines.append,
        clock_s=lambda: now_s[0],
    ).server
    sessions = [Session("relay", 1, n, 0.0, "10.0.0.7", actors=(3,)) for n in range(100)]
    server.refuse(sessions[0], "a reward")
    server.refuse(sessions[0], "a discount")
    (line,) = lines
    assert "actor 3 at 10.0.0.7" in line
    assert "a reward" in line
    for session in sessions:  # one client that says hello again and again
        server.refuse(session, "a reward")
    assert len(lines) == 10
    now_s[0] = 6.0  # those that could not be reported yet are, one after another
    for session in sessions:
        server.refuse(session, "a reward")
    assert len(lines) == 11


def test_errors_of_one_connection_do_not_use_up_those_of_another(peer: Any) -> None:
    server = NetworkReplay(Memory(layout_of(400), 1), "tcp://127.0.0.1:0", clock_s=lambda: 0.0)
    bad, honest = peer(server.url), peer(server.url)
    for _ in range(300):
        bad.send_multipart(m.encode(m.Pull(0, 0)))  # without a hello
    until(lambda: server.server.counts["unknown"] == 300, server.turn, "its messages")
    honest.send_multipart(m.encode(replace(hello("relay", m.SMALL), config={"gamma": 0.5})))
    until(lambda: honest.poll(0), server.turn, "the reason")
    assert m.decode(honest.recv_multipart(), None).fault == m.Fault.REFUSED
    server.close()
