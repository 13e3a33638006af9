"""Batches over ZeroMQ that a thread checks and unpacks while the learner learns."""

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.test_zmq_transport import filled, spoilt_once
from tests.transport_rigs import BATCH, BETA, SCHEMA, Rig, nothing_left_open, until
from zapex.batch import Batch
from zapex.batch_packing import BatchUnpacker
from zapex.errors import BadMessage
from zapex.message_header import Kind
from zapex.replay import Draw, importance_weights
from zapex.schema import BatchLayout

__all__ = ["nothing_left_open"]  # a fixture of every test here

LAYOUT = BatchLayout(SCHEMA, BATCH, False)


class Learning:
    """A learner with two batches' memory; `unpacked` says by which threads batches came apart."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.source = rig, rig.sample_source
        self.batches = [Batch.empty(LAYOUT) for _ in range(2)]
        self.draws: list[Draw] = []
        self.unpacked: list[str] = []

    def answer(self) -> None:
        self.rig.turn()
        for _ in range(self.rig.sample_sink.requests()):
            self.draws.append(self.rig.replay.draw(BATCH))
            self.rig.sample_sink.answer(self.draws[-1])

    def wait_for(self, batches: int) -> None:
        """All of them have come, checked or not."""
        source = self.source

        def come() -> int:
            beside = source._job is not None and source._job.fresh
            answered = sum(a is not None for a in source._pending.values())
            return len(source._come) + beside + answered

        until(lambda: come() >= batches, self.answer, f"{batches} batches")

    def poll(self) -> Batch:
        batch, spare = self.batches
        until(lambda: self.source.poll(batch, spare) is not None, self.answer, "a batch")
        self.batches = [spare, batch]
        return batch

    def check(self, batch: Batch, draw: Draw) -> None:
        wanted = Batch.empty(LAYOUT)
        self.rig.replay.store.gather(draw.keys, LAYOUT, wanted.memory, wanted.keys)
        wanted.indices[:] = draw.indices
        wanted.weights[:] = importance_weights(draw.leaves, BETA)
        assert (batch.memory == wanted.memory).all()


@pytest.fixture
def learning(tmp_path: Path) -> Iterator[Learning]:
    rig = filled(tmp_path)
    found, unpack = Learning(rig), BatchUnpacker.unpack

    def noted(*args: object) -> object:
        found.unpacked.append(threading.current_thread().name.partition("_")[0])
        return unpack(*args)

    with mock.patch.object(BatchUnpacker, "unpack", noted):
        yield found
    rig.close()


def test_what_comes_ahead_is_unpacked_by_a_thread_and_is_what_was_drawn(learning: Learning) -> None:
    for _ in range(3):
        learning.source.request()
    learning.wait_for(3)
    for turn in range(6):
        learning.check(learning.poll(), learning.draws[turn])
        learning.source.request()
        learning.wait_for(3)
    assert learning.unpacked[:7] == ["MainThread", *["batches"] * 6]
    assert learning.source._link.counts["bad"] == 0


def test_a_batch_is_unpacked_anew_where_another_memory_is_polled(learning: Learning) -> None:
    for _ in range(2):
        learning.source.request()
    learning.wait_for(2)
    learning.check(learning.poll(), learning.draws[0])
    other = Batch.empty(LAYOUT)
    assert learning.source.poll(other) is not None
    learning.check(other, learning.draws[1])
    assert learning.unpacked == ["MainThread", "batches", "MainThread"]


def test_a_batch_that_arrives_broken_beside_the_learner_is_asked_for_again(
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
        broken = learning.source._job
        assert broken is not None
        with pytest.raises(BadMessage):
            broken.work.result(20)
        seen = {learning.poll().keys.tobytes() for _ in range(2)}
    assert seen == {draw.keys.tobytes() for draw in learning.draws[3:5]}
    assert learning.source._link.counts["bad"] == 1
    assert learning.source.outstanding == 0


def test_an_answer_that_came_twice_is_not_given_though_it_was_unpacked(learning: Learning) -> None:
    for _ in range(2):
        learning.source.request()
    learning.wait_for(2)
    learning.poll()  # from here on a thread checks what comes
    learning.check(learning.poll(), learning.draws[1])
    (session,) = learning.rig.sample_sink._server.sessions("learner")
    session.requests[1] = None
    learning.source.request()
    until(lambda: len(learning.source._come) == 2, learning.answer, "two batches")
    learning.source._begin_job(learning.batches[0])  # the first of them: the double
    learning.check(learning.poll(), learning.draws[3])
    assert learning.source.counts["doubled"] == 1
    assert not np.array_equal(learning.draws[2].keys, learning.draws[3].keys)
