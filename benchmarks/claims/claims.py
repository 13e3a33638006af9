"""claims.toml: what is claimed, which command measures it, and whether what was seen bears it out.

A path names figures in a result's JSON: keys and places joined by dots, `*` for all of them, and
`cells[kind=mailbox,bytes=64]` for the rows of a list that have these values. Several figures count
as their median. `at` may be a list of paths, of which some are missing: the smallest counts. With
`of = "most"` the largest of all figures counts.

A result may hold further whole runs, of other hours, in `again`. Its figure is then the median of
the runs' medians, between the lowest p10 and the highest p90: times differ more between two runs
than between the rounds of one.
"""

import json
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.support.machine import CROWDED, FOREIGN_LIMIT, ROOT, STEAL_LIMIT, Watch
from benchmarks.transport import redis_server
from zapex.cli import netns
from zapex.errors import ConfigError

CLAIMS = ROOT / "claims.toml"
RESULTS = ROOT / "benchmarks/results"
WIDER = 0.1  # what may lie beside the published p10..p90, as a share of either
_LOOK_S, _PAUSE_S = 2.0, 10.0
_BETTER = ("less", "more", "same")


@dataclass(frozen=True)
class Measurement:
    """One command and the result that it writes. minutes, memory_gib: about what it takes.

    parts: where the file's `results` hold this measurement's own; empty: all of the file. counts:
    its claims count what went wrong and time nothing, so it needs no quiet machine.
    """

    name: str
    command: str
    file: str
    minutes: float
    memory_gib: float
    needs: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    counts: bool = False


@dataclass(frozen=True)
class Claim:
    """One published figure. published: p10, median and p90; better: less, more or same.

    at, over: paths of the figure, and of what it is divided by. spread: path of its [p10, p90]
    where these are not beside it. needs: beyond what its measurement needs.
    """

    id: str
    sentence: str
    measurement: Measurement
    at: tuple[str, ...]
    published: tuple[float, float, float]
    better: str
    format: str = ".3g"
    unit: str = ""
    over: tuple[str, ...] = ()
    of: str = ""
    spread: str = ""
    scale: float = 1.0
    needs: tuple[str, ...] = ()

    def seen(self, report: Any) -> tuple[float, float, float]:
        """p10, median and p90 in a result. Raises KeyError where no run has such a figure."""
        each, missing = [], KeyError("there is no run")
        for run in runs_of(report):
            try:
                each.append(self._in(run))
            except KeyError as error:  # a run may lack the rows that need a library
                missing = error
        if not each:
            raise missing
        low, middle, high = zip(*each, strict=True)
        return min(low), float(np.median(middle)), max(high)

    def _in(self, report: Any) -> tuple[float, float, float]:
        """p10, median and p90 in one run."""
        there = _there(report, self.at)
        if self.of == "most":
            figures = (max(float(v) for path in there for v in walk(report, path)),) * 3
        else:
            each = [_figures(report, path, self.spread) for path in there]
            figures = min(each, key=lambda three: three[1])
        divisor = 1.0
        if self.over:
            divisor = min(_figures(report, path)[1] for path in _there(report, self.over))
        low, middle, high = (self.scale * figure / divisor for figure in figures)
        return low, middle, high

    def borne_out_by(self, seen: float) -> bool:
        """Whether a figure lies in the published p10..p90 widened by a tenth, or is better."""
        low, _, high = self.published
        return (self.better == "less" or seen >= low - WIDER * abs(low)) and (
            self.better == "more" or seen <= high + WIDER * abs(high)
        )

    def text(self, figure: float) -> str:
        """A figure as the documentation has it."""
        return f"{figure:{self.format}}"


def load(path: Path = CLAIMS) -> tuple[list[Claim], dict[str, Measurement]]:
    """All claims, and all measurements by name. Raises ConfigError."""
    listed = tomllib.loads(path.read_text())
    try:
        measurements = {
            name: Measurement(**{"name": name, "file": f"{name}.json", **_tuples(fields)})
            for name, fields in listed["measurement"].items()
        }
        claims = [
            Claim(**{**_tuples(fields), "measurement": measurements[fields["measurement"]]})
            for fields in listed.get("claim", [])
        ]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for claim in claims:
        if claim.better not in _BETTER or len(claim.published) != 3:
            raise ConfigError(
                f"{path}: {claim.id} needs better = one of {', '.join(_BETTER)}, and published = "
                "[p10, median, p90]"
            )
    twice = {c.id for c in claims if sum(c.id == other.id for other in claims) > 1}
    unknown = {n for one in (*claims, *measurements.values()) for n in one.needs} - set(NEEDS)
    if twice or unknown:
        raise ConfigError(
            f"{path}: ids used twice {sorted(twice)}, unknown needs {sorted(unknown)}"
        )
    return claims, measurements


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    for name in {"at", "over"} & set(found):
        found[name] = (found[name],) if isinstance(found[name], str) else found[name]
    return found


def _there(report: Any, paths: tuple[str, ...]) -> list[str]:
    """Those of the paths that lead somewhere: a contender may be missing."""
    there = [path for path in paths if list(walk(report, path))]
    if not there:
        raise KeyError(f"the result has no {' and no '.join(paths)}")
    return there


def _figures(report: Any, path: str, spread: str = "") -> tuple[float, float, float]:
    values = [float(value) for value in walk(report, path)]
    middle = float(np.median(values))
    beside = path.removesuffix("p50")
    if spread:
        low, high = next(walk(report, spread), (middle, middle))
    elif path.endswith("p50") and len(values) == 1:
        low, high = (next(walk(report, beside + name), middle) for name in ("p10", "p90"))
    else:
        low, high = np.percentile(values, [10, 90])
    return float(low), middle, float(high)


_STEP = re.compile(r"((?:[^.\[]|\[[^\]]*=[^\]]*\])+)(?:\.|$)")


def walk(value: Any, path: str) -> Iterator[Any]:
    """All that a path leads to."""
    if not path:
        yield value
        return
    match = _STEP.match(path)
    assert match is not None, f"{path!r} is no path"
    step, rest = match[1], path[match.end() :]
    name, _, wanted = step.partition("[")
    if name == "*":
        inner = list(value.values()) if isinstance(value, dict) else value
    elif isinstance(value, list) and not name:
        inner = [value]
    elif isinstance(value, list):
        inner = [value[int(name)]] if name.isdecimal() and int(name) < len(value) else []
    else:
        inner = [value[name]] if isinstance(value, dict) and name in value else []
    if wanted:
        pairs = [pair.split("=") for pair in re.split(r",(?=\w+=)", wanted.rstrip("]"))]
        inner = [row for rows in inner for row in rows
                 if all(str(row.get(key)) == text for key, text in pairs)]  # fmt: skip
    for one in inner:
        yield from walk(one, rest)


def runs_of(report: Any) -> list[Any]:
    """The runs that a result holds: its own, and those of other hours."""
    return [report] if isinstance(report, list) else [report, *report.get("again", [])]


def evidence_of(report: Any, measurement: Measurement) -> Iterator[dict[str, Any]]:
    """What a result says of its machine and its doubts, once for each run and part."""
    for run in runs_of(report):
        if isinstance(run, list):  # of points, each with its own
            yield from (row["machine"] for row in run if not row["modelled"])
        elif not measurement.parts:
            yield run
        for part in measurement.parts:
            yield run.get("results", {}).get(part, {})


def doubts_of(report: Any, measurement: Measurement) -> list[str]:
    """Why a result may not be published; empty if it may."""
    found: list[str] = []
    for facts in evidence_of(report, measurement):
        found += facts.get("doubts", ["it does not say what else the machine did"])
    return sorted({d for d in found if not (measurement.counts and d.startswith(CROWDED))})


def crowd(report: Any, measurement: Measurement) -> str:
    """What else the machine did while a result came about; empty where that is little."""
    for facts in evidence_of(report, measurement):
        if told := _busy(facts.get("during", {"foreign_cpu": 0.0, "steal": 0.0})):
            return f"meanwhile {told}"
    return ""


def elsewhere(report: Any, published: Any, measurement: Measurement) -> str:
    """The kinds of processor where these results come from, if they differ; empty if they do not.

    A name as "AMD EPYC" has several generations: caches tell them apart.
    """
    here, there = _processors(report, measurement), _processors(published, measurement)
    if not here or not there or here == there:
        return ""
    return f"published: {' and '.join(sorted(there))}; here: {' and '.join(sorted(here))}"


def _processors(report: Any, measurement: Measurement) -> set[str]:
    found = set()
    for facts in evidence_of(report, measurement):
        if machine := facts.get("machine", facts):
            caches = machine.get("cache_bytes", {})
            sizes = " and ".join(f"{caches[n] >> 10} KiB" for n in ("L1", "L2") if n in caches)
            found.add(f"{machine.get('cores')} cores of {machine.get('cpu')}, caches of {sizes}")
    return found


def _busy(during: Mapping[str, Any]) -> str:
    if during["foreign_cpu"] >= FOREIGN_LIMIT:
        return f"other processes take {during['foreign_cpu']:.0%} of the processor"
    if during["steal"] >= STEAL_LIMIT:
        return f"the hypervisor takes {during['steal']:.0%} of the processor"
    return ""


# What a measurement may need -> why it cannot be had here, empty where it can.


def _peers(directory: str, target: str) -> str:
    there = (ROOT / directory / "bin/python").exists()
    return "" if there else f"no {directory}: make {target}"


def _root() -> str:
    return netns.can_have_namespaces() or ""


def _quiet() -> str:
    watch = Watch()
    time.sleep(_LOOK_S)
    return _busy(watch.report())


def _gpu() -> str:
    return "" if Path("/dev/nvidia0").exists() else "no NVIDIA GPU"


def _fstack() -> str:
    return "" if find_library("fstack") else "no libfstack"


NEEDS: dict[str, Callable[[], str]] = {
    "any": lambda: "",
    "quiet": _quiet,
    "root": _root,
    "peers": partial(_peers, ".peers", "peers"),
    "peers-reverb": partial(_peers, ".peers-reverb", "peers-reverb"),
    "peers-dqn": partial(_peers, ".peers-dqn", "peers-dqn"),
    "gpu": _gpu,
    "redis": redis_server.missing,
    "real F-Stack": _fstack,
}


def why_not(needs: tuple[str, ...], memory_gib: float) -> str:
    """Why this machine cannot measure it now; empty if it can."""
    free_gib = psutil.virtual_memory().available / 2**30
    if free_gib < memory_gib:
        return f"it takes {memory_gib:g} GiB of memory, {free_gib:.1f} are free"
    return next((reason for need in needs if (reason := NEEDS[need]())), "")


def read(path: Path) -> Any:
    """A result; an empty dict where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def wait_until_possible(measurement: Measurement, until_s: float) -> str:
    """Why this machine cannot measure it, after waiting for what may change; empty if it can.

    until_s: by time.monotonic().
    """
    told, stays = "", tuple(need for need in measurement.needs if need != "quiet")
    while why := why_not(measurement.needs, measurement.memory_gib):
        for_good = why_not(stays, measurement.memory_gib)
        if for_good or time.monotonic() > until_s:
            return for_good or why
        if not told:
            print(f"  waiting: {why}", flush=True)
            told = why
        time.sleep(_PAUSE_S)
    return ""
