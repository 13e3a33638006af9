"""The sum tree against the memory's own speed, and against other libraries' trees.

    python -m benchmarks.replay.bench_sumtree [--quick] [--peers] [--json FILE]

Every figure is nanoseconds an item, the median over interleaved rounds. Each call takes places that
the calls before it did not:

    fresh   calls follow each other, so the upper levels stay in the caches
    cold    before each call the caches are swept, as a learner's step does between two calls; then
            a call with one item fetches the code, so that what is left is the tree's own memory

roof is the least that any tree with so many leaves must do: at the places just sampled, one
independent 8-byte read and one read-modify-write an item, in an array of the leaves' size. "x roof"
is the pair (a sample, then an update of the same items) less the random-number generator, over it.

With --peers all trees draw from the same uniforms, one from each of 512 equal parts, in ascending
order, as zapex does by default. The headline is the cold case: a learner's step lies between two
draws.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.peers.trees import CONTENDERS
from benchmarks.support.contenders import Contenders, add_peer_arguments
from benchmarks.support.harness import (
    CacheSweeper,
    arguments,
    clock_ns,
    interleaved,
    percentiles,
    write_json,
)
from zapex.machine.jit import kernel
from zapex.sumtree_numba import SumTree

CAPACITIES = [2**n for n in (10, 12, 14, 16, 18, 20, 21, 22, 24)]
BATCHES = [1, 8, 64, 512, 4096]
HEADLINE = (2**21, 512)
TIMED = ["pair", "rng", "roof"]


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

    def pair() -> float:
        sampling, places = timed(draw, batch)
        return sampling + timed(tree.update, places, rng.random(batch) + 1e-6)[0]

    def roof() -> float:
        places = draw(batch)
        reading, _ = timed(lambda places: _read(array, places, out), places)
        return reading + timed(lambda places: _modify(array, places), places)[0]

    work = {"pair": pair, "rng": lambda: timed(rng.random, batch)[0], "roof": roof}

    def repeated(case: Callable[[], float]) -> Callable[[], float]:
        return lambda: sum(case() for _ in range(calls)) / calls

    times = interleaved({name: repeated(work[name]) for name in TIMED}, rounds)
    result: dict[str, Any] = {name: percentiles(times[name], batch) for name in TIMED}
    net = result["pair"]["p50"] - result["rng"]["p50"]
    result["pair_over_roof"] = round(net / result["roof"]["p50"], 2)
    return result


def rounds_of(quick: bool) -> dict[str, int]:
    """Rounds of the sweep, by state of the caches."""
    return {"fresh": 10, "cold": 3} if quick else {"fresh": 200, "cold": 15}


def sweep_sizes(quick: bool) -> list[dict[str, Any]]:
    """Every capacity with every batch, fresh and cold; prints the table as it goes."""
    capacities = [2**10, 2**18] if quick else CAPACITIES
    batches = [1, HEADLINE[1]] if quick else BATCHES
    rounds = rounds_of(quick)
    sweeper = CacheSweeper(quick)
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


def compare_peers(python: str, quick: bool) -> dict[str, Any]:
    """The headline's pair by every contender that is installed, cold and fresh; prints the table.

    {name: {"version", "stratified": {state: {"sample", "update", "pair", "places"}}}}. places: the
    mean of all drawn indices, the same for all that drew the same.
    """
    capacity, batch = (2**18 if quick else HEADLINE[0]), HEADLINE[1]
    print(f"\n{capacity} leaves, batch {batch}: nanoseconds an item, each in a fresh process")
    pythons = {name: sys.executable if name == "zapex" else python for name in CONTENDERS}
    turns = {"cold": (3, 3), "fresh": (5, 20)} if quick else {"cold": (20, 5), "fresh": (40, 25)}
    with Contenders("benchmarks.peers.trees", pythons, capacity, quick) as contenders:
        results = contenders.missing
        for state, (rounds, calls) in turns.items():
            words = batch, calls, int(state == "cold")
            for name, rows in contenders.in_turns(rounds, *words).items():
                result = results.setdefault(name, {"version": contenders.versions[name]})
                result.setdefault("stratified", {})[state] = {
                    "sample": percentiles(rows[:, 0], batch),
                    "update": percentiles(rows[:, 1], batch),
                    "pair": percentiles(rows[:, :2].sum(1), batch),
                    "places": float(rows[:, 2].mean()) / batch,
                }
    for name, result in results.items():
        if "missing" in result:
            print(f"{name:16} missing: {result['missing']}")
            continue
        line = f"{name:16} {result['version']:10}"
        for state, found in result["stratified"].items():
            sample, update, pair = (found[k]["p50"] for k in ("sample", "update", "pair"))
            times = pair / results["zapex"]["stratified"][state]["pair"]["p50"]
            line += f"  {state} {sample:7.1f} + {update:6.1f} = {pair:7.1f} ({times:4.1f} x)"
        print(line)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """How fast the sum tree is, as a multiple of the memory's own speed."""
    parser = arguments(main.__doc__ or "", pins=True)
    add_peer_arguments(parser)
    options = parser.parse_args(argv)
    results: dict[str, Any] = {"sweep": sweep_sizes(options.quick)}
    if options.peers:
        results["peers"] = compare_peers(options.peers_python, options.quick)
    rounds = min(rounds_of(options.quick).values())
    write_json(options, "sumtree", results, rounds=rounds, unit="ns an item")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
