"""F-Stack's loop, driven by the code that uses it, and sockets on it.

`ff_run` calls a function again and again, and moves packets in between. Here that function switches
to the caller, a greenlet, and `turn` switches back. So a duty cycle on F-Stack is the same plain
loop as on the kernel, in the one thread that F-Stack allows, and exceptions are raised there.
"""

import atexit
import contextlib
import ctypes
import socket
import time
from collections.abc import Sequence

import numpy as np

from zapex.errors import ConfigError
from zapex.fstack import Setup, binding
from zapex.fstack.binding import (
    ADDRESS_BYTES,
    EV_ADD,
    EV_DELETE,
    EV_ERROR,
    EV_RECEIPT,
    EVFILT_READ,
    EVFILT_WRITE,
    LOOP,
    MOST_ARGUMENTS,
    MOST_BYTES,
    MOST_IOVECS,
    Iovec,
    Kevent,
)
from zapex.fstack.sockets import BACKLOG, FULL, KEEPALIVE, Event
from zapex.fstack.zmtp import Buffer

_DRAIN_S = 0.05  # what was sent last, and the ends of connections, still go out
_NO_SOCKETS = (0x7FFF0001, 0x7FFF0002)  # descriptors that are not open
_EVENTS_AT_ONCE = 256
_RECEIVE_BUFFER_BYTES = 256 << 10  # F-Stack's own are 8 KiB


class NotStarted(ConfigError):
    """F-Stack failed to start; it has printed why."""


class Loop:
    """F-Stack in this process and thread, from its start to its end. There is only one, once.

    Raises ConfigError if the library is not usable. F-Stack ends the process if it cannot start:
    `zapex.fstack.trial` tries it in another process before.
    """

    def __init__(self, setup: Setup) -> None:
        from greenlet import getcurrent, greenlet

        self.calls = binding.load(setup.library)
        self._start(setup)
        self._check_kevent()
        self.ended = False
        # Both are C functions: in Python code here a signal's exception would be lost in ctypes.
        self._between_turns = LOOP(getcurrent().switch)  # F-Stack keeps only its address
        self._turning = greenlet(self.calls.ff_run)
        self._turning.switch(self._between_turns, None)
        atexit.register(self.stop)

    def _start(self, setup: Setup) -> None:
        calls = self.calls
        words = [b"zapex", b"-c", setup.config.encode(), b"-t", b"primary", b"-p", b"0"]
        try:
            calls.ff_load_config(len(words), (ctypes.c_char_p * (len(words) + 1))(*words))
            arguments = ctypes.cast(
                ctypes.addressof(calls.dpdk_argv), ctypes.POINTER(ctypes.c_char_p)
            )
            words = [bytes(arguments[i] or b"") for i in range(calls.dpdk_argc.value)]
            words += setup.arguments.encode().split()
            if len(words) > MOST_ARGUMENTS:
                raise ConfigError(f"--fstack-eal: DPDK takes at most {MOST_ARGUMENTS} arguments")
            calls.ff_dpdk_init(len(words), (ctypes.c_char_p * (len(words) + 1))(*words))
            calls.ff_freebsd_init()
            calls.ff_dpdk_if_up()
        except OSError as error:
            raise NotStarted(f"F-Stack cannot start: {error.filename} failed") from None

    def _check_kevent(self) -> None:
        """Two errors come back as two records only if the library's struct has our size."""
        flags = EV_ADD | EV_RECEIPT
        asked = [Kevent(ident=n, filter=EVFILT_READ, flags=flags, udata=n) for n in _NO_SOCKETS]
        found = (Kevent * 2)()
        queue = self.calls.ff_kqueue()
        self.calls.ff_kevent(queue, (Kevent * 2)(*asked), 2, found, 2, None)
        self.calls.ff_close(queue)
        if [(e.ident, e.udata, e.flags & EV_ERROR) for e in found] != [
            (n, n, EV_ERROR) for n in _NO_SOCKETS
        ]:
            raise ConfigError(
                "--fstack-lib is another version of F-Stack: its struct kevent is not 1.25's"
            )

    def turn(self) -> None:
        """Let packets move once. Only the thread and greenlet that made the loop may call it."""
        self._turning.switch(0)  # what the function that F-Stack calls returns

    def drain(self) -> None:
        """Send what is queued, which takes a moment."""
        until_s = time.monotonic() + _DRAIN_S
        while time.monotonic() < until_s:
            self.turn()

    def stop(self) -> None:
        """Drain, and end F-Stack; nothing of it can be called again in this process."""
        if not self.ended:
            self.drain()
            self.ended = True
            self.calls.ff_stop_run()
            self._turning.switch(0)


_loops: dict[Setup, Loop] = {}


def loop_of(setup: Setup) -> Loop:
    """This process's loop, started once. Raises ConfigError where a second one would be needed."""
    if not _loops:
        _loops[setup] = Loop(setup)
    if setup not in _loops or _loops[setup].ended:
        raise ConfigError("F-Stack was started in this process before; it starts only once")
    return _loops[setup]


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

    F-Stack ignores timeouts, so `poll` turns until its own has passed.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop, self._calls = loop, loop.calls
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
        """Do nothing: looking costs less than this call would."""

    def settled(self, fd: int) -> None:
        """Do nothing: its buffers stay as they are."""

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
        """Close all sockets, and let their last bytes go out."""
        for fd in list(self._wanted):
            self.close(fd)
        self._calls.ff_close(self._queue)
        self._loop.drain()
