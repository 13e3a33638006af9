"""Steps a second at 8 samples a step, beside Stable-Baselines3's DQN: `bench_train ratio`."""

import json
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._harness import goal
from benchmarks.train_run import SETTLE_S, START_S, Result, TrainRun
from zapex.environments import EnvironmentSpec

_PEER, _SAME, _OWN = "stable-baselines3, batch 32", "zapex, batch 32", "zapex, its own batch"
_SAMPLES_A_STEP = 8


def ratio(options: Namespace, spec: EnvironmentSpec) -> Result:
    """Steps a second at 8 samples a step, each in a fresh process, round by round."""
    if not options.peer_python:
        raise SystemExit("ratio needs --peer-python: the Python that has stable-baselines3")
    seconds, rounds = (15.0, 1) if options.quick else (60.0, options.rounds or 3)
    ours = ["--samples-per-insert", str(_SAMPLES_A_STEP), "--eval-period-s", "0"]
    ours += ["--capacity", "100k", "--learning-starts", "4k", *options.train]
    contenders: dict[str, Callable[[], Result]] = {
        _PEER: lambda: _peer_speed(options.peer_python, spec, seconds),
        _SAME: lambda: _own_speed(spec, [*ours, "--batch-size", "32"], seconds),
        _OWN: lambda: _own_speed(spec, ours, seconds),
    }
    runs: dict[str, list[Result]] = {name: [] for name in contenders}
    for turn in range(rounds):
        order = list(contenders)
        for name in order[turn % 3 :] + order[: turn % 3]:
            runs[name].append(contenders[name]())
            print(f"  {runs[name][-1]['steps_per_s']:8.1f} steps/s  {name}", flush=True)
    medians = {
        name: statistics.median(run["steps_per_s"] for run in found) for name, found in runs.items()
    }
    for name, speed in medians.items():
        samples = statistics.median(run["samples_per_step"] for run in runs[name])
        times = speed / medians[_PEER]
        print(f"{speed:8.1f} steps/s  {times:5.2f} x  {samples:.2f} samples a step  {name}")
    print(goal("at our own batch", medians[_OWN] / medians[_PEER], 6, " x", least=True))
    return {"seconds": seconds, "medians": medians, "runs": runs}


def _peer_speed(python: str, spec: EnvironmentSpec, seconds: float) -> Result:
    script = Path(__file__).parent / "peer_dqn.py"
    game = spec.env_id.removeprefix("ALE/").removesuffix("-v5")
    command = [python, str(script), game, str(seconds), "0"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    facts: Result = json.loads(said.stdout.splitlines()[-1])
    return facts


def _own_speed(spec: EnvironmentSpec, arguments: Sequence[str], seconds: float) -> Result:
    """Actors go on in leaps, a grant each: whole leaps are timed where there are some."""
    with TrainRun(spec, arguments) as run:
        run.wait_until(lambda: run.count("learner", "batches") >= 50, START_S)
        time.sleep(SETTLE_S)
        seen = [_progress(run)]
        leaps = []
        while seen[-1][0] - seen[0][0] < seconds:
            time.sleep(0.05)
            seen.append(_progress(run))
            if seen[-1][3] > seen[-2][3]:
                leaps.append(seen[-1])
        first, last = (leaps[0], leaps[-1]) if len(leaps) > 2 else (seen[0], seen[-1])
        batch_size = run.config.learner.batch_size
    elapsed_s, steps, samples, waits = (b - a for a, b in zip(first, last, strict=True))
    return {
        "steps_per_s": steps / elapsed_s,
        "samples_per_step": samples / max(steps, 1.0),
        "batch_size": batch_size,
        "seconds": elapsed_s,
        "leaps": waits,
    }


def _progress(run: TrainRun) -> tuple[float, float, float, float]:
    """Time, steps, samples learned from, and how often actors had to wait."""
    actors = [name for name in run.blocks() if name.startswith("actor")]
    steps, waits = (
        sum(run.count(name, counter) for name in actors) for counter in ("steps", "credit_waits")
    )
    return time.monotonic(), steps, run.count("learner", "samples"), waits
