"""`zapex runs`, `zapex watch`, and the end of a run of this host: runs from another terminal."""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from zapex.cli import play
from zapex.cli.flags import parse
from zapex.errors import ConfigError, ZapexError

_ENDS_S = 60.0  # a run that is told to end has five seconds; the machine may be busy


@dataclass(frozen=True)
class _RunsOptions:
    """Which runs, and how they are listed."""

    directory: str = "runs"
    """Where the runs are."""
    json: bool = False
    """One JSON object a line instead of a table."""


def runs(args: list[str]) -> int:
    """List the runs of a directory, the one written last first."""
    what = "List runs: what each does, its frames and time, its return now and its best evaluation."
    options = parse(_RunsOptions(), args, "runs", what, "[directory]")
    directory = Path(options.directory)
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {directory}: name the one with the runs, or start one with "
            "`zapex train`"
        )
    from zapex.watch import runs as known

    found = [known.look(path) for path in known.runs_in(directory)]
    if options.json:
        print("".join(json.dumps(facts) + "\n" for facts in known.described(found)), end="")
    elif found:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
        print(*known.table(found, width), sep="\n")
    else:
        print(f"no run in {directory}")
    return 0


@dataclass(frozen=True)
class _WatchOptions:
    """Which run, and how it is shown."""

    run: str = ""
    """Its directory, or its name in runs/; left out: the one that runs, or ran last."""
    game: bool = False
    """Draw games of the newest saved network on the terminal, with the Q value of each action."""
    plain: bool = False
    """Plain lines instead of the picture."""
    env: str = ""
    """With --game: the run's environment, if it is module:Id and you do not say --trust."""
    trust: bool = False
    """With --game: run the module that the run names as its environment."""


def watch(args: list[str]) -> int:
    """Show a run until it ends, or until Ctrl-C, which does not end it."""
    what = "Show a run that goes on, or how one ended. Ctrl-C ends the view and never the run."
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
                print(f"{run_dir} starts: its numbers come in some seconds", flush=True)
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
    if now.snapshot is None:
        print(f"{run_dir} {now.state}: it has left no numbers")
        return 0
    from zapex.checkpoints import file as checkpoint
    from zapex.watch.curves import CURVE_FILE

    reason = now.reason or f"{now.state}: it was killed, or its machine failed"
    curve = run_dir / CURVE_FILE
    saved = checkpoint.latest(run_dir) is not None
    print_lines(summary(now.snapshot, reason, curve if curve.exists() else None, saved), plain)
    return 0


def _left(run_dir: Path) -> int:
    """Say what goes on without the view, and how it is ended."""
    from zapex.watch.runs import training_process

    if pid := training_process(run_dir):
        print(f"the run goes on in process {pid}; `zapex stop {shlex.quote(str(run_dir))}` ends it")
    return 0


def is_local(text: str) -> bool:
    """Whether `text` names a run by its directory, or by its name in runs/."""
    from zapex.watch.runs import RUNS, SETTINGS_FILE

    return bool(text) and any(
        (p / SETTINGS_FILE).is_file() for p in (Path(text), Path(RUNS) / text)
    )


def stop(text: str) -> int:
    """End a run of this host as Ctrl-C does, and wait until it has saved."""
    from zapex.watch import runs as known

    run_dir = known.find(text)
    pid = known.training_process(run_dir)
    if not pid:
        if known.look(run_dir).state in ("running", "starting"):
            raise ConfigError(f"{run_dir} is trained on another host: end it there")
        print(f"{run_dir} is not being trained")
        return 0
    print(f"ending {run_dir}; the learner saves first", flush=True)
    os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _ENDS_S
    while known.training_process(run_dir) == pid:
        if time.monotonic() > deadline_s:
            raise ZapexError(f"process {pid} has not ended in {_ENDS_S:.0f} s: kill -9 {pid}")
        time.sleep(0.1)
    print(*known.table([known.look(run_dir)], 10_000), sep="\n")
    return 0
