"""What F-Stack answers, call by call: `python -m tests.fstack.calls LIB CONF ARGUMENTS CASE ...`.

Each case prints a line of JSON. The other ends are the kernel's sockets, in the same thread.
"""

import ctypes
import errno
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.support.fstack import addresses, free_port
from zapex.fstack import Setup
from zapex.fstack.binding import (
    ADDRESS_BYTES,
    EV_ADD,
    EV_DELETE,
    EV_EOF,
    EV_RECEIPT,
    LOOP,
    Iovec,
    Kevent,
)
from zapex.fstack.loop import Loop

NONBLOCKING = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
READ, WRITE = -1, -2
PATIENCE_S = 20.0
CASES: dict[str, Callable[["World"], Any]] = {}


LAST: list[str] = []  # cases after which the process is over


def case(function: Callable[["World"], Any]) -> Callable[["World"], Any]:
    CASES[function.__name__] = function
    return function


def last_case(function: Callable[["World"], Any]) -> Callable[["World"], Any]:
    LAST.append(function.__name__)
    return case(function)


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    """The name of a call's error, or what it returned."""
    try:
        return str(call(*arguments))
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def sockaddr(host: str, port: int) -> bytes:
    return struct.pack("=H2s4s8x", socket.AF_INET, port.to_bytes(2, "big"), socket.inet_aton(host))


class World:
    """A library that runs, its address and port, and the kernel's side."""

    def __init__(self, setup: Setup) -> None:
        self.loop = Loop(setup)
        self.c = self.loop.calls
        self.here, self.there = addresses(setup)
        self.port = 0  # of the newest listener

    def until(self, ready: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (found := ready()):
            self.loop.turn()
            assert time.monotonic() < deadline_s, "nothing happened"
        return found

    def open(self, kind: int = NONBLOCKING) -> int:
        fd: int = self.c.ff_socket(socket.AF_INET, kind, 0)
        return fd

    def listener(self, kind: int = NONBLOCKING, *options: tuple[int, int, int]) -> int:
        fd, self.port = self.open(kind), free_port()
        for level, name, value in options:
            self.set(fd, level, name, value)
        self.c.ff_bind(fd, sockaddr(self.here, self.port), 16)
        self.c.ff_listen(fd, 8)
        return fd

    def set(self, fd: int, level: int, name: int, value: int) -> int:
        number = ctypes.c_int(value)
        done: int = self.c.ff_setsockopt(fd, level, name, ctypes.byref(number), 4)
        return done

    def client(self) -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        made.connect_ex((self.here, self.port))
        return made

    def accepted(self, listener: int, accept: Callable[[], int] | None = None) -> int:
        def attempt() -> int:
            with suppress(BlockingIOError, PermissionError):
                fd: int = (accept or (lambda: self.c.ff_accept(listener, None, None)))()
                return fd
            return 0

        fd: int = self.until(attempt)
        return fd

    def pair(self, *options: tuple[int, int, int]) -> tuple[int, socket.socket]:
        listener, client = self.listener(NONBLOCKING, *options), self.client()
        fd = self.accepted(listener)
        self.c.ff_close(listener)
        return fd, client

    def recv(self, fd: int, nbytes: int = 64, flags: int = 0) -> bytes:
        room = ctypes.create_string_buffer(nbytes)
        count: int = self.c.ff_recv(fd, room, nbytes, flags)
        return room.raw[:count]

    def write(self, fd: int, data: bytes) -> int:
        memory = ctypes.create_string_buffer(data, len(data))
        vectors = (Iovec * 1)(Iovec(ctypes.addressof(memory), len(data)))
        count: int = self.c.ff_writev(fd, vectors, 1)
        return count

    def arrived(self, fd: int) -> int:
        """Wait until something can be read; how many bytes."""
        queue = self.c.ff_kqueue()
        self.change(queue, fd, READ, EV_ADD)
        found = self.until(lambda: self.events(queue))
        self.c.ff_close(queue)
        count: int = found[0].data
        return count

    def change(self, queue: int, fd: int, what: int, flags: int, udata: int = 0) -> str:
        change = Kevent(ident=fd, filter=what, flags=flags, udata=udata)
        return error_of(self.c.ff_kevent, queue, ctypes.byref(change), 1, None, 0, None)

    def events(self, queue: int, most: int = 8, timeout: Any = None) -> list[Kevent]:
        found = (Kevent * most)()
        return list(found[: self.c.ff_kevent(queue, None, 0, found, most, timeout)])


@contextmanager
def quick() -> Iterator[Callable[[], bool]]:
    """Whether what followed took far less than a second."""
    began_s = time.monotonic()
    yield lambda: time.monotonic() - began_s < 1.0


@case
def descriptors_begin_above_the_kernels(w: World) -> Any:
    first, second = w.open(), w.open()
    w.c.ff_close(first)
    return [first >= 1024, second > first, w.open() == first]


@case
def a_descriptor_of_the_kernel_is_none(w: World) -> Any:
    return [error_of(w.c.ff_recv, 0, None, 0, 0), error_of(w.c.ff_close, 2000)]


@case
def nothing_to_accept_or_receive(w: World) -> Any:
    fd, _client = w.pair()
    listener = w.listener()
    room = ctypes.create_string_buffer(8)
    unconnected = w.open()
    return [
        error_of(w.c.ff_accept, listener, None, None), error_of(w.c.ff_recv, fd, room, 8, 0),
        error_of(w.c.ff_recv, unconnected, room, 8, 0), error_of(w.write, unconnected, b"x"),
    ]  # fmt: skip


@case
def blocking_calls_fail(w: World) -> Any:
    listener = w.listener(socket.SOCK_STREAM)
    waiting = error_of(w.c.ff_accept, listener, None, None)
    client = w.client()
    fd = w.accepted(listener)
    room = ctypes.create_string_buffer(8)
    said = [waiting, error_of(w.c.ff_recv, fd, room, 8, 0)]
    said.append(error_of(w.write, fd, bytes(8 << 20)))
    client.close()
    return said


@case
def addresses_are_linux_s(w: World) -> Any:
    listener, client = w.listener(), w.client()
    name, nbytes = ctypes.create_string_buffer(ADDRESS_BYTES), ctypes.c_uint32(1)
    fd = w.accepted(listener, lambda: w.c.ff_accept(listener, name, ctypes.byref(nbytes)))
    wanted = sockaddr(w.there, client.getsockname()[1])
    said = [name.raw[:8] == wanted[:8], nbytes.value]
    nbytes.value = ADDRESS_BYTES
    w.c.ff_getsockname(fd, name, ctypes.byref(nbytes))
    return [*said, name.raw[:8] == sockaddr(w.here, w.port)[:8], nbytes.value]


@case
def no_port_is_chosen(w: World) -> Any:
    fd = w.open()
    w.c.ff_bind(fd, sockaddr(w.here, 0), 16)
    return error_of(w.c.ff_listen, fd, 8)


@case
def addresses_that_cannot_be_bound(w: World) -> Any:
    fd, listener = w.open(), w.listener()
    return [
        listener > 0,
        error_of(w.c.ff_bind, fd, sockaddr(w.here, w.port), 16),
        error_of(w.c.ff_bind, fd, sockaddr("203.0.113.9", w.port), 16),
    ]


def peeked(sock: socket.socket) -> bytes:
    with suppress(BlockingIOError):
        return sock.recv(64)
    return b""


@case
def options_that_are_refused(w: World) -> Any:
    fd = w.open()
    options = [(1, socket.SO_TYPE), (1, socket.SO_DOMAIN), (6, socket.TCP_CORK),
               (6, socket.TCP_QUICKACK), (6, socket.TCP_USER_TIMEOUT)]  # fmt: skip
    return [error_of(w.set, fd, *option, 1) for option in options]


@case
def vectors_are_changed(w: World) -> Any:
    fd, client = w.pair()
    one, two = ctypes.create_string_buffer(b"abc", 3), ctypes.create_string_buffer(b"defg", 4)
    vectors = (Iovec * 2)(Iovec(ctypes.addressof(one), 3), Iovec(ctypes.addressof(two), 4))
    said = [w.c.ff_writev(fd, vectors, 2), vectors[0].len, vectors[1].len]
    return [*said, w.until(lambda: peeked(client)).decode()]


@case
def a_large_write_is_taken_in_part(w: World) -> Any:
    fd, client = w.pair()
    data = bytes(32 << 20)
    taken = w.write(fd, data)
    while (last := error_of(w.write, fd, data)).isdigit():
        assert taken < len(data)
        taken += int(last)
    client.close()
    return [0 < taken < len(data), last]


@case
def flags_are_freebsd_s(w: World) -> Any:
    fd, client = w.pair()
    client.send(b"ab")
    w.arrived(fd)
    said = [w.recv(fd, 64, socket.MSG_PEEK).decode(), w.recv(fd, 64, 0x80).decode()]
    room = ctypes.create_string_buffer(8)
    said.append(error_of(w.c.ff_recv, fd, room, 8, 0x80))
    return said


@case
def the_peer_s_end_and_its_reset(w: World) -> Any:
    fd, client = w.pair()
    queue = w.c.ff_kqueue()
    w.change(queue, fd, READ, EV_ADD)
    client.send(b"last")
    client.shutdown(socket.SHUT_WR)
    event = w.until(lambda: [e for e in w.events(queue) if e.flags & EV_EOF])[0]
    said: list[Any] = [event.data, event.fflags, w.recv(fd).decode(), w.recv(fd).decode()]
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    event = w.until(lambda: [e for e in w.events(queue) if e.fflags])[0]
    said += [bool(event.flags & EV_EOF), event.fflags]
    room = ctypes.create_string_buffer(8)
    return [*said, error_of(w.c.ff_recv, fd, room, 8, 0), error_of(w.write, fd, b"x")]


@case
def a_queue_tells_reading_and_writing_apart(w: World) -> Any:
    fd, client = w.pair()
    queue = w.c.ff_kqueue()
    w.change(queue, fd, READ, EV_ADD, udata=7)
    w.change(queue, fd, WRITE, EV_ADD, udata=8)
    w.change(queue, fd, WRITE, EV_ADD, udata=9)
    writable = [(e.ident == fd, e.filter, e.udata) for e in w.events(queue)]
    client.send(b"xyz")
    w.arrived(fd)
    both = sorted((e.filter, e.udata) for e in w.events(queue))
    w.change(queue, fd, WRITE, EV_DELETE)
    again = [(e.filter, e.data) for e in w.events(queue)]
    at_most_one = len(w.events(queue, most=1))
    return [writable, both, again, at_most_one, w.change(queue, fd, WRITE, EV_DELETE)]


@case
def a_queue_forgets_a_closed_socket(w: World) -> Any:
    fd, client = w.pair()
    queue = w.c.ff_kqueue()
    w.change(queue, fd, READ, EV_ADD)
    client.send(b"x")
    w.arrived(fd)
    before = len(w.events(queue))
    w.c.ff_close(fd)
    return [before, len(w.events(queue)), w.change(queue, fd, READ, EV_DELETE)]


@case
def a_listener_is_readable(w: World) -> Any:
    listener, queue = w.listener(), w.c.ff_kqueue()
    w.change(queue, listener, READ, EV_ADD)
    before = len(w.events(queue))
    _client = w.client()
    event = w.until(lambda: w.events(queue))[0]
    w.c.ff_accept(listener, None, None)
    return [before, event.data, event.flags & EV_EOF, len(w.events(queue))]


@case
def errors_of_changes_come_as_events(w: World) -> Any:
    queue, found = w.c.ff_kqueue(), (Kevent * 2)()
    change = Kevent(ident=2000, filter=READ, flags=EV_ADD | EV_RECEIPT, udata=5)
    count = w.c.ff_kevent(queue, ctypes.byref(change), 1, found, 2, None)
    return [count, found[0].data, found[0].udata, w.change(queue, 2000, READ, EV_ADD)]


@case
def time_outs_are_ignored(w: World) -> Any:
    queue, ten_seconds = w.c.ff_kqueue(), struct.pack("qq", 10, 0)
    with quick() as was_quick:
        count = len(w.events(queue, timeout=ten_seconds))
        return [count, was_quick()]


@last_case
def another_thread_ends_the_process(w: World) -> Any:
    thread = threading.Thread(target=w.open)
    thread.start()
    thread.join(PATIENCE_S)
    return "still here"


@last_case
def a_second_run_ends_the_process(w: World) -> Any:
    w.loop.stop()
    w.c.ff_run(LOOP(lambda _: 0), None)
    return "still here"


@last_case
def what_was_sent_before_the_end_arrives(w: World) -> Any:
    fd, client = w.pair()
    w.write(fd, b"last words")
    w.c.ff_close(fd)
    w.loop.stop()
    client.settimeout(PATIENCE_S)
    return [client.recv(64).decode(), client.recv(64).decode()]


def main() -> None:
    library, config, arguments, *names = sys.argv[1:]
    world = World(Setup(library, config, arguments))
    for name in names:
        try:
            said = CASES[name](world)
        except Exception as error:
            said = repr(error)
        print("\nanswer:" + json.dumps([name, said]), flush=True)


if __name__ == "__main__":
    main()
