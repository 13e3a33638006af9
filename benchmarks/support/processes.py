"""Other processes for a benchmark: forked, and gone when their parent is.

Whoever forks must have no threads of its own yet: no ZeroMQ context, no running kernel.
"""

import ctypes
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG, _CLONE_NEWNET = 1, 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LOOK_S = 0.1


def start(work: Callable[[], object]) -> int:
    """A child that does `work` once; it ends with status 1 where that raises."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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


class Process:
    """A child that does `work` and hands its JSON back.

    namespace: a network namespace, where it does it; "": that of this process.
    """

    def __init__(self, work: Callable[[], Any], namespace: str = "") -> None:
        read, write = os.pipe()

        def there() -> None:
            os.close(read)
            if namespace:
                fd = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
                if _LIBC.setns(fd, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
                os.close(fd)
            with os.fdopen(write, "w") as file:
                json.dump(work(), file)

        self.pid, self._fd, self._is_over = start(there), read, False
        os.close(write)

    def result(self, server: "Process | None" = None, timeout_s: float = 120.0) -> Any:
        """What its work returned; the child is gone then.

        server: without it no result can come. Raises RuntimeError as soon as one of the two has
        failed, TimeoutError when there is no result in time.
        """
        found, deadline = b"", time.monotonic() + timeout_s
        while True:
            while not select.select([self._fd], [], [], _LOOK_S)[0]:
                if server is not None and server.has_ended():
                    raise RuntimeError("the server has ended before its client; its error is above")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a process had no result after {timeout_s:.0f} s")
            piece = os.read(self._fd, 1 << 16)
            if not piece:
                break
            found += piece
        self._is_over = True
        os.close(self._fd)
        _, status = os.waitpid(self.pid, 0)
        if status:
            raise RuntimeError("a process has failed; its error is above")
        return json.loads(found)

    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> None:
        """End it, if it has not ended."""
        if not self._is_over:
            self._is_over = True
            reap(self.pid)
            os.close(self._fd)
