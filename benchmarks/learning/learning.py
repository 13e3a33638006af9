"""`make learning`: the next run that is missing, alone on the machine; then a table and a figure.

    python -m benchmarks.learning.learning [--list] [--hours H] [--cell NAME] [--json FILE]
                                           [--publish]

A run with doubts (other processes took 5 % of the processor) is made again. It may be stopped at
any time and goes on with the run that was under way. All of it takes about fifteen hours. Results
come to build/learning; --publish joins them in benchmarks/results/learning.json and draws it.
--cell names runs, as 'pong_*_zapex', published or not. With --json all of them are made, and the
file has what build/learning has, and nothing published.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.claims import claims as book
from benchmarks.claims import measure_all
from benchmarks.claims.claims import Measurement
from benchmarks.learning.cells import CELLS, MINUTES, PEERS, Cell
from benchmarks.learning.scores import plot, scores, table
from benchmarks.support.harness import put_json
from benchmarks.support.machine import ROOT

WORK = ROOT / "build/learning"
_GAMES_MINUTES = 3.0
_KEPT = ("variant", "env", "seed", "minutes", "curve", "final_returns")


def _measurement(cell: Cell) -> Measurement:
    needs = ("quiet", "peers-dqn") if cell.variant in PEERS else ("quiet",)
    command = f"python -m benchmarks.learning.learn {cell.name} --json {{json}}"
    return Measurement(cell.name, command, "learning.json", MINUTES + _GAMES_MINUTES, 8, needs)


def join(work: Path, published: Path | None = None) -> dict[str, Any]:
    """The published runs and those of `work`: {"benchmark", "results": {name: run}, "scores"}."""
    report = (published and book.read(published)) or {"benchmark": "learning", "results": {}}
    for name in CELLS:
        one = book.read(work / f"{name}.json")
        if one:
            facts = {key: one[key] for key in ("machine", "during", "doubts")}
            kept = {key: one["results"][key] for key in _KEPT}
            report["results"][name] = {**facts, **kept}
    return {**report, "scores": scores(report["results"])}


def main(argv: Sequence[str] | None = None) -> int:
    """Learn what is missing. Exit code 1 if a run could not be made."""
    parser = argparse.ArgumentParser(description="The next missing learning run.")
    parser.add_argument("--list", action="store_true", help="what is there and what is missing")
    parser.add_argument("--hours", type=float, default=0.0, help="go on with the next for so long")
    parser.add_argument("--cell", action="append", default=[], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="make all, and write them here")
    parser.add_argument("--publish", action="store_true", help="join and draw what is there")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR")
    parser.add_argument("--results", type=Path, default=book.RESULTS, metavar="DIR")
    options = parser.parse_args(argv)
    published = options.results / "learning.json"
    report = join(options.work, published)
    runs = report["results"]
    if options.publish:
        put_json(published, report)
        plot(runs, published.with_suffix(".png"))
    for pattern in options.cell:
        if not any(fnmatch(name, pattern) for name in CELLS):
            parser.error(f"no run is named {pattern}: they are {', '.join(CELLS)}")
    there = join(options.work)["results"] if options.cell or options.json else runs
    chosen = [n for n in CELLS if any(fnmatch(n, p) for p in options.cell or ["*"])]
    missing = [name for name in chosen if name not in there]
    if options.list or options.publish:
        print("\n".join(table(runs)))
        print(f"{len(runs)} of {len(CELLS)} runs; missing: {', '.join(missing) or 'none'}")
        return 0
    git = ["git", "-C", str(ROOT), "diff", "--quiet", "HEAD"]
    if missing and subprocess.run(git, check=False).returncode:
        print("commit first: what is measured must be a commit", file=sys.stderr)
        return 2
    end_s = time.monotonic() + 3600 * options.hours
    for number, name in enumerate(missing, 1):
        one = _measurement(CELLS[name])
        print(f"[{number} of {len(missing)}, {one.minutes:g} min each] {one.command}", flush=True)
        outcome = measure_all.measure(one, options.work, time.monotonic() + 3600)
        print(f"  {name}: {outcome}", flush=True)
        if not outcome.startswith("measured"):
            return 1
        if time.monotonic() > end_s and not options.json:
            break
    if options.json:
        put_json(options.json, join(options.work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
