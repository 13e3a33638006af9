"""The runs of a directory: which there are, what each does, and a live view of one."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from zapex.config.words import did_you_mean
from zapex.errors import ConfigError
from zapex.machine.disk import is_locked, touch
from zapex.machine.reading import read_json, read_text, typed
from zapex.watch.recorders import RESULT_FILE, SNAPSHOT_FILE, WATCHED_FILE, read_snapshot
from zapex.watch.report import Note, Snapshot, View
from zapex.watch.terminal import clock, count, in_columns, number

LOCK_FILE: Final = ".lock"  # the kernel frees the lock with its process; the file stays
SETTINGS_FILE: Final = "config.toml"
RUNS: Final = "runs"
"""Where runs without a --run-dir are."""
_WIDE: Final = 110
_LOOK_S: Final = 0.25
_TOUCH_S: Final = 1.5
_LOCK_S: Final = 1.0  # between two looks at the lock
_SILENT_S: Final = 15.0  # a run writes a snapshot at least every five seconds


@dataclass(frozen=True)
class Known:
    """A run as its directory shows it.

    state: "running", "starting" (no numbers yet), "ended", or "broken off": killed, or its machine
    failed. snapshot: the last one stored, if it can be read. reason: why it ended, in words.
    damage: why its files cannot be read; "": they can.
    """

    path: Path
    state: str
    snapshot: Snapshot | None
    reason: str = ""
    damage: str = ""


def look(run_dir: Path) -> Known:
    """What a run does now."""
    held = is_locked(run_dir / LOCK_FILE)
    snapshot, reason, damage = None, "", ""
    try:
        if (run_dir / SNAPSHOT_FILE).exists():
            snapshot = read_snapshot(run_dir)
        if snapshot is not None and snapshot.final and (run_dir / RESULT_FILE).exists():
            result = typed(dict[str, Any], read_json(run_dir / RESULT_FILE), RESULT_FILE)
            reason = typed(str, result.get("reason"), RESULT_FILE)
    except ConfigError as error:
        damage = str(error)
    final = snapshot is not None and snapshot.final
    if held:
        state = "starting" if snapshot is None or final else "running"
    else:
        state = "ended" if final else "broken off"
    return Known(run_dir, state, snapshot, reason, damage)


def training_process(run_dir: Path) -> int:
    """The process of this host that trains in the directory; 0: none, or on another host."""
    lock = run_dir / LOCK_FILE
    if not is_locked(lock):
        return 0
    try:
        pid = int(read_text(lock))
        opened = [Path(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except (OSError, ValueError):
        return 0
    for path in opened:
        with suppress(OSError):  # it has just been closed
            if path.samefile(lock):
                return pid
    return 0


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
        with suppress(OSError):
            times.append((run_dir / name).stat().st_mtime)
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
        hint = did_you_mean(directory.name, near) if text else ""
        raise ConfigError(
            f"{directory} is not a run, and contains none{hint}; `zapex runs` lists those in "
            f"{RUNS}, and `zapex train` starts one"
        )
    running = (path for path in there if is_locked(path / LOCK_FILE))
    return next(running, there[0])


def table(known: Sequence[Known], width: int) -> list[str]:
    """Lines of text: a head and one for each run. The name comes last and is never cut."""
    rows = [["state", "frames", "time", "return", "best", "environment", "run"]]
    for one in known:
        numbers, game = ["-"] * 4, ""
        if (shot := one.snapshot) is not None:
            returns, best = shot.returns, shot.best_evaluation
            now = returns.all_mean if math.isnan(returns.greedy_mean) else returns.greedy_mean
            numbers = [count(shot.totals["frames"]), clock(shot.wall_s), number(now)]
            numbers.append("-" if best is None else number(best.mean))
            game = shot.facts.environment
        rows.append([one.state, *numbers, game, str(one.path)])
    if width < _WIDE:
        rows = [[*row[:-2], row[-1]] for row in rows]
    return in_columns(rows, right=range(1, 5))


def described(known: Sequence[Known]) -> list[dict[str, Any]]:
    """The same as facts, for JSON; None where a number is not known."""
    facts = []
    for one in known:
        shot, written = one.snapshot, time.localtime(_written_s(one.path))
        best = shot.best_evaluation if shot is not None else None
        means = (shot.returns.all_mean, shot.returns.greedy_mean) if shot is not None else ()
        all_mean, greedy_mean = [None if math.isnan(x) else x for x in means] or [None, None]
        facts.append(
            {
                "run": str(one.path),
                "state": one.state,
                "reason": one.reason or one.damage,
                "environment": shot.facts.environment if shot is not None else None,
                "frames": shot.totals["frames"] if shot is not None else None,
                "wall_s": shot.wall_s if shot is not None else None,
                "return_all": all_mean,
                "return_greedy": greedy_mean,
                "best": best.mean if best is not None else None,
                "last": shot.evaluations[-1].mean if shot is not None and best else None,
                "written": time.strftime("%Y-%m-%dT%H:%M:%S%z", written),
            }
        )
    return facts


class Attached:
    """Shows a run of another process, on any host that sees its directory, in `view`.

    with Attached(run_dir, view) as attached:
        while attached.look():
            attached.wait()
    """

    def __init__(
        self, run_dir: Path, view: View, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir, self._view, self._clock_s = run_dir, view, clock_s
        self._touched_s = self._locked_s = -math.inf
        self._stamp = (0, 0)
        self._news_s = self._noted_s = clock_s()
        self._held = True
        self.snapshot: Snapshot | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.close()

    def wait(self) -> None:
        """Sleep until the next look is due."""
        time.sleep(_LOOK_S)

    def look(self) -> bool:
        """Ask for snapshots, and show a new one. Returns whether the run is being trained."""
        now_s = self._clock_s()
        if now_s - self._touched_s >= _TOUCH_S:
            self._touched_s = now_s
            with suppress(OSError):  # another user's run: it writes a snapshot every five seconds
                touch(self._run_dir / WATCHED_FILE)
        if now_s - self._locked_s >= _LOCK_S:
            self._locked_s = now_s
            self._held = is_locked(self._run_dir / LOCK_FILE)
        if self._is_new():
            self.snapshot = read_snapshot(self._run_dir)
            self._news_s = now_s
            self._show()
        elif self._held and min(now_s - self._news_s - _SILENT_S, now_s - self._noted_s - 1) > 0:
            self._noted_s = now_s
            self._show(f"the run has written nothing for {now_s - self._news_s:.0f} s")
        return self._held

    def _is_new(self) -> bool:
        try:
            found = (self._run_dir / SNAPSHOT_FILE).stat()
        except OSError:
            return False
        before, self._stamp = self._stamp, (found.st_mtime_ns, found.st_ino)
        return before != self._stamp

    def _show(self, note: str = "") -> None:
        if (shot := self.snapshot) is None:
            return
        facts, messages = dataclasses.replace(shot.facts, watched=True), shot.messages
        if note:
            last = messages[-1].number if messages else 0
            messages = (*messages, Note(last, shot.wall_s, note))
        self._view.show(dataclasses.replace(shot, facts=facts, messages=messages))
