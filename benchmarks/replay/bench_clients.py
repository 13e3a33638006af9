"""The same calls on your own replay, through a handle, and through one URL or four on this host.

    python -m benchmarks.replay.bench_clients [--quick] [--json FILE]

sample    512 Atari transitions (84x84x4, n = 3) into memory that was used before
update    update_priorities of these 512
add       writer.add of 8 streams of Atari frames: what one step of all costs the actor
extend    64 successive rows of one stream
tiny      one row: sample(1) and update_priorities of one key, call after call, both ends awake
rare      sample(1) two milliseconds after the call before: the owner sleeps, and its core with it

Every contender runs the same loop in a fresh process, its owner in another (but "local", its own);
the rounds are interleaved. All memory has been written before the clock runs; inputs rotate over
more of it than the caches have. "moved" is the local
replay once its handle was asked for: what the move into shared memory costs its owner. "urls" is
one client of four served replays that hold the transitions of one together.
"""

import contextlib
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import zapex
from benchmarks.peers.replays import SIDE, STACK
from benchmarks.support.harness import (
    arguments,
    clock_ns,
    interleaved,
    percentiles,
    write_json,
)
from benchmarks.support.machine import ROOT
from zapex import Column, PrioritizedReplay, Schema

BATCH, STREAMS, ROWS, CAPACITY, SHARDS = 512, 8, 64, 16_384, 4
_ROTATING, _COLD_STEPS = 32, 512  # inputs of 3.6 MB and of 226 KB: together more than any cache
CASES = ("sample", "update", "add", "extend", "tiny sample", "tiny update", "rare sample")
SCHEMA = Schema(
    {"obs": Column((SIDE, SIDE), np.uint8, STACK), "action": Column((), np.int64)}, n_step=3
)


def cases(replay: Any) -> dict[str, Callable[[], float]]:
    """Each returns the nanoseconds of its call; `replay`: a replay, or a client of one."""
    frames = np.random.default_rng(0).integers(1, 255, (4096, SIDE, SIDE), np.uint8)
    starts = 61 * np.arange(STREAMS)[:, None] + np.arange(STACK)
    writer = replay.writer(STREAMS)
    clock = first = 0

    def stacks(at: int) -> np.ndarray:
        return frames[(at + np.arange(ROWS)[:, None] + np.arange(STACK)) % len(frames)]

    pairs = [(stacks(61 * i), stacks(61 * i + 3)) for i in range(_ROTATING)]
    steps = [frames[(i + starts) % len(frames)] for i in range(1, _COLD_STEPS + 1)]

    def add() -> float:
        nonlocal clock
        step = {
            "action": np.zeros(STREAMS, np.int64), "reward": np.zeros(STREAMS),
            "terminated": np.zeros(STREAMS, bool), "truncated": np.zeros(STREAMS, bool),
            "next_obs": steps[clock % _COLD_STEPS],
        }  # fmt: skip
        clock += 1
        start = clock_ns()
        writer.add(**step)
        return clock_ns() - start

    def extend() -> float:
        nonlocal first
        obs, next_obs = pairs[first % _ROTATING]
        first += 1
        start = clock_ns()
        replay.extend(obs=obs, next_obs=next_obs, action=np.zeros(ROWS, np.int64),
                      reward=np.zeros(ROWS), terminated=np.zeros(ROWS, bool))  # fmt: skip
        return clock_ns() - start

    writer.reset(frames[starts % len(frames)])
    for _ in range(2 * CAPACITY // ROWS):
        extend()
    for _ in range(200):
        add()
    out, one, errors = replay.empty_batch(BATCH), replay.empty_batch(1), np.ones(BATCH)
    replay.sample(BATCH, out=out)

    def sample() -> float:
        start = clock_ns()
        replay.sample(BATCH, out=out)
        return clock_ns() - start

    def update() -> float:
        start = clock_ns()
        replay.update_priorities(out.keys, errors)
        return clock_ns() - start

    def tiny_sample() -> float:
        start = clock_ns()
        replay.sample(1, out=one)
        return clock_ns() - start

    def rare_sample() -> float:
        time.sleep(2e-3)
        return tiny_sample()

    def tiny_update() -> float:
        start = clock_ns()
        replay.update_priorities(one.keys, errors[:1])
        return clock_ns() - start

    return {
        "sample": sample, "update": update, "add": add, "extend": extend,
        "tiny sample": tiny_sample, "tiny update": tiny_update, "rare sample": rare_sample,
    }  # fmt: skip


def contender(name: str, target: Any, schema_file: str, pipe: Connection) -> None:
    """A process that runs a case `calls` times whenever it is asked: the median, in ns."""
    if name in ("local", "moved"):
        replay: Any = PrioritizedReplay(CAPACITY, SCHEMA, seed=0)
        if name == "moved":
            _ = replay.handle
    elif name == "handle":
        replay = zapex.connect(target)
    else:
        replay = zapex.connect(target, schema=schema_file, timeout_s=60.0)
    found = cases(replay)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        case, calls = order
        # After a pause, a virtual machine's cores take some milliseconds until both are there.
        warm_up = 20 * calls if case.startswith("tiny") else 0
        times = [found[case]() for _ in range(warm_up + calls)]
        pipe.send(float(np.median(times[warm_up:])))


def owner(pipe: Connection) -> None:
    """The process behind the handle: it does nothing else."""
    replay = PrioritizedReplay(CAPACITY, SCHEMA, seed=0)
    pipe.send(replay.handle)
    pipe.recv()


@contextlib.contextmanager
def served(
    folder: Path, count: int = 1, capacity: int = CAPACITY, writers: int = 4
) -> Iterator[list[str]]:
    """So many served replays, of this capacity together; their URLs."""
    schema_file = folder / "schema.json"
    schema_file.write_text(SCHEMA.to_json())
    urls, servers = [f"ipc://{folder}/{count}-{i}" for i in range(count)], []
    try:
        for url in urls:
            command = [sys.executable, "-m", "zapex", "replay", "--schema", str(schema_file)]
            command += ["--listen", url, "--capacity", str(capacity // count)]
            command += ["--writers", str(writers)]
            servers.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))
        yield urls
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(30)


def measure(rounds: int, calls: int) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds a call: {case: {contender: percentiles}}."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))

        def begin(work: Callable[..., None], *args: Any) -> Connection:
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(*args, theirs), daemon=True)
            process.start()
            held.callback(process.join)  # only then is its processor time known to be ours
            held.callback(process.kill)
            return mine

        (url,) = held.enter_context(served(folder))
        urls = held.enter_context(served(folder, SHARDS))
        owning = begin(owner)  # it ends when this end is closed
        handle = owning.recv()
        targets = {"local": None, "moved": None, "handle": handle, "url": url, "urls": urls}
        schema_file = str(folder / "schema.json")
        pipes = {
            name: begin(contender, name, target, schema_file) for name, target in targets.items()
        }
        for pipe in pipes.values():
            pipe.recv()

        def run(name: str, case: str) -> float:
            pipes[name].send((case, calls))
            return float(pipes[name].recv())

        found: dict[str, dict[str, dict[str, float]]] = {}
        for case in CASES:
            works = {name: partial(run, name, case) for name in targets}
            times = interleaved(works, rounds, warm_up=1)
            found[case] = {n: percentiles(values, 1e3) for n, values in times.items()}
        return found


def show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    names = list(next(iter(found.values())))
    print("microseconds a call, medians     " + "".join(f"{name:>12}" for name in names))
    for case, by_name in found.items():
        print(f"{case:33}" + "".join(f"{by_name[name]['p50']:12.1f}" for name in names))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, pins=True).parse_args(argv)
    start = time.monotonic()
    rounds = 3 if options.quick else 15
    found = measure(rounds, 5 if options.quick else 30)
    show(found)
    print(f"{time.monotonic() - start:.0f} s")
    write_json(options, "clients", found, rounds=rounds, batch=BATCH, streams=STREAMS, rows=ROWS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
