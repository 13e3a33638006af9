"""The replay's socket: who is connected, what each may send, and who gets which message.

A client has two connections, and a session from its hello on. Routing ids are libzmq's own, a new
one for each connection, so nobody can take another's place; what comes on a connection that did
not say hello is answered with "say hello" and dropped. A peer whose bytes break the rules loses its
session and is counted, and is hung up on (zmq_guard.py) when it does so again and again.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from zapex import messages
from zapex.errors import BadMessage, ConfigError, OtherVersion, PeerError
from zapex.message_header import MAX_ACTORS, Form, Kind, Part
from zapex.messages import ACTOR_STATE, Bye, Error, Fault, Hello, Welcome
from zapex.roster import Roster
from zapex.zmq_guard import Guard
from zapex.zmq_socket import (
    Gatekeeper,
    Security,
    let_grow_if_far,
    listen,
    make_context,
    receive,
    send,
)

_SESSION_S = 10.0  # a host that was silent for so long may lose its actor numbers to another
_FORGET_S = 60.0
_MOST_SESSIONS = 2 * MAX_ACTORS
_AT_MOST = 256  # messages taken in before the duty cycle goes on
_ERRORS_PER_S = 100.0
_LARGE_BYTES = 1 << 16  # a message that counts when libzmq keeps it
_UNSENT = 4  # of those, for one connection
_SLIGHT = 1 / 128  # of a strike: what an honest peer does now and then, at a bad moment
MEMORY_BYTES = 1 << 30
_WRITERS = ("relay", "client")  # have actor numbers, and push chunks
MAY_SEND = {
    "relay": {Kind.HELLO, Kind.PUSH, Kind.PULL, Kind.STATS, Kind.BYE},
    "learner": {Kind.HELLO, Kind.SAMPLE, Kind.UPDATE, Kind.PUBLISH, Kind.PULL, Kind.STATS,
                Kind.BYE},
    "reader": {Kind.HELLO, Kind.PULL, Kind.BYE},
    "client": {Kind.HELLO, Kind.PUSH, Kind.CALL, Kind.BYE},
}  # fmt: skip


def check_memory(form: Form, memory_bytes: int) -> None:
    """Raises ConfigError where messages of this form need more."""
    least = _least_memory(form)
    if memory_bytes < least:
        raise ConfigError(
            f"--network-memory must be at least {-(-least >> 20)} MiB for batches and "
            f"parameters of this size, got {memory_bytes >> 20}"
        )


def _least_memory(form: Form) -> int:
    return _UNSENT * (form.largest_answer_bytes + form.parameter_bytes)


@dataclass(eq=False)
class Session:
    """A client, from its hello on: its two connections (routing ids), and what it waits for."""

    role: str
    host: int
    incarnation: int
    heard_s: float
    routes: list[bytes | None] = field(default_factory=lambda: [None, None])
    actors: tuple[int, ...] = ()
    wants_newer_than: int | None = None
    requests: dict[int, None] = field(default_factory=dict)
    next_update: int = 0


Handler = Callable[[Session, Any], None]


class ZmqServer:
    """All connections of the replay; `do_work()` takes in what has come.

    form: what this run's messages look like. config: its shared settings, which a client's must
    equal. memory_bytes: what messages under way may take, whatever peers do (zmq_guard.py); None:
    1 GiB, or what four batches need. What the faces set: `handlers` by kind, `chores` of every duty
    cycle, and `credit_bytes`, what an actor may push.
    """

    def __init__(
        self,
        url: str,
        form: Form,
        config: Mapping[str, Any],
        roster: Roster,
        security: Security,
        *,
        incarnation: int,
        params_version: Callable[[], int],
        memory_bytes: int | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.form, self.roster = form, roster
        self.handlers: dict[Kind, Handler] = {Kind.BYE: self._bye}
        self.chores: list[Callable[[], object]] = []
        self.credit_bytes: Callable[[int], int] = lambda actor: 0
        self.counts = dict.fromkeys(
            ("messages", "bad", "unknown", "forbidden", "refused", "fenced", "unsent"), 0
        )
        self._config: dict[str, Any] = json.loads(json.dumps(dict(config)))  # as a peer's arrive
        self._incarnation = incarnation
        self._params_version, self._clock_s = params_version, clock_s
        self._secure = security.keys is not None
        security.check(url, "--listen")
        if memory_bytes is None:
            memory_bytes = max(MEMORY_BYTES, _least_memory(form))
        check_memory(form, memory_bytes)
        self._context: Any = make_context()
        self._gate = Gatekeeper(self._context, security.keys)
        try:
            self._socket = listen(self._context, url, security, form.largest_request_bytes)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.url = self._socket.last_endpoint.decode()
        self._guard = Guard(memory_bytes, self.url)
        self.over = ""  # why the run has ended, from the learner
        self._sessions: dict[tuple[str, int], Session] = {}
        self._routes: dict[bytes, tuple[Session, int]] = {}
        self._started_s = self._errors_s = clock_s()
        self._errors_left = _ERRORS_PER_S
        self._poller = zmq.Poller()
        for socket in (self._socket, self._gate.socket):
            self._poller.register(socket, zmq.POLLIN)

    # What the faces use.

    def sessions(self, *roles: str) -> Iterator[Session]:
        """Clients that are there."""
        return (s for s in self._sessions.values() if s.role in roles)

    def session_of(self, actor: int) -> Session | None:
        """The relay that plays an actor now."""
        host = self.roster.host(actor)
        return self._sessions.get(("relay", host)) or self._sessions.get(("client", host))

    def send(self, session: Session, channel: int, message: Any) -> Any | None:
        """Send without waiting: a tracker (its `done`: the parts are free), or None: not now.

        A connection that is gone counts as not now; its client says hello again.
        """
        return self.send_parts(session, channel, messages.encode(message))

    def send_parts(self, session: Session, channel: int, parts: Sequence[Part]) -> Any | None:
        """The same for a message that is encoded already, as it is for several clients."""
        route = session.routes[channel]
        if route is None:
            return None
        try:
            tracker = send(self._socket, [route, *parts])
        except PeerError:
            self._forget_route(route)
            return None
        if tracker is None:
            self.counts["unsent"] += 1
        elif (nbytes := sum(part.nbytes for part in parts)) >= _LARGE_BYTES:
            self._guard.sent(route, nbytes, tracker)
        return tracker

    def room(self, session: Session, channel: int) -> int:
        """How many large messages a client can be sent now; it has to take those before."""
        route = session.routes[channel]
        return 0 if route is None else max(0, _UNSENT - self._guard.unsent(route))

    def actor_states(self, actors: Any) -> NDArray[np.void]:
        """ACTOR_STATE records as they are now."""
        states = [(a, *self.roster.state(a), self.credit_bytes(a)) for a in actors]
        return np.array(states, ACTOR_STATE)

    @property
    def fds(self) -> list[int]:
        """Become readable when something may have come; `ready` must be asked after that."""
        return [int(s.getsockopt(zmq.FD)) for s in (self._socket, self._gate.socket)]

    def ready(self) -> bool:
        """Something has come in."""
        return bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN) or bool(
            self._gate.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN
        )

    def wait(self, ready: Callable[[], object], timeout_s: float) -> bool:
        """Return True as soon as `ready()` is true, False when it was not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._poller.poll(int(1000 * min(left_s, 0.1)) + 1)
            self._gate.do_work()
        return True

    def do_work(self) -> int:
        """Take in what has come; how many messages."""
        self._gate.do_work()
        done = 0
        while done < _AT_MOST and (parts := receive(self._socket)) is not None:
            done += 1
            self._take(parts)
        self.counts["messages"] += done
        for chore in self.chores:
            chore()
        return done

    def close(self) -> None:
        """Hang up."""
        self._guard.close()
        self._socket.close()
        self._gate.close()
        self._context.destroy(linger=0)

    @property
    def hung_up(self) -> int:
        """Connections that were ended here."""
        return self._guard.hung_up

    def strike(self, session: Session, channel: int) -> None:
        """A client did what it may do at a bad moment, but not all the time."""
        route = session.routes[channel]
        if route is not None:
            self._guard.strike(route, _SLIGHT)

    def forgive(self, session: Session, channel: int) -> None:
        """A client did its work."""
        route = session.routes[channel]
        if route is not None:
            self._guard.forgive(route, _SLIGHT)

    # One message.

    def _take(self, parts: list[Any]) -> None:
        route = parts[0].bytes
        if not self._guard.took(route, parts[0].get(zmq.SRCFD), sum(map(len, parts))):
            return
        try:
            message = messages.decode(parts[1:], self.form)
        except BadMessage as error:
            self._bad(route, error)
            return
        if isinstance(message, Hello):
            self._hello(route, parts[-1], message)
            return
        session, _ = self._routes.get(route, (None, 0))
        if session is None:
            self.counts["unknown"] += 1
            self._answer_error(route, Fault.HELLO_FIRST, "say hello")
            self._guard.strike(route, _SLIGHT)
            return
        session.heard_s = self._clock_s()
        if message.kind not in MAY_SEND[session.role]:
            self.counts["forbidden"] += 1
            self._answer_error(
                route, Fault.REFUSED, f"a {session.role} may not send {message.kind.name}"
            )
            self._guard.strike(route)
            return
        if message.kind in self.handlers:
            try:
                self.handlers[message.kind](session, message)
            except BadMessage as error:  # what only the run's state can tell
                self._bad(route, error)

    def _bad(self, route: bytes, error: BadMessage) -> None:
        self.counts["bad"] += 1
        fault = Fault.REFUSED if isinstance(error, OtherVersion) else Fault.BAD
        self._answer_error(route, fault, str(error))
        self._forget_route(route)
        self._guard.strike(route)

    def _answer_error(self, route: bytes, fault: Fault, text: str) -> None:
        # Whoever floods us with nonsense gets silence from some point on.
        now_s = self._clock_s()
        earned = (now_s - self._errors_s) * _ERRORS_PER_S
        self._errors_left = min(_ERRORS_PER_S, self._errors_left + earned)
        self._errors_s = now_s
        if self._errors_left < 1:
            return
        self._errors_left -= 1
        try:
            send(self._socket, [route, *messages.encode(Error(fault, text))])
        except PeerError:
            self._forget_route(route)

    def _forget_route(self, route: bytes) -> None:
        session, channel = self._routes.pop(route, (None, 0))
        if session is not None and session.routes[channel] == route:
            session.routes[channel] = None

    # Coming and going.

    def _hello(self, route: bytes, frame: Any, hello: Hello) -> None:
        fault = (Fault.OVER, self.over) if self.over else self._objection(frame, hello)
        if fault is not None:
            self.counts["fenced" if fault[0] == Fault.FENCED else "refused"] += not self.over
            self._answer_error(route, *fault)
            return
        known, _ = self._routes.get(route, (None, 0))
        if known is not None and (known.role, known.host) != (hello.role, hello.host):
            self._bad(route, BadMessage("a connection is one client's, for good"))
            return
        session = self._session(hello)
        if session is None:
            self._answer_error(route, Fault.FULL, f"there are {_MOST_SESSIONS:,} clients already")
            return
        if hello.role in _WRITERS:
            actors = self._assign(session, hello.actors)
            if actors is None:
                text = f"all {self.roster.actors} actors of the run are taken: raise --actors there"
                self._answer_error(route, Fault.FULL, text)
                return
            session.actors = tuple(actors)
        session.heard_s = self._clock_s()
        old = session.routes[hello.channel]
        fresh = old != route
        if fresh:
            if old is not None:
                # The client has made another: of the old one only this end may be left.
                self._routes.pop(old, None)
                self._guard.hang_up(old)
            session.routes[hello.channel] = route
            self._routes[route] = session, hello.channel
        else:
            let_grow_if_far(frame)
        welcome = Welcome(
            self._incarnation, self.form.schema.hash, self.roster.epoch, self._params_version(),
            self.roster.actors, self.form.layout.chunk, fresh, self.actor_states(session.actors),
        )  # fmt: skip
        self.send(session, hello.channel, welcome)

    def _objection(self, frame: Any, hello: Hello) -> tuple[Fault, str] | None:
        """Why this client is not wanted."""
        if self._secure and frame.get("User-Id") != hello.role:
            return Fault.REFUSED, f"this key is not for the role {hello.role}"
        ours = self.form.schema.hash
        if hello.schema != ours:
            return Fault.REFUSED, (
                f"the peer's schema is {hello.schema:#018x}, the replay's {ours:#018x}"
                + self._differences(hello.config)
            )
        different = self._differences(hello.config)
        if different:
            return Fault.REFUSED, "the settings of a run must be the same on all hosts" + different
        known = self._sessions.get(self._place(hello))
        if known is not None and known.incarnation > hello.incarnation:
            return Fault.FENCED, f"a newer {hello.role} has taken this one's place"
        return None

    def _differences(self, theirs: Mapping[str, Any]) -> str:
        names = sorted(self._config.keys() | theirs.keys())
        lines = [
            f"{name} is {self._config.get(name)!r} at the replay and {theirs.get(name)!r} here"
            for name in names
            if self._config.get(name) != theirs.get(name)
        ]
        return ": " + ", ".join(lines) if lines else ""

    @staticmethod
    def _place(hello: Hello) -> tuple[str, int]:
        # There is one learner; of the others there may be many.
        return hello.role, 0 if hello.role == "learner" else hello.host

    def _session(self, hello: Hello) -> Session | None:
        """Of this client, new or known; None: there are too many."""
        place = self._place(hello)
        session = self._sessions.get(place)
        if session is None or session.incarnation < hello.incarnation:
            self._forget_silent()
            if session is not None:
                self._drop(session)
            elif len(self._sessions) >= _MOST_SESSIONS:
                return None
            session = Session(hello.role, hello.host, hello.incarnation, self._clock_s())
            self._sessions[place] = session
        return session

    def _forget_silent(self) -> None:
        """Clients say hello every second: who was silent for long is no more."""
        silent_s = self._clock_s() - _FORGET_S
        for place, session in list(self._sessions.items()):
            if session.heard_s < silent_s:
                self._drop(session)
                del self._sessions[place]

    def _drop(self, session: Session) -> None:
        for route in session.routes:
            if route is not None:
                self._routes.pop(route, None)
        session.routes = [None, None]

    def _assign(self, session: Session, count: int) -> list[int] | None:
        now_s = self._clock_s()
        there = {s.host for s in self.sessions(*_WRITERS) if now_s - s.heard_s < _SESSION_S}
        hosts = {self.roster.host(actor) for actor in range(self.roster.actors)}
        # A server that has just begun does not know yet who is there.
        young = now_s - self._started_s < _SESSION_S
        gone = set() if young else hosts - there - {session.host}
        return self.roster.assign(session.host, count, sorted(gone))

    def _bye(self, session: Session, message: Bye) -> None:
        self._drop(session)
        self._sessions = {k: s for k, s in self._sessions.items() if s is not session}
        if session.role in _WRITERS:
            self.roster.release(session.host)
        if session.role == "learner":
            self.over = message.over
