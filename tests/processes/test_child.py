"""Promises of a role's own process: whatever its duty cycle is at, it ends in time and may save."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from zapex.processes.child import Stop, run_until_stopped

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
    yield Stop(patience_s=0.1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert sys.unraisablehook is hook
    for number, handler in former.items():
        signal.signal(number, handler)


def for_ever() -> None:
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


def test_a_cycle_that_goes_on_is_broken_off(stop: Stop) -> None:
    role = Role(for_ever)
    run(role, stop)
    assert role.cycles == 2


def test_a_cycle_that_ends_in_time_is_the_last(stop: Stop) -> None:
    role = Role(lambda: None)
    run(role, stop)
    assert role.cycles == 2
    assert not stop.broken_off


def test_what_a_callback_from_c_swallows_comes_again(stop: Stop) -> None:
    def work() -> None:
        in_a_callback(lambda: stop.broken_off)  # which never returns by itself
        for_ever()

    run(Role(work), stop)
    assert stop.broken_off


def test_an_error_that_a_broken_callback_leads_to_does_not_keep_a_role_from_saving(
    stop: Stop,
) -> None:
    def work() -> None:
        in_a_callback(lambda: stop.broken_off)
        raise RuntimeError("no compiled object yet")

    run(Role(work), stop)
    assert stop.broken_off


def test_an_error_of_the_role_itself_is_told_also_when_it_was_asked_to_stop(stop: Stop) -> None:
    def work() -> None:
        raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        run(Role(work), stop)
    stop.over()
