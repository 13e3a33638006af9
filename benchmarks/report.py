"""`make results`: the tables of docs/results.md and the pictures, from benchmarks/results.

python -m benchmarks.report
"""

import json
import sys
from typing import Any

from benchmarks.learning import scores
from benchmarks.replay import bench_scale, bench_sumtree
from benchmarks.support.machine import RESULTS, ROOT
from benchmarks.transport import bench_transport

PAGE = ROOT / "docs/results.md"


def load(name: str) -> Any:
    """A stored result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def draw() -> None:
    """Draw all pictures anew."""
    bench_sumtree.plot(load("sumtree")["results"]["sweep"], RESULTS / "sumtree.png")
    parts = [load(name)["results"] for name in ("scale", "scale_restarts", "scale_crowds")]
    bench_scale.plot({k: v for part in parts for k, v in part.items()}, RESULTS / "scale.png")
    bench_transport.plot(load("transport")["results"], RESULTS / "transport.png")
    scores.plot(load("learning")["results"], RESULTS / "learning.png")


def main() -> int:
    """Write everything."""
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
