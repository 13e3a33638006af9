"""A client's link to the replay: two connections, a hello a second, and what each answer is for.

libzmq connects again by itself, and is told to where hellos go unanswered. A hello on a connection
that the replay does not know is answered with `fresh`, and whatever was under way is then sent
again by the faces (zmq_transport.py).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import zmq

from zapex import messages
from zapex.errors import BadMessage, Fenced, OtherVersion, PeerTimeout, Refused, RunOver
from zapex.message_header import Form, Kind, kind_of
from zapex.messages import BULK, SMALL, Bye, Error, Fault, Hello, Welcome
from zapex.zmq_socket import (
    CLIENT_COPIED_BYTES,
    Security,
    connect,
    let_grow_if_far,
    make_context,
    receive,
    send,
)

HELLO_S = 1.0
SILENT_S = 5.0  # a host with more work than cores is not a dead one
_RETRY_S = 0.05  # not connected yet
_NEWS_S = 3.0  # silence for longer than this is told to the user
_AT_MOST = 256


class ZmqLink:
    """One client's connections; `do_work()` takes in what has come and says hello in time.

    host: one number for one life of this host. actors: how many numbers a relay asks for. form:
    None only to ask what the run is like (`open` and `welcome`, and no more).

    Raises Refused or Fenced, out of `do_work`, when the replay does not want this client any more.
    over: why the run has ended; "" while it goes on.
    """

    def __init__(
        self,
        url: str,
        role: str,
        host: int,
        incarnation: int,
        form: Form | None,
        config: Mapping[str, Any],
        security: Security,
        *,
        schema_hash: int,
        actors: int = 0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url, self.form = url, form
        self.welcome: Welcome | None = None
        self.over = ""
        self.handlers: dict[Kind, Callable[[Any], None]] = {}
        self.aside: dict[Kind, Callable[[list[Any]], None]] = {}  # not decoded here: see `accept`
        self.on_welcome: list[Callable[[Welcome, int], None]] = []
        self.on_bad: list[Callable[[], None]] = []  # an answer was lost, and which is unknown
        self.counts = dict.fromkeys(("messages", "bad", "connections", "unsent", "renewed"), 0)
        self._hellos = [
            Hello(role, host, incarnation, channel, schema_hash, actors, dict(config))
            for channel in (SMALL, BULK)
        ]
        self._clock_s = clock_s
        security.check(url, "--replay")
        self._context: Any = make_context()
        largest = form.largest_answer_bytes if form is not None else 1 << 18
        self._sockets = [connect(self._context, url, security, largest) for _ in (SMALL, BULK)]
        self._welcomed = [False, False]
        self._hello_s = [-HELLO_S, -HELLO_S]
        self._asked_s: list[float | None] = [None, None]  # the first hello without an answer
        self._heard_s = clock_s()
        self._problem = ""
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    def open(self, timeout_s: float) -> Welcome:
        """Wait until both connections are welcome.

        Raises PeerTimeout, Refused, Fenced, and RunOver where the replay is about to end.
        """

        def opened() -> bool:
            self.do_work()
            if self.over:
                raise RunOver(self.over)
            return self.is_open

        if not self.wait(opened, timeout_s):
            raise PeerTimeout(self.waiting or f"no welcome from the replay at {self.url}")
        assert self.welcome is not None
        return self.welcome

    @property
    def is_open(self) -> bool:
        """Both connections are known to the replay, as far as we know."""
        return all(self._welcomed)

    @property
    def silent_s(self) -> float:
        """Seconds since the replay's last word."""
        return self._clock_s() - self._heard_s

    @property
    def waiting(self) -> str:
        """Whom this client waits for and since when; "" while the replay answers."""
        silent_s = self.silent_s
        if silent_s < _NEWS_S and not self._problem:
            return ""
        why = f": {self._problem}" if self._problem else ""
        return f"waiting for the replay at {self.url} for {silent_s:.0f} s{why}"

    @property
    def fds(self) -> list[int]:
        """Become readable when something may have come; `ready` must be asked after that."""
        return [int(socket.getsockopt(zmq.FD)) for socket in self._sockets]

    def send(self, channel: int, message: Any) -> Any | None:
        """Send without waiting: a tracker (its `done`: the parts are free), or None: not now."""
        if not self._welcomed[channel]:
            return None
        return self._send(channel, message)

    def _send(self, channel: int, message: Any) -> Any | None:
        parts = messages.encode(message)
        tracker = send(self._sockets[channel], parts, CLIENT_COPIED_BYTES)
        if tracker is None:
            self.counts["unsent"] += 1
        return tracker

    def ready(self) -> bool:
        """Something has come, or it is time for a hello."""
        now_s = self._clock_s()
        return any(
            s.getsockopt(zmq.EVENTS) & zmq.POLLIN or now_s - at >= HELLO_S
            for s, at in zip(self._sockets, self._hello_s, strict=True)
        )

    def wait(
        self, ready: Callable[[], object], timeout_s: float, *, also: tuple[int, ...] = ()
    ) -> bool:
        """Return True as soon as `ready()` is true, False when it was not within `timeout_s`.

        also: descriptors that wake it too; `ready` is asked again, and drains them.
        """
        deadline = time.monotonic() + timeout_s
        for fd in also:
            self._poller.register(fd, zmq.POLLIN)
        while not ready():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._poller.poll(int(1000 * min(left_s, 0.1)) + 1)
        return True

    def do_work(self) -> int:
        """Take in what has come, say hello where it is time; how many messages."""
        now_s = self._clock_s()
        for channel, said_s in enumerate(self._hello_s):
            if now_s - said_s >= HELLO_S:
                sent = self._send(channel, self._hellos[channel]) is not None
                self._hello_s[channel] = now_s - (0 if sent else HELLO_S - _RETRY_S)
                if sent and self._asked_s[channel] is None:
                    self._asked_s[channel] = now_s
        done = 0
        for channel, socket in enumerate(self._sockets):
            while done < _AT_MOST:
                parts = receive(socket)
                if parts is None:
                    self._renew_if_silent(channel)
                    break
                done += 1
                self._take(channel, parts)
        return done

    def _renew_if_silent(self, channel: int) -> None:
        """A connection over which no hello is answered may be open at this end alone: another."""
        asked_s = self._asked_s[channel]
        if asked_s is not None and self._clock_s() - asked_s > SILENT_S:
            socket = self._sockets[channel]
            with suppress(zmq.ZMQError):
                socket.disconnect(self.url)
            socket.connect(self.url)
            self._asked_s[channel], self._welcomed[channel] = None, False
            self._hello_s[channel] = -HELLO_S
            self.counts["renewed"] += 1

    def _take(self, channel: int, parts: list[Any]) -> None:
        self.counts["messages"] += 1
        self._asked_s[channel] = None
        self._heard_s = self._clock_s()
        kind = kind_of(parts)
        aside = self.aside.get(kind) if kind is not None else None
        if aside is not None:
            aside(parts)
            return
        message = self.accept(channel, lambda: messages.decode(parts, self.form))
        if isinstance(message, Welcome) and not message.fresh:
            let_grow_if_far(parts[0])

    def accept(self, channel: int, decoded: Callable[[], Any]) -> Any | None:
        """Take in the message that `decoded` returns, or the BadMessage that it raises: None."""
        try:
            message = decoded()
        except OtherVersion as error:
            raise Refused(f"the replay at {self.url}: {error}") from None
        except BadMessage:
            self.counts["bad"] += 1
            for call in self.on_bad:
                call()
            return None
        if isinstance(message, Error):
            self._fault(channel, message)
        elif isinstance(message, Welcome):
            self._welcome(channel, message)
        elif message.kind in self.handlers:
            self.handlers[message.kind](message)
        return message

    def _welcome(self, channel: int, welcome: Welcome) -> None:
        form = self.form
        if form is not None and welcome.chunk != form.layout.chunk:
            raise Refused(
                f"the replay's chunks have {welcome.chunk} transitions, ours "
                f"{form.layout.chunk}: start both from the same config"
            )
        self._problem = ""
        self.welcome = welcome
        self._welcomed[channel] = True
        self.counts["connections"] += welcome.fresh
        for call in self.on_welcome:
            call(welcome, channel)

    def _fault(self, channel: int, error: Error) -> None:
        if error.fault == Fault.FENCED:
            raise Fenced(error.text)
        if error.fault == Fault.OVER:
            self.over = error.text
            return
        if error.fault == Fault.REFUSED:
            raise Refused(f"the replay at {self.url} refuses: {error.text}")
        if error.fault == Fault.HELLO_FIRST:
            self._welcomed[channel] = False
            self._hello_s[channel] = self._clock_s()
            self._send(channel, self._hellos[channel])
        elif error.fault == Fault.FULL:
            self._problem = error.text
        else:
            self.counts["bad"] += 1

    def close(self, *, bye: Bye | None = None) -> None:
        """Hang up; with `bye` the replay gives this host's actor numbers to others."""
        if bye is not None and self._send(SMALL, bye) is not None:
            self._sockets[SMALL].linger = 500
        for socket in self._sockets:
            socket.close()
        self._context.term()
