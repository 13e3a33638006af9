"""`zapex demo kill`: trains CartPole while its processes are killed, and shows what that costs.

The run is an ordinary `zapex train` in a process of its own. It is looked at through the memory
that its parent holds, and its roles are killed by SIGKILL, which nobody can catch.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from zapex.audit import ChunkAudit, attach
from zapex.config import Config
from zapex.environments import EnvironmentSpec, check
from zapex.errors import ConfigError, ZapexError
from zapex.flags import parse, read_settings
from zapex.recorders import RESULT_FILE, read_evaluations
from zapex.run import Run
from zapex.screen import clock, count
from zapex.shm_transport import Host
from zapex.supervisor import Died, ProcessSpec, Supervisor, child_setup

if TYPE_CHECKING:
    from rich.table import Table

ENV = "CartPole-v1"
TARGET = 475.0
ORDER = ("actor 0", "learner", "replay", "actor 1")
_FASTEST_S = 4.0  # a role that dies thrice in ten seconds is held back longer each time
_POLL_S = 0.005
_LOOK_S = 1.0
_SHOW_S = 0.25
_START_S = 300.0  # compiling every kernel on a busy machine
_GRACE_S = 8.0

_BACK = {"actor": "plays again", "replay": "answers again", "learner": "learns again"}


@dataclass
class Wound:
    """One kill: what is not back yet, and after how many seconds the rest was."""

    name: str
    life: int
    began_s: float
    times: dict[str, float] = field(default_factory=dict)
    counted: float = 0.0  # what it had done when it was dead

    @property
    def role(self) -> str:
        """actor, replay or learner."""
        return self.name.split()[0]

    @property
    def healed(self) -> bool:
        """All is back."""
        return _BACK[self.role] in self.times


class Patient:
    """A run from outside: which of its roles live, what they have done, and what is in memory."""

    def __init__(self, pid: int, host: Host) -> None:
        self.pid, self.host = pid, host
        self.audit = ChunkAudit(host.store())
        self._blocks = {name: host.metrics(name) for name, _ in host.plan.roles}

    def count(self, name: str, counter: str) -> float:
        """A counter or gauge of one role."""
        return self._blocks[name].snapshot(alive=False)[counter]

    def work(self, name: str) -> float:
        """What tells that a role works: steps, answers or batches."""
        if name == "replay":
            return self.host.ring("answers").tail
        return self.count(name, "batches" if name == "learner" else "steps")

    def kill(self, name: str) -> Wound | None:
        """SIGKILL to a role; None while it has no process that has begun to work."""
        block, life = self._blocks[name], self.host.life(name)
        if not life or not block.pid:
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(block.pid)
            # A number that was given to another process since then is not ours to kill.
            if process.ppid() == self.pid:
                process.kill()
                return Wound(name, life, time.monotonic())
        return None

    def examine(self, wound: Wound) -> list[str]:
        """What has come back since the last look."""
        now = time.monotonic() - wound.began_s
        life, before = self.host.life(wound.name), set(wound.times)
        if life == wound.life:
            return []
        if "is seen dead" not in wound.times:
            wound.times["is seen dead"] = now
            wound.counted = self.work(wound.name)
        holds = wound.role == "actor" and "slots are back" not in wound.times
        if holds and not self.audit.granted(int(wound.name.split()[1]), wound.life):
            wound.times["slots are back"] = now
        if life and "is started" not in wound.times:
            wound.times["is started"] = now
        if life and not wound.healed and self.work(wound.name) > wound.counted:
            wound.times[_BACK[wound.role]] = now
        return [what for what in wound.times if what not in before]


class Show:
    """The wounds and what is in memory: a table that is kept up to date, or lines for pipes."""

    def __init__(self, patient: Patient, every_s: float, plain: bool) -> None:
        self.patient, self.every_s = patient, every_s
        self.wounds: list[Wound] = []
        self._began_s = time.monotonic()
        self._due_s = 0.0
        self._ended = False
        self.evaluated = math.nan
        self._live: Any = None
        if not plain:
            from rich.live import Live

            self._live = Live(auto_refresh=False)
            self._live.start()

    @property
    def plain(self) -> bool:
        """Lines, not a table."""
        return self._live is None

    def tell(self, text: str) -> None:
        """One line that stays."""
        line = f"{clock(time.monotonic() - self._began_s)}  {text}"
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.console.print(line, highlight=False)

    def refresh(self) -> None:
        """Draw the table anew if it is time."""
        if self._live is not None and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _SHOW_S
            self._live.update(self.table(), refresh=True)

    def close(self) -> None:
        """The last table stays; plain output gets it now."""
        self._ended = True
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
            self._live.stop()
            return
        from rich.console import Console

        Console(width=78, color_system=None).print(self.table())

    def table(self) -> "Table":
        """A row for each role."""
        from rich.table import Table

        table = Table(title=self._title(), caption=self._caption(), title_justify="left",
                      caption_justify="left")  # fmt: skip
        for heading in ("role", "now", "kills", "slots back", "started", "works again"):
            right = heading not in ("role", "now")
            table.add_column(heading, justify="right" if right else "left", no_wrap=True)
        for name in ORDER:
            wounds = [w for w in self.wounds if w.name == name]
            now = "works" if not wounds or wounds[-1].healed else "returns"
            if self._ended:
                now = "ended"
            elif not self.patient.host.life(name):
                now = "dead"
            role = name.split()[0]
            times = ("slots are back", "is started", _BACK[role])
            cells = [_seconds([w.times[what] for w in wounds if what in w.times]) for what in times]
            table.add_row(name, now, str(len(wounds)), *cells)
        return table

    def _title(self) -> str:
        return f"a kill every {self.every_s:g} s; seconds from the kill, last / longest"

    def _caption(self) -> str:
        audit = self.patient.audit
        told = (
            f"{count(audit.transitions)} transitions in {count(audit.chunks)} chunks: "
            f"{audit.lost} lost, {audit.torn} torn, {audit.doubled} twice"
        )
        torn = self.patient.count("learner", "torn_rows")
        if torn:
            told += f"\nthe learner gave up {torn:g} rows that went before it had copied them"
        if not math.isnan(self.evaluated):
            told += f"\nmean return of the last evaluation {self.evaluated:g}"
        return told


def _seconds(times: list[float]) -> str:
    """The last, and the longest where there were more."""
    if not times:
        return ""
    return f"{times[-1]:.2f}" + (f" / {max(times):.2f}" if len(times) > 1 else "")


@dataclass(frozen=True)
class _Options:
    """How long, and how often."""

    minutes: float = 4.0
    """It ends after so long, or when CartPole is solved."""
    every: float = 8.0
    """Seconds between two kills."""
    run_dir: str = ""
    """Where the run is written; new."""
    plain: bool = False
    """Lines instead of a table that is kept up to date."""


def command(args: list[str]) -> int:
    """`zapex demo kill [flags]`, `zapex demo cluster [flags]`."""
    if args and args[0] == "cluster":
        from zapex import demo_cluster

        return demo_cluster.command(args[1:])
    if not args or args[0] != "kill":
        if {"-h", "--help"} & set(args):
            print("zapex demo kill: train while actor, learner and replay are killed on a timer")
            print("zapex demo cluster: train on four hosts of this machine")
            return 0
        raise ConfigError(
            "there are two demos: `zapex demo kill` and `zapex demo cluster`, got "
            + (" ".join(args) or "nothing")
        )
    what = "Train CartPole while actor, learner and replay are killed on a timer."
    options = parse(_Options, _Options(), args[1:], "demo kill", what)
    run_dir = Path(options.run_dir or time.strftime("runs/demo-kill__%Y%m%d-%H%M%S"))
    if run_dir.exists():
        raise ConfigError(f"--run-dir must be new, and {run_dir} exists: choose another")
    plain = options.plain or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb"
    return kill(run_dir, options.minutes, options.every, plain)


def kill(run_dir: Path, minutes: float, every_s: float, plain: bool) -> int:
    """Train, kill, show. Returns 0 where nothing was lost and the run ended as it should.

    Raises:
        ConfigError: values that cannot work.
        ZapexError: the run did not begin; the message says why.
    """
    if every_s < _FASTEST_S:
        raise ConfigError(f"--every must be at least {_FASTEST_S:g} s, got {every_s:g}")
    if not minutes > 0:
        raise ConfigError(f"--minutes must be more than 0, got {minutes:g}")
    spec = check(ENV)
    flags = (
        f"--env {ENV} --plain --actors 2 --envs-per-actor 4 --run-dir {run_dir} --eval-period-s 10"
        f" --max-minutes {minutes} --stop-at-return {TARGET} --eval-episodes 20"
        " --checkpoint-minutes 0.05"
    )
    log = run_dir.with_name(run_dir.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "zapex.demo", *flags.split()]
    with Supervisor() as supervisor:
        supervisor.install_signal_handlers()
        pid = supervisor.start(ProcessSpec(name="train", argv=argv, log_path=log)).pid
        print(f"training {ENV}; its own output: {log}", flush=True)
        host = _wait_for_memory(supervisor, pid, spec, run_dir)
        show = Show(Patient(pid, host), every_s, plain)
        try:
            died = _hurt(supervisor, show, run_dir)
        finally:
            show.close()
        events = [*died, *supervisor.shutdown(_GRACE_S)]
    failed = [str(event) for event in events if isinstance(event, Died)]
    print("\n".join(failed or [_outcome(run_dir)]))
    audit = show.patient.audit
    return int(bool(failed or audit.lost or audit.torn or audit.doubled))


def _wait_for_memory(
    supervisor: Supervisor, pid: int, spec: EnvironmentSpec, run_dir: Path
) -> Host:
    """Once the learner has begun. Raises ZapexError with what the run has said."""
    deadline_s = time.monotonic() + _START_S
    host: Host | None = None
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


def _hurt(supervisor: Supervisor, show: Show, run_dir: Path) -> list[Any]:
    """Until the run has ended, or somebody wants it to; the events of its end."""
    patient = show.patient
    victims = _victims()
    victim = next(victims)
    kill_s = time.monotonic() + show.every_s / 2
    look_s = 0.0
    while supervisor.stop_signal is None:
        events = supervisor.poll(_POLL_S)
        if events:
            return events
        now_s = time.monotonic()
        for wound in [w for w in show.wounds if not w.healed]:
            for what in patient.examine(wound):
                if what in ("slots are back", _BACK[wound.role]):
                    show.tell(f"{wound.name}: {what} after {wound.times[what]:.2f} s")
        if now_s >= kill_s and all(w.healed for w in show.wounds if w.name == victim):
            killed = patient.kill(victim)
            if killed is not None:
                show.wounds.append(killed)
                show.tell(f"{victim} is killed")
                victim, kill_s = next(victims), now_s + show.every_s
        if now_s >= look_s:
            look_s = now_s + _LOOK_S
            patient.audit.look()
            evaluations = read_evaluations(run_dir)
            if evaluations:
                show.evaluated = evaluations[-1].mean
        show.refresh()
    return []


def _victims() -> Iterator[str]:
    while True:
        yield from ORDER


def _outcome(run_dir: Path) -> str:
    try:
        result = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "the run has left no result"
    last: dict[str, Any] = result["last"] or {}
    mean = f", mean return {last['mean']:g} over {len(last['returns'])} games" if last else ""
    return f"ended because {result['reason']}{mean}; the run is in {run_dir}"


def _train() -> int:
    """The run's own process: a child of ours, so that it ends when we do."""
    child_setup("demo kill: train")
    from zapex import cli

    return cli.main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(_train())
