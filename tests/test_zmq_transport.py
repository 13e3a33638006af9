"""Promises of the faces over ZeroMQ: memory is kept while it is sent, no answer is lost."""

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

from tests.lossy_link import LossyLink
from tests.test_transports import play
from tests.transport_rigs import (
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
from zapex import curve_keys, zmq_client, zmq_server, zmq_socket
from zapex.batch import Batch, aligned_zeros
from zapex.chunk_store import ChunkStore
from zapex.experience_messages import Push
from zapex.message_header import Kind
from zapex.messages import encode
from zapex.schema import BatchLayout
from zapex.zmq_client import HELLO_S
from zapex.zmq_samples import ZmqSampleSource
from zapex.zmq_socket import (
    CLIENT_COPIED_BYTES,
    Gatekeeper,
    Security,
    connect,
    listen,
    receive,
    send,
)
from zapex.zmq_transport import ZmqParameterSink, ZmqParameterSource

__all__ = ["nothing_left_open"]  # a fixture of every test here


FORGOTTEN = """
import gc, weakref
from tests.transport_rigs import OPEN, Memory, NetworkReplay, SCHEMA, form_of, layout_of
from zapex.zmq_client import ZmqLink
from zapex.zmq_socket import Security
layout = layout_of(400)
server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0").server
link = ZmqLink(
    server.url, "learner", 1, 1, form_of(layout), {}, Security(), schema_hash=SCHEMA.hash
)
link.itself, server.itself = link, server
gone = [weakref.ref(one) for one in (link, server, link._context, server._context)]
OPEN.clear()
del link, server
gc.collect()
assert not any(one() for one in gone)
"""


def test_a_link_or_server_that_is_forgotten_unclosed_ends_with_whoever_forgot_it() -> None:
    assert goes_on(FORGOTTEN)


def test_a_tracker_is_done_when_libzmq_has_let_go_of_every_part() -> None:
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
def test_a_send_buffer_is_small_until_the_peer_is_found_to_be_far(far_us: int) -> None:
    layout, later_s = layout_of(1000), [0.0]
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    link = make_link(server.url, "reader", 1, layout, clock_s=lambda: time.monotonic() + later_s[0])
    turn = lambda: (server.turn(), link.do_work())  # noqa: E731
    with mock.patch.object(zmq_socket, "_FAR_US", 1 << 31):
        until(lambda: link.is_open, turn, "welcomes")
    assert send_buffers_locked() == 4 * [True]
    with mock.patch.object(zmq_socket, "_FAR_US", far_us):
        heard, later_s[0] = link.counts["messages"], HELLO_S
        until(lambda: link.counts["messages"] >= heard + 2, turn, "welcomes again")
    assert send_buffers_locked() == 4 * [far_us > 1]


def test_the_largest_part_that_is_allowed_passes_encrypted_too(tmp_path: Path) -> None:
    curve_keys.make(tmp_path / "keys")
    ends = {r: Security.load(str(tmp_path / "keys"), r, False) for r in ("replay", "learner")}
    context, other, nbytes = zmq.Context(), zmq.Context(), 1 << 18
    OPEN.extend(mock.Mock(close=lambda c=c: c.destroy(linger=0)) for c in (context, other))
    assert ends["replay"].keys is not None
    gate = Gatekeeper(context, ends["replay"].keys)
    router = listen(context, "tcp://127.0.0.1:0", ends["replay"], nbytes)
    dealer = connect(other, router.last_endpoint.decode(), ends["learner"], nbytes)
    part, got = np.arange(nbytes).astype(np.uint8).data, []
    until(lambda: send(dealer, [part]) is not None, gate.do_work, "a connection")

    def turn() -> None:
        gate.do_work()
        got.extend(receive(router) or [])

    until(lambda: got, turn, "the largest part")
    assert got[1].buffer == part


def spoilt_once(kind: Kind) -> Any:
    """Of the server's messages, the first of a kind arrives with a byte changed."""
    spoilt = []
    whole = zmq_server.send

    def spoil(socket: Any, parts: list[Any]) -> Any:
        header = bytes(parts[1])
        if not spoilt and header[6] == kind:
            spoilt.append(True)
            parts = [*parts[:-1], bytes([parts[-1][0] ^ 1]) + bytes(parts[-1][1:])]
        return whole(socket, parts)

    return mock.patch.object(zmq_server, "send", spoil)


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
    mailbox = server.parameters._mailbox
    value = np.arange(mailbox.value_bytes).astype(np.uint8)
    mailbox.publish(7, value)
    out = np.zeros_like(value)
    with spoilt_once(Kind.PARAMS):
        until(lambda: source.newer_than(0, out), server.turn, "parameters")
    assert (out == value).all()
    assert link.counts["bad"] == 1


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


def publishing(readers: int) -> tuple[NetworkReplay, ZmqParameterSink, list[ZmqParameterSource]]:
    layout = layout_of(1000)
    server = NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0")
    sink = ZmqParameterSink(make_link(server.url, "learner", 1, layout))
    links = [make_link(server.url, "reader", 2 + i, layout) for i in range(readers)]
    return server, sink, [ZmqParameterSource(link) for link in links]


def test_a_version_is_encoded_once_and_goes_to_each_client_once() -> None:
    server, sink, sources = publishing(3)
    received = []
    for i, source in enumerate(sources):
        take = source._link.handlers[Kind.PARAMS]
        source._link.handlers[Kind.PARAMS] = lambda message, i=i, take=take: (
            received.append((i, message.version)), take(message),
        )  # fmt: skip
    out = np.zeros(server.parameters._mailbox.value_bytes, np.uint8)
    have = [0] * len(sources)

    def turn() -> None:
        server.turn()
        sink._link.do_work()
        for i, source in enumerate(sources):
            have[i] = max(have[i], source.newer_than(have[i], out))

    # Whoever has asked on one connection asks again when the other is made.
    until(lambda: all(source._link.is_open for source in sources), turn, "connections")
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
    assert server.parameters.counts == {"sent": 6, "kept": 2}


def test_parameters_are_sent_on_from_the_frame_that_they_came_in() -> None:
    server, sink, (source,) = publishing(1)
    came = []
    take = server.server.handlers[Kind.PUBLISH]
    server.server.handlers[Kind.PUBLISH] = lambda session, message: (
        came.append(np.frombuffer(message.parameters, np.uint8)), take(session, message),
    )  # fmt: skip
    out = np.zeros(server.parameters._mailbox.value_bytes, np.uint8)
    sink.publish(3, out + 7)

    def turn() -> None:
        server.turn()
        sink._link.do_work()

    until(lambda: source.newer_than(0, out), turn, "parameters")
    assert (out == 7).all()
    kept = np.frombuffer(server.parameters._parts[1], np.uint8)
    assert kept.ctypes.data == came[0].ctypes.data


def test_small_messages_pass_while_the_bulk_connection_stands_still(tmp_path: Path) -> None:
    rig = filled(tmp_path)
    port = int(rig.sample_source._link.url.rsplit(":", 1)[1])
    with LossyLink(port) as slow:
        urls = iter([rig.sample_source._link.url, slow.url])
        plain = zmq_client.connect
        with mock.patch.object(
            zmq_client, "connect", lambda context, url, *rest: plain(context, next(urls), *rest)
        ):
            link = make_link("tcp://127.0.0.1:1", "learner", 9, rig.replay.layout, incarnation=2)
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
