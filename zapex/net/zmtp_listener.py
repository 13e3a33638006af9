"""zmtp://: a Listener without libzmq, for the same clients and with the same keys as tcp://.

Clients connect with tcp://. There is no thread: messages move in `do_work`, `wait` and `send`.
"""

from collections.abc import Callable, Sequence

from zmq.utils import z85

from zapex.errors import ConfigError, PeerError
from zapex.machine.memory import keep_memory
from zapex.net import addresses
from zapex.net.keys import RoleKeys, Security
from zapex.net.listener import Place, Received, Tracker, no_place
from zapex.net.sockets import (
    SEND_BUFFER_BYTES,
    allow_descriptors,
    let_grow_if_far,
)
from zapex.wire.header import MAX_BUFFERS, Buffer
from zapex.zmtp.connection import Connection, Limits
from zapex.zmtp.connection import Place as ConnectionPlace
from zapex.zmtp.curve import CurveServer
from zapex.zmtp.handshake import Local, Null
from zapex.zmtp.reactor import KernelReactor, Reactor
from zapex.zmtp.router import Router

_ROUTER = Local(b"ROUTER")


def _connection(keys: RoleKeys | None, limits: Limits, place: ConnectionPlace) -> Connection:
    """This end of a new connection. With keys only the clients' keys are admitted."""
    if keys is None:
        return Connection(Null(_ROUTER), limits, place)

    def admit(key: bytes) -> str | None:
        return keys.role_of(z85.encode(key).decode())

    own = z85.decode(keys.public), z85.decode(keys.secret)
    return Connection(CurveServer(_ROUTER, *own, admit), limits, place)


class ZmtpListener:
    """zmtp:// over sockets of the kernel.

    url: where clients connect, tcp://HOST:PORT. large_bytes: a message of this size or more counts
    as queued until it was sent. Raises ConfigError if the address is taken, or not safe without
    keys.
    """

    def __init__(
        self,
        url: str,
        security: Security,
        largest_buffer_bytes: int,
        *,
        large_bytes: int,
        reactor: Reactor | None = None,
    ) -> None:
        security.check(url, "--listen")
        address = addresses.parse(url, "--listen")
        allow_descriptors()
        keep_memory()
        self._secure, self._large_bytes = security.keys is not None, large_bytes
        self._reactor = reactor or KernelReactor()
        host = "0.0.0.0" if address.host == "*" else address.host
        try:
            listener, port = self._reactor.listen(host, address.port, SEND_BUFFER_BYTES)
        except OSError as error:
            self._reactor.close_all()
            raise ConfigError(f"--listen {url} cannot be used: {error.strerror}") from None
        shown = f"[{host}]" if address.is_ipv6 else host
        self.url = f"tcp://{shown}:{port}"
        limits = Limits(largest_buffer_bytes, MAX_BUFFERS)
        self.place: Place = no_place

        def make(peer: bytes) -> Connection:
            place = lambda earlier, nbytes: self.place(peer, earlier, nbytes)  # noqa: E731
            return _connection(security.keys, limits, place)

        self._router = Router(self._reactor, listener, make)
        self._closed = False

    @property
    def on_gone(self) -> Callable[[bytes], object]:
        """Called with a peer whose connection has ended."""
        return self._router.on_gone

    @on_gone.setter
    def on_gone(self, call: Callable[[bytes], object]) -> None:
        self._router.on_gone = call

    @property
    def fds(self) -> list[int] | None:
        """Descriptors that become readable when a message may have come; then call `ready`."""
        return self._reactor.fds

    def ready(self) -> bool:
        """Whether a message has come."""
        if not self._router.ready:
            self._router.poll()
        return self._router.ready

    def wait(self, timeout_s: float) -> None:
        """Wait until a message may have come, at most timeout_s."""
        self._router.poll(0.0 if self._router.ready else timeout_s)

    def do_work(self) -> None:
        """Take in what has come, and send on what waits."""
        self._router.poll()

    def receive(self) -> Received | None:
        """The next message of a peer."""
        found = self._router.receive()
        return None if found is None else Received(*found)

    def role_of(self, received: Received) -> str | None:
        """The role that the sender's key stands for; None if there are no keys."""
        return self._router.user_of(received.peer) if self._secure else None

    def address_of(self, received: Received) -> str:
        """The address of the sender's machine."""
        return self._router.address_of(received.peer)

    def send(self, peer: bytes, buffers: Sequence[Buffer]) -> Tracker | None:
        """Send without waiting; None: not now. Raises PeerError if the peer is gone."""
        try:
            return self._router.send(peer, buffers)
        except KeyError:
            raise PeerError("the peer is gone") from None

    def queued(self, peer: bytes) -> int:
        """How many large messages a peer has not received yet."""
        return self._router.queued(peer, self._large_bytes)

    def settled(self, peer: bytes) -> None:
        """Let the send buffer of an old connection grow, if that helps."""
        let_grow_if_far(self._router.fd_of(peer))

    def held(self) -> list[tuple[int, bytes | int]]:
        """Bytes that are held for each connection, in and out, and its peer."""
        return [*self._router.held()]

    def hang_up(self, connection: bytes | int) -> None:
        """Close a connection of `held`; its peer's earlier messages are dropped."""
        if isinstance(connection, bytes):
            self._router.hang_up(connection)

    def close(self) -> None:
        """Close all connections."""
        if not self._closed:
            self._closed = True
            self._reactor.close_all()
