"""Where a number comes from: commit, processor, versions, and what else the machine did."""

import atexit
import os
import platform
import resource
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
LEAST_ROUNDS = 5
FOREIGN_LIMIT, STEAL_LIMIT = 0.05, 0.01  # shares of all cores' time on a quiet machine
CROWDED = "other processes took", "the hypervisor took"  # how doubts about these begin
_PACKAGES = ("numpy", "numba", "llvmlite", "pyzmq", "torch", "gymnasium", "ale-py")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cache_bytes() -> dict[str, int]:
    """Size of each data cache of core 0: {"L1": ..., "L2": ..., "L3": ...}; empty if unknown."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = _read(f"{index}/size")
        if _read(f"{index}/type") != "Instruction" and size.endswith("K"):
            sizes["L" + _read(f"{index}/level")] = int(size[:-1]) * 1024
    return sizes


def machine_facts(more: Sequence[str] = ()) -> dict[str, Any]:
    """Where a number comes from: commit, processor, caches, cores we may use, load, versions.

    more: packages whose versions count too.
    """
    cpuinfo = _read("/proc/cpuinfo").splitlines()
    models = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "pinned_to": sorted(os.sched_getaffinity(0)),
        "isolated": _read("/sys/devices/system/cpu/isolated"),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cache_bytes": cache_bytes(),
        "load_average": os.getloadavg(),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in (*_PACKAGES, *more)},
    }


class Watch:
    """What other processes, and other guests of the same host, took of the processor since now.

    Where we may make a cgroup, all that we start counts as ours. Elsewhere children do once they
    have ended and were waited for; nobody waits for those of a killed process.
    """

    def __init__(self) -> None:
        self.facts = machine_facts()
        self._began_s, self._own_s = time.monotonic(), own_seconds()
        self._busy_s, self._steal_s = cpu_seconds(_read("/proc/stat"))

    def report(self) -> dict[str, Any]:
        """{"seconds", "foreign_cpu", "steal", "commit", "load_average"}; shares of all cores."""
        seconds = time.monotonic() - self._began_s
        all_cores = max(seconds, 1e-9) * (os.cpu_count() or 1)
        busy_s, steal_s = cpu_seconds(_read("/proc/stat"))
        foreign_s = (busy_s - self._busy_s) - (own_seconds() - self._own_s)
        return {
            "seconds": round(seconds, 1),
            "foreign_cpu": round(max(0.0, foreign_s / all_cores), 4),
            "steal": round((steal_s - self._steal_s) / all_cores, 4),
            "commit": _commit(),
            "load_average": os.getloadavg(),
        }


def cpu_seconds(proc_stat: str) -> tuple[float, float]:
    """Seconds of all cores that were busy, and that the hypervisor gave to others (proc(5))."""
    fields = proc_stat.partition("\n")[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S, steal / _TICKS_PER_S


def own_seconds() -> float:
    """Seconds of processor that this process and what it started have used; see Watch."""
    if (group := own_cgroup()) is not None:
        return int(_read(f"{group}/cpu.stat").split()[1]) / 1e6  # usage_usec
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


@cache
def own_cgroup() -> Path | None:
    """A cgroup of this process and of all that it starts from now on; None if we may make none.

    It limits nothing: the kernel counts the processor time of a group of version 2 in any case.
    """
    mounts = [line.split()[1:3] for line in _read("/proc/self/mounts").splitlines()]
    mount = next((place for place, kind in mounts if kind == "cgroup2"), "")
    lines = _read("/proc/self/cgroup").splitlines()
    inside = next((line[3:] for line in lines if line.startswith("0::")), "")
    home = Path(mount + inside)
    group = home / f"zapex-{os.getpid()}"
    try:
        if not mount or not inside:
            return None
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        _leave(home, group)
        return None
    atexit.register(_leave, home, group)
    return group


def _leave(home: Path, group: Path) -> None:
    with suppress(OSError):  # it stays where something that we started still runs
        if _read("/proc/self/cgroup").endswith(group.name):
            (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def doubts(facts: dict[str, Any], during: dict[str, Any], rounds: int | None) -> list[str]:
    """Why what was measured may not be published; empty if it may.

    facts: of the machine at the start. during: a Watch's report at the end. rounds: how often
    each contender was measured, in turns with the others; None for one long run.
    """
    found = []
    if facts["commit"] is None:
        found.append("no git commit")
    elif facts["commit"].endswith("-dirty"):
        found.append(f"uncommitted changes ({facts['commit']})")
    elif during["commit"] != facts["commit"]:
        found.append(f"the commit changed meanwhile ({facts['commit']} to {during['commit']})")
    if rounds is not None and rounds < LEAST_ROUNDS:
        found.append(f"{rounds} rounds, fewer than {LEAST_ROUNDS}")
    if during["foreign_cpu"] >= FOREIGN_LIMIT:
        found.append(f"{CROWDED[0]} {during['foreign_cpu']:.1%} of the processor")
    if during["steal"] >= STEAL_LIMIT:
        found.append(f"{CROWDED[1]} {during['steal']:.1%} of the processor")
    return found
