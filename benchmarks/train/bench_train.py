"""A whole training run, started as a user starts it: its speed, and the time to solve CartPole.

    zapex bench train speed    [--minutes 10]  frames, steps, batches and samples a second
    zapex bench train cartpole [--rounds 5]    seconds from `make demo` to a return of 475

speed starts its clock once the memory is full and every new chunk evicts another, and looks at five
windows; "cores" is the processor time of each process, by the kernel's count, over the window.
cartpole trains one seed after the other, from the command until it ends by itself; "at_s" is when
the parameters were taken that then returned 475 or more.
"""

import itertools
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from benchmarks.support.harness import arguments, joined, median, p10_p90, write_json
from benchmarks.train.whole_run import SETTLE_S, START_S, Look, TrainRun, rates

_FULL = 0.95  # of the capacity: slots that are being written or in quarantine hold nothing
_FILL_S = 1800.0
_SOLVED = 475.0
_QUICK = {
    "speed": ["--preset", "smoke", "--eval-period-s", "0"],
    "cartpole": [
        "--stop-at-return",
        "20",
        "--eval-period-s",
        "2",
        "--eval-episodes",
        "5",
        "--max-minutes",
        "0.4",
    ],
}


def speed(options: Namespace, more: Sequence[str]) -> dict[str, Any]:
    """Medians over windows of a run whose memory is full."""
    settle_s, seconds = (0.5, 3.0) if options.quick else (SETTLE_S, 60 * options.minutes)
    with TrainRun(options.env, [*more, "--max-frames", "0"]) as run:
        run.wait_until(lambda: run.count("learner", "batches") >= 20, START_S)
        capacity = run.inside.config.replay.capacity
        full = 0 if options.quick else _FULL * capacity
        run.wait_until(lambda: run.count("replay", "live") >= full, _FILL_S)
        time.sleep(settle_s)
        looks = [run.look()]
        for _ in range(options.rounds):
            time.sleep(seconds / options.rounds)
            looks.append(run.look())
        batch_size = run.inside.config.learner.batch_size
    windows = [_window(*two) for two in itertools.pairwise(looks)]
    found: dict[str, Any] = {
        "environment": options.env,
        "cores": len(os.sched_getaffinity(0)),
        "batch_size": batch_size,
        "capacity": capacity,
        **joined(windows, median),
        "spreads": joined(windows, p10_p90),
    }
    per_s = found["rates_per_s"]
    print("  ".join(f"{value:,.1f} {name}/s" for name, value in per_s.items()))
    print("cores: " + "  ".join(f"{name} {v:.2f}" for name, v in found["cores_used"].items()))
    return found


def _window(before: Look, after: Look) -> dict[str, Any]:
    elapsed_s = after.time_s - before.time_s
    used = {name: (after.cpu_s[name] - before.cpu_s[name]) / elapsed_s for name in after.cpu_s}
    return {"window_s": elapsed_s, "rates_per_s": rates(before, after), "cores_used": used}


def cartpole(options: Namespace, more: Sequence[str]) -> dict[str, Any]:
    """`make demo`, seed by seed."""
    seeds = range(1, options.rounds + 1)
    runs = {str(seed): _solve(seed, more) for seed in seeds}
    for seed, one in runs.items():
        print(
            f"seed {seed}: {one['mean']:.1f} at {one['steps']:,} steps and {one['at_s']:.1f} s; "
            f"evaluated and ended after {one['command_s']:.1f} s"
        )
    return {"seeds": runs, "solved": sum(one["mean"] >= _SOLVED for one in runs.values())}


def _solve(seed: int, more: Sequence[str]) -> dict[str, Any]:
    """mean, steps, at_s: of the first evaluation that reached the return, or of the last one."""
    demo = ["--stop-at-return", str(_SOLVED), "--eval-episodes", "100", "--max-minutes", "5"]
    with TrainRun("CartPole-v1", [*demo, "--seed", str(seed), *more]) as run:
        run.process.wait(6 * 60)
        command_s = time.monotonic() - run.began_s
        if run.process.returncode:
            raise RuntimeError(f"the run failed:\n{run.log[-4000:]}")
        outcome = json.loads((run.path / "result.json").read_text())
    evaluations = outcome["evaluations"]
    reached = [e for e in evaluations if e["mean"] >= _SOLVED]
    one = (reached or evaluations)[0 if reached else -1]
    return {
        "command_s": command_s,
        "at_s": one["wall_s"],
        "steps": one["steps"],
        "mean": one["mean"],
        "evaluations": [[e["wall_s"], e["steps"], e["mean"]] for e in evaluations],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """How fast a whole training run is."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("measurement", choices=("speed", "cartpole"))
    parser.add_argument("--env", default="ALE/Breakout-v5", help="another environment for speed")
    parser.add_argument("--minutes", type=float, default=10.0, help="of speed's windows together")
    parser.add_argument("--rounds", type=int, default=5, help="windows, or seeds")
    parser.add_argument("--train", nargs="...", default=[], help="flags of `zapex train`")
    options = parser.parse_args(argv)
    options.rounds = 1 if options.quick else options.rounds
    more = [*(_QUICK[options.measurement] if options.quick else []), *options.train]
    found = {"speed": speed, "cartpole": cartpole}[options.measurement](options, more)
    write_json(options, f"train {options.measurement}", found, rounds=options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
