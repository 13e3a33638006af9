"""The paper's systems, one change a step: what communication costs with 1 to 8 actors.

    python -m benchmarks.paper.bench_paper [--quick] [--json FILE] [--figures DIR]

    a         Redis, plain pairs, replay in the learner: the baseline of arXiv 2110.13506
    a-fstack  the same on another Redis (--redis-url, one on F-Stack: their optimisation 1)
    a2        Redis, chunks (each frame once), replay in the learner
    b, b2     ZeroMQ, pairs or chunks, replay in the learner
    c         ZeroMQ, chunks, replay in the network
    d-zmtp    the same on zapex's own router; d-fstack: on F-Stack (their optimisation 2)
    e         one host, shared memory

Roles are torch-free: real chunks of Breakout move, and a role sleeps where it would compute, for
--actor-ms before each push and --learner-ms for each batch. With the default pace, about 14.5 % of
the time of `a` with one actor is communication on two cores of Zen 4, as in the paper. As root with
`ip` and `tc` each role has a network namespace of its own; a and c are also measured at 10 and
1 Gbit/s then. A point's figures are medians of five windows, between their p10 and p90 (`spreads`).
A point with more than 80 % load of the cores is `host_bound`, and says nothing about the network.

--real runs zapex's own commands on Breakout instead (a, c and e), in loopback, and takes the phases
that their roles count. Each point then has five runs, in turns, in place of windows. The share of a
system whose steps/s or batches/s differ from those of `e` by more than a tenth is not compared.

The file of --json gets a row after each point, with --real at the end. Called again, it goes on
after the last one.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper import figures
from benchmarks.paper.experience import record, setting_of
from benchmarks.paper.points import FORMATS, LOAD_LIMIT, Bench, Pace, Point, measure, over
from benchmarks.paper.real import SYSTEMS as REAL
from benchmarks.paper.real import measure_real
from benchmarks.support.harness import arguments
from benchmarks.support.machine import LEAST_ROUNDS, Watch, doubts
from benchmarks.support.processes import Process
from benchmarks.transport import fstack_place, redis_server
from benchmarks.transport.server import warm
from tests.support.netns import can_have_namespaces

COUNTS = (1, 2, 4, 8)
RATES = (10.0, 1.0)
_OVERHEAD_S = 12.0  # of a point: its processes start and end
_REAL_PORT = 7960
_SLOW = 3  # the slowest rate needs as many times the seconds for as many pushes


def points_of(options: Any, apart: bool) -> list[Point]:
    """All that were asked for, those with fewest actors first."""
    counts, systems = options.actors, options.systems
    found = [Point(system, n) for n in counts for system in systems]
    if apart and not options.quick:
        found += [Point(s, n, g) for g in RATES for n in counts for s in systems if s in "ac"]
    return found


def missing(point: Point, options: Any, bench: Bench) -> str:
    """Why a system cannot be measured here; "" if it can."""
    if point.system == "a-fstack":
        return "" if options.redis_url else "name its Redis with --redis-url"
    if point.system in ("a", "a2"):
        return redis_server.missing()
    if point.system == "d-fstack" and bench.fstack is None:
        return "no F-Stack: --fstack-lib, --fstack-conf"
    return ""


def run_points(
    bench: Bench, todo: list[Point], rows: list[dict[str, Any]], options: Any
) -> list[str]:  # fmt: skip
    """Measure what is not in `rows` yet; each row is written as soon as it is there.

    Returns which points failed; they are measured when it is called again.
    """
    known = {(r["system"], r["actors"], r["gbit"] or 0.0) for r in rows if r["paced"]}
    failed: list[str] = []
    todo = [point for point in todo if point.key not in known]
    pace = Pace(options.actor_ms / 1000, options.learner_ms / 1000)
    each_s = bench.windows * bench.seconds + bench.warm_s + _OVERHEAD_S
    print(f"{len(todo)} points, about {len(todo) * each_s / 60:.0f} minutes", flush=True)
    began_s = time.monotonic()
    for done, point in enumerate(todo):
        reason = missing(point, options, bench)
        if reason:
            print(f"  {point.system}: {reason}")
            continue
        watch = Watch()
        slow = _SLOW if point.gbit == min(RATES) else 1
        try:
            row = measure(replace(bench, seconds=slow * bench.seconds), point, pace)
        except (RuntimeError, TimeoutError) as error:
            failed.append(f"{point.system} with {point.actors} actors: {error}")
            print(f"  {failed[-1]}", flush=True)
            continue
        why_not = doubts(watch.facts, watch.report(), bench.windows) + ["quick"] * options.quick
        row["machine"] = {**watch.facts, **row["machine"], "doubts": why_not}
        if point.system == "a-fstack":
            row["machine"]["label"] = options.label
        rows.append(row)
        if options.json:
            _write(options.json, rows)
        left_s = (time.monotonic() - began_s) / (done + 1) * (len(todo) - done - 1)
        print(f"{figures.line(row)}; about {left_s / 60:.0f} min left", flush=True)
    return failed


def run_real(rows: list[dict[str, Any]], options: Any) -> None:
    """Real runs of the systems that have commands, each point once a round."""
    known = {(r["system"], r["actors"]) for r in rows if not r["paced"]}
    todo = [(s, n) for n in options.actors for s in REAL if s in options.systems]
    todo = [point for point in todo if point not in known]
    if any(system == "a" for system, _ in todo) and (reason := redis_server.missing()):
        print(f"  a: {reason}")
        todo = [(system, actors) for system, actors in todo if system != "a"]
    watch, ports = Watch(), count(_REAL_PORT)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {point: [] for point in todo}
    for turn in range(1, options.windows + 1):
        for system, actors in todo:
            row = measure_real(system, actors, options.seconds, next(ports))
            found[system, actors].append(row)
            print(f"  round {turn} of {options.windows}:{figures.line(row)}", flush=True)
    why_not = doubts(watch.facts, watch.report(), options.windows) + ["quick"] * options.quick
    for some in found.values():
        row = over(some)
        row["machine"] |= {**watch.facts, "windows": options.windows, "doubts": why_not}
        rows.append(row)
    if options.json:
        _write(options.json, rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(rows, indent=1) + "\n")
    new.replace(path)


def recorded_bodies(quick: bool) -> np.ndarray:
    """Chunks of a game, played in another process."""
    path = Path(tempfile.mkdtemp(prefix="zapex-paper-"), "chunks.npy")

    def play() -> int:
        np.save(path, record(setting_of(1, quick)))
        return 0

    child = Process(play)
    try:
        child.result(timeout_s=300)
        return np.load(path)
    finally:
        child.kill()
        shutil.rmtree(path.parent)


def _options(argv: list[str] | None) -> Any:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--systems", "--only", nargs="+", choices=list(FORMATS), default=list(FORMATS)
    )
    parser.add_argument("--actors", nargs="+", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="of each window or run")
    parser.add_argument("--windows", type=int, default=None, help="of a point: 5; --quick: 2")
    parser.add_argument("--actor-ms", type=float, default=788.0, help="computation for each push")
    parser.add_argument("--learner-ms", type=float, default=493.0, help="and for each batch")
    parser.add_argument("--real", action="store_true", help="real runs of a, c and e instead")
    parser.add_argument("--redis-url", default="", help="of a-fstack: a Redis that runs")
    parser.add_argument("--label", default="", help="of a-fstack: what that Redis is")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="PNG and tables, into it")
    fstack_place.add_flags(parser)
    options = parser.parse_args(argv)
    options.actors = options.actors or list(COUNTS[:2] if options.quick else COUNTS)
    options.seconds = options.seconds or (2.0 if options.quick else 20.0 if options.real else 6.0)
    options.windows = options.windows or (2 if options.quick else LEAST_ROUNDS)
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure, write, draw."""
    options = _options(argv)
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())
        print(f"{options.json} has {len(rows)} rows: going on after them")
    failed: list[str] = []
    if options.real:
        run_real(rows, options)
    else:
        failed = run_paced(rows, options)
    if options.figures:
        for path in figures.draw(rows, options.figures):
            print(path)
    else:
        print(figures.table(rows))
    return int(bool(failed))


def run_paced(rows: list[dict[str, Any]], options: Any) -> list[str]:
    """Record chunks, choose the pace, measure all points. Returns which failed."""
    why = can_have_namespaces()
    print(f"roles on one machine, loopback: {why}" if why else "roles in network namespaces")
    warm()
    named = options.fstack_lib and options.fstack_conf  # the tests' stand-in is no F-Stack
    fstack = fstack_place.find(options) if named else ""
    bench = Bench(
        recorded_bodies(options.quick), options.windows, options.seconds,
        1.0 if options.quick else 3.0, options.quick, apart=not why, redis_url=options.redis_url,
        fstack=None if isinstance(fstack, str) else fstack.setup,
        fstack_address="" if isinstance(fstack, str) else fstack.address or "",
    )  # fmt: skip
    print(f"{os.cpu_count()} cores; a point counts below {LOAD_LIMIT:.0%} load of them")
    return run_points(bench, points_of(options, apart=not why), rows, options)


if __name__ == "__main__":
    sys.exit(main())
