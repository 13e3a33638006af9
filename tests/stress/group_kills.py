"""Kills whole runs at random times, all processes at once or the parent alone: what is left?

    python -m tests.stress.group_kills [--kills 100] [--how group|parent] [--seed 1] [--json FILE]

Each run is a session of its own, so that whatever it ever started is found in /proc by the number
of its session. What it had in /dev/shm is known by who had it open or mapped at the kill, and by
process numbers in names. A quarter of the kills come while the parent is loading, a quarter each
once two, three and all four processes are there: at times drawn evenly from a start most kills
would find the parent alone.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.harness import add_json, evidence
from benchmarks.support.machine import Watch
from benchmarks.train.whole_run import zapex_command

_GONE_S = 30.0  # a child that is only just starting goes once it has got so far
_PROCESSES = 4  # parent, actor, replay, learner
_RUN = "--env CartPole-v1 --preset smoke --plain --max-frames 0 --max-minutes 0"
_SESSION = 3  # of the fields of /proc/PID/stat that follow the name; the state is the first


def processes_of(session: int) -> list[int]:
    """Living processes of a session, zombies left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[_SESSION]) == session and fields[0] not in "ZX":
            found.append(int(path.name))
    return found


def children_of(pid: int) -> int:
    """How many its first thread has."""
    with contextlib.suppress(OSError):
        return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return 0


def describe(pid: int) -> str:
    """What a process is and what it does."""
    facts = [str(pid)]
    for name in ("status", "cmdline", "wchan", "stat"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text().replace("\0", " ")
            facts.append(" ".join(text.split())[:400])
    return "; ".join(facts)


def shared_names(pids: Sequence[int]) -> set[str]:
    """Names in /dev/shm that these processes have open or mapped, or that hold their numbers."""
    numbers = {str(pid) for pid in pids}
    names = {n for n in os.listdir("/dev/shm") if numbers & set(re.findall("[0-9]+", n))}
    for pid in pids:
        paths = []
        with contextlib.suppress(OSError):  # it has just ended
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths = [line.split(maxsplit=5)[-1] for line in maps]
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                paths.append(os.readlink(link))
        names |= {p.removeprefix("/dev/shm/") for p in paths if p.startswith("/dev/shm/")}
    return names


def kill_once(how: str, rng: random.Random, directory: Path) -> tuple[int, float]:
    """How many processes there were, and seconds until none was. how: "group" or "parent"."""
    least = rng.randint(1, _PROCESSES)
    with (directory / "log").open("wb") as log:
        run = subprocess.Popen(
            [*zapex_command(), "train", *_RUN.split(), "--run-dir", str(directory / "run")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    if least == 1:
        time.sleep(rng.uniform(0.0, 2.0))
    while 1 + children_of(run.pid) < least and run.poll() is None:
        time.sleep(0.0005)  # they are born some milliseconds apart
    if least == _PROCESSES:
        time.sleep(rng.uniform(0.0, 4.0))
    pids = processes_of(run.pid)
    shared = shared_names(pids)
    if run.poll() is not None:
        raise RuntimeError(f"it ended by itself: {(directory / 'log').read_text()}")
    began = time.monotonic()
    if how == "group":
        os.killpg(run.pid, signal.SIGKILL)
    else:
        run.kill()
    run.wait(_GONE_S)
    while left := processes_of(run.pid):
        if time.monotonic() > began + _GONE_S:
            told = [describe(pid) for pid in left]
            raise RuntimeError(f"{how} killed, and after {_GONE_S:g} s there are still {told}")
        time.sleep(0.002)
    gone_s = time.monotonic() - began
    names = (shared | shared_names(pids)) & set(os.listdir("/dev/shm"))
    if names:
        raise RuntimeError(f"{how} killed, and left in /dev/shm: {names}")
    return len(pids), gone_s


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, look, tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--how", choices=("group", "parent"), default="group")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the result to this file")
    options = parser.parse_args(argv)
    watch = Watch()
    rng = random.Random(options.seed)
    sizes: Counter[int] = Counter()
    slowest = 0.0
    for i in range(options.kills):
        with tempfile.TemporaryDirectory(prefix="zapex-group-") as name:
            there, gone_s = kill_once(options.how, rng, Path(name))
        sizes[there] += 1
        slowest = max(slowest, gone_s)
        print(f"{i + 1}: {options.how}, {there} processes, gone in {gone_s:.3f} s", flush=True)
    result = {
        "kills": options.kills,
        "killed": options.how,
        "processes_at_the_kill": {str(n): sizes[n] for n in sorted(sizes)},
        "processes_left": 0,
        "names_left_in_dev_shm": 0,
        "slowest_end_s": round(slowest, 3),
    }
    print(json.dumps(result))
    if options.json:
        add_json(options.json, "plane", f"{options.how}_kills", result, evidence(watch, None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
