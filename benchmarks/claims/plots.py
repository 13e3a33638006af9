"""`make plots`: the pictures in benchmarks/results, each drawn from the JSON file of its name.

scale.png has the curves of scale_restarts.json and scale_crowds.json too.

python -m benchmarks.claims.plots [NAME ...]
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import claims as book
from benchmarks.learning import scores
from benchmarks.replay import bench_scale, bench_sumtree
from benchmarks.transport import bench_simulate, bench_transport

PLOTS: dict[str, Callable[[Any, Path], None]] = {
    "sumtree": lambda results, path: bench_sumtree.plot(results["sweep"], path),
    "scale": bench_scale.plot,
    "transport": bench_transport.plot,
    "learning": scores.plot,
    "simulate": lambda results, path: bench_simulate.draw(results["points"], path, quick=False),
}
_MORE = {"scale": ("scale_restarts", "scale_crowds")}


def _results(name: str, results: Path) -> dict[str, Any]:
    """Those of a picture; empty where its own file is missing."""
    own: dict[str, Any] = book.read(results / f"{name}.json").get("results", {})
    for file in _MORE.get(name, ()) if own else ():
        own |= book.read(results / f"{file}.json").get("results", {})
    return own


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; what has not been measured is told and left out."""
    parser = argparse.ArgumentParser(description="Draw results that have been measured.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PLOTS)}")
    parser.add_argument("--results", type=Path, default=book.RESULTS, metavar="DIR")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(PLOTS):
        parser.error(f"no such plot: {', '.join(sorted(unknown))}")
    for name in options.names or PLOTS:
        found = _results(name, options.results)
        if not found:
            print(f"{name}: not measured yet")
            continue
        target = options.results / f"{name}.png"
        PLOTS[name](found, target)
        print(f"{name}: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
