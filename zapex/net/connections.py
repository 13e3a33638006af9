"""Connections of a listening socket, as the kernel sees them.

libzmq limits the size of each buffer and the number of waiting messages. It limits neither their
bytes nor a message that never ends. So this module computes how many bytes libzmq holds for a
connection: received by the kernel, minus returned by `receive`, plus sent and not yet released.
"""

import os
import socket
import stat
import struct
from collections import deque
from contextlib import suppress

from zapex.net.listener import Tracker

_RECEIVED_AT = 128  # tcpi_bytes_received in Linux's struct tcp_info
_UNKNOWN = 1 << 40  # bytes received over ipc://, which the kernel does not count: assume the worst
_REMEMBERED = 4096  # peers whose connection was closed


def _connection(fd: int) -> socket.socket | None:
    """A second handle of a connected stream socket; None for anything else."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        found = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    try:
        found.getpeername()
    except OSError:
        found.close()
        return None
    return found


def _inode(fd: int) -> int:
    """Of an open descriptor; the kernel gives its number again, but not its inode."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return -1


class Connections:
    """The connections of the socket that listens at `url`; others of the process are not touched.

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
        connection = _connection(fd)
        if connection is None:
            return
        with connection, suppress(OSError):
            if self._is_ours(connection):
                connection.shutdown(socket.SHUT_RDWR)

    def _is_ours(self, connection: socket.socket) -> bool:
        name = connection.getsockname()
        return bool((name[1] if isinstance(name, tuple) else name) == self._address)

    def held(self) -> list[tuple[int, bytes | int]]:
        """Bytes held for each connection, in and out, and its peer, or else its descriptor."""
        found: list[tuple[int, bytes | int]] = []
        for name in os.listdir("/proc/self/fd"):
            connection = _connection(int(name))
            if connection is not None:
                with connection, suppress(OSError):
                    if self._is_ours(connection):
                        peer, taken = self._taken.get(int(name), (b"", 0))
                        nbytes = self._waiting(peer) + _received(connection) - taken
                        found.append((max(0, nbytes), peer or int(name)))
        return found

    def _waiting(self, peer: bytes) -> int:
        queue = list(self._queued.get(peer, ()))
        return sum(nbytes for nbytes, tracker in queue if not tracker.done)


def _received(connection: socket.socket) -> int:
    try:
        facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:
        return _UNKNOWN
    return int(struct.unpack_from("<Q", facts, _RECEIVED_AT)[0])
