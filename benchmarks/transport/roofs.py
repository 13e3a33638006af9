"""What bounds a transport: the same bytes as a bare ZeroMQ message.

Each goes both ways: "push" is n bytes to the server and a few back, "pull" a few there and n back.
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
_REST_S = 0.03  # between two pulls of parameters: the next version is there by then


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
    """Of each size: latency both ways."""
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

        def pull(size: int = size) -> None:
            dealer.send(_ASK.pack(_PULL, size))
            dealer.recv(copy=False)

        results.append({"push_us": timed(push, seconds), "pull_us": timed(pull, seconds)})
    return results
