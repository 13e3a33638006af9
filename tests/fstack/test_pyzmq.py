"""The ZMTP state machine and libzmq, each as server and as client, over loopback TCP."""

import contextlib
import random
import select
import socket
import time
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tests.fuzz import mutation
from tests.support.zmtp_peers import LIMITS, ROUTER, drain, feed, pair_of_keys
from zapex.fstack.curve import CurveServer
from zapex.fstack.zmtp import Connection, Null

GOLDEN = Path(__file__).parents[1] / "golden"
MECHANISMS = ["NULL", "CURVE"]
SERVER, CLIENT, STRANGER = 1, 2, 3
MESSAGES = [[b"one"], [b"", b"two", b"x" * 255, b"y" * 256], [b"z" * (1 << 20), b""]]


class Wire:
    """A connection and its socket. What was sent and received is kept, for golden files."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        sock.setblocking(False)
        self.sock, self.connection = sock, connection
        self.messages: list[list[bytes]] = []
        self.sent, self.heard = bytearray(), bytearray()
        self.closed = False

    def until(self, condition, timeout_s: float = 10.0) -> None:
        """Carry bytes until the condition is true."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, self.connection.ended or "nothing happened"
            writing = [self.sock] if self.connection.outgoing() else []
            readable, writable, _ = select.select([self.sock], writing, [], 0.05)
            if writable:
                buffers = self.connection.outgoing()
                nbytes = self.sock.sendmsg(buffers)
                self.sent += b"".join(buffers)[:nbytes] if len(self.sent) < 4096 else b""
                self.connection.sent(nbytes)
            if readable:
                self._receive()

    def _receive(self) -> None:
        room = self.connection.room()
        with contextlib.suppress(ConnectionResetError):
            nbytes = self.sock.recv_into(room)
            self.closed = nbytes == 0
            self.heard += room[:nbytes] if len(self.heard) < 4096 else b""
            for message in self.connection.received(nbytes):
                self.messages.append([bytes(frame) for frame in message])

    def send(self, *message: bytes) -> None:
        mark = self.connection.send([memoryview(frame) for frame in message])
        self.until(lambda: self.connection.sent_bytes >= mark)


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(10)
        yield made


def secure(sock, mechanism, key, server_key):
    """Give a libzmq socket its keys."""
    if mechanism == "NULL":
        return
    sock.curve_publickey, sock.curve_secretkey = (z85.encode(k) for k in pair_of_keys(key))
    sock.curve_serverkey = z85.encode(pair_of_keys(server_key)[0])


def server_end(mechanism, draw=None):
    """A ROUTER of ours; only the client's key is admitted."""
    if mechanism == "NULL":
        return Null(ROUTER)
    users = {pair_of_keys(CLIENT)[0]: "learner"}
    more = (draw.randbytes,) if draw else ()
    return CurveServer(ROUTER, *pair_of_keys(SERVER), users.get, *more)


def dealer_of_libzmq(context, listener, mechanism, key=CLIENT, server_key=SERVER, **options):
    dealer = context.socket(options.pop("type", zmq.DEALER))
    dealer.linger, dealer.rcvtimeo = 0, 10_000
    for name, value in options.items():
        setattr(dealer, name, value)
    secure(dealer, mechanism, key, server_key)
    dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    return dealer


def accepted(listener, mechanism, **options):
    return Wire(listener.accept()[0], Connection(server_end(mechanism, **options), LIMITS))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_dealer_of_libzmq_talks_to_this_server(context, listener, mechanism):
    dealer = dealer_of_libzmq(context, listener, mechanism)
    for message in MESSAGES:
        dealer.send_multipart(message)
    wire = accepted(listener, mechanism)
    wire.until(lambda: len(wire.messages) == len(MESSAGES))
    assert wire.messages == MESSAGES
    for message in MESSAGES:
        wire.send(*message)
        assert dealer.recv_multipart() == message


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_messages_of_8_mib_pass_in_both_directions(context, listener, mechanism):
    body = random.Random(1).randbytes(8 << 20)
    dealer = dealer_of_libzmq(context, listener, mechanism)
    dealer.send_multipart([b"head", body])
    wire = accepted(listener, mechanism)
    wire.until(lambda: wire.messages)
    assert wire.messages == [[b"head", body]]
    wire.send(body, b"tail")
    assert dealer.recv_multipart() == [body, b"tail"]


def events_of(socket_):
    return socket_.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_DISCONNECTED
    )


def test_a_dealer_of_libzmq_whose_key_is_not_admitted_is_told_so(context, listener):
    dealer = dealer_of_libzmq(context, listener, "CURVE", key=STRANGER)
    monitor = events_of(dealer)
    wire = accepted(listener, "CURVE")
    wire.until(lambda: wire.connection.ended and not wire.connection.outgoing())
    assert wire.connection.ended == "its key is not admitted"
    assert monitor.poll(10_000)
    event = recv_monitor_message(monitor)
    assert (event["event"], event["value"]) == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    dealer.disable_monitor()


def test_a_dealer_of_libzmq_with_another_server_key_is_refused(context, listener):
    dealer = dealer_of_libzmq(context, listener, "CURVE", server_key=STRANGER)
    wire = accepted(listener, "CURVE")
    wire.until(lambda: wire.connection.ended)
    assert wire.connection.ended == "HELLO cannot be decrypted: another key was used"
    dealer.close()


@pytest.mark.parametrize(("ours", "theirs"), [("NULL", "CURVE"), ("CURVE", "NULL")])
def test_a_dealer_of_libzmq_with_another_mechanism_is_refused(context, listener, ours, theirs):
    dealer = dealer_of_libzmq(context, listener, theirs)
    wire = accepted(listener, ours)
    wire.until(lambda: wire.connection.ended or wire.closed)  # libzmq may be the first to close
    assert not wire.connection.ready
    dealer.close()


def test_a_socket_of_libzmq_of_another_type_is_refused(context, listener):
    puller = dealer_of_libzmq(context, listener, "NULL", type=zmq.PULL)
    wire = accepted(listener, "NULL")
    wire.until(lambda: wire.connection.ended)
    assert wire.connection.ended == "a ROUTER cannot talk to a PULL"
    puller.close()


# Golden files: what libzmq 4.3.5 sent, and what this end answered, both whole.


def golden(mechanism: str) -> Path:
    return GOLDEN / f"zmtp_dealer_{mechanism.lower()}.bin"


def recorded_end(mechanism: str) -> Connection:
    """This end of the recorded conversation; its random bytes are always the same."""
    return Connection(server_end(mechanism, draw=random.Random(5)), LIMITS)


def write_golden() -> None:
    """Record what is missing: `from tests.fstack.test_pyzmq import *; write_golden()`."""
    context = zmq.Context()
    for mechanism in MECHANISMS:
        if golden(mechanism).exists():
            continue
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = dealer_of_libzmq(context, listener, mechanism, routing_id=b"them")
            theirs.send_multipart([b"first", b"", b"x" * 300])
            wire = Wire(listener.accept()[0], recorded_end(mechanism))
            wire.until(lambda wire=wire: wire.messages)
            wire.send(b"answer")
            theirs.close()
        golden(mechanism).write_bytes(mutation.joined([wire.heard, wire.sent]))
    context.destroy(linger=0)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_recorded_conversation_with_libzmq_goes_the_same_way(mechanism):
    heard, sent = mutation.split(golden(mechanism).read_bytes())
    greeting = b"\xff" + bytes(7) + b"%c\x7f\3\1" + mechanism.encode().ljust(52, b"\0")
    assert heard[:64] == greeting % heard[8]
    connection = recorded_end(mechanism)
    assert feed(connection, heard) == [[b"first", b"", b"x" * 300]]
    connection.send([memoryview(b"answer")])
    assert drain(connection) == sent
