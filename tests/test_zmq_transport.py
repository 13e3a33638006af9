"""Promises of the faces over ZeroMQ: memory is kept while it is sent, no answer is lost."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zmq

from tests.test_transports import play
from tests.transport_rigs import (
    BATCH,
    OPEN,
    SCHEMA,
    Memory,
    NetworkReplay,
    Rig,
    layout_of,
    make_link,
    make_rig,
    nothing_left_open,
    until,
)
from zapex import curve_keys, zmq_server
from zapex.batch import Batch
from zapex.message_header import Kind
from zapex.schema import BatchLayout
from zapex.zmq_socket import Gatekeeper, Security, connect, listen, receive, send
from zapex.zmq_transport import ZmqParameterSource

__all__ = ["nothing_left_open"]  # a fixture of every test here


def test_a_tracker_is_done_when_libzmq_has_let_go_of_every_part() -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect("tcp://127.0.0.1:1")  # nobody: what is sent waits
    small, large = b"x" * 64, memoryview(np.zeros(1 << 20, np.uint8))
    held = send(dealer, [small, large, small])
    assert held is not None
    assert not held.done
    copied = send(dealer, [small, small])
    assert copied is not None
    assert copied.done
    dealer.close()
    context.term()
    until(lambda: held.done, lambda: None, "libzmq to let go")


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
