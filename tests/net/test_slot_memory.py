"""Pushes without libzmq are received into the slots that they fill, and only a whole one counts."""

import random
import select
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tests.support.relays import Accounts, fill
from tests.support.transport_rigs import (
    CONFIG,
    Memory,
    NetworkReplay,
    form_of,
    layout_of,
    nothing_left_open,
    until,
    url_of,
)
from tests.support.zmtp_peers import DEALER, LIMITS, drain, feed
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import COMMITTED, COUNT, GRANTED, LIVE, SEQUENCE, STATE, STREAM
from zapex.chunks.store import ChunkStore
from zapex.fstack.zmtp import Connection, Null
from zapex.wire import messages as m
from zapex.wire.protocol import Buffer

__all__ = ["nothing_left_open"]  # a fixture of every test here
LIFE = 5
CUT = 80  # bytes of a push: its header and a part of its frames
STREAMS = 4  # a full credit is so many slots, or twice as many


class Served:
    """How the servers here listen."""

    scheme = ""


@pytest.fixture(params=["zmtp", "fstack"], autouse=True)
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs on the kernel's sockets and on F-Stack's."""
    monkeypatch.setattr(Served, "scheme", request.param)


class Pushes:
    """Encoded pushes of actor 0, each a chunk that says its sequence."""

    def __init__(self) -> None:
        self.layout = layout_of(400, STREAMS)
        chunk = self.layout.chunk_layout
        self.store = ChunkStore(aligned_zeros(ChunkStore.required_bytes(chunk, 1)), chunk, 1)

    def __call__(self, sequence: int, rows: int = 0) -> list[Buffer]:
        store = self.store
        fill(store, 0, (0, LIFE, sequence), 3, np.random.default_rng(sequence))
        rows = rows or int(store.header_rows[0, COUNT])
        chunks = [(store.body(0), int(store.header_rows[0, STREAM]), rows)]
        push = m.Push.of_chunks(
            store.layout, store.mem, chunks, actor=0, incarnation=LIFE, sequence=sequence
        )
        return [memoryview(bytes(part)) for part in m.encode(push)]


class Client:
    """One connection of a relay, byte by byte."""

    def __init__(self, server: NetworkReplay, host: int = 1, channel: int = m.BULK) -> None:
        self.server, self.messages = server, []
        address, port = server.url.removeprefix("tcp://").split(":")
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.connect_ex((address, int(port)))  # F-Stack answers only in turns
        until(lambda: select.select([], [self.sock], [], 0)[1], server.turn)
        self.connection = Connection(Null(DEALER), LIMITS)
        self.until(lambda: self.connection.ready)
        layout = form_of(layout_of(400, STREAMS)).layout
        hello = m.Hello("relay", host, 1, channel, layout.schema.hash, 1, CONFIG)
        self.write(self.bytes_of(m.encode(hello)))
        self.until(lambda: self.messages)

    def turn(self) -> None:
        with suppress(OSError):
            self.write(drain(self.connection))
            self.messages += feed(self.connection, self.sock.recv(1 << 20))
        self.server.turn()

    def until(self, ready: Any) -> None:
        until(ready, self.turn)

    def bytes_of(self, message: Sequence[Buffer]) -> bytes:
        """A message as it goes over the line."""
        self.connection.send(message)
        return drain(self.connection)

    def write(self, data: bytes) -> None:
        while data:
            try:
                data = data[self.sock.send(data) :]
            except BlockingIOError:
                self.server.turn()

    def push(self, message: Sequence[Buffer]) -> None:
        self.write(self.bytes_of(message))

    def is_closed(self) -> bool:
        """Whether the replay has closed this connection."""
        try:
            return not self.sock.recv(1 << 16)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.sock.close()
        gone = lambda: not self.server.listener.held()  # noqa: E731
        until(gone, self.server.turn)


def served(url: str = "") -> NetworkReplay:
    return NetworkReplay(Memory(layout_of(400, STREAMS), 1), url or url_of(Served.scheme, Path()))


def write_part(client: Client, data: bytes, least: int = 1) -> None:
    """The first bytes of a push, until the server holds some of them, or so many."""
    server = client.server
    held = lambda: sum(nbytes for nbytes, _ in server.listener.held())  # noqa: E731
    until(lambda: not held(), server.turn)
    client.write(data)
    until(lambda: held() >= least, server.turn)


def states(server: NetworkReplay, state: int) -> list[int]:
    found = np.flatnonzero(server.replay.store.header_rows[:, STATE] == state)
    return [int(slot) for slot in found]


def take_all(client: Client, pushes: Pushes, first: int, accounts: Accounts) -> None:
    """A whole credit of pushes follows: every slot is free, and each is taken once."""
    server = client.server
    credit = server.source.credit_bytes(0) // server.replay.store.layout.body_bytes
    assert credit >= STREAMS
    before = server.source.counts["chunks"]
    for sequence in range(first, first + credit):
        client.push(pushes(sequence))
    client.until(lambda: server.source.counts["chunks"] == before + credit)
    assert set(accounts.taken.values()) == {1}
    assert {(0, LIFE, n) for n in range(first, first + credit)} <= accounts.taken.keys()


def test_a_body_is_received_into_its_slot() -> None:
    pushes, server = Pushes(), served()
    client = Client(server)
    client.until(lambda: states(server, GRANTED))
    message = pushes(0)
    data = client.bytes_of(message)
    client.write(data[: -len(message[-1]) // 2])  # the last buffer is not whole
    store, frames = server.replay.store, bytes(message[1])
    granted = [store.body(slot) for slot in states(server, GRANTED)]
    client.until(lambda: frames in [bytes(store.mem[at : at + len(frames)]) for at in granted])
    assert len(server.replay) == 0
    assert not states(server, COMMITTED)
    client.write(data[-len(message[-1]) // 2 :])
    client.until(lambda: server.source.counts["chunks"] == 1)
    server.turn()
    assert len(server.replay) > 0


def test_a_push_cut_anywhere_leaves_its_slot_free() -> None:
    pushes, accounts = Pushes(), Accounts()
    server = accounts.watch(served())
    client = Client(server)
    data = client.bytes_of(pushes(0, rows=8))
    for cut in range(0, len(data), 7):
        client.write(data[:cut])
        client.close()
        assert len(server.replay) == 0
        assert not accounts.taken
        client = Client(server)
    take_all(client, pushes, 0, accounts)


def _with_wrong_checksum(message: list[Buffer]) -> list[Buffer]:
    torn = bytearray(message[1])
    torn[len(torn) // 2] ^= 1
    return [message[0], memoryview(torn), *message[2:]]


def test_a_push_that_is_refused_or_doubled_leaves_its_slot_free() -> None:
    pushes, accounts = Pushes(), Accounts()
    server = accounts.watch(served())
    client = Client(server)
    client.until(lambda: server.source.credit_bytes(0))
    client.push(_with_wrong_checksum(pushes(0)))
    client.until(lambda: server.server.counts["bad"] == 1)
    assert server.source.counts["chunks"] == 0
    client.close()

    client = Client(server)
    message = pushes(0)
    client.push(message)
    client.push(message)  # the first may wait in its slot while this one comes
    client.push(pushes(3))
    client.push(pushes(1)[:-1])
    client.until(lambda: server.server.counts["bad"] == 2)
    counts = server.source.counts
    assert [counts[name] for name in ("chunks", "doubled", "early")] == [1, 1, 1]
    client.close()
    take_all(Client(server), pushes, 1, accounts)


def test_a_chunk_with_impossible_values_leaves_its_slot_free() -> None:
    pushes, accounts = Pushes(), Accounts()
    server = accounts.watch(served())
    client = Client(server)
    client.until(lambda: server.source.credit_bytes(0))
    fill(pushes.store, 0, (0, LIFE, 0), 3, np.random.default_rng(1))
    pushes.store.column(0, "reward")[:] = np.nan
    chunks = [(pushes.store.body(0), 3, 2)]
    lie = m.Push.of_chunks(
        pushes.store.layout, pushes.store.mem, chunks, actor=0, incarnation=LIFE, sequence=0
    )
    first = [memoryview(bytes(part)) for part in m.encode(lie)]  # `pushes` fills that memory again
    for message in (first, pushes(1)):  # the second waits in the slot behind the first
        client.connection.send(message)
    client.write(drain(client.connection))
    client.until(lambda: server.source.counts["chunks"] == 1)
    assert server.source.counts["refused"] == 1
    take_all(client, pushes, 2, accounts)


def _frames_of(server: NetworkReplay, sequence: int) -> bytes:
    """The frames of a live chunk."""
    rows, store = server.replay.store.header_rows, server.replay.store
    (slot,) = np.flatnonzero((rows[:, STATE] == LIVE) & (rows[:, SEQUENCE] == sequence))
    return bytes(store.column(int(slot), "obs").reshape(-1))


def test_a_half_received_push_never_overwrites_a_live_chunk() -> None:
    pushes, accounts = Pushes(), Accounts()
    server = accounts.watch(served())
    slow, quick = Client(server), Client(server, channel=m.SMALL)
    slow.until(lambda: server.source.credit_bytes(0))
    message = pushes(0, rows=8)
    data = slow.bytes_of(message)
    write_part(slow, data[:CUT])
    quick.push(message)
    quick.until(lambda: server.source.counts["chunks"] == 1)
    server.turn()
    end = data.index(bytes(message[1])) + len(message[1])
    slow.write(bytes(end - CUT) + data[end:])
    slow.until(lambda: server.server.counts["bad"] == 1)
    frames = bytes(message[1])
    assert _frames_of(server, 0)[: len(frames)] == frames


def _two_chunks(pushes: Pushes) -> list[Buffer]:
    chunks = [(pushes.store.body(0), 3, 8)] * 2
    layout, memory = pushes.store.layout, pushes.store.mem
    both = m.Push.of_chunks(layout, memory, chunks, actor=0, incarnation=LIFE, sequence=1)
    return m.encode(both)


def test_only_the_next_expected_body_is_received_into_a_slot() -> None:
    pushes = Pushes()
    server = served()
    store = server.replay.store

    def is_in_a_slot(message: list[Buffer]) -> bool:
        client = Client(server)
        client.until(lambda: server.source.credit_bytes(0))
        if server.source.counts["chunks"] == 0:
            client.push(pushes(0))
            client.until(lambda: server.source.counts["chunks"] == 1)
        least = sum(map(len, message[:-1]))
        write_part(client, client.bytes_of(message)[: -len(message[-1])], least)
        frames = bytes(message[1])
        starts = [store.body(slot) for slot in states(server, GRANTED)]
        found = frames in [bytes(store.mem[at : at + len(frames)]) for at in starts]
        client.close()
        return found

    head, *parts = pushes(1, rows=7)
    assert is_in_a_slot([head, *parts])
    assert not is_in_a_slot(pushes(2, rows=6))  # early
    assert not is_in_a_slot(pushes(0, rows=5))  # doubled
    assert not is_in_a_slot(_two_chunks(pushes))
    for at, value in ((8, 1), (16, 1), (48, 1), (48, 200)):  # schema, incarnation, actor
        other = bytearray(head)
        other[at] = value
        body = [memoryview(bytes([at + value]) * len(parts[0])), parts[1]]
        assert not is_in_a_slot([memoryview(other), *body])


def test_a_replaced_host_cannot_write_into_reassigned_slots() -> None:
    pushes, accounts = Pushes(), Accounts()
    server = accounts.watch(served())
    old, small = Client(server), Client(server, channel=m.SMALL)
    old.until(lambda: server.source.credit_bytes(0))
    data = old.bytes_of(pushes(0, rows=8))
    write_part(old, data[:CUT])
    small.push(m.encode(m.Bye("")))
    new = Client(server, host=2)
    new.until(lambda: server.source.credit_bytes(0) and old.is_closed())
    take_all(new, pushes, 0, accounts)


def _messages(pushes: Pushes) -> Iterable[list[Buffer]]:
    """Good and bad ones, with no regard to credit."""
    draw, sequence = random.Random(2), 0
    for _ in range(60):
        what = draw.randrange(6)
        if what == 0:
            yield pushes(max(0, sequence - 1))
        elif what == 1:
            yield pushes(sequence + 2)
        else:
            yield pushes(sequence)
            sequence += 1


def test_the_same_messages_have_the_same_result_as_over_tcp() -> None:
    results = []
    for url in ("tcp://127.0.0.1:0", ""):
        pushes, context = Pushes(), zmq.Context()
        server = served(url)
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(server.url)
        layout = form_of(pushes.layout).layout
        hello = m.Hello("relay", 1, 1, m.BULK, layout.schema.hash, 1, CONFIG)
        dealer.send_multipart(m.encode(hello))
        until(lambda s=server: s.source.credit_bytes(0), server.turn)
        for number, message in enumerate(_messages(pushes), 2):
            dealer.send_multipart(message)
            until(lambda s=server, n=number: s.server.counts["messages"] == n, server.turn)
            for _ in range(3):  # taken over, and granted again
                server.turn()
        store, live = server.replay.store, server.replay
        rows = {
            slot: [bytes(store.column(slot, name)[: store.header_rows[slot, COUNT]])
                   for name in ("action", "reward", "obs_frames", "priority")]
            for slot in range(store.slots)
        }  # fmt: skip
        results.append((server.source.counts, server.roster.state(0), len(live), rows))
        context.destroy(linger=0)
        server.close()
    assert results[0] == results[1]
    assert results[0][0]["early"] > 3 < results[0][0]["doubled"]
