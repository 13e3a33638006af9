"""`zapex runs`, `watch`, `plot` and `compare`: the runs of this machine; and stopping one."""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zapex.cli import play
from zapex.cli.flags import check_output, parse
from zapex.config.fields import SettingsGroup
from zapex.errors import ConfigError, ZapexError
from zapex.machine.reading import say

_STOP_S = 60.0  # a run takes five seconds to stop; the machine may be busy


@dataclass(frozen=True)
class _RunsOptions(SettingsGroup):
    """Options."""

    directory: str = "runs"
    """Directory of the runs."""
    json: bool = False
    """Print one JSON object per line instead of a table."""


def runs(args: list[str]) -> int:
    """`zapex runs [DIRECTORY]`: the newest run first."""
    what = "List runs: state, frames and time, current return and best evaluation of each."
    options = parse(_RunsOptions(), args, "runs", what, "[directory]")
    directory = Path(options.directory)
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {directory}: name the one with your runs, or start a run with "
            "`zapex train`"
        )
    from zapex.watch import runs as known

    found = [known.look(path) for path in known.runs_in(directory)]
    if options.json:
        print("".join(json.dumps(facts) + "\n" for facts in known.described(found)), end="")
    elif found:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
        say("\n".join(known.table(found, width)))
    else:
        say(f"no runs in {directory}")
    return 0


@dataclass(frozen=True)
class _WatchOptions(SettingsGroup):
    """Options."""

    run: str = ""
    """Directory of the run, or its name in runs/; default: the one that is running, or the last."""
    game: bool = False
    """Draw games of the newest saved network on the terminal, with the Q value of each action."""
    plain: bool = False
    """Print plain lines instead of the live terminal view."""
    env: str = ""
    """With --game: the run's environment, to confirm a module:Id instead of giving --trust."""
    trust: bool = False
    """With --game: allow the modules that the run names."""


def watch(args: list[str]) -> int:
    """`zapex watch [RUN]`: until the run ends, or until Ctrl-C, which does not end it."""
    what = "Watch a run, or show how one ended. Ctrl-C ends only the view, never the run."
    options = parse(_WatchOptions(), args, "watch", what, "[run]")
    from zapex.watch import runs as known

    run_dir = known.find(options.run)
    if options.game:
        try:
            play.play_newest(run_dir, options.env, options.trust)
        except KeyboardInterrupt:
            return _left(run_dir)
    return _show(run_dir, options.plain)


def _show(run_dir: Path, plain: bool) -> int:
    from zapex.watch.runs import Attached, look
    from zapex.watch.terminal import open_view, print_lines, summary

    now = look(run_dir)
    try:
        if now.state in ("running", "starting"):
            if now.snapshot is None:
                say(f"{run_dir} is starting: numbers follow in a few seconds")
            with Attached(run_dir, open_view(plain)) as attached:
                while attached.look():
                    attached.wait()
            now = look(run_dir)
        elif now.snapshot is not None:
            view = open_view(plain)
            view.show(now.snapshot)
            view.close()
    except KeyboardInterrupt:
        return _left(run_dir)
    if now.damage:
        raise ConfigError(now.damage)
    if now.snapshot is None:
        say(f"{run_dir} {now.state}: it left no numbers")
        return 0
    from zapex.run import checkpoints
    from zapex.watch.curves import CURVE_FILE

    reason = now.reason or f"{now.state}: it was killed, or its machine failed"
    curve = run_dir / CURVE_FILE
    saved = checkpoints.latest(run_dir) is not None
    print_lines(summary(now.snapshot, reason, curve if curve.exists() else None, saved), plain)
    return 0


def _left(run_dir: Path) -> int:
    """Say that the run continues without the view, and how to stop it."""
    from zapex.watch.runs import training_process

    if pid := training_process(run_dir):
        stop = f"zapex stop {shlex.quote(str(run_dir))}"
        say(f"the run continues in process {pid}; `{stop}` stops it")
    return 0


@dataclass(frozen=True)
class _PlotOptions(SettingsGroup):
    """Options."""

    runs: tuple[str, ...] = ()
    """Runs, or directories of runs."""
    by: Literal["config", "seed"] = "config"
    """One curve per configuration, with an interval over its seeds, or one per seed."""
    score: Literal["auto", "evaluation", "training", "greedy"] = "auto"
    """What to compare; auto: evaluations if every run has two, else training."""
    out: str = ""
    """Draw the curves to this file: .png, .svg or .pdf; default: only print the table."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output("--out", self.out, ".png", ".svg", ".pdf")


def plot(args: list[str]) -> int:
    """`zapex plot RUN ...`: scores with their intervals, and curves."""
    what = (
        "Compare runs: mean with a 95 % bootstrap interval, interquartile mean and share of a "
        "human's score, over wall time and frames."
    )
    options = parse(_PlotOptions(), args, "plot", what, "runs")
    from zapex.watch import curves

    found, score, left_out = curves.read(_runs(options.runs), options.score)
    groups = curves.grouped(found)
    say(f"score: {curves.SCORES[score]}, at the end of each run")
    for path in left_out:
        say(f"left out, because it has none yet: {path}")
    say("\n".join(curves.score_table(groups)))
    if options.out:
        curves.draw_runs(groups, score, options.by, Path(options.out))
        say(f"picture {options.out}")
    return 0


def _runs(words: tuple[str, ...]) -> list[Path]:
    """The runs that the words name, each once."""
    from zapex.watch import runs

    found: dict[Path, Path] = {}
    for word in words:
        directory = Path(word)
        known = sorted(runs.runs_in(directory)) if directory.is_dir() else []
        for path in known or [runs.find(word)]:
            found.setdefault(path.resolve(), path)
    return list(found.values())


@dataclass(frozen=True)
class _CompareOptions(SettingsGroup):
    """Options."""

    runs: tuple[str, ...] = ()
    """Runs, or settings files (.toml)."""


def compare(args: list[str]) -> int:
    """`zapex compare RUN RUN ...`: the settings in which runs differ."""
    what = "Show the settings in which two or more runs, or settings files, differ."
    options = parse(_CompareOptions(), args, "compare", what, "runs")
    if len(options.runs) < 2:
        raise ConfigError("`zapex compare` needs two runs or more: zapex compare RUN RUN")
    from zapex.watch import curves, runs

    paths = [Path(w) if w.endswith(".toml") else runs.find(w) for w in options.runs]
    found = curves.differing([curves.settings_of(path) for path in paths])
    if not found:
        print("no settings differ")
        return 0
    names = [path.name for path in paths]
    same = len(set(names)) < len(names)
    shown = [str(path) for path in paths] if same else names
    say("\n".join(curves.settings_table(shown, found)))
    return 0


def local(text: str) -> Path | None:
    """The run of this host that `text` names; "": the one that is running. None: there is none."""
    from zapex.watch.runs import RUNS, SETTINGS_FILE, runs_in, training_process

    if text:
        paths = (Path(text), Path(RUNS) / text)
        return next((path for path in paths if (path / SETTINGS_FILE).is_file()), None)
    return next((path for path in runs_in(Path(RUNS)) if training_process(path)), None)


def stop(run_dir: Path) -> int:
    """Stop a run of this host, as Ctrl-C does, and wait until it has saved."""
    from zapex.watch import runs as known

    pid = known.training_process(run_dir)
    if not pid:
        if known.look(run_dir).state in ("running", "starting"):
            raise ConfigError(f"{run_dir} is trained on another host: stop it there")
        say(f"{run_dir} is not being trained")
        return 0
    say(f"stopping {run_dir}; the learner saves first")
    os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _STOP_S
    while known.training_process(run_dir) == pid:
        if time.monotonic() > deadline_s:
            raise ZapexError(f"process {pid} has not ended in {_STOP_S:.0f} s: kill -9 {pid}")
        time.sleep(0.1)
    say("\n".join(known.table([known.look(run_dir)], 10_000)))
    return 0
