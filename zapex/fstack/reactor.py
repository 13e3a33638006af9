"""The sockets of zapex/zmtp on F-Stack, by ff_kqueue; only for the thread of its loop."""

import contextlib
import ctypes
import socket
import time
from collections.abc import Sequence

import numpy as np

from zapex.fstack._abi import (
    ADDRESS_BYTES,
    EV_ADD,
    EV_DELETE,
    EVFILT_READ,
    EVFILT_WRITE,
    MOST_BYTES,
    MOST_IOVECS,
    Iovec,
    Kevent,
)
from zapex.fstack.loop import Loop
from zapex.zmtp.frames import Buffer
from zapex.zmtp.reactor import BACKLOG, FULL, KEEPALIVE, Event

_EVENTS_AT_ONCE = 256
_RECEIVE_BUFFER_BYTES = 256 << 10  # F-Stack's own are 8 KiB


def _address(host: str, port: int) -> bytes:
    """struct sockaddr_in or sockaddr_in6 of Linux."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    head = int(family).to_bytes(2, "little") + port.to_bytes(2, "big")
    number = socket.inet_pton(family, host)
    return head + (bytes(4) + number + bytes(4) if len(number) == 16 else number + bytes(8))


def _host_port(address: bytes) -> tuple[str, int]:
    family = int.from_bytes(address[:2], "little")
    number = address[8:24] if family == socket.AF_INET6 else address[4:8]
    return socket.inet_ntop(family, number), int.from_bytes(address[2:4], "big")


def _iovec(buffer: Buffer) -> Iovec:
    memory = np.frombuffer(buffer, np.uint8)
    return Iovec(memory.__array_interface__["data"][0], memory.nbytes)


class FstackReactor:
    """A Reactor. `poll` turns F-Stack's loop: without it nothing is sent or received.

    Its timeout is kept by turning again and again.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop, self._calls = loop.join(), loop.calls
        self._queue = loop.calls.ff_kqueue()
        self._found = (Kevent * _EVENTS_AT_ONCE)()
        self._wanted: dict[int, set[int]] = {}  # the filters of each socket
        self.fds: list[int] | None = None
        self._name = ctypes.create_string_buffer(ADDRESS_BYTES)
        self._name_bytes = ctypes.c_uint32()

    def listen(self, host: str, port: int, send_buffer_bytes: int = 0) -> tuple[int, int]:
        calls, address = self._calls, _address(host, port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        fd = calls.ff_socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0)
        try:
            self._set(fd, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for level, name, value in KEEPALIVE:
                if name != socket.TCP_USER_TIMEOUT or level != socket.IPPROTO_TCP:
                    self._set(fd, level, name, value)
            if send_buffer_bytes:
                self._set(fd, socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
                self._set(fd, socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            calls.ff_bind(fd, address, len(address))
            calls.ff_listen(fd, BACKLOG)
            self._name_bytes.value = ADDRESS_BYTES
            calls.ff_getsockname(fd, self._name, self._name_bytes)
        except OSError:
            calls.ff_close(fd)
            raise
        self._add(fd)
        return fd, _host_port(self._name.raw)[1]

    def _set(self, fd: int, level: int, name: int, value: int) -> None:
        number = ctypes.c_int(value)
        self._calls.ff_setsockopt(fd, level, name, ctypes.byref(number), ctypes.sizeof(number))

    def _add(self, fd: int) -> None:
        self._wanted[fd] = set()
        self.want(fd, read=True, write=False)

    def accept(self, listener: int) -> tuple[int, str] | None:
        self._name_bytes.value = ADDRESS_BYTES
        try:
            fd: int = self._calls.ff_accept(listener, self._name, self._name_bytes)
        except OSError as error:
            if error.errno in FULL:
                raise
            return None
        self._add(fd)
        return fd, _host_port(self._name.raw)[0]

    def recv_into(self, fd: int, room: Buffer) -> int | None:
        first = ctypes.c_char.from_buffer(room)
        try:
            nbytes: int = self._calls.ff_recv(
                fd, ctypes.byref(first), min(len(room), MOST_BYTES), 0
            )
        except BlockingIOError:
            return None
        except OSError:
            return 0
        return nbytes

    def send(self, fd: int, buffers: Sequence[Buffer]) -> int | None:
        vectors, room = [], MOST_BYTES
        for buffer in buffers[:MOST_IOVECS]:
            nbytes = min(len(buffer), room)
            if nbytes:
                vectors.append(_iovec(buffer[:nbytes]))
            room -= nbytes
        if not vectors:
            return 0
        try:  # the array is used once: the call changes it
            sent: int = self._calls.ff_writev(fd, (Iovec * len(vectors))(*vectors), len(vectors))
        except BlockingIOError:
            return 0
        except OSError:
            return None
        return sent

    def want(self, fd: int, *, read: bool, write: bool) -> None:
        before, asked = self._wanted[fd], ((EVFILT_READ, read), (EVFILT_WRITE, write))
        now = self._wanted[fd] = {name for name, wanted in asked if wanted}
        changes = [
            Kevent(ident=fd, filter=name, flags=EV_ADD if name in now else EV_DELETE)
            for name in before ^ now
        ]
        if changes:
            self._calls.ff_kevent(
                self._queue, (Kevent * len(changes))(*changes), len(changes), None, 0, None
            )

    def expect(self, fd: int, nbytes: int) -> None:
        """Nothing: a look costs less than to say so."""

    def close(self, fd: int) -> None:
        del self._wanted[fd]
        with contextlib.suppress(OSError):  # the peer has reset the connection; it is closed
            self._calls.ff_close(fd)

    def poll(self, timeout_s: float) -> list[Event]:
        until_s = time.monotonic() + timeout_s
        while True:
            self._loop.turn()
            count = self._calls.ff_kevent(self._queue, None, 0, self._found, _EVENTS_AT_ONCE, None)
            if count or time.monotonic() >= until_s:
                break
        return [
            Event(event.ident, event.filter == EVFILT_READ, event.filter == EVFILT_WRITE)
            for event in self._found[:count]
        ]

    def close_all(self) -> None:
        """Close all sockets, let their last bytes go out, and leave the loop."""
        for fd in list(self._wanted):
            self.close(fd)
        self._calls.ff_close(self._queue)
        self._loop.leave()
