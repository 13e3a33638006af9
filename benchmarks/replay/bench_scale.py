"""How the replay's calls grow with its size, with the batch, with actors and with clients.

    python -m benchmarks.replay.bench_scale [--quick] [--only PART] [--json FILE]

size      sample(512), update_priorities of them and writer.add of 64 streams, 2^14 to 2^21 Atari
          transitions, once every slot has been written and every chunk evicts another
batch     sample and update of 32 to 4,096 among 2^17
restart   from the SIGKILL of a replay server until it answers again, 2^14 to 2^21 transitions (of
          two numbers: a server that starts reads headers and priorities, and no observations)
snapshot  save into a new directory, and load; sizes that the disk has room for
actors    1 to 16 processes that add 8 streams each by handle: all steps a second, and one call
clients   1 to 64 processes that sample 32 and update them, by handle and by URL: calls a second

Each figure has p10, p50, p90, p99 and p99.9 of single calls; of restarts and snapshots, p10, p50
and p90 of the rounds. An exponent is the slope of the medians on a plot with two logarithmic axes:
0 if the size does not matter, 1 if twice the size takes twice as long. Sizes come in an order drawn
anew each round; what the machine has no room for is left out and told.
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
    Rounds,
    arguments,
    clock_ns,
    in_rounds,
    write_json,
)
from benchmarks.support.machine import ROOT
from zapex import PrioritizedReplay

CAPACITIES = [2**n for n in range(14, 22)]
BATCHES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
ACTORS, CLIENTS = [1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 32, 64]
BATCH, STREAMS, MIDDLE = 512, 64, 2**17
BYTES_A_TRANSITION = 8_200
ACTOR_STREAMS, SAMPLE = 8, 32
# Of "add": the streams of 16 actors still have chunks of 64 transitions, as those of one have.
CROWD_CAPACITY = {"add": 131_072, "sample": 16_384}
_DEADLINE_S = 300.0
_WARM_UP = 20
_KEPT = 20_000  # times of a client, the first ones
_ROTATING = 64
_POINTS = {"p10": 10, "p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9}


def tails(nanoseconds: Sequence[float]) -> dict[str, float]:
    """Microseconds, to the rarest one in a thousand, and how many there were."""
    points = np.percentile(np.asarray(nanoseconds, float) / 1e3, list(_POINTS.values()))
    named = {name: round(float(v), 3) for name, v in zip(_POINTS, points, strict=True)}
    return {**named, "n": len(nanoseconds)}


def exponent(curve: Mapping[str, Mapping[str, float]]) -> float:
    """The slope of log(p50) over log(x), by least squares."""
    xs = np.log([float(x) for x in curve])
    ys = np.log([found["p50"] for found in curve.values()])
    return round(float(np.polyfit(xs, ys, 1)[0]), 3)


class FullReplay:
    """A replay of Atari transitions in steady eviction: every add evicts what it adds."""

    def __init__(self, capacity: int) -> None:
        self.replay = PrioritizedReplay(capacity, SCHEMA, seed=0, streams=STREAMS)
        self._writer = self.replay.writer(STREAMS)
        frames = np.random.default_rng(0).integers(1, 255, (4096, SIDE, SIDE), np.uint8)
        starts = 61 * np.arange(STREAMS)[:, None] + np.arange(STACK)
        self._inputs = [frames[(i + starts) % len(frames)] for i in range(_ROTATING)]
        self._step: dict[str, Any] = {
            "action": np.zeros(STREAMS, np.int64), "reward": np.zeros(STREAMS),
            "terminated": np.zeros(STREAMS, bool), "truncated": np.zeros(STREAMS, bool),
        }  # fmt: skip
        self._turn = 0
        self._writer.reset(self._inputs[0])
        while self._turn * STREAMS < 1.5 * capacity:
            self.add()

    def add(self) -> float:
        """One step of all streams: nanoseconds."""
        self._turn += 1
        next_obs = self._inputs[self._turn % _ROTATING]
        start = clock_ns()
        self._writer.add(next_obs=next_obs, **self._step)
        return clock_ns() - start

    def pairs(self, batch: int, calls: int) -> dict[str, Any]:
        """sample, update and add in turns, as often each."""
        out = self.replay.empty_batch(batch)
        errors = np.random.default_rng(1).random(batch) + 1e-6
        times: dict[str, list[float]] = {"sample": [], "update": [], "pair": [], "add": []}
        for call in range(calls + 3):
            start = clock_ns()
            self.replay.sample(batch, 0.4, out=out)
            middle = clock_ns()
            applied, stale = self.replay.update_priorities(out.keys, errors)
            end = clock_ns()
            assert applied + stale == batch
            added = self.add()
            if call >= 3:
                for name, value in zip(times, (middle - start, end - middle, end - start, added),
                                       strict=True):  # fmt: skip
                    times[name].append(value)
        return {name: tails(found) for name, found in times.items()}

    def live(self) -> int:
        """Transitions that can be drawn."""
        return len(self.replay)


def sizes_that_fit(capacities: Sequence[int], free: int, twice: int = 1) -> list[int]:
    """Those whose memory is at most nine tenths of the free; the others are told."""
    fitting = [n for n in capacities if twice * n * BYTES_A_TRANSITION < 0.9 * free]
    for capacity in sorted(set(capacities) - set(fitting)):
        print(f"  left out: {capacity:,} transitions, no room", file=sys.stderr)
    return fitting


def by_name(curve: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """{x: {name: tails}} as {name: {"curve": {x: tails}, "exponent"}}."""
    names = next(iter(curve.values()))
    found = {}
    for name in names:
        one = {str(x): found_there[name] for x, found_there in curve.items()}
        found[name] = {"curve": one}
        if len(one) > 1 and "p50" in names[name]:
            found[name]["exponent"] = exponent(one)
    return found


def size(rounds: int, quick: bool) -> dict[str, Any]:
    """Each size in a fresh process, because memory that a process has had stays mapped."""
    capacities = CAPACITIES[:1] if quick else CAPACITIES
    fitting = sizes_that_fit(capacities, psutil.virtual_memory().available)
    calls = 30 if quick else 400
    cells = {n: partial(_in_fresh_process, "size", n, calls) for n in fitting}
    return by_name(in_rounds(cells, rounds).medians)


def batch(rounds: int, quick: bool) -> dict[str, Any]:
    """Among the same transitions."""
    full = FullReplay(2**14 if quick else MIDDLE)
    calls = 20 if quick else 200
    cells = {n: partial(full.pairs, n, calls) for n in (BATCHES[:1] if quick else BATCHES)}
    return by_name(in_rounds(cells, rounds).medians)


def _once_a_round(cells: Mapping[int, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, Any]:
    """Cells that find {name: us}: p10, p50 and p90 of the rounds."""
    found = in_rounds(cells, rounds)

    def of_rounds(x: int, name: str) -> dict[str, float]:
        low, high = found.spreads[x][name]
        middle = float(f"{found.medians[x][name]:.6g}")  # as the spreads are
        return {"p10": low, "p50": middle, "p90": high, "n": rounds}

    return by_name({x: {name: of_rounds(x, name) for name in found.medians[x]} for x in cells})


def restart(rounds: int, quick: bool) -> dict[str, Any]:
    """As tests.stress.replay_restart measures it."""
    kills = 1 if quick else 3

    def one(transitions: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "restart.json"
            command = ["-m", "tests.stress.replay_restart", "--kills", str(kills)]
            command += ["--transitions", str(transitions), "--json", str(out)]
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
            found = json.loads(out.read_text())["results"]["replay_restart"]
        return {"restart": 1e6 * found["sampling_again_s"]["p50"]}

    cells = {n: partial(one, n) for n in (CAPACITIES[:1] if quick else CAPACITIES)}
    return _once_a_round(cells, rounds)


def snapshot(rounds: int, quick: bool) -> dict[str, Any]:
    """Save and load, in a fresh process each."""
    fitting = sizes_that_fit(
        CAPACITIES[:1] if quick else CAPACITIES,
        min(psutil.virtual_memory().available, shutil.disk_usage(tempfile.gettempdir()).free),
        twice=2,  # the loaded one stands beside the saved one
    )
    cells = {n: partial(_in_fresh_process, "snapshot", n) for n in fitting}
    return _once_a_round(cells, rounds)


def save_and_load(capacity: int) -> dict[str, float]:
    """Microseconds of each."""
    full = FullReplay(capacity)
    with tempfile.TemporaryDirectory() as folder:
        start = clock_ns()
        full.replay.save(folder)
        saved = clock_ns()
        loaded = PrioritizedReplay.load(folder)
        end = clock_ns()
        assert len(loaded) == full.live()
    return {"save": (saved - start) / 1e3, "load": (end - saved) / 1e3}


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
    if what == "snapshot":
        return save_and_load(int(words[0]))
    capacity, calls = map(int, words)
    full = FullReplay(capacity)
    before, found = full.live(), full.pairs(BATCH, calls)
    # Slots that are being written or rest in quarantine hold nothing: a few chunks a stream.
    assert min(before, full.live()) > 0.5 * capacity, "it was to be full"
    return found


# Many clients of one replay: forked before this process has threads; all begin at the same moment.


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
    return {
        "call": tails(np.concatenate([one[2] for one in told])),
        "calls_per_s": sum(calls / elapsed for calls, elapsed, _ in told),
        "least_of_a_client": min(one[0] for one in told),
    }


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
    """Processes that add."""
    counts, seconds = (ACTORS[1:2], 0.5) if quick else (ACTORS, 5.0)
    cells = {n: partial(_in_fresh_process, "by handle", "add", n, seconds) for n in counts}
    return _crowds({"by handle": in_rounds(cells, rounds)}, ACTOR_STREAMS)


def clients(rounds: int, quick: bool) -> dict[str, Any]:
    """Processes that sample and update."""
    counts, seconds = (CLIENTS[1:2], 0.5) if quick else (CLIENTS, 5.0)
    found = {}
    for name in CROWDS:
        cells = {n: partial(_in_fresh_process, name, "sample", n, seconds) for n in counts}
        found[name] = in_rounds(cells, rounds)
    return _crowds(found, 1)


def _crowds(found: Mapping[str, Rounds], times: int) -> dict[str, Any]:
    """times: what one call counts for. per_s: p10, p50 and p90 of the rounds."""

    def per_s(rounds: Rounds, n: int) -> dict[str, float]:
        low, high = rounds.spreads[n]["calls_per_s"]
        middle = rounds.medians[n]["calls_per_s"]
        return {"p10": times * low, "p50": times * middle, "p90": times * high}

    return {
        name: {
            **by_name({n: {"call": one["call"]} for n, one in rounds.medians.items()})["call"],
            "per_s": {str(n): per_s(rounds, n) for n in rounds.medians},
        }
        for name, rounds in found.items()
    }


PARTS: dict[str, Callable[[int, bool], dict[str, Any]]] = {
    "size": size, "batch": batch, "restart": restart, "snapshot": snapshot,
    "actors": actors, "clients": clients,
}  # fmt: skip


def show(results: Mapping[str, Any]) -> None:
    """Every curve."""
    for part, by_call in results.items():
        for name, found in by_call.items():
            print(f"\n{part}, {name}: exponent {found.get('exponent', 'none')}")
            for x, one in found["curve"].items():
                per_s = f"{found['per_s'][x]['p50']:12,.0f} a second" if "per_s" in found else ""
                tail = "  ".join(f"{p} {v:,.1f}" for p, v in one.items() if p != "n")
                print(f"  {int(x):9,}  {tail} us  {per_s}")


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
