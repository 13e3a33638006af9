"""`make bench-all`: every result that lacks evidence measured again, one after the other.

    python -m benchmarks.claims.measure_all [--list] [--only NAME] [--hours H] [--publish | --again]

A result goes to build/bench-all. It counts as measured once it has no doubts; then it is not
measured again, so the command may be stopped at any time and goes on where it was. It waits until
the machine is quiet. What comes out with doubts stays as NAME.doubtful.json, and is tried twice
more. --publish puts what was measured into benchmarks/results, and its figures into claims.toml
and the texts. It is a step of its own, because a changed file makes the tree dirty. --again puts it
beside the run that is published: figures are then those of all runs (claims.py says how).
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.claims import claims as book
from benchmarks.claims import numbers, running
from benchmarks.claims.claims import Claim, Measurement
from benchmarks.support.harness import put_json
from benchmarks.support.machine import ROOT
from zapex.errors import ConfigError

WORK = ROOT / "build/bench-all"
_TRIES = 3


def lacks(measurement: Measurement, results: Path = book.RESULTS) -> str:
    """Why the result that is there is no evidence; empty if it is."""
    path = results / measurement.file
    if not path.exists():
        return "there is none"
    return "; ".join(book.doubts_of(book.read(path), measurement))


def _path(measurement: Measurement, work: Path) -> Path:
    return work / f"{measurement.name}.json"


def measure(measurement: Measurement, work: Path, until_s: float) -> str:
    """One result, in up to three tries; what came of it, in a line."""
    out = _path(measurement, work)
    for number in range(_TRIES):
        if why := book.wait_until_possible(measurement, until_s):
            return f"not possible here: {why}"
        began = time.monotonic()
        if failed := running.run(measurement, out):
            return f"failed: {failed}"
        took = f"{(time.monotonic() - began) / 60:.1f} min"
        doubts = book.doubts_of(book.read(out), measurement)
        if not doubts:
            return f"measured in {took}"
        out.replace(out.with_suffix(".doubtful.json"))
        print(f"  try {number + 1} of {_TRIES}, {took}: {'; '.join(doubts)}", flush=True)
    return f"doubtful: {'; '.join(doubts)}"


def publish_again(measurements: Sequence[Measurement], work: Path, results: Path) -> list[str]:
    """Put what was measured beside what is published. Names written. Raises ConfigError."""
    written = []
    for measurement in measurements:
        source, target = _path(measurement, work), results / measurement.file
        if not source.exists():
            continue
        run, whole = book.read(source), book.read(target)
        if measurement.parts or not isinstance(whole, dict) or not whole:
            raise ConfigError(f"{measurement.file} is no single run that could stand beside others")
        if doubts := book.doubts_of(run, measurement):
            raise ConfigError(f"{measurement.name}: {'; '.join(doubts)}")
        if other := book.elsewhere(run, whole, measurement):
            raise ConfigError(f"{measurement.name}: another kind of machine: {other}")
        if run["machine"]["time"] in [one["machine"]["time"] for one in book.runs_of(whole)]:
            raise ConfigError(f"this run is published already: remove {source} to measure another")
        put_json(target, {**whole, "again": [*whole.get("again", []), run]})
        written.append(measurement.name)
    return written


def publish(measurements: Sequence[Measurement], work: Path, results: Path) -> list[str]:
    """Copy what was measured; a file of several measurements keeps the others. Names written."""
    written = []
    for measurement in measurements:
        source = _path(measurement, work)
        if not source.exists():
            continue
        report, target = book.read(source), results / measurement.file
        if measurement.parts:
            whole = book.read(target) or {"benchmark": report.get("benchmark", measurement.name)}
            own = {name: report["results"][name] for name in measurement.parts}
            whole.setdefault("results", {}).update(own)
            if "scores" in report:
                whole.setdefault("scores", {}).update(report["scores"])
            report = whole
        put_json(target, report)
        written.append(measurement.name)
    return written


def _all_needs(measurement: Measurement, claims: Sequence[Claim]) -> tuple[str, ...]:
    """What it and its claims need: without these, the result would have gaps."""
    more = [need for claim in claims if claim.measurement == measurement for need in claim.needs]
    needs = dict.fromkeys(("quiet", *measurement.needs, *more))
    return tuple(need for need in needs if need != "quiet" or not measurement.counts)


def _show(measurements: Sequence[Measurement], work: Path) -> None:
    for one in measurements:
        done = "measured, not published" if _path(one, work).exists() else ""
        state = done or lacks(one) or "evidence"
        needs = ", ".join(one.needs) or "any"
        print(f"{one.name:16} {one.minutes:5.0f} min {one.memory_gib:5.0f} GiB  {needs:28} {state}")
    rest = [m for m in measurements if lacks(m) and not _path(m, work).exists()]
    print(f"to measure: {len(rest)}, about {sum(m.minutes for m in rest):.0f} minutes")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what lacks evidence. Exit code 1 if something could not be measured."""
    parser = argparse.ArgumentParser(description="Measure every result that lacks evidence.")
    parser.add_argument("--list", action="store_true", help="what lacks evidence, and its minutes")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--hours", type=float, default=24.0, help="wait no longer for quiet")
    parser.add_argument("--publish", action="store_true", help="put it into benchmarks/results")
    parser.add_argument("--again", action="store_true", help="put it beside what is there")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR")
    options = parser.parse_args(argv)
    try:
        claims, named = book.load()
        if unknown := set(options.only) - set(named):
            raise ConfigError(f"no such measurement: {', '.join(sorted(unknown))}")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = [
        replace(one, needs=_all_needs(one, claims))
        for name, one in named.items()
        if not options.only or name in options.only
    ]
    if options.list:
        _show(chosen, options.work)
        return 0
    if options.publish or options.again:
        put = publish_again if options.again else publish
        try:
            print("written:", ", ".join(put(chosen, options.work, book.RESULTS)) or "nothing")
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        return numbers.main([])
    changed = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain"], text=True,
                             capture_output=True, check=True).stdout  # fmt: skip
    if changed:
        print(f"commit first: what is measured must be a commit\n{changed}", file=sys.stderr)
        return 2
    todo = [one for one in chosen if options.only or lacks(one)]
    todo = sorted((m for m in todo if not _path(m, options.work).exists()), key=lambda m: m.minutes)
    until_s = time.monotonic() + 3600 * options.hours
    outcomes = []
    for number, one in enumerate(todo, 1):
        rest = sum(m.minutes for m in todo[number - 1 :])
        print(f"[{number} of {len(todo)}, about {rest:.0f} min left] {one.command}", flush=True)
        outcomes.append(measure(one, options.work, until_s))
        print(f"  {one.name}: {outcomes[-1]}", flush=True)
    print(f"{sum(o.startswith('measured') for o in outcomes)} of {len(todo)} measured; to publish: "
          "make bench-all ARGS=--publish")  # fmt: skip
    return int(not all(o.startswith("measured") for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
