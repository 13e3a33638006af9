"""How the replay's calls grow with its size, with actors and with clients.

    python -m benchmarks.replay.bench_scale [--quick] [--only PART] [--json FILE]

size      sample(512) and update_priorities of them among 2^14 to 2^21 Atari transitions, once every
          slot has been written and every chunk evicts another
restart   from the SIGKILL of a replay server until it answers again, 2^14 to 2^21 transitions (of
          two numbers: a server that starts reads headers and priorities, and no observations)
snapshot  save into a new directory, and load; sizes that the disk has room for
actors    1 to 16 processes that add 8 streams each by handle: all steps a second
clients   1 to 64 processes that sample 32 and update them, by handle and by URL: calls a second

Figures are microseconds a call, but those a second. Sizes come in an order drawn anew each round;
what the machine has no room for is left out, with a note.
"""

import contextlib
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import zapex
from benchmarks.peers.replays import SIDE, STACK
from benchmarks.replay.bench_clients import SCHEMA, served
from benchmarks.support.harness import (
    arguments,
    clock_ns,
    in_rounds,
    percentiles,
    write_json,
)
from benchmarks.support.machine import ROOT
from zapex import PrioritizedReplay

CAPACITIES = [2**n for n in range(14, 22)]
ACTORS, CLIENTS = [1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 32, 64]
BATCH, STREAMS = 512, 64
BYTES_A_TRANSITION = 8_200
ACTOR_STREAMS, SAMPLE = 8, 32
# Of "add": the streams of 16 actors still have chunks of 64 transitions, as those of one have.
CROWD_CAPACITY = {"add": 131_072, "sample": 16_384}
_DEADLINE_S = 300.0
_WARM_UP = 20


def full(capacity: int) -> tuple[PrioritizedReplay, Callable[[], None]]:
    """A replay in which each chunk evicts another, and what adds a step of all its streams."""
    replay = PrioritizedReplay(capacity, SCHEMA, seed=0, streams=STREAMS)
    add = adder(replay.writer(STREAMS), STREAMS)
    for _ in range(int(1.5 * capacity) // STREAMS):
        add()
    # Slots that are being written or rest in quarantine hold nothing: a few chunks a stream.
    assert len(replay) > 0.5 * capacity
    return replay, add


def pairs(capacity: int, calls: int) -> dict[str, Any]:
    """A batch and its priorities, with an add in between."""
    replay, add = full(capacity)
    out, errors = replay.empty_batch(BATCH), np.random.default_rng(1).random(BATCH) + 1e-6
    times: list[float] = []
    for _ in range(calls + 3):
        start = clock_ns()
        replay.sample(BATCH, 0.4, out=out)
        replay.update_priorities(out.keys, errors)
        times.append(clock_ns() - start)
        add()
    return {"pair": percentiles(times[3:], 1e3)}


def save_and_load(capacity: int) -> dict[str, float]:
    """Microseconds of each."""
    replay, _ = full(capacity)
    with tempfile.TemporaryDirectory() as folder:
        start = clock_ns()
        replay.save(folder)
        saved = clock_ns()
        loaded = PrioritizedReplay.load(folder)
        end = clock_ns()
        assert len(loaded) == len(replay)
    return {"save": (saved - start) / 1e3, "load": (end - saved) / 1e3}


def kill(transitions: int, kills: int) -> dict[str, float]:
    """Microseconds until a replay server answers again, as tests.stress.replay_restart has it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "restart.json"
        command = ["-m", "tests.stress.replay_restart", "--kills", str(kills)]
        command += ["--transitions", str(transitions), "--json", str(out)]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
        found = json.loads(out.read_text())["results"]["replay_restart"]
    return {"restart": 1e6 * found["sampling_again_s"]["p50"]}


def sizes_that_fit(quick: bool, free: int, twice: int = 1) -> list[int]:
    """Those whose memory is at most nine tenths of what is free."""
    chosen = CAPACITIES[:1] if quick else CAPACITIES
    fitting = [n for n in chosen if twice * n * BYTES_A_TRANSITION < 0.9 * free]
    for capacity in chosen[len(fitting) :]:
        print(f"  left out: {capacity:,} transitions, no room", file=sys.stderr)
    return fitting


def by_name(curve: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """{x: {name: figures}} as {name: {"curve": {x: figures}}}."""
    names = next(iter(curve.values()))
    return {name: {"curve": {str(x): found[name] for x, found in curve.items()}} for name in names}


def size(rounds: int, quick: bool) -> dict[str, Any]:
    """Each size in a fresh process, because memory that a process has had stays mapped."""
    fitting = sizes_that_fit(quick, psutil.virtual_memory().available)
    cells = {n: partial(_in_fresh_process, "size", n, 30 if quick else 400) for n in fitting}
    return by_name(in_rounds(cells, rounds).medians)


def _once_a_round(cells: Mapping[int, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, Any]:
    """Cells that find {name: us}: p10, p50 and p90 of the rounds."""
    found = in_rounds(cells, rounds)

    def of_rounds(x: int, name: str) -> dict[str, float]:
        low, high = found.spreads[x][name]
        return {"p10": low, "p50": found.medians[x][name], "p90": high, "n": rounds}

    return by_name({x: {name: of_rounds(x, name) for name in found.medians[x]} for x in cells})


def restart(rounds: int, quick: bool) -> dict[str, Any]:
    """A replay server that is killed."""
    chosen, kills = (CAPACITIES[:1], 1) if quick else (CAPACITIES, 3)
    return _once_a_round({n: partial(kill, n, kills) for n in chosen}, rounds)


def snapshot(rounds: int, quick: bool) -> dict[str, Any]:
    """Save and load, in a fresh process each."""
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    free = min(psutil.virtual_memory().available, disk)
    fitting = sizes_that_fit(quick, free, twice=2)  # the loaded one stands beside the saved one
    return _once_a_round({n: partial(_in_fresh_process, "snapshot", n) for n in fitting}, rounds)


def _in_fresh_process(*words: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.replay.bench_scale"]
    command += ["--cell", ":".join(map(str, words))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=1800)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _cell(what: str, *words: str) -> dict[str, Any]:
    if what in CROWDS:
        work, count, seconds = words
        return CROWDS[what](work, int(count), float(seconds))
    works: dict[str, Callable[..., dict[str, Any]]] = {"size": pairs, "snapshot": save_and_load}
    return works[what](*map(int, words))


# Many clients of one replay: forked before this process has threads; all begin at the same moment.


@cache
def _frames() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 255, (4096, SIDE, SIDE), np.uint8)


def adder(writer: Any, streams: int = ACTOR_STREAMS) -> Callable[[], None]:
    """What adds one step of all streams of a writer, of other frames in each call."""
    frames = _frames()
    starts = 61 * np.arange(streams)[:, None] + np.arange(STACK)
    inputs = [frames[(turn + starts) % len(frames)] for turn in range(64)]
    no = np.zeros(streams, bool)
    step = {"action": np.zeros(streams, np.int64), "reward": np.zeros(streams), "terminated": no}
    writer.reset(inputs[0])
    turn = 0

    def work() -> None:
        nonlocal turn
        turn += 1
        writer.add(next_obs=inputs[turn % len(inputs)], truncated=no, **step)

    return work


def fill(replay: Any, capacity: int) -> None:
    """Until each chunk evicts another."""
    writer = replay.writer(ACTOR_STREAMS)
    add = adder(writer)
    for _ in range(int(1.5 * capacity) // ACTOR_STREAMS):
        add()
    writer.close()


def _sample(replay: Any) -> Callable[[], object]:
    """A batch and its priorities."""
    out, errors = replay.empty_batch(SAMPLE), np.ones(SAMPLE)

    def work() -> None:
        replay.sample(SAMPLE, 0.4, out=out)
        replay.update_priorities(out.keys, errors)

    return work


_WORK = {"add": lambda replay: adder(replay.writer(ACTOR_STREAMS)), "sample": _sample}


def _client(pipe: Connection, what: str) -> None:
    """Calls until it is time; sends how many a second."""
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
    calls, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not calls:
        work()
        calls += 1
    pipe.send(calls / elapsed)
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
    """All begin once the last is ready."""
    for pipe in pipes:
        pipe.send((target, schema_file))
    for pipe in pipes:
        _receive(pipe)
    for pipe in pipes:
        pipe.send(seconds)
    return {"calls_per_s": sum(_receive(pipe) for pipe in pipes)}


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(_DEADLINE_S):
        raise RuntimeError(f"a client said nothing for {_DEADLINE_S:g} s")
    return pipe.recv()


def _own(pipe: Connection, capacity: int, streams: int) -> None:
    """The process behind the handle: it does nothing else."""
    replay = PrioritizedReplay(capacity, SCHEMA, seed=0, streams=streams)
    fill(replay, capacity)
    pipe.send(replay.handle)
    pipe.recv()


def by_handle(what: str, count: int, seconds: float) -> dict[str, Any]:
    """So many processes do it at once, through a handle. To be called in a fresh process."""
    streams = ACTOR_STREAMS * (count if what == "add" else 1)
    with _forked(what, count) as pipes:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        own = theirs, CROWD_CAPACITY[what], streams
        owner = context.Process(target=_own, args=own, daemon=True)
        owner.start()
        try:
            return _measure(pipes, _receive(mine), "", seconds)
        finally:
            owner.kill()
            owner.join()


def by_url(what: str, count: int, seconds: float) -> dict[str, Any]:
    """As by_handle, through a URL on the same host."""
    capacity = CROWD_CAPACITY[what]
    with contextlib.ExitStack() as held:
        pipes = held.enter_context(_forked(what, count))
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        (url,) = held.enter_context(served(folder, 1, capacity, 2 + count))
        schema_file = str(folder / "schema.json")
        client = zapex.connect(url, schema=schema_file, timeout_s=_DEADLINE_S)
        fill(client, capacity)
        client.close()
        return _measure(pipes, url, schema_file, seconds)


CROWDS = {"by handle": by_handle, "by URL": by_url}


def actors(rounds: int, quick: bool) -> dict[str, Any]:
    """Processes that add: steps a second."""
    counts, seconds = (ACTORS[1:2], 0.5) if quick else (ACTORS, 5.0)
    return {"by handle": _per_s("by handle", "add", counts, seconds, rounds, ACTOR_STREAMS)}


def clients(rounds: int, quick: bool) -> dict[str, Any]:
    """Processes that sample and update: calls a second."""
    counts, seconds = (CLIENTS[1:2], 0.5) if quick else (CLIENTS, 5.0)
    return {name: _per_s(name, "sample", counts, seconds, rounds, 1) for name in CROWDS}


def _per_s(
    name: str, what: str, counts: Sequence[int], seconds: float, rounds: int, times: int
) -> dict[str, Any]:
    """times: what one call counts for."""
    cells = {n: partial(_in_fresh_process, name, what, n, seconds) for n in counts}
    found = _once_a_round(cells, rounds)["calls_per_s"]["curve"]
    return {"per_s": {n: {p: times * one[p] for p in ("p10", "p50", "p90")}
                      for n, one in found.items()}}  # fmt: skip


PARTS: dict[str, Callable[[int, bool], dict[str, Any]]] = {
    "size": size, "restart": restart, "snapshot": snapshot, "actors": actors, "clients": clients,
}  # fmt: skip


def show(results: Mapping[str, Any]) -> None:
    """Every curve."""
    for part, by_call in results.items():
        for name, found in by_call.items():
            unit, curve = next(iter(found.items()))
            print(f"\n{part}, {name}: {'µs a call' if unit == 'curve' else 'a second'}")
            for x, one in curve.items():
                print(f"  {int(x):9,}  " + "  ".join(f"{p} {v:,.1f}" for p, v in one.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """How the replay's calls grow with what there is of everything."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cell", help="one measurement in this process (what:words)")
    options = parser.parse_args(argv)
    if options.cell:
        print(json.dumps(_cell(*options.cell.split(":"))))
        return 0
    rounds = 1 if options.quick else options.rounds
    results = {}
    for part in options.only or PARTS:
        began = time.monotonic()
        results[part] = PARTS[part](rounds, options.quick)
        print(f"{part}: {(time.monotonic() - began) / 60:.1f} min", file=sys.stderr)
    show(results)
    write_json(options, "scale", results, rounds=rounds, unit="us a call", batch=BATCH)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
