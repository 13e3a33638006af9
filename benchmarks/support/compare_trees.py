"""Two checkouts side by side: the same benchmarks in turns, and which figures left their spread.

    python -m benchmarks.support.compare_trees OLD NEW --bench sumtree --bench "train shares" \
        --rounds 5 --flags "--quick" --json FILE

A benchmark with another name in the new checkout is OLD=NEW, as "train shares=train speed". Each
checkout has its own environment in .venv. The order of the two changes every round. A figure
counts as worse where its new median lies beyond the old rounds' p10..p90 and the old median lies
beyond the new rounds' p10..p90, both in the direction that is bad for it.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.machine import Watch, doubts

# What tells one row of a list from the others.
_NAMES = ("kind", "contender", "name", "system", "where", "bytes", "capacity", "batch", "threads")
_MORE_IS_BETTER = re.compile(r"_per_s|per second|/s\b|_hz|throughput|mb_s|gb_s")
_TIME = re.compile(r"(^|[._])(ns|us|ms|s|p50|seconds|microseconds|milliseconds)($|[._])")
_NO_FIGURE = {"n", "p10", "p90", "p99", "machine", "version", "versions"}


def figures(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(dotted path, number) of every figure in a result; a p50 stands for its percentiles."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in _NO_FIGURE:
                yield from figures(inner, f"{path}.{key}".strip("."))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            row = inner if isinstance(inner, dict) else {}
            names = [str(row[n]) for n in _NAMES if isinstance(row.get(n), str | int)]
            yield from figures(inner, f"{path}[{' '.join(names) or i}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def run_once(tree: Path, bench: str, flags: str, timeout_s: float) -> dict[str, float]:
    """The figures of one run of `zapex bench BENCH` in a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [str(tree / ".venv/bin/zapex"), "bench", *shlex.split(bench), *shlex.split(flags)]
        done = subprocess.run(
            [*command, "--json", str(file)], cwd=tree, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
        if done.returncode or not file.exists():
            raise RuntimeError(f"{shlex.join(command)} in {tree}:\n{done.stdout}{done.stderr}")
        return dict(figures(json.loads(file.read_text())["results"]))


def compare(old: list[float], new: list[float], more_is_better: bool) -> dict[str, Any]:
    """Medians, spreads and the verdict of one figure."""
    points = {name: np.percentile(values, [10, 50, 90]) for name, values in
              (("old", old), ("new", new))}  # fmt: skip
    sign = -1.0 if more_is_better else 1.0
    worse_than_old = sign * points["new"][1] > max(sign * points["old"])
    old_is_better = sign * points["old"][1] < min(sign * points["new"])
    ratio = points["new"][1] / points["old"][1] if points["old"][1] else float("nan")
    rounded = {name: [float(f"{v:.5g}") for v in found] for name, found in points.items()}
    return {
        **rounded,
        "ratio": round(float(ratio), 4),
        "worse": bool(worse_than_old and old_is_better),
    }


def main() -> int:
    """Run and compare. Returns 1 if a figure is worse by more than its spread."""
    parser = argparse.ArgumentParser(description="Compare two checkouts by their benchmarks.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--bench", action="append", required=True, metavar="NAME")
    parser.add_argument("--flags", default="", help="given to every benchmark")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    trees = {"old": options.old.resolve(), "new": options.new.resolve()}
    results: dict[str, Any] = {}
    watch = Watch()
    for bench in options.bench:
        names = dict(zip(trees, 2 * bench.split("="), strict=False))
        seen: dict[str, dict[str, list[float]]] = {"old": {}, "new": {}}
        for turn in range(options.rounds):
            for side in sorted(trees, reverse=bool(turn % 2)):
                print(f"{bench}: round {turn + 1} of {options.rounds}, {side}", flush=True)
                found = run_once(trees[side], names[side], options.flags, options.timeout_s)
                for path, value in found.items():
                    seen[side].setdefault(path, []).append(value)
        results[bench] = {
            path: compare(seen["old"][path], values, bool(_MORE_IS_BETTER.search(path)))
            for path, values in seen["new"].items()
            if path in seen["old"] and (_TIME.search(path) or _MORE_IS_BETTER.search(path))
        }
        worse = {path: row for path, row in results[bench].items() if row["worse"]}
        ratios = [row["ratio"] for row in results[bench].values()]
        print(f"{bench}: {len(ratios)} figures, new/old {np.nanmedian(ratios):.3f} in the middle")
        for path, row in worse.items():
            print(f"  worse: {path}: {row['old']} -> {row['new']} ({row['ratio']:.3f})")
        if options.json:
            during = watch.report()
            report = {
                "benchmark": "compare_trees", "machine": watch.facts, "during": during,
                "doubts": doubts(watch.facts, during, options.rounds),
                "old": _commit(trees["old"]), "new": _commit(trees["new"]),
                "rounds": options.rounds, "flags": options.flags, "results": results,
            }  # fmt: skip
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row["worse"] for rows in results.values() for row in rows.values()))


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
