"""The replay's server: receives messages, gives them to its ends, and answers.

It uses a Listener and does not depend on a transport. A message on a connection without a hello is
answered with "say hello" and dropped. A peer that sends an invalid message loses its session, and
the third time its connection. If messages in flight take too much memory, the connections that hold
the most are closed.
"""

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.errors import BadMessage, ConfigError, OtherVersion, PeerError
from zapex.host.roster import Roster
from zapex.machine.waiting import rest_until
from zapex.net.sessions import Session, Sessions
from zapex.net.sockets import Listener, Received, Tracker
from zapex.wire import messages
from zapex.wire.messages import Bye, Error, Fault, Hello, Welcome
from zapex.wire.protocol import MAY_SEND, Buffer, Form, Kind, Message, decode_header

_AT_MOST = 256  # messages taken in before the duty cycle continues
_ERRORS, _ERRORS_PER_S = 10.0, 10.0  # answers with an error to one connection: at once, after that
_REPORTS, _REPORTS_PER_S = 10.0, 0.2  # lines about impossible values: at once, and after that
_UNSENT = 4  # large messages that wait on one connection
_STRIKES = 3.0  # invalid messages until a peer is disconnected
_SLIGHT = 1 / 128  # of a strike: a correct peer does it rarely, after a restart of this process
MEMORY_BYTES = 1 << 30
_GUARD_S = 0.01
_REST_S = 0.05  # no connection to close: the process itself uses the memory
_ALARM, _CALM = 0.5, 0.25  # shares of the bound: act above the first, until below the second
_COUNTED = {Fault.REFUSED: "refused", Fault.FENCED: "fenced"}


def check_memory(form: Form, memory_bytes: int) -> None:
    """Raise ConfigError if messages of this form need more."""
    least = _least_memory(form)
    if memory_bytes < least:
        raise ConfigError(
            f"--network-memory must be at least {-(-least >> 20)} MiB for batches and "
            f"parameters of this size, got {memory_bytes >> 20}"
        )


def _least_memory(form: Form) -> int:
    return _UNSENT * (form.largest_answer_bytes + form.parameter_bytes)


def own_bytes(statm: int | None = None) -> int:
    """Resident memory of this process that is not shared; statm: an open /proc/self/statm."""
    if statm is None:
        with open("/proc/self/statm", "rb") as file:
            return own_bytes(file.fileno())
    _, resident, shared, *_ = os.pread(statm, 256, 0).split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class Guard:
    """Limits a server's memory, from a thread of its own.

    It closes the connections for which the transport holds the most bytes (Listener.held).
    bound_bytes: for messages in flight, in addition to the process's memory at the start.
    """

    def __init__(self, listener: Listener, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self._listener = listener
        # It stays open: a peer that uses up all descriptors must not stop the guard.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._base_bytes = own_bytes(self._statm)
        self._used_before = 0
        self.hung_up = 0  # connections that were closed here
        self._libc = ctypes.CDLL(None)
        self._stop = threading.Event()
        args = weakref.ref(self), self._stop
        self._thread = threading.Thread(target=_watch, args=args, name="guard", daemon=True)
        self._thread.start()

    def hang_up(self, connection: bytes | int) -> None:
        """Close a connection."""
        self._listener.hang_up(connection)
        self.hung_up += 1

    def close(self) -> None:
        """Stop watching."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(5)
            os.close(self._statm)

    def look(self) -> float:
        """Disconnect peers if memory runs out. Returns how long to sleep after it, in seconds."""
        used = own_bytes(self._statm) - self._base_bytes
        # Before the next check has an effect, it may grow by twice the growth since the last one.
        expected = used + 2 * max(0, used - self._used_before)
        self._used_before = used
        if expected > _ALARM * self.bound_bytes:
            with suppress(OSError):  # no descriptor is free now; a later check has one
                return self._make_room()
        return _GUARD_S

    def _make_room(self) -> float:
        """Close the connections that hold the most bytes, until the rest is below _CALM."""
        held = sorted(self._listener.held(), key=lambda one: one[0], reverse=True)
        excess = sum(nbytes for nbytes, _ in held) - int(_CALM * self.bound_bytes)
        acted = excess > 0
        for nbytes, connection in held:
            if excess <= 0:
                break
            self.hang_up(connection)
            excess -= nbytes
        self._libc.malloc_trim(0)
        return _GUARD_S if acted else _REST_S


def _watch(guard: "weakref.ref[Guard]", stop: threading.Event) -> None:
    """Check as long as the guard exists; the thread does not keep an unused guard alive."""
    rest_s = _GUARD_S
    while not stop.wait(rest_s):
        alive = guard()
        if alive is None:
            return
        rest_s = alive.look()
        del alive


Handler = Callable[[Session, Any], None]
States = Callable[[Iterable[int]], NDArray[np.void]]
"""The ACTOR_STATE records of some actors as they are now."""


class End:
    """One end of the links: `handlers` by the kinds of messages that it takes."""

    handlers: Mapping[Kind, Handler] = {}

    def do_work(self) -> object:
        """Do regular work, in each duty cycle."""


class _Budget:
    """How often something may be done: `most` times at once, and `per_s` times in each second."""

    def __init__(self, most: float, per_s: float, clock_s: Callable[[], float]) -> None:
        self._most, self._per_s, self._clock_s = most, per_s, clock_s
        self._left, self._looked_s = most, clock_s()

    def spend(self) -> bool:
        """Whether it may be done now; then this counts."""
        now_s = self._clock_s()
        self._left = min(self._most, self._left + (now_s - self._looked_s) * self._per_s)
        self._looked_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass
class _Conduct:
    """A connection that was answered with errors: how many it may be sent, and its strikes."""

    errors: _Budget
    strikes: float = 0.0


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class LinkServer:
    """Receives messages from all clients, and sends to them.

    Args:
        listener: closed with the server.
        form: sizes and shapes of this run's messages.
        config: the shared settings; a client's must be equal.
        roster: who has which actor numbers.
        incarnation: of this process.
        params_version: the newest version of the parameters.
        takes_learner: False: the learner is on the replay's host.
        memory_bytes: limit for messages in flight; None: 1 GiB, or what four batches need if that
            is more.
        tell: takes a line about a client that sends impossible values.
        clock_s: monotonic, in seconds; for tests.

    Attributes:
        over: why the run has ended; "" while it runs.
    """

    def __init__(
        self,
        listener: Listener,
        form: Form,
        config: Mapping[str, Any],
        roster: Roster,
        *,
        incarnation: int,
        params_version: Callable[[], int],
        takes_learner: bool = True,
        memory_bytes: int | None = None,
        tell: Callable[[str], object] = _print,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listener, self.url, self.form, self.roster = listener, listener.url, form, roster
        self.counts = dict.fromkeys(
            ("messages", "bad", "unknown", "forbidden", "refused", "fenced", "unsent"), 0
        )
        self.guard = Guard(listener, memory_bytes or max(MEMORY_BYTES, _least_memory(form)))
        self.sessions = Sessions(form, config, roster, takes_learner, clock_s)
        self.over = ""
        self._incarnation = incarnation
        self._params_version, self._tell = params_version, tell
        self._clock_s = clock_s
        self._conduct: dict[bytes, _Conduct] = {}
        self._reports = _Budget(_REPORTS, _REPORTS_PER_S, clock_s)

    def send(
        self, session: Session, channel: int, message: Message, compressed: bool = False
    ) -> Tracker | None:
        """Send without waiting. Returns a tracker (`done`: buffers are free); None: not now.

        If the connection is gone, this also returns None; its client says hello again.
        """
        return self.send_encoded(session, channel, messages.encode(message, compressed))

    def send_encoded(
        self, session: Session, channel: int, buffers: Sequence[Buffer]
    ) -> Tracker | None:
        """As `send`, for an encoded message, which several clients may get."""
        peer = session.peers[channel]
        if peer is None:
            return None
        try:
            tracker = self.listener.send(peer, buffers)
        except PeerError:
            self.sessions.forget_peer(peer)
            return None
        self.counts["unsent"] += tracker is None
        return tracker

    def room(self, session: Session, channel: int) -> int:
        """How many large messages a client can be sent now; it must receive earlier ones first."""
        peer = session.peers[channel]
        return 0 if peer is None else max(0, _UNSENT - self.listener.queued(peer))

    def refuse(self, session: Session, what: str) -> None:
        """Report values that no run produces, once for each session.

        A client can open any number of sessions, so there are few lines over all of them.
        """
        if not session.is_reported and self._reports.spend():
            session.is_reported = True
            self._tell(f"{session} sent {what}: refused; further ones are not reported")

    def wait(self, ready: Callable[[], object], timeout_s: float) -> bool:
        """Return True as soon as `ready()` is true, False when it was not within `timeout_s`."""

        def rest(left_s: float) -> None:
            self.listener.wait(min(left_s, 0.1))
            self.listener.do_work()

        return rest_until(ready, timeout_s, rest)

    def do_work(self, handlers: Mapping[Kind, Handler], states: States) -> int:
        """Receive messages and give them to their handlers. Returns how many.

        states: what a welcome says about its client's actors.
        """
        self.listener.do_work()
        gone, done = self.listener.gone(), 0
        while done < _AT_MOST and (received := self.listener.receive()) is not None:
            done += 1
            self._take(received, handlers, states)
        for peer in gone:  # what it had said before it ended, as that it leaves, is read
            self._conduct.pop(peer, None)
            self.sessions.forget_peer(peer)
        self.counts["messages"] += done
        return done

    def close(self) -> None:
        """Close all connections."""
        self.guard.close()
        self.listener.close()

    def _take(self, received: Received, handlers: Mapping[Kind, Handler], states: States) -> None:
        """Only a client that has said hello gets its messages read, and only those of its role."""
        peer, buffers = received
        try:
            raw = decode_header(buffers)
            if raw.kind == Kind.HELLO:
                self._hello(received, messages.read(raw, self.form), states)
                return
            session = self.sessions.of_peer(peer)
            if session is None:
                self.counts["unknown"] += 1
                self._answer(peer, Error(Fault.HELLO_FIRST, "say hello"), _SLIGHT)
            elif raw.kind not in MAY_SEND[session.role]:
                self.counts["forbidden"] += 1
                text = f"a {session.role} may not send {raw.kind.name}"
                self._answer(peer, Error(Fault.REFUSED, text), 1.0)
            else:
                message = messages.read(raw, self.form)
                if raw.kind == Kind.BYE:
                    self._bye(session, message)
                elif raw.kind in handlers:
                    handlers[raw.kind](session, message)
        except BadMessage as error:  # found in its bytes, or by a handler
            self.counts["bad"] += 1
            fault = Fault.REFUSED if isinstance(error, OtherVersion) else Fault.BAD
            self._answer(peer, Error(fault, str(error)), 1.0)
            self.sessions.forget_peer(peer)

    def _hello(self, received: Received, hello: Hello, states: States) -> None:
        peer, buffers = received
        if self.over:
            self._answer(peer, Error(Fault.OVER, self.over))
            return
        listener = self.listener
        session = self.sessions.join(
            peer, hello, listener.role_of(peer, buffers), listener.address_of(peer, buffers)
        )
        if isinstance(session, Error):
            if session.fault in _COUNTED:
                self.counts[_COUNTED[session.fault]] += 1
            self._answer(peer, session)
            return
        old = self.sessions.connect(session, hello.channel, peer)
        if old == peer:
            listener.settled(peer)
        elif old is not None:  # only this end of the old connection may be open
            self.guard.hang_up(old)
        welcome = Welcome(
            self._incarnation,
            self.form.schema.hash,
            self.roster.epoch,
            self._params_version(),
            self.roster.actors,
            self.form.layout.chunk,
            old != peer,
            states(session.actors),
        )
        self.send(session, hello.channel, welcome)

    def _bye(self, session: Session, message: Bye) -> None:
        self.sessions.leave(session)
        if session.role == "learner":
            self.over = message.over or self.over

    def _answer(self, peer: bytes, error: Error, strike: float = 0.0) -> None:
        """Answer with an error, if this connection did not get very many. Count the strike."""
        conduct = self._conduct.get(peer)
        if conduct is None:
            conduct = _Conduct(_Budget(_ERRORS, _ERRORS_PER_S, self._clock_s))
            self._conduct[peer] = conduct
        if conduct.errors.spend():
            try:
                self.listener.send(peer, messages.encode(error))
            except PeerError:
                self.sessions.forget_peer(peer)
        conduct.strikes += strike
        if conduct.strikes >= _STRIKES:
            self.guard.hang_up(peer)
