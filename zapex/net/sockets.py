"""Listeners and clients' sockets: their limits, which peers may connect, sending without waiting.

Only this module knows zmq.
"""

import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import zmq

from zapex.errors import ConfigError, PeerError
from zapex.fstack import Setup
from zapex.machine.memory import keep_memory
from zapex.machine.resources import open_files_limit
from zapex.machine.tcp import (
    SEND_BUFFER_BYTES,
    let_grow_if_far,
    received_bytes,
)
from zapex.net import addresses
from zapex.net.keys import SERVER, RoleKeys, Security
from zapex.wire.protocol import MAX_BUFFERS, Buffer

_DOMAIN = b"zapex"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_HANDSHAKE_S = 10.0
_LOOK_S = 1.0  # between two looks which peers are gone
# A smaller buffer is copied: pyzmq takes longer to report that a shared buffer is free again. This
# is true up to 1 MiB, but a server's guard sees only shared buffers that wait for a peer.
_COPIED_BYTES, CLIENT_COPIED_BYTES = 1 << 16, 1 << 20
_ENVELOPE_BYTES = 64  # what CURVE adds to a buffer, and libzmq counts with it
_MESSAGES_PER_PEER = 64  # messages that may wait, in and out, for each connection
_UNKNOWN = 1 << 40  # bytes received over ipc://, which the kernel does not count: assume the worst
_REMEMBERED = 4096  # peers whose connection was closed
_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    # libzmq's own heartbeats abort the process when a peer is lost and its messages are unread
    # (docs/decisions.md). zapex's heartbeat is the hello. The kernel's is below.
    zmq.HEARTBEAT_IVL: 0,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 10_000,
    zmq.HANDSHAKE_IVL: int(1000 * _HANDSHAKE_S),
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2000,
    zmq.CONNECT_TIMEOUT: 5000,
    zmq.SNDHWM: _MESSAGES_PER_PEER,
    zmq.RCVHWM: _MESSAGES_PER_PEER,
    zmq.SNDBUF: SEND_BUFFER_BYTES,
}


class Tracker(Protocol):
    """Follows a message that was sent."""

    @property
    def done(self) -> bool:
        """Whether the transport has released its buffers."""


Received = tuple[bytes, list[Any]]
"""The id of a connection (a "peer"; each one has its own), and the buffers of its message."""
Place = Callable[[bytes, Sequence[Buffer], int], Buffer | None]
"""Memory for the next buffer of a message: its peer, the buffers before it, its bytes.

None: the transport allocates it.
"""


class Listener(Protocol):
    """The listening end of a transport. Only `wait` blocks.

    place: called for the memory of a message's buffers, where the transport can receive into the
    caller's memory; None: do not ask.
    """

    url: str
    place: Place | None

    @property
    def fds(self) -> list[int] | None:
        """Descriptors that become readable when a message may have come; then call `ready`.

        None: there is none, so `ready` must be called all the time.
        """

    def ready(self) -> bool:
        """Whether a message has come."""

    def wait(self, timeout_s: float) -> None:
        """Wait until a message may have come, at most timeout_s."""

    def do_work(self) -> object:
        """Regular work in each duty cycle: admit new peers."""

    def gone(self) -> list[bytes]:
        """The peers whose connections have ended since the last call."""

    def receive(self) -> Received | None:
        """The next message, or None."""

    def role_of(self, peer: bytes, buffers: Sequence[Any]) -> str | None:
        """The role that the key of a message's sender stands for; None if there are no keys."""

    def address_of(self, peer: bytes, buffers: Sequence[Any]) -> str:
        """The address of the machine of a message's sender; "" if it is not known."""

    def send(self, peer: bytes, buffers: Sequence[Buffer]) -> Tracker | None:
        """Send without waiting; None: not now. Raises PeerError if the peer is gone."""

    def queued(self, peer: bytes) -> int:
        """How many large messages a peer has not received yet."""

    def settled(self, peer: bytes) -> None:
        """This connection is no longer new: buffers may adapt to the distance of the peer."""

    def held(self) -> list[tuple[int, bytes | int]]:
        """Bytes that are held for each connection, in and out, and its peer.

        A connection without a whole message so far has a number in place of a peer.
        """

    def hang_up(self, connection: bytes | int) -> None:
        """Close a connection of `held`; its peer's earlier messages are dropped.

        After this nothing is written into memory that `place` has named for it.
        """

    def close(self) -> None:
        """Close all connections."""


class ClientEnd(Protocol):
    """A client's connections to one URL, by their numbers; each reconnects by itself."""

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when a message may have come; then call `ready`."""

    def ready(self) -> bool:
        """Whether a message has come."""

    def wait(self, timeout_s: float, also: Sequence[int] = ()) -> None:
        """Wait until a message may have come, here or on `also`, at most timeout_s."""

    def receive(self, number: int) -> list[Any] | None:
        """The next message that came over a connection, or None."""

    def send(self, number: int, buffers: Sequence[Buffer]) -> Tracker | None:
        """Send without waiting; None: not now."""

    def settled(self, buffers: Sequence[Any]) -> None:
        """The connection of this message is no longer new."""

    def renew(self, number: int) -> None:
        """Close a connection, and open another."""

    def close(self, linger_ms: Sequence[int] = ()) -> None:
        """Disconnect; keep sending queued messages, at most this long for each connection."""


def listen(
    url: str,
    security: Security,
    largest_buffer_bytes: int,
    *,
    large_bytes: int = _COPIED_BYTES,
    fstack: Setup | None = None,
) -> Listener:
    """A listener at a URL of any scheme.

    Args:
        url: tcp://, ipc://, zmtp:// or fstack://. The listener's `url` is where clients connect.
        security: the server's keys.
        largest_buffer_bytes: a peer that sends a larger buffer is disconnected.
        large_bytes: a message of this size or more counts in `queued`.
        fstack: what fstack:// needs.

    Raises:
        ConfigError: the address is taken, or not safe without keys.
    """
    security.check(url, "--listen")
    if not url.startswith(("zmtp:", "fstack:")):
        return RouterListener(url, security, largest_buffer_bytes, large_bytes=large_bytes)
    from zapex.fstack.listener import Keys, ZmtpListener, reactor_of
    from zapex.fstack.zmtp import Limits

    address, keys = addresses.parse(url, "--listen"), None
    if security.keys is not None:
        from zmq.utils import z85

        role_of, own = security.keys.role_of, security.keys
        keys = Keys(
            z85.decode(own.public),
            z85.decode(own.secret),
            lambda key: role_of(z85.encode(key).decode()),
        )
    keep_memory()
    open_files_limit()
    try:
        return ZmtpListener(
            reactor_of(fstack if url.startswith("fstack:") else None),
            "0.0.0.0" if address.host == "*" else address.host,
            address.port,
            keys,
            Limits(largest_buffer_bytes, MAX_BUFFERS),
            large_bytes=large_bytes,
        )
    except OSError as error:
        raise ConfigError(f"--listen {url} cannot be used: {error.strerror}") from None


def _inode(fd: int) -> int:
    """Of an open descriptor; the kernel gives its number again, but not its inode."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return -1


class _Connections:
    """The connections of the socket that listens at `url`, as the kernel sees them.

    libzmq limits the size of each buffer and the number of waiting messages. It limits neither
    their bytes nor a message that never ends. So this class computes how many bytes libzmq holds
    for a connection: received by the kernel, minus returned by `receive`, plus sent and not yet
    released. The process's other connections are not touched.

    A peer is known after its first message. Later the kernel may reuse the descriptor of its
    connection for another connection.
    """

    def __init__(self, url: str) -> None:
        scheme, _, place = url.partition("://")
        self._address: int | str = int(place.rpartition(":")[2]) if scheme == "tcp" else place
        self._taken: dict[int, tuple[bytes, int]] = {}  # descriptor -> peer, bytes received from it
        self._fds: dict[bytes, tuple[int, int]] = {}  # peer -> descriptor, inode of the socket
        self._queued: dict[bytes, deque[tuple[int, Tracker]]] = {}
        self._ended: dict[bytes, None] = {}

    def took(self, peer: bytes, fd: int, nbytes: int) -> bytes | None:
        """Record a message. Returns the gone peer that had the descriptor before, or None."""
        known, taken = self._taken.get(fd, (peer, 0))
        self._taken[fd] = peer, nbytes + (taken if known == peer else 0)
        if peer not in self._fds:
            self._fds[peer] = fd, _inode(fd)
        if known == peer:
            return None
        self._forget(known)
        return known

    def is_ended(self, peer: bytes) -> bool:
        """Whether this end has closed the peer's connection."""
        return peer in self._ended

    def fd_of(self, peer: bytes) -> int:
        """The descriptor of the peer's connection; -1: none is known."""
        return self._fds.get(peer, (-1, 0))[0]

    def sent(self, peer: bytes, nbytes: int, tracker: Tracker) -> None:
        """Record a large message that was sent."""
        self._queued.setdefault(peer, deque()).append((nbytes, tracker))
        self.queued(peer)

    def queued(self, peer: bytes) -> int:
        """Large messages to a peer that are not released yet."""
        queue = self._queued.get(peer) or deque()
        while queue and queue[0][1].done:
            queue.popleft()
        return len(queue)

    def gone(self) -> list[bytes]:
        """Peers whose connections have ended since the last call."""
        # The guard's thread closes connections meanwhile.
        known = list(self._fds.items())
        found = [peer for peer, (fd, inode) in known if inode == -1 or _inode(fd) != inode]
        for peer in found:
            self._forget(peer)
        return found

    def _forget(self, peer: bytes) -> None:
        self._fds.pop(peer, None)
        self._queued.pop(peer, None)

    def hang_up(self, connection: bytes | int) -> None:
        """Close a connection: a peer's, or one by its descriptor."""
        if isinstance(connection, int):
            self._shut(connection)
            return
        fd = self.fd_of(connection)
        self._ended[connection] = None
        while len(self._ended) > _REMEMBERED:
            self._ended.pop(next(iter(self._ended)), None)
        self._queued.pop(connection, None)
        if self._taken.get(fd, (b"", 0))[0] == connection:
            self._taken.pop(fd, None)
            self._shut(fd)

    def _shut(self, fd: int) -> None:
        connection = self._handle(fd)
        if connection is not None:
            with connection, suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _handle(self, fd: int) -> socket.socket | None:
        """A second handle of one of these connections; None for any other descriptor."""
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                return None
            found = socket.socket(fileno=os.dup(fd))
        except OSError:
            return None
        with suppress(OSError):
            found.getpeername()  # the listening socket has none
            name = found.getsockname()
            if (name[1] if isinstance(name, tuple) else name) == self._address:
                return found
        found.close()
        return None

    def held(self) -> list[tuple[int, bytes | int]]:
        """Bytes held for each connection, in and out, and its peer, or else its descriptor."""
        found: list[tuple[int, bytes | int]] = []
        for fd in map(int, os.listdir("/proc/self/fd")):
            connection = self._handle(fd)
            if connection is not None:
                peer, taken = self._taken.get(fd, (b"", 0))
                with connection:
                    nbytes = self._waiting(peer) + _received(connection) - taken
                found.append((max(0, nbytes), peer or fd))
        return found

    def _waiting(self, peer: bytes) -> int:
        queue = list(self._queued.get(peer, ()))
        return sum(nbytes for nbytes, tracker in queue if not tracker.done)


def _received(connection: socket.socket) -> int:
    try:
        return received_bytes(connection)
    except OSError:
        return _UNKNOWN


class ZapHandler:
    """The ZAP handler of one context, run by a duty cycle: which peers may connect, in which role.

    libzmq asks it before it reads a peer's first message. With keys a peer has the role of its key.
    Without keys every peer that speaks ZMTP 3 is admitted. A peer that sends other bytes
    fails earlier, in libzmq's handshake.
    """

    def __init__(self, context: "zmq.Context[Any]", keys: RoleKeys | None) -> None:
        self._keys = keys
        self.refused = 0
        self.socket: Any = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def do_work(self, at_most: int = 64) -> int:
        """Answer all requests."""
        for done in range(at_most):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return done
            self.socket.send_multipart(self.answer(request))
        return at_most

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The answer to one request of libzmq's."""
        number = request[1] if len(request) > 1 else b""
        role = self._role(request)
        if role is None:
            self.refused += 1
            return [b"1.0", number, b"400", b"not admitted", b"", b""]
        return [b"1.0", number, b"200", b"OK", role.encode(), b""]

    def _role(self, request: list[bytes]) -> str | None:
        """The role of a peer, "any" without keys, or None if it may not connect."""
        if len(request) < 6 or request[0] != b"1.0" or request[2] != _DOMAIN:
            return None
        mechanism, credentials = request[5], request[6:]
        if self._keys is None:
            return "any" if mechanism == b"NULL" else None
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return None
        from zmq.utils import z85

        return self._keys.role_of(z85.encode(credentials[0]).decode())

    def close(self) -> None:
        """Release the endpoint."""
        self.socket.close()


class _Context(zmq.Context[Any]):
    """A context that does not need to be closed.

    pyzmq's context keeps weak references to its sockets. If the garbage collector collects it in
    one cycle with them, it finds no sockets, leaves them open, and waits for them forever.
    """

    _made: tuple[Any, ...] = ()

    def socket(self, *args: Any, **more: Any) -> Any:
        """A socket that is closed with its context, in any order of collection."""
        made = super().socket(*args, **more)
        self._made += (made,)
        return made

    def __del__(self) -> None:
        for made in self._made:
            made.close(linger=0)
        super().__del__()


def make_context() -> "zmq.Context[Any]":
    """A context of sockets; the memory of large messages is kept."""
    keep_memory()
    return _Context()


def _router(
    context: "zmq.Context[Any]", url: str, security: Security, largest_buffer_bytes: int
) -> Any:
    """A bound ROUTER. Its ZapHandler must exist. Raises ZMQError if the address is in use."""
    open_files_limit()
    router = context.socket(zmq.ROUTER)
    _set_options(router, security, largest_buffer_bytes, {zmq.ROUTER_MANDATORY: 1})
    router.zap_domain = _DOMAIN
    # Without this option a peer is admitted when no handler answers.
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    router.curve_server = security.keys is not None
    router.ipv6 = addresses.parse(url, "--listen").is_ipv6
    router.bind(url)
    return router


class _Sockets:
    """Sockets of one context, with one poller for all."""

    def _watch(self, *sockets: Any) -> None:
        self._watched, self._poller = sockets, zmq.Poller()
        for one in sockets:
            self._poller.register(one, zmq.POLLIN)

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when a message may have come; then call `ready`."""
        return [int(one.getsockopt(zmq.FD)) for one in self._watched]

    def ready(self) -> bool:
        """Whether a message has come."""
        return any(one.getsockopt(zmq.EVENTS) & zmq.POLLIN for one in self._watched)

    def wait(self, timeout_s: float, also: Sequence[int] = ()) -> None:
        """Wait until a message may have come, here or on `also`, at most timeout_s."""
        for fd in also:
            self._poller.register(fd, zmq.POLLIN)
        self._poller.poll(int(1000 * timeout_s) + 1)


class RouterListener(_Sockets):
    """tcp:// and ipc://: a ROUTER, as a Listener.

    Peers are libzmq's routing ids. Each connection gets a new one, so no peer can take another's
    place. large_bytes: a message of this size or more counts as queued while libzmq keeps it.
    Raises ConfigError if the address is taken.
    """

    def __init__(
        self, url: str, security: Security, largest_buffer_bytes: int, *, large_bytes: int
    ) -> None:
        self._secure, self._large_bytes = security.keys is not None, large_bytes
        self._context = make_context()
        self.zap = ZapHandler(self._context, security.keys)
        try:
            self._router = _router(self._context, url, security, largest_buffer_bytes)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"--listen {url} cannot be used: {error.strerror}") from None
        self.url: str = self._router.last_endpoint.decode()
        self._gone: list[bytes] = []
        self.place: Place | None = None  # libzmq never asks
        self._connections = _Connections(self.url)
        self._look_s = 0.0
        self.queued, self.held = self._connections.queued, self._connections.held
        self.hang_up = self._connections.hang_up
        self._watch(self._router, self.zap.socket)

    def do_work(self) -> int:
        """Admit or refuse new peers."""
        return self.zap.do_work()

    def gone(self) -> list[bytes]:
        """The peers whose connections have ended since the last call."""
        found, now_s = self._gone, time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            found += self._connections.gone()
        self._gone = []
        return found

    def receive(self) -> Received | None:
        """The next message of a peer that is still connected."""
        while (buffers := receive(self._router)) is not None:
            first, *rest = buffers
            peer = first.bytes
            if self._connections.is_ended(peer):
                continue
            nbytes = sum(map(len, buffers))
            gone = self._connections.took(peer, first.get(zmq.SRCFD), nbytes)
            if gone is not None:
                self._gone.append(gone)
            return peer, rest
        return None

    def role_of(self, peer: bytes, buffers: Sequence[Any]) -> str | None:
        """The role that the sender's key stands for; None if there are no keys."""
        return str(buffers[-1].get("User-Id")) if self._secure else None

    def address_of(self, peer: bytes, buffers: Sequence[Any]) -> str:
        """The IP address of the sender's machine; "" over ipc://."""
        with suppress(zmq.ZMQError):
            return str(buffers[-1].get("Peer-Address"))
        return ""

    def send(self, peer: bytes, buffers: Sequence[Buffer]) -> Tracker | None:
        """Send without waiting; None: not now. Raises PeerError if the peer is gone."""
        tracker = send(self._router, [peer, *buffers])
        if tracker is not None:
            nbytes = sum(buffer.nbytes for buffer in buffers)
            if nbytes >= self._large_bytes:
                self._connections.sent(peer, nbytes, tracker)
        return tracker

    def settled(self, peer: bytes) -> None:
        """Let the send buffer of an old connection grow, if that helps."""
        let_grow_if_far(self._connections.fd_of(peer))

    def close(self) -> None:
        """Close all connections."""
        self._router.close()
        self.zap.close()
        self._context.destroy(linger=0)


class Dealers(_Sockets):
    """A ClientEnd over libzmq's DEALER sockets."""

    def __init__(
        self, url: str, security: Security, largest_buffer_bytes: int, connections: int
    ) -> None:
        security.check(url, "--replay")
        self._url = url
        self._context = make_context()
        self._dealers = [
            _dealer(self._context, url, security, largest_buffer_bytes) for _ in range(connections)
        ]
        self._watch(*self._dealers)

    def receive(self, number: int) -> list[Any] | None:
        """The next message that came over a connection."""
        return receive(self._dealers[number])

    def send(self, number: int, buffers: Sequence[Buffer]) -> Tracker | None:
        """Send without waiting; None: not now."""
        return send(self._dealers[number], buffers, CLIENT_COPIED_BYTES)

    def settled(self, buffers: Sequence[Any]) -> None:
        """The connection of this message is no longer new: its send buffer may grow."""
        let_grow_if_far(buffers[0].get(zmq.SRCFD))

    def renew(self, number: int) -> None:
        """Close a connection, and open another."""
        with suppress(zmq.ZMQError):
            self._dealers[number].disconnect(self._url)
        self._dealers[number].connect(self._url)

    def close(self, linger_ms: Sequence[int] = ()) -> None:
        """Disconnect; keep sending queued messages, at most this long for each connection."""
        for dealer, linger in zip(self._dealers, linger_ms, strict=False):
            dealer.linger = linger
        for dealer in self._dealers:
            dealer.close()
        self._context.term()


def _dealer(
    context: "zmq.Context[Any]", url: str, security: Security, largest_buffer_bytes: int
) -> Any:
    """A DEALER that connects and reconnects by itself; the URL is checked."""
    dealer = context.socket(zmq.DEALER)
    # IMMEDIATE: without a connected peer a message is not queued; else it could arrive late and
    # twice.
    _set_options(dealer, security, largest_buffer_bytes, {zmq.IMMEDIATE: 1})
    if security.keys is not None:
        dealer.curve_serverkey = security.keys.publics[SERVER].encode()
    dealer.ipv6 = addresses.parse(url, "--replay").is_ipv6
    dealer.connect(url)
    return dealer


def _set_options(socket: Any, security: Security, largest: int, more: dict[int, int]) -> None:
    if security.keys is not None:
        socket.curve_publickey = security.keys.public.encode()
        socket.curve_secretkey = security.keys.secret.encode()
    limit = {zmq.MAXMSGSIZE: largest + _ENVELOPE_BYTES}
    for option, value in (_OPTIONS | limit | more).items():
        socket.setsockopt(option, value)


def receive(socket: Any) -> list[Any] | None:
    """The buffers (zmq.Frame) of the next message, at most MAX_BUFFERS + 2; or None.

    Further buffers are dropped when they come, so a peer cannot make the list very long.
    """
    try:
        parts = [socket.recv(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None
    more = parts[0].more
    while more:
        part = socket.recv(zmq.NOBLOCK, copy=False)
        more = part.more
        if len(parts) < MAX_BUFFERS + 2:
            parts.append(part)
    return parts


def send(socket: Any, parts: Sequence[Any], copied_bytes: int = _COPIED_BYTES) -> Any | None:
    """Send without waiting, and without copying buffers of `copied_bytes` or more.

    Returns a tracker whose `done` says that libzmq has released all buffers; None if the message
    could not be sent. Raises PeerError if the peer is gone.
    """
    last = len(parts) - 1
    shared = []  # send_multipart would return only the last buffer's tracker
    try:
        for i, part in enumerate(parts):
            flags = zmq.NOBLOCK | (zmq.SNDMORE if i < last else 0)
            if len(part) < copied_bytes:
                socket.send(part, flags)
            else:
                shared.append(socket.send(part, flags, copy=False, track=True))
    except zmq.Again:
        return None
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise PeerError("the peer is gone") from None
        raise
    return zmq.MessageTracker(*shared)
