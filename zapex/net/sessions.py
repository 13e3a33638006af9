"""Sessions: the clients of a replay from HELLO to BYE, and the actors that each one has."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zapex.errors import BadMessage
from zapex.host.roster import NO_HOST, Roster
from zapex.wire.messages import Error, Fault, Hello, Sample
from zapex.wire.protocol import MAX_ACTORS, ROLES, Form

_SESSION_S = 10.0  # after this much silence a host may lose its actor numbers
_START_S = 60.0  # the same for a host that has said only hello: its processes are starting
# Far above the hosts and the library's clients of any run; each costs memory and time.
MOST_SESSIONS = 4 * MAX_ACTORS
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
        # By role and host. There is one learner: its host is 0 here.
        self._clients: dict[str, dict[int, Session]] = {role: {} for role in ROLES}
        self._by_peer: dict[bytes, tuple[Session, int]] = {}

    def of_roles(self, *roles: str) -> list[Session]:
        """The clients that are connected, or were a short time ago."""
        return [session for role in roles for session in self._clients[role].values()]

    @property
    def learner(self) -> Session | None:
        """The learner that is connected, or was a short time ago."""
        return self._clients["learner"].get(0)

    def of_actor(self, actor: int) -> Session | None:
        """The client that runs an actor now."""
        return self._of_host(self._roster.host(actor))

    def _of_host(self, host: int) -> Session | None:
        return self._clients["relay"].get(host) or self._clients["client"].get(host)

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
                    f"all {self._roster.actors} actor numbers are in use: raise --actors there, or "
                    "--writers of `zapex replay --schema`",
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
        # A number starts again with each new host: it may be free now, but not for a former one.
        has_numbers = hello.role in _WRITERS and hello.epoch == self._roster.epoch
        if has_numbers and len(self._roster.actors_of(hello.host)) < hello.actors:
            return Error(Fault.FENCED, "another client was given an actor number of this one")
        if hello.role == "learner" and not self.takes_learner:
            return Error(Fault.REFUSED, "this replay has its learner on its own host")
        known = self._clients[hello.role].get(_place(hello))
        if known is None and sum(map(len, self._clients.values())) >= MOST_SESSIONS:
            return Error(Fault.FULL, f"{MOST_SESSIONS:,} clients are connected: no more can be")
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
        clients, place = self._clients[hello.role], _place(hello)
        session = clients.get(place)
        if session is None or session.incarnation < hello.incarnation:
            if session is not None:
                self._end(session)
            session = Session(hello.role, hello.host, hello.incarnation, self._clock_s(), address)
            clients[place] = session
        return session

    def _end(self, session: Session) -> None:
        for peer in session.peers:
            if peer is not None:
                self._by_peer.pop(peer, None)
        session.peers = [None, None]
        clients, place = self._clients[session.role], _place(session)
        if clients.get(place) is session:
            del clients[place]

    def _assign(self, session: Session, count: int) -> list[int] | None:
        actors, now_s = self._roster.assign(session.host, count), self._clock_s()
        # A server that has just started does not know yet which clients are alive.
        if actors is not None or now_s - self._started_s < _SESSION_S:
            return actors
        gone: dict[int, float] = {}  # hosts that are silent for too long, and when each was heard
        hosts = {self._roster.host(actor) for actor in range(self._roster.actors)}
        for host in hosts - {session.host, NO_HOST}:
            former = self._of_host(host)
            if former is None:
                gone[host] = -1.0
            elif now_s - former.heard_s >= (_START_S if former.starts else _SESSION_S):
                gone[host] = former.heard_s
        # The longest silent first: a host that was only stopped for a while may come back.
        order = sorted(gone, key=lambda host: (gone[host], host))
        actors = self._roster.assign(session.host, count, order)
        for former in map(self._of_host, order):
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


def _place(client: Hello | Session) -> int:
    return 0 if client.role == "learner" else client.host
