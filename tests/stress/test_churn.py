"""Hours of hosts that come, leave, die, fall silent and return, under a simulated clock.

The roster and the sessions are the real ones; only time is not. 64 hosts, 100 joins and leaves a
minute, a heartbeat every few seconds, a server that is started again on the same memory now and
then. A naive twin says who may be refused, and whose actor numbers may be given to others:

    nobody's who was heard within ten seconds, or within a minute if it has said only hello.
"""

import heapq
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest

from tests.fuzz.decoders import FORM
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import HEADER_WORDS
from zapex.host.roster import NO_HOST, Roster
from zapex.net.sessions import Session, Sessions
from zapex.wire.messages import Error, Fault, Hello

_CONFIG = {"gamma": 0.99}
_SILENT_S, _STARTS_S = 10.0, 60.0  # as docs/wire_protocol.md says
_BEAT_S = 4.0
_RESTART_S = 1800.0


@dataclass
class _Host:
    """A host that believes that it has these numbers. quiet_until_s: it neither sends nor knows."""

    number: int
    wanted: int
    incarnation: int
    actors: tuple[int, ...] = ()
    heard_s: float = 0.0
    spoke: bool = False
    quiet_until_s: float = 0.0
    session: tuple[float, int] = (-1.0, 0)  # the server's start, and its own incarnation

    @property
    def peer(self) -> bytes:
        return f"{self.number}.{self.incarnation}".encode()


@dataclass
class Churn:
    """The hosts, the real sessions, and the twin: `owner`, number of an actor -> its host."""

    seed: int
    numbers: int = 72
    hosts: int = 64
    a_minute: float = 100.0
    now_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng, self._fresh = random.Random(self.seed), count(1)
        self._memory = aligned_zeros(Roster.required_bytes(self.numbers))
        self._there: dict[int, _Host] = {}
        self._known: dict[int, _Host] = {}  # also those that are gone without a word
        self._owner: dict[int, int] = {}
        self._events: list[tuple[float, int, str, int]] = []
        self._order = count()
        self._start()
        self._later(0.0, "churn")
        self._later(_RESTART_S, "restart")

    def _start(self) -> None:
        """A server, on the memory that a former one has left."""
        headers = np.zeros((1, HEADER_WORDS), np.int64)
        self._roster = Roster(self._memory, self.numbers, headers)
        self._sessions = Sessions(
            FORM, _CONFIG, self._roster, lambda peer: None, lambda: self.now_s
        )
        self._started_s = self.now_s
        for host in self._known.values():  # it has heard nobody yet
            host.heard_s, host.spoke = -1e9, False

    def _later(self, after_s: float, what: str, host: int = 0) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, next(self._order), what, host))

    def run(self, hours: float) -> Counter[str]:
        """Until then. Raises AssertionError at the first thing that is wrong."""
        while self._events[0][0] <= 3600 * hours:
            self.now_s, _, what, number = heapq.heappop(self._events)
            if what == "churn":
                self._churn()
                self._check()
                self._later(self._rng.expovariate(self.a_minute / 60), "churn")
            elif what == "restart":
                self.counts["restarts"] += 1
                self._start()
                self._later(_RESTART_S * (0.5 + self._rng.random()), "restart")
            elif number in self._there:
                self._beat(self._there[number])
                self._later(_BEAT_S * self._rng.random(), "beat", number)
        return self.counts

    def _churn(self) -> None:
        """A host joins, or one leaves."""
        rng, there = self._rng, list(self._there.values())
        if rng.random() * 2 * self.hosts >= len(there):
            host = _Host(next(self._fresh), rng.choice((1, 1, 1, 2)), time.time_ns())
            self._there[host.number] = self._known[host.number] = host
            self._later(0.0, "beat", host.number)
            return
        host = rng.choice(there)
        how = rng.choice(("bye", "bye", "killed", "cable", "quiet", "again"))
        self.counts[how] += 1
        if how == "quiet":  # stopped; it goes on later, and believes what it believed
            host.quiet_until_s = self.now_s + rng.choice((3.0, 30.0, 120.0))
            return
        if how == "again":  # its relay is started again
            self._sessions.forget_peer(host.peer)
            host.incarnation += 1
            return
        del self._there[host.number]
        session = self._sessions.known(host.peer)
        if how == "bye" and session is not None:
            self._sessions.leave(session)
            del self._known[host.number]
            self._owner = {n: h for n, h in self._owner.items() if h != host.number}
        elif how == "killed":
            self._sessions.forget_peer(host.peer)

    def _beat(self, host: _Host) -> None:
        """A hello where the server does not know this connection, else any message."""
        if self.now_s < host.quiet_until_s:
            return
        if self._sessions.known(host.peer) is not None and host.actors:
            self._sessions.of_peer(host.peer)
            host.heard_s, host.spoke = self.now_s, True
            if all(self._owner.get(n) == host.number for n in host.actors):
                return
            # Its numbers went to others while it was silent: the answer tells it, and it leaves.
            self.counts["told"] += 1
            self._there.pop(host.number)
            return
        self._join(host)

    def _join(self, host: _Host) -> None:
        peer, before = host.peer, dict(self._owner)
        hello = Hello(
            "relay", host.number, host.incarnation, 0, FORM.schema.hash, host.wanted, _CONFIG
        )
        mine = [n for n, owner in before.items() if owner == host.number]
        free = [n for n in range(self.numbers) if n not in before]
        gone = [n for n, owner in before.items() if owner != host.number and self._gone(owner)]
        found = self._sessions.join(peer, hello, None, "")
        may = len(mine) + len(free) + len(gone) >= host.wanted
        if isinstance(found, Error):
            assert found.fault == Fault.FULL, found.text
            assert not may, f"host {host.number} is refused, and {len(free)} numbers are free"
            if host.session != (self._started_s, host.incarnation):  # it is there, and waits
                host.heard_s, host.spoke = self.now_s, False
                host.session = self._started_s, host.incarnation
            self.counts["refused"] += 1
            return
        assert isinstance(found, Session)
        assert may
        self._sessions.connect(found, 0, peer)
        assert len(set(found.actors)) == host.wanted
        robbed = set(found.actors) - {*mine, *free, *gone}
        assert not robbed, f"numbers {robbed} have a host that is there"
        self.counts["taken over"] += len(set(found.actors) & set(gone))
        self.counts["joins"] += not host.actors
        for number in mine:
            self._owner.pop(number)
        self._owner |= dict.fromkeys(found.actors, host.number)
        host.actors, host.heard_s, host.spoke = found.actors, self.now_s, False
        host.session = self._started_s, host.incarnation
        self._check()

    def _gone(self, number: int) -> bool:
        """Whether this host's numbers may be given to others."""
        if self.now_s - self._started_s < _SILENT_S:
            return False  # a new server does not know who is there
        host = self._known.get(number)
        if host is None or host.heard_s < self._started_s:
            return True
        return self.now_s - host.heard_s >= (_SILENT_S if host.spoke else _STARTS_S)

    def _check(self) -> None:
        """The roster is as the twin, and no number has two hosts that are there."""
        for number in range(self.numbers):
            assert self._roster.host(number) == self._owner.get(number, NO_HOST), number
        self.counts["checks"] += 1


@pytest.mark.timeout(400)
@pytest.mark.parametrize("hours", [0.5, pytest.param(6.0, marks=pytest.mark.slow)])
def test_churn_gives_no_number_to_two_hosts_and_refuses_none_wrongly(hours: float) -> None:
    counts = Churn(1).run(hours)
    assert counts["joins"] > 1000 * hours
    assert all(counts[how] for how in ("taken over", "refused", "told", "checks"))
