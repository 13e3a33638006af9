"""Moving experience between processes: zapex over shm, ipc, tcp and CURVE, Redis, and the roofs.

    python -m benchmarks.bench_transport [--quick] [--json FILE] [--plot FILE]

    rows     the Atari messages of arXiv 2110.13506: a push of 800 transitions, 13.17 MB of
             parameters, a batch of 512; beside Redis with the paper's format, and beside the same
             bytes as a bare ZeroMQ message, over a bare socket, and copied by memcpy
    sizes    the same operations on messages of 64 B to 64 MiB
    actors   1 to 8 clients that push at once, then pull
    paced    an actor's host that pushes 500 transitions a second and a learner that takes 180 ms
             (or 20) for each batch: what share of its time each role spends on communication

Server and clients are processes of their own; as root they live in two network namespaces over a
veth pair that this benchmark makes and removes, otherwise on loopback. transport_rig.py says what
each operation is timed from and to. Latencies in microseconds; a cell is measured once a round, in
an order drawn anew, and rounds are joined by their median.
"""

import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import transport_paced, transport_redis, transport_roofs
from benchmarks import transport_rig as rig
from benchmarks import transport_server as served
from benchmarks._harness import arguments, goal, write_json
from benchmarks._namespaces import Places, Process
from zapex.metrics import RoleMetrics
from zapex.shm_segment import Segment
from zapex.zmq_socket import SEND_BUFFER_BYTES

SIZES = [64, 4096, 65536, 1 << 20, 16 << 20, 64 << 20]
ACTORS = [1, 2, 4, 8]
NETWORK = ("ipc", "tcp", "tcp+curve")
WHAT = ("push", "pull", "sample")
TUNED = ", our send buffer"  # a bare message with it, beside one with the system's
ROUNDS = 3
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
REDIS_PUSH_RATIO, REDIS_PULL_RATIO, BARE_PUSH, BARE_SAMPLE = 1 / 15, 1 / 5, 1.3, 0.8

WAIT, SHARE = 0.05, 0.05
STEPS_MS = [180, 20]  # a learner of that net on one core; as if it had a GPU

Result = dict[str, Any]
_FORK = multiprocessing.get_context("fork")


class Cells:
    """Every measurement, each with a server and clients of its own."""

    def __init__(self, places: Places, seconds: float) -> None:
        self._places, self._seconds = places, seconds

    def _url(self, kind: str) -> str:
        if kind == "ipc":
            return f"ipc://{self._places.path(f'link-{self._places.port()}')}"
        return f"tcp://{self._places.address}:{self._places.port()}"

    def _with_server(self, server: Callable[[], Any], *clients: Callable[[], Any]) -> list[Any]:
        serving = self._places.start(0, server)
        running: list[Process] = []
        try:
            running = [self._places.start(1, client) for client in clients]
            return [running.pop(0).result() for _ in clients]
        finally:
            for process in [serving, *running]:
                process.kill()

    def zapex(self, kind: str, setting: served.Setting) -> Result:
        """Every operation of one client."""
        seconds = self._seconds
        if kind == "shm":
            host = served.make_host(setting)
            return self._with_server(
                lambda: served.serve_shm(setting, host),
                lambda: rig.measure_shm(rig.ShmClient(setting, host, 0), setting, seconds),
            )[0]
        url, security = self._url(kind), self._security(kind)
        return self._with_server(
            lambda: served.serve_network(setting, url, security["replay"]),
            lambda: rig.measure_network(
                rig.NetworkClient(setting, url, security, 0), setting, seconds
            ),
        )[0]

    def _security(self, kind: str) -> dict[str, Any]:
        return served.securities(self._places.path("keys") if kind == "tcp+curve" else None)

    def bare_zmq(
        self, kind: str, sizes: list[int], send_buffer_bytes: int | None = None
    ) -> list[Result]:
        """The same bytes as one bare message."""
        url, keys = self._url(kind), None
        if kind == "tcp+curve":
            import zmq

            keys = zmq.curve_keypair()
        return self._with_server(
            lambda: transport_roofs.zmq_server(url, keys, send_buffer_bytes),
            lambda: transport_roofs.zmq_client(
                url, sizes, self._seconds, keys and keys[0], send_buffer_bytes
            ),
        )[0]

    def bare_tcp(self, sizes: list[int]) -> list[Result]:
        """The same bytes over a socket."""
        address, port = self._places.address, self._places.port()
        return self._with_server(
            lambda: transport_roofs.tcp_server(address, port),
            lambda: transport_roofs.tcp_client(address, port, sizes, self._seconds),
        )[0]

    def memcpy(self, sizes: list[int]) -> list[Result]:
        """The same bytes copied."""
        return self._places.start(1, lambda: transport_roofs.memcpy(sizes, self._seconds)).result()

    def redis(self, actors: int = 1) -> list[Result]:
        """Redis with the paper's messages, of each of several actors at once."""
        address, port = self._places.address, self._places.port()
        client = lambda: transport_redis.client(  # noqa: E731
            address, port, self._seconds, served.PARAMETER_BYTES
        )
        directory = str(self._places.path("."))
        return self._with_server(
            lambda: transport_redis.server(address, port, directory), *[client] * actors
        )

    def paced(self, kind: str, step_s: float, seconds: float) -> Result:
        """Roles' shares of time beside a learner that takes `step_s` for a batch."""
        setting, url, security = served.atari(2), self._url(kind), self._security(kind)
        words = Segment.create("bench-metrics", RoleMetrics.required_bytes()).buffer
        learned = Segment.create("bench-learned", 4096).buffer[:8].view(np.int64)
        learner, actor = self._with_server(
            lambda: served.serve_network(setting, url, security["replay"], words),
            lambda: transport_paced.learner(
                setting, url, security, step_s, seconds, words, learned
            ),
            lambda: transport_paced.actor(setting, url, security, seconds, learned),
        )
        return {**learner, **actor}

    def crowd(self, kind: str, actors: int) -> Result:
        """Several relays at once: all push, then all pull."""
        if kind == "redis":
            found = self.redis(actors)
            pushed = sum(one["rpush_per_s"] for one in found) * transport_redis.PAIRS_BYTES
            return {
                "push_us": _mean([one["rpush_us"]["p50"] for one in found]),
                "push_mb_per_s": pushed / 1e6,
                "push_bytes": transport_redis.PAIRS_BYTES,
                "pull_us": _mean([one["get_us"]["p50"] for one in found]),
            }
        setting = served.atari(actors, 16_000 + 4_000 * actors)
        url, security, barrier = self._url(kind), self._security(kind), _FORK.Barrier(actors)

        def client(number: int) -> Result:
            ours = rig.NetworkClient(setting, url, security, number)
            for _ in range(4):
                ours.push()
            barrier.wait(60)
            latency = transport_roofs.timed(ours.push, self._seconds)
            barrier.wait(60)
            speed = transport_roofs.rate(ours.push_on, 2 * self._seconds)
            ours.push()
            barrier.wait(60)
            return {
                "push_us": latency["p50"], "push_mb_per_s": speed, "push_bytes": ours.push_bytes,
                "pull_us": transport_roofs.pulls(ours.pull, self._seconds)["p50"],
            }  # fmt: skip

        found = self._with_server(
            lambda: served.serve_network(setting, url, security["replay"]),
            *[lambda n=n: client(n) for n in range(actors)],
        )
        joined = {key: _mean([one[key] for one in found]) for key in ("push_us", "pull_us")}
        speed = sum(one["push_mb_per_s"] for one in found)
        return {**joined, "push_mb_per_s": speed, "push_bytes": found[0]["push_bytes"]}


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


def median(found: Sequence[Any]) -> Any:
    """Of several rounds of one cell, each figure's median."""
    if isinstance(found[0], dict):
        return {name: median([one[name] for one in found]) for name in found[0]}
    if isinstance(found[0], list):
        return [median(column) for column in zip(*found, strict=True)]
    return float(np.median(found))


def interleaved(cells: dict[str, Callable[[], Any]], rounds: int, say: bool) -> dict[str, Any]:
    """Every cell once a round, in an order drawn anew; {name: medians}."""
    found: dict[str, list[Any]] = {name: [] for name in cells}
    shuffler = random.Random(0)
    for turn in range(rounds):
        for name in shuffler.sample(list(cells), len(cells)):
            start = time.monotonic()
            found[name].append(cells[name]())
            if say:
                took = f"{time.monotonic() - start:.1f} s"
                print(f"  round {turn + 1} of {rounds}: {name} {took}", file=sys.stderr)
    return {name: median(rounds_of) for name, rounds_of in found.items()}


def measure_rows(cells: Cells, rounds: int, with_redis: bool) -> Result:
    """The Atari messages over everything."""
    setting = served.atari()
    first = cells.zapex("tcp", setting)  # how many bytes there really are
    sizes = [int(first[f"{what}_bytes"]) for what in WHAT]
    todo: dict[str, Callable[[], Any]] = {
        f"zapex {kind}": lambda kind=kind: cells.zapex(kind, setting) for kind in ("shm", *NETWORK)
    }
    todo |= {f"zmq {kind}": lambda kind=kind: cells.bare_zmq(kind, sizes) for kind in NETWORK}
    todo |= {
        f"zmq {kind}{TUNED}": lambda kind=kind: cells.bare_zmq(kind, sizes, SEND_BUFFER_BYTES)
        for kind in ("tcp", "tcp+curve")
    }
    todo |= {"tcp": lambda: cells.bare_tcp(sizes), "memcpy": lambda: cells.memcpy(sizes)}
    if with_redis:
        todo["redis"] = lambda: cells.redis()[0]
    return {"bytes": sizes, **interleaved(todo, rounds, say=True)}


def measure_sizes(cells: Cells, sizes: list[int]) -> Result:
    """Every operation on messages of each size, and the roofs."""
    todo: dict[str, Callable[[], Any]] = {
        f"zapex {kind} {size}": lambda kind=kind, size=size: cells.zapex(kind, served.of_size(size))
        for kind in ("shm", *NETWORK)
        for size in sizes
    }
    todo |= {f"zmq {kind}": lambda kind=kind: cells.bare_zmq(kind, sizes) for kind in NETWORK}
    todo |= {"tcp": lambda: cells.bare_tcp(sizes), "memcpy": lambda: cells.memcpy(sizes)}
    return {"bytes": sizes, **interleaved(todo, 1, say=True)}


def measure_actors(cells: Cells, counts: list[int], with_redis: bool) -> Result:
    """Several actors' hosts at once."""
    kinds = [*NETWORK, *(["redis"] if with_redis else [])]
    todo: dict[str, Callable[[], Any]] = {
        f"{kind} {n}": lambda kind=kind, n=n: cells.crowd(kind, n) for kind in kinds for n in counts
    }
    return interleaved(todo, 1, say=True)


def measure_paced(cells: Cells, rounds: int, seconds: float) -> Result:
    """Shares of time of each role while a learner takes its time over each batch."""
    todo = {
        f"{kind} {step_ms} ms": lambda kind=kind, step_ms=step_ms: cells.paced(
            kind, step_ms / 1000, seconds
        )
        for kind in ("tcp", "tcp+curve")
        for step_ms in STEPS_MS
    }
    return interleaved(todo, rounds, say=True)


def goals(rows: Result, paced: Result) -> list[str]:
    """Each row of the issue beside what was measured."""
    lines = []
    for kind in ("tcp", "tcp+curve"):
        ours = rows[f"zapex {kind}"]
        bares = [(name, rows[f"zmq {kind}{name}"]) for name in ("", TUNED)]
        lines.append(f"{kind}{'' if kind == 'tcp' else ' (the goals hold for tcp)'}")
        push, pull = ours["push_us"]["p50"], ours["pull_us"]["p50"]
        if "redis" in rows:
            redis = rows["redis"]
            ratio = push / redis["rpush_us"]["p50"]
            lines.append(goal("push of 800 / Redis's RPUSH of 45 MB", ratio, REDIS_PUSH_RATIO))
        for name, bare in bares:
            ratio = push / bare[0]["push_us"]["p50"]
            what = f"push of 800 / a bare message of its bytes{name}"
            lines.append(goal(what, ratio, BARE_PUSH))
        if "redis" in rows:
            for name, by in (("get_us", "redis-py"), ("get_by_hand_us", "RESP by hand")):
                ratio = pull / redis[name]["p50"]
                what = f"pull of 13.17 MB / Redis's GET ({by})"
                lines.append(goal(what, ratio, REDIS_PULL_RATIO))
        for name, bare in bares:
            speed = ours["sample_mb_per_s"] / bare[2]["pull_mb_per_s"]
            what = f"sample(512), two under way / bare messages of its bytes, as many{name}"
            lines.append(goal(what, speed, BARE_SAMPLE, least=True))
            speed = bare[2]["pull_us"]["p50"] / ours["sample_us"]["p50"]
            lines.append(goal("... one at a time", speed, BARE_SAMPLE, least=True))
        for step_ms in STEPS_MS:
            found = paced[f"{kind} {step_ms} ms"]
            load = f"at {step_ms} ms a step ({found['load']:.0%} of all cores busy)"
            if step_ms == STEPS_MS[0]:
                lines.append(goal(f"the learner waits, {load}", found["learner_wait"], WAIT))
            for role in ("actor", "replay", "learner"):
                what = f"{role}'s communication, {load}"
                lines.append(goal(what, found[f"{role}_communication"], SHARE))
    return lines


def show(results: Result) -> None:
    """Tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = results["rows"]
    table = Table(title="Atari messages: milliseconds (MB/s)")
    names = ["push of 800", "pull", "sample(512)", "update"]
    for name in ("", *names):
        table.add_column(name, justify="right" if name else "left")
    for name, found in rows.items():
        if name.startswith("zapex"):
            table.add_row(
                name, *(_cell(found, what) for what in ("push", "pull", "sample", "update"))
            )
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
            table.add_row(f"bare {name}" if name != "memcpy" else name, push, pull, sample, "")
    if "redis" in rows:
        redis = rows["redis"]
        table.add_row(
            "Redis", _time(redis["rpush_us"]["p50"], transport_redis.PAIRS_BYTES),
            _time(redis["get_us"]["p50"], served.PARAMETER_BYTES), "", "",
        )  # fmt: skip
        table.add_row(
            "Redis, by hand",
            "",
            _time(redis["get_by_hand_us"]["p50"], served.PARAMETER_BYTES),
            "",
            "",
        )
    console.print(table)
    sizes = results["sizes"]
    table = Table(title="by size: push / pull / sample, milliseconds")
    table.add_column("")
    for size in sizes["bytes"]:
        table.add_column(_bytes(size), justify="right")
    for kind in ("shm", *NETWORK):
        found = [sizes[f"zapex {kind} {int(size)}"] for size in sizes["bytes"]]
        table.add_row(f"zapex {kind}", *(
            " / ".join(f"{one[f'{what}_us']['p50'] / 1000:.3g}" for what in WHAT)
            for one in found
        ))  # fmt: skip
    for kind in (*(f"zmq {kind}" for kind in NETWORK), "tcp", "memcpy"):
        table.add_row(f"bare {kind}" if kind != "memcpy" else kind, *(
            " / ".join(f"{one[f'{way}_us']['p50'] / 1000:.3g}" for way in ("push", "pull"))
            for one in sizes[kind]
        ))  # fmt: skip
    console.print(table)
    table = Table(title="several actors at once: push of 800 ms, all together MB/s, pull ms")
    table.add_column("")
    actors = results["actors"]
    counts = sorted({int(name.split()[1]) for name in actors})
    for count in counts:
        table.add_column(str(count), justify="right")
    for kind in dict.fromkeys(name.split()[0] for name in actors):
        table.add_row(kind, *(
            f"{one['push_us'] / 1000:.1f}, {one['push_mb_per_s']:,.0f}, {one['pull_us'] / 1000:.1f}"
            for one in (actors[f"{kind} {count}"] for count in counts)
        ))  # fmt: skip
    console.print(table)


def _bytes(n: float) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def _time(us: float, nbytes: float) -> str:
    return f"{us / 1000:.2f} ({nbytes / us:,.0f}), {_bytes(nbytes)}"


def _cell(found: Result, what: str) -> str:
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
    options = parser.parse_args(argv)
    served.warm()
    missing = transport_redis.missing()
    if missing:
        print(f"without Redis: {missing}")
    congestion = CONGESTION.read_text().strip()
    seconds, rounds = (0.1, 1) if options.quick else (0.4, ROUNDS)
    with Places() as places:
        print(f"one run on {places.kind}, congestion control {congestion}")
        cells = Cells(places, seconds)
        results = {
            "rows": measure_rows(cells, rounds, not missing),
            "sizes": measure_sizes(
                Cells(places, seconds / 2), SIZES[:4] if options.quick else SIZES
            ),
            "actors": measure_actors(cells, ACTORS[:2] if options.quick else ACTORS, not missing),
            "paced": measure_paced(cells, 1, 2.0 if options.quick else 8.0),
        }
    show(results)
    print("\n".join(goals(results["rows"], results["paced"])))
    if options.json:
        write_json(options.json, "transport", results, rounds=rounds, quick=options.quick,
                   place=places.kind, congestion_control=congestion)  # fmt: skip
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
