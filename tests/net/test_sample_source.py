"""Batches over ZeroMQ that a thread checks and unpacks while the learner learns."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support.transport_rigs import BATCH, BETA, SCHEMA, Rig, nothing_left_open, until
from tests.test_zmq_transport import filled, spoilt_once
from zapex.chunks.batch import Batch
from zapex.chunks.layout import BatchLayout
from zapex.errors import BadMessage
from zapex.net.sockets import Dealers
from zapex.replay.draw import Draw
from zapex.wire import messages as m
from zapex.wire.batches import BatchUnpacker
from zapex.wire.protocol import Kind, kind_of

__all__ = ["nothing_left_open"]  # a fixture of every test here

LAYOUT = BatchLayout(SCHEMA, BATCH, False)


class Learning:
    """A learner with two batches' memory.

    unpacked: by which threads batches came apart. refused: by which threads broken ones were
    found. come: batches that have come.
    """

    def __init__(self, rig: Rig) -> None:
        assert rig.server is not None
        assert rig.learner is not None
        self.rig, self.source = rig, rig.sample_source
        self.server, self.link = rig.server.server, rig.learner
        self.come = self.polled = 0
        self.batches = [Batch.empty(LAYOUT) for _ in range(2)]
        self.draws: list[Draw] = []
        self.unpacked: list[str] = []
        self.refused: list[str] = []

    def answer(self) -> None:
        self.rig.turn()
        for _ in range(self.rig.sample_sink.requests()):
            self.draws.append(self.rig.replay.draw(BATCH))
            self.rig.sample_sink.answer(self.draws[-1])

    def wait_for(self, batches: int) -> None:
        """So many are there, checked or not."""
        until(lambda: self.come - self.polled >= batches, self.answer, f"{batches} batches")

    def poll(self) -> Batch:
        batch, spare = self.batches
        until(lambda: self.source.poll(batch, spare) is not None, self.answer, "a batch")
        self.batches = [spare, batch]
        self.polled += 1
        return batch

    def check(self, batch: Batch, draw: Draw) -> None:
        wanted = Batch.empty(LAYOUT)
        self.rig.replay.store.gather(draw.keys, LAYOUT, wanted.memory, wanted.keys)
        wanted.indices[:] = draw.indices
        draw.weigh(wanted.weights, BETA)
        assert (batch.memory == wanted.memory).all()


@pytest.fixture
def learning(tmp_path: Path) -> Iterator[Learning]:
    rig = filled(tmp_path)
    found, unpack, decode, receive = Learning(rig), BatchUnpacker.unpack, m.decode, Dealers.receive

    def thread() -> str:
        return threading.current_thread().name.partition("_")[0]

    def noted(*args: object) -> object:
        found.unpacked.append(thread())
        return unpack(*args)

    def decoded(*args: object, **options: object) -> object:
        try:
            return decode(*args, **options)
        except BadMessage:
            found.refused.append(thread())
            raise

    def received(dealers: Dealers, number: int) -> list[Any] | None:
        buffers = receive(dealers, number)
        found.come += buffers is not None and kind_of(buffers) == Kind.BATCH
        return buffers

    with (
        mock.patch.object(BatchUnpacker, "unpack", noted),
        mock.patch.object(m, "decode", decoded),
        mock.patch.object(Dealers, "receive", received),
    ):
        yield found
    rig.close()


def test_a_thread_unpacks_the_next_batch(learning: Learning) -> None:
    for _ in range(3):
        learning.source.request()
    learning.wait_for(3)
    for turn in range(6):
        learning.check(learning.poll(), learning.draws[turn])
        learning.source.request()
        learning.wait_for(3)
    until(lambda: len(learning.unpacked) > 6, learning.answer, "the thread")
    assert learning.unpacked[:7] == ["MainThread", *["batches"] * 6]
    assert learning.link.counts["bad"] == 0


def test_polling_another_memory_unpacks_again(learning: Learning) -> None:
    for _ in range(2):
        learning.source.request()
    learning.wait_for(2)
    learning.check(learning.poll(), learning.draws[0])
    other = Batch.empty(LAYOUT)
    assert learning.source.poll(other) is not None
    learning.check(other, learning.draws[1])
    assert learning.unpacked == ["MainThread", "batches", "MainThread"]


def test_a_broken_batch_found_by_the_thread_is_requested_again(
    learning: Learning,
) -> None:
    for _ in range(2):
        learning.source.request()
    learning.wait_for(2)
    learning.poll()
    with spoilt_once(Kind.BATCH):
        for _ in range(2):
            learning.source.request()
        learning.wait_for(3)
        learning.check(learning.poll(), learning.draws[1])
        until(lambda: learning.refused, lambda: None, "the thread's look")
        assert learning.refused == ["batches"]
        seen = {learning.poll().keys.tobytes() for _ in range(2)}
    assert seen == {draw.keys.tobytes() for draw in learning.draws[3:5]}
    assert learning.link.counts["bad"] == 1
    assert learning.source.outstanding == 0


def test_the_thread_skips_an_answer_that_came_twice(learning: Learning) -> None:
    for _ in range(2):
        learning.source.request()
    learning.wait_for(2)
    learning.poll()  # from here on a thread checks what comes
    learning.check(learning.poll(), learning.draws[1])
    (session,) = learning.server.sessions.of_roles("learner")
    for _ in range(2):
        learning.source.request()
    until(lambda: len(session.requests) == 2, learning.rig.turn, "requests 2 and 3")
    session.requests = {number: m.Sample(number, BATCH) for number in (2, 1, 3)}
    learning.wait_for(3)
    learning.check(learning.poll(), learning.draws[2])  # and a thread is given the next: the double
    learning.check(learning.poll(), learning.draws[4])
    assert learning.unpacked[-1] == "batches"
    assert learning.source.counts["doubled"] == 1
    assert not np.array_equal(learning.draws[3].keys, learning.draws[4].keys)


def test_updates_after_one_that_was_lost_wait_until_it_has_come(learning: Learning) -> None:
    source, link = learning.source, learning.link
    source.request()
    keys = learning.poll().keys
    come: list[float] = []

    def turn() -> None:
        learning.answer()
        source.do_work()
        come.extend(float(values[0]) for _, values in learning.rig.sample_sink.updates())

    def update(value: int) -> None:
        assert source.update(keys, np.full(BATCH, value, np.float32))

    update(0)
    until(lambda: come == [0], turn, "the first")
    with mock.patch.object(link, "send", return_value=mock.Mock(done=True)):
        update(1)  # sent, and lost with the connection
    update(2)
    with mock.patch.object(link, "send", return_value=None):
        update(3)  # no connection
    update(4)
    for _ in range(20):
        turn()
    assert come == [0]
    link._dealers.renew(m.SMALL)
    until(lambda: len(come) == 5, turn, "all")
    assert come == [0, 1, 2, 3, 4]
