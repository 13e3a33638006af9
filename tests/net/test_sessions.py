"""Who has which actor numbers, and for how long: sessions under a clock of the test's own."""

import numpy as np
import pytest

from tests.fuzz.decoders import FORM
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import HEADER_WORDS
from zapex.host.roster import Roster
from zapex.net import sessions as net_sessions
from zapex.net.sessions import Session, Sessions
from zapex.wire.messages import Error, Fault, Hello

CONFIG = {"gamma": 0.99}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def sessions_of(actors: int, clock: Clock, *, takes_learner: bool = True) -> Sessions:
    headers = np.zeros((1, HEADER_WORDS), np.int64)
    roster = Roster(aligned_zeros(Roster.required_bytes(actors)), actors, headers)
    return Sessions(FORM, CONFIG, roster, takes_learner, clock)


def joins(
    sessions: Sessions, host: int, incarnation: int = 1, role: str = "relay"
) -> Session | Error:
    peer = f"{host}.{incarnation}".encode()
    actors = int(role in ("relay", "client"))
    hello = Hello(role, host, incarnation, 0, FORM.schema.hash, actors, CONFIG)
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
