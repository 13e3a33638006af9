"""Ring, mailbox and chunk path between two processes of one host.

    python -m benchmarks.transport.bench_ring [--quick] [--json FILE]

    round_trip   a message of 64 B there and back, microseconds; both sides spin, or both sleep
    mailbox      publish and read of 13.17 MB of parameters, each beside a plain memcpy of as much
                 memory that the same other process wrote last; microseconds
    chunk_path   a chunk of 64 Atari steps: written into a slot, and from there until it can be
                 sampled; beside it a copy of as many bytes

Every copy that a user would make is made: into the link and out of it, on both sides. Each cell is
a forked process that forks its peer; cells follow in an order drawn anew each round. The copies are
NumPy's.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.support.harness import arguments, clock_ns, in_rounds, percentiles, write_json
from benchmarks.support.processes import Process, reap, start_beside
from benchmarks.transport.server import PARAMETER_BYTES, Setting, make_host
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.schema import Column, Schema
from zapex.machine.mailbox import Mailbox
from zapex.machine.segment import Segment
from zapex.machine.waiting import Waiter, Waker
from zapex.replay.core import ReplayCore
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.shm_ring import ShmRing

MESSAGE_BYTES = 64
CHUNK, STACK, FRAME_BYTES = 64, 4, 84 * 84
INCARNATION = 1
ROUNDS = 5
_SECONDS = 0.3  # of each cell
_COPY_S = 0.03


class RingLink:
    """A ring for each direction; whoever waits looks, and sleeps or yields its core in between."""

    def __init__(self, sleeps: bool) -> None:
        capacity, dtype = 64, np.dtype((np.void, MESSAGE_BYTES))
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
        self._out, self._message = np.zeros(1, dtype), np.zeros(1, dtype)
        self.use(0)
        self.send()  # compiled before the fork
        self.use(1)
        self.receive()
        self.use(0)

    def use(self, end: int) -> None:
        """From now on this end is ours: 1 in the child."""
        self._producer, self._consumer, self._waker, self._waiter = self._ends[end]

    def send(self) -> None:
        """One message."""
        while not self._producer.try_offer(self._message):
            os.sched_yield()
        if self._waiter:
            self._waker.wake()

    def receive(self) -> None:
        """The next message."""
        ring = self._consumer.ring
        while not self._consumer.take(1, self._out).size:
            if self._waiter:
                self._waiter.wait(lambda: ring.tail > ring.head, timeout_s=10)
            else:
                os.sched_yield()


def copy_us(size: int) -> float:
    """Microseconds of one memcpy of `size` bytes."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times: list[float] = []
    stop = time.monotonic() + _COPY_S
    while len(times) < 5 or time.monotonic() < stop:
        start = clock_ns()
        np.copyto(target, source)
        times.append((clock_ns() - start) / 1000)
    return float(np.median(times))


def round_trip(seconds: float, sleeps: bool) -> dict[str, Any]:
    """Microseconds of a message there and back."""
    link = RingLink(sleeps)

    def echo() -> None:
        link.use(1)
        while True:
            link.receive()
            link.send()

    pid = start_beside(echo)
    times: list[float] = []
    stop = time.monotonic() + seconds
    while len(times) < 12 or time.monotonic() < stop:
        start = clock_ns()
        link.send()
        link.receive()
        times.append(clock_ns() - start)
    reap(pid)
    return {"us": percentiles(times[max(2, len(times) // 10) :], 1000)}


def mailbox(seconds: float, size: int) -> dict[str, Any]:
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
    box.newer_than(0, out)

    def wait_for(odd: int) -> int:
        while int(turn[0]) % 2 != odd:
            os.sched_yield()
        return int(turn[0])

    def read() -> None:
        now = wait_for(1)
        start = clock_ns()
        version = box.newer_than(box.version - 1, out)
        middle = clock_ns()
        out[:] = plain[version % 3]
        times[0], times[1] = middle - start, clock_ns() - middle
        turn[0] = now + 1

    pid = start_beside(read)
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


def chunk_path(seconds: float) -> dict[str, Any]:
    """Microseconds of writing 64 steps, and from their commit until they are sampleable.

    The replay polls. Sampleable: in the sum tree, its leaves set.
    """
    columns = {"obs": Column((FRAME_BYTES,), np.uint8, stack=STACK), "action": Column((), np.int64)}
    host = make_host(Setting(Schema(columns), CHUNK, (CHUNK,), 512, 64, 256 * CHUNK))
    layout = host.plan.replay
    limiter = LimiterConfig(
        samples_per_insert=0, tolerance=0, min_size_to_sample=1, grant=CHUNK, batch=1,
        capacity=layout.capacity,
    )  # fmt: skip
    replay = ReplayCore(layout, buffer=host.experience)
    intake = Intake(host.experience_source(), replay, limiter, streams_per_actor=1)
    done = Segment.create("bench-done", 4096).buffer[:16].view(np.int64)  # inserted, and when

    def serve() -> None:
        before = intake.inserted
        intake.do_work(0, 0)
        if intake.inserted != before:
            done[1] = clock_ns()
            done[0] = intake.inserted

    sink = host.experience_sink(0, INCARNATION)
    builder = ChunkBuilder(sink.store, 1, actor=0, incarnation=INCARNATION)
    obs = {"obs": aligned_zeros(STACK * FRAME_BYTES).reshape(1, STACK, FRAME_BYTES)}
    everyone, never, reward = np.ones(1, np.bool_), np.zeros(1, np.bool_), np.zeros(1)
    begun = False

    def write_chunk() -> np.ndarray:
        """Steps until a chunk closes: its slot."""
        nonlocal begun
        while True:
            if builder.spares == 0:
                slots = sink.try_claim()
                if slots is not None:
                    builder.provide(slots)
            if not begun:
                begun = builder.begin(everyone, obs) == 1
            elif builder.add(obs, reward, never, never) < 1:
                continue  # no slot yet
            closed = builder.take_closed()
            if closed.size:
                return closed

    for _turn in range(3):  # everything compiled before the fork
        while not (sink.ready() or builder.spares):
            serve()
        sink.commit(write_chunk())
        serve()
    pid = start_beside(serve)
    writes: list[float] = []
    pushes: list[float] = []
    expected = int(done[0])
    stop = time.monotonic() + seconds
    while len(pushes) < 8 or time.monotonic() < stop:
        start = clock_ns()
        slots = write_chunk()
        written = clock_ns()
        sink.commit(slots)
        expected += CHUNK
        while done[0] < expected:
            os.sched_yield()
        writes.append(written - start)
        pushes.append(int(done[1]) - written)
    reap(pid)
    return {
        "write_us": percentiles(writes[2:], 1000),
        "push_us": percentiles(pushes[2:], 1000),
        "copy_us": copy_us(CHUNK * FRAME_BYTES),
    }


CELLS: dict[tuple[str, str, int], Callable[[float], dict[str, Any]]] = {
    ("round_trip", "ring", MESSAGE_BYTES): partial(round_trip, sleeps=False),
    ("round_trip", "ring, sleeping", MESSAGE_BYTES): partial(round_trip, sleeps=True),
    ("mailbox", "mailbox", PARAMETER_BYTES): partial(mailbox, size=PARAMETER_BYTES),
    ("chunk_path", "actor to replay", CHUNK * FRAME_BYTES): chunk_path,
}
"""By kind, contender and bytes."""


def main(argv: Sequence[str] | None = None) -> int:
    """How fast ring, mailbox and the way of a chunk are."""
    options = arguments(main.__doc__ or "").parse_args(argv)
    rounds, seconds = (1, 0.1) if options.quick else (ROUNDS, _SECONDS)
    cells = {cell: partial(_in_its_process, cell, seconds) for cell in CELLS}
    medians, spreads = in_rounds(cells, rounds)
    results = [
        {"kind": kind, "contender": contender, "bytes": size, **found}
        for (kind, contender, size), found in medians.items()
    ]
    for one in results:
        figures = {name: v["p50"] if isinstance(v, dict) else v for name, v in one.items()
                   if name.endswith("us")}  # fmt: skip
        text = "  ".join(f"{name} {value:,.4g}" for name, value in figures.items())
        print(f"{one['kind']:10} {one['contender']:16} {one['bytes']:>12,} B  {text}")
    named = {":".join(map(str, cell)): spread for cell, spread in spreads.items()}
    write_json(options, "ring", {"cells": results}, rounds=rounds, spreads=named)
    return 0


def _in_its_process(cell: tuple[str, str, int], seconds: float) -> dict[str, Any]:
    child = Process(lambda: CELLS[cell](seconds))
    try:
        found: dict[str, Any] = child.result(timeout_s=300)
        return found
    finally:
        child.kill()


if __name__ == "__main__":
    raise SystemExit(main())
