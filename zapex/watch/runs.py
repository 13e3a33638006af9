"""The runs of a directory: which there are, what each does, and its headline numbers."""

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zapex.config.words import did_you_mean
from zapex.errors import ConfigError
from zapex.machine.disk import is_locked
from zapex.watch.recorders import RESULT_FILE, SNAPSHOT_FILE, read_snapshot
from zapex.watch.report import Snapshot
from zapex.watch.screen import clock, count, number

LOCK_FILE: Final = ".lock"  # the kernel frees the lock with its process; the file stays
SETTINGS_FILE: Final = "config.toml"
RUNS: Final = "runs"  # where runs are that were given no directory
_WIDE: Final = 110


@dataclass(frozen=True)
class Known:
    """A run as its directory shows it.

    state: "running", "starting" (no numbers yet), "ended", or "broken off": killed, or of a machine
    that failed. snapshot: the last one stored. reason: why it ended, in words.
    """

    path: Path
    state: str
    snapshot: Snapshot | None
    reason: str = ""


def look(run_dir: Path) -> Known:
    """What a run does now. A file that cannot be read counts as missing."""
    held = is_locked(run_dir / LOCK_FILE)
    snapshot = stored_snapshot(run_dir)
    if held:
        going = snapshot is not None and not snapshot.final
        return Known(run_dir, "running" if going else "starting", snapshot)
    if snapshot is not None and snapshot.final:
        return Known(run_dir, "ended", snapshot, _reason(run_dir))
    return Known(run_dir, "broken off", snapshot)


def stored_snapshot(run_dir: Path) -> Snapshot | None:
    """The last snapshot that the run stored, if there is one that this version can read."""
    try:
        return read_snapshot(run_dir)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _reason(run_dir: Path) -> str:
    try:
        found = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
        return str(found["reason"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def training_process(run_dir: Path) -> int:
    """The process of this host that trains in the directory; 0: none, or on another host."""
    lock = run_dir / LOCK_FILE
    if not is_locked(lock):
        return 0
    try:
        pid = int(lock.read_text())
        opened = [Path(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except (OSError, ValueError):
        return 0
    return pid if any(_is_same(path, lock) for path in opened) else 0


def _is_same(opened: Path, file: Path) -> bool:
    try:
        return opened.samefile(file)
    except OSError:  # it has just been closed
        return False


def runs_in(directory: Path) -> list[Path]:
    """The runs in a directory, or the directory itself; the one written last comes first."""
    if (directory / SETTINGS_FILE).is_file():
        return [directory]
    patterns = (f"*/{SETTINGS_FILE}", f"*/seed-*/{SETTINGS_FILE}")  # `--seeds` makes the second
    found = [path.parent for pattern in patterns for path in directory.glob(pattern)]
    return sorted(found, key=_written_s, reverse=True)


def _written_s(run_dir: Path) -> float:
    times = [0.0]
    for name in (SNAPSHOT_FILE, SETTINGS_FILE):
        try:
            times.append((run_dir / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def find(text: str) -> Path:
    """The run of a directory or of a name in runs/; "": the one that runs, or ran last.

    Raises:
        ConfigError: there is none (with the nearest name).
    """
    for path in (Path(text), Path(RUNS) / text):
        if text and (path / SETTINGS_FILE).is_file():
            return path
    directory = Path(text or RUNS)
    there = runs_in(directory)
    if not there:
        near = [path.name for path in (*runs_in(Path(RUNS)), *runs_in(directory.parent))]
        mend = did_you_mean(directory.name, near) if text else ""
        raise ConfigError(
            f"{directory} is not a run, and there is none in it{mend}; `zapex runs` lists those in "
            f"{RUNS}, and `zapex train` starts one"
        )
    running = (path for path in there if is_locked(path / LOCK_FILE))
    return next(running, there[0])


def table(known: Sequence[Known], width: int) -> list[str]:
    """Lines of text: a head and one for each run. The name comes last and is never cut."""
    rows = [["state", "frames", "time", "return", "best", "environment", "run"]]
    for one in known:
        game = one.snapshot.facts.environment if one.snapshot is not None else ""
        rows.append([one.state, *_headline(one.snapshot), game, str(one.path)])
    if width < _WIDE:
        rows = [[*row[:-2], row[-1]] for row in rows]
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_row(row, sizes) for row in rows]


def _row(row: Sequence[str], sizes: Sequence[int]) -> str:
    *cells, name = row
    texts = [
        cell.rjust(size) if 1 <= i <= 4 else cell.ljust(size)
        for i, (cell, size) in enumerate(zip(cells, sizes, strict=False))
    ]
    return "  ".join([*texts, name])


def _headline(snapshot: Snapshot | None) -> tuple[str, str, str, str]:
    """Frames, time, the return now, the best evaluation."""
    if snapshot is None:
        return "-", "-", "-", "-"
    returns, best = snapshot.returns, snapshot.best_evaluation
    now = returns.all_mean if math.isnan(returns.greedy_mean) else returns.greedy_mean
    return (
        count(snapshot.totals["frames"]),
        clock(snapshot.wall_s),
        number(now),
        number(best.mean) if best is not None else "-",
    )


def described(known: Sequence[Known]) -> list[dict[str, Any]]:
    """The same as facts, for JSON; None where a number is not known."""
    facts = []
    for one in known:
        shot = one.snapshot
        best = shot.best_evaluation if shot is not None else None
        means = (shot.returns.all_mean, shot.returns.greedy_mean) if shot is not None else ()
        known_means = [None if math.isnan(x) else x for x in means] or [None, None]
        facts.append(
            {
                "run": str(one.path),
                "state": one.state,
                "reason": one.reason,
                "environment": shot.facts.environment if shot is not None else None,
                "frames": shot.totals["frames"] if shot is not None else None,
                "wall_s": shot.wall_s if shot is not None else None,
                "return_all": known_means[0],
                "return_greedy": known_means[1],
                "best": best.mean if best is not None else None,
                "last": shot.evaluations[-1].mean if shot is not None and best else None,
                "written": time.strftime(
                    "%Y-%m-%dT%H:%M:%S%z", time.localtime(_written_s(one.path))
                ),
            }
        )
    return facts
