"""zmtp:// and fstack://: a Listener without libzmq, for the same clients and keys as tcp://.

Every connection is a peer with an id of its own, and none can delay another. The listener reads
from each peer in turn and stops while many of that peer's messages wait. It never waits to write:
the rest is sent when the peer has read what came before. There is no thread: messages move in
`ready`, `wait`, `do_work` and `send`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from zapex.errors import PeerError
from zapex.fstack import Setup
from zapex.fstack.curve import Admit, CurveServer
from zapex.fstack.loop import FstackReactor, loop_of
from zapex.fstack.sockets import KernelReactor, Reactor
from zapex.fstack.zmtp import Buffer, Connection, Limits, Message, Null
from zapex.machine.tcp import SEND_BUFFER_BYTES

MESSAGES_PER_PEER = 64  # messages that may wait, in and out, for each peer
HANDSHAKE_S = 10.0
_LOOK_S = 0.5  # how often all connections are checked
_READS_AT_ONCE = 16
_EXPECTED_BYTES = 1 << 17  # of a large body, before `poll` tells of more: below a peer's buffer
_ACCEPTS_AT_ONCE = 64


class Sent:
    """Follows a message that was sent."""

    def __init__(self, connection: Connection, mark: int) -> None:
        self._connection, self._mark = connection, mark

    @property
    def done(self) -> bool:
        """Whether its buffers are released: all bytes were taken, or the connection has ended."""
        return self._connection.sent_bytes >= self._mark or bool(self._connection.ended)


@dataclass(eq=False)
class _Peer:
    """One connection. closed: its socket is gone. dropped: this end has ended it."""

    id: bytes
    fd: int
    address: str
    connection: Connection
    began_s: float
    waiting: int = 0  # messages that came and were not received
    waiting_bytes: int = 0
    wants: tuple[bool, bool] = (True, False)  # to read, to write
    expected: int = 1  # bytes that must have come before `poll` tells of it
    closed: bool = False
    dropped: bool = False
    sent: deque[tuple[int, Sent]] = field(default_factory=deque)  # bytes of each message


class Keys(NamedTuple):
    """A server's pair of keys, 32 bytes each. admit: the role of a client's public key, or None."""

    public: bytes
    secret: bytes
    admit: Admit


def reactor_of(setup: Setup | None) -> Reactor:
    """The kernel's sockets, or, with `setup`, F-Stack's.

    F-Stack starts in this process, which must have no other, and ends with it. Its packets move
    only while one of the listener's methods runs, so call one all the time. Raises ConfigError.
    """
    return KernelReactor() if setup is None else FstackReactor(loop_of(setup))


class ZmtpListener:
    """A Listener (net/sockets.py) over the sockets of a reactor.

    Args:
        reactor: closed with the listener.
        host: an IP address.
        port: 0 for any, on the kernel's sockets.
        keys: admit only clients whose keys stand for a role; None: admit everyone.
        limits: for what a peer may send.
        large_bytes: a message of this size or more counts as queued until it was sent.
        clock_s: monotonic, in seconds; for tests.

    `hang_up` and `held` may be called by any thread. Raises OSError if the address is taken.
    """

    def __init__(
        self,
        reactor: Reactor,
        host: str,
        port: int,
        keys: Keys | None,
        limits: Limits,
        *,
        large_bytes: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reactor, self._keys, self._limits = reactor, keys, limits
        try:
            self._listener, port = reactor.listen(host, port, SEND_BUFFER_BYTES)
        except OSError:
            reactor.close_all()
            raise
        self.url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self.place: Callable[[bytes, Sequence[Buffer], int], Buffer | None] | None = None
        self._large_bytes = large_bytes
        self._clock_s, self._looked_s = clock_s, clock_s()
        self._listening, self._closed = True, False
        self._made = 0
        self._by_fd: dict[int, _Peer] = {}
        self._peers: dict[bytes, _Peer] = {}
        self._arrived: deque[tuple[_Peer, Message, int]] = deque()  # and its bytes
        self._leaving: list[_Peer] = []
        self._gone: list[bytes] = []
        self._hung_up: deque[_Peer] = deque()

    @property
    def fds(self) -> list[int] | None:
        """Descriptors that become readable when a message may have come; then call `ready`."""
        return self._reactor.fds

    def ready(self) -> bool:
        """Whether a message has come."""
        if not self._arrived:
            self.do_work()
        return bool(self._arrived)

    def wait(self, timeout_s: float) -> None:
        """Wait until a message may have come, at most timeout_s."""
        self.do_work(0.0 if self._arrived else timeout_s)

    def do_work(self, timeout_s: float = 0.0) -> None:
        """Receive and send what the sockets are ready for; wait at most timeout_s for it."""
        while self._hung_up:
            self._drop(self._hung_up.popleft())
        self._drop_closed_peers()
        for event in self._reactor.poll(timeout_s):
            if event.fd == self._listener:
                self._accept()
                continue
            peer = self._by_fd.get(event.fd)
            if peer is not None and event.writable:
                self._write(peer)
            if peer is not None and event.readable and not peer.dropped:
                self._read(peer)
        now_s = self._clock_s()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._look(now_s)

    def gone(self) -> list[bytes]:
        """The peers whose connections have ended since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def receive(self) -> tuple[bytes, Message] | None:
        """The next message and its peer."""
        while self._arrived:
            peer, message, nbytes = self._arrived.popleft()
            peer.waiting -= 1
            peer.waiting_bytes -= nbytes
            if not peer.dropped:
                if peer.waiting == MESSAGES_PER_PEER - 1:  # it may be read again
                    self._want(peer)
                return peer.id, message
        return None

    def send(self, peer_id: bytes, message: Sequence[Buffer]) -> Sent | None:
        """Send without waiting; None: too many messages wait. Raises PeerError if it is gone."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.closed or peer.dropped or peer.connection.ended:
            raise PeerError("the peer is gone")
        connection = peer.connection
        self._forget_sent(peer)
        if len(peer.sent) >= MESSAGES_PER_PEER:
            return None
        sent = Sent(connection, connection.send(message))
        self._write(peer)
        if connection.is_sending:  # else it is sent: there is nothing to follow
            peer.sent.append((sum(map(len, message)), sent))
        return sent

    def queued(self, peer_id: bytes) -> int:
        """How many large messages wait to be sent to a peer."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return 0
        self._forget_sent(peer)
        return sum(nbytes >= self._large_bytes for nbytes, _ in peer.sent)

    def role_of(self, peer_id: bytes, message: Sequence[Buffer]) -> str | None:
        """The role that a peer's key stands for; None if there are no keys."""
        return self._peers[peer_id].connection.mechanism.user

    def address_of(self, peer_id: bytes, message: Sequence[Buffer]) -> str:
        """The address of a peer's machine."""
        return self._peers[peer_id].address

    def settled(self, peer_id: bytes) -> None:
        """Let the send buffer of an old connection grow, if that helps."""
        peer = self._peers.get(peer_id)
        if peer is not None and not peer.closed:
            self._reactor.settled(peer.fd)

    def held(self) -> list[tuple[int, bytes | int]]:
        """Bytes that are held for each connection, in and out, and its peer."""
        peers = list(self._peers.values())
        return [(peer.waiting_bytes + peer.connection.held_bytes, peer.id) for peer in peers]

    def hang_up(self, connection: bytes | int) -> None:
        """End a connection in the next `do_work`; its peer's earlier messages are dropped."""
        peer = self._peers.get(connection) if isinstance(connection, bytes) else None
        if peer is not None and not peer.dropped:
            peer.dropped = True
            self._hung_up.append(peer)

    def close(self) -> None:
        """Close all connections."""
        if not self._closed:
            self._closed = True
            self._reactor.close_all()

    def _drop(self, peer: _Peer) -> None:
        if not peer.closed:
            peer.connection.end("this end has closed the connection")
            self._close(peer)

    def _forget_sent(self, peer: _Peer) -> None:
        while peer.sent and peer.sent[0][1].done:
            peer.sent.popleft()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                accepted = self._reactor.accept(self._listener)
            except OSError:  # no descriptor is free: try again later
                self._listen(False)
                return
            if accepted is None:
                return
            self._made += 1
            name = self._made.to_bytes(8, "big")
            keys = self._keys
            mechanism = Null(b"ROUTER") if keys is None else CurveServer(b"ROUTER", *keys)
            connection = Connection(mechanism, self._limits, partial(self._placed, name))
            peer = _Peer(name, *accepted, connection, began_s=self._clock_s())
            self._by_fd[peer.fd] = self._peers[peer.id] = peer
            self._write(peer)

    def _placed(self, peer: bytes, earlier: Sequence[Buffer], nbytes: int) -> Buffer | None:
        return self.place(peer, earlier, nbytes) if self.place is not None else None

    def _listen(self, listening: bool) -> None:
        if listening != self._listening:
            self._listening = listening
            self._reactor.want(self._listener, read=listening, write=False)

    def _read(self, peer: _Peer) -> None:
        connection, recv_into = peer.connection, self._reactor.recv_into
        for _ in range(_READS_AT_ONCE):
            room = connection.room()
            nbytes = recv_into(peer.fd, room)
            if nbytes is None:
                break
            if nbytes == 0:
                connection.end("the peer has closed the connection")
                break
            for message in connection.received(nbytes):
                size = sum(map(len, message))
                peer.waiting += 1
                peer.waiting_bytes += size
                self._arrived.append((peer, message, size))
            if connection.ended or peer.waiting >= MESSAGES_PER_PEER:
                break
            if nbytes < len(room):  # all of it was read, and `poll` tells of more
                break
        self._expect(peer)
        if connection.is_sending:
            self._write(peer)
        elif peer.waiting >= MESSAGES_PER_PEER:
            self._want(peer)
        if connection.ended:
            self._close(peer)

    def _expect(self, peer: _Peer) -> None:
        """Have a large body reported in large parts: each look costs as much as a small message."""
        expected = max(1, min(peer.connection.missing_bytes, _EXPECTED_BYTES))
        if expected != peer.expected:
            peer.expected = expected
            self._reactor.expect(peer.fd, expected)

    def _write(self, peer: _Peer) -> None:
        """Send what the socket takes, and come back when it takes more."""
        connection = peer.connection
        while connection.is_sending and not peer.closed:
            buffers = connection.outgoing()
            nbytes = self._reactor.send(peer.fd, buffers)
            if nbytes is None:
                connection.end("the peer has closed the connection")
                break
            connection.sent(nbytes)
            if connection.is_sending and nbytes < sum(map(len, buffers)):
                break
        self._want(peer)

    def _want(self, peer: _Peer) -> None:
        wants = peer.waiting < MESSAGES_PER_PEER, peer.connection.is_sending
        if not peer.closed and wants != peer.wants:
            peer.wants = wants
            self._reactor.want(peer.fd, read=wants[0], write=wants[1])

    def _look(self, now_s: float) -> None:
        """Close connections without a handshake, and those that have failed. Listen again."""
        self._listen(True)
        for peer in list(self._by_fd.values()):
            connection = peer.connection
            if not connection.ready and now_s - peer.began_s > HANDSHAKE_S:
                connection.end("the handshake takes too long")
            if connection.ended:
                self._close(peer)

    def _close(self, peer: _Peer) -> None:
        peer.closed = True
        del self._by_fd[peer.fd]
        self._reactor.close(peer.fd)
        self._leaving.append(peer)

    def _drop_closed_peers(self) -> None:
        """Forget closed peers whose last message was received."""
        staying = []
        for peer in self._leaving:
            if peer.waiting:
                staying.append(peer)
            else:
                del self._peers[peer.id]
                self._gone.append(peer.id)
        self._leaving = staying
