"""An hour of the real system: does any process go on growing, or take ever more descriptors?

    python -m benchmarks.train.bench_soak --minutes 70 --warm-up 10 [--quick] [--json FILE]

One `zapex train` on Breakout with a small memory, which is full and evicts after a few minutes.
What is sampled is resident memory without the shared memory (anonymous and file pages: the slots
fill up by design) and the open descriptors of the parent and of each role. The slope after the
warm-up is a least-squares line through means of two minutes, with its 95 % interval: samples of ten
seconds hang together, and as many of them would make the interval too narrow.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.support.harness import arguments, write_json
from benchmarks.train.whole_run import START_S, TrainRun
from zapex.envs import environments

_BLOCK_S = 120.0
_GOAL_MIB_PER_HOUR = 1.0
_FIELDS = ("anonymous_mib", "file_mib", "shared_mib", "descriptors", "threads")
_RUN = "--actors 1 --envs-per-actor 8 --capacity 20k --learning-starts 2k --batch-size 32 --lr 1e-4"
_RUN += " --eval-period-s 300 --eval-episodes 2 --checkpoint-minutes 5 --max-minutes 0"
_KEPT_POINTS = 120


def sample(pid: int) -> list[float]:
    """One process now, in the order of _FIELDS; memory in MiB."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    kinds = [int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile", "RssShmem")]
    return [*kinds, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])]


def slope(hours: ArrayLike, values: ArrayLike) -> tuple[float, float]:
    """Least-squares slope per hour through block means, and half of its 95 % interval."""
    at, y = np.asarray(hours, float), np.asarray(values, float)
    block_s = min(_BLOCK_S, (at[-1] - at[0]) * 3600 / 6)
    block = ((at - at[0]) * 3600 // block_s).astype(int)
    counts = np.bincount(block)
    at = np.bincount(block, at)[counts > 0] / counts[counts > 0]
    y = np.bincount(block, y)[counts > 0] / counts[counts > 0]
    free = len(at) - 2
    if free < 1:
        return float("nan"), float("nan")
    centred = at - at.mean()
    found = float(centred @ y / (centred @ centred))
    rest = y - y.mean() - found * centred
    error = float(np.sqrt(rest @ rest / free / (centred @ centred)))
    z = NormalDist().inv_cdf(0.975)
    # Student's t from the normal (Abramowitz and Stegun 26.7.5, first two terms).
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return found, t * error


def report(
    times: Sequence[float], samples: dict[str, list[list[float]]], warm_up_s: float
) -> dict[str, dict[str, Any]]:
    """Slope and range of every process after `warm_up_s`."""
    at = np.asarray(times)
    late = at >= warm_up_s
    found: dict[str, dict[str, Any]] = {}
    for name, rows in samples.items():
        table = np.asarray(rows)[late]
        private = table[:, 0] + table[:, 1]
        mib, within = slope(at[late] / 3600, private)
        anonymous, anonymous_within = slope(at[late] / 3600, table[:, 0])
        found[name] = {
            "mib_per_hour": round(mib, 3),
            "mib_per_hour_within": round(within, 3),
            "anonymous_mib_per_hour": round(anonymous, 3),
            "anonymous_mib_per_hour_within": round(anonymous_within, 3),
            "resident_mib": [round(float(v), 1) for v in (private[0], private[-1])],
            "descriptors": [int(table[:, 3].min()), int(table[:, 3].max())],
            "threads": [int(table[:, 4].min()), int(table[:, 4].max())],
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run, sample, fit, write."""
    parser = arguments("Do the processes of a long run grow?")
    parser.add_argument("--minutes", type=float, default=70.0, help="of sampling")
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes that do not count")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two samples")
    parser.add_argument("--env", default="ALE/Breakout-v5")
    parser.add_argument("--note", default="", help="what else was going on")
    options = parser.parse_args(argv)
    if options.quick:
        options.minutes, options.warm_up, options.every = 0.15, 0.05, 0.25
    spec = environments.check(options.env, {})
    times: list[float] = []
    samples: dict[str, list[list[float]]] = {}
    over: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.append(1))
    with TrainRun(spec, _RUN.split()) as run:
        run.wait_until(lambda: run.count("learner", "batches") > 0, START_S)
        pids = {"parent": run.process.pid} | {n: b.pid for n, b in run.blocks().items() if b.pid}
        print(f"{pids}", flush=True)
        began = time.monotonic()
        while time.monotonic() - began < 60 * options.minutes and not over:
            times.append(time.monotonic() - began)
            for name, pid in pids.items():
                samples.setdefault(name, []).append(sample(pid))
            if len(times) % max(1, round(300 / options.every)) == 0:
                now = {name: round(rows[-1][0] + rows[-1][1], 1) for name, rows in samples.items()}
                print(f"{times[-1] / 60:.0f} min: MiB {now}", flush=True)
            time.sleep(options.every)
        look = run.look()
        log = run.log
    worked = {
        name: {k: v for k, v in counts.items() if k in ("frames", "steps", "batches", "chunks")}
        for name, counts in look.roles.items()
    }
    roles = report(times, samples, 60 * options.warm_up)
    step = max(1, len(times) // _KEPT_POINTS)
    results = {
        "minutes": round(times[-1] / 60, 1),
        "warm_up_minutes": options.warm_up,
        "roles": roles,
        "worked": worked,
        "deaths": [line for line in log.splitlines() if " died after " in line],
        "columns": ["minutes", *_FIELDS],
        "curves": {
            name: [
                [round(t / 60, 2), *(round(v, 2) for v in row)]
                for t, row in list(zip(times, rows, strict=True))[::step]
            ]
            for name, rows in samples.items()
        },
    }
    for name, facts in roles.items():
        low = facts["mib_per_hour"] - facts["mib_per_hour_within"]
        verdict = "met" if facts["mib_per_hour"] < _GOAL_MIB_PER_HOUR else "MISSED"
        if verdict == "MISSED" and low < _GOAL_MIB_PER_HOUR:
            verdict += " (its interval holds the goal)"
        print(
            f"{name:10} {facts['mib_per_hour']:+8.3f} +- {facts['mib_per_hour_within']:.3f} MiB/h"
            f" ({facts['anonymous_mib_per_hour']:+.3f} of it anonymous), descriptors"
            f" {facts['descriptors']}; goal under {_GOAL_MIB_PER_HOUR:g} MiB/h {verdict}"
        )
    write_json(options, "soak", results, rounds=None, command=_RUN, note=options.note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
