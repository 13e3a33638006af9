"""What two `zapex watch` beside a run cost it: `bench_train watchers`."""

import os
import pty
import random
import signal
import statistics
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.support.harness import goal
from benchmarks.train.whole_run import START_S, Result, TrainRun, rates, zapex_command
from zapex.envs.environments import EnvironmentSpec
from zapex.watch.recorders import SNAPSHOT_FILE

_WATCHERS = 2
_COUNTED = ("frames", "batches")
_FORGOTTEN_S = 12.0  # a run writes for watchers for ten seconds after the last one has asked


@contextmanager
def _watcher(run_dir: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """`zapex watch` on a terminal of its own, that somebody reads."""
    ours, theirs = pty.openpty()

    def drain() -> None:
        with suppress(OSError):  # the other end is closed
            while os.read(ours, 1 << 16):
                pass

    variables = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        [*zapex_command(), "watch", str(run_dir)],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **variables},
    )  # fmt: skip
    os.close(theirs)
    threading.Thread(target=drain, daemon=True).start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def watchers(options: Namespace, spec: EnvironmentSpec) -> Result:
    """Frames and batches a second of one run, in turns alone and watched by two terminals.

    The watchers are the same processes all the time, stopped while the run is alone: what they cost
    when they start is not counted.
    """
    window_s = 4.0 if options.quick else 60.0 * options.minutes / 10
    flags = ["--max-frames", "0", "--max-minutes", "0", "--eval-period-s", "0"]
    flags += ["--preset", "smoke", "--actors", "1"] if options.quick else []
    turns: dict[str, list[dict[str, float]]] = {"alone": [], "watched": []}
    with TrainRun(spec, [*flags, *options.train]) as run, ExitStack() as stack:
        run.wait_until(lambda: run.count("learner", "batches"), START_S)
        processes = [stack.enter_context(_watcher(run.path)) for _ in range(_WATCHERS)]
        written = run.path / SNAPSHOT_FILE
        run.wait_until(lambda: _writes_each_second(written), START_S)
        shuffler = random.Random(0)
        for turn in range(options.rounds):
            for name in shuffler.sample(list(turns), len(turns)):
                turns[name].append(_window(run, processes, name == "watched", window_s))
            last = {name: found[-1]["frames"] for name, found in turns.items()}
            print(f"round {turn + 1} of {options.rounds}: {last} frames/s", flush=True)
    return _compared(turns, window_s)


def _writes_each_second(path: Path) -> bool:
    """Whether the run has seen that it is watched."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    time.sleep(1.5)
    return path.exists() and path.stat().st_mtime_ns != before


def _window(run: TrainRun, processes: list[Any], watched: bool, seconds: float) -> dict[str, float]:
    for process in processes:
        process.send_signal(signal.SIGCONT if watched else signal.SIGSTOP)
    time.sleep(_FORGOTTEN_S)
    before = run.look()
    time.sleep(seconds)
    return rates(before, run.look())


def _compared(turns: dict[str, list[dict[str, float]]], window_s: float) -> Result:
    pairs = list(zip(turns["alone"], turns["watched"], strict=True))
    found: Result = {"watchers": _WATCHERS, "window_s": window_s}
    for name in _COUNTED:
        shares = [watched[name] / alone[name] for alone, watched in pairs]
        found[name] = {
            "alone_per_s": [one[name] for one in turns["alone"]],
            "watched_per_s": [one[name] for one in turns["watched"]],
            "share_by_round": shares,
            "share": statistics.median(shares),
        }
        text = f"{name} a second with two watchers, of those without:"
        print(goal(text, found[name]["share"], 0.99, least=True))
    return found
