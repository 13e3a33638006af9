"""A batch in pieces: whatever comes, however often, and in whichever order, each is one draw."""

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.chunks.test_builder import play
from zapex.chunks.batch import Batch
from zapex.chunks.layout import COUNT, BatchLayout, ChunkLayout
from zapex.chunks.schema import Column, Schema
from zapex.errors import BadMessage, NotEnoughData
from zapex.net.replay_ends import ZmqSampleSink
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.sessions import Session
from zapex.replay.draw import Draw
from zapex.wire import messages as m
from zapex.wire.batches import BatchPacker, BatchUnpacker, packed_bytes
from zapex.wire.messages import SMALL
from zapex.wire.protocol import Form, Kind

ROWS, BETA = 10, 0.4


class Replay:
    """Answers requests with draws of a memory, and remembers them by their keys.

    wire: encoded messages that have not come yet. drawn: sequence and draw, by the draw's keys.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        store, self.closed, *_ = play(self.rng, streams=2, stack=2, n=3, chunk=8, steps=80)
        self.store, self.packer = store, BatchPacker(store)
        self.form = Form(store.layout, ROWS, 8)
        self.layout = BatchLayout(store.layout.schema, ROWS)
        self.requests: dict[int, m.Sample] = {}
        self.wire: deque[list[Any]] = deque()
        self.drawn: dict[bytes, tuple[int, Draw]] = {}

    def draw(self) -> Draw:
        slots = self.rng.choice(self.closed, ROWS)
        indices = slots * self.store.layout.chunk
        indices += self.rng.integers(0, self.store.header_rows[slots, COUNT])
        keys, leaves = self.store.keys_of(indices), self.rng.random(ROWS) + 0.1
        return Draw(keys, indices, leaves, float(leaves.sum()), 500, 0.1)

    def answer(self, sequence: int) -> None:
        sample, draw = self.requests[sequence], self.draw()
        self.drawn[draw.keys.tobytes()] = sequence, draw
        rows = sample.piece_rows or ROWS
        for first in range(0, ROWS, rows):
            memory = np.empty(packed_bytes(self.layout.schema, rows), np.uint8)
            piece = self.packer.pack(
                draw.piece(first, rows), epoch=1, sequence=sequence, memory=memory, first=first
            )
            self.put(m.encode(piece))

    def put(self, parts: Sequence[Any]) -> None:
        """Send a copy: the sender may use its memory again."""
        self.wire.append([bytearray(part) for part in parts])

    def spoil(self) -> None:
        """Break a message on its way."""
        parts = self.wire[int(self.rng.integers(len(self.wire)))]
        parts[1][0] ^= 1

    def check(self, batch: Batch) -> int:
        """It is one draw, whole. Returns the sequence of the request."""
        sequence, draw = self.drawn.pop(batch.keys.tobytes())
        wanted = Batch.empty(self.layout)
        self.store.gather(draw.keys, self.layout, wanted.memory, wanted.keys)
        wanted.indices[:] = draw.indices
        draw.weigh(wanted.weights, BETA)
        assert (batch.memory == wanted.memory).all()
        return sequence


class Link:
    """A link's side that a SampleSource uses; `come` are messages to receive."""

    compressed = False

    def __init__(self, replay: Replay) -> None:
        self.form, self._replay = replay.form, replay
        self.come: deque[list[Any]] = deque()

    def register(self, handlers: Any, *, raw: Any, on_welcome: Any, on_lost: Any) -> None:
        self.take, self.on_welcome, self.on_lost = raw[Kind.BATCH], on_welcome, on_lost

    def do_work(self) -> None:
        while self.come:
            self.take(self.come.popleft())

    def reject(self, error: BadMessage) -> None:
        self.on_lost()

    def send(self, channel: int, message: Any) -> bool:
        self._replay.requests[message.sequence] = message
        return True

    def reconnect(self) -> None:
        """What was on its way is lost, and what the replay was asked."""
        self._replay.wire.clear()
        self._replay.requests.clear()
        welcome = m.Welcome(1, 0, 1, 1, 1, 8, True, np.zeros(0, m.ACTOR_STATE))
        self.on_welcome(welcome, SMALL)


def deliver(replay: Replay, link: Link, messages: int = 10_000) -> None:
    for _ in range(min(messages, len(replay.wire))):
        link.come.append(replay.wire.popleft())


def asking(replay: Replay, piece_rows: int = 4) -> tuple[Link, Batch, ZmqSampleSource]:
    """A learner that has asked for one batch."""
    link: Any = Link(replay)
    source = ZmqSampleSource(link, BETA, piece_rows=piece_rows)
    source.request()
    return link, Batch.empty(replay.layout), source


@pytest.mark.parametrize("piece_rows", [0, 1, 3, 9, 10, 11])
def test_a_batch_in_pieces_is_the_batch_that_was_drawn(piece_rows: int) -> None:
    replay = Replay(1)
    link, batch, source = asking(replay, piece_rows)
    replay.answer(0)
    assert len(replay.wire) == {1: 10, 3: 4, 9: 2}.get(piece_rows, 1)
    deliver(replay, link)
    sampled = source.poll(batch)
    assert sampled is not None
    assert sampled.live == 500
    assert replay.check(batch) == 0
    assert source.outstanding == 0


def test_a_piece_is_unpacked_while_others_are_on_their_way() -> None:
    replay = Replay(2)
    link, batch, source = asking(replay)
    replay.answer(0)
    ((_, draw),) = replay.drawn.values()
    for rows in (4, 8):
        assert not source.ready()
        deliver(replay, link, 1)
        assert source.ready()
        assert source.poll(batch) is None
        assert (batch.keys[:rows] == draw.keys[:rows]).all()
    deliver(replay, link, 1)
    assert source.poll(batch) is not None
    replay.check(batch)


def test_a_second_answer_replaces_a_partial_one() -> None:
    replay = Replay(3)
    link, batch, source = asking(replay)
    replay.answer(0)
    replay.wire.pop()
    replay.answer(0)
    deliver(replay, link, 2)
    assert source.poll(batch) is None
    deliver(replay, link)
    assert source.poll(batch) is not None
    replay.check(batch)
    assert source.counts["doubled"] == 0


def test_unrequested_pieces_are_counted_and_dropped() -> None:
    replay = Replay(4)
    link, batch, source = asking(replay)
    replay.answer(0)
    second = replay.wire[1]
    replay.requests[7] = m.Sample(7, ROWS)
    replay.requests[0] = m.Sample(0, ROWS, False, 5)
    replay.answer(7)
    replay.answer(0)
    replay.wire.rotate(3)  # of a request that is unknown, and pieces of another size, come first
    replay.wire.insert(3, second)
    deliver(replay, link, 4)
    assert source.poll(batch) is None
    assert source.counts["doubled"] == 4
    deliver(replay, link)
    assert source.poll(batch) is not None
    replay.check(batch)


@pytest.mark.parametrize("unchecked", [False, True])
@pytest.mark.parametrize(("piece_rows", "pieces"), [(0, 1), (4, 3)])
def test_the_thread_unpacks_all_pieces_that_have_come(
    piece_rows: int, pieces: int, unchecked: bool
) -> None:
    replay, by_thread = Replay(7), list[bool]()
    link, batches = Link(replay), [Batch.empty(replay.layout) for _ in range(2)]
    source = ZmqSampleSource(link, BETA, piece_rows=piece_rows)
    unpack = BatchUnpacker.unpack

    def noted(*args: Any) -> Draw:
        by_thread.append(threading.current_thread() is not threading.main_thread())
        return unpack(*args)

    def poll(turn: int) -> None:
        assert source.poll(batches[turn % 2], batches[1 - turn % 2]) is not None
        assert replay.check(batches[turn % 2]) == turn

    with mock.patch.object(BatchUnpacker, "unpack", noted):
        for turn in range(3):
            source.request()
            replay.answer(turn)
        # From the first poll on, messages are left to the thread.
        deliver(replay, link, pieces if unchecked else 3 * pieces)
        poll(0)
        deliver(replay, link)
        poll(1)
        poll(2)
    last = [False, False, True] if unchecked else [False, True, True]
    assert by_thread == [thread for thread in last for _ in range(pieces)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_each_batch_is_one_draw_and_comes_once(seed: int, ahead: bool) -> None:
    replay = Replay(seed)
    link, rng = Link(replay), replay.rng
    source = ZmqSampleSource(link, BETA, piece_rows=int(rng.integers(0, ROWS)))
    batches = deque(Batch.empty(replay.layout) for _ in range(1 + ahead))
    polled: list[int] = []

    def poll() -> None:
        if source.poll(batches[0], batches[1] if ahead else None) is not None:
            polled.append(replay.check(batches[0]))
            batches.rotate()

    for _ in range(400):
        event = rng.choice(
            ["ask", "answer", "come", "poll", "rare"], p=[0.15, 0.2, 0.35, 0.28, 0.02]
        )
        if event == "ask" and source.outstanding < 3:
            source.request()
        elif event == "answer" and replay.requests:
            sequence = next(iter(replay.requests))
            replay.answer(sequence)
            if rng.random() < 0.9:  # else it is answered twice
                del replay.requests[sequence]
        elif event == "come":
            deliver(replay, link, int(rng.integers(1, 4)))
        elif event == "poll":
            poll()
        elif event == "rare" and rng.random() < 0.3:
            link.reconnect()
        elif event == "rare" and replay.wire:
            replay.spoil()
        elif event == "rare":
            batches.rotate()  # another memory than was promised
    while source.outstanding:
        for sequence in list(replay.requests):
            replay.answer(sequence)
            del replay.requests[sequence]
        deliver(replay, link)
        poll()
    assert sorted(polled) == list(range(len(polled)))
    assert len(polled) > 10


@pytest.mark.parametrize(("rows", "pieces"), [(32, 1), (170, 1), (512, 4), (4096, 36)])
def test_a_large_batch_comes_in_pieces_of_some_megabytes(rows: int, pieces: int) -> None:
    replay = Replay(5)
    link, columns = Link(replay), {"obs": Column((84, 84), np.uint8, stack=4)}
    columns["action"] = Column((), np.int64)
    link.form = Form(ChunkLayout(Schema(columns, n_step=3, gamma=0.99), 64), rows, 8)
    ZmqSampleSource(link, BETA).request()
    asked = replay.requests[0]
    assert -(-rows // (asked.piece_rows or rows)) == pieces
    assert m.decode(m.encode(asked), link.form) == asked


@pytest.mark.parametrize(("piece_rows", "pieces"), [(4, 3), (2**32 - 1, 1)])
def test_a_batch_with_an_unsent_piece_is_drawn_again(piece_rows: int, pieces: int) -> None:
    replay = Replay(6)
    link, batch, source = asking(replay, piece_rows)
    session, fails = Session("learner", 1, 1, 0.0, requests=replay.requests), {pieces - 1}

    def send(_: Session, channel: int, message: Any, compressed: bool) -> Any:
        number = len(replay.wire)
        if number in fails:
            fails.remove(number)
            return None
        replay.put(m.encode(message, compressed))
        return SimpleNamespace(done=True)

    server: Any = SimpleNamespace(
        form=replay.form, handlers={}, room=lambda *_: 1, roster=SimpleNamespace(epoch=1),
        send=send, sessions=SimpleNamespace(of_roles=lambda *_: [session]),
    )  # fmt: skip
    sink = ZmqSampleSink(server, replay.store)
    for requests in (1, 0):
        draw = replay.draw()
        sink.answer(draw)
        assert sink.requests() == requests
    assert sink.counts["dropped"] == sink.counts["batches"] == 1
    assert len(replay.wire) == pieces - 1 + pieces
    deliver(replay, link)
    assert source.poll(batch) is not None
    replay.drawn[draw.keys.tobytes()] = 0, draw
    replay.check(batch)


def test_the_oldest_request_of_all_clients_is_answered_first() -> None:
    replay, sent, clock = Replay(8), list[tuple[int, Kind, int]](), itertools.count()
    clients = [Session("client", host, 1, 0.0) for host in (1, 2)]

    def send(session: Session, channel: int, message: Any, compressed: bool = False) -> Any:
        sent.append((session.host, message.kind, message.sequence))
        return SimpleNamespace(done=True)

    server: Any = SimpleNamespace(
        form=replay.form, room=lambda *_: 1, roster=SimpleNamespace(epoch=1), send=send,
        sessions=SimpleNamespace(of_roles=lambda *_: clients),
    )  # fmt: skip
    sink = ZmqSampleSink(server, replay.store, lambda: float(next(clock)))
    for client, sequence in ((1, 7), (0, 3), (1, 8), (1, 7), (0, 4)):  # one of them twice
        sink.handlers[Kind.SAMPLE](clients[client], m.Sample(sequence, ROWS))
    for turn in range(4):
        sink.answer(replay.draw()) if turn != 2 else sink.refuse(NotEnoughData("too few"))
    assert sent == [
        (2, Kind.BATCH, 7), (1, Kind.BATCH, 3), (2, Kind.NO_BATCH, 8), (1, Kind.BATCH, 4),
    ]  # fmt: skip
    assert not sink.waits
