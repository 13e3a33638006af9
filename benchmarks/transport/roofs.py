"""What bounds a transport: the same bytes as a bare ZeroMQ message, and as a memcpy.

Each goes both ways: "push" is n bytes to the server and a few back, "pull" a few there and n back.
Calls follow each other at once; "rested" pulls come 30 ms apart, as zapex's do, who wait for news.
"""

import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.support.harness import clock_ns, percentiles

_PULL, _PUSH = 1, 2
_ASK = struct.Struct("<Bq")
_TIMEOUT_S = 60
_WARM_S = 0.2  # not counted: TCP finds its rate, libzmq's memory is faulted in
_REST_S = 0.03  # between two pulls: the next version is there by then


def timed(call: Callable[[], object], seconds: float, least: int = 5) -> dict[str, Any]:
    """Microseconds of a call, once connection, memory and caches are as they are in a run."""
    times: list[float] = []
    warm = time.monotonic() + min(_WARM_S, seconds)
    for _ in range(2):
        call()
    while time.monotonic() < warm:
        call()
    stop = time.monotonic() + seconds
    while len(times) < least or time.monotonic() < stop:
        start = clock_ns()
        call()
        times.append(clock_ns() - start)
    return percentiles(times, 1000)


def pulls(pull: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Microseconds of pulls with a rest between them, after one that is not counted."""
    times: list[float] = []
    stop = time.monotonic() + 2 * seconds
    while len(times) < 6 or time.monotonic() < stop:
        time.sleep(_REST_S)
        start = clock_ns()
        pull()
        times.append(clock_ns() - start)
    return percentiles(times[1:], 1000)


def rate(turn: Callable[[], int], seconds: float) -> float:
    """MB/s of something that returns how many bytes it moved, after a tenth that does not count."""
    stop = time.monotonic() + seconds / 10
    turn()
    while time.monotonic() < stop:
        turn()
    moved, start = 0, time.monotonic()
    while time.monotonic() < start + seconds:
        moved += turn()
    return moved / (time.monotonic() - start) / 1e6


def zmq_server(
    url: str, keys: tuple[bytes, bytes] | None = None, send_buffer_bytes: int | None = None
) -> None:
    """Answers for ever. send_buffer_bytes: of each connection; None: as the system has it."""
    import zmq

    router = zmq.Context().socket(zmq.ROUTER)
    if send_buffer_bytes is not None:
        router.sndbuf = send_buffer_bytes
    if keys:
        router.curve_server, (router.curve_publickey, router.curve_secretkey) = True, keys
    router.bind(url)
    values: dict[int, np.ndarray] = {}
    while True:
        route, ask, *_ = router.recv_multipart(copy=False)
        kind, size = _ASK.unpack(ask.buffer)
        if kind == _PUSH:
            router.send_multipart([route.bytes, b"ack"])
        else:
            value = values.setdefault(size, np.zeros(size, np.uint8))
            router.send_multipart([route.bytes, value], copy=False)


def zmq_client(
    url: str,
    sizes: list[int],
    seconds: float,
    key: bytes | None = None,
    send_buffer_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """Of each size: latency both ways, and throughput with two under way."""
    import zmq

    dealer = zmq.Context().socket(zmq.DEALER)
    if send_buffer_bytes is not None:
        dealer.sndbuf = send_buffer_bytes
    if key:
        dealer.curve_serverkey = key
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.rcvtimeo = dealer.sndtimeo = 1000 * _TIMEOUT_S
    dealer.connect(url)
    results = []
    for size in sizes:
        value = np.zeros(size, np.uint8)

        def push(size: int = size, value: np.ndarray = value) -> None:
            dealer.send_multipart([_ASK.pack(_PUSH, size), value], copy=False)
            dealer.recv()

        def ask(size: int = size) -> None:
            dealer.send(_ASK.pack(_PULL, size))

        def take(size: int = size) -> int:
            return len(dealer.recv(copy=False))

        def pull() -> None:
            ask()
            take()

        def turn() -> int:
            ask()
            return take()

        found = {"push_us": timed(push, seconds), "pull_us": timed(pull, seconds)}
        found["rested_pull_us"] = pulls(pull, seconds)
        ask()
        found["pull_mb_per_s"] = rate(turn, seconds)
        take()
        results.append(found)
    return results


def memcpy(sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """Of each size: one copy, from memory that is not the last copy's."""
    results = []
    for size in sizes:
        cells, turns = np.ones((4, size), np.uint8), iter(range(1 << 60))

        def copy(cells: np.ndarray = cells, turns: Any = turns) -> None:
            turn = next(turns)
            cells[turn % 4][:] = cells[(turn + 1) % 4]

        found = timed(copy, seconds)
        results.append({"push_us": found, "pull_us": found})
    return results
