"""Ring, mailbox and chunk path between two processes, 64 B to 64 MiB, beside what Python brings.

    python -m benchmarks.transport.bench_ring [--quick] [--json FILE]

    round_trip   one message there and back, microseconds; beside it four copies of as many bytes
    throughput   messages one way, in batches where the contender has them; beside it two copies.
                 Of a mailbox those are counted that were read: the newest wins
    descriptors  records of 16 bytes through one ring, 512 at a time
    mailbox      publish and read of a value, each beside a plain memcpy of as much memory that the
                 same other process wrote last; microseconds
    chunk_path   a chunk of 64 steps, so many bytes of frames: written into a slot, and from there
                 until it can be sampled; beside it a copy of as many bytes. 451,584 is Atari's

Every copy that a user would make is made: into the link and out of it, on both sides. Each cell is
a forked process that forks its peer; cells follow in an order drawn anew each round. The copies are
NumPy's, in one process, of memory that is in its cache where it fits: no link can be faster.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.support.harness import arguments, clock_ns, in_rounds, percentiles, write_json
from benchmarks.support.processes import reap, start_beside, start_with_result
from benchmarks.transport.server import Setting, make_host
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
from zapex.shm_transport import HostMemory

SIZES = [64, 4096, 65536, 1 << 20, 16 << 20, 64 << 20]
PARAMETER_BYTES = 4 * 3_292_837  # the dueling net of arXiv 2110.13506
DESCRIPTOR_BYTES = 16
ATARI_CHUNK_BYTES = 64 * 84 * 84
ROUNDS = 5
_SECONDS = 0.3  # of each cell
_COPY_S = 0.03


# Links between two processes have the same calls: send(n messages), receive() -> bytes.


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
        """At least one message, at most a batch: their bytes."""
        ring = self._consumer.ring
        while True:
            rows = self._consumer.take(self.batch, self._out)
            if rows.size:
                return int(rows.nbytes)
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
        return self._here.recv_bytes_into(self._out)


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
        received = self._queues[1].get(timeout=60)
        return int(received.nbytes)


LINKS: dict[str, Callable[[int], Any]] = {
    "ring": RingLink,
    "ring, sleeping": lambda size: RingLink(size, sleeps=True),
    "Pipe": PipeLink,
    "Queue": QueueLink,
    "torch Queue": lambda size: QueueLink(size, torch=True),
}


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


def fewest(size: int) -> int:
    """Messages that a cell has at least: one of 64 MiB may take half a second."""
    return 12 if size <= 1 << 20 else 5


def round_trip(contender: str, size: int, seconds: float) -> dict[str, Any]:
    """Microseconds of a message there and back."""
    link = LINKS[contender](size)

    def echo() -> None:
        link.become_peer()
        while True:
            link.receive()
            link.send(1)

    pid = start_beside(echo)
    times: list[float] = []
    stop = time.monotonic() + seconds
    while len(times) < fewest(size) or time.monotonic() < stop:
        start = clock_ns()
        link.send(1)
        link.receive()
        times.append(clock_ns() - start)
    reap(pid)
    us = percentiles(times[max(2, len(times) // 10) :], 1000)
    return {"us": us, "four_copies_us": 4 * copy_us(size)}


def throughput(contender: str, size: int, seconds: float) -> dict[str, Any]:
    """Messages and bytes a second, one way; counted by the receiver."""
    link = LINKS[contender](size)

    def flood() -> None:
        link.become_peer()
        while True:
            link.send(link.batch)

    pid = start_beside(flood)
    for _ in range(3):
        link.receive()
    received = messages = 0
    start = time.monotonic()
    while time.monotonic() < start + seconds or received < 5 * size:
        got = link.receive()
        received += got
        messages += got // size  # of what came in part nothing counts
    elapsed = time.monotonic() - start
    reap(pid)
    return {
        "messages_per_s": messages / elapsed, "mb_per_s": received / elapsed / 1e6,
        "received_bytes": received, "received_messages": messages,
        "two_copies_mb_per_s": size / (2 * copy_us(size)),
    }  # fmt: skip


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
    while len(cells["read"]) < fewest(size) or time.monotonic() < stop:
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


CHUNK = 64
INCARNATION = 1
STACK = 4
_MEMORY_BYTES = 256 << 20


def _setting(frame_bytes: int) -> Setting:
    """Observations of four frames; as many chunks as fit a fixed memory, 8 to 256."""
    columns = {"obs": Column((frame_bytes,), np.uint8, stack=STACK), "action": Column((), np.int64)}
    chunks = max(8, min(256, _MEMORY_BYTES // (CHUNK * frame_bytes)))
    return Setting(Schema(columns), CHUNK, (CHUNK,), 512, 64, chunks * CHUNK)


def _make_intake(host: HostMemory) -> Intake:
    layout = host.plan.replay
    replay = ReplayCore(layout, buffer=host.experience)
    limiter = LimiterConfig(
        samples_per_insert=0, tolerance=0, min_size_to_sample=1, grant=CHUNK, batch=1,
        capacity=layout.capacity,
    )  # fmt: skip
    source = host.experience_source()
    return Intake(source, replay, limiter, streams_per_actor=1)


def chunk_path(_: str, frames_bytes: int, seconds: float) -> dict[str, Any]:
    """Microseconds of writing 64 steps, and from their commit until they are sampleable.

    frames_bytes: of the steps' frames, each stored once; a multiple of 64. The replay polls.
    Sampleable: in the sum tree, its leaves set.
    """
    frame_bytes = frames_bytes // CHUNK
    host = make_host(_setting(frame_bytes))
    intake = _make_intake(host)
    done = Segment.create("bench-done", 4096).buffer[:16].view(np.int64)  # inserted, and when

    def serve() -> None:
        before = intake.inserted
        intake.do_work(0, 0)
        if intake.inserted != before:
            done[1] = clock_ns()
            done[0] = intake.inserted

    sink = host.experience_sink(0, INCARNATION)
    builder = ChunkBuilder(sink.store, 1, actor=0, incarnation=INCARNATION)
    obs = {"obs": aligned_zeros(STACK * frame_bytes).reshape(1, STACK, frame_bytes)}
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
        "copy_us": copy_us(frames_bytes),
    }


KINDS: dict[str, Callable[[str, int, float], dict[str, Any]]] = {
    "round_trip": round_trip,
    "throughput": throughput,
    "mailbox": mailbox,
    "chunk_path": chunk_path,
}


def cells_of(quick: bool) -> list[tuple[str, str, int]]:
    """(kind, contender, bytes) of everything measured."""
    sizes = SIZES[:1] if quick else SIZES
    return [
        *((kind, contender, size) for kind in ("round_trip", "throughput") for contender in LINKS
          for size in sizes),
        ("throughput", "ring", DESCRIPTOR_BYTES),
        *(("mailbox", "mailbox", size) for size in [*sizes, PARAMETER_BYTES]),
        *(("chunk_path", "actor to replay", size) for size in [*sizes, ATARI_CHUNK_BYTES]),
    ]  # fmt: skip


def show(results: Sequence[dict[str, Any]]) -> None:
    """A line for each cell: medians, and what a memcpy of as many bytes takes."""
    for one in results:
        kind = one["kind"]
        if kind == "round_trip":
            us = one["us"]
            text = f"{us['p50']:,.4g} µs there and back, p99 {us['p99']:,.4g}"
            text += f"; four copies {one['four_copies_us']:,.4g}"
        elif kind == "throughput":
            text = f"{one['mb_per_s']:,.4g} MB/s; two copies {one['two_copies_mb_per_s']:,.4g}"
        elif kind == "mailbox":
            times = (one[f"{name}_us"]["p50"] for name in ("publish", "write", "read", "copy"))
            text = "µs: publish {:.4g} (a copy {:.4g}), read {:.4g} (a copy {:.4g})".format(*times)
        else:
            times = (one[f"{name}_us"]["p50"] for name in ("write", "push"))
            text = "µs: written {:.4g}, commit to sampleable {:.4g}".format(*times)
        print(f"{kind:10} {one['contender']:16} {one['bytes']:>12,} B  {text}")


def main(argv: Sequence[str] | None = None) -> int:
    """How fast ring and mailbox are, beside Pipe, Queue and memcpy."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes for each cell")
    options = parser.parse_args(argv)
    rounds, seconds = (1, 0.1) if options.quick else (options.rounds, _SECONDS)
    cells = {cell: partial(_in_its_process, cell, seconds) for cell in cells_of(options.quick)}
    medians, spreads = in_rounds(cells, rounds)
    results = [
        {"kind": kind, "contender": contender, "bytes": size, **found}
        for (kind, contender, size), found in medians.items()
    ]
    show(results)
    named = {":".join(map(str, cell)): spread for cell, spread in spreads.items()}
    write_json(options, "ring", {"cells": results}, rounds=rounds, spreads=named)
    return 0


def _in_its_process(cell: tuple[str, str, int], seconds: float) -> dict[str, Any]:
    kind, contender, size = cell
    child = start_with_result(lambda: KINDS[kind](contender, size, seconds))
    try:
        found: dict[str, Any] = child.result(timeout_s=300)
        return found
    finally:
        child.kill()


if __name__ == "__main__":
    raise SystemExit(main())
