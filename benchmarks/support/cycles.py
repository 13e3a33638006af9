"""How many cycles a second a busy core makes, so that processor seconds can be told as cycles."""

import shutil
import subprocess
import sys
import time

import numba as nb

_SPIN = "import time\nuntil = time.monotonic() + 0.3\nwhile time.monotonic() < until: pass"
_TURNS = 100_000_000
_CYCLES_PER_TURN = 2  # an exclusive or, then an addition that waits for it


@nb.njit
def _chain(turns: int) -> int:
    found = 1
    for turn in range(turns):
        found = (found ^ turn) + 7
    return found


def per_second() -> tuple[float, str]:
    """Cycles a second of a busy core, and how they were counted.

    By the processor's counter, where `perf stat` may read it; else by the time of a chain of
    additions that each take one cycle, as on every processor of today.
    """
    counted = _counted()
    if counted:
        return counted, "perf stat's cycles of a busy process"
    _chain(1)
    times = []
    for _ in range(5):
        start = time.thread_time_ns()
        _chain(_TURNS)
        times.append(time.thread_time_ns() - start)
    return _CYCLES_PER_TURN * _TURNS / min(times) * 1e9, (
        "the processor's counter is not readable here: a timed chain of additions"
    )


def _counted() -> float | None:
    """Cycles a second by `perf stat`; None where it is missing or may not read them."""
    if shutil.which("perf") is None:
        return None
    command = ["perf", "stat", "-x,", "-e", "cycles,task-clock", sys.executable, "-c", _SPIN]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        values = {line.split(",")[2].split(":")[0]: line.split(",")[0]
                  for line in done.stderr.splitlines() if line.count(",") > 3}  # fmt: skip
        return float(values["cycles"]) / float(values["task-clock"]) * 1000
    except (subprocess.SubprocessError, KeyError, ValueError, IndexError, ZeroDivisionError):
        return None
