"""The number of threads of a learner on a CPU: from a trial at its start, then as cores idle."""

import time
from collections.abc import Callable

import torch

_GAIN = 0.95  # a larger team must take at most this share of the time
_BUDGET_S = 1.0
# Actors that wait for the learner play in bursts of some seconds: a period has several.
_PERIOD_S, _AGAIN_S = 10.0, 300.0
_IDLE, _NONE, _BUSY = 0.5, 0.1, 0.8  # of a core, the same, of the threads' cores


def fastest(
    step: Callable[[], object],
    most: int,
    *,
    set_threads: Callable[[int], object] = torch.set_num_threads,
    clock_s: Callable[[], float] = time.perf_counter,
) -> int:
    """Find and set the number of threads, up to `most`, with which `step` is fastest.

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


class IdleCores:
    """Adds a thread for each idle core if steps become faster; removes one if cores are short.

    A learner that is the bottleneck keeps actors waiting, and can use the cores that they leave
    idle. Call `look` after each step.

    Args:
        threads: the learner's first and least number of threads.
        most: cores of the machine.
        idle_s: seconds that cores have idled so far, all cores together.
        used_s: CPU seconds of the learner's process so far.
        set_threads: sets the number of threads.
        clock_s: seconds from any origin.
    """

    def __init__(
        self,
        threads: int,
        most: int,
        *,
        idle_s: Callable[[], float],
        used_s: Callable[[], float] = time.process_time,
        set_threads: Callable[[int], object] = torch.set_num_threads,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = self._least = threads
        self._most, self._set_threads = most, set_threads
        self._clocks = clock_s, idle_s, used_s
        self._slower = 0.0  # steps a second before the thread on trial; 0: none is
        self._again_s = clock_s()  # when another may be tried
        self._steps, self._began = 0, self._read()

    def _read(self) -> tuple[float, ...]:
        return tuple(clock() for clock in self._clocks)

    def look(self) -> None:
        """Count a step, and change the number of threads if it is time."""
        self._steps += 1
        if self._clocks[0]() - self._began[0] < _PERIOD_S:
            return
        now = self._read()
        seconds, idle_s, used_s = (b - a for a, b in zip(self._began, now, strict=True))
        speed, idle, used = self._steps / seconds, idle_s / seconds, used_s / seconds
        tried, self._slower = self._slower, 0.0
        if tried and _GAIN * speed <= tried:
            self._again_s = now[0] + _AGAIN_S
            self._set(self.threads - 1)
        elif idle >= _IDLE and used >= _BUSY * self.threads and self.threads < self._most:
            if now[0] >= self._again_s:
                self._slower = speed
                self._set(self.threads + 1)
        elif idle < _NONE and used < self.threads - _IDLE and self.threads > self._least:
            self._set(self.threads - 1)
        self._steps, self._began = 0, self._read()

    def _set(self, threads: int) -> None:
        self.threads = threads
        self._set_threads(threads)


def _timed(step: Callable[[], object], clock_s: Callable[[], float]) -> float:
    start_s = clock_s()
    step()
    return clock_s() - start_s
