"""What every benchmark shares: flags, facts of the machine, interleaved rounds, medians, JSON."""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.support.machine import Watch, cache_bytes, doubts

Case = Callable[[], float]  # prepares, then works; returns the nanoseconds of the work alone
clock_ns = time.perf_counter_ns
FIRST_PRESET = (
    "--quantiles 0 --no-share-trunk --initial-priority actor --lr 2e-4 --optimiser-eps 1e-6 "
    "--average-targets 0 --no-layer-norm"
)
"""Flags of `zapex train` with which a laptop learns as it did when results were measured first."""


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


def sweep_bytes(quick: bool) -> int:
    """What to read and write so that nothing stays in the caches: twice the largest one's size.

    quick: less than that, for a large cache takes long to sweep.
    """
    return 32 << 20 if quick else 2 * max(cache_bytes().values(), default=32 << 20)


class CacheSweeper:
    """Pushes everything out of the caches."""

    def __init__(self, quick: bool = False) -> None:
        self._memory = np.zeros(sweep_bytes(quick) // 8)

    def sweep(self) -> None:
        self._memory += 1.0


def joined(found: Sequence[Any], join: Callable[[Sequence[float]], Any]) -> Any:
    """Several rounds of one cell made one: each number of its dicts and lists by itself.

    A round may lack names of a dict that another has. What is no number is that of the first.
    """
    first = found[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for one in found for name in one)
        return {name: joined([one[name] for one in found if name in one], join) for name in names}
    if isinstance(first, list):
        return [joined(column, join) for column in zip(*found, strict=True)]
    return join(found) if isinstance(first, Real) else first


def median(values: Sequence[float]) -> float:
    """For joined(): of each figure over the rounds."""
    return float(np.median(values))


def p10_p90(values: Sequence[float]) -> list[float]:
    """The ends of a spread, with six digits."""
    return [float(f"{v:.6g}") for v in np.percentile(values, [10, 90])]


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._phase, self._since = "other", time.perf_counter()

    def enter(self, phase: str) -> None:
        """From now on it is another phase."""
        now = time.perf_counter()
        self.spent[self._phase] = self.spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now


class Rounds(NamedTuple):
    """Cells by name: each figure's median, and its p10 and p90 over the rounds."""

    medians: dict[Any, Any]
    spreads: dict[Any, Any]


def in_rounds(cells: Mapping[Any, Callable[[], Any]], rounds: int) -> Rounds:
    """Every cell once a round, in an order drawn anew each round."""
    found: dict[Any, list[Any]] = {name: [] for name in cells}
    shuffler = random.Random(0)
    for turn in range(rounds):
        for name in shuffler.sample(list(cells), len(cells)):
            start = time.monotonic()
            try:
                found[name].append(cells[name]())
            except (RuntimeError, TimeoutError) as error:
                raise type(error)(f"{name}, round {turn + 1}: {error}") from error
            took = time.monotonic() - start
            print(f"  round {turn + 1} of {rounds}: {name} {took:.1f} s", file=sys.stderr)
    return Rounds(
        {name: joined(results, median) for name, results in found.items()},
        {name: joined(results, p10_p90) for name, results in found.items()},
    )


def arguments(description: str, pins: bool = False) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark takes.

    pins: the benchmark works in one process, which --pin holds on one core. From now on SIGTERM
    raises, so that a benchmark that is ended from outside still ends what it has started.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    parser = argparse.ArgumentParser(description=description.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--quick", action="store_true", help="some seconds: does it run at all?")
    if pins:
        parser.add_argument("--pin", type=_pin, metavar="CORE", help="run on this core alone")
    parser.set_defaults(watch=Watch())
    return parser


def _pin(core: str) -> int:
    os.sched_setaffinity(0, {int(core)})
    return int(core)


def write_json(
    options: argparse.Namespace, benchmark: str, results: Mapping[str, Any], *,
    rounds: int | None,
    **facts: Any,
) -> None:  # fmt: skip
    """{"benchmark", "machine", "quick", ..., "results"} in the file that --json names, if any.

    rounds: as of evidence().
    """
    found = evidence(options.watch, rounds, options.quick)
    facts = {**found, **facts, "quick": options.quick, "rounds": rounds}
    if options.json is not None:
        put_json(options.json, {"benchmark": benchmark, **facts, "results": results})


def evidence(watch: Watch, rounds: int | None, quick: bool = False) -> dict[str, Any]:
    """{"machine", "during", "doubts"}: where a result comes from, and why not to publish it.

    The doubts are printed on stderr, too. rounds: how often each contender was measured, in turns
    with the others; None for one long run whose course is the result.
    """
    started, during = watch.facts, watch.report()
    reasons = doubts(started, during, rounds)
    if quick:
        reasons.insert(0, "this is a quick form")
    for reason in reasons:
        print(f"not to be published: {reason}", file=sys.stderr)
    return {"machine": started, "during": during, "doubts": reasons}


def add_json(
    path: Path, benchmark: str, name: str, result: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    """Put one result beside the others of a file. found: its evidence()."""
    report = json.loads(path.read_text()) if path.exists() else {"benchmark": benchmark}
    report.setdefault("results", {})[name] = {**found, **result}
    put_json(path, report)


def put_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a result, in a directory that may be new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumped(report) + "\n")


def dumped(value: Any, indent: int = 0) -> str:
    """JSON in which what fits stands on one line."""
    flat, pad = json.dumps(value), " " * indent
    if len(flat) + indent <= 110 or not isinstance(value, dict | list):
        return flat
    if isinstance(value, dict):
        items = [f"{pad} {json.dumps(k)}: {dumped(v, indent + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{pad}}}"
    rows = [f"{pad} {dumped(one, indent + 1)}" for one in value]
    return "[\n" + ",\n".join(rows) + f"\n{pad}]"
