"""Other processes for a benchmark: forked, and gone when we are."""

import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def start(work: Callable[[], object], nice: int = 0) -> int:
    """A child that does `work` once; it ends with status 1 where that raises.

    The caller must have no threads of its own yet: no ZeroMQ context, no running kernel.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(nice)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def start_beside(work: Callable[[], object]) -> int:
    """A child that does `work` over and over until it is reaped.

    It has a core of its own: two that yield to each other on one core measure the scheduler.
    """
    cores = sorted(os.sched_getaffinity(0))

    def over_and_over() -> None:
        os.sched_setaffinity(0, {cores[-1]})
        while True:
            work()

    os.sched_setaffinity(0, {cores[0]})
    return start(over_and_over)


def reap(pid: int) -> None:
    """End a child, if it has not ended by itself."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    # torch's queue names the memory that it shares, for a moment: a kill in it leaves the name.
    for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
        left.unlink(missing_ok=True)
