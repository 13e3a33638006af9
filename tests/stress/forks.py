"""Children that may be killed at any instruction: forked from one small, warmed-up process.

Only for scripts of their own with a single thread; nothing in zapex forks.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable


class Child:
    """Runs `work` over and over in a forked process until it is killed."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                while os.getppid() != 1:  # a killed parent leaves nothing
                    work()
            except BaseException:
                traceback.print_exc()
                os._exit(70)
            os._exit(0)

    def kill(self) -> None:
        """SIGKILL and reap. Raises where it had ended by itself: it failed."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        if not os.WIFSIGNALED(status):
            raise RuntimeError(f"child {self.pid} ended by itself, status {status}")


def sleep_until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Wait for `condition` and return how long it took; RuntimeError after timeout_s."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() > start + timeout_s:
            raise RuntimeError(f"stuck: {what} within {timeout_s} s")
        time.sleep(50e-6)
    return time.monotonic() - start
