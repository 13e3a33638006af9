"""Bounded memory whatever peers do: who brings too much, or takes nothing, is hung up on.

libzmq limits each part of a message and how many messages wait, not their bytes, and not the parts
of a message that never ends. What it holds for a connection is seen from outside: the bytes that
the kernel received for it less those that were handed on here, and what was sent and is not gone.
"""

import ctypes
import os
import socket
import stat
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Any

_LOOK_S = 0.01
_REST_S = 0.05  # nothing could be hung up on: the memory is the process's own
_ALARM, _CALM = 0.5, 0.25  # shares of the bound: act above the one, until below the other
_STRIKES = 3.0  # messages that break the rules, before a peer is hung up on
_RECEIVED_AT = 128  # tcpi_bytes_received in Linux's struct tcp_info
_REMEMBERED = 4096


def own_bytes(statm: int | None = None) -> int:
    """Resident memory of this process that is not shared; statm: /proc/self/statm, open already."""
    if statm is None:
        with open("/proc/self/statm", "rb") as file:
            return own_bytes(file.fileno())
    _, resident, shared, *_ = os.pread(statm, 256, 0).split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


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


class Guard:
    """Watches the connections of one listening socket, from a thread of its own.

    bound_bytes: what messages under way may take, on top of what the process has when it begins.
    url: where it listens; other sockets of the process are not touched.
    """

    def __init__(self, bound_bytes: int, url: str) -> None:
        self.bound_bytes = bound_bytes
        self.hung_up = 0
        scheme, _, place = url.partition("://")
        self._address: int | str = int(place.rpartition(":")[2]) if scheme == "tcp" else place
        # Open for good: who takes all descriptors shall not blind us.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._base_bytes = own_bytes(self._statm)
        self._taken: dict[int, tuple[bytes, int]] = {}  # descriptor -> route, bytes handed on
        self._fds: dict[bytes, int] = {}
        self._strikes: dict[bytes, float] = {}
        self._gone: dict[bytes, None] = {}
        self._unsent: dict[bytes, deque[tuple[int, Any]]] = {}
        self._libc = ctypes.CDLL(None)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()

    # What the server tells.

    def took(self, route: bytes, fd: int, nbytes: int) -> bool:
        """A message of a connection was handed on; False where that was hung up on before."""
        if route in self._gone:
            return False
        known, taken = self._taken.get(fd, (route, 0))
        if known != route:  # another connection has the number now
            self._forget(known)
            taken = 0
        self._taken[fd] = route, taken + nbytes
        self._fds[route] = fd
        return True

    def sent(self, route: bytes, nbytes: int, tracker: Any) -> None:
        """A large message was given to libzmq."""
        self._unsent.setdefault(route, deque()).append((nbytes, tracker))
        self.unsent(route)

    def unsent(self, route: bytes) -> int:
        """Large messages to a connection that libzmq still holds."""
        queue = self._unsent.get(route) or deque()
        while queue and queue[0][1].done:
            queue.popleft()
        return len(queue)

    def strike(self, route: bytes, weight: float = 1.0) -> None:
        """A peer broke the rules: for the third time it is hung up on."""
        strikes = self._strikes.get(route, 0.0) + weight
        self._strikes[route] = strikes
        if strikes >= _STRIKES:
            self.hang_up(route)

    def forgive(self, route: bytes, weight: float) -> None:
        """A peer did what it is there for."""
        strikes = self._strikes.get(route)
        if strikes is not None:
            self._strikes[route] = max(0.0, strikes - weight)

    def _forget(self, route: bytes) -> None:
        for table in (self._fds, self._strikes, self._unsent):
            table.pop(route, None)

    def hang_up(self, route: bytes) -> None:
        """End a connection; what it sent before is not handed on."""
        fd = self._fds.get(route, -1)
        self._gone[route] = None
        while len(self._gone) > _REMEMBERED:
            self._gone.pop(next(iter(self._gone)), None)
        self._forget(route)
        if fd >= 0 and self._taken.get(fd, (b"", 0))[0] == route:
            self._taken.pop(fd, None)
            self._shut(fd)

    def _shut(self, fd: int) -> None:
        connection = _connection(fd)
        if connection is None:
            return
        with connection, suppress(OSError):
            if self._is_ours(connection):
                connection.shutdown(socket.SHUT_RDWR)
                self.hung_up += 1

    def _is_ours(self, connection: socket.socket) -> bool:
        name = connection.getsockname()
        return bool((name[1] if isinstance(name, tuple) else name) == self._address)

    def close(self) -> None:
        """Stop watching."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(5)
            os.close(self._statm)

    # What it sees.

    def _run(self) -> None:
        rest_s, before = _LOOK_S, 0
        while not self._stop.wait(rest_s):
            rest_s = _LOOK_S
            used = self._used()
            # As it grew since the last look it may grow twice before the next one has an effect.
            expected, before = used + 2 * max(0, used - before), used
            if expected > _ALARM * self.bound_bytes:
                with suppress(OSError):  # no descriptor is free: one will be
                    rest_s = self._look()

    def _used(self) -> int:
        return own_bytes(self._statm) - self._base_bytes

    def _look(self) -> float:
        """Hang up on those who hold most until what is left is little; how long to rest then."""
        held = sorted(((self._held(fd), fd) for fd in self._connections()), reverse=True)
        excess = sum(nbytes for nbytes, _ in held) - int(_CALM * self.bound_bytes)
        acted = excess > 0
        for nbytes, fd in held:
            if excess <= 0:
                break
            route, _ = self._taken.get(fd, (b"", 0))
            if route:
                self.hang_up(route)
            else:
                self._shut(fd)
            excess -= nbytes
        self._libc.malloc_trim(0)
        return _LOOK_S if acted else _REST_S

    def _connections(self) -> list[int]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            connection = _connection(int(name))
            if connection is not None:
                with connection, suppress(OSError):
                    if self._is_ours(connection):
                        found.append(int(name))
        return found

    def _held(self, fd: int) -> int:
        """Bytes that libzmq holds for a connection, in and out; all is suspect over ipc://."""
        route, taken = self._taken.get(fd, (b"", 0))
        waiting = sum(n for n, tracker in list(self._unsent.get(route, ())) if not tracker.done)
        connection = _connection(fd)
        if connection is None:
            return 0
        with connection:
            try:
                facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            except OSError:
                return waiting + self.bound_bytes
        (received,) = struct.unpack_from("<Q", facts, _RECEIVED_AT)
        return waiting + max(0, int(received) - taken)
