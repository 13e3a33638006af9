"""How many threads a learner on a CPU is fastest with: a short trial at its start."""

import time
from collections.abc import Callable

import torch

_GAIN = 0.95  # a larger team must take at most this share of the time
_BUDGET_S = 1.0


def fastest(
    step: Callable[[], object],
    most: int,
    *,
    set_threads: Callable[[int], object] = torch.set_num_threads,
    clock_s: Callable[[], float] = time.perf_counter,
) -> int:
    """The number of threads, up to `most`, with which `step` is fastest; it is set from now on.

    It tries 1, 2, 4, ... and `most`, for about a second, and stops when more threads gain less than
    a twentieth.
    """
    began_s = clock_s()
    best, best_s, threads = 1, float("inf"), 1
    while True:
        set_threads(threads)
        step()  # starts the threads
        step_s = min(_timed(step, clock_s) for _ in range(2))
        if step_s > _GAIN * best_s:
            break
        best, best_s = threads, step_s
        if threads >= most or clock_s() - began_s > _BUDGET_S:
            break
        threads = min(2 * threads, most)
    set_threads(best)
    return best


def _timed(step: Callable[[], object], clock_s: Callable[[], float]) -> float:
    start_s = clock_s()
    step()
    return clock_s() - start_s
