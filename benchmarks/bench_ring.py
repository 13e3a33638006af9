"""Ring and mailbox between two processes, beside what Python brings, from 64 B to 64 MiB.

    python -m benchmarks.bench_ring [--quick] [--json FILE]

    round_trip   one message there and back, microseconds
    throughput   messages one way, in batches where the contender has them
    descriptors  records of 16 bytes through one ring, 512 at a time
    mailbox      publish and read of a value, each beside a plain memcpy of as much memory that the
                 same other process wrote last; microseconds
    chunk_path   64 Atari steps: written into a slot, and from there until they can be sampled

Every copy that a user would make is made: into the link and out of it, on both sides. Each cell is
a fresh process that forks its peer; cells follow in an order drawn anew each round.
"""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks._forked import fork, reap
from benchmarks._harness import ROOT, arguments, clock_ns, percentiles, write_json
from zapex.idle import Waiter, Waker
from zapex.shm_mailbox import Mailbox
from zapex.shm_ring import ShmRing
from zapex.shm_segment import Segment

SIZES = [64, 4096, 65536, 1 << 20, 16 << 20, 64 << 20]
PARAMETER_BYTES = 4 * 3_292_837  # the dueling net of arXiv 2110.13506
DESCRIPTOR_BYTES = 16
ROUNDS = 3


class RingLink:
    """A ring for each direction; whoever waits looks, and yields its core in between."""

    def __init__(self, size: int, sleeps: bool = False) -> None:
        self.batch = max(1, min(512, (1 << 20) // size))
        capacity = 4 * self.batch
        dtype = np.dtype((np.void, size))
        ring_bytes = -(-ShmRing.required_bytes(capacity, dtype) // 128) * 128
        self._segment = Segment.create("bench-ring", 256 + 2 * ring_bytes)
        self._segment.populate()
        words = self._segment.buffer[:256].view(np.int64)
        parts = [self._segment.buffer[256 + i * ring_bytes :][:ring_bytes] for i in range(2)]
        rings = [ShmRing(part, capacity, dtype, create=True) for part in parts]
        fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self._ends = [
            (rings[i].producer(), rings[1 - i].consumer(), Waker(words, 16 * (1 - i), fds[1 - i]),
             Waiter(words, 16 * i, fds[i]) if sleeps else None)
            for i in range(2)
        ]  # fmt: skip
        self._out = np.zeros(self.batch, dtype)
        self._messages = np.zeros(self.batch, dtype)
        self._use(0)
        self.send(1)  # compiled before the fork
        self._use(1)
        self.receive()
        self._use(0)

    def _use(self, end: int) -> None:
        self._producer, self._consumer, self._waker, self._waiter = self._ends[end]

    def become_peer(self) -> None:
        """In the child: the other end is ours."""
        self._segment.populate()
        self._use(1)

    def send(self, n: int) -> None:
        """n messages."""
        rows = self._messages[:n]
        while not self._producer.try_offer(rows):
            os.sched_yield()
        if self._waiter:
            self._waker.wake()

    def receive(self) -> int:
        """At least one message, at most a batch: how many."""
        ring = self._consumer.ring
        while True:
            rows = self._consumer.take(self.batch, self._out)
            if rows.size:
                return rows.size
            if self._waiter:
                self._waiter.wait(lambda: ring.tail > ring.head, timeout_s=10)
            else:
                os.sched_yield()


class PipeLink:
    """multiprocessing.Pipe with raw bytes: no pickling."""

    batch = 1

    def __init__(self, size: int) -> None:
        self._here, self._there = multiprocessing.Pipe()
        self._message = bytearray(size)
        self._out = bytearray(size)

    def become_peer(self) -> None:
        self._here = self._there

    def send(self, n: int) -> None:
        self._here.send_bytes(self._message)

    def receive(self) -> int:
        self._here.recv_bytes_into(self._out)
        return 1


class QueueLink:
    """multiprocessing.Queue of NumPy arrays, or torch.multiprocessing's of tensors."""

    batch = 1

    def __init__(self, size: int, torch: bool = False) -> None:
        self._message: Any = np.zeros(size, np.uint8)
        if torch:
            import torch as torch_module
            import torch.multiprocessing as module

            torch_module.set_num_threads(1)
            context: Any = module.get_context("fork")
            self._wrap: Any = lambda: torch_module.from_numpy(self._message).clone()
        else:
            context = multiprocessing.get_context("fork")
            self._wrap = lambda: self._message
        self._queues = [context.Queue(), context.Queue()]

    def become_peer(self) -> None:
        self._queues.reverse()

    def send(self, n: int) -> None:
        self._queues[0].put(self._wrap())

    def receive(self) -> int:
        self._queues[1].get(timeout=60)
        return 1


LINKS: dict[str, Callable[[int], Any]] = {
    "ring": RingLink,
    "ring, sleeping": lambda size: RingLink(size, sleeps=True),
    "Pipe": PipeLink,
    "Queue": QueueLink,
    "torch Queue": lambda size: QueueLink(size, torch=True),
}


def round_trip(contender: str, size: int, seconds: float) -> dict[str, Any]:
    """Microseconds of a message there and back."""
    link = LINKS[contender](size)

    def echo() -> None:
        link.become_peer()
        while True:
            link.receive()
            link.send(1)

    pid = fork(echo)
    times: list[float] = []
    stop = time.monotonic() + seconds
    while len(times) < 12 or time.monotonic() < stop:
        start = clock_ns()
        link.send(1)
        link.receive()
        times.append(clock_ns() - start)
    reap(pid)
    return {"us": percentiles(times[max(2, len(times) // 10) :], 1000)}


def throughput(contender: str, size: int, seconds: float) -> dict[str, Any]:
    """Messages and bytes a second, one way; counted by the receiver."""
    link = LINKS[contender](size)

    def flood() -> None:
        link.become_peer()
        while True:
            link.send(link.batch)

    pid = fork(flood)
    for _ in range(3):
        link.receive()
    received, start = 0, time.monotonic()
    while time.monotonic() < start + seconds or received < 5:
        received += link.receive()
    elapsed = time.monotonic() - start
    reap(pid)
    return {"messages_per_s": received / elapsed, "mb_per_s": received * size / elapsed / 1e6}


def mailbox(_: str, size: int, seconds: float) -> dict[str, Any]:
    """Microseconds of publish and read, and of a memcpy in either place."""
    box_bytes = -(-Mailbox.required_bytes(size) // 128) * 128
    # The plain copies rotate over as many cells as the mailbox has.
    segment = Segment.create("bench-mailbox", 128 + box_bytes + 3 * size)
    segment.populate()
    times = segment.buffer[:128].view(np.float64)  # what the reader measured
    box = Mailbox(segment.buffer[128:], size, create=True)
    plain = segment.buffer[128 + box_bytes :].reshape(3, size)
    turn = segment.buffer[64:72].view(np.int64)  # odd: the reader's
    value, out = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    box.publish(1, value)
    box.read_newer(0, out)

    def wait_for(odd: int) -> int:
        while int(turn[0]) % 2 != odd:
            os.sched_yield()
        return int(turn[0])

    def read() -> None:
        now = wait_for(1)
        start = clock_ns()
        version = box.read_newer(box.version - 1, out)
        middle = clock_ns()
        out[:] = plain[version % 3]
        times[0], times[1] = middle - start, clock_ns() - middle
        turn[0] = now + 1

    pid = fork(read)
    cells: dict[str, list[float]] = {"publish": [], "write": [], "read": [], "copy": []}
    stop = time.monotonic() + seconds
    while len(cells["read"]) < 12 or time.monotonic() < stop:
        version = box.version + 1
        start = clock_ns()
        box.publish(version, value)
        middle = clock_ns()
        plain[version % 3] = value
        end = clock_ns()
        turn[0] += 1
        wait_for(0)
        for name, elapsed in zip(
            cells, (middle - start, end - middle, float(times[0]), float(times[1])), strict=True
        ):
            cells[name].append(elapsed)
    reap(pid)
    return {f"{name}_us": percentiles(found[2:], 1000) for name, found in cells.items()}


def chunk_path(_: str, size: int, seconds: float) -> dict[str, Any]:
    """Of 64 steps: writing them, and from their commit until they are sampleable."""
    from benchmarks import chunk_path as path  # the replay is imported by this cell alone

    return path.measure(seconds)


KINDS: dict[str, Callable[[str, int, float], dict[str, Any]]] = {
    "round_trip": round_trip,
    "throughput": throughput,
    "mailbox": mailbox,
    "chunk_path": chunk_path,
}


def cells_of(quick: bool) -> list[tuple[str, str, int]]:
    """(kind, contender, bytes) of everything measured."""
    sizes = SIZES[:3] if quick else SIZES
    return [
        *(("round_trip", contender, size) for contender in LINKS for size in sizes),
        *(
            ("throughput", contender, size)
            for contender in ("ring", "Pipe", "Queue")
            for size in sizes
        ),
        ("throughput", "ring", DESCRIPTOR_BYTES),
        *(("mailbox", "mailbox", size) for size in [*sizes, PARAMETER_BYTES]),
        ("chunk_path", "actor to replay", 64 * 84 * 84),
    ]


def _median(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs of one cell, each figure's median."""
    merged: dict[str, Any] = {}
    for name, value in found[0].items():
        column = [one[name] for one in found]
        merged[name] = _median(column) if isinstance(value, dict) else float(np.median(column))
    return merged


def main(argv: Sequence[str] | None = None) -> int:
    """How fast ring and mailbox are, beside Pipe, Queue and memcpy."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--cell", help="one measurement in this process (kind:contender:bytes)")
    options = parser.parse_args(argv)
    if options.cell:
        kind, contender, size = options.cell.split(":")
        print(json.dumps(KINDS[kind](contender, int(size), 0.2 if options.quick else 1.0)))
        return 0
    rounds = 1 if options.quick else ROUNDS
    cells = cells_of(options.quick)
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {cell: [] for cell in cells}
    shuffler = random.Random(0)
    for _ in range(rounds):
        for cell in shuffler.sample(cells, len(cells)):
            name = ":".join(map(str, cell))
            command = [sys.executable, "-m", "benchmarks.bench_ring", "--cell", name]
            command += ["--quick"] if options.quick else []
            result = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=300
            )
            found[cell].append(json.loads(result.stdout))
    results = [
        {
            "kind": kind,
            "contender": contender,
            "bytes": size,
            **_median(found[kind, contender, size]),
        }
        for kind, contender, size in cells
    ]
    for result in results:
        print(json.dumps(result))
    if options.json:
        write_json(options.json, "ring", {"cells": results}, rounds=rounds, quick=options.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
