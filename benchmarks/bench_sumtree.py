"""The sum tree against the memory's own speed, and against other libraries' trees.

    python -m benchmarks.bench_sumtree [--quick] [--peers] [--json FILE] [--plot PNG]

Every figure is nanoseconds an item, the median over interleaved rounds. Each call takes places that
the calls before it did not:

    fresh   calls follow each other, so the upper levels stay in the caches
    cold    before each call the caches are swept, as a learner's step does between two calls; then
            a call with one item fetches the code, so that what is left is the tree's own memory

roof is the least that any tree with so many leaves must do: at the places just sampled, one
independent 8-byte read and one read-modify-write an item, in an array of the leaves' size. "x roof"
is the pair (a sample, then an update of the same items) less the random-number generator, over it.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import (
    ROOT,
    CacheSweeper,
    arguments,
    cache_bytes,
    clock_ns,
    interleaved,
    percentiles,
    write_json,
)
from benchmarks.peer_trees import CONTENDERS
from zapex.jit import kernel
from zapex.sumtree_numba import SumTree

CAPACITIES = [2**n for n in (10, 12, 14, 16, 18, 20, 21, 22, 24)]
BATCHES = [1, 8, 64, 512, 4096]
HEADLINE = (2**21, 512)
TIMED = ["find", "update", "sample", "pair", "rng", "roof"]


@kernel
def _read(array, places, out):  # type: ignore[no-untyped-def]
    for i in range(len(places)):
        out[i] = array[np.uint64(places[i])]


@kernel
def _modify(array, places):  # type: ignore[no-untyped-def]
    for i in range(len(places)):
        array[np.uint64(places[i])] += 1.0


def measure(
    tree: SumTree, batch: int, rounds: int, calls: int, sweep: Callable[[], None]
) -> dict[str, Any]:
    """Percentiles of every timed thing, in nanoseconds an item; each round takes `calls` calls."""
    rng = np.random.default_rng(batch)
    array = rng.random(tree.capacity)
    out = np.empty(batch)

    def timed(work: Callable[..., Any], *inputs: Any) -> tuple[float, Any]:
        sweep()
        work(*(given[:1] if isinstance(given, np.ndarray) else 1 for given in inputs))
        start = clock_ns()
        result = work(*inputs)
        return clock_ns() - start, result

    def draw(n: int) -> np.ndarray:
        return tree.sample(n, rng)[0]

    def priorities() -> np.ndarray:
        return rng.random(batch) + 1e-6

    def pair() -> float:
        sampling, places = timed(draw, batch)
        return sampling + timed(tree.update, places, priorities())[0]

    def roof() -> float:
        places = draw(batch)
        reading, _ = timed(lambda places: _read(array, places, out), places)
        return reading + timed(lambda places: _modify(array, places), places)[0]

    def update() -> float:
        return timed(tree.update, rng.integers(0, tree.capacity, batch), priorities())[0]

    work = {
        "find": lambda: timed(tree.find, rng.random(batch) * tree.total)[0],
        "update": update,
        "sample": lambda: timed(draw, batch)[0],
        "pair": pair,
        "rng": lambda: timed(rng.random, batch)[0],
        "roof": roof,
    }

    def repeated(case: Callable[[], float]) -> Callable[[], float]:
        return lambda: sum(case() for _ in range(calls)) / calls

    times = interleaved({name: repeated(work[name]) for name in TIMED}, rounds)
    result: dict[str, Any] = {name: percentiles(times[name], batch) for name in TIMED}
    net = result["pair"]["p50"] - result["rng"]["p50"]
    result["pair_over_roof"] = round(net / result["roof"]["p50"], 2)
    return result


def sweep_sizes(quick: bool) -> list[dict[str, Any]]:
    """Every capacity with every batch, fresh and cold; prints the table as it goes."""
    capacities = [2**10, HEADLINE[0]] if quick else CAPACITIES
    batches = [1, HEADLINE[1]] if quick else BATCHES
    rounds = {"fresh": 20, "cold": 3} if quick else {"fresh": 200, "cold": 15}
    sweeper = CacheSweeper()
    print(
        f"{'leaves':>9} {'batch':>6}       " + "".join(f"{name:>9}" for name in TIMED) + "   x roof"
    )
    cells = []
    for capacity in capacities:
        rng = np.random.default_rng(capacity)
        tree = SumTree(capacity)
        tree.update(np.arange(capacity), rng.random(capacity) + 1e-6)
        for batch in batches:
            cell: dict[str, Any] = {"capacity": capacity, "batch": batch}
            for state, calls, sweep in (
                ("fresh", max(1, 32 // batch), lambda: None),
                ("cold", 1, sweeper.sweep),
            ):
                cell[state] = measured = measure(tree, batch, rounds[state], calls, sweep)
                medians = "".join(f"{measured[name]['p50']:9.1f}" for name in TIMED)
                ratio = f"{measured['pair_over_roof']:8.1f}"
                print(f"{capacity:9} {batch:6} {state:5} {medians} {ratio}", flush=True)
            cells.append(cell)
    return cells


class Contender:
    """A tree in a process of its own, asked for rounds over its standard input."""

    def __init__(self, name: str, python: str, capacity: int) -> None:
        sweep_bytes = 2 * max(cache_bytes().values(), default=32 << 20)
        script = Path(__file__).parent / "peer_trees.py"
        self._process = subprocess.Popen(
            [python, str(script), name, str(capacity), str(sweep_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self.status, _, self.detail = self._answer().partition(" ")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip() or "missing its process died"

    def work(self, batch: int, calls: int, cold: bool) -> np.ndarray:
        """(calls, 2) nanoseconds of sample and update."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch} {calls} {int(cold)}\n")
        self._process.stdin.flush()
        return np.array(json.loads(self._answer()), float)

    def close(self) -> None:
        self._process.kill()  # it holds nothing, and some libraries take long to leave
        self._process.communicate()


def compare_peers(python: str, quick: bool) -> dict[str, Any]:
    """The headline's pair by every contender that is installed; prints the table."""
    capacity, batch = HEADLINE
    print(f"\n{capacity} leaves, batch {batch}: nanoseconds an item, each in a fresh process")
    contenders = {
        name: Contender(name, sys.executable if name == "zapex" else python, capacity)
        for name in CONTENDERS
    }
    results: dict[str, Any] = {}
    try:
        for name, contender in contenders.items():
            if contender.status != "ready":
                results[name] = {"missing": contender.detail}
        present = {name: c for name, c in contenders.items() if name not in results}
        for state, rounds, calls in (
            (("fresh", 5, 20), ("cold", 3, 3)) if quick else (("fresh", 40, 25), ("cold", 8, 5))
        ):
            times: dict[str, list[np.ndarray]] = {name: [] for name in present}
            for turn in range(rounds + 1):
                for name in random.Random(turn).sample(sorted(present), len(present)):
                    measured = present[name].work(batch, calls, state == "cold")
                    if turn:  # the first one compiles and warms up
                        times[name].append(measured)
            for name, contender in present.items():
                both = np.concatenate(times[name])
                result = results.setdefault(name, {"version": contender.detail})
                result[state] = {
                    "sample": percentiles(both[:, 0], batch),
                    "update": percentiles(both[:, 1], batch),
                    "pair": percentiles(both.sum(1), batch),
                }
    finally:
        for contender in contenders.values():
            contender.close()
    print_peers(results)
    return results


def print_peers(results: dict[str, Any]) -> None:
    """One line a contender: sample + update, and the pair as a multiple of ours."""
    for name, result in results.items():
        if "missing" in result:
            print(f"{name:16} missing: {result['missing']}")
            continue
        line = f"{name:16} {result['version']:10}"
        for state in ("fresh", "cold"):
            sample, update, pair = (result[state][k]["p50"] for k in ("sample", "update", "pair"))
            ratio = pair / results["zapex"][state]["pair"]["p50"]
            line += f"  {state} {sample:7.1f} + {update:6.1f} = {pair:7.1f} ({ratio:4.1f} x ours)"
        print(line)


def plot(cells: list[dict[str, Any]], path: Path) -> None:
    """The pair and the roofline over capacity and over batch, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    colours = {"fresh": "tab:blue", "cold": "tab:orange"}
    for axis, x, fixed, value in (
        (axes[0], "capacity", "batch", HEADLINE[1]),
        (axes[1], "batch", "capacity", HEADLINE[0]),
    ):
        chosen = [cell for cell in cells if cell[fixed] == value]
        xs = [cell[x] for cell in chosen]
        for state, colour in colours.items():
            for name, style in (("pair", "o-"), ("roof", "--")):
                ys = [cell[state][name]["p50"] for cell in chosen]
                axis.plot(xs, ys, style, color=colour, label=f"{name}, {state}", markersize=4)
        axis.set(xscale="log", yscale="log", xlabel=x, title=f"{fixed} {value}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ns an item")
    axes[0].legend()
    figure.suptitle("sample + update of the sum tree, and the memory's own speed")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """How fast the sum tree is, as a multiple of the memory's own speed."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--peers", action="store_true", help="add other libraries' trees")
    own = ROOT / ".peers/bin/python"
    parser.add_argument(
        "--peers-python",
        metavar="PYTHON",
        default=str(own) if own.exists() else sys.executable,
        help="the interpreter that has them (default: .peers/ if it is there)",
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the sweep")
    options = parser.parse_args(argv)
    if options.pin is not None:
        os.sched_setaffinity(0, {options.pin})
    results: dict[str, Any] = {"sweep": sweep_sizes(options.quick)}
    if options.peers:
        results["peers"] = compare_peers(options.peers_python, options.quick)
    if options.plot:
        plot(results["sweep"], options.plot)
    if options.json:
        write_json(options.json, "sumtree", results, unit="ns an item", quick=options.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
