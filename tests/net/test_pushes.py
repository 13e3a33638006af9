"""Chunks that travel together: what a message holds, what the replay takes, and its acks."""

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support.naive import NaivePushes
from tests.support.relays import Accounts, Relay, fill
from tests.support.transport_rigs import (
    STREAMS,
    Memory,
    NetworkReplay,
    form_of,
    layout_of,
    nothing_left_open,
    until,
)
from zapex.chunks.layout import COUNT, STREAM, ChunkLayout
from zapex.chunks.schema import Column, Schema
from zapex.wire import messages as m
from zapex.wire import protocol
from zapex.wire.messages import BULK
from zapex.wire.protocol import Form, Kind

__all__ = ["nothing_left_open"]  # a fixture of every test here

ACTOR_STREAMS = 8


def pair(streams: int = ACTOR_STREAMS) -> tuple[NetworkReplay, Relay, Accounts]:
    """A replay and a relay that know each other; the relay has its credit."""
    layout, accounts = layout_of(1000, streams), Accounts()
    server = accounts.watch(NetworkReplay(Memory(layout, 1), "tcp://127.0.0.1:0"))
    relay = Relay(layout, server.url)

    def turn() -> None:
        server.turn()
        relay.turn()

    until(lambda: relay.link.is_open and _credit(relay) >= streams, turn, "credit")
    return server, relay, accounts


def _credit(relay: Relay) -> int:
    return relay.sender.credit(0)


def spied(relay: Relay) -> list[tuple[int, int, int]]:
    """(incarnation, first sequence, chunks) of every push that leaves from now on."""
    sent, send = [], relay.link.send

    def spy(channel: int, message: Any) -> Any:
        tracker = send(channel, message)
        if isinstance(message, m.Push) and tracker is not None:
            sent.append((message.incarnation, message.sequence, len(message.chunks)))
        return tracker

    relay.link.send = spy  # type: ignore[method-assign]
    return sent


def test_an_older_welcome_does_not_change_the_credit() -> None:
    _, relay, _ = pair()
    credit, welcome = _credit(relay), relay.link.welcome
    assert welcome is not None
    states = welcome.actors.copy()

    def welcomed(incarnation: int, credit_bytes: int = 0) -> None:
        states["credit_bytes"] = credit_bytes
        late = replace(welcome, incarnation=incarnation, actors=states, fresh=False)
        for call in relay.link.on_welcome:
            call(late, BULK)

    welcomed(welcome.incarnation)
    assert _credit(relay) == credit
    welcomed(welcome.incarnation, 1 << 30)
    assert _credit(relay) == credit
    welcomed(welcome.incarnation + 1)  # of a server that has granted nothing yet
    assert _credit(relay) == 0


def test_chunks_that_an_older_welcome_acknowledges_have_used_their_credit() -> None:
    server, relay, accounts = pair()
    credit, welcome = _credit(relay), relay.link.welcome
    assert welcome is not None
    for _ in range(credit + 3):
        relay.make()
    assert relay.sender.do_work() == credit
    server.turn()  # its ack waits on the other connection
    states = welcome.actors.copy()
    states["incarnation"], states["sequence"] = 5, credit - 1
    for call in relay.link.on_welcome:
        call(replace(welcome, actors=states, fresh=False), BULK)
    assert relay.acknowledged == credit - 1
    assert _credit(relay) == 1
    assert relay.sender.do_work() == 0
    until(
        lambda: relay.acknowledged == credit + 3,
        lambda: (server.turn(), relay.turn()),
        "the chunks",
    )
    assert server.source.counts["uncredited"] == server.source.counts["doubled"] == 0
    accounts.settle([relay])


def test_ready_chunks_share_a_message_without_waiting() -> None:
    server, relay, accounts = pair()
    sent = spied(relay)
    relay.make()
    assert relay.sender.do_work() == 1
    for _ in range(4):
        relay.make()
    assert relay.sender.do_work() == 4
    assert relay.sender.do_work() == 0
    assert sent == [(5, 0, 1), (5, 1, 4)]
    until(lambda: relay.acknowledged == 5, lambda: (server.turn(), relay.turn()), "the chunks")
    accounts.settle([relay])


def test_a_group_ends_with_the_credit_or_the_incarnation() -> None:
    server, relay, accounts = pair()
    sent, credit = spied(relay), _credit(relay)
    for _ in range(credit + 3):
        relay.make()
    relay.incarnation[0], relay.next[0] = 6, 0
    for _ in range(2):
        relay.make()
    assert relay.sender.do_work() == credit
    assert sent == [(5, 0, credit)]
    until(
        lambda: relay.acknowledged == credit + 5,
        lambda: (server.turn(), relay.turn()),
        "the chunks",
    )
    assert {life for life, *_ in sent} == {5, 6}
    assert sum(count for *_, count in sent) == credit + 5
    assert relay.sender.counts["again"] == server.source.counts["doubled"] == 0
    accounts.settle([relay])


def test_consecutive_pushes_share_one_ack() -> None:
    with mock.patch.object(protocol, "PUSH_BYTES", 1):  # each push one chunk
        server, relay, accounts = pair()
    said, take = [], relay.link.handlers[Kind.ACK]
    relay.link.handlers[Kind.ACK] = lambda ack: (said.append(ack), take(ack))
    for _ in range(4):
        relay.make()
    assert relay.sender.do_work() == 4
    until(lambda: server.source.counts["chunks"] == 4, server.source.take_in, "the chunks")
    until(lambda: relay.acknowledged == 4, relay.turn, "the acknowledgement")
    assert len(said) == 1
    server.turn()
    accounts.settle([relay])


def test_a_push_is_acknowledged_when_the_announced_next_one_does_not_come() -> None:
    server, relay, accounts = pair()
    relay.make()
    send = relay.link.send
    with mock.patch.object(
        relay.link, "send", lambda channel, push: send(channel, replace(push, more=True))
    ):
        assert relay.sender.do_work() == 1
    until(lambda: server.source.counts["chunks"] == 1, server.source.take_in, "the chunk")
    assert server.source.ready()  # or its role would sleep on it
    until(lambda: relay.acknowledged == 1, lambda: (server.turn(), relay.turn()), "the chunk")
    assert relay.sender.counts["again"] == 0
    accounts.settle([relay])


@pytest.mark.parametrize("seed", [1, 2])
def test_a_group_is_taken_like_its_chunks_one_by_one(
    seed: int,
) -> None:
    server, relay, accounts = pair()
    rng, naive = np.random.default_rng(seed), NaivePushes()
    form, store = form_of(relay.layout), relay.store
    session = server.server.sessions.of_actor(0)
    assert session is not None
    said, cut = 0, {"known": 0, "credit": 0}
    for _ in range(300):
        incarnation = int(rng.choice([naive.incarnation, naive.incarnation + 1], p=[0.95, 0.05]))
        incarnation = max(1, incarnation - int(rng.random() < 0.05))
        expected = naive.next if incarnation == naive.incarnation else 0
        first, count = max(0, expected + int(rng.integers(-4, 2))), int(rng.integers(1, 7))
        push = _push(relay, incarnation, first, count)
        credit = server.source.credit_bytes(0) // store.layout.body_bytes
        before = len(naive.taken)
        naive.push(incarnation, first, count, credit)
        taken = len(naive.taken) - before
        cut["known"] += 0 < expected - first < count
        cut["credit"] += 0 < taken == credit < count - max(0, expected - first)
        server.source.handlers[Kind.PUSH](session, m.decode(m.encode(push), form))
        said += count
        assert server.roster.state(0) == (naive.incarnation, naive.next)
        if rng.random() < 0.5:
            server.turn()
            relay.turn()
    for _ in range(3):
        server.turn()
    assert min(cut.values()) > 3  # the cases that this is about
    assert accounts.taken == dict.fromkeys([(0, *who) for who in naive.taken], 1)
    counts = server.source.counts
    assert counts["chunks"] == len(naive.taken)
    assert said == sum(counts[name] for name in ("chunks", "doubled", "early", "uncredited"))
    assert store.slots == len(relay.free)


def _push(relay: Relay, incarnation: int, first: int, count: int) -> m.Push:
    """Chunks that say who they are, of slots that are free again."""
    store, slots = relay.store, relay.free[:count]
    for slot, sequence in zip(slots, range(first, first + count), strict=True):
        fill(store, slot, (0, incarnation, sequence), sequence % STREAMS, relay.rng)
        store.header_rows[slot, COUNT] = 1 + sequence % store.layout.chunk
    rows = store.header_rows
    chunks = [(store.body(s), int(rows[s, STREAM]), int(rows[s, COUNT])) for s in slots]
    return m.Push.of_chunks(
        store.layout, store.mem, chunks, actor=0, incarnation=incarnation, sequence=first
    )


@pytest.mark.parametrize("item", [1, 4, 100, 2000, 70_000])
def test_message_sizes_stay_within_the_limit(item: int) -> None:
    columns = {"obs": Column((item,), np.uint8), "action": Column((), np.int64)}
    layout = ChunkLayout(Schema(columns, n_step=1), 64)
    form = Form(layout, batch_size=1, parameter_bytes=1)
    most = form.most_pushed
    memory = np.zeros(layout.body_bytes, np.uint8)
    layout.column("next_obs_frames", memory, 0)[-1] = layout.chunk
    push = m.Push.of_chunks(layout, memory, [(0, 0, 64)] * most, actor=0, incarnation=1, sequence=0)
    parts = m.encode(push)
    assert sum(map(len, parts)) >= 1 << 16
    assert max(map(len, parts)) <= form.largest_request_bytes
    assert len(m.decode(parts, form).chunks) == most
    over = m.Push.of_chunks(
        layout, memory, [(0, 0, 64)] * (most + 1), actor=0, incarnation=1, sequence=0
    )
    with pytest.raises(m.BadMessage, match=f"got {most + 1}"):
        m.decode(m.encode(over), form)
