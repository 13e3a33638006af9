"""What all cores do while a run trains: `bench_train shares`."""

import itertools
import os
import sys
import time
from argparse import Namespace
from typing import Any

import numpy as np

from benchmarks.support.harness import goal, joined, median
from benchmarks.train.core_shares import (
    IDLE,
    OUTSIDE,
    STOLEN,
    between,
    overhead_of,
    shares_between,
)
from benchmarks.train.whole_run import SETTLE_S, START_S, Look, Result, TrainRun, rates
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec

_FILL_S = 1800.0
EVALUATION = "evaluation"


_FULL = 0.95  # of the capacity: slots that are being written or rest in quarantine hold nothing
_QUICK = ["--capacity", "16k", "--learning-starts", "2k"]


def shares(options: Namespace, spec: EnvironmentSpec) -> Result:
    """What the cores do once the memory is full and every chunk evicts another, for `minutes`.

    Medians over as many windows as there are rounds, and how far they lie apart.
    """
    settle_s, seconds = (1.0, 5.0) if options.quick else (SETTLE_S, 60 * options.minutes)
    cores = len(os.sched_getaffinity(0))
    flags = [*(_QUICK if options.quick else []), *options.train]
    with TrainRun(spec, flags) as run:
        run.wait_until(lambda: run.count("learner", "batches") >= 20, START_S)
        run.wait_until(lambda: len(run.look().roles) == len(run.blocks()), START_S)
        print("waiting until the memory is full", file=sys.stderr, flush=True)
        full = _FULL * run.config.replay.capacity
        run.wait_until(lambda: run.count("replay", "live") >= full, _FILL_S)
        run.count_cpu()
        time.sleep(settle_s)
        looks = [run.look()]
        for window in range(options.rounds):
            time.sleep(seconds / options.rounds)
            looks.append(run.look())
            print(f"window {window + 1} of {options.rounds}", file=sys.stderr, flush=True)
        config = run.config
    windows = [_window(*two, cores, config) for two in itertools.pairwise(looks)]
    result: Result = {
        "cores": cores,
        "batch_size": config.learner.batch_size,
        "capacity": config.replay.capacity,
        "began_s": looks[0].time_s - run.began_s,
        **joined(windows, median),
        "spreads": joined(windows, lambda values: np.percentile(values, [10, 90]).tolist()),
    }
    _print_shares(result)
    return result


def _window(before: Look, after: Look, cores: int, config: Config) -> Result:
    """Rates, shares, phases between two looks."""
    shares = shares_between(before, after, cores)
    overhead = overhead_of(shares)
    return {
        "window_s": after.time_s - before.time_s,
        "rates_per_s": rates(before, after),
        "replay_fill": [
            look.roles["replay"]["live"] / config.replay.capacity for look in (before, after)
        ],
        "populated": [before.populated, after.populated],
        "shares": {row: shares.get(row, 0.0) for row in {*shares, EVALUATION}},
        "roles": {name: _role_facts(before, after, name) for name in after.cpu_s},
        "everything_else": {
            "alone": overhead, "with_evaluation": overhead + shares.get(EVALUATION, 0.0),
        },
    }  # fmt: skip


def _role_facts(before: Look, after: Look, name: str) -> dict[str, Any]:
    """Cores that a process used, wanted and did not get, and its phases' shares of the wall."""
    elapsed_s = after.time_s - before.time_s
    facts: dict[str, Any] = {
        "cores_used": (after.cpu_s[name] - before.cpu_s[name]) / elapsed_s,
        "cores_queued_for": (after.queued_s.get(name, 0.0) - before.queued_s.get(name, 0.0))
        / elapsed_s,
    }
    if name in after.roles:
        for kind, shown in (("phase", "wall_shares"), ("cpu", "cpu_shares")):
            seconds = between(before, after, name, kind)
            facts[shown] = {phase: value / elapsed_s for phase, value in seconds.items()}
    return facts


def _print_shares(result: Result) -> None:
    rates, rows = result["rates_per_s"], result["shares"]
    print(
        f"{rates['frames']:,.0f} frames/s ({rates['steps']:,.0f} steps/s), "
        f"{rates['batches']:.2f} batches/s x {result['batch_size']} = "
        f"{rates['samples']:,.0f} samples/s; replay {result['replay_fill'][0]:.0%} to "
        f"{result['replay_fill'][1]:.0%} full, memory {result['populated'][0]:.0%} to "
        f"{result['populated'][1]:.0%} populated; {result['window_s']:.0f} s from "
        f"{result['began_s']:.0f} s after the command\n\nshare of {result['cores']} cores' time"
    )
    for row, value in sorted(rows.items(), key=lambda item: -item[1]):
        print(f"  {value:7.2%}  {row}")
    print("\ncores that each process used (and queued for); its phases: wall time, processor time")
    for name, facts in result["roles"].items():
        said = "  ".join(
            f"{phase} {wall:.1%} {facts['cpu_shares'][phase]:.1%}"
            for phase, wall in facts.get("wall_shares", {}).items()
            if wall > 5e-4
        )
        print(f"  {name:10} {facts['cores_used']:.3f} ({facts['cores_queued_for']:.3f})  {said}")
    overhead = result["everything_else"]
    print(goal("everything else", 100 * overhead["alone"], 2, " %"))
    print(goal("... with evaluation", 100 * overhead["with_evaluation"], 2, " %"))
    print(goal("idle", 100 * rows[IDLE], 3, " %"))
    if rows[OUTSIDE] + rows[STOLEN] > 0.02:
        print("  other work had part of this machine: the shares are not to be trusted")
