"""Restarts of a child process as data: what to run, how it ended, when it may start again."""

import dataclasses
import os
import random
import re
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

_TRACEBACK_LINES = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """What to run. `env` is added to the parent's own; stdout and stderr go to `log_path`.

    `last_incarnation` is the largest known for this name from before this parent started.
    """

    name: str
    argv: Sequence[str]
    log_path: Path
    pass_fds: Sequence[int] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restart: bool = False
    last_incarnation: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How soon a dead child is started again, and when it is given up.

    The delay doubles from `first_s` to `longest_s` with each short incarnation in a row (one that
    died soon) and varies by +-`jitter`. After too many of those in a row, or too many deaths in a
    window, the child is given up. A role that fails by itself at every start will keep failing. One
    that is killed (because memory ran out, for example) is started more often, with longer delays.
    """

    first_s: float = 0.1
    longest_s: float = 30.0
    jitter: float = 0.25
    short_start_s: float = 10.0
    most_short_starts: int = 5
    most_short_starts_killed: int = 10
    window_s: float = 600.0
    most_deaths: int = 30


@dataclasses.dataclass(frozen=True)
class Event:
    """What happened to the child `name`; `str(event)` describes it."""

    name: str


@dataclasses.dataclass(frozen=True)
class Started(Event):
    """It was started."""

    pid: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name} started (pid {self.pid})"


@dataclasses.dataclass(frozen=True)
class Exited(Event):
    """It ended normally: status 0, or by SIGTERM during a shutdown."""

    pid: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name} ended"


@dataclasses.dataclass(frozen=True)
class Died(Event):
    """It ended abnormally.

    `how` is the exit status or signal in words; `traceback` is the last one in its log, or the last
    lines of the log if there is none.
    """

    pid: int
    incarnation: int
    how: str
    traceback: str
    lived_s: float

    def __str__(self) -> str:
        said = f"\n{self.traceback}" if self.traceback else ""
        return f"{self.name} died after {self.lived_s:.1f} s: {self.how}{said}"


@dataclasses.dataclass(frozen=True)
class Restarting(Event):
    """It will be started again in `delay_s`, at a later poll."""

    delay_s: float

    def __str__(self) -> str:
        return f"{self.name} is started again in {self.delay_s:.1f} s"


@dataclasses.dataclass(frozen=True)
class GaveUp(Event):
    """It is not started again: the role cannot stay up."""

    reason: str

    def __str__(self) -> str:
        return f"{self.name} is not started again: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Stopped(Event):
    """It is alive but not running; it keeps what it holds."""

    pid: int
    why: str

    def __str__(self) -> str:
        return f"{self.name} does not run: {self.why}"


@dataclasses.dataclass(frozen=True)
class Continued(Event):
    """It runs again after a Stopped."""

    pid: int

    def __str__(self) -> str:
        return f"{self.name} runs again"


@dataclasses.dataclass(frozen=True)
class Deaf(Event):
    """It did not obey SIGTERM in time; `how` says what was done."""

    pid: int
    how: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) did not end after SIGTERM: {self.how}"


def status_in_words(returncode: int) -> str:
    """Popen's `returncode` as "exit status 1" or "killed by SIGSEGV (Segmentation fault)"."""
    if returncode == os.EX_CONFIG:
        return "it cannot do what was asked of it"
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
    """When one role that died may start again; a pure class: the caller passes the time."""

    def __init__(self, policy: RestartPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._short_starts = 0
        self._failures = 0  # those of them that were not kills
        self._deaths: deque[float] = deque()

    def after_death(self, now_s: float, worked_s: float, *, killed: bool = False) -> float | str:
        """The delay in seconds until the next start, or the reason why there is none.

        worked_s: since it had begun to work; 0 if it never did.
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
