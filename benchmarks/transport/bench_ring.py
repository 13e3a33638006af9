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
a fresh process that forks its peer; cells follow in an order drawn anew each round. The copies are
NumPy's, in one process, of memory that is in its cache where it fits: no link can be faster.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.support.harness import (
    arguments,
    clock_ns,
    goal,
    in_rounds,
    percentiles,
    write_json,
)
from benchmarks.support.machine import ROOT
from benchmarks.support.processes import reap, start_beside
from benchmarks.transport.links import LINKS
from zapex.machine.mailbox import Mailbox
from zapex.machine.segment import Segment

SIZES = [64, 4096, 65536, 1 << 20, 16 << 20, 64 << 20]
PARAMETER_BYTES = 4 * 3_292_837  # the dueling net of arXiv 2110.13506
DESCRIPTOR_BYTES = 16
ATARI_CHUNK_BYTES = 64 * 84 * 84
ROUNDS = 5
_SECONDS = 0.3  # of each cell
_COPY_S = 0.03


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


def chunk_path(_: str, size: int, seconds: float) -> dict[str, Any]:
    """Of 64 steps: writing them, and from their commit until they are sampleable."""
    from benchmarks.transport import chunk_path as path

    return path.measure(seconds, size) | {"copy_us": copy_us(size)}


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


def _size(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size:,} B"


def show(results: Sequence[dict[str, Any]]) -> None:
    """Tables of medians, and the goals."""
    by_cell = {(one["kind"], one["contender"], one["bytes"]): one for one in results}
    figures: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
        ("round_trip", "there and back, us: p50 / p99",
         lambda one: f"{one['us']['p50']:,.4g} / {one['us']['p99']:,.4g}"),
        ("throughput", "one way, MB/s", lambda one: f"{one['mb_per_s']:,.4g}"),
        ("mailbox", "publish and read, us (x of a memcpy)",
         lambda one: "  ".join(f"{one[a + '_us']['p50']:,.4g} ({_ratio(one, a, b):.2f} x)"
                               for a, b in (("publish", "write"), ("read", "copy")))),
        ("chunk_path", "write + commit to sampleable, us; a memcpy",
         lambda one: f"{one['write_us']['p50']:,.4g} + {one['push_us']['p50']:,.4g};"
                     f" {one['copy_us']:,.4g}"),
    ]  # fmt: skip
    for kind, title, figure in figures:
        print(f"\n{title}")
        sizes = sorted({size for one, _, size in by_cell if one == kind})
        for contender in dict.fromkeys(name for one, name, _ in by_cell if one == kind):
            for size in sizes:
                one = by_cell.get((kind, contender, size))
                if one is not None:
                    print(f"  {contender:<16} {_size(size):>12}  {figure(one)}")
        bound = {"round_trip": "four_copies_us", "throughput": "two_copies_mb_per_s"}.get(kind)
        for size in sizes if bound else []:
            of_size = [o[bound] for (k, _, n), o in by_cell.items() if (k, n) == (kind, size)]
            print(f"  {'memcpy':<16} {_size(size):>12}  {np.median(of_size):,.4g}")
    print()
    small = by_cell["round_trip", "ring", 64]["us"]
    print(goal("ring round trip, 64 B, p50", small["p50"], 5, " us"), f"(p99 {small['p99']:.4g})")
    descriptors = by_cell["throughput", "ring", DESCRIPTOR_BYTES]["messages_per_s"] / 1e6
    print(goal("descriptors through one ring", descriptors, 20, " M/s", least=True))
    push = by_cell["chunk_path", "actor to replay", ATARI_CHUNK_BYTES]["push_us"]["p50"]
    print(goal("64 Atari transitions, commit to sampleable", push, 50, " us"))
    parameters = by_cell["mailbox", "mailbox", PARAMETER_BYTES]
    for name, ours, plain in (("publish", "publish", "write"), ("pull", "read", "copy")):
        ratio = _ratio(parameters, ours, plain)
        print(goal(f"13.17 MB, {name}", ratio, 1.2, " x of a memcpy"))


def _ratio(one: dict[str, Any], ours: str, plain: str) -> float:
    return float(one[f"{ours}_us"]["p50"] / one[f"{plain}_us"]["p50"])


def main(argv: Sequence[str] | None = None) -> int:
    """How fast ring and mailbox are, beside Pipe, Queue and memcpy."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--cell", help="one measurement in this process (kind:contender:bytes)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fresh processes for each cell")
    options = parser.parse_args(argv)
    if options.cell:
        kind, contender, size = options.cell.split(":")
        print(json.dumps(KINDS[kind](contender, int(size), 0.15 if options.quick else _SECONDS)))
        return 0
    rounds = 1 if options.quick else options.rounds
    cells = {
        cell: partial(_in_fresh_process, cell, options.quick) for cell in cells_of(options.quick)
    }
    medians, spreads = in_rounds(cells, rounds)
    results = [
        {"kind": kind, "contender": contender, "bytes": size, **found}
        for (kind, contender, size), found in medians.items()
    ]
    show(results)
    named = {":".join(map(str, cell)): spread for cell, spread in spreads.items()}
    write_json(options, "ring", {"cells": results}, rounds=rounds, spreads=named)
    return 0


def _in_fresh_process(cell: tuple[str, str, int], quick: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.transport.bench_ring"]
    command += ["--cell", ":".join(map(str, cell)), *(["--quick"] if quick else [])]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
