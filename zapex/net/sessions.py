"""Sessions: the clients of a replay from HELLO to BYE, and the actors that each one has."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zapex.errors import BadMessage
from zapex.host.roster import NO_HOST, Roster
from zapex.wire.messages import Error, Fault, Hello, Sample
from zapex.wire.protocol import Form

_SESSION_S = 10.0  # after this much silence a host may lose its actor numbers
_START_S = 60.0  # the same for a host that has said only hello: its processes are starting
_WRITERS = ("relay", "client")  # these roles have actor numbers and push chunks


@dataclass(eq=False)
class Session:
    """A client after its hello: its two connections (peers of the listener), and its open
    requests.

    requests: by their number. address: of the client's machine; "" if it is not known.
    spoke: it has sent a message since its hello. is_reported: the user knows that it
    sends values that no run produces.
    """

    role: str
    host: int
    incarnation: int
    heard_s: float
    address: str = ""
    spoke: bool = False
    is_reported: bool = False
    peers: list[bytes | None] = field(default_factory=lambda: [None, None])
    actors: tuple[int, ...] = ()
    wants_newer_than: int | None = None
    requests: dict[int, Sample] = field(default_factory=dict)
    next_update: int = 0

    @property
    def oldest(self) -> Sample:
        """The oldest open request; there must be one."""
        return next(iter(self.requests.values()))

    @property
    def starts(self) -> bool:
        """An actor host has asked for its numbers, and its relay has not spoken yet."""
        return self.role == "relay" and not self.spoke

    def __str__(self) -> str:
        many = "s" if len(self.actors) > 1 else ""
        actors = f" of actor{many} {', '.join(map(str, self.actors))}" if self.actors else ""
        return f"the {self.role}{actors} at {self.address or 'this machine'}"


class Sessions:
    """All clients. A client has two connections. Its session begins with its hello.

    A session ends with its last connection. A host keeps its actor numbers, and the learner its
    place, for some time longer.

    form, config: a client's messages and shared settings must equal these. takes_learner: False:
    the learner is on the replay's host.
    """

    def __init__(
        self,
        form: Form,
        config: Mapping[str, Any],
        roster: Roster,
        takes_learner: bool,
        clock_s: Callable[[], float],
    ) -> None:
        self._form, self._roster, self._clock_s = form, roster, clock_s
        # As JSON gives a peer's.
        self._config: dict[str, Any] = json.loads(json.dumps(dict(config)))
        self.takes_learner = takes_learner
        self._started_s = clock_s()
        self._by_client: dict[tuple[str, int], Session] = {}
        self._by_peer: dict[bytes, tuple[Session, int]] = {}

    def of_roles(self, *roles: str) -> Iterator[Session]:
        """The clients that are connected, or were a short time ago."""
        # A copy: a session may end while the caller sends to it.
        return (s for s in list(self._by_client.values()) if s.role in roles)

    def of_actor(self, actor: int) -> Session | None:
        """The client that runs an actor now."""
        return self._of_host(self._roster.host(actor))

    def _of_host(self, host: int) -> Session | None:
        return self._by_client.get(("relay", host)) or self._by_client.get(("client", host))

    def known(self, peer: bytes) -> Session | None:
        """The client of this connection; None if it did not say hello."""
        return self._by_peer.get(peer, (None, 0))[0]

    def of_peer(self, peer: bytes) -> Session | None:
        """The same, marked as alive: it has sent a message."""
        session = self.known(peer)
        if session is not None:
            session.spoke = True
            session.heard_s = self._clock_s()
        return session

    def forget_peer(self, peer: bytes) -> None:
        """Remove this connection from its client. The client's session ends with the last one."""
        session, _ = self._by_peer.pop(peer, (None, 0))
        if session is not None:
            session.peers = [None if known == peer else known for known in session.peers]
            if not any(session.peers) and not session.actors and session.role != "learner":
                self._end(session)

    def join(self, peer: bytes, hello: Hello, role: str | None, address: str) -> Session | Error:
        """A client's session, new or known, or the reason for a refusal.

        role: of the peer's key; None if there are no keys. Raises BadMessage.
        """
        if (objection := self._objection(hello, role)) is not None:
            return objection
        known, _ = self._by_peer.get(peer, (None, 0))
        if known is not None and (known.role, known.host) != (hello.role, hello.host):
            raise BadMessage("a connection belongs to one client until it closes")
        session = self._session(hello, address)
        if hello.role in _WRITERS:
            actors = self._assign(session, hello.actors)
            if actors is None:
                self.connect(session, hello.channel, peer)
                return Error(
                    Fault.FULL,
                    f"all {self._roster.actors} actor numbers are in use: raise --actors there",
                )
            session.actors = tuple(actors)
        session.heard_s = self._clock_s()
        return session

    def connect(self, session: Session, channel: int, peer: bytes) -> bytes | None:
        """Make this the client's connection. Returns its former one, or None.

        That is `peer` itself if the connection was known.
        """
        old = session.peers[channel]
        if old is not None and old != peer:
            self._by_peer.pop(old, None)
        session.peers[channel] = peer
        self._by_peer[peer] = session, channel
        return old

    def leave(self, session: Session) -> None:
        """Remove a client; its actor numbers are free."""
        self._end(session)
        if session.role in _WRITERS:
            self._roster.release(session.host)

    def _objection(self, hello: Hello, role: str | None) -> Error | None:
        """Why this client is refused, or None."""
        if role not in (None, hello.role):
            return Error(Fault.REFUSED, f"this key is not for the role {hello.role}")
        ours = self._form.schema.hash
        different = differences(self._config, hello.config)
        if hello.schema != ours:
            text = f"the peer's schema is {hello.schema:#018x}, the replay's {ours:#018x}"
            return Error(Fault.REFUSED, text + different)
        if different:
            text = "the settings of a run must be the same on all hosts" + different
            return Error(Fault.REFUSED, text)
        if hello.role == "relay" and hello.actors > self._roster.actors:
            text = f"{hello.actors} actors are asked for, and the run has {self._roster.actors}"
            return Error(Fault.REFUSED, f"{text}: lower --actors here, or raise it at the replay")
        if hello.role == "learner" and not self.takes_learner:
            return Error(Fault.REFUSED, "this replay has its learner on its own host")
        known = self._by_client.get(_role_and_host(hello))
        if known is not None and known.incarnation > hello.incarnation:
            return Error(Fault.FENCED, f"a newer {hello.role} has replaced this one")
        if known is not None and known.host != hello.host and not hello.actors:  # a learner
            silent_s = self._clock_s() - known.heard_s
            if any(known.peers) and silent_s < _SESSION_S:
                text = f"{known} trains with this replay: end it, or give --take-over to replace it"
                return Error(Fault.REFUSED, text)
        return None

    def _session(self, hello: Hello, address: str) -> Session:
        """The session of this client, new or known."""
        key = _role_and_host(hello)
        session = self._by_client.get(key)
        if session is None or session.incarnation < hello.incarnation:
            if session is not None:
                self._end(session)
            session = Session(hello.role, hello.host, hello.incarnation, self._clock_s(), address)
            self._by_client[key] = session
        return session

    def _end(self, session: Session) -> None:
        for peer in session.peers:
            if peer is not None:
                self._by_peer.pop(peer, None)
        session.peers = [None, None]
        if self._by_client.get(_role_and_host(session)) is session:
            del self._by_client[_role_and_host(session)]

    def _assign(self, session: Session, count: int) -> list[int] | None:
        actors = self._roster.assign(session.host, count)
        now_s = self._clock_s()
        # A server that has just started does not know yet which clients are alive.
        if actors is None and now_s - self._started_s >= _SESSION_S:
            known = {s.host: s for s in self.of_roles(*_WRITERS)}
            there = {
                host
                for host, s in known.items()
                if now_s - s.heard_s < (_START_S if s.starts else _SESSION_S)
            }
            hosts = {self._roster.host(actor) for actor in range(self._roster.actors)}
            # The longest silent first: a host that was only stopped for a while may come back.
            gone = sorted(
                hosts - there - {session.host, NO_HOST},
                key=lambda host: (known[host].heard_s if host in known else -1.0, host),
            )
            actors = self._roster.assign(session.host, count, gone)
            for former in map(self._of_host, gone):
                if former is not None and not self._roster.actors_of(former.host):
                    self._end(former)
        return actors


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], where: str = "the replay"
) -> str:
    """The settings that differ, as the end of a sentence; "" if none do."""
    lines = [
        f"{name} is {there.get(name)!r} at {where} and {here.get(name)!r} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if not lines:
        return ""
    return f": {', '.join(lines)}; give all commands of a run the same --config"


def _role_and_host(hello: Hello | Session) -> tuple[str, int]:
    # There is one learner. There may be many clients of the other roles.
    return hello.role, 0 if hello.role == "learner" else hello.host
