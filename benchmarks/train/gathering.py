"""A learner over shared memory with the step of a fast GPU: `bench_train gathering`."""

import time
from argparse import Namespace

from benchmarks.support.harness import goal, percentiles
from benchmarks.train.core_shares import between
from benchmarks.train.whole_run import START_S, Result, TrainRun, rates
from zapex.envs.environments import EnvironmentSpec

_BATCH = 512


def gathering(options: Namespace, spec: EnvironmentSpec) -> Result:
    """Batches a second of a learner whose step takes `--step-ms` and computes nothing.

    Once with a thread that gathers the next batch beside the step, once without, in turns. When
    learning begins, the actor rests: the samples per insert are bounded by a very large number.
    """
    window_s, step_s = 2.0 if options.quick else 10.0, options.step_ms / 1e3
    flags = ["--actors", "1", "--eval-period-s", "0", "--batch-size", str(_BATCH)]
    flags += ["--capacity", "20k", "--learning-starts", "10k", "--samples-per-insert", "1e6"]
    flags += ["--prefetch", "3", "--max-frames", "0", "--device", "cpu", *options.train]
    seen: dict[str, list[float]] = {"0": [], "1": []}
    shares: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for threads, batches in seen.items():
            with TrainRun(spec, [*flags, "--gather-threads", threads], step_s=step_s) as run:
                run.wait_until(lambda run=run: run.count("learner", "batches") > 100, START_S)
                before = run.look()
                time.sleep(window_s)
                after = run.look()
            batches.append(rates(before, after)["batches"])
            elapsed_s = after.time_s - before.time_s
            spent_s = between(before, after, "learner")
            shares[threads] = {name: value / elapsed_s for name, value in spent_s.items()}
    found = {threads: percentiles(batches) for threads, batches in seen.items()}
    for threads, batches in found.items():
        busy = "  ".join(f"{n} {v:.0%}" for n, v in shares[threads].items() if v > 0.005)
        print(f"{threads} gather threads: {batches['p50']:.0f} batches/s;  {busy}")
    print(goal("batches/s with a gather thread", found["1"]["p50"], 300, "", least=True))
    return {
        "step_ms": options.step_ms,
        "batch_size": _BATCH,
        "window_s": window_s,
        "batches_per_s_by_gather_threads": found,
        "learner_shares_by_gather_threads": shares,
    }
