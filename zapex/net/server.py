"""The replay's server: receives messages, gives them to handlers, and answers.

It uses a Listener and does not depend on a transport. A message on a connection without a hello is
answered with "say hello" and dropped. A peer that sends an invalid message is counted and loses its
session. When that happens repeatedly, the server closes the connection (guard.py).
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.errors import BadMessage, ConfigError, OtherVersion, PeerError
from zapex.host.roster import Roster
from zapex.machine.waiting import rest_until
from zapex.net.guard import Guard
from zapex.net.priorities import InitialPriorities
from zapex.net.sessions import MAY_SEND, Session, Sessions
from zapex.net.sockets import Listener, Received, Tracker
from zapex.wire import control as messages
from zapex.wire.control import ACTOR_STATE, Bye, Error, Fault, Hello, Welcome
from zapex.wire.header import Buffer, Form, Kind
from zapex.wire.message import Message

_AT_MOST = 256  # messages taken in before the duty cycle continues
_ERRORS_PER_S = 100.0
_UNSENT = 4  # large messages that wait on one connection
_SLIGHT = 1 / 128  # of a fault: a correct peer does it rarely, by bad timing
MEMORY_BYTES = 1 << 30
_TELL_S = 5.0  # between two lines about refused values
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


Handler = Callable[[Session, Any], None]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class LinkServer:
    """The replay's end of all links; `do_work()` receives and handles messages.

    listener: is closed with the server. form: sizes and shapes of
    this run's messages. config: the shared settings; a client's must be equal. memory_bytes: the
    limit for messages in flight (guard.py); None: 1 GiB, or what four batches need if that is more.
    The ends of the links (replay_ends.py) set `handlers` by kind, `chores` of every duty cycle,
    `credit_bytes`, how much an actor may push, and `transitions`, how many it has pushed. tell:
    takes a line about a peer that sends impossible values.
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
        memory_bytes: int | None = None,
        tell: Callable[[str], object] = _tell,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listener, self.url, self.form, self.roster = listener, listener.url, form, roster
        self.handlers: dict[Kind, Handler] = {Kind.BYE: self._bye}
        self.chores: list[Callable[[], object]] = []
        self.credit_bytes: Callable[[int], int] = lambda actor: 0
        self.transitions: Callable[[int], int] = lambda actor: 0
        self.priorities = InitialPriorities(given=config.get("initial_priority") != "max")
        self.counts = dict.fromkeys(
            ("messages", "bad", "unknown", "forbidden", "refused", "fenced", "unsent", "lies"), 0
        )
        self.guard = Guard(listener, memory_bytes or max(MEMORY_BYTES, _least_memory(form)))
        self.sessions = Sessions(form, config, roster, self.guard.hang_up, clock_s)
        listener.on_gone = self._gone
        self.over = ""  # why the run has ended, from the learner
        self._incarnation = incarnation
        self._params_version, self._clock_s = params_version, clock_s
        self._tell, self._told_s = tell, -_TELL_S
        self._untold, self._refusal = 0, ""
        self._errors_s, self._errors_left = clock_s(), _ERRORS_PER_S

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

    def actor_states(self, actors: Any) -> NDArray[np.void]:
        """ACTOR_STATE records as they are now."""
        states = [(a, *self.roster.state(a), self.credit_bytes(a)) for a in actors]
        return np.array(states, ACTOR_STATE)

    def judge(self, session: Session, channel: int, *, in_season: bool) -> None:
        """Count a valid message of a client, or a fault that is allowed if it is rare."""
        peer = session.peers[channel]
        if peer is not None:
            self.guard.strike(peer, -_SLIGHT if in_season else _SLIGHT)

    def refuse(self, session: Session, what: str) -> None:
        """Count what no honest client sends. Tell of the latest, once every _TELL_S at most."""
        self.counts["lies"] += 1
        self._untold += 1
        self._refusal = f"{session} sent {what}: refused"
        self._tell_refusals()

    def _tell_refusals(self) -> None:
        now_s = self._clock_s()
        if not self._untold or now_s - self._told_s < _TELL_S:
            return
        others = self._untold - 1
        more = f" ({others:,} more since the last line)" if others else ""
        self._tell(self._refusal + more)
        self._told_s, self._untold = now_s, 0

    def wait(self, ready: Callable[[], object], timeout_s: float) -> bool:
        """Return True as soon as `ready()` is true, False when it was not within `timeout_s`."""

        def rest(left_s: float) -> None:
            self.listener.wait(min(left_s, 0.1))
            self.listener.do_work()

        return rest_until(ready, timeout_s, rest)

    def do_work(self) -> int:
        """Receive and handle messages. Returns how many."""
        self.listener.do_work()
        done = 0
        while done < _AT_MOST and (received := self.listener.receive()) is not None:
            done += 1
            self._take(received)
        self.counts["messages"] += done
        for chore in self.chores:
            chore()
        self._tell_refusals()
        return done

    def close(self) -> None:
        """Close all connections."""
        self.guard.close()
        self.listener.close()

    def _gone(self, peer: bytes) -> None:
        self.guard.forget(peer)
        self.sessions.forget_peer(peer)

    def _take(self, received: Received) -> None:
        peer, buffers = received
        try:
            message = messages.decode(buffers, self.form, of_client=True)
            if isinstance(message, Hello):
                self._hello(received, message)
                return
            session = self.sessions.of_peer(peer)
            if session is None:
                self.counts["unknown"] += 1
                self._answer(peer, Error(Fault.HELLO_FIRST, "say hello"))
                self.guard.strike(peer, _SLIGHT)
            elif message.kind not in MAY_SEND[session.role]:
                self.counts["forbidden"] += 1
                text = f"a {session.role} may not send {message.kind.name}"
                self._answer(peer, Error(Fault.REFUSED, text))
                self.guard.strike(peer)
            elif message.kind in self.handlers:
                self.handlers[message.kind](session, message)
        except BadMessage as error:  # found in its bytes, or by a handler
            self.counts["bad"] += 1
            fault = Fault.REFUSED if isinstance(error, OtherVersion) else Fault.BAD
            self._answer(peer, Error(fault, str(error)))
            self.sessions.forget_peer(peer)
            self.guard.strike(peer)

    def _hello(self, received: Received, hello: Hello) -> None:
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
            self._incarnation, self.form.schema.hash, self.roster.epoch, self._params_version(),
            self.roster.actors, self.form.layout.chunk, old != peer,
            self.actor_states(session.actors),
        )  # fmt: skip
        self.send(session, hello.channel, welcome)

    def _bye(self, session: Session, message: Bye) -> None:
        self.sessions.leave(session)
        if session.role == "learner":
            self.over = message.over

    def _answer(self, peer: bytes, error: Error) -> None:
        # A peer that sends very many invalid messages gets no more answers after a while.
        now_s = self._clock_s()
        earned = (now_s - self._errors_s) * _ERRORS_PER_S
        self._errors_left = min(_ERRORS_PER_S, self._errors_left + earned)
        self._errors_s = now_s
        if self._errors_left < 1:
            return
        self._errors_left -= 1
        try:
            self.listener.send(peer, messages.encode(error))
        except PeerError:
            self.sessions.forget_peer(peer)
