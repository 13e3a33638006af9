"""Who has which actor numbers, and for how long: sessions under a clock of the test's own."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.fuzz.decoders import FORM
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import HEADER_WORDS
from zapex.host.roster import NO_HOST, Roster
from zapex.net import sessions as net_sessions
from zapex.net.sessions import Session, Sessions
from zapex.wire.messages import Error, Fault, Hello

CONFIG = {"gamma": 0.99}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def sessions_over(
    actors: int, memory: Any, clock: Clock, *, takes_learner: bool = True
) -> tuple[Sessions, Roster]:
    """A server's sessions, and its roster on the memory that a former one has left."""
    roster = Roster(memory, actors, np.zeros((1, HEADER_WORDS), np.int64))
    return Sessions(FORM, CONFIG, roster, takes_learner, clock), roster


def sessions_of(actors: int, clock: Clock, *, takes_learner: bool = True) -> Sessions:
    memory = aligned_zeros(Roster.required_bytes(actors))
    return sessions_over(actors, memory, clock, takes_learner=takes_learner)[0]


def joins(
    sessions: Sessions, host: int, incarnation: int = 1, role: str = "relay", epoch: int = 0
) -> Session | Error:
    peer = f"{host}.{incarnation}".encode()
    actors = int(role in ("relay", "client"))
    hello = Hello(role, host, incarnation, 0, FORM.schema.hash, actors, CONFIG, epoch)
    found = sessions.join(peer, hello, None, "")
    if isinstance(found, Session):
        sessions.connect(found, 0, peer)
    return found


def test_a_starting_host_keeps_its_numbers_for_a_minute() -> None:
    clock = Clock()
    sessions = sessions_of(1, clock)
    clock.now_s = 20.0  # the server knows by now who is there
    assert isinstance(joins(sessions, 1), Session)
    sessions.forget_peer(b"1.1")  # its parent has asked for numbers, and its relay is starting
    clock.now_s += 59.0
    assert isinstance(joins(sessions, 2), Error)
    relay = joins(sessions, 1, incarnation=2)
    assert isinstance(relay, Session)
    assert relay.actors == (0,)


def test_a_silent_library_client_loses_its_number_after_ten_seconds() -> None:
    clock = Clock()
    sessions = sessions_of(1, clock)
    clock.now_s = 20.0
    assert isinstance(joins(sessions, 1, role="client"), Session)
    clock.now_s += 9.0
    assert isinstance(joins(sessions, 2, role="client"), Error)
    clock.now_s += 2.0
    assert isinstance(joins(sessions, 2, role="client"), Session)


def test_a_host_that_never_starts_loses_its_numbers() -> None:
    clock = Clock()
    sessions = sessions_of(1, clock)
    clock.now_s = 20.0
    assert isinstance(joins(sessions, 1), Session)
    clock.now_s += 61.0
    assert isinstance(joins(sessions, 2), Session)


def test_a_silent_host_loses_its_numbers_after_ten_seconds() -> None:
    clock = Clock()
    sessions = sessions_of(1, clock)
    clock.now_s = 20.0
    assert isinstance(joins(sessions, 1), Session)
    assert sessions.of_peer(b"1.1") is not None
    clock.now_s += 9.0
    assert isinstance(joins(sessions, 2), Error)
    clock.now_s += 2.0
    assert isinstance(joins(sessions, 2), Session)


def test_a_host_whose_number_another_one_has_had_is_fenced() -> None:
    clock = Clock()
    sessions, roster = sessions_over(1, aligned_zeros(Roster.required_bytes(1)), clock)
    clock.now_s = 20.0
    for host in (1, 2):
        assert isinstance(joins(sessions, host), Session)
        clock.now_s += 61.0
    refusal = joins(sessions, 1, epoch=roster.epoch)
    assert isinstance(refusal, Error)
    assert refusal.fault == Fault.FENCED
    assert isinstance(joins(sessions, 2, epoch=roster.epoch), Session)
    assert isinstance(joins(sessions, 1, epoch=roster.epoch + 1), Error)  # the number is in use
    clock.now_s += 61.0
    assert isinstance(joins(sessions, 1, epoch=roster.epoch + 1), Session)  # of another memory


def test_a_replay_with_a_learner_on_its_host_refuses_another_one() -> None:
    sessions = sessions_of(1, Clock(), takes_learner=False)
    refusal = joins(sessions, 1, role="learner")
    assert isinstance(refusal, Error)
    assert isinstance(joins(sessions, 2), Session)


def test_the_longest_silent_host_loses_its_number_first() -> None:
    clock = Clock()
    sessions = sessions_of(2, clock)
    clock.now_s = 20.0
    for host in (1, 2):
        assert isinstance(joins(sessions, host), Session)
        assert sessions.of_peer(f"{host}.1".encode()) is not None
    clock.now_s += 30.0
    assert sessions.of_peer(b"1.1") is not None  # host 1 was heard later, though it came first
    clock.now_s += 11.0
    new = joins(sessions, 3)
    assert isinstance(new, Session)
    assert new.actors == (1,)
    assert sessions.of_peer(b"1.1") is not None
    assert isinstance(joins(sessions, 4), Error)


def test_only_so_many_clients_are_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_sessions, "MOST_SESSIONS", 3)
    sessions = sessions_of(4, Clock())
    for host in (1, 2, 3):
        assert isinstance(joins(sessions, host, role="reader"), Session)
    refusal = joins(sessions, 4)
    assert isinstance(refusal, Error)
    assert refusal.fault == Fault.FULL  # it waits, and asks again
    assert isinstance(joins(sessions, 3, role="reader"), Session)
    sessions.forget_peer(b"2.1")
    assert isinstance(joins(sessions, 4), Session)


HOSTS, NUMBERS = 24, 12
SILENT_S, STARTS_S = 10.0, 60.0  # docs/wire_protocol.md


def test_hours_of_hosts_that_come_and_go_share_no_number_and_refuse_none_wrongly() -> None:
    """Beside a naive twin: who owns which number, and who was heard when."""
    rng, clock = random.Random(1), Clock()
    memory = aligned_zeros(Roster.required_bytes(NUMBERS))
    owner: dict[int, int] = {}
    incarnation = dict.fromkeys(range(1, HOSTS + 1), 1)
    counts = Counter[str]()
    heard: dict[int, tuple[float, bool]] = {}  # when, and whether it has said more than hello
    started_s = 0.0
    sessions, roster = sessions_over(NUMBERS, memory, clock)

    def is_gone(host: int) -> bool:
        if clock.now_s - started_s < SILENT_S:
            return False  # a new server does not know who is there
        at_s, spoke = heard.get(host, (-1e9, False))
        return clock.now_s - at_s >= (SILENT_S if spoke else STARTS_S)

    for _ in range(20_000):
        clock.now_s += rng.expovariate(2.0)
        host, what = rng.randint(1, HOSTS), rng.random()
        peer = f"{host}.{incarnation[host]}".encode()
        mine = {number for number, of in owner.items() if of == host}
        if what < 0.002:  # a server that is started again on the same memory
            sessions, roster = sessions_over(NUMBERS, memory, clock)
            started_s, heard = clock.now_s, {}
            counts["restarts"] += 1
        elif (session := sessions.known(peer)) is not None:
            if what < 0.1:
                sessions.leave(session)
                owner = {number: of for number, of in owner.items() if of != host}
            elif what < 0.2 or not mine:  # it is killed, or another has its number by now
                sessions.forget_peer(peer)
                incarnation[host] += 1
                counts["lost"] += not mine
            else:
                sessions.of_peer(peer)
                heard[host] = clock.now_s, True
        elif what < 0.5:
            gone = {number for number, of in owner.items() if is_gone(of)}
            free = set(range(NUMBERS)) - owner.keys()
            found = joins(sessions, host, incarnation[host])
            assert isinstance(found, Session) == bool(mine or free or gone)
            counts["refused"] += isinstance(found, Error)
            if isinstance(found, Session):
                assert set(found.actors) <= mine | free | gone, "its host is there"
                counts["taken over"] += bool(set(found.actors) & (gone - mine))
                owner |= dict.fromkeys(found.actors, host)
                heard[host] = clock.now_s, False
        assert all(roster.host(n) == owner.get(n, NO_HOST) for n in range(NUMBERS))
    assert all(counts[name] > 10 for name in ("restarts", "lost", "refused", "taken over")), counts
