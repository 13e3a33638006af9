"""The ends of links over ZeroMQ: memory is kept while it is sent, no answer is lost."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zmq

from tests.support.lossy_link import LossyLink
from tests.support.transport_rigs import (
    BATCH,
    BETA,
    OPEN,
    SCHEMA,
    Memory,
    NetworkReplay,
    Rig,
    goes_on,
    layout_of,
    make_link,
    make_rig,
    nothing_left_open,
    until,
)
from tests.test_transports import play
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import BatchLayout
from zapex.chunks.store import ChunkStore
from zapex.machine import tcp
from zapex.net import keys as curve_keys
from zapex.net.link import HELLO_S
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.sockets import CLIENT_COPIED_BYTES, Dealers, RouterListener, listen, send
from zapex.wire.experience import Push
from zapex.wire.messages import encode
from zapex.wire.protocol import Kind, kind_of
from zapex.zmq_transport import ZmqParameterSink, ZmqParameterSource

__all__ = ["nothing_left_open"]  # a fixture of every test here


FORGOTTEN = """
import gc, weakref, zmq
from tests.support.transport_rigs import OPEN, Memory, NetworkReplay, SCHEMA, form_of, layout_of
from zapex.net.link import ZmqLink
from zapex.net.keys import Security
layout = layout_of(400)
server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0").server
link = ZmqLink(
    server.url, "learner", 1, 1, form_of(layout), {}, Security(), schema_hash=SCHEMA.hash
)
link.itself, server.itself = link, server
gone = [weakref.ref(link), weakref.ref(server)]
OPEN.clear()
del link, server
gc.collect()
assert not any(one() for one in gone)
assert not any(isinstance(one, zmq.Context) for one in gc.get_objects())
"""


def test_an_unclosed_link_or_server_does_not_hang_at_exit() -> None:
    assert goes_on(FORGOTTEN)


def test_a_tracker_is_done_when_libzmq_released_every_part() -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect("tcp://127.0.0.1:1")  # nobody: what is sent waits
    small, large = b"x" * 64, memoryview(np.zeros(1 << 16, np.uint8))
    held = send(dealer, [small, large, small])
    assert held is not None
    assert not held.done
    for copied in (send(dealer, [small, small]), send(dealer, [large], CLIENT_COPIED_BYTES)):
        assert copied is not None
        assert copied.done
    dealer.close()
    context.term()
    until(lambda: held.done, lambda: None, "libzmq to let go")


def send_buffers_locked() -> list[bool]:
    """Of this process's tcp connections: the kernel may not make the send buffer larger."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            link.getpeername()
            if link.family == socket.AF_INET:
                found.append(bool(link.getsockopt(socket.SOL_SOCKET, 72) & 1))  # SO_BUF_LOCK
    return found


@pytest.mark.parametrize("far_us", [1, 1 << 31])
def test_send_buffers_grow_only_for_distant_peers(far_us: int) -> None:
    layout, later_s = layout_of(1000), [0.0]
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    link = make_link(server.url, "reader", 1, layout, clock_s=lambda: time.monotonic() + later_s[0])
    turn = lambda: (server.turn(), link.do_work())  # noqa: E731
    with mock.patch.object(tcp, "FAR_US", 1 << 31):
        until(lambda: link.is_open, turn, "welcomes")
    assert send_buffers_locked() == 4 * [True]
    with mock.patch.object(tcp, "FAR_US", far_us):
        heard, later_s[0] = link.counts["messages"], HELLO_S
        until(lambda: link.counts["messages"] >= heard + 2, turn, "welcomes again")
    assert send_buffers_locked() == 4 * [far_us > 1]


def test_the_largest_allowed_buffer_passes_encrypted(tmp_path: Path) -> None:
    curve_keys.make(tmp_path / "keys")
    ends = {
        r: curve_keys.Security.load(str(tmp_path / "keys"), r, False) for r in ("replay", "learner")
    }
    nbytes, got = 1 << 18, []
    listener = listen("tcp://127.0.0.1:0", ends["replay"], nbytes)
    dealers = Dealers(listener.url, ends["learner"], nbytes, connections=1)
    OPEN.extend([listener, dealers])
    part = np.arange(nbytes).astype(np.uint8).data
    until(lambda: dealers.send(0, [part]) is not None, listener.do_work, "a connection")

    def turn() -> None:
        listener.do_work()
        received = listener.receive()
        got.extend(received[1] if received is not None else [])

    until(lambda: got, turn, "the largest part")
    assert got[0].buffer == part


def spoilt_once(kind: Kind) -> Any:
    """Of the server's messages, the first of a kind arrives with a byte changed."""
    spoilt = []
    whole = RouterListener.send

    def spoil(self: RouterListener, peer: bytes, buffers: list[Any]) -> Any:
        if not spoilt and kind_of(buffers) == kind:
            spoilt.append(True)
            last = bytes([buffers[-1][0] ^ 1]) + bytes(buffers[-1][1:])
            buffers = [*buffers[:-1], memoryview(last)]
        return whole(self, peer, buffers)

    return mock.patch.object(RouterListener, "send", spoil)


def filled(tmp_path: Path) -> Rig:
    rig = make_rig("tcp", tmp_path, 1000)
    play(rig, 40)
    return rig


def test_a_batch_that_arrives_broken_is_asked_for_again(tmp_path: Path) -> None:
    rig = filled(tmp_path)
    source, batch = rig.sample_source, Batch.empty(BatchLayout(SCHEMA, BATCH, False))
    got = []

    def turn() -> None:
        rig.turn()
        if rig.sample_sink.requests():
            rig.sample_sink.answer(rig.replay.draw(BATCH))
        got.extend(s for s in [source.poll(batch)] if s is not None)

    with spoilt_once(Kind.BATCH):
        source.request()
        source.request()
        until(lambda: len(got) == 2, turn, "both batches")
    assert source.outstanding == 0
    rig.close()


def test_parameters_that_arrive_broken_are_asked_for_again() -> None:
    layout = layout_of(1000)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    link = make_link(server.url, "reader", 1, layout)
    source = ZmqParameterSource(link)
    mailbox = server.mailbox
    value = np.arange(mailbox.value_bytes).astype(np.uint8)
    mailbox.publish(7, value)
    out = np.zeros_like(value)
    with spoilt_once(Kind.PARAMS):
        until(lambda: source.newer_than(0, out), server.turn, "parameters")
    assert (out == value).all()
    assert link.counts["bad"] == 1


def test_a_reader_that_has_the_newest_parameters_from_before_gets_the_next_ones() -> None:
    layout = layout_of(1000)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    link = make_link(server.url, "reader", 1, layout)
    source = ZmqParameterSource(link)
    out = np.zeros(server.mailbox.value_bytes, np.uint8)
    server.mailbox.publish(7, out)
    until(lambda: source.version, lambda: (server.turn(), source.newer_than(7, out)), "version 7")
    server.mailbox.publish(8, out)
    until(lambda: source.newer_than(7, out) == 8, server.turn, "version 8")


def test_frames_are_sent_from_the_slot_that_they_lie_in() -> None:
    layout = layout_of(1000)
    chunk = layout.chunk_layout
    store = ChunkStore(aligned_zeros(ChunkStore.required_bytes(chunk, 2)), chunk, 2)
    store.column(1, "obs_frames")[:3] = 4
    push = Push.of_chunks(
        chunk, store.mem, [(store.body(1), 0, 3)], actor=0, incarnation=1, sequence=0
    )
    _, frames, rest = encode(push)
    sent = np.frombuffer(frames, np.uint8)
    assert sent.nbytes == 5 * 3 * 2  # frames 0 to 4, of 3 x 2
    assert sent.ctypes.data == store.column(1, "obs").ctypes.data
    assert not np.shares_memory(np.frombuffer(rest, np.uint8), store.mem)


class Publishing:
    """A learner that publishes, and readers."""

    def __init__(self, readers: int) -> None:
        layout = layout_of(1000)
        self.server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
        self.learner = make_link(self.server.url, "learner", 1, layout)
        self.sink = ZmqParameterSink(self.learner)
        self.links = [make_link(self.server.url, "reader", 2 + i, layout) for i in range(readers)]
        self.sources = [ZmqParameterSource(link) for link in self.links]
        self.out = np.zeros(self.server.mailbox.value_bytes, np.uint8)

    def turn(self) -> None:
        self.server.turn()
        self.learner.do_work()


def test_parameters_are_encoded_once_and_sent_once_to_each_client() -> None:
    publishing = Publishing(3)
    sink, out, received, have = publishing.sink, publishing.out, [], [0] * 3
    for i, link in enumerate(publishing.links):
        take = link.handlers[Kind.PARAMS]
        link.handlers[Kind.PARAMS] = lambda message, i=i, take=take: (
            received.append((i, message.version)), take(message),
        )  # fmt: skip

    def turn() -> None:
        publishing.turn()
        for i, source in enumerate(publishing.sources):
            have[i] = max(have[i], source.newer_than(have[i], out))

    # Whoever has asked on one connection asks again when the other is made.
    until(lambda: all(link.is_open for link in publishing.links), turn, "connections")
    for _ in range(50):
        turn()
    for version in (1, 2):
        value = np.full(out.shape, version, np.uint8)
        sink.publish(version, value)
        until(lambda v=version: have == [v] * 3 and sink.version == v, turn, f"version {version}")
        assert (out == value).all()
    for _ in range(50):
        turn()
    assert sorted(received) == [(i, version) for i in range(3) for version in (1, 2)]
    assert publishing.server.parameters.counts == {"sent": 6, "kept": 2}


def test_parameters_are_forwarded_without_a_copy() -> None:
    publishing, came, went = Publishing(1), [], []
    out, (source,) = publishing.out, publishing.sources
    receive, send_on = RouterListener.receive, RouterListener.send

    def received(self: RouterListener) -> Any:
        found = receive(self)
        if found is not None and kind_of(found[1]) == Kind.PUBLISH:
            came.append(np.frombuffer(found[1][1], np.uint8))
        return found

    def noted(self: RouterListener, peer: bytes, buffers: list[Any]) -> Any:
        if kind_of(buffers) == Kind.PARAMS:
            went.append(np.frombuffer(buffers[1], np.uint8))
        return send_on(self, peer, buffers)

    publishing.sink.publish(3, out + 7)
    with mock.patch.multiple(RouterListener, send=noted, receive=received):
        until(lambda: source.newer_than(0, out), publishing.turn, "parameters")
    assert (out == 7).all()
    assert went[0].ctypes.data == came[0].ctypes.data


def test_small_messages_pass_a_stalled_bulk_connection(tmp_path: Path) -> None:
    rig = filled(tmp_path)
    assert rig.server is not None
    url = rig.server.url
    with LossyLink(int(url.rsplit(":", 1)[1])) as slow:
        urls, plain = iter([url, slow.url]), zmq.Socket.connect
        with mock.patch.object(zmq.Socket, "connect", lambda self, _: plain(self, next(urls))):
            link = make_link(
                "tcp://127.0.0.1:1", "learner", 9, rig.replay.layout, incarnation=2, actors=1
            )
        source, batch = ZmqSampleSource(link, BETA), Batch.empty(BatchLayout(SCHEMA, BATCH, False))
        answer = lambda: [  # noqa: E731
            rig.sample_sink.answer(rig.replay.draw(BATCH))
            for _ in range(rig.sample_sink.requests())
        ]
        turn = lambda: (rig.intake.do_work(0, 0), answer(), link.do_work())  # noqa: E731
        until(lambda: link.is_open, turn, "the welcomes")
        slow.freeze()
        for _ in range(3):
            source.request()
        until(lambda: rig.sample_sink.counts["batches"] == 3, turn, "the batches' departure")
        keys = rig.replay.draw(BATCH).keys
        assert source.update(keys, np.ones(BATCH, np.float32))
        until(lambda: source.updates_under_way == 0, turn, "an acknowledgement")
        assert not source.ready()
        assert source.outstanding == 3
        slow.heal()
        got = []
        until(
            lambda: got.extend(s for s in [source.poll(batch)] if s) or len(got) == 3, turn,
            "three batches",
        )  # fmt: skip
    rig.close()
