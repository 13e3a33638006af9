"""What every benchmark shares: facts of the machine, interleaved rounds, percentiles, JSON out."""

import argparse
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

Case = Callable[[], float]  # prepares, then works; returns the nanoseconds of the work alone
clock_ns = time.perf_counter_ns

ROOT = Path(__file__).parent.parent


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


def machine_facts(packages: Sequence[str] = ("numpy", "numba", "llvmlite")) -> dict[str, Any]:
    """Where a number comes from: commit, processor, caches, cores we may use, load, versions."""
    cpuinfo = _read("/proc/cpuinfo").splitlines()
    models = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "pinned_to": sorted(os.sched_getaffinity(0)),
        "cache_bytes": cache_bytes(),
        "load_average": os.getloadavg(),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def percentiles(values: Sequence[float], divisor: float = 1.0) -> dict[str, float]:
    """p10, p50, p90 and p99 of values / divisor, and how many there were."""
    points = np.percentile(np.asarray(values, float) / divisor, [10, 50, 90, 99])
    named = {f"p{q}": round(float(v), 3) for q, v in zip((10, 50, 90, 99), points, strict=True)}
    return {**named, "n": len(values)}


def interleaved(
    cases: Mapping[str, Case], rounds: int, warm_up: int = 2, seed: int = 0
) -> dict[str, list[float]]:
    """Run every case once a round, in an order drawn anew each round; {name: nanoseconds}.

    A disturbance then falls on all cases alike, so that ratios within one run can be trusted.
    """
    order = list(cases)
    shuffler = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warm_up + rounds):
        shuffler.shuffle(order)
        for name in order:
            elapsed = cases[name]()
            if turn >= warm_up:
                times[name].append(elapsed)
    return times


class CacheSweeper:
    """Pushes everything out of the caches by reading and writing twice the largest one's size."""

    def __init__(self) -> None:
        largest = max(cache_bytes().values(), default=32 << 20)
        self._memory = np.zeros(2 * largest // 8)

    def sweep(self) -> None:
        self._memory += 1.0


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--quick", action="store_true", help="a few seconds: does it run at all?")
    parser.add_argument("--pin", type=int, metavar="CORE", help="run on this core alone")
    return parser


def goal(text: str, value: float, limit: float, unit: str = "", least: bool = False) -> str:
    """One line: what was wanted, what came out."""
    met = value >= limit if least else value <= limit
    sign = "at least" if least else "at most"
    verdict = "met" if met else "MISSED"
    return f"  goal {verdict}: {text} {value:.4g}{unit}, wanted {sign} {limit:g}{unit}"


def write_json(path: Path, benchmark: str, results: Mapping[str, Any], **facts: Any) -> None:
    """{"benchmark", "machine", ..., "results"} in one file."""
    report = {"benchmark": benchmark, "machine": machine_facts(), **facts, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def add_json(path: Path, benchmark: str, name: str, result: Mapping[str, Any]) -> None:
    """Put one result, with the machine it was seen on, beside the others of a file."""
    report = json.loads(path.read_text()) if path.exists() else {"benchmark": benchmark}
    results = report.setdefault("results", {})
    results[name] = {"machine": machine_facts(), **result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
