"""One end that listens, alone: echoes of 64 B, large messages into slots, and CPU while idle.

A libzmq ROUTER and zapex's router over the kernel's sockets or F-Stack's answer the same requests
of the same pyzmq DEALER. Server and client have one half of the cores each. A polling end yields
its core between two looks, because libzmq's I/O threads may need it. CPU is that of all threads of
the server's process. Every connection has the send buffer of zapex's links (docs/decisions.md):
with the system's, bbr's pacing would be measured.
"""

import os
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.support.harness import clock_ns, percentiles
from zapex.fstack import Setup
from zapex.machine.memory import keep_memory
from zapex.machine.tcp import SEND_BUFFER_BYTES

ECHO, PUSH, CPU, CHECK = b"e", b"p", b"c", b"x"  # a request; PUSH: into a slot
LARGE = (1 << 20, 8 << 20)
_ECHO_BYTES, _SLOTS = 64, 8
_WORD = struct.Struct("<Q")
_TIMEOUT_S = 60

Keys = tuple[bytes, bytes] | None
"""Public and secret, in Z85."""


def pin(side: int) -> None:
    """Hold this process on one half of the cores; threads that come later, too."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    os.sched_setaffinity(0, set(cores[half:] or cores) if side else set(cores[:half]))


class Slots:
    """Memory that large messages end in, one slot after the other."""

    def __init__(self) -> None:
        self._slots = [np.zeros(max(LARGE), np.uint8) for _ in range(_SLOTS)]
        self._next, self._last = 0, memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """The next slot."""
        self._next += 1
        self._last = self._slots[self._next % _SLOTS].data[:nbytes]
        return self._last

    def answer(self, what: bytes, body: Any) -> Any:
        """The answer to a request; a large body lies in the last slot."""
        if what == ECHO:
            return body
        if what == CPU:
            return _WORD.pack(time.process_time_ns())
        return _WORD.pack(zlib.crc32(self._last) if what == CHECK else 0)


def libzmq_server(url: str, polling: bool, keys: Keys) -> None:
    """Answers for ever. Large messages are copied into slots: libzmq has them elsewhere."""
    import zmq

    pin(0)
    router, slots = zmq.Context().socket(zmq.ROUTER), Slots()
    router.sndbuf = SEND_BUFFER_BYTES
    if keys:
        router.curve_server, (router.curve_publickey, router.curve_secretkey) = True, keys
    router.bind(url)
    while True:
        if polling:
            while not router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                os.sched_yield()
        peer, what = router.recv(), router.recv()
        if what == PUSH:
            body = router.recv(copy=False).buffer
            slots.take(len(body))[:] = body
        else:
            body = router.recv()
        router.send(peer, zmq.SNDMORE)
        router.send(slots.answer(what, body))


def zmtp_server(
    address: str, port: int, polling: bool, keys: Keys, fstack: Setup | None = None
) -> None:
    """Answers for ever. Large messages are received into slots. fstack: on F-Stack's sockets."""
    from zmq.utils import z85

    from zapex.fstack.listener import Keys as CurveKeys
    from zapex.fstack.listener import listen
    from zapex.fstack.zmtp import Limits

    pin(0)
    keep_memory()
    slots, pair = Slots(), None
    if keys is not None:
        pair = CurveKeys(z85.decode(keys[0]), z85.decode(keys[1]), lambda key: "anybody")

    def place(peer: bytes, earlier: Any, nbytes: int) -> Any:
        return slots.take(nbytes) if earlier and earlier[0] == PUSH else None

    router = listen(address, port, pair, Limits(max(LARGE), 4), large_bytes=1 << 16, setup=fstack)
    router.place = place
    while True:
        router.do_work(0.0 if polling else 1.0)
        found = router.receive()
        if found is None and polling:
            os.sched_yield()
        while found is not None:
            peer, (what, body) = found
            router.send(peer, [memoryview(slots.answer(bytes(what), body))])
            found = router.receive()


def zmq_client(url: str, polling: bool, seconds: float, key: bytes | None) -> dict[str, Any]:
    """Every figure of a server of either router."""
    import zmq

    pin(1)
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.sndbuf = SEND_BUFFER_BYTES
    if key:
        dealer.curve_serverkey = key
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.rcvtimeo = dealer.sndtimeo = 1000 * _TIMEOUT_S
    dealer.connect(url)

    def begin(what: bytes, body: Any) -> None:
        dealer.send(what, zmq.SNDMORE)
        dealer.send(body, copy=len(body) < 1 << 16)

    def take() -> bytes:
        until_s = time.monotonic() + _TIMEOUT_S
        while polling and not dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            yield_until(until_s)
        return bytes(dealer.recv())

    return measure(begin, take, polling, seconds)


def yield_until(until_s: float) -> None:
    """Let others run, between two looks. Raises TimeoutError after this time."""
    os.sched_yield()
    if time.monotonic() > until_s:
        raise TimeoutError(f"the server has not answered within {_TIMEOUT_S} s")


def measure(
    begin: Callable[[bytes, Any], None], take: Callable[[], bytes], polling: bool, seconds: float
) -> dict[str, Any]:
    """Echoes, then large messages of which two are under way, then nothing at all."""

    def ask(what: bytes, body: Any = b"") -> bytes:
        begin(what, body)
        return take()

    def cpu_ns() -> int:
        return int(_WORD.unpack(ask(CPU))[0])

    body, times = bytes(range(_ECHO_BYTES)), []
    for _ in range(200):
        assert ask(ECHO, body) == body
    before, began_s = cpu_ns(), time.monotonic()
    while len(times) < 200 or time.monotonic() < began_s + seconds:
        start = clock_ns()
        ask(ECHO, body)
        times.append(clock_ns() - start)
    took_s, cpu = time.monotonic() - began_s, cpu_ns() - before
    found: dict[str, Any] = {
        "echo_us": {**percentiles(times, 1000), "p99.9": float(np.percentile(times, 99.9)) / 1000},
        "echo_server_cpu_us": cpu / len(times) / 1000,
        "echo_server_cores": cpu / 1e9 / took_s,
    }
    for nbytes in LARGE:
        large = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).data
        for _ in range(_SLOTS):  # every slot has been written once before the clock
            begin(PUSH, large)
            take()
        before = cpu_ns()
        begin(PUSH, large)
        count, before_ns, began_s = 0, time.process_time_ns(), time.monotonic()
        while count < 4 or time.monotonic() < began_s + seconds:
            begin(PUSH, large)
            take()
            count += 1
        took_s, client_ns = time.monotonic() - began_s, time.process_time_ns() - before_ns
        take()
        server_ns = (cpu_ns() - before) * count / (count + 1)
        assert _WORD.unpack(ask(CHECK))[0] == zlib.crc32(large)
        name, moved = f"{nbytes >> 20}_mib", count * nbytes
        found |= {
            f"{name}_mb_per_s": moved / took_s / 1e6,
            f"{name}_server_cores": server_ns / 1e9 / took_s,
            f"{name}_server_cpu_ns_per_byte": server_ns / moved,
            f"{name}_client_cpu_ns_per_byte": client_ns / moved,
        }
    before, start = cpu_ns(), time.monotonic()
    time.sleep(max(0.5, seconds))
    found["idle_cpu"] = (cpu_ns() - before) / 1e9 / (time.monotonic() - start)
    return found
