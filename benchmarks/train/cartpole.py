"""`make demo`, seed by seed, until it has ended by itself: `bench_train cartpole`."""

import json
import time
from argparse import Namespace
from collections.abc import Sequence

from benchmarks.support.harness import goal
from benchmarks.train.whole_run import Result, TrainRun
from zapex.envs.environments import EnvironmentSpec

_SOLVED = 475.0
_QUICK = ["--stop-at-return", "20", "--eval-period-s", "2", "--eval-episodes", "5"]


def cartpole(options: Namespace, spec: EnvironmentSpec) -> Result:
    """`make demo`, seed by seed: from the command until it has ended by itself."""
    seeds = range(1, options.rounds + 1)
    more = [*_QUICK, *options.train] if options.quick else options.train
    runs = {str(seed): _solve(spec, seed, more) for seed in seeds}
    for seed, one in runs.items():
        print(
            f"  seed {seed}: {one['mean']:.1f} at {one['steps']:,} steps and {one['at_s']:.1f} s; "
            f"evaluated and ended after {one['command_s']:.1f} s"
        )
    solved = [one["command_s"] for one in runs.values() if one["mean"] >= _SOLVED]
    print(f"{len(solved)} of {len(runs)} seeds reached {_SOLVED:g}")
    print(goal("the slowest took", max(one["command_s"] for one in runs.values()), 120, " s"))
    return {"seeds": runs, "solved": len(solved)}


def _solve(spec: EnvironmentSpec, seed: int, more: Sequence[str]) -> Result:
    """mean, steps, at_s: of the first evaluation that reached it, or of the last one."""
    demo = ["--stop-at-return", str(_SOLVED), "--eval-episodes", "100", "--max-minutes", "5"]
    with TrainRun(spec, [*demo, "--seed", str(seed), *more]) as run:
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
