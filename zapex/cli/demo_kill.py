"""`zapex demo kill`: trains CartPole while its processes are killed, and shows what that costs.

The run is an ordinary `zapex train` in a separate process. The demo reads the memory that the run's
parent holds, and kills roles with SIGKILL, which no process can catch.
"""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from zapex.cli.demos import ENV, GRACE_S, TARGET, DemoOptions, Log, child_argv, outcome
from zapex.cli.flags import parse, read_settings
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec, check
from zapex.errors import ConfigError, ZapexError
from zapex.run.audit import ChunkAudit, attach
from zapex.run.run import Run
from zapex.run.supervisor import Died, Event, ProcessSpec, Supervisor
from zapex.shm_transport import HostMemory

if TYPE_CHECKING:
    from rich.console import Group

ORDER = ("actor 0", "learner", "replay", "actor 1")
WORKS_AGAIN = {"actor": "plays again", "replay": "answers again", "learner": "learns again"}
_FASTEST_S = 4.0  # a role that dies three times in ten seconds is restarted later each time
_POLL_S = 0.005
_LOOK_S = 1.0
_START_S = 300.0  # compiling every kernel on a busy machine


@dataclass
class Kill:
    """One kill of a role, and after how many seconds each of its effects was over."""

    name: str
    incarnation: int
    began_s: float
    times: dict[str, float] = field(default_factory=dict)
    work_before: float = 0.0

    @property
    def role(self) -> str:
        """actor, replay or learner."""
        return self.name.split()[0]

    @property
    def recovered(self) -> bool:
        """The role works again."""
        return WORKS_AGAIN[self.role] in self.times


class KilledRun:
    """A run seen from outside: kills its roles and sees what comes back and what is in memory."""

    def __init__(self, pid: int, host: HostMemory) -> None:
        self.pid, self.host = pid, host
        self.audit = ChunkAudit(host.store())
        self.kills: list[Kill] = []

    def work(self, name: str) -> float:
        """The counter that shows that a role works: steps, answers or batches."""
        if name == "replay":
            return self.host.ring("answers").tail
        counts = self.host.metrics(name).snapshot(alive=False)
        return counts["batches" if name == "learner" else "steps"]

    def kill(self, name: str) -> bool:
        """Send SIGKILL to a role; not while it is not back, or has not begun to work."""
        incarnation, pid = self.host.incarnation(name), self.host.metrics(name).pid
        waiting = any(kill.name == name and not kill.recovered for kill in self.kills)
        if waiting or not incarnation or not pid:
            return False
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            # The process id may belong to another process by now; that one must not be killed.
            if process.ppid() == self.pid:
                process.kill()
                self.kills.append(Kill(name, incarnation, time.monotonic()))
                return True
        return False

    def examine(self, kill: Kill) -> list[str]:
        """Record what has come back since the last call."""
        incarnation = self.host.incarnation(kill.name)
        if incarnation == kill.incarnation:
            return []
        work = self.work(kill.name)
        if not kill.times:
            kill.work_before = work
        is_so = {"is seen dead": True, "is started": incarnation > 0}
        if kill.role == "actor":
            actor = int(kill.name.split()[1])
            is_so["slots are back"] = not self.audit.granted(actor, kill.incarnation)
        is_so[WORKS_AGAIN[kill.role]] = incarnation > 0 and work > kill.work_before
        new = [what for what, so in is_so.items() if so and what not in kill.times]
        kill.times |= dict.fromkeys(new, time.monotonic() - kill.began_s)
        return new

    def view(self) -> "Group":
        """A row for each role, and the account."""
        from rich.console import Group
        from rich.table import Table

        table = Table(title="seconds from the kill, last / longest", title_justify="left")
        for heading in ("role", "now", "kills", "slots back", "started", "works again"):
            left = heading in ("role", "now")
            table.add_column(heading, justify="left" if left else "right", no_wrap=True)
        for name in ORDER:
            kills = [kill for kill in self.kills if kill.name == name]
            whats = ("slots are back", "is started", WORKS_AGAIN[name.split()[0]])
            now = "works" if not kills or kills[-1].recovered else "returns"
            if not self.host.incarnation(name):
                now = "down"
            times = (_seconds(kills, what) for what in whats)
            table.add_row(name, now, str(len(kills)), *times)
        return Group(table, self.account())

    def account(self) -> str:
        """What was lost, in words."""
        torn = self.host.metrics("learner").snapshot(alive=False)["torn_rows"]
        if not torn:
            return str(self.audit)
        return f"{self.audit}\n{torn:g} rows were overwritten while they were copied, and left out"


def _seconds(kills: list[Kill], what: str) -> str:
    """The last time, and the longest where there were more."""
    times = [kill.times[what] for kill in kills if what in kill.times]
    if len(times) < 2:
        return "".join(f"{time_s:.2f}" for time_s in times)
    return f"{times[-1]:.2f} / {max(times):.2f}"


@dataclass(frozen=True)
class _Options(DemoOptions):
    """How long, where, and how often."""

    every: float = 8.0
    """Seconds between two kills."""
    plain: bool = False
    """Print lines only; otherwise a terminal also shows a table that is drawn anew."""

    @property
    def draws(self) -> bool:
        """The table is drawn anew: it was not refused, and there is a terminal that can."""
        can = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        return can and not self.plain


def command(args: list[str]) -> int:
    """`zapex demo kill [flags]`. Returns 0 if nothing was lost and the run ended normally.

    Raises:
        ConfigError: values that cannot work.
        ZapexError: the run did not begin; the message says why.
    """
    what = "Train CartPole while actor, learner and replay are killed on a timer."
    options = parse(_Options(minutes=4.0), args, "demo kill", what)
    run_dir = options.new_run_dir("kill")
    if options.every < _FASTEST_S:
        raise ConfigError(f"--every must be at least {_FASTEST_S:g} s, got {options.every:g}")
    spec = check(ENV)
    flags = (
        f"--env {ENV} --plain --actors 2 --envs-per-actor 4 --eval-period-s 10 --eval-episodes 20"
        f" --max-minutes {options.minutes} --stop-at-return {TARGET} --checkpoint-minutes 0.05"
    )
    log_path = run_dir.with_name(run_dir.name + ".log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    argv = child_argv("demo kill: train", ".", ["train", *flags.split(), "--run-dir", str(run_dir)])
    with Supervisor() as supervisor:
        supervisor.install_signal_handlers()
        pid = supervisor.start(ProcessSpec(name="train", argv=argv, log_path=log_path)).pid
        print(f"training {ENV}; its own output: {log_path}", flush=True)
        run = KilledRun(pid, _wait_for_memory(supervisor, pid, spec, run_dir))
        with _shown(run, draws=options.draws):
            events = _kill_in_turn(supervisor, run, options.every)
        events += supervisor.shutdown(GRACE_S)
    died = [str(event) for event in events if isinstance(event, Died)]
    print("\n".join(died or [outcome(run_dir)]))
    return int(bool(died or not run.audit.whole))


@contextlib.contextmanager
def _shown(run: KilledRun, *, draws: bool) -> Iterator[None]:
    """Show the table below the lines while the run goes on, or once at the end."""
    if draws:
        from rich.live import Live

        with Live(get_renderable=run.view, refresh_per_second=4):
            yield
        return
    try:
        yield
    finally:
        from rich.console import Console

        Console(width=100, color_system=None, highlight=False).print(run.view())


def _wait_for_memory(
    supervisor: Supervisor, pid: int, spec: EnvironmentSpec, run_dir: Path
) -> HostMemory:
    """Wait until the learner has begun. Raises ZapexError with the run's output."""
    deadline_s = time.monotonic() + _START_S
    host: HostMemory | None = None
    while supervisor.stop_signal is None:
        ended = supervisor.poll(0.2)
        if ended or time.monotonic() > deadline_s:
            raise ZapexError(f"the run did not begin: {ended[0] if ended else 'it took too long'}")
        if host is None and (run_dir / "config.toml").exists():
            with contextlib.suppress(ConfigError):  # half written
                settings = read_settings(str(run_dir / "config.toml"))
                host = attach(pid, Run(Config().replace(**settings), spec, run_dir))
        if host is not None and host.metrics("learner").snapshot(alive=False)["batches"]:
            return host
    raise KeyboardInterrupt


def _kill_in_turn(supervisor: Supervisor, run: KilledRun, every_s: float) -> list[Event]:
    """Kill until the run ends, or until the user stops it. Returns the events of its end."""
    log, names = Log(), itertools.cycle(ORDER)
    name = next(names)
    kill_s = time.monotonic() + every_s / 2
    look_s = 0.0
    while supervisor.stop_signal is None:
        events = supervisor.poll(_POLL_S)
        if events:
            return events
        now_s = time.monotonic()
        for kill in [kill for kill in run.kills if not kill.recovered]:
            for what in run.examine(kill):
                if what in ("slots are back", WORKS_AGAIN[kill.role]):
                    log.tell(f"{kill.name}: {what} after {kill.times[what]:.2f} s")
        if now_s >= kill_s and run.kill(name):
            log.tell(f"{name} is killed")
            name, kill_s = next(names), now_s + every_s
        if now_s >= look_s:
            look_s = now_s + _LOOK_S
            run.audit.look()
    return []
