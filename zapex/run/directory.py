"""A run's directory: one process trains in it, and a resumed run takes its counters from it."""

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from zapex.errors import ConfigError
from zapex.machine.disk import replace_whole
from zapex.machine.reading import typed
from zapex.run import checkpoints
from zapex.run.keeping import is_saved
from zapex.run.run import Run
from zapex.watch import recorders
from zapex.watch.report import Evaluation, best_of
from zapex.watch.runs import LOCK_FILE

_LOCK_S = 0.5  # `zapex watch` and `zapex runs` hold a shared lock for a moment


@contextlib.contextmanager
def opened(run: Run) -> Iterator[tuple[Run, dict[str, float]]]:
    """Make the directory of a new run, or take that of one to resume; hold it for this process.

    Yields the run, and its counters so far, empty for a new one.
    Raises ConfigError if another process trains in it.
    """
    run_dir, resumed = run.run_dir, bool(run.config.run.resume)
    run_dir.mkdir(parents=True, exist_ok=resumed)
    with _held(run_dir):
        base = counters(run_dir) if resumed else {}
        path, text = run_dir / "config.toml", run.config.to_toml().encode()
        if not resumed or path.read_bytes() != text:
            replace_whole(path, [text])
        if base and not run.config.run.quiet:
            print(_where(run, base))
        yield replace(run, steps_before=int(base.get("steps", 0))), base


def set_aside(run_dir: Path) -> Path | None:
    """Rename a directory that cannot be resumed: DIR.1, DIR.2, ...; None: there is none.

    Raises ConfigError if another process trains in it.
    """
    if not run_dir.exists():
        return None
    with _held(run_dir):
        names = (run_dir.with_name(f"{run_dir.name}.{n}") for n in itertools.count(1))
        moved = next(path for path in names if not path.exists())
        os.rename(run_dir, moved)
    return moved


@contextlib.contextmanager
def _held(run_dir: Path) -> Iterator[None]:
    lock = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            _take(lock)
        except BlockingIOError:
            pid = os.pread(lock, 20, 0).decode(errors="replace") or "unknown"
            raise ConfigError(
                f"{run_dir} is being trained by process {pid}: end that process first, or start a "
                "new run"
            ) from None
        with contextlib.suppress(OSError):  # on a full disk the number is missing, not the lock
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)


def _take(lock: int) -> None:
    deadline_s = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def counters(run_dir: Path) -> dict[str, float]:
    """The counters that a resumed run begins with: none is below one that was ever stored.

    The newest checkpoint has those of the parameters. Where metrics.jsonl has larger ones, the run
    was killed later: that was played, but what was learned from it is lost.
    """
    base = recorders.read_base(run_dir)
    for path in (checkpoints.latest(run_dir), checkpoints.best(run_dir)):
        if path is not None:
            state = checkpoints.load(path).state
            found = state.get("totals", {}) | {"params_version": state.get("params_version")}
            recorders.raise_to(base, found)
    return base


def evaluations(run_dir: Path) -> list[Evaluation]:
    """All evaluations of a run so far; after a kill the best may be in its checkpoint alone."""
    found = recorders.read_evaluations(run_dir)
    best = checkpoints.best(run_dir)
    state = checkpoints.load(best).state if best is not None else {}
    with contextlib.suppress(ConfigError):  # of a version that stored less
        one: Evaluation = typed(Evaluation, {**state, **state.get("totals", {})})
        if best_of([*found, one]) is one:
            found.append(one)
    return found


def _where(run: Run, base: Mapping[str, float]) -> str:
    """Where a resumed run is."""
    text = f"resuming at {base.get('frames', 0.0):,.0f} frames"
    newest = checkpoints.latest(run.run_dir)
    learned = checkpoints.load(newest).state.get("totals", {}).get("batches") if newest else None
    lost = base.get("batches", 0.0) - learned if isinstance(learned, (int, float)) else 0.0
    if newest is not None and lost > 0:
        text += f" with {newest.stem}: what was learned later, from {lost:,.0f} batches, is lost"
    if run.part.holds_replay and is_saved(run.run_dir):
        return f"{text}; its memory is loaded first"
    starts = run.config.replay.learning_starts
    if not run.part.holds_replay:
        return text
    return f"{text}; the replay is refilled first: learning starts after {starts:,} transitions"
