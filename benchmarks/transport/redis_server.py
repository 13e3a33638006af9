"""The paper's baseline: Redis as shared memory, with its message format (arXiv 2110.13506).

An actor RPUSHes 43 MiB of plain uint8 pairs (800 of 4x84x84, twice); parameters are SET and GET,
13.17 MB. Nothing is pickled or compressed here, which flatters Redis. "GET by hand" speaks RESP
over a bare socket and receives into place: what the server can do without redis-py.
"""

import os
import shutil
import socket
import time
from typing import Any

import numpy as np

from benchmarks.transport.roofs import connected, timed

PAIRS_BYTES = 800 * 2 * 4 * 84 * 84
BINARY = shutil.which("redis-server")


def missing() -> str:
    """Why there is no Redis to measure; "" where there is."""
    try:
        import redis  # noqa: F401
    except ImportError:
        return "the redis package is missing: pip install 'zapex[redis]'"
    return "" if BINARY else "no redis-server was found"


def server(address: str, port: int, directory: str) -> None:
    """Become a Redis server that keeps nothing on disk."""
    assert BINARY
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    options = {
        "bind": address, "port": port, "save": "", "appendonly": "no", "protected-mode": "no",
        "dir": directory, "io-threads": 1,
    }  # fmt: skip
    os.execv(BINARY, [BINARY, *(str(w) for k, v in options.items() for w in (f"--{k}", v))])


def client(address: str, port: int, seconds: float, parameter_bytes: int) -> dict[str, Any]:
    """Microseconds of each command."""
    import redis

    link = redis.Redis(host=address, port=port, socket_timeout=60)
    deadline = time.monotonic() + 20
    while True:
        try:
            link.ping()
            break
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    pairs = np.random.default_rng(0).integers(0, 255, PAIRS_BYTES, np.uint8).data
    key = f"pairs {os.getpid()}"
    times: list[float] = []
    pops: list[float] = []
    stop = time.monotonic() + seconds
    while len(times) < 4 or time.monotonic() < stop:
        start = time.perf_counter_ns()
        link.rpush(key, pairs)
        middle = time.perf_counter_ns()
        link.lpop(key)
        times.append(middle - start)
        pops.append(time.perf_counter_ns() - middle)
    parameters = np.zeros(parameter_bytes, np.uint8).data
    return {
        "rpush_us": _median(times),
        "lpop_us": _median(pops),
        "set_us": timed(lambda: link.set("parameters", parameters), seconds),
        "get_us": timed(lambda: link.get("parameters"), seconds),
        "get_by_hand_us": timed(_get_by_hand(address, port, parameter_bytes), seconds),
        "rpush_per_s": len(times[1:]) / (sum(times[1:]) / 1e9),
    }


def _median(times: list[float]) -> dict[str, Any]:
    return {"p50": float(np.median(times[1:])) / 1000, "n": len(times) - 1}


def _get_by_hand(address: str, port: int, nbytes: int) -> Any:
    link = connected(lambda: socket.create_connection((address, port), timeout=60))
    head = f"${nbytes}\r\n".encode()
    answer = memoryview(bytearray(len(head) + nbytes + 2))

    def get() -> None:
        link.sendall(b"*2\r\n$3\r\nGET\r\n$10\r\nparameters\r\n")
        rest = answer
        while rest:
            rest = rest[link.recv_into(rest) :]

    return get
