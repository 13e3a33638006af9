"""Moving experience between processes: zapex over shm, ipc, tcp and CURVE, Redis, and the roofs.

    python -m benchmarks.transport.bench_transport [--quick] [--json FILE] [--plot FILE]
                                                   [--only PART...] [--over KIND...] [--rounds N]

    rows     the Atari messages of arXiv 2110.13506: a push of 800 transitions, 13.17 MB of
             parameters, a batch of 512; beside Redis with the paper's format, and beside the same
             bytes as a bare ZeroMQ message, over a bare socket, and copied by memcpy
    sizes    the same operations on messages of 64 B to 64 MiB
    actors   1 to 8 clients that push at once, then pull
    ends     one end alone, libzmq's router and zapex's (zmtp://, fstack://), and bare sockets as
             roofs: echoes of 64 B, 1 and 8 MiB into slots, cycles, CPU while idle (ends.py)
    paced    an actor's host that pushes 500 transitions a second and a learner that takes 180 ms
             (or 20) for each batch: what share of its time each role spends on communication

Server and clients are processes of their own; as root they live in two network namespaces over a
veth pair that this benchmark makes and removes, otherwise on loopback. rig.py says what
each operation is timed from and to. Latencies in microseconds; a cell is measured once a round,
over a connection of its own, in an order drawn anew, and rounds are joined by their median. --over
keeps these kinds of the rows, beside the roofs and Redis.

fstack:// runs on the library that --fstack-lib and --fstack-conf name, whose port must be reachable
from here. Without them it runs on the tests' stand-in over the kernel's sockets; its rows say so.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support import cycles
from benchmarks.support.harness import Rounds, arguments, goal, in_rounds, write_json
from benchmarks.transport import fstack_place, redis_server
from benchmarks.transport import server as served
from benchmarks.transport.cells import Cells, Result
from benchmarks.transport.end_rows import end_goals, end_table, measure_ends, network_goals
from benchmarks.transport.places import Places
from zapex.net.sockets import SEND_BUFFER_BYTES

SIZES = [64, 4096, 65536, 1 << 20, 16 << 20, 64 << 20]
ACTORS = [1, 2, 4, 8]
NETWORK = ("ipc", "tcp", "tcp+curve")
ZMTP = ("zmtp", "zmtp+curve")
WHAT = ("push", "pull", "sample")
APART = ", network process"  # of its own, and one that adds and samples
TUNED = ", our send buffer"  # a bare message with it, beside one with the system's
ROUNDS = 5
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
REDIS_PUSH_RATIO, REDIS_PULL_RATIO = 1 / 15, 1 / 5
BARE, BARE_SAMPLES = (2.0, 1.5, 1.6), 0.8  # of WHAT, one at a time; of two samples under way

WAIT, SHARE = 0.05, 0.05
STEPS_MS = [180, 20]  # a learner of that net on one core; as if it had a GPU


def measure_rows(
    cells: Cells, setting: served.Setting, rounds: int, with_redis: bool, over: Collection[str] = ()
) -> Rounds:
    """The Atari messages over everything, or over the kinds `over` alone."""
    first = cells.zapex("tcp", setting)  # how many bytes there really are
    sizes = [int(first[f"{what}_bytes"]) for what in WHAT]
    todo: dict[str, Callable[[], Any]] = {
        f"zapex {kind}": lambda kind=kind: cells.zapex(kind, setting)
        for kind in ("shm", *NETWORK, *ZMTP)
    }
    todo |= {
        f"zapex {kind}{APART}": lambda kind=kind: cells.network_process(kind, setting)
        for kind in ZMTP
    }
    if cells.fstack is not None:
        todo |= {
            f"zapex {cells.fstack.name}{keys}": lambda keys=keys: cells.zapex(
                f"fstack{keys}", setting
            )
            for keys in ("", "+curve")
        }
    todo |= {f"zmq {kind}": lambda kind=kind: cells.bare_zmq(kind, sizes) for kind in NETWORK}
    todo |= {
        f"zmq {kind}{TUNED}": lambda kind=kind: cells.bare_zmq(kind, sizes, SEND_BUFFER_BYTES)
        for kind in ("tcp", "tcp+curve")
    }
    if over:
        todo = {name: do for name, do in todo.items() if name.split()[1].rstrip(",") in over}
    todo |= {"tcp": lambda: cells.bare_tcp(sizes), "memcpy": lambda: cells.memcpy(sizes)}
    if with_redis:
        todo["redis"] = lambda: cells.redis()[0]
    found = in_rounds(todo, rounds)
    return Rounds({"bytes": sizes, **found.medians}, found.spreads)


def measure_sizes(cells: Cells, sizes: list[int], rounds: int) -> Rounds:
    """Every operation on messages of each size, and the roofs."""
    todo: dict[str, Callable[[], Any]] = {
        f"zapex {kind} {size}": lambda kind=kind, size=size: cells.zapex(kind, served.of_size(size))
        for kind in ("shm", *NETWORK)
        for size in sizes
    }
    todo |= {f"zmq {kind}": lambda kind=kind: cells.bare_zmq(kind, sizes) for kind in NETWORK}
    todo |= {"tcp": lambda: cells.bare_tcp(sizes), "memcpy": lambda: cells.memcpy(sizes)}
    found = in_rounds(todo, rounds)
    return Rounds({"bytes": sizes, **found.medians}, found.spreads)


def measure_actors(cells: Cells, counts: list[int], rounds: int, with_redis: bool) -> Rounds:
    """Several actors' hosts at once."""
    kinds = [*NETWORK, *(["redis"] if with_redis else [])]
    todo: dict[str, Callable[[], Any]] = {
        f"{kind} {n}": lambda kind=kind, n=n: cells.crowd(kind, n) for kind in kinds for n in counts
    }
    return in_rounds(todo, rounds)


def measure_paced(cells: Cells, rounds: int, seconds: float) -> Rounds:
    """Shares of time of each role while a learner takes its time over each batch."""
    todo = {
        f"{kind} {step_ms} ms": lambda kind=kind, step_ms=step_ms: cells.paced(
            kind, step_ms / 1000, seconds
        )
        for kind in ("tcp", "tcp+curve")
        for step_ms in STEPS_MS
    }
    return in_rounds(todo, rounds)


def row_goals(rows: Result) -> Iterator[str]:
    """Each goal for the Atari messages beside what was measured."""
    for kind in ("tcp", "tcp+curve"):
        if f"zapex {kind}" not in rows:
            continue
        ours = rows[f"zapex {kind}"]
        bares = [(name, rows[f"zmq {kind}{name}"]) for name in ("", TUNED)]
        yield f"{kind}{'' if kind == 'tcp' else ' (the goals hold for tcp)'}"
        times = {what: ours[f"{what}_us"]["p50"] for what in WHAT}
        for name, bare in bares:
            for i, (what, took) in enumerate(times.items()):
                roof = bare[i]["push_us" if what == "push" else "pull_us"]["p50"]
                yield goal(f"{what} / a bare message of its bytes{name}", took / roof, BARE[i])
            speed = ours["sample_mb_per_s"] / bare[2]["pull_mb_per_s"]
            what = f"sample, two under way / bare messages of its bytes, as many{name}"
            yield goal(what, speed, BARE_SAMPLES, least=True)
        if "redis" in rows:
            ratio = times["push"] / rows["redis"]["rpush_us"]["p50"]
            yield goal("push of 800 / Redis's RPUSH of 45 MB", ratio, REDIS_PUSH_RATIO)
            for name, by in (("get_us", "redis-py"), ("get_by_hand_us", "RESP by hand")):
                ratio = times["pull"] / rows["redis"][name]["p50"]
                yield goal(f"pull of 13.17 MB / Redis's GET ({by})", ratio, REDIS_PULL_RATIO)


def paced_goals(shares: Result) -> Iterator[str]:
    """Each goal for the shares of time beside what was measured."""
    for name, found in shares.items():
        load = f"{name} a step ({found['load']:.0%} of all cores busy)"
        if name.endswith(f" {STEPS_MS[0]} ms"):
            yield goal(f"the learner waits, {load}", found["learner_wait"], WAIT)
        for role in ("actor", "replay", "learner"):
            share = found[f"{role}_communication"]
            yield goal(f"{role}'s communication, {load}", share, SHARE)


def row_table(rows: Result) -> Table:
    """The Atari messages over everything."""
    table = Table(title="Atari messages: milliseconds (MB/s)")
    whats = ("push", "pull", "sample", "update", "push_and_sample")
    for name in ("", "push of 800", "pull", "sample(512)", "update", "push + sample"):
        table.add_column(name, justify="right" if name else "left")
    for name, found in rows.items():
        if name.startswith("zapex"):
            table.add_row(name, *(_cell(found, what) for what in whats))
    for name, found in rows.items():
        if isinstance(found, list) and name != "bytes":
            push, pull, sample = (
                _time(found[i][f"{way}_us"]["p50"], rows["bytes"][i])
                for i, way in enumerate(("push", "pull", "pull"))
            )
            rested = found[1].get("rested_pull_us")
            pull += f", rested {rested['p50'] / 1000:.2f}" if rested else ""
            more = found[2].get("pull_mb_per_s")
            sample += f", on {more:,.0f} MB/s" if more else ""
            table.add_row(_bare(name), push, pull, sample)
    if "redis" in rows:
        redis = rows["redis"]
        push = _time(redis["rpush_us"]["p50"], redis_server.PAIRS_BYTES)
        for name, way, pushed in (("", "get_us", push), (", by hand", "get_by_hand_us", "")):
            pull = _time(redis[way]["p50"], served.PARAMETER_BYTES)
            table.add_row(f"Redis{name}", pushed, pull)
    return table


def size_table(sizes: Result) -> Table:
    """Every operation on messages of each size."""
    table = Table(title="by size: push / pull / sample, milliseconds")
    table.add_column("")
    for size in sizes["bytes"]:
        table.add_column(_bytes(size), justify="right")
    ours = {
        f"zapex {kind}": [sizes[f"zapex {kind} {size}"] for size in sizes["bytes"]]
        for kind in ("shm", *NETWORK)
    }
    bare = {kind: sizes[kind] for kind in (*(f"zmq {kind}" for kind in NETWORK), "tcp", "memcpy")}
    for rows, ways in ((ours, WHAT), (bare, ("push", "pull"))):
        for name, found in rows.items():
            cells = (" / ".join(f"{one[f'{way}_us']['p50'] / 1000:.3g}" for way in ways)
                     for one in found)  # fmt: skip
            table.add_row(name if rows is ours else _bare(name), *cells)
    return table


def actor_table(actors: Result) -> Table:
    """Several actors at once."""
    table = Table(title="several actors at once: push of 800 ms, all together MB/s, pull ms")
    table.add_column("")
    counts = sorted({int(name.split()[1]) for name in actors})
    for count in counts:
        table.add_column(str(count), justify="right")
    for kind in dict.fromkeys(name.split()[0] for name in actors):
        table.add_row(kind, *(
            f"{one['push_us'] / 1000:.1f}, {one['push_mb_per_s']:,.0f}, {one['pull_us'] / 1000:.1f}"
            for one in (actors[f"{kind} {count}"] for count in counts)
        ))  # fmt: skip
    return table


def show(results: Result, cycles_per_s: float) -> None:
    """Tables and goals of what was measured."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    ends = partial(end_table, cycles_per_s=cycles_per_s)
    tables = {"rows": row_table, "sizes": size_table, "actors": actor_table, "ends": ends}
    for name, table in tables.items():
        if name in results:
            console.print(table(results[name]))
    if "rows" in results:
        print("\n".join([*row_goals(results["rows"]), *network_goals(results["rows"])]))
    if "ends" in results:
        print("\n".join(end_goals(results["ends"])))
    print("\n".join(paced_goals(results.get("paced", {}))))


def _bare(name: str) -> str:
    return name if name == "memcpy" else f"bare {name}"


def _bytes(n: float) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def _time(us: float, nbytes: float) -> str:
    return f"{us / 1000:.2f} ({nbytes / us:,.0f}), {_bytes(nbytes)}"


def _cell(found: Result, what: str) -> str:
    if what == "push_and_sample":  # not over shm
        return f"{found[f'{what}_us']['p50'] / 1000:.2f}" if f"{what}_us" in found else ""
    text = _time(found[f"{what}_us"]["p50"], found[f"{what}_bytes"])
    more = found.get(f"{what}_mb_per_s")
    return text + (f", on {more:,.0f} MB/s" if more else "")


def plot(results: Result, path: Path) -> None:
    """Latency by size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = results["sizes"]
    _, axes = pyplot.subplots(1, 3, figsize=(15, 5), sharey=True)
    for axis, what in zip(axes, WHAT, strict=True):
        for kind in ("shm", *NETWORK):
            found = [sizes[f"zapex {kind} {int(size)}"] for size in sizes["bytes"]]
            at = sizes["bytes"] if what != "sample" else [one["sample_bytes"] for one in found]
            axis.plot(at, [one[f"{what}_us"]["p50"] for one in found], "o-", label=f"zapex {kind}")
        way = "push" if what == "push" else "pull"
        for kind in ("zmq tcp", "tcp", "memcpy"):
            axis.plot(sizes["bytes"], [one[f"{way}_us"]["p50"] for one in sizes[kind]], "--",
                      label=f"bare {kind}" if kind != "memcpy" else kind)  # fmt: skip
        axis.set(xscale="log", yscale="log", title=what, xlabel="bytes")
    axes[0].set_ylabel("microseconds (median)")
    axes[0].legend()
    pyplot.savefig(path, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> int:
    """What a transport costs, beside Redis, a bare message, the line and memcpy."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw latency by size (PNG)")
    parser.add_argument("--only", nargs="+", choices=["rows", "sizes", "actors", "ends", "paced"])
    kinds = ["shm", *NETWORK, *ZMTP]
    parser.add_argument("--over", nargs="+", choices=kinds, default=[], help="rows of these alone")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="connections for each cell")
    fstack_place.add_flags(parser)
    options = parser.parse_args(argv)
    served.warm()
    missing = redis_server.missing()
    if missing:
        print(f"without Redis: {missing}")
    fstack = fstack_place.find(options)
    if isinstance(fstack, str):
        print(f"without fstack://: {fstack}")
        fstack = None
    congestion = CONGESTION.read_text().strip()
    cycles_per_s, counted = cycles.per_second()
    print(f"{cycles_per_s / 1e9:.2f} cycles a nanosecond of processor time ({counted})")
    quick = options.quick
    seconds, rounds = (0.05, 1) if quick else (0.4, options.rounds)
    setting = served.atari(capacity=8_000) if quick else served.atari()
    sizes, counts = (SIZES[:3:2], ACTORS[1:2]) if quick else (SIZES, ACTORS)
    with Places() as places:
        print(f"one run on {places.kind}, congestion control {congestion}")
        cells, small = Cells(places, seconds, fstack), Cells(places, seconds / 2)
        parts: dict[str, Callable[[], Rounds]] = {
            "rows": lambda: measure_rows(cells, setting, rounds, not missing, options.over),
            "sizes": lambda: measure_sizes(small, sizes, rounds),
            "actors": lambda: measure_actors(cells, counts, rounds, not missing),
            "ends": lambda: measure_ends(cells, rounds, *[("blocking",)] * quick),
            "paced": lambda: measure_paced(cells, rounds, 1.0 if quick else 8.0),
        }
        found = {name: parts[name]() for name in options.only or parts}
    results = {name: one.medians for name, one in found.items()}
    show(results, cycles_per_s)
    write_json(
        options, "transport", results, rounds=rounds, place=places.kind,
        congestion_control=congestion, cycles_per_s=cycles_per_s, cycles_counted_by=counted,
        spreads={name: one.spreads for name, one in found.items()},
    )  # fmt: skip
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
