"""The ZMTP state machine against itself, with and without keys, and against bytes that break rules.

Behaviour against libzmq is in test_pyzmq.py.
"""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.zmtp_peers import (
    DEALER,
    LIMITS,
    ROUTER,
    CurveClient,
    converse,
    curve_ends,
    drain,
    feed,
    null_ends,
    pair_of_keys,
)  # fmt: skip
from zapex.fstack import zmtp
from zapex.fstack.zmtp import Connection, Limits, Null

ENDS = [pytest.param(null_ends, id="NULL"), pytest.param(curve_ends, id="CURVE")]
MESSAGES = [[b"one"], [b"", b"two", b"x" * 255, b"y" * 256], [b"z" * 70_000, b""]]
READY = zmtp.command(b"READY", zmtp.own_properties(DEALER))
GREETING = zmtp.greeting(b"NULL", False)


def send(connection, message):
    return connection.send([memoryview(frame) for frame in message])


def command(body):
    return zmtp.frame_header(zmtp.COMMAND, len(body)) + body


def frame(body, flags=0):
    return zmtp.frame_header(flags, len(body)) + body


def connected(make_ends, *arguments, **options):
    server, client = make_ends(*arguments, **options)
    converse(server, client)
    assert server.ready
    assert client.ready
    return server, client


@pytest.mark.parametrize("make_ends", ENDS)
def test_messages_arrive_whole_in_both_directions(make_ends):
    server, client = connected(make_ends)
    for message in MESSAGES:
        send(server, message)
        send(client, message)
    assert converse(server, client) == {server: MESSAGES, client: MESSAGES}


def test_a_key_stands_for_a_user():
    server, _ = connected(curve_ends)
    assert server.mechanism.user == "learner"


def stream(make_ends):
    """A server, and all bytes that a client sends it: greeting, handshake, messages."""
    client_bytes = bytearray()
    server, client = make_ends()
    converse(server, client, lambda to, data: client_bytes.extend(data) if to is server else None)
    for message in MESSAGES:
        send(client, message)
    return bytes(client_bytes) + drain(client)


@pytest.mark.parametrize("make_ends", ENDS)
@given(sizes=st.lists(st.integers(1, 300), max_size=400))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_stream_means_the_same_wherever_it_is_cut(make_ends, sizes):
    data = stream(make_ends)
    whole, cut = make_ends()[0], make_ends()[0]
    assert feed(cut, data, sizes) == feed(whole, data) == MESSAGES
    assert drain(cut) == drain(whole)


def test_a_body_goes_where_the_caller_names():
    slot = np.zeros(70_000, np.uint8)

    def place(earlier, nbytes):
        return memoryview(slot) if len(earlier) == 1 and nbytes == slot.nbytes else None

    server, client = connected(null_ends, place=place)
    send(client, [b"header", b"x" * slot.nbytes, b"rest"])
    assert converse(server, client)[server] == [[b"header", b"x" * slot.nbytes, b"rest"]]
    assert bytes(slot) == b"x" * slot.nbytes


def test_the_rest_of_a_large_body_is_received_straight_into_that_memory():
    slot = np.zeros(1 << 20, np.uint8)
    server, client = connected(null_ends, place=lambda earlier, nbytes: memoryview(slot))
    send(client, [bytes(slot.nbytes)])
    feed(server, drain(client)[:100])
    room = server.room()
    assert room.nbytes == slot.nbytes - 100 + 9  # a long header has nine bytes
    room[0] = 7
    assert slot[91] == 7


@pytest.mark.parametrize("make_ends", ENDS)
def test_a_command_may_stand_between_the_frames_of_a_message(make_ends):
    server, client = connected(make_ends)
    if make_ends is null_ends:
        data = frame(b"a", zmtp.MORE) + command(zmtp.command(b"PING", b"\0\1")) + frame(b"b")
        assert feed(server, data) == [[b"a", b"b"]]
    send(client, [b"a"])
    assert converse(server, client)[server] == [[b"a"]]


def test_an_unknown_command_has_no_effect():
    server, _ = connected(null_ends)
    assert feed(server, command(zmtp.command(b"SUBSCRIBE", b"x")) + frame(b"a")) == [[b"a"]]


def test_sent_says_how_far_a_message_has_gone():
    server, _ = connected(null_ends)
    first, second = send(server, [b"x" * 5000]), send(server, [b"y", b"z"])
    before = server.sent_bytes
    server.sent(4000)
    assert server.sent_bytes == before + 4000 < first
    data = b"".join(server.outgoing())
    server.sent(first - server.sent_bytes)
    assert first <= server.sent_bytes < second
    server.sent(second - server.sent_bytes)
    assert server.outgoing() == []
    assert data == b"x" * (len(data) - 6) + frame(b"y", zmtp.MORE) + frame(b"z")


def test_a_large_body_is_sent_without_a_copy():
    server, _ = connected(null_ends)
    body = bytearray(100_000)
    server.send([memoryview(body)])
    body[50_000] = 9
    assert drain(server)[9 + 50_000] == 9


# What ends a connection.

HANDSHAKE = GREETING + command(READY)


def ended(data, limits=LIMITS, start=HANDSHAKE):
    """Why a server without keys ends a connection that sends these bytes after the handshake."""
    server = Connection(Null(ROUTER), limits)
    feed(server, start + data)
    return server.ended


@pytest.mark.parametrize(
    "start",
    [b"\1", b"GET / HTTP", b"\xff" + bytes(8) + b"\0", b"\xff" + bytes(8) + b"\x7f\0",
     b"\xff" + bytes(8) + b"\x7f\1"],
    ids=["length 1", "HTTP", "ZMTP 1.0 with a long length", "revision 0", "ZMTP 2.0"],
)  # fmt: skip
def test_an_older_protocol_is_refused_with_its_first_telling_byte(start):
    assert ended(b"", start=start[:-1]) == "" or start == b"GET / HTTP"
    assert "ZMTP" in ended(b"", start=start)


def test_a_later_version_is_taken_as_this_one():
    later = GREETING[:10] + b"\4\0" + GREETING[12:]
    assert ended(b"", start=later + command(READY)) == ""


def test_another_mechanism_is_refused():
    assert "b'CURVE'" in ended(b"", start=zmtp.greeting(b"CURVE", False))
    server, _ = curve_ends()
    feed(server, GREETING)
    assert "b'NULL'" in server.ended


@pytest.mark.parametrize("type_", [b"PULL", b"\xff" * 200])
def test_a_socket_type_that_does_not_fit_is_refused(type_):
    ready = zmtp.command(b"READY", zmtp.own_properties(type_))
    assert ended(b"", start=GREETING + command(ready)).startswith("a ROUTER cannot talk to a ")
    odd = CurveClient(type_, *pair_of_keys(2), pair_of_keys(1)[0])
    server, client = curve_ends()[0], Connection(odd, LIMITS)
    converse(server, client)
    assert server.ended.startswith("a ROUTER cannot talk to a ")
    assert not server.ready


@pytest.mark.parametrize(
    "data",
    [b"\1", b"\0\0\0\0\0", b"\1a\0\0\0\2x", b"\1a\0\0\0\0\1A\0\0\0\0", b"\1a\xff\xff\xff\xff"],
)
def test_bad_properties_are_refused(data):
    start = GREETING + command(zmtp.command(b"READY", data))
    assert "propert" in ended(b"", start=start)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x08\0", "flags 0x08"),
        (b"\x05\0", "flags 0x05"),
        (b"\2" + struct.pack(">Q", 1 << 62), f"a frame has {1 << 62} bytes, at most 100"),
        (frame(bytes(101)), "a frame has 101 bytes, at most 100 are allowed"),
        (command(bytes(5000)), "a frame has 5000 bytes, at most 4096 are allowed"),
        (frame(b"", zmtp.MORE) * 3 + frame(b""), "a message has more than 3 frames"),
        (command(b""), "a command is shorter than its name"),
        (command(b"\5PING"), "a command is shorter than its name"),
        (command(b"\5ERROR\x03bad"), "the peer ends this connection: b'bad'"),
    ],
)
def test_a_frame_that_breaks_a_rule_ends_the_connection(data, why):
    assert why in ended(data, Limits(frame_bytes=100, frames=3))


def test_a_frame_is_refused_by_its_header_before_there_is_memory_for_it():
    asked = []
    limits = Limits(frame_bytes=100, frames=3)
    server, _ = connected(null_ends, limits, place=lambda earlier, nbytes: asked.append(nbytes))
    feed(server, b"\2" + struct.pack(">Q", 101))
    assert server.ended
    assert asked == []


def test_the_limits_count_what_is_inside_of_an_encrypted_frame():
    limits = Limits(frame_bytes=100, frames=3)
    server, client = connected(curve_ends, limits)
    send(client, [bytes(100)] * 3)
    assert converse(server, client)[server] == [[bytes(100)] * 3]
    send(client, [bytes(101)])
    converse(server, client)
    assert "a frame has" in server.ended


@pytest.mark.parametrize(
    ("start", "why"),
    [
        (GREETING + frame(b"x"), "before the end of the handshake"),
        (GREETING + command(zmtp.command(b"HELLO")), "not READY"),
        (GREETING + command(bytes(5000)), "at most 4096"),
        (GREETING + command(b"\5ERROR\x03400"), "the peer refuses this connection: b'400'"),
    ],
)
def test_a_handshake_that_breaks_a_rule_ends_the_connection(start, why):
    assert why in ended(b"", start=start)


def test_nothing_is_taken_after_the_end():
    server, _ = connected(null_ends)
    server.end("by the caller")
    room = server.room()
    room[:3] = frame(b"x")
    assert server.received(3) == []
    assert server.ended == "by the caller"


def test_messages_before_a_broken_rule_are_still_given():
    server, _ = connected(null_ends)
    assert feed(server, frame(b"a") + b"\xff\xff") == [[b"a"]]
    assert server.ended


# Keys.


def test_a_client_without_the_secret_of_its_key_is_refused():
    thief = Connection(
        CurveClient(DEALER, pair_of_keys(2)[0], pair_of_keys(3)[1], pair_of_keys(1)[0]), LIMITS
    )
    server, _ = curve_ends()
    converse(server, thief)
    assert server.ended == "INITIATE cannot be decrypted: another key was used"


def recorded(make_ends):
    """What a client sent in its handshake, command by command."""
    said = []
    server, client = make_ends()
    converse(server, client, lambda to, data: said.append(data) if to is server else None)
    return said


def test_a_handshake_cannot_be_repeated_to_another_server():
    said = recorded(curve_ends)
    server, _ = curve_ends(seed=2)
    feed(server, b"".join(said))
    assert "cannot be decrypted" in server.ended


def test_a_message_cannot_be_repeated():
    server, client = connected(curve_ends)
    send(client, [b"once"])
    data = drain(client)
    assert feed(server, data + data) == [[b"once"]]
    assert server.ended == "a nonce is not larger than the one before it"


def test_every_changed_byte_of_an_encrypted_message_is_found():
    for at in range(2, 2 + 33 + 3):
        server, client = connected(curve_ends)
        send(client, [b"abc"])
        data = bytearray(drain(client))
        data[at] ^= 1
        assert feed(server, bytes(data)) == []
        assert server.ended
