"""Many clients of one replay at once: processes that add, or that sample and update.

The replay is full before they come. Each client warms up, then all begin at the same moment and go
on for the same time. The clients are forked from a server that has imported zapex, so that 64 of
them take a second to come, and not a minute.
"""

import contextlib
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import zapex
from benchmarks.peers.replays import SIDE, STACK
from benchmarks.support.harness import clock_ns
from benchmarks.support.machine import ROOT
from zapex import PrioritizedReplay, Schema

ACTOR_STREAMS, SAMPLE = 8, 32
# Of "add": the streams of 16 actors still have chunks of 64 transitions, as those of one have.
CAPACITY = {"add": 131_072, "sample": 16_384}
_DEADLINE_S = 300.0
_WARM_UP = 20
_KEPT = 20_000  # times of a client, the first ones


@cache
def _frames() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 255, (1024, SIDE, SIDE), np.uint8)


def _stacks(at: int, rows: int) -> np.ndarray:
    frames = _frames()
    return frames[(at + 61 * np.arange(rows)[:, None] + np.arange(STACK)) % len(frames)]


def fill(replay: Any, capacity: int) -> None:
    """Until each chunk evicts another."""
    writer = replay.writer(ACTOR_STREAMS)
    writer.reset(_stacks(0, ACTOR_STREAMS))
    step = _nothing()
    for turn in range(1, int(1.5 * capacity) // ACTOR_STREAMS):
        writer.add(next_obs=_stacks(turn, ACTOR_STREAMS), **step)
    writer.close()


def _nothing() -> dict[str, Any]:
    no = np.zeros(ACTOR_STREAMS, bool)
    return {"action": np.zeros(ACTOR_STREAMS, np.int64), "reward": np.zeros(ACTOR_STREAMS),
            "terminated": no, "truncated": no}  # fmt: skip


def _add(replay: Any) -> Callable[[], object]:
    """One step of eight streams."""
    writer = replay.writer(ACTOR_STREAMS)
    inputs = [_stacks(turn, ACTOR_STREAMS) for turn in range(64)]
    writer.reset(inputs[0])
    step, turn = _nothing(), 0

    def work() -> None:
        nonlocal turn
        turn += 1
        writer.add(next_obs=inputs[turn % len(inputs)], **step)

    return work


def _sample(replay: Any) -> Callable[[], object]:
    """A batch and its priorities."""
    out, errors = replay.empty_batch(SAMPLE), np.ones(SAMPLE)

    def work() -> None:
        replay.sample(SAMPLE, 0.4, out=out)
        replay.update_priorities(out.keys, errors)

    return work


_WORK = {"add": _add, "sample": _sample}


def _client(pipe: Connection, what: str) -> None:
    """Calls until it is time, each of them timed; sends how many, how long, and the times."""
    target, schema_file = pipe.recv()
    if schema_file:
        replay = zapex.connect(target, schema=schema_file, timeout_s=_DEADLINE_S)
    else:
        replay = zapex.connect(target)
    work = _WORK[what](replay)
    for _ in range(_WARM_UP):
        work()
    pipe.send("ready")
    seconds = pipe.recv()
    times: list[float] = []
    calls, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not calls:
        start = clock_ns()
        work()
        if calls < _KEPT:
            times.append(clock_ns() - start)
        calls += 1
    pipe.send((calls, elapsed, times))
    pipe.recv()  # its end is not part of anybody's time


@contextlib.contextmanager
def _forked(what: str, count: int) -> Iterator[list[Connection]]:
    """The clients' pipes. They are forked first: later this process has threads."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    try:
        for _ in range(count):
            mine, theirs = context.Pipe()
            pipes.append(mine)
            processes.append(context.Process(target=_client, args=(theirs, what), daemon=True))
            processes[-1].start()
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()  # only then is their processor time known to be ours


def _measure(
    pipes: Sequence[Connection], target: Any, schema_file: str, seconds: float
) -> dict[str, Any]:
    """All begin once the last is ready; microseconds of a call, calls a second."""
    for pipe in pipes:
        pipe.send((target, schema_file))
    for pipe in pipes:
        _receive(pipe)
    for pipe in pipes:
        pipe.send(seconds)
    told = [_receive(pipe) for pipe in pipes]
    times = np.concatenate([one[2] for one in told])
    points = np.percentile(times / 1e3, [10, 50, 90, 99, 99.9])
    names = ("p10", "p50", "p90", "p99", "p99.9")
    call = {name: round(float(v), 3) for name, v in zip(names, points, strict=True)}
    return {
        "call": {**call, "n": len(times)},
        "calls_per_s": sum(calls / elapsed for calls, elapsed, _ in told),
        "least_of_a_client": min(one[0] for one in told),
    }


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(_DEADLINE_S):
        raise RuntimeError(f"a client said nothing for {_DEADLINE_S:g} s")
    return pipe.recv()


def _own(pipe: Connection, schema: Schema, capacity: int, streams: int) -> None:
    """The process behind the handle: it does nothing else."""
    replay = PrioritizedReplay(capacity, schema, seed=0, streams=streams)
    fill(replay, capacity)
    pipe.send(replay.handle)
    pipe.recv()


def by_handle(what: str, count: int, seconds: float, schema: Schema) -> dict[str, Any]:
    """So many processes do it at once, through a handle. To be called in a fresh process."""
    streams = ACTOR_STREAMS * (count if what == "add" else 1)
    with _forked(what, count) as pipes:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        own = theirs, schema, CAPACITY[what], streams
        owner = context.Process(target=_own, args=own, daemon=True)
        owner.start()
        try:
            return _measure(pipes, _receive(mine), "", seconds)
        finally:
            owner.kill()
            owner.join()


@contextlib.contextmanager
def _served(schema: Schema, capacity: int, writers: int) -> Iterator[tuple[str, str]]:
    """URL and schema file of `zapex replay`, full."""
    with tempfile.TemporaryDirectory() as folder:
        schema_file = Path(folder, "schema.json")
        schema_file.write_text(schema.to_json())
        url = f"ipc://{folder}/replay"
        server = subprocess.Popen(
            [sys.executable, "-m", "zapex", "replay", "--schema", str(schema_file), "--listen",
             url, "--capacity", str(capacity), "--writers", str(writers)],
            cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            client = zapex.connect(url, schema=str(schema_file), timeout_s=_DEADLINE_S)
            fill(client, capacity)
            client.close()
            yield url, str(schema_file)
        finally:
            server.terminate()
            server.wait(30)


def by_url(what: str, count: int, seconds: float, schema: Schema) -> dict[str, Any]:
    """As by_handle, through a URL on the same host."""
    capacity, writers = CAPACITY[what], 2 + count
    with _forked(what, count) as pipes, _served(schema, capacity, writers) as (url, schema_file):
        return _measure(pipes, url, schema_file, seconds)
