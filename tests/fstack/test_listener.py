"""The listening end over real sockets: peers of libzmq, and bare ones that read or send nothing.

Every test runs on the kernel's sockets and on F-Stack's (tests/support/fstack.py).
"""

import errno
import random
import select
import socket
import time
from contextlib import suppress
from unittest import mock

import pytest
import zmq

from tests.support import fstack
from tests.support.zmtp_peers import DEALER, drain, feed
from zapex.errors import PeerError
from zapex.fstack.listener import HANDSHAKE_S, MESSAGES_PER_PEER, ZmtpListener
from zapex.fstack.loop import FstackReactor
from zapex.fstack.sockets import KernelReactor
from zapex.fstack.zmtp import Connection, Limits, Null

LIMITS = Limits(frame_bytes=1 << 24, frames=20)
LARGE = random.Random(2).randbytes(12 << 20)  # more than the kernel holds for one connection


class Served:
    """A router, the address where it listens, what it has received and who has gone."""

    def __init__(self, kind: str) -> None:
        self.now_s, self.on_fstack = 0.0, kind == "fstack"
        self.reactor, host, port = KernelReactor(), "127.0.0.1", 0
        if self.on_fstack:
            self.reactor = FstackReactor(fstack.loop())
            host, port = fstack.addresses(fstack.setup())[0], fstack.free_port()
        self.listener = ZmtpListener(
            self.reactor,
            host,
            port,
            None,
            LIMITS,
            large_bytes=1 << 20,
            clock_s=lambda: self.now_s,
        )
        self.address = (host, int(self.listener.url.rpartition(":")[2]))
        self.gone: list[bytes] = []
        self.received: list[tuple[bytes, list[bytes]]] = []

    def turn(self) -> None:
        self.listener.do_work(0.001)
        self.gone += self.listener.gone()
        while (found := self.listener.receive()) is not None:
            self.received.append((found[0], [bytes(frame) for frame in found[1]]))

    def until(self, ready, turn=None) -> None:
        deadline_s = time.monotonic() + 20
        while not ready():
            (turn or self.turn)()
            assert time.monotonic() < deadline_s

    def connected(self) -> socket.socket:
        """A client's socket: F-Stack answers it only in turns."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self.address)
        self.until(lambda: select.select([], [sock], [], 0)[1])
        return sock

    def until_closed(self, sock: socket.socket) -> bytes:
        """What a client still receives before its connection ends."""
        data = bytearray()

        def ended() -> bool:
            with suppress(BlockingIOError):
                data.extend(got := sock.recv(1000))
                return not got
            return False

        self.until(ended)
        return bytes(data)


class Bare:
    """A client of few words: it sends and reads only when it is told to."""

    def __init__(self, served: Served) -> None:
        self.sock = served.connected()
        self.connection = Connection(Null(DEALER), LIMITS)
        self.messages: list[list[bytes]] = []
        served.until(lambda: self.connection.ready, lambda: (served.turn(), self.turn()))

    def turn(self) -> None:
        data = drain(self.connection)
        if data:
            self.sock.sendall(data)
        with suppress(BlockingIOError):
            self.messages += feed(self.connection, self.sock.recv(1 << 20))

    def send(self, *message: bytes) -> None:
        self.connection.send([memoryview(frame) for frame in message])
        self.turn()


@pytest.fixture(params=["kernel", "fstack"])
def served(request):
    made = Served(request.param)
    yield made
    made.listener.close()


@pytest.fixture
def dealer(served):
    context = zmq.Context()

    def connected():
        made = context.socket(zmq.DEALER)
        made.linger, made.rcvtimeo = 0, 20_000
        made.connect("tcp://{}:{}".format(*served.address))
        return made

    yield connected
    context.destroy(linger=0)


def own_address(served):
    """The address from which clients here reach the server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(served.address)
        return probe.getsockname()[0]


def send(served, peer, *message):
    return served.listener.send(peer, [memoryview(frame) for frame in message])


def test_each_connection_is_a_peer_of_its_own(served, dealer):
    one, other = dealer(), dealer()
    one.send_multipart([b"from one"])
    other.send_multipart([b"from other", b""])
    served.until(lambda: len(served.received) == 2)
    said = {message[0]: peer for peer, message in served.received}
    assert send(served, said[b"from other"], b"to other")
    assert send(served, said[b"from one"], b"to one")
    served.until(lambda: one.poll(0) and other.poll(0))
    assert one.recv_multipart() == [b"to one"]
    assert other.recv_multipart() == [b"to other"]
    assert served.listener.address_of(said[b"from one"], []) == own_address(served)


def test_a_slow_reader_delays_no_other_peer(served):
    slow, quick = Bare(served), Bare(served)
    slow.send(b"slow")
    quick.send(b"quick")
    served.until(lambda: len(served.received) == 2)
    peers = {message[0]: peer for peer, message in served.received}
    held_up = send(served, peers[b"slow"], LARGE, b"end")
    assert not held_up.done
    assert served.listener.queued(peers[b"slow"]) == 1
    assert {peer: n for n, peer in served.listener.held()}[peers[b"slow"]] > 1 << 20
    passed = send(served, peers[b"quick"], LARGE)
    served.until(lambda: quick.messages, lambda: (served.turn(), quick.turn()))
    assert quick.messages == [[LARGE]]
    assert passed.done
    assert not held_up.done
    served.until(lambda: slow.messages, lambda: (served.turn(), slow.turn()))
    assert slow.messages == [[LARGE, b"end"]]
    assert held_up.done
    assert served.listener.queued(peers[b"slow"]) == 0


def test_unread_messages_of_a_peer_are_limited(served):
    peer = Bare(served)
    peer.send(b"hello")
    served.until(lambda: served.received)
    name = served.received[0][0]
    sent = [send(served, name, LARGE[:100_000]) for _ in range(200)]
    assert None in sent
    accepted = [one for one in sent if one is not None]
    assert sum(not one.done for one in accepted) == MESSAGES_PER_PEER
    served.until(lambda: len(peer.messages) == len(accepted), lambda: (served.turn(), peer.turn()))
    assert send(served, name, b"again") is not None


def test_backpressure_reaches_the_sender(served, dealer):
    one = dealer()
    for number in range(1000):
        one.send_multipart([b"%d" % number, bytes(10_000)])
    served.until(served.listener.ready, lambda: served.listener.wait(0.001))
    for _ in range(100):
        served.listener.do_work(0.001)
    ((held, _),) = served.listener.held()
    assert held < 2 * MESSAGES_PER_PEER * 10_000
    served.until(lambda: len(served.received) == 1000)
    assert [int(message[0]) for _, message in served.received] == list(range(1000))


def test_hang_up_drops_messages_and_reports_the_peer_gone(served, dealer):
    one, other = dealer(), dealer()
    monitor = one.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    one.send_multipart([b"first"])
    served.until(lambda: served.received)
    ((name, _),) = served.received
    one.send_multipart([b"second"])
    served.until(served.listener.ready, lambda: served.listener.wait(0.001))
    served.listener.hang_up(name)
    assert served.listener.receive() is None
    with pytest.raises(PeerError):
        send(served, name, b"no more")
    served.until(lambda: served.gone and monitor.poll(0))
    assert served.gone == [name]
    other.send_multipart([b"other"])
    served.until(lambda: len(served.received) == 2)
    one.disable_monitor()


def test_what_a_peer_sent_before_it_left_is_still_received(served):
    peer = Bare(served)
    peer.send(b"bye")
    peer.sock.close()
    served.until(served.listener.ready, lambda: served.listener.wait(0.001))
    for _ in range(10):
        served.listener.do_work(0.001)
    assert served.listener.gone() == []
    served.until(lambda: served.gone)
    assert [message for _, message in served.received] == [[b"bye"]]
    assert served.gone == [served.received[0][0]]


def test_sending_to_a_peer_that_has_left_is_noticed(served):
    peer = Bare(served)
    peer.send(b"hello")
    served.until(lambda: served.received)
    peer.sock.close()
    name = served.received[0][0]

    def refused() -> bool:
        try:
            send(served, name, b"the stack takes some")
        except PeerError:
            return True
        return False

    served.until(refused, fstack.loop().turn if served.on_fstack else lambda: time.sleep(0.001))


def test_a_protocol_error_ends_only_that_connection(served):
    bad, good = Bare(served), Bare(served)
    bad.sock.sendall(b"\xff\xff")
    good.send(b"good")
    served.until(lambda: served.gone and served.received)
    assert [message for _, message in served.received] == [[b"good"]]
    assert served.until_closed(bad.sock) == b""


def test_a_connection_without_a_handshake_is_closed_after_a_while(served):
    with served.connected() as silent:
        served.until(lambda: len(served.listener.held()) == 1)
        talking = Bare(served)
        served.now_s += HANDSHAKE_S + 1
        served.until(lambda: served.gone)
        assert len(served.until_closed(silent)) == 64  # the greeting
    talking.send(b"still here")
    served.until(lambda: served.received)


def test_a_small_message_after_a_large_body_is_received_at_once(served):
    peer = Bare(served)
    peer.connection.send([memoryview(LARGE), memoryview(b"end")])
    data = drain(peer.connection)
    draw = random.Random(3)

    def go_on() -> None:
        nonlocal data
        with suppress(BlockingIOError):
            data = data[peer.sock.send(data[: draw.choice((1, 1000, 300_000))]) :]
        served.turn()

    served.until(lambda: not data, go_on)
    for number in range(3 * MESSAGES_PER_PEER):
        peer.send(b"%d" % number)
    served.until(lambda: len(served.received) == 1 + 3 * MESSAGES_PER_PEER)
    assert served.received[0][1] == [LARGE, b"end"]
    assert int(served.received[-1][1][0]) == 3 * MESSAGES_PER_PEER - 1


def test_accepting_resumes_when_descriptors_are_free(served):
    full = OSError(errno.EMFILE, "too many open files")
    with mock.patch.object(type(served.reactor), "accept", side_effect=full) as accept:
        waiting = served.connected()
        served.until(lambda: accept.called)
        for _ in range(20):
            served.turn()
        assert accept.call_count == 1  # it does not spin
    served.now_s += 1
    served.until(served.listener.held)
    waiting.close()
