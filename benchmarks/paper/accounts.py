"""Where the time of a point went: processor time and run-queue wait of every thread, and load."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.support.machine import cpu_seconds

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Thread(NamedTuple):
    """Seconds on a core, and seconds ready to run while others had the cores."""

    cpu_s: float
    waited_s: float


def threads_of(pid: int) -> dict[str, Thread]:
    """All threads of a process, by name and number; those of one name are numbered in order."""
    found: dict[str, Thread] = {}
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        try:
            name = (task / "comm").read_text().strip()
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            waited = (task / "schedstat").read_text().split()[1]
        except (OSError, IndexError):  # it has ended, or the kernel keeps no such file
            continue
        same = sum(known.partition("#")[0] == name for known in found)
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        found[f"{name}#{same}" if same else name] = Thread(cpu_s, int(waited) / 1e9)
    return found


class Account:
    """Looks at processes (by role) when a window begins and when it ends."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._threads = {name: threads_of(pid) for name, pid in pids.items()}
        self._began_s, (self._busy_s, _) = time.monotonic(), _stat()

    def close(self) -> dict[str, Any]:
        """{"load", "seconds", "core_seconds", "run_queue_wait_s"} since it was made.

        load: the share of all cores that was busy, with what else the machine did.
        """
        seconds = time.monotonic() - self._began_s
        busy_s = _stat()[0] - self._busy_s
        cpu: dict[str, dict[str, float]] = {}
        waited: dict[str, dict[str, float]] = {}
        for name, pid in self._pids.items():
            before = self._threads[name]
            for thread, now in threads_of(pid).items():
                then = before.get(thread, Thread(0.0, 0.0))
                cpu.setdefault(name, {})[thread] = round(now.cpu_s - then.cpu_s, 3)
                waited.setdefault(name, {})[thread] = round(now.waited_s - then.waited_s, 4)
        return {
            "load": busy_s / (seconds * (os.cpu_count() or 1)),
            "seconds": seconds,
            "core_seconds": cpu,
            "run_queue_wait_s": waited,
        }


def _stat() -> tuple[float, float]:
    return cpu_seconds(Path("/proc/stat").read_text())
