"""A client's link to the replay: two connections, one hello per second, answers to handlers.

libzmq reconnects by itself. When hellos are not answered, the link makes it reconnect. The replay
answers a hello on a connection that is new to it with `fresh`. Then zmq_transport.py and
sample_source.py send again all messages that were not acknowledged or answered.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zapex.errors import BadMessage, Fenced, OtherVersion, PeerTimeout, Refused, RunOver
from zapex.machine.waiting import rest_until
from zapex.net.keys import Security
from zapex.net.sockets import ClientEnd, Dealers, Tracker
from zapex.wire import messages
from zapex.wire.messages import BULK, SMALL, Bye, Error, Fault, Hello, Welcome
from zapex.wire.protocol import Form, Kind, Message, kind_of

HELLO_S = 1.0
SILENT_S = 5.0  # long enough for a live host that has more work than cores
_RETRY_S = 0.05  # not connected yet
_REPORTED_S = 3.0  # a longer silence is reported to the user
_AT_MOST = 256
_BYE_MS = (500, 0)  # how long a BYE may take, by connection


class ZmqLink:
    """One client's connections; `do_work()` receives messages and says hello when it is due.

    host: one number for one incarnation of this host. actors: how many numbers a relay asks for.
    form: None only to ask for the run's facts (only `open` and `welcome` are used). compressed:
    compress what is pushed, and ask for compressed batches. epoch: of the memory at which this host
    has its numbers already; 0: it has none. dial: makes the connections.

    `do_work` raises Refused or Fenced when the replay does not accept this client any more.
    over: why the run has ended; "" while it runs. server: the replay's incarnation that sent the
    last welcome on SMALL.
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
        compressed: bool = False,
        epoch: int = 0,
        clock_s: Callable[[], float] = time.monotonic,
        dial: Callable[[str, Security, int, int], ClientEnd] = Dealers,
    ) -> None:
        self.url, self.form, self.compressed = url, form, compressed
        self.welcome: Welcome | None = None
        self.over = ""
        self.handlers: dict[Kind, Callable[[Any], None]] = {}
        self.on_welcome: list[Callable[[Welcome, int], None]] = []
        self._raw: dict[int, Callable[[list[Any]], None]] = {}
        self._on_lost: list[Callable[[], None]] = []
        self.counts = dict.fromkeys(("messages", "bad", "connections", "unsent", "renewed"), 0)
        self._hellos = [
            Hello(role, host, incarnation, channel, schema_hash, actors, dict(config), epoch)
            for channel in (SMALL, BULK)
        ]
        self._clock_s = clock_s
        largest = form.largest_answer_bytes if form is not None else 1 << 18
        self._dealers = dial(url, security, largest, 2)
        self._welcomed = [False, False]
        self.server = 0
        self._hello_s = [-HELLO_S, -HELLO_S]
        self._asked_s: list[float | None] = [None, None]  # when the first unanswered hello was sent
        self._heard_s = clock_s()
        self._problem = ""

    def register(
        self,
        handlers: Mapping[Kind, Callable[[Any], None]] | None = None,
        *,
        raw: Mapping[int, Callable[[list[Any]], None]] | None = None,
        on_welcome: Callable[[Welcome, int], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Add an end of this link; each end does this in its constructor.

        Args:
            handlers: what takes the messages of a kind, in `do_work`.
            raw: what takes the buffers of a kind, which the link then does not decode; give
                `reject` the error if they are no message.
            on_welcome: takes each welcome and its connection, in the order of registration.
            on_lost: called when a message was lost that may have been an answer.
        """
        self.handlers.update(handlers or {})
        self._raw.update(raw or {})
        if on_welcome is not None:
            self.on_welcome.append(on_welcome)
        if on_lost is not None:
            self._on_lost.append(on_lost)

    def open(self, timeout_s: float) -> Welcome:
        """Wait until the replay has welcomed both connections.

        Raises PeerTimeout, Refused, Fenced, and RunOver if the replay is about to end.
        """

        def opened() -> bool:
            self.do_work()
            if self.over:
                raise RunOver(self.over)
            return self.is_open

        if not self.wait(opened, timeout_s):
            raise PeerTimeout(self.waiting or f"no answer from the replay at {self.url}")
        assert self.welcome is not None
        return self.welcome

    @property
    def is_open(self) -> bool:
        """Whether the replay knows both connections, as far as this end knows."""
        return all(self._welcomed)

    @property
    def silent_s(self) -> float:
        """Seconds since the replay's last message."""
        return self._clock_s() - self._heard_s

    @property
    def waiting(self) -> str:
        """What this client waits for, and for how long; "" while the replay answers."""
        silent_s = self.silent_s
        if silent_s < _REPORTED_S and not self._problem:
            return ""
        why = f": {self._problem}" if self._problem else ""
        return f"waiting for the replay at {self.url} for {silent_s:.0f} s{why}"

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when a message may have come; then call `ready`."""
        return self._dealers.fds

    def send(self, channel: int, message: Message) -> Tracker | None:
        """Send without waiting. Returns a tracker (`done`: buffers are free); None: not now."""
        if not self._welcomed[channel]:
            return None
        return self._send(channel, message)

    def _send(self, channel: int, message: Message) -> Tracker | None:
        tracker = self._dealers.send(channel, messages.encode(message, self.compressed))
        self.counts["unsent"] += tracker is None
        return tracker

    def ready(self) -> bool:
        """Whether a message has come, or a hello is due."""
        now_s = self._clock_s()
        return self._dealers.ready() or any(now_s - at >= HELLO_S for at in self._hello_s)

    def wait(
        self, ready: Callable[[], object], timeout_s: float, *, also: tuple[int, ...] = ()
    ) -> bool:
        """Return True as soon as `ready()` is true, False when it was not within `timeout_s`.

        also: descriptors that wake it too; then `ready` is called again, and must drain them.
        """
        return rest_until(ready, timeout_s, lambda s: self._dealers.wait(min(s, 0.1), also))

    def do_work(self) -> int:
        """Receive messages, and say hello if it is due. Returns how many messages came."""
        now_s = self._clock_s()
        for channel, said_s in enumerate(self._hello_s):
            if now_s - said_s >= HELLO_S:
                sent = self._send(channel, self._hellos[channel]) is not None
                self._hello_s[channel] = now_s - (0 if sent else HELLO_S - _RETRY_S)
                if sent and self._asked_s[channel] is None:
                    self._asked_s[channel] = now_s
        done = 0
        for channel in (SMALL, BULK):
            while done < _AT_MOST:
                buffers = self._dealers.receive(channel)
                if buffers is None:
                    self._renew_if_silent(channel)
                    break
                done += 1
                self._take(channel, buffers)
        return done

    def _renew_if_silent(self, channel: int) -> None:
        """Reopen a connection whose hellos are not answered: only this end may be open."""
        asked_s = self._asked_s[channel]
        if asked_s is not None and self._clock_s() - asked_s > SILENT_S:
            self._dealers.renew(channel)
            self._asked_s[channel], self._welcomed[channel] = None, False
            self._hello_s[channel] = -HELLO_S
            self.counts["renewed"] += 1

    def _take(self, channel: int, buffers: list[Any]) -> None:
        self.counts["messages"] += 1
        self._asked_s[channel] = None
        self._heard_s = self._clock_s()
        take_raw = self._raw.get(kind_of(buffers))
        if take_raw is not None:
            take_raw(buffers)
            return
        try:
            message = messages.decode(buffers, self.form)
        except BadMessage as error:
            self.reject(error)
            return
        if isinstance(message, Error):
            self._fault(channel, message)
        elif isinstance(message, Welcome):
            self._welcome(channel, message)
            if not message.fresh:
                self._dealers.settled(buffers)
        elif message.kind in self.handlers:
            self.handlers[message.kind](message)

    def reject(self, error: BadMessage) -> None:
        """A message could not be decoded. Raises Refused if the replay has another version."""
        if isinstance(error, OtherVersion):
            raise Refused(f"the replay at {self.url}: {error}")
        self.counts["bad"] += 1
        for call in self._on_lost:
            call()

    def _welcome(self, channel: int, welcome: Welcome) -> None:
        form = self.form
        if form is not None and welcome.chunk != form.layout.chunk:
            raise Refused(
                f"the replay's chunks have {welcome.chunk} transitions, ours "
                f"{form.layout.chunk}: start both from the same config"
            )
        if channel == SMALL:
            self.server = welcome.incarnation
        elif welcome.incarnation < self.server:
            return  # read late: of a process before that one, perhaps of another memory
        self._problem = ""
        self.welcome = welcome
        if self._hellos[channel].epoch != welcome.epoch:
            self._hellos = [replace(hello, epoch=welcome.epoch) for hello in self._hellos]
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
        """Disconnect; after a `bye` the replay may give this host's actor numbers to others."""
        said = bye is not None and self._send(SMALL, bye) is not None
        self._dealers.close(_BYE_MS if said else ())
