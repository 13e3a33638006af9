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

zapex.processes.child is the child's side.

A child dies with the thread that started it (PR_SET_PDEATHSIG counts threads, not processes), so
one thread owns a supervisor and must outlive the children. Children share the terminal's process
group but take no SIGINT or SIGHUP from it: the parent decides what a Ctrl-C means, while Ctrl-Z
stops and continues the whole run.
"""

import contextlib
import dataclasses
import errno
import math
import os
import random
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Self

from zapex.processes.child import INCARNATION_VARIABLE, PARENT_VARIABLE, TERMINAL_SIGNALS
from zapex.processes.restarts import (
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

# A pidfd does not report a stop, which must be noticed within 3 s; asking looks at every child.
_LOOK_EVERY_S = 1.0
_KILL_S = 2.0  # SIGKILL is prompt unless the kernel itself hangs
_ONE_KEYPRESS_S = 0.2  # `timeout -s INT` sends its signal twice, to the process and to its group
_TAIL_BYTES = 1 << 16
_TAIL_LINES = 5


@dataclasses.dataclass
class _Child:
    spec: ProcessSpec
    backoff: Backoff
    incarnation: int
    popen: subprocess.Popen[bytes] | None = None  # None between two starts and after the last
    pidfd: int = -1
    started_s: float = 0.0
    up_s: float = math.inf  # when it began to work
    log_offset: int = 0  # where this incarnation's part of the log begins
    restart_s: float = math.inf
    stopped: bool = False


def _open_log(path: Path) -> BinaryIO:
    """The log, to append to; where a full disk has no room for a new one, nothing is kept."""
    try:
        return open(path, "ab", buffering=0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return open(os.devnull, "ab", buffering=0)


class Supervisor:
    """Owns child processes; see the module's docstring for the loop.

    `on_death` is called with every Exited and Died once the child is reaped and before it can start
    again: then what it held may be reclaimed. `is_up(name, pid)`, if given, says whether a child
    has begun to work: the time before that, which may be long on a busy machine, does not count as
    staying up.
    """

    def __init__(
        self,
        *,
        policy: RestartPolicy | None = None,
        on_death: Callable[[Exited | Died], None] | None = None,
        is_up: Callable[[str, int], bool] | None = None,
        seed: int | None = None,
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._on_death = on_death
        self._is_up = is_up
        self._rng = random.Random(seed)
        self._children: dict[str, _Child] = {}
        self._closing = False
        self._thread = threading.get_ident()
        self._selector = selectors.DefaultSelector()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ)
        self._former_handlers: dict[signal.Signals, Any] = {}
        self._outlives_terminal = False
        self._signalled_s = 0.0
        self._all_up = False  # every child has begun to work
        self._stops_due_s = 0.0
        self.stop_signal: signal.Signals | None = None
        self.hung_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything: children, descriptors, handlers."""
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

    def install_signal_handlers(self, outlives_terminal: bool = False) -> None:
        """SIGINT, SIGTERM and SIGHUP end `poll` with `stop_signal` set.


        In another thread than the main one nothing is installed: Python does not allow it.
        A second Ctrl-C kills the children at once and raises KeyboardInterrupt. A SIGHUP that is
        ignored (nohup) stays ignored. outlives_terminal: SIGHUP only sets `hung_up`.
        """
        self._outlives_terminal = outlives_terminal
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            former = signal.getsignal(number)
            if number == signal.SIGHUP and former == signal.SIG_IGN:
                continue
            # None is a handler that was not installed from Python and cannot be put back.
            self._former_handlers[number] = signal.SIG_DFL if former is None else former
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if number == signal.SIGHUP and self._outlives_terminal:
            self.hung_up = True
        elif self.stop_signal is None:
            self.stop_signal = signal.Signals(number)
            self._signalled_s = now_s
            os.eventfd_write(self._wakeup_fd, 1)
        elif number == signal.SIGINT and now_s - self._signalled_s > _ONE_KEYPRESS_S:
            for name in self.pids:
                self.send_signal(name, signal.SIGKILL)
            raise KeyboardInterrupt

    def start(self, spec: ProcessSpec) -> Started:
        """Start a child. Raises OSError if that fails (not found, EMFILE, EAGAIN)."""
        assert threading.get_ident() == self._thread, (
            "children die with the thread that starts them"
        )
        assert spec.name not in self._children, f"{spec.name} is already here"
        child = _Child(spec, Backoff(self._policy, self._rng), spec.last_incarnation)
        started = self._spawn(child)
        self._children[spec.name] = child
        return started

    def send_signal(self, name: str, number: int) -> None:
        """Send a signal to a child, if it is alive."""
        child = self._children[name]
        if child.popen is not None:
            with contextlib.suppress(ProcessLookupError):  # a zombie: the next poll reaps it
                signal.pidfd_send_signal(child.pidfd, number)

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events and return them; empty after `timeout_s` or at a stop signal.

        A child that died starts again in a later poll, never in the one that reports its death.
        """
        assert threading.get_ident() == self._thread, (
            "children die with the thread that starts them"
        )
        deadline_s = time.monotonic() + timeout_s
        ended = self._wait(0.0)
        while True:
            events = self._look(ended)
            now_s = time.monotonic()
            if events or self.stop_signal is not None or now_s >= deadline_s:
                return events
            restart_s = math.inf
            if not self._all_up:
                restart_s = min(child.restart_s for child in self._children.values())
            ended = self._wait(min(deadline_s, self._stops_due_s, restart_s))

    def shutdown(
        self, grace_s: float = 5.0, saver: str = "", waits: Callable[[], bool] = lambda: False
    ) -> list[Event]:
        """End every child: SIGTERM to all, SIGKILL after `grace_s` to those that ignore it.

        Returns within `grace_s` + 2 s with the events of each; those that ignore it are Deaf. The
        child `saver` has more time, for as long as `waits()` returns true.
        """
        self._closing = True
        for name in self.pids:
            self.send_signal(name, signal.SIGTERM)
            self.send_signal(name, signal.SIGCONT)  # a stopped process would not receive it
        events = self._reap_until(time.monotonic() + grace_s)
        while saver in self.pids and waits():
            events += self._look(self._wait(time.monotonic() + _LOOK_EVERY_S))
        deaf = self.pids
        for name in deaf:
            self.send_signal(name, signal.SIGKILL)
        self._reap_until(time.monotonic() + _KILL_S)
        for name, pid in deaf.items():
            how = "SIGKILL had no effect" if name in self.pids else "killed"
            events.append(Deaf(name, pid, f"{how} after {grace_s:g} s"))
        return events

    def _reap_until(self, deadline_s: float) -> list[Event]:
        events = self._look(self._wait(0.0))
        while self.pids and time.monotonic() < deadline_s:
            events += self._look(self._wait(deadline_s))
        return events

    def _wait(self, until_s: float) -> set[str]:
        """Sleep until a child ends, a signal comes or `until_s`. Returns who has ended."""
        ended = set()
        for key, _ in self._selector.select(max(0.0, until_s - time.monotonic())):
            if key.fd == self._wakeup_fd:
                os.eventfd_read(self._wakeup_fd)
            else:
                ended.add(key.data)
        return ended

    def _look(self, ended: set[str]) -> list[Event]:
        """What has happened; `ended` is what `_wait` returned."""
        now_s, stopped = time.monotonic(), {}
        if now_s >= self._stops_due_s:
            self._stops_due_s = now_s + _LOOK_EVERY_S
            stopped = self._stops()
        events: list[Event] = []
        if self._all_up and not ended and not stopped:
            return events
        for name, child in self._children.items():
            if child.popen is None:
                if not self._stopping and now_s >= child.restart_s:
                    events += self._start_again(child)
            elif name in ended and child.popen.poll() is not None:
                events += self._bury(child, child.popen)
            else:
                if child.up_s == math.inf and self._is_up is not None:
                    child.up_s = now_s if self._is_up(name, child.popen.pid) else math.inf
                if child.popen.pid in stopped:
                    events += self._note_stop(child, child.popen.pid, stopped[child.popen.pid])
        self._all_up = all(c.popen and c.up_s < math.inf for c in self._children.values())
        return events

    def _spawn(self, child: _Child) -> Started:
        spec = child.spec
        child.restart_s = math.inf
        self._all_up = child.stopped = False
        child.incarnation = max(time.time_ns(), child.incarnation + 1)
        child.started_s = time.monotonic()
        child.up_s = math.inf if self._is_up else child.started_s
        own = {PARENT_VARIABLE: os.getpid(), INCARNATION_VARIABLE: child.incarnation}
        env = {**os.environ, **spec.env, **{key: str(value) for key, value in own.items()}}
        with _open_log(spec.log_path) as log:
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError):  # a full disk, where the role may go on in memory
                log.write(f"--- {spec.name}, incarnation {child.incarnation}, {began}\n".encode())
            child.log_offset = log.tell()
            # Blocked signals stay blocked across exec: no Ctrl-C can reach the child before its
            # child_setup, and the parent loses none.
            former = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
            try:
                popen = self._execute(spec, env, log)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
        try:
            child.pidfd = os.pidfd_open(popen.pid)
            self._selector.register(child.pidfd, selectors.EVENT_READ, spec.name)
        except OSError:
            popen.kill()
            popen.wait(_KILL_S)
            raise
        child.popen = popen
        return Started(spec.name, popen.pid, child.incarnation)

    def _execute(
        self, spec: ProcessSpec, env: dict[str, str], log: BinaryIO
    ) -> "subprocess.Popen[bytes]":
        """Start the process. The stress harness overrides this and forks."""
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
        child.popen = None  # first: the signal handler must not use a closed pidfd
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        # A signal to the whole group reaches the children before ours does.
        obeyed = self._stopping and status == -signal.SIGTERM
        end: Exited | Died
        if status == 0 or obeyed:
            end = Exited(name, popen.pid, child.incarnation)
        else:
            how, said = status_in_words(status), self._last_words(child, status)
            end = Died(name, popen.pid, child.incarnation, how, said, lived_s)
        events: list[Event] = [end]
        if isinstance(end, Died) and child.spec.restart and not self._stopping:
            if status == os.EX_CONFIG:  # its own words are all that there is to tell
                events = [GaveUp(name, (end.traceback or end.how).splitlines()[-1])]
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
        # SIGKILL raises nothing: a traceback in the log would be about something else.
        traceback = "" if status == -signal.SIGKILL else last_traceback(text)
        return traceback or "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])

    @staticmethod
    def _stops() -> dict[int, Any]:
        """By pid, the last news of children that were stopped or continued since the last call."""
        news: dict[int, Any] = {}
        # Without WEXITED this reaps nothing; Popen does that.
        kinds = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # there are no children now
            while (change := os.waitid(os.P_ALL, 0, kinds)) is not None:
                news[change.si_pid] = change
        return news

    @staticmethod
    def _note_stop(child: _Child, pid: int, change: Any) -> list[Event]:
        stopped = change.si_code == os.CLD_STOPPED
        if stopped == child.stopped:
            return []
        child.stopped = stopped
        if not stopped:
            return [Continued(child.spec.name, pid)]
        by = signal.Signals(change.si_status).name
        return [Stopped(child.spec.name, pid, f"stopped by {by}; to continue it: kill -CONT {pid}")]
