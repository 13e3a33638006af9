"""Non-blocking stream sockets and what each is ready for: the kernel's, through epoll.

Those of F-Stack are in loop.py.
"""

import errno
import select
import socket
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from zapex.fstack.zmtp import Buffer
from zapex.machine.tcp import let_grow_if_far

BACKLOG = 128
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
KEEPALIVE = (  # a peer whose machine is gone is noticed within about ten seconds
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Event(NamedTuple):
    """What a socket is ready for. One that has failed is readable: `recv_into` then says so."""

    fd: int
    readable: bool
    writable: bool


class Reactor(Protocol):
    """Sockets by their numbers. Only `poll` waits.

    fds: become readable when `poll` has something to return; None: only `poll` finds that out.
    """

    fds: list[int] | None

    def listen(self, host: str, port: int, send_buffer_bytes: int = 0) -> tuple[int, int]:
        """A listening socket and its port; connections have its options. Raises OSError."""

    def accept(self, listener: int) -> tuple[int, str] | None:
        """A new connection and the address of its other end; None: there is none now.

        Raises OSError if no descriptor or memory is free.
        """

    def recv_into(self, fd: int, room: Buffer) -> int | None:
        """How many bytes came; 0: the connection has ended; None: there are none now."""

    def send(self, fd: int, buffers: Sequence[Buffer]) -> int | None:
        """How many bytes were taken; None: the connection has ended."""

    def want(self, fd: int, *, read: bool, write: bool) -> None:
        """What `poll` reports about this socket."""

    def expect(self, fd: int, nbytes: int) -> None:
        """`poll` need not report this socket before so many bytes have come, or it has ended."""

    def settled(self, fd: int) -> None:
        """This connection is no longer new: its buffers may adapt to the peer's distance."""

    def close(self, fd: int) -> None:
        """Close a socket."""

    def poll(self, timeout_s: float) -> list[Event]:
        """What is ready, after at most timeout_s."""

    def close_all(self) -> None:
        """Close all sockets."""


class KernelReactor:
    """Sockets of the kernel."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self.fds: list[int] | None = [self._epoll.fileno()]

    def listen(self, host: str, port: int, send_buffer_bytes: int = 0) -> tuple[int, int]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for option in KEEPALIVE:
                made.setsockopt(*option)
            if send_buffer_bytes:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            made.bind((host, port))
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
        return self._add(made), made.getsockname()[1]

    def _add(self, made: socket.socket) -> int:
        self._sockets[made.fileno()] = made
        self._epoll.register(made.fileno(), select.EPOLLIN)
        return made.fileno()

    def accept(self, listener: int) -> tuple[int, str] | None:
        try:
            made, address = self._sockets[listener].accept()
        except OSError as error:  # others: the connection has ended already
            if error.errno in FULL:
                raise
            return None
        made.setblocking(False)
        return self._add(made), str(address[0])

    def recv_into(self, fd: int, room: Buffer) -> int | None:
        try:
            return self._sockets[fd].recv_into(room)
        except BlockingIOError:
            return None
        except OSError:
            return 0

    def send(self, fd: int, buffers: Sequence[Buffer]) -> int | None:
        try:
            return self._sockets[fd].sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError:
            return None

    def want(self, fd: int, *, read: bool, write: bool) -> None:
        self._epoll.modify(fd, select.EPOLLIN * read | select.EPOLLOUT * write)

    def expect(self, fd: int, nbytes: int) -> None:
        # The kernel reports earlier if its buffer cannot hold that much.
        self._sockets[fd].setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def settled(self, fd: int) -> None:
        let_grow_if_far(fd)

    def close(self, fd: int) -> None:
        self._epoll.unregister(fd)
        self._sockets.pop(fd).close()

    def poll(self, timeout_s: float) -> list[Event]:
        return [
            Event(fd, bool(mask & ~select.EPOLLOUT), bool(mask & select.EPOLLOUT))
            for fd, mask in self._epoll.poll(timeout_s)
        ]

    def close_all(self) -> None:
        for fd in list(self._sockets):
            self.close(fd)
        self._epoll.close()
