"""A network without sockets: a Listener and a ClientEnd (net/sockets.py) over simulated time.

A connection is two pipes. A message waits until it departs (bandwidth), flies (delay) and waits
until it is read. Between two machines a path may be blocked, in one direction or both: what is
under way waits, and after TCP's patience both ends give up, each at its own time. A process that
dies ends its connections; a machine that loses its power does not say so.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent

from tests.simulation.clock import Timeline
from tests.simulation.truth import Violation
from zapex.errors import PeerError

_WAITING = 128  # messages of a pipe, with those that were not read
_PATIENCE_S = 10.0, 16.0  # TCP_MAXRT, and keepalive
_RECONNECT_S = 0.1, 1.0
_LOOK_S = 1.0


@dataclass(eq=False)
class Sent:
    """Follows a message; `done`: its buffers are released."""

    done: bool = False


@dataclass
class Path:
    """The way from one machine to another."""

    blocked: bool = False
    since: int = 0  # counts the changes
    delay_s: tuple[float, float] = (0.0001, 0.002)
    bytes_per_s: float = 1e9
    held: list["Pipe"] = field(default_factory=list)


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, net: "Network", path: Path, inbox: deque[Any], name: str, peer: bytes, reader: Any
    ) -> None:
        self.net, self.path, self.inbox, self.name, self.peer = net, path, inbox, name, peer
        self._reader = reader  # the process
        self.waiting = 0  # sent and not read
        self.leaving: deque[tuple[list[Any], list[bytes], Sent]] = deque()  # and as it was sent
        self.flying: deque[list[bytes]] = deque()
        self.dead = False  # nothing arrives any more
        self._busy = False
        self._last_s = 0.0

    def send(self, parts: Sequence[Any], *, copy: bool) -> Sent | None:
        """Takes a message; None: too many wait."""
        if self.waiting >= _WAITING:
            return None
        self.waiting += 1
        sent, now = Sent(copy), [bytes(part) for part in parts]
        self.leaving.append((now if copy else list(parts), now, sent))
        if not self._busy:
            self._busy = True
            self._depart_later()
        return sent

    def _depart_later(self) -> None:
        nbytes = sum(len(part) for part in self.leaving[0][0])
        self.net.time.after(nbytes / self.path.bytes_per_s, self._depart)

    def _depart(self) -> None:
        if self.dead or not self.leaving:
            self._busy = False
            return
        if self.path.blocked:
            self.path.held.append(self)
            return
        parts, as_sent, sent = self.leaving.popleft()
        leaves = [bytes(part) for part in parts]  # as they are now
        if leaves != as_sent:
            raise Violation(f"torn: a message of {self.name} changed before it left")
        self.flying.append(leaves)
        sent.done = True
        time = self.net.time
        arrives_s = max(self._last_s, time.now_s + time.rng.uniform(*self.path.delay_s))
        self._last_s = arrives_s
        time.after(arrives_s - time.now_s, self._arrive)
        self._busy = bool(self.leaving)
        if self._busy:
            self._depart_later()

    def go_on(self) -> None:
        """The path is whole again."""
        self._depart() if self._busy else self._arrive()

    def _arrive(self) -> None:
        if self.dead or not self.flying:
            return
        if self.path.blocked:
            self.path.held.append(self)
            return
        parts = self.flying.popleft()
        self.net.time.history.append(
            f"{self.net.time.now_s:.6f} {self.name} {parts[0][6]} {sum(map(len, parts))}"
        )
        self.inbox.append((self, parts))
        self._reader.wake()

    def end(self) -> None:
        """Nothing leaves or arrives any more; what has arrived may be read."""
        self.dead = True
        self.drop()

    def drop(self) -> None:
        """What has not left is not sent any more, nor read."""
        for _, _, sent in self.leaving:
            sent.done = True
        self.leaving.clear()


class Connection:
    """A client's connection to a listener. Each end knows by itself whether it is up."""

    def __init__(self, net: "Network", dealers: "SimDealers", number: int, to: "SimListener"):
        self.net, self.dealers, self.number, self.listener = net, dealers, number, to
        net.peers += 1
        self.peer = net.peers.to_bytes(8, "big")
        here, there = dealers.machine, to.machine
        name = f"{dealers.name}.{number}"
        self.up = Pipe(net, net.path(here, there), to.inbox, f"{name}>", self.peer, to.process)
        inbox, back = dealers.inboxes[number], net.path(there, here)
        self.down = Pipe(net, back, inbox, f"{name}<", b"", dealers.process)
        self.client_up = self.server_up = True
        to.connections[self.peer] = self
        net.connections.append(self)

    def end_client(self, *, silent: bool = False) -> None:
        """The client's end is gone; the other end notices it later."""
        if not self.client_up:
            return
        self.client_up = False
        self.down.end()
        if silent or self.up.dead:
            self.up.end()
        self.net.notice(self, self.up.path, self.end_server, silent)

    def end_server(self, *, silent: bool = False) -> None:
        """The listener's end is gone; the other end notices it later."""
        if not self.server_up:
            return
        self.server_up = False
        self.up.end()
        self.listener.lost(self)
        if silent:
            self.down.end()
        self.net.notice(self, self.down.path, self.end_client, silent)
        if not self.client_up and self in self.net.connections:
            self.net.connections.remove(self)


class Network:
    """All machines' paths, listeners and connections.

    copies: what is sent is copied at once; else it is read when it departs, as libzmq does with
    large buffers. places: listeners receive into the memory that their owner names.
    """

    def __init__(self, time: Timeline, *, copies: bool, places: bool) -> None:
        self.time, self.copies, self.places = time, copies, places
        self.paths: dict[tuple[str, str], Path] = {}
        self.listeners: dict[str, SimListener] = {}
        self.connections: list[Connection] = []
        self.peers = 0
        self.ghost = False  # the process that runs now is dead already: nothing of it leaves

    def path(self, here: str, there: str) -> Path:
        """The way between two machines."""
        return self.paths.setdefault((here, there), Path())

    def block(self, here: str, there: str, *, blocked: bool) -> None:
        """Nothing passes from here to there, or all passes again."""
        path = self.path(here, there)
        if path.blocked == blocked:
            return
        path.blocked = blocked
        path.since += 1
        if not blocked:
            held, path.held = path.held, []
            for pipe in held:
                pipe.go_on()
            return
        since = path.since
        for one in [c for c in self.connections if path in (c.up.path, c.down.path)]:
            for end in (one.end_client, one.end_server):
                self.time.soon(*_PATIENCE_S, lambda e=end: path.since == since and e(silent=True))

    def reset(self, here: str, there: str) -> None:
        """Every connection between the two ends."""
        for one in list(self.connections):
            if {one.dealers.machine, one.listener.machine} == {here, there}:
                one.end_client()
                one.end_server()

    def notice(self, one: Connection, path: Path, end: Any, silent: bool) -> None:
        """The other end learns that an end is gone, after what is under way has arrived."""
        pipe = one.up if path is one.up.path else one.down
        if not silent:
            pipe.drop()
        if silent or path.blocked:
            self.time.soon(*_PATIENCE_S, lambda: end(silent=True))
            return
        self.time.after(max(0.0, pipe._last_s - self.time.now_s) + 0.001, end)


class SimDealers:
    """A ClientEnd."""

    def __init__(self, net: Network, process: Any, url: str, connections: int) -> None:
        self._net, self.process, self._url = net, process, url
        self.machine, self.name = process.host.name, process.title
        self.inboxes: list[deque[Any]] = [deque() for _ in range(connections)]
        self._connections: list[Connection | None] = [None] * connections
        self._closed = False
        self.fds: list[int] = []
        for number in range(connections):
            self._connect_later(number, 0.001, 0.02)

    def _connect_later(self, number: int, *when_s: float) -> None:
        self._net.time.soon(*when_s, lambda: self._connect(number))

    def _current(self, number: int) -> Connection | None:
        one = self._connections[number]
        if one is not None and not one.client_up:
            one = self._connections[number] = None
            self._connect_later(number, *_RECONNECT_S)
        return one

    def _connect(self, number: int) -> None:
        if self._closed or self._current(number) is not None:
            return
        net, listener = self._net, self._net.listeners.get(self._url)
        if listener is None or any(
            net.path(*way).blocked
            for way in ((self.machine, listener.machine), (listener.machine, self.machine))
        ):
            self._connect_later(number, *_RECONNECT_S)
            return
        net.time.say(f"{self.name}.{number} connects")
        self._connections[number] = Connection(net, self, number, listener)

    def ready(self) -> bool:
        return any(self.inboxes)

    def wait(self, timeout_s: float, also: Sequence[int] = ()) -> None:
        getcurrent().wait()

    def receive(self, number: int) -> list[Any] | None:
        self._current(number)
        if not self.inboxes[number]:
            return None
        pipe, parts = self.inboxes[number].popleft()
        pipe.waiting -= 1
        return [memoryview(part) for part in parts]

    def send(self, number: int, buffers: Sequence[Any]) -> Sent | None:
        if self._net.ghost:
            return Sent(True)
        one = self._current(number)
        return None if one is None else one.up.send(buffers, copy=self._net.copies)

    def settled(self, buffers: Sequence[Any]) -> None: ...

    def renew(self, number: int) -> None:
        one = self._connections[number]
        if one is not None and not self._net.ghost:
            one.end_client()
            self._connections[number] = None
            self._connect_later(number, 0.001, 0.02)

    def close(self, linger_ms: Sequence[int] = (), *, silent: bool = False) -> None:
        self._closed = True
        for one in self._connections:
            if one is not None:
                one.end_client(silent=silent)


class SimListener:
    """A Listener."""

    def __init__(self, net: Network, process: Any, url: str, large_bytes: int) -> None:
        self._net, self.process, self.url, self._large_bytes = net, process, url, large_bytes
        self.machine = process.host.name
        self.place: Any = None
        self.inbox: deque[Any] = deque()
        self.connections: dict[bytes, Connection] = {}
        self._queues: dict[bytes, deque[tuple[Pipe, list[bytes]]]] = {}
        self._hung_up: set[bytes] = set()
        self._partial: dict[bytes, list[Any]] = {}  # the parts that have come of a message
        self._gone: list[bytes] = []
        self.fds: list[int] | None = None
        assert url not in net.listeners
        net.listeners[url] = self

    def ready(self) -> bool:
        return bool(self.inbox) or any(self._queues.values())

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("nothing waits here")

    def do_work(self) -> None: ...

    def lost(self, one: Connection) -> None:
        """A connection has ended; what has come of it can be read."""
        self._partial.pop(one.peer, None)
        self._net.time.soon(0, _LOOK_S, lambda: self._gone.append(one.peer))

    def gone(self) -> list[bytes]:
        gone, self._gone = self._gone, []
        for peer in gone:
            self.connections.pop(peer, None)
        return gone

    def receive(self) -> tuple[bytes, list[Any]] | None:
        """The next message, of each peer in turn; of some only a part has come."""
        while self.inbox:
            pipe, parts = self.inbox.popleft()
            self._queues.setdefault(pipe.peer, deque()).append((pipe, parts))
        for peer in list(self._queues):
            queue = self._queues.pop(peer)
            if peer in self._hung_up or not queue:
                continue
            self._queues[peer] = queue
            received = self._received(peer, queue[0][1])
            if received is not None:
                queue.popleft()[0].waiting -= 1
                return peer, received
        return None

    def _received(self, peer: bytes, parts: list[bytes]) -> list[Any] | None:
        """A message, in the memory that `place` names for its parts; None: not all of it."""
        if not self._net.places or self.place is None:
            return [memoryview(part) for part in parts]
        received = self._partial.setdefault(peer, [memoryview(parts[0])])
        whole = self._net.time.rng.random() < 0.8
        for part in parts[len(received) :]:
            memory = self.place(peer, received, len(part))
            if memory is not None:
                memory[:] = part
            received.append(memoryview(part) if memory is None else memory)
            if not whole:
                break
        return self._partial.pop(peer) if len(received) == len(parts) else None

    def role_of(self, peer: bytes, buffers: Sequence[Any]) -> None:
        return None

    def address_of(self, peer: bytes, buffers: Sequence[Any]) -> str:
        return ""

    def send(self, peer: bytes, buffers: Sequence[Any]) -> Sent | None:
        if self._net.ghost:
            return Sent(True)
        one = self.connections.get(peer)
        if one is None or not one.server_up:
            raise PeerError("the peer is gone")
        return one.down.send(buffers, copy=self._net.copies)

    def queued(self, peer: bytes) -> int:
        one = self.connections.get(peer)
        large = (
            (sum(map(len, parts)) >= self._large_bytes for parts, _, _ in one.down.leaving)
            if one
            else ()
        )
        return sum(large)

    def settled(self, peer: bytes) -> None: ...

    def held(self) -> list[tuple[int, bytes | int]]:
        return []

    def hang_up(self, connection: bytes | int) -> None:
        one = self.connections.get(connection) if isinstance(connection, bytes) else None
        if one is not None and not self._net.ghost:
            self._hung_up.add(one.peer)
            one.end_server()

    def close(self, *, silent: bool = False) -> None:
        if self._net.listeners.get(self.url) is self:
            del self._net.listeners[self.url]
            for one in list(self.connections.values()):
                one.end_server(silent=silent)
