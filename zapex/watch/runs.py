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
from zapex.machine.disk import is_locked
from zapex.machine.reading import read_json, read_text, typed
from zapex.watch.recorders import RESULT_FILE, SNAPSHOT_FILE, read_snapshot
from zapex.watch.report import Note, Snapshot, View
from zapex.watch.terminal import clock, count, in_columns, number

LOCK_FILE: Final = ".lock"  # the kernel frees the lock with its process; the file stays
SETTINGS_FILE: Final = "config.toml"
RUNS: Final = "runs"
"""Where runs without a --run-dir are."""
_WIDE: Final = 110
_LOOK_S: Final = 0.25
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
    for facts in described(known):
        greedy, best = facts["return_greedy"], facts["best"]
        now = facts["return_all"] if greedy is None else greedy
        shown = (count, facts["frames"]), (clock, facts["wall_s"]), (number, now), (number, best)
        numbers = ["-" if value is None else form(value) for form, value in shown]
        rows.append([facts["state"], *numbers, facts["environment"] or "", facts["run"]])
    if width < _WIDE:
        rows = [[*row[:-2], row[-1]] for row in rows]
    return in_columns(rows, right=range(1, 5))


def described(known: Sequence[Known]) -> list[dict[str, Any]]:
    """The facts of `table`, for JSON; None where a number is not known."""
    return [_described(one) for one in known]


def _described(one: Known) -> dict[str, Any]:
    facts = dict.fromkeys(
        ("environment", "frames", "wall_s", "return_all", "return_greedy", "best", "last")
    )
    found: dict[str, Any] = {"run": str(one.path), "state": one.state}
    found |= {"reason": one.reason or one.damage, **facts}
    if (shot := one.snapshot) is not None:
        best, returns = shot.best_evaluation, shot.returns
        found |= {
            "environment": shot.facts.environment,
            "frames": shot.totals["frames"],
            "wall_s": shot.wall_s,
            "return_all": None if math.isnan(returns.all_mean) else returns.all_mean,
            "return_greedy": None if math.isnan(returns.greedy_mean) else returns.greedy_mean,
            "best": best and best.mean,
            "last": best and shot.evaluations[-1].mean,
        }
    written = time.localtime(_written_s(one.path))
    return {**found, "written": time.strftime("%Y-%m-%dT%H:%M:%S%z", written)}


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
        self._locked_s = -math.inf
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
        """Show a new snapshot. Returns whether the run is being trained."""
        now_s = self._clock_s()
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
