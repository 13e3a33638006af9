"""Child processes: started, watched through pidfds, restarted, and stopped before a deadline.

It knows nothing of roles. The parent's loop:

    with Supervisor(on_death=reclaim) as supervisor:
        supervisor.install_signal_handlers()
        for spec in specs:
            supervisor.start(spec)
        while supervisor.stop_signal is None:
            for event in supervisor.poll(timeout_s=0.5):
                report(event)
        for event in supervisor.shutdown(grace_s=4):
            report(event)

zapex.machine.child is the child's side.

A child dies with the thread that started it (PR_SET_PDEATHSIG counts threads, not processes), so
one thread owns a supervisor and must outlive the children. Children share the terminal's process
group but take no SIGINT or SIGHUP from it: the parent decides what a Ctrl-C means, while Ctrl-Z
stops and continues the whole run.
"""

import contextlib
import errno
import math
import os
import random
import re
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Self

from zapex.machine.child import INCARNATION_VARIABLE, PARENT_VARIABLE, TERMINAL_SIGNALS
from zapex.machine.disk import open_to_append

# A pidfd does not report a stop, which must be noticed within 3 s; asking looks at every child.
_LOOK_EVERY_S = 1.0
_KILL_S = 2.0  # SIGKILL is prompt unless the kernel itself hangs
_ONE_KEYPRESS_S = 0.2  # `timeout -s INT` sends its signal twice, to the process and to its group
_TAIL_BYTES = 1 << 16
_TAIL_LINES = 5


_TRACEBACK_LINES = 80


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """What to run.

    Args:
        env: added to the parent's own environment.
        log_path: takes stdout and stderr.
        restart: start it again when it dies.
        done_status: the exit status that means "nothing left to do". Any other one is a death.
        last_incarnation: the largest one known for this name from before this parent started.
    """

    name: str
    argv: Sequence[str]
    log_path: Path
    pass_fds: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    restart: bool = False
    done_status: int = 0
    last_incarnation: int = 0


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How soon a dead child is restarted, and when the supervisor gives up.

    The delay doubles from `first_s` to `longest_s` with each short incarnation in a row (one that
    died soon) and varies by +-`jitter`. The supervisor gives up after too many of those in a row,
    or too many deaths in a window. A role that fails by itself at every start will keep failing.
    One that is killed (because memory ran out, for example) gets more attempts, with longer delays.
    """

    first_s: float = 0.1
    longest_s: float = 30.0
    jitter: float = 0.25
    short_start_s: float = 10.0
    most_short_starts: int = 5
    most_short_starts_killed: int = 10
    window_s: float = 600.0
    most_deaths: int = 30


@dataclass(frozen=True)
class Event:
    """What happened to the child `name`; `str(event)` describes it."""

    name: str


@dataclass(frozen=True)
class Started(Event):
    """It was started."""

    pid: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name} started (pid {self.pid})"


@dataclass(frozen=True)
class Exited(Event):
    """It ended as it should: with its `done_status`, or by SIGTERM during a shutdown."""

    pid: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name} ended"


@dataclass(frozen=True)
class Died(Event):
    """It ended although it should run.

    `how` is the exit status or signal in words; `traceback` is the last one in its log, or the last
    lines of the log if there is none.
    """

    pid: int
    incarnation: int
    how: str
    traceback: str
    lived_s: float

    def __str__(self) -> str:
        log = f"\n{self.traceback}" if self.traceback else ""
        return f"{self.name} died after {self.lived_s:.1f} s: {self.how}{log}"


@dataclass(frozen=True)
class Restarting(Event):
    """It will be restarted in `delay_s`, at a later poll."""

    delay_s: float

    def __str__(self) -> str:
        return f"restarting {self.name} in {self.delay_s:.1f} s"


@dataclass(frozen=True)
class GaveUp(Event):
    """It is not restarted: the role cannot stay up."""

    reason: str

    def __str__(self) -> str:
        return f"{self.name} is not restarted: {self.reason}"


@dataclass(frozen=True)
class Stopped(Event):
    """It is alive but stopped by a signal; it keeps what it holds."""

    pid: int
    why: str

    def __str__(self) -> str:
        return f"{self.name} is {self.why}"


@dataclass(frozen=True)
class Continued(Event):
    """It runs again after a Stopped."""

    pid: int

    def __str__(self) -> str:
        return f"{self.name} is running again"


@dataclass(frozen=True)
class IgnoredSigterm(Event):
    """It did not end in time after SIGTERM; `how` says what was done."""

    pid: int
    how: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) did not end after SIGTERM: {self.how}"


def status_in_words(returncode: int) -> str:
    """Popen's `returncode` as "exit status 1" or "killed by SIGSEGV (Segmentation fault)"."""
    if returncode == os.EX_CONFIG:
        return "its settings cannot work"
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # real-time signals between SIGRTMIN and SIGRTMAX have no names
        return f"killed by signal {-returncode}"
    hint = "; the kernel does this when memory runs out" if -returncode == signal.SIGKILL else ""
    return f"killed by {name} ({signal.strsignal(-returncode)}{hint})"


_HEAD = re.compile(
    r"[ |+]*(Exception Group )?Traceback \(most recent call last\):|Fatal Python error:"
)
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")


def last_traceback(log: str) -> str:
    """The last traceback in `log` with its chained exceptions; "" if there is none."""
    lines = log.rstrip().splitlines()
    heads = [i for i, line in enumerate(lines) if _HEAD.match(line)]
    if not heads:
        return ""
    first = heads.pop()
    while heads and any(line.startswith(_CHAINED) for line in lines[heads[-1] : first]):
        first = heads.pop()
    block = lines[first:]
    if len(block) > _TRACEBACK_LINES:
        block = [*block[:20], "  ...", *block[-(_TRACEBACK_LINES - 20) :]]
    return "\n".join(block)


class Backoff:
    """When a role that died may restart. It reads no clock: the caller passes the time."""

    def __init__(self, policy: RestartPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._short_starts = 0
        self._failures = 0  # those of them that were not kills
        self._deaths: deque[float] = deque()

    def after_death(self, now_s: float, worked_s: float, *, killed: bool = False) -> float | str:
        """The delay in seconds until the next start, or the reason why there is none.

        Args:
            now_s: the time of the death.
            worked_s: time since the role began to work; 0 if it never did.
            killed: by SIGKILL, which says nothing about the role itself.
        """
        policy = self._policy
        short = worked_s < policy.short_start_s
        self._short_starts = self._short_starts + 1 if short else 0
        self._failures = self._failures + (not killed) if short else 0
        self._deaths.append(now_s)
        while self._deaths[0] <= now_s - policy.window_s:
            self._deaths.popleft()
        if (
            self._failures >= policy.most_short_starts
            or self._short_starts >= policy.most_short_starts_killed
        ):
            return (
                f"it died {self._short_starts} times in a row before it had worked for "
                f"{policy.short_start_s:g} s"
            )
        if len(self._deaths) >= policy.most_deaths:
            return f"it died {len(self._deaths)} times within {policy.window_s:g} s"
        delay_s = policy.first_s * 2.0 ** max(0, self._short_starts - 1)
        spread = self._rng.uniform(1 - policy.jitter, 1 + policy.jitter)
        return min(policy.longest_s, delay_s * spread)


@dataclass
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
    """The log, to append to; where a full disk or a stranger's file is, nothing is kept."""
    try:
        return open(open_to_append(path), "ab", buffering=0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ELOOP, errno.ENXIO):
            raise
        return open(os.devnull, "ab", buffering=0)


class Supervisor:
    """Owns child processes; see the module's docstring for the loop.

    Args:
        policy: when to restart a child.
        on_death: called with every Exited and Died once the child is reaped and before it can
            restart: then what it held may be reclaimed.
        is_up: is_up(name, pid) is whether a child has begun to work. The time before that, which
            may be long on a busy machine, does not count as staying up.
        seed: of the jitter of delays.
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

        Installs nothing outside the main thread: Python does not allow it. A second Ctrl-C kills
        the children at once and raises KeyboardInterrupt. An ignored SIGHUP (nohup) stays ignored.

        Args:
            outlives_terminal: SIGHUP only sets `hung_up`.
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
        """Start a child.

        Raises:
            OSError: it could not be started (not found, EMFILE, EAGAIN).
        """
        assert threading.get_ident() == self._thread, (
            "children die with the thread that starts them"
        )
        assert spec.name not in self._children, f"{spec.name} was started before"
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

        A child that died is restarted by a later poll, never by the one that reports its death.
        """
        assert threading.get_ident() == self._thread, (
            "children die with the thread that starts them"
        )
        deadline_s = time.monotonic() + timeout_s
        ended = self._wait(0.0)
        while True:
            events = self._handle(ended)
            now_s = time.monotonic()
            if events or self.stop_signal is not None or now_s >= deadline_s:
                return events
            restart_s = math.inf
            if not self._all_up:
                restart_s = min(child.restart_s for child in self._children.values())
            ended = self._wait(min(deadline_s, self._stops_due_s, restart_s))

    def shutdown(
        self,
        grace_s: float = 5.0,
        saver: str = "",
        keep_waiting: Callable[[], bool] = lambda: False,
    ) -> list[Event]:
        """Stop every child: SIGTERM to all, SIGKILL after `grace_s` to those that ignore it.

        Args:
            grace_s: seconds until SIGKILL.
            saver: a child that has more time, as long as `keep_waiting()` returns true.
            keep_waiting: called about once a second.

        Returns:
            The events of each, within `grace_s` + 2 s.
        """
        self._closing = True
        for name in self.pids:
            self.send_signal(name, signal.SIGTERM)
            self.send_signal(name, signal.SIGCONT)  # a stopped process would not receive it
        events = self._reap_until(time.monotonic() + grace_s)
        while saver in self.pids and keep_waiting():
            events += self._handle(self._wait(time.monotonic() + _LOOK_EVERY_S))
        ignoring = self.pids
        for name in ignoring:
            self.send_signal(name, signal.SIGKILL)
        self._reap_until(time.monotonic() + _KILL_S)
        for name, pid in ignoring.items():
            how = "SIGKILL had no effect" if name in self.pids else "killed"
            events.append(IgnoredSigterm(name, pid, f"{how} after {grace_s:g} s"))
        return events

    def _reap_until(self, deadline_s: float) -> list[Event]:
        events = self._handle(self._wait(0.0))
        while self.pids and time.monotonic() < deadline_s:
            events += self._handle(self._wait(deadline_s))
        return events

    def _wait(self, until_s: float) -> set[str]:
        """Sleep until a child ends, a signal comes or `until_s`. Returns children that ended."""
        ended = set()
        for key, _ in self._selector.select(max(0.0, until_s - time.monotonic())):
            if key.fd == self._wakeup_fd:
                os.eventfd_read(self._wakeup_fd)
            else:
                ended.add(key.data)
        return ended

    def _handle(self, ended: set[str]) -> list[Event]:
        """Handle what has happened; `ended` is what `_wait` returned."""
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
                    events += self._try_restart(child)
            elif name in ended and child.popen.poll() is not None:
                events += self._on_exit(child, child.popen)
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
        ours = {PARENT_VARIABLE: os.getpid(), INCARNATION_VARIABLE: child.incarnation}
        env = {**os.environ, **spec.env, **{key: str(value) for key, value in ours.items()}}
        with _open_log(spec.log_path) as log:
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError):  # on a full disk the role still runs in memory
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
        """Start the process. The stress harness overrides this to fork."""
        return subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=spec.pass_fds,
            env=env,
        )

    def _try_restart(self, child: _Child) -> list[Event]:
        try:
            return [self._spawn(child)]
        except OSError as error:
            died = Died(child.spec.name, 0, child.incarnation, f"cannot start: {error}", "", 0.0)
            return [died, self._restart(child, 0.0)]

    def _on_exit(self, child: _Child, popen: subprocess.Popen[bytes]) -> list[Event]:
        name, status = child.spec.name, popen.returncode
        lived_s = time.monotonic() - child.started_s
        child.popen = None  # first: the signal handler must not use a closed pidfd
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        # A signal to the whole group reaches the children before ours does.
        obeyed = self._stopping and status in (0, -signal.SIGTERM)
        end: Exited | Died
        if status == child.spec.done_status or obeyed:
            end = Exited(name, popen.pid, child.incarnation)
        else:
            how, log = status_in_words(status), self._end_of_log(child, status)
            end = Died(name, popen.pid, child.incarnation, how, log, lived_s)
        events: list[Event] = [end]
        if isinstance(end, Died) and child.spec.restart and not self._stopping:
            if status == os.EX_CONFIG:  # its own message says all
                events = [GaveUp(name, (end.traceback or end.how).splitlines()[-1])]
            else:
                worked_s = max(0.0, time.monotonic() - child.up_s)
                events.append(self._restart(child, worked_s, killed=status == -signal.SIGKILL))
        if self._on_death is not None:
            self._on_death(end)
        return events

    def _restart(self, child: _Child, worked_s: float, killed: bool = False) -> Restarting | GaveUp:
        now_s = time.monotonic()
        verdict = child.backoff.after_death(now_s, worked_s, killed=killed)
        if isinstance(verdict, str):
            return GaveUp(child.spec.name, verdict)
        child.restart_s = now_s + verdict
        return Restarting(child.spec.name, verdict)

    @staticmethod
    def _end_of_log(child: _Child, status: int) -> str:
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
        """The latest stop or continue of each child since the last call, by pid."""
        changes: dict[int, Any] = {}
        # Without WEXITED this reaps nothing; Popen does that.
        kinds = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # there are no children now
            while (change := os.waitid(os.P_ALL, 0, kinds)) is not None:
                changes[change.si_pid] = change
        return changes

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
