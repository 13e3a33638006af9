"""Seconds from the command to what happens first: `bench_train startup`."""

import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.support.harness import goal
from benchmarks.train.whole_run import START_S, Result, TrainRun
from zapex.envs.environments import EnvironmentSpec


def startup(options: Namespace, spec: EnvironmentSpec) -> Result:
    """Seconds from the command to what happens first, with kernels to compile and with them cached.

    The memory is populated beside it: once a small one, once the preset's.
    """
    memories = {"small memory": ["--capacity", "20k"], "preset's memory": []}
    if options.quick:
        del memories["preset's memory"]
    times: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for memory, flags in memories.items():
            with tempfile.TemporaryDirectory(prefix="zapex-cache-") as cache:
                for kernels in ("compiled", "cached"):  # the first run fills the cache
                    marks = _start_once(spec, [*flags, *options.train], cache)
                    times.setdefault(f"kernels {kernels}, {memory}", []).append(marks)
    medians = {
        case: {mark: statistics.median(one.get(mark, 0.0) for one in runs) for mark in runs[0]}
        for case, runs in times.items()
    }
    for case, marks in medians.items():
        print(case)
        spent = {mark: marks[mark] for mark in marks if mark.startswith("cpu, ")}
        for mark, seconds in sorted(marks.items(), key=lambda item: item[1]):
            if mark not in spent and mark != "populated":
                print(f"  {seconds:7.2f} s  {mark}")
        print(f"  {marks['populated']:.0%} of the memory was populated by then")
        each = ", ".join(f"{mark[5:]} {seconds:.2f}" for mark, seconds in spent.items())
        print(f"  processor seconds until the first step: {each}")
    for kernels, limit in (("compiled", 40), ("cached", 8)):
        first = medians[f"kernels {kernels}, small memory"]["first step"]
        print(goal(f"first step with kernels {kernels}:", first, limit, " s"))
    return {"medians": medians, "runs": times}


def _start_once(spec: EnvironmentSpec, arguments: Sequence[str], cache: str) -> dict[str, float]:
    """Mark -> seconds from the command; "cpu, ..." -> a process's own until the first step;
    "populated" -> the share of memory that was by the first batch."""
    seen: dict[str, float] = {}
    used: dict[str, float] = {}
    with TrainRun(spec, arguments, {"XDG_CACHE_HOME": cache}) as run:

        def block(name: str) -> Any:
            return run.blocks().get(name)

        marks: dict[str, Callable[[], Any]] = {"memory is mapped": run.blocks}
        for name in ("actor 0", "replay", "learner"):
            marks[f"{name} is made"] = lambda name=name: block(name) and block(name).pid
        marks |= {
            "first parameters": lambda: run.count("learner", "params_version"),
            "first step": lambda: run.count("actor 0", "steps"),
            "first batch": lambda: run.count("learner", "batches"),
        }

        def all_seen() -> bool:
            for mark in [m for m in marks if m not in seen]:
                if marks[mark]():
                    seen[mark] = time.monotonic() - run.began_s
            if "first step" in seen and not used:
                used.update({f"cpu, {name}": value for name, value in run.look().cpu_s.items()})
            return len(seen) == len(marks)

        run.wait_until(all_seen, START_S, poll_s=0.01)
        used["populated"] = run.populated()
    return seen | used
