"""Steps a second at 8 samples a step, beside Stable-Baselines3's DQN: `bench_train ratio`."""

import json
import random
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.support.harness import goal
from benchmarks.support.machine import ROOT
from benchmarks.train.whole_run import SETTLE_S, START_S, Result, TrainRun
from zapex.envs.environments import EnvironmentSpec

_SAMPLES_A_STEP = 8
_THEIR_BATCH, _OUR_BATCH = 32, 64
_SAME_NETWORK = ["--hidden", "512", "--channels", "32", "--precision", "float32", "--n-step", "1"]
_OWN = {"zapex, batch 32": _THEIR_BATCH, "zapex, its own batch": _OUR_BATCH}
_PEER = "stable-baselines3, batch 32"
_LEAPS, _LONGER = 3, 12  # where a machine has made fewer, it has so many times as long


def _same(who: str, batch: int) -> str:
    return f"{who}, same network and float32, batch {batch}"


def ratio(options: Namespace, spec: EnvironmentSpec) -> Result:
    """Steps a second at 8 samples a step, each in a fresh process, round by round."""
    if not options.peer_python:
        raise SystemExit("ratio needs --peer-python: the Python that has stable-baselines3")
    seconds = 5.0 if options.quick else 60.0
    settle_s = 1.0 if options.quick else SETTLE_S
    ours = ["--samples-per-insert", str(_SAMPLES_A_STEP), "--eval-period-s", "0"]
    ours += ["--capacity", "100k", "--learning-starts", "4k", *options.train]
    if options.quick:  # small grants: actors go on often enough to be seen
        ours += ["--actors", "1", "--envs-per-actor", "2", "--learning-starts", "1k"]

    def peer(network: str, batch: int) -> Callable[[], Result]:
        return partial(_peer_speed, options.peer_python, spec, seconds, network, batch)

    def own(batch: int, *more: str) -> Callable[[], Result]:
        flags = [*ours, *more, "--batch-size", str(batch)]
        return partial(_own_speed, spec, flags, settle_s, seconds)

    batches = (_THEIR_BATCH,) if options.quick else (_THEIR_BATCH, _OUR_BATCH)
    contenders = {_same("stable-baselines3", n): peer("dueling", n) for n in batches}
    contenders |= {_same("zapex", n): own(n, *_SAME_NETWORK) for n in batches}
    contenders[_PEER] = peer("own", _THEIR_BATCH)
    contenders |= {n: own(b) for n, b in _OWN.items() if b in batches or not options.quick}
    runs: dict[str, list[Result]] = {name: [] for name in contenders}
    for turn in range(options.rounds):
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            runs[name].append(contenders[name]())
            print(f"  {runs[name][-1]['steps_per_s']:8.1f} steps/s  {name}", flush=True)
    medians = {
        name: statistics.median(run["steps_per_s"] for run in found) for name, found in runs.items()
    }
    for name, speed in medians.items():
        samples = statistics.median(run["samples_per_step"] for run in runs[name])
        print(f"{speed:8.1f} steps/s  {samples:.2f} samples a step  {name}")
    for batch in batches:
        times = medians[_same("zapex", batch)] / medians[_same("stable-baselines3", batch)]
        print(goal(f"same network, float32, batch {batch}", times, 2, " x", least=True))
    for name in set(_OWN) & set(medians):
        times = medians[name] / medians[_PEER]
        print(goal(f"each with its own network, {name}", times, 6, " x", least=True))
    return {"seconds": seconds, "medians": medians, "runs": runs}


def _peer_speed(
    python: str, spec: EnvironmentSpec, seconds: float, network: str, batch: int
) -> Result:
    script = ROOT / "benchmarks/peers/dqn.py"
    game = spec.env_id.removeprefix("ALE/").removesuffix("-v5")
    command = [python, str(script), game, str(seconds), "0", network, str(batch)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    facts: Result = json.loads(said.stdout.splitlines()[-1])
    return facts


def _own_speed(
    spec: EnvironmentSpec, arguments: Sequence[str], settle_s: float, seconds: float
) -> Result:
    """Actors go on in leaps, a grant each: whole leaps are timed where there are some."""
    with TrainRun(spec, arguments) as run:
        run.wait_until(lambda: run.count("learner", "batches") >= 20, START_S)
        time.sleep(settle_s)
        seen = [_progress(run)]
        leaps = []
        while (elapsed_s := seen[-1][0] - seen[0][0]) < seconds or (
            len(leaps) < _LEAPS and elapsed_s < _LONGER * seconds
        ):
            time.sleep(0.05)
            seen.append(_progress(run))
            if seen[-1][3] > seen[-2][3]:
                leaps.append(seen[-1])
        first, last = (leaps[0], leaps[-1]) if len(leaps) >= _LEAPS else (seen[0], seen[-1])
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
