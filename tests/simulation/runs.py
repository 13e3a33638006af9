"""Many runs: shows one, looks for one that fails, and makes a failure small."""

import json
import os
import resource
import sys
import time
from collections.abc import Sequence

from tests.simulation import source
from tests.simulation.run import Fault, Outcome, kind_of, run


def shrink(outcome: Outcome, seconds: float = 60.0) -> Outcome:
    """The same failure with as few faults as were found in this time."""
    until = time.perf_counter() + seconds
    least, size = outcome, max(1, len(outcome.faults) // 2)
    while size and time.perf_counter() < until:
        for first in range(0, len(least.faults), size):
            fewer: list[Fault] = [*least.faults[:first], *least.faults[first + size :]]
            if time.perf_counter() > until:
                break
            found = run(outcome.seed, fewer)
            if found.kind == outcome.kind:
                least = found
                break
        else:
            size //= 2
    return least


def show(seed: int, *, history: bool = False) -> int:
    """One run, its faults and what came of it."""
    began = time.perf_counter()
    outcome = run(seed)
    real_s = time.perf_counter() - began
    if history:
        print("\n".join(outcome.history))
    print(f"seed {seed}: {outcome.shape}")
    for fault in outcome.faults:
        print(f"  {fault}")
    print(json.dumps(outcome.facts))
    print(f"{outcome.simulated_s:.0f} simulated seconds in {real_s:.1f}")
    if not outcome.violation:
        print("fine")
        return 0
    print(f"FAILED: {outcome.violation}")
    _show_least(outcome)
    return 1


def _show_least(outcome: Outcome) -> None:
    least = shrink(outcome)
    print(f"the least faults that were found to lead to it ({least.violation}):")
    for fault in least.faults:
        print(f"  {fault}")
    print("the last that happened:")
    print("\n".join(f"  {line}" for line in least.history[-25:]))


def explore(first: int, hours: float, seeds: int | None) -> int:
    """New seeds for some time, or so many; the first that fails ends it."""
    began, seed, simulated_s = time.perf_counter(), first, 0.0
    while seed < first + seeds if seeds else time.perf_counter() < began + 3600 * hours:
        outcome = run(seed)
        simulated_s += outcome.simulated_s
        if outcome.violation:
            print(f"seed {seed} FAILED: {outcome.violation}", flush=True)
            print(f"  make simulate ARGS='--seed {seed}' shows it", flush=True)
            return 1
        seed += 1
    real_s = time.perf_counter() - began
    print(
        f"{seed - first} seeds from {first} on, {simulated_s:.0f} simulated seconds in {real_s:.0f}"
    )
    return 0


def find_planted(names: Sequence[str], cpu_s: float) -> int:
    """Plant each fault of faults/ in a process of its own, and look for a seed that finds it.

    Numbers as names are mutants. What never ends its turn counts as found.
    """
    run(1)  # loads every kernel, before the forks
    missed = []
    for name in names or source.faults():
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os._exit(_find_one(name, cpu_s))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            print(f"{name}: hangs or crashes, signal {-code}")
        if code > 0:
            missed.append(name)
    print(json.dumps({"planted": len(names or source.faults()), "missed": missed}))
    return int(bool(missed))


def _find_one(name: str, cpu_s: float) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + 2 * cpu_s + 10),) * 2)
    source.plant(name)
    module = source.fault(name)[0]
    programs = [kind for kind in ("handle", "url") if f".{kind}_" in module] or ["handle", "url"]
    began, seed = time.process_time(), 0
    while time.process_time() < began + cpu_s:
        seed += 1
        if module.startswith("zapex.library.") and kind_of(seed) not in programs:
            continue  # which does not run that module
        outcome = run(seed)
        if outcome.violation:
            used_s = time.process_time() - began
            print(f"{name}: seed {seed}, {used_s:.1f} CPU seconds: {outcome.violation[:90]!r}")
            sys.stdout.flush()
            return 0
    print(f"{name}: NOT FOUND by {seed} seeds", flush=True)
    return 1
