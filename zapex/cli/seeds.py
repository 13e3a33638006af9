"""Several seeds of `zapex train`: one run after the other, or some at once on their own cores.

At once, each run is a process that trains one seed and dies with this one.
"""

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from zapex.cli import train
from zapex.cli.resolve import AUTO, Resolved, demand, described, new_run_directory, resolve
from zapex.config.settings import Config
from zapex.errors import ConfigError
from zapex.machine.child import child_setup
from zapex.machine.reading import say
from zapex.machine.resources import parse_cpus, shares_of_threads
from zapex.machine.supervisor import (
    Died,
    Event,
    Exited,
    IgnoredSigterm,
    ProcessSpec,
    Supervisor,
)
from zapex.run.collector import Caller, say_into
from zapex.run.train import ending_of
from zapex.watch import runs
from zapex.watch.recorders import RESULT_FILE
from zapex.watch.terminal import Line, LivePicture, print_table, shows_pictures, status_line

_LOOK_S, _PLAIN_PERIOD_S = 1.0, 10.0
_Ending = Exited | Died | IgnoredSigterm
_GRACE_S, _SAVING_GRACE_S = 60.0, 86_400.0  # runs end themselves; a second Ctrl-C kills them


@dataclass
class _Run:
    """One seed's run. reason: why it has ended; "": it goes on, or has not begun."""

    seed: int
    path: Path
    began_s: float = field(default_factory=time.time)
    reason: str = ""
    failed: bool = False

    @property
    def name(self) -> str:
        return f"seed {self.seed}"

    @property
    def outcome(self) -> str:
        return f"{self.name} {'failed' if self.failed else 'ended'}: {self.reason}"

    def look(self) -> runs.Known:
        known = runs.look(self.path)
        if self.failed:
            return replace(known, state="failed")
        started = self.reason or known.state == "running"
        return known if started else replace(known, state="starting")


def train_each(run: Resolved, args: list[str]) -> int:
    """Train with each of the seeds, and list the runs. Ctrl-C ends them all.

    With --run-dir DIR the runs are DIR/seed-1, DIR/seed-2, ... Returns the exit code.
    """
    settings = run.config.run
    if settings.resume not in ("", AUTO):
        raise ConfigError(f"--seeds starts runs: give --resume {AUTO}, or leave --resume out")
    begun = [*(_side_by_side if run.more.runs_at_once > 1 else _in_turn)(run, args)]
    if not settings.quiet:
        print(*runs.table([one.look() for one in begun], 80), sep="\n")
    for one in begun:
        if one.failed:
            say(one.outcome, sys.stderr)
    if not settings.quiet:
        trained = [str(one.path) for one in begun if one.path.exists()]
        print("compare them: zapex plot", shlex.join(trained), "--out seeds.png")
    return int(any(one.failed for one in begun))


def _words(args: list[str], config: Config, seed: int) -> list[str]:
    """The words of `zapex train` for one of the seeds."""
    words = [*args, "--seeds=", "--parallel=1", "--seed", str(seed)]
    if config.run.run_dir:
        words += ["--run-dir", str(Path(config.run.run_dir) / f"seed-{seed}")]
    return words


def _in_turn(run: Resolved, args: list[str]) -> Iterator[_Run]:
    """One run after the other, in this process."""
    seeds = run.more.each
    for i, seed in enumerate(seeds):
        if not run.config.run.quiet:
            print(f"seed {seed}, run {i + 1} of {len(seeds)}", flush=True)
        caller = Caller(plain=False)
        words = _words(args, run.config, seed)
        own = resolve(words, "train", "", train.TrainOptions)
        ending = ending_of(train.prepared_run(own), own.spec, caller=caller)
        if ending.last is not None and ending.last.facts.run_dir is not None:
            path = ending.last.facts.run_dir
            yield _Run(seed, path, reason=ending.reason, failed=ending.failed)
        if ending.reason.startswith("stopped by"):
            break


def _side_by_side(run: Resolved, args: list[str]) -> list[_Run]:
    """Several runs at once, with the same settings. Returns those that have begun."""
    config = run.config
    waiting = deque(_Run(seed, _directory(config, seed)) for seed in run.more.each)
    demand(run)
    if not config.run.quiet:
        print_table(described(run))
        train.announce(run)
    cores = shares_of_threads(run.more.runs_at_once)
    begun: list[_Run] = []
    with (
        tempfile.TemporaryDirectory(prefix="zapex-") as folder,
        Supervisor() as supervisor,
        contextlib.closing(_Progress(config.run.plain, config.run.quiet)) as progress,
    ):
        # Complete: the machine looks different to a run that starts later.
        Path(folder, "settings.toml").write_text(config.to_toml())
        fixed = ["--config", f"{folder}/settings.toml", "--trust"]
        fixed += ["--actors", str(config.actor.actors)]  # of `--actors auto`
        supervisor.install_signal_handlers(outlives_terminal=True)
        on: dict[str, set[int]] = {}

        def take(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, _Ending):
                    cores.append(on.pop(event.name))
                    one = next(one for one in begun if one.name == event.name)
                    _note_end(one, event)
                    progress.note(one, event)

        try:
            while (waiting or supervisor.pids) and supervisor.stop_signal is None:
                while waiting and cores:
                    one = replace(waiting.popleft(), began_s=time.time())
                    begun.append(one)
                    cpus = on[one.name] = cores.pop(0)
                    words = [*_words(args, config, one.seed), "--run-dir", str(one.path), *fixed]
                    supervisor.start(_process(one, cpus, words, Path(folder)))
                take(supervisor.poll(_LOOK_S))
                if supervisor.hung_up:
                    progress.leave_terminal()
                progress.show(begun, len(waiting))
        finally:
            saves = config.replay.save_replay != "never"
            take(supervisor.shutdown(_SAVING_GRACE_S if saves else _GRACE_S))
    return begun


def _directory(config: Config, seed: int) -> Path:
    """Of a seed's run. Raises ConfigError if it exists already and is not to be resumed."""
    run = replace(config.run, seed=seed)
    if run.run_dir:
        run = replace(run, run_dir=str(Path(run.run_dir) / f"seed-{seed}"))
    return Path(run.run_dir) if run.resume else new_run_directory(replace(config, run=run), "")


def _process(one: _Run, cpus: set[int], words: list[str], folder: Path) -> ProcessSpec:
    return ProcessSpec(
        name=one.name,
        argv=[
            *(sys.executable, "-P", "-m", "zapex.cli.seeds"),
            *(one.name, ",".join(map(str, sorted(cpus))), *words),
        ],
        log_path=folder / f"{one.seed}.log",
    )


def _note_end(one: _Run, event: _Ending) -> None:
    one.failed = not isinstance(event, Exited)
    with contextlib.suppress(OSError):
        if (one.path / RESULT_FILE).stat().st_mtime >= one.began_s - 1.0:  # not of a run before it
            one.reason = runs.look(one.path).reason
    if isinstance(event, Died):
        one.reason = one.reason or (event.traceback or event.how).splitlines()[-1]
    elif isinstance(event, IgnoredSigterm):
        one.reason = event.how
    one.reason = one.reason or "stopped before it began"


class _Progress:
    """How several runs are doing: a table redrawn in place, or a line for each from time to time.

    Args:
        plain: lines even on a terminal.
        quiet: only failures.
    """

    def __init__(self, plain: bool, quiet: bool) -> None:
        self._quiet = quiet
        draws = not (plain or quiet) and shows_pictures(sys.stdout)
        self._live = LivePicture() if draws else None
        self._failures: list[str] = []
        self._due_s = 0.0

    def note(self, one: _Run, event: _Ending) -> None:
        """A run has ended."""
        if not isinstance(event, Exited):
            self._failures += str(event).splitlines()
        elif self._live is None and not self._quiet:
            say(one.outcome)

    def show(self, begun: list[_Run], waiting: int) -> None:
        """Show the runs as they are now."""
        if self._live is not None:
            table = runs.table([one.look() for one in begun], shutil.get_terminal_size().columns)
            more = [f"{waiting} more will follow"] if waiting else []

            def lines(width: int, height: int) -> list[Line]:
                room = max(0, height - len(table) - len(more))
                rows = [*table, *more, *self._failures[:room]]
                return [[(line[:width], "")] for line in rows[:height]]

            try:
                self._live.draw(lines)
            except OSError:  # closed without a SIGHUP
                self.leave_terminal()
        elif not self._quiet and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _PLAIN_PERIOD_S
            for one in begun:
                shot = None if one.reason else one.look().snapshot
                if shot is not None:
                    say(f"{one.name}  {status_line(shot)}")

    def leave_terminal(self) -> None:
        """The terminal was closed: the runs continue."""
        say_into(Path(os.devnull))
        self._live, self._quiet = None, True

    def close(self) -> None:
        """Leave the last table, and show what went wrong."""
        if self._live is not None:
            self._live.close()
        for line in self._failures:
            say(line, sys.stderr)


def _child(title: str, cpus: str, *words: str) -> int:
    """One of several runs: `zapex train` on its own cores."""
    from zapex.cli.main import main

    child_setup(title)
    os.sched_setaffinity(0, parse_cpus(cpus))
    return main(["train", *words])


if __name__ == "__main__":
    sys.exit(_child(*sys.argv[1:]))
