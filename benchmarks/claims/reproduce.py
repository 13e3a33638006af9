"""`make reproduce`: every claim measured again on this machine, beside what is published.

    python -m benchmarks.claims.reproduce [--claim ID] [--quick] [--claims FILE]
                                          [--work DIR] [--results DIR]

A claim is reproduced if its figure lies in the published p10..p90 widened by a tenth, or is better;
where several runs are published, p10 is that of the lowest and p90 that of the highest.
What needs a quiet machine waits for it, a minute at most. A crowded machine, or another kind of
processor, refutes nothing that needs a quiet machine: such a claim was not possible here. Claims of
one measurement share one run of its command. --quick: the measurements that fit into ten minutes,
shortest first. Exit code 1 if a claim is not reproduced, 2 if there is no such claim.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.claims import claims as book
from benchmarks.claims import running
from benchmarks.claims.claims import Claim, Measurement
from benchmarks.support.machine import ROOT
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError

YES, NO, IMPOSSIBLE = "reproduced", "not", "not possible here"
_QUICK_MINUTES = 10.0
_PATIENCE_S = 60.0  # until a machine that is not quiet is: what ran before may be ending


class Verdict(NamedTuple):
    """What came of one claim. seen: the figure; why: of NO or IMPOSSIBLE."""

    claim: Claim
    verdict: str
    seen: str = ""
    why: str = ""


def reproduce(
    chosen: Sequence[Claim], work: Path, published: Path, minutes: float | None = None
) -> list[Verdict]:
    """Measure these claims. minutes: None for no limit.

    work, published: directories: for results and logs, and of the results that are published.
    """
    by_measurement: dict[str, list[Claim]] = {}
    for claim in chosen:
        by_measurement.setdefault(claim.measurement.name, []).append(claim)
    groups = sorted(by_measurement.values(), key=lambda group: group[0].measurement.minutes)
    found: dict[str, Verdict] = {}
    for number, group in enumerate(groups, 1):
        measurement = group[0].measurement
        print(f"[{number} of {len(groups)}] {measurement.name}, about {measurement.minutes:g} min: "
              f"{measurement.command}", flush=True)  # fmt: skip
        if minutes is not None and measurement.minutes > minutes:
            why = f"takes {measurement.minutes:g} min: leave QUICK out"
            verdicts = [Verdict(claim, IMPOSSIBLE, why=why) for claim in group]
        else:
            minutes = None if minutes is None else minutes - measurement.minutes
            verdicts = _judge(group, measurement, work / measurement.file, published)
        for one in verdicts:
            found[one.claim.id] = one
            print(f"  {one.claim.id}: {one.verdict} {one.seen} {one.why}", flush=True)
    return [found[claim.id] for claim in chosen]


def _judge(
    group: Sequence[Claim], measurement: Measurement, out: Path, published: Path
) -> list[Verdict]:
    """One run of the command, and a verdict of each claim that can be had here."""
    why = book.wait_until_possible(measurement, time.monotonic() + _PATIENCE_S)
    needs = {claim.id: book.why_not(claim.needs, 0.0) for claim in group}
    if not why and all(needs.values()):
        why = next(iter(needs.values()))
    if why:
        return [Verdict(claim, IMPOSSIBLE, why=why) for claim in group]
    if failed := running.run(measurement, out):
        return [Verdict(claim, NO, why=f"the command failed: {failed}") for claim in group]
    report = book.read(out)
    before = book.read(published / measurement.file)
    other = book.crowd(report, measurement) or book.elsewhere(report, before, measurement)
    return [_verdict(claim, report, needs[claim.id], other) for claim in group]


def _verdict(claim: Claim, report: object, needed: str, other: str) -> Verdict:
    """other: what may explain another figure than the published one."""
    if needed:
        return Verdict(claim, IMPOSSIBLE, why=needed)
    try:
        seen = claim.seen(report)[1]
    except (KeyError, StopIteration) as error:
        return Verdict(claim, NO, why=f"no such figure: {error}")
    text = claim.text(seen)
    if claim.borne_out_by(seen):
        return Verdict(claim, YES, text)
    if other and "quiet" in (*claim.needs, *claim.measurement.needs):
        return Verdict(claim, IMPOSSIBLE, text, other)
    return Verdict(claim, NO, text)


def show(verdicts: Sequence[Verdict]) -> None:
    """The table, and how many there are of each."""
    width = max(len(one.claim.id) for one in verdicts)
    print(f"\n{'claim':{width}}  {'claimed: p10, median, p90':>28}  {'seen':>9}")
    for claim, verdict, seen, why in verdicts:
        claimed = ", ".join(map(claim.text, claim.published))
        said = f"{verdict}: {why}" if why else verdict
        print(f"{claim.id:{width}}  {claimed:>28}  {seen:>9} {claim.unit:10} {said}")
        print(f"{'':{width}}  {claim.sentence}")
    counts = {name: sum(one.verdict == name for one in verdicts) for name in (YES, NO, IMPOSSIBLE)}
    print("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Measure what the documentation claims.")
    parser.add_argument("--claims", type=Path, default=book.CLAIMS, metavar="FILE")
    parser.add_argument("--claim", action="append", default=[], metavar="ID")
    parser.add_argument("--quick", action="store_true", help="what fits into ten minutes")
    parser.add_argument("--work", type=Path, default=ROOT / "build/reproduce", metavar="DIR")
    parser.add_argument("--results", type=Path, default=book.RESULTS, metavar="DIR")
    options = parser.parse_args(argv)
    try:
        claims, _ = book.load(options.claims)
        ids = [claim.id for claim in claims]
        for name in set(options.claim) - set(ids):
            raise ConfigError(f"there is no claim {name!r}{did_you_mean(name, ids)}")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = [claim for claim in claims if not options.claim or claim.id in options.claim]
    minutes = _QUICK_MINUTES if options.quick else None
    verdicts = reproduce(chosen, options.work, options.results, minutes)
    show(verdicts)
    return int(any(one.verdict == NO for one in verdicts))


if __name__ == "__main__":
    sys.exit(main())
