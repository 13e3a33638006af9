"""A role's process ends in time, whatever its duty cycle is doing, and can save first."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from zapex.machine.child import Stop, run_until_stopped

pytestmark = pytest.mark.timeout(30)

CALLBACK = ctypes.CFUNCTYPE(None)


class Role:
    """Its second cycle tells the process to stop, and then goes on with `work`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self.cycles = work, 0

    def do_work(self) -> int:
        self.cycles += 1
        if self.cycles == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            self._work()
        return 1

    def ready(self) -> bool:
        return True

    def close(self) -> None: ...


@pytest.fixture
def stop() -> Iterator[Stop]:
    former = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM)}
    hook = sys.unraisablehook
    yield Stop(cycle_s=0.1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert sys.unraisablehook is hook
    for number, handler in former.items():
        signal.signal(number, handler)


def forever() -> None:
    while True:
        time.sleep(0.001)


def in_a_callback(until: Callable[[], bool]) -> None:
    """As Numba's compiler calls Python: what is raised in there goes nowhere."""

    def wait() -> None:
        while not until():
            time.sleep(0.001)

    CALLBACK(wait)()


def run(role: Role, stop: Stop) -> None:
    run_until_stopped(role, lambda ready: pytest.fail("there is always work"), stop)


def test_long_cycle_is_interrupted(stop: Stop) -> None:
    role = Role(forever)
    run(role, stop)
    assert role.cycles == 2


def test_cycle_that_ends_in_time_is_the_last(stop: Stop) -> None:
    role = Role(lambda: None)
    run(role, stop)
    assert role.cycles == 2
    assert not stop.interrupted


def test_interruption_lost_in_a_c_callback_comes_again(stop: Stop) -> None:
    def work() -> None:
        in_a_callback(lambda: stop.interrupted)  # which never returns by itself
        forever()

    run(Role(work), stop)
    assert stop.interrupted


def test_error_after_a_lost_interruption_does_not_prevent_saving(
    stop: Stop,
) -> None:
    def work() -> None:
        in_a_callback(lambda: stop.interrupted)
        raise RuntimeError("no compiled object yet")

    run(Role(work), stop)
    assert stop.interrupted


def test_role_error_is_raised_even_after_sigterm(stop: Stop) -> None:
    def work() -> None:
        raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        run(Role(work), stop)
    stop.over()


@pytest.mark.parametrize("status", [0, 3])
def test_sys_exit_in_a_cycle_is_an_error(stop: Stop, status: int) -> None:
    with pytest.raises(RuntimeError, match=rf"SystemExit\({status}\)"):
        run(Role(lambda: sys.exit(status)), stop)
