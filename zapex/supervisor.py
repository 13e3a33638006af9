"""Child processes: started, watched through pidfds, started again, ended before a deadline.

Knows no role. The parent's loop:

    with Supervisor(on_death=reclaim) as supervisor:
        supervisor.install_signal_handlers()
        for spec in specs:
            supervisor.start(spec)
        while supervisor.stop_signal is None:
            for event in supervisor.poll(timeout_s=0.5):
                report(event)
        for event in supervisor.shutdown(grace_s=4):
            report(event)

and a child's first line: `incarnation = child_setup("actor 3")`.

A child dies with the thread that started it (PR_SET_PDEATHSIG counts threads, not processes), so
one thread owns a supervisor and must outlive the children. Children share the terminal's process
group but take no SIGINT or SIGHUP from it: the parent decides what a Ctrl-C means, while Ctrl-Z
stops and continues the whole run.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import math
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, BinaryIO, Self

from zapex.lives import (
    Backoff,
    Continued,
    Deaf,
    Died,
    Event,
    Exited,
    GaveUp,
    ProcessSpec,
    Restarting,
    RestartPolicy,
    Started,
    Stopped,
    last_traceback,
    status_in_words,
)

__all__ = [
    "Continued",
    "Deaf",
    "Died",
    "Event",
    "Exited",
    "GaveUp",
    "ProcessSpec",
    "RestartPolicy",
    "Restarting",
    "Started",
    "Stopped",
    "Supervisor",
    "child_setup",
]

_PARENT_VARIABLE = "ZAPEX_PARENT_PID"
_INCARNATION_VARIABLE = "ZAPEX_INCARNATION"
_PR_SET_PDEATHSIG = 1
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)

_LOOK_EVERY_S = 1.0  # a pidfd does not tell of a stop; a stop is to be noticed within 3 s
_KILL_S = 2.0  # SIGKILL is prompt unless the kernel itself hangs
_ONE_KEYPRESS_S = 0.2  # `timeout -s INT` sends its signal twice, to the process and to its group
_TAIL_BYTES = 1 << 16
_TAIL_LINES = 5


def child_setup(title: str) -> int:
    """Make this process a supervised child, titled "zapex: `title`"; returns its incarnation.

    From here on it dies with its parent and leaves Ctrl-C to it. Raises SystemExit where the
    parent is already gone. What SIGTERM does is the role's business.
    """
    from setproctitle import setproctitle

    for number in _TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINAL_SIGNALS)
    faulthandler.enable()
    setproctitle(f"zapex: {title}")
    # Taken out of the environment: a process that this one starts is not the parent's child.
    parent = os.environ.pop(_PARENT_VARIABLE, None)
    incarnation = os.environ.pop(_INCARNATION_VARIABLE, None)
    if parent is not None:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        # The parent may have died before the line above: then no signal will ever come.
        if os.getppid() != int(parent):
            sys.exit(f"{title}: the parent (pid {parent}) is gone")
    return int(incarnation) if incarnation else time.time_ns()


@dataclasses.dataclass
class _Child:
    spec: ProcessSpec
    backoff: Backoff
    incarnation: int
    popen: subprocess.Popen[bytes] | None = None  # None between two lives and after the last
    pidfd: int = -1
    started_s: float = 0.0
    up_s: float = math.inf  # when it began to work
    log_offset: int = 0  # where this life's part of the log begins
    restart_s: float = math.inf
    stopped_by: int | None = None
    quiet: bool = False


class Supervisor:
    """Owns child processes; see the module's docstring for the loop.

    `on_death` is told of every Exited and Died once the child is reaped and before it can start
    again: then what it held may be reclaimed. `silent_s(name)`, where given, is the time since
    the child last showed a sign of life; above `silent_after_s` it is reported as Stopped.
    `is_up(name, pid)`, where given, says that a child has begun to work: what it took to get there,
    which may be long on a busy machine, is not counted as staying up.
    """

    def __init__(
        self,
        *,
        policy: RestartPolicy | None = None,
        on_death: Callable[[Exited | Died], None] | None = None,
        silent_s: Callable[[str], float] | None = None,
        is_up: Callable[[str, int], bool] | None = None,
        silent_after_s: float = 3.0,
        seed: int | None = None,
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._on_death = on_death
        self._silent_s = silent_s
        self._is_up = is_up
        self._silent_after_s = silent_after_s
        self._rng = random.Random(seed)
        self._children: dict[str, _Child] = {}
        self._closing = False
        self._thread = threading.get_ident()
        self._selector = selectors.DefaultSelector()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ)
        self._former_handlers: dict[signal.Signals, Any] = {}
        self._signalled_s = 0.0
        self.stop_signal: signal.Signals | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing of it stays: no child, no descriptor, no handler."""
        self.shutdown()
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        self._former_handlers.clear()
        self._selector.close()
        os.close(self._wakeup_fd)

    @property
    def pids(self) -> dict[str, int]:
        """The living children."""
        return {name: c.popen.pid for name, c in self._children.items() if c.popen is not None}

    @property
    def _stopping(self) -> bool:
        return self._closing or self.stop_signal is not None

    def install_signal_handlers(self) -> None:
        """SIGINT, SIGTERM and SIGHUP end `poll` with `stop_signal` set; main thread only.

        A second Ctrl-C kills the children at once and raises KeyboardInterrupt. A SIGHUP that is
        ignored (nohup) stays ignored.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            former = signal.getsignal(number)
            if number == signal.SIGHUP and former == signal.SIG_IGN:
                continue
            # None is a handler that was not installed from Python and cannot be put back.
            self._former_handlers[number] = signal.SIG_DFL if former is None else former
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.stop_signal is None:
            self.stop_signal = signal.Signals(number)
            self._signalled_s = now_s
            os.eventfd_write(self._wakeup_fd, 1)
        elif number == signal.SIGINT and now_s - self._signalled_s > _ONE_KEYPRESS_S:
            for name in self.pids:
                self.send_signal(name, signal.SIGKILL)
            raise KeyboardInterrupt

    def start(self, spec: ProcessSpec) -> Started:
        """Start a child. Raises OSError where it cannot be had (not found, EMFILE, EAGAIN)."""
        assert threading.get_ident() == self._thread, (
            "children die with the thread that starts them"
        )
        assert spec.name not in self._children, f"{spec.name} is already here"
        child = _Child(spec, Backoff(self._policy, self._rng), spec.last_incarnation)
        started = self._spawn(child)
        self._children[spec.name] = child
        return started

    def send_signal(self, name: str, number: int) -> None:
        """Send a signal to a child; one that is not alive any more is left in peace."""
        child = self._children[name]
        if child.popen is not None:
            with contextlib.suppress(ProcessLookupError):  # a zombie: the next poll reaps it
                signal.pidfd_send_signal(child.pidfd, number)

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened, as soon as something did; empty after `timeout_s` or at a stop signal.

        A child that died starts again in a later poll, never in the one that reports its death.
        """
        assert threading.get_ident() == self._thread, (
            "children die with the thread that starts them"
        )
        deadline_s = time.monotonic() + timeout_s
        while True:
            events = self._look()
            now_s = time.monotonic()
            if events or self.stop_signal is not None or now_s >= deadline_s:
                return events
            restarts = [child.restart_s for child in self._children.values()]
            self._wait(min([deadline_s, now_s + _LOOK_EVERY_S, *restarts]))

    def shutdown(self, grace_s: float = 5.0) -> list[Event]:
        """End every child: SIGTERM to all, SIGKILL after `grace_s` to those that are deaf to it.

        Returns within `grace_s` + 2 s with what became of each; the deaf are reported as Deaf.
        """
        self._closing = True
        for name in self.pids:
            self.send_signal(name, signal.SIGTERM)
            self.send_signal(name, signal.SIGCONT)  # a stopped one would not hear
        events = self._reap_until(time.monotonic() + grace_s)
        deaf = self.pids
        for name in deaf:
            self.send_signal(name, signal.SIGKILL)
        self._reap_until(time.monotonic() + _KILL_S)
        for name, pid in deaf.items():
            how = "not even SIGKILL ends it" if name in self.pids else "killed"
            events.append(Deaf(name, pid, f"{how} after {grace_s:g} s"))
        return events

    def _reap_until(self, deadline_s: float) -> list[Event]:
        events = self._look()
        while self.pids and time.monotonic() < deadline_s:
            self._wait(deadline_s)
            events += self._look()
        return events

    def _wait(self, until_s: float) -> None:
        """Sleep until a child ends, a signal comes or the clock says `until_s`."""
        for key, _ in self._selector.select(max(0.0, until_s - time.monotonic())):
            if key.fd == self._wakeup_fd:
                os.eventfd_read(self._wakeup_fd)

    def _look(self) -> list[Event]:
        events: list[Event] = []
        for child in self._children.values():
            if child.popen is not None:
                if child.popen.poll() is not None:
                    events += self._bury(child, child.popen)
                else:
                    if child.up_s == math.inf and self._is_up is not None:
                        up = self._is_up(child.spec.name, child.popen.pid)
                        child.up_s = time.monotonic() if up else math.inf
                    events += self._look_for_stop(child, child.popen.pid)
            elif not self._stopping and time.monotonic() >= child.restart_s:
                events += self._start_again(child)
        return events

    def _spawn(self, child: _Child) -> Started:
        spec = child.spec
        child.restart_s = math.inf
        child.stopped_by = None
        child.quiet = False
        child.incarnation = max(time.time_ns(), child.incarnation + 1)
        child.started_s = time.monotonic()
        child.up_s = math.inf if self._is_up else child.started_s
        own = {_PARENT_VARIABLE: os.getpid(), _INCARNATION_VARIABLE: child.incarnation}
        env = {**os.environ, **spec.env, **{key: str(value) for key, value in own.items()}}
        with open(spec.log_path, "ab") as log:
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- {spec.name}, incarnation {child.incarnation}, {began}\n".encode())
            log.flush()
            child.log_offset = log.tell()
            # Blocked signals stay blocked across exec: no Ctrl-C can hit the child before its
            # child_setup, and the parent loses none.
            former = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
            try:
                popen = self._execute(spec, env, log)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
        try:
            child.pidfd = os.pidfd_open(popen.pid)
            self._selector.register(child.pidfd, selectors.EVENT_READ)
        except OSError:
            popen.kill()
            popen.wait(_KILL_S)
            raise
        child.popen = popen
        return Started(spec.name, popen.pid, child.incarnation)

    def _execute(
        self, spec: ProcessSpec, env: dict[str, str], log: BinaryIO
    ) -> "subprocess.Popen[bytes]":
        """The process itself. The stress harness forks one instead."""
        return subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=spec.pass_fds,
            env=env,
        )

    def _start_again(self, child: _Child) -> list[Event]:
        try:
            return [self._spawn(child)]
        except OSError as error:
            died = Died(child.spec.name, 0, child.incarnation, f"cannot start: {error}", "", 0.0)
            return [died, self._next_life(child, 0.0)]

    def _bury(self, child: _Child, popen: subprocess.Popen[bytes]) -> list[Event]:
        name, status = child.spec.name, popen.returncode
        lived_s = time.monotonic() - child.started_s
        child.popen = None  # first: the signal handler may not meet a closed pidfd
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        # Whoever signals a whole group reaches the children before we do.
        obeyed = self._stopping and status == -signal.SIGTERM
        end: Exited | Died
        if status == 0 or obeyed:
            end = Exited(name, popen.pid, child.incarnation)
        else:
            how, said = status_in_words(status), self._last_words(child, status)
            end = Died(name, popen.pid, child.incarnation, how, said, lived_s)
        events: list[Event] = [end]
        if isinstance(end, Died) and child.spec.restart and not self._stopping:
            if status == os.EX_CONFIG:
                events.append(GaveUp(name, (end.traceback or end.how).splitlines()[-1]))
            else:
                worked_s = max(0.0, time.monotonic() - child.up_s)
                events.append(self._next_life(child, worked_s, killed=status == -signal.SIGKILL))
        if self._on_death is not None:
            self._on_death(end)
        return events

    def _next_life(
        self, child: _Child, worked_s: float, killed: bool = False
    ) -> Restarting | GaveUp:
        now_s = time.monotonic()
        verdict = child.backoff.after_death(now_s, worked_s, killed=killed)
        if isinstance(verdict, str):
            return GaveUp(child.spec.name, verdict)
        child.restart_s = now_s + verdict
        return Restarting(child.spec.name, verdict)

    @staticmethod
    def _last_words(child: _Child, status: int) -> str:
        try:
            with open(child.spec.log_path, "rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(child.log_offset, end - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return f"(its log cannot be read: {error})"
        # Nothing is raised by SIGKILL: a traceback in the log is then about something else.
        traceback = "" if status == -signal.SIGKILL else last_traceback(text)
        return traceback or "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])

    def _look_for_stop(self, child: _Child, pid: int) -> list[Event]:
        try:
            # Without WEXITED this reaps nothing: that stays Popen's work.
            change = os.waitid(os.P_PIDFD, child.pidfd, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:  # it died this moment
            return []
        if change is not None:
            child.stopped_by = change.si_status if change.si_code == os.CLD_STOPPED else None
        why = ""
        if child.stopped_by is not None:
            name = signal.Signals(child.stopped_by).name
            why = f"stopped by {name}; to continue it: kill -CONT {pid}"
        elif self._silent_s is not None:
            silent_s = self._silent_s(child.spec.name)
            if silent_s > self._silent_after_s:
                why = f"no sign of life for {silent_s:.1f} s"
        if bool(why) == child.quiet:
            return []
        child.quiet = bool(why)
        name = child.spec.name
        return [Stopped(name, pid, why) if why else Continued(name, pid)]
