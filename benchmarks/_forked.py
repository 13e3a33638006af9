"""A second process for a benchmark: forked, on a core of its own, gone when we are."""

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def fork(work: Callable[[], object]) -> int:
    """A child that does `work` over and over until it is reaped, or until we are gone.

    Each has a core of its own: two that yield to each other on one core measure the scheduler.
    """
    cores = sorted(os.sched_getaffinity(0))
    pid = os.fork()
    os.sched_setaffinity(0, {cores[0 if pid else -1]})
    if pid == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        while True:
            work()
    return pid


def reap(pid: int) -> None:
    """End a child of `fork`."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    # torch's queue names the memory that it shares, for a moment: somebody killed in it leaves it.
    for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
        left.unlink(missing_ok=True)
