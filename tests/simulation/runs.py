"""Many runs: shows one, looks for one that fails, and makes a failure small."""

import json
import time

from tests.simulation.run import Fault, Outcome, run


def shrink(outcome: Outcome, seconds: float = 60.0) -> Outcome:
    """The same failure with as few faults as were found in this time."""
    until = time.monotonic() + seconds
    least, size = outcome, max(1, len(outcome.faults) // 2)
    while size and time.monotonic() < until:
        for first in range(0, len(least.faults), size):
            fewer: list[Fault] = [*least.faults[:first], *least.faults[first + size :]]
            if time.monotonic() > until:
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


def explore(first: int, minutes: float) -> int:
    """New seeds for some time; the first that fails ends it."""
    began, seed, simulated_s = time.monotonic(), first, 0.0
    while time.monotonic() < began + 60 * minutes:
        outcome = run(seed)
        simulated_s += outcome.simulated_s
        if outcome.violation:
            print(f"seed {seed} FAILED: {outcome.violation}", flush=True)
            print(f"  make simulate ARGS='--seed {seed}' shows it", flush=True)
            return 1
        seed += 1
    real_s = time.monotonic() - began
    print(
        f"{seed - first} seeds from {first} on, {simulated_s:.0f} simulated seconds in {real_s:.0f}"
    )
    return 0
