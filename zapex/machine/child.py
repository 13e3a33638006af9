"""A child's side of supervision: its set-up, the loop around its duty cycle, and its end.

incarnation = child_setup("actor 3")
...
run_until_stopped(role, lambda ready: waiter.wait(ready, 0.2), Stop())
role.close()
end_by_sigterm()
"""

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

PARENT_VARIABLE = "ZAPEX_PARENT_PID"
INCARNATION_VARIABLE = "ZAPEX_INCARNATION"
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
DONE = 79
"""Exit status of a role that has reported to its parent why it ends; sysexits.h ends at 78."""
_PR_SET_PDEATHSIG = 1
_CYCLE_S = 1.0  # for the current duty cycle to end; saving comes after it
_AGAIN_S = 0.05


class DutyCycle(Protocol):
    """The methods of every role."""

    def do_work(self) -> int:
        """Do what there is to do, without waiting. Returns how much it was."""

    def ready(self) -> bool:
        """Whether there may be something to do."""

    def close(self) -> None:
        """End, and save what there is to save."""


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables that limit the libraries of a process to `threads` threads."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMBA_NUM_THREADS": count,
        # An idle OpenMP thread that spins would take a core from a role that works.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "PYTHONUNBUFFERED": "1",
    }


def child_setup(title: str) -> int:
    """Make this process a supervised child, titled "zapex: `title`"; returns its incarnation.

    From now on it dies with its parent and leaves Ctrl-C to the parent. Output that the disk
    refuses is lost and raises nothing. The role decides what SIGTERM does.

    Raises:
        SystemExit: the parent is already gone.
    """
    from setproctitle import setproctitle

    sys.stdout, sys.stderr = _text_to(1), _text_to(2)
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)
    faulthandler.enable()
    setproctitle(f"zapex: {title}")
    # Removed from the environment: a process that this one starts is not the parent's child.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    incarnation = os.environ.pop(INCARNATION_VARIABLE, None)
    if parent is not None:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        # The parent may have died before the line above; then no signal will come.
        if os.getppid() != int(parent):
            sys.exit(f"{title}: the parent (pid {parent}) is gone")
    return int(incarnation) if incarnation else time.time_ns()


class _Log(io.FileIO):
    """Output that a full disk may discard: a role can work without its log."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _text_to(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Log(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


class LostInCallbacks:
    """Reports an exception that was raised in a callback from C, where it would be lost.

    Numba compiles and loads kernels with such callbacks. again: is called at once; it must make the
    exception, of the class `kind`, be raised again a moment later.
    """

    def __init__(self, kind: type[BaseException], again: Callable[[], None]) -> None:
        self._kind, self._again, self._former = kind, again, sys.unraisablehook
        sys.unraisablehook = self._hook

    def _hook(self, lost: Any) -> None:
        if issubclass(lost.exc_type, self._kind):
            self._again()
        else:
            self._former(lost)

    def close(self) -> None:
        """Stop watching."""
        sys.unraisablehook = self._former


class Interrupted(BaseException):
    """A duty cycle was interrupted: it was still running long after it should have ended."""


class Stop:
    """Set by SIGTERM; a role finishes its duty cycle and ends.

    A cycle that compiles a kernel or waits for a busy machine is interrupted after `cycle_s`:
    the role must save before the parent kills it.
    """

    def __init__(self, cycle_s: float = _CYCLE_S) -> None:
        self.asked = self.interrupted = False
        self._cycle_s, self._over = cycle_s, False
        self._lost = LostInCallbacks(Interrupted, self._again)
        signal.signal(signal.SIGALRM, self._interrupt)
        signal.signal(signal.SIGTERM, self._ask)

    def over(self) -> None:
        """The last duty cycle has ended; nothing is interrupted from now on."""
        self._over = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._lost.close()

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        signal.setitimer(signal.ITIMER_REAL, self._cycle_s)

    def _interrupt(self, number: int, frame: object) -> None:
        if not self._over:
            self._over = self.interrupted = True
            raise Interrupted

    def _again(self) -> None:
        self._over = False
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def run_until_stopped(
    role: DutyCycle, wait: Callable[[Callable[[], bool]], object], stop: Stop
) -> None:
    """Run duty cycles until SIGTERM.

    Args:
        role: is not closed here.
        wait: waits until its argument returns true, but not for long: events that do not wake it
            are checked between two waits.
        stop: SIGTERM's handler.

    Raises:
        RuntimeError: the role, or an environment that it runs, called `sys.exit`.
    """
    with contextlib.suppress(Interrupted):
        try:
            while not stop.asked:
                if not role.do_work():
                    wait(lambda: stop.asked or role.ready())
        except SystemExit as error:
            stop.over()
            raise RuntimeError(f"a role must not exit by itself, but it did: {error!r}") from error
        except Exception:
            if not stop.interrupted:  # otherwise it is Numba's error for a callback that failed
                stop.over()  # the caller may have to save
                raise
        stop.over()
    stop.over()  # here after an interruption


def end_by_sigterm() -> None:
    """End by SIGTERM, the signal that this process has obeyed.

    If it was not the parent that sent it, this is a death, and the parent restarts the role.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
