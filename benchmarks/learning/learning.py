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
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.learning.cells import CELLS
from benchmarks.learning.scores import scores, table
from benchmarks.support.harness import put_json
from benchmarks.support.machine import RESULTS, ROOT

WORK = ROOT / "build/learning"
_TRIES = 3
_KEPT = ("variant", "env", "seed", "minutes", "curve", "final_returns")


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def measure(name: str, work: Path) -> str:
    """Make one run, in up to three tries; why there is no result without doubts, else empty."""
    out, reason = work / f"{name}.json", ""
    command = [sys.executable, "-m", "benchmarks.learning.learn", name, "--json", str(out)]
    for _ in range(_TRIES):
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            return f"exit code {code}"
        reason = "; ".join(_read(out)["doubts"])
        if not reason:
            break
        out.replace(out.with_suffix(".doubtful.json"))
        print(f"  {name}: {reason}", file=sys.stderr)
    return reason


def join(work: Path, published: Path | None = None) -> dict[str, Any]:
    """The published runs and those of `work`: {"benchmark", "results": {name: run}, "scores"}."""
    report = (published and _read(published)) or {"benchmark": "learning", "results": {}}
    for name in CELLS:
        one = _read(work / f"{name}.json")
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
    parser.add_argument("--publish", action="store_true", help="join what is there")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args(argv)
    published = options.results / "learning.json"
    report = join(options.work, published)
    runs = report["results"]
    if options.publish:
        put_json(published, report)
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
        print(f"[{number} of {len(missing)}, 23 min each] {name}", flush=True)
        if reason := measure(name, options.work):
            print(f"{name}: {reason}", file=sys.stderr)
            return 1
        if time.monotonic() > end_s and not options.json:
            break
    if options.json:
        put_json(options.json, join(options.work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
