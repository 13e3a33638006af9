"""Moving experience between processes: zapex over shm, ipc, tcp, zmtp and CURVE, and the roofs.

    python -m benchmarks.transport.bench_transport [--quick] [--json FILE] [--only PART...]
                                                   [--over KIND...] [--rounds N]

    rows     a push of 800 Atari transitions, 13.17 MB of parameters, a batch of 512; beside the
             same bytes as a bare ZeroMQ message, and copied by memcpy
    sizes    the same operations on messages of 64 B to 64 MiB

Server and clients are processes of their own; as root they live in two network namespaces over a
veth pair that this benchmark makes and removes, otherwise on loopback. rig.py says what each
operation is timed from and to. Latencies are in microseconds; a cell is measured once a round, over
a connection of its own, in an order drawn anew. --over keeps these kinds of the rows, beside the
roofs.

fstack:// runs on the library that --fstack-lib and --fstack-conf name, whose port must be reachable
from here. Without them it runs on the tests' stand-in over the kernel's sockets; its rows say so.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support.harness import Rounds, arguments, in_rounds, write_json
from benchmarks.transport import fstack_place, rig, roofs
from benchmarks.transport import server as served
from benchmarks.transport.fstack_place import FstackPlace
from benchmarks.transport.places import Places, Process
from zapex.machine.tcp import SEND_BUFFER_BYTES

Result = dict[str, Any]
SIZES = [64, 4096, 65536, 1 << 20, 16 << 20, 64 << 20]
NETWORK = ("ipc", "tcp", "tcp+curve")
ZMTP = ("zmtp", "zmtp+curve")
WHAT = ("push", "pull", "sample")
TUNED = ", our send buffer"  # a bare message with it, beside one with the system's
ROUNDS = 5
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Cells:
    """Every measurement at `places`, of `seconds` an operation, with a server of its own.

    The port of a real F-Stack can be reached where this process is, not from a place made here.
    """

    def __init__(self, places: Places, seconds: float, fstack: FstackPlace | None = None) -> None:
        self._places, self._seconds, self.fstack = places, seconds, fstack

    def _address(self, kind: str) -> tuple[str, bool]:
        """Where a server of this kind listens, and whether both ends are at `places`."""
        real = self.fstack.address if kind.startswith("fstack") and self.fstack else None
        return real or self._places.address, real is None

    def _url(self, kind: str) -> str:
        if kind == "ipc":
            return f"ipc://{self._places.path(f'link-{self._places.port()}')}"
        return f"tcp://{self._address(kind)[0]}:{self._places.port()}"

    def _with_server(
        self, server: Callable[[], Any], client: Callable[[], Any], apart: bool = True
    ) -> Any:
        """The result of a client of a server. apart: each end in its place, or both outside."""
        running: list[Process] = []
        try:
            running.append(self._places.start(0 if apart else None, server))
            running.append(self._places.start(1 if apart else None, client))
            return running[1].result(running[0])
        finally:
            for process in running:
                process.kill()

    def zapex(self, kind: str, setting: served.Setting) -> Result:
        """Every operation of one client."""
        seconds = self._seconds
        if kind == "shm":
            host = served.make_host(setting)
            found: Result = self._with_server(
                lambda: served.serve_shm(setting, host),
                lambda: rig.measure_shm(rig.ShmClient(setting, host, 0), setting, seconds),
            )
            return found
        keys = self._places.path("keys") if kind.endswith("+curve") else None
        url, security = self._url(kind), served.securities(keys)
        scheme = next((one for one in ("zmtp", "fstack") if kind.startswith(one)), "tcp")
        listen = url.replace("tcp", scheme, 1)
        fstack = self.fstack.setup if self.fstack is not None and scheme == "fstack" else None
        found = self._with_server(
            lambda: served.serve_network(setting, listen, security["replay"], fstack=fstack),
            lambda: rig.measure_network(
                rig.NetworkClient(setting, url, security, 0), setting, seconds
            ),
            apart=self._address(kind)[1],
        )
        return found

    def bare_zmq(
        self, kind: str, sizes: list[int], send_buffer_bytes: int | None = None
    ) -> list[Result]:
        """The same bytes as one bare message."""
        url, keys = self._url(kind), _keypair() if kind == "tcp+curve" else None
        found: list[Result] = self._with_server(
            lambda: roofs.zmq_server(url, keys, send_buffer_bytes),
            lambda: roofs.zmq_client(
                url, sizes, self._seconds, keys and keys[0], send_buffer_bytes
            ),
        )
        return found

    def memcpy(self, sizes: list[int]) -> list[Result]:
        """The same bytes copied."""
        found: list[Result] = self._places.start(
            1, lambda: roofs.memcpy(sizes, self._seconds)
        ).result()
        return found


def _keypair() -> tuple[bytes, bytes]:
    import zmq

    return zmq.curve_keypair()


def measure_rows(
    cells: Cells, setting: served.Setting, rounds: int, over: Collection[str] = ()
) -> Rounds:
    """The Atari messages over everything, or over the kinds `over` alone."""
    first = cells.zapex("tcp", setting)  # how many bytes there really are
    sizes = [int(first[f"{what}_bytes"]) for what in WHAT]
    todo: dict[str, Callable[[], Any]] = {
        f"zapex {kind}": partial(cells.zapex, kind, setting) for kind in ("shm", *NETWORK, *ZMTP)
    }
    if cells.fstack is not None:
        for keys in ("", "+curve"):
            todo[f"zapex {cells.fstack.name}{keys}"] = partial(
                cells.zapex, f"fstack{keys}", setting
            )
    for kind in NETWORK:
        todo[f"zmq {kind}"] = partial(cells.bare_zmq, kind, sizes)
    for kind in ("tcp", "tcp+curve"):
        todo[f"zmq {kind}{TUNED}"] = partial(cells.bare_zmq, kind, sizes, SEND_BUFFER_BYTES)
    if over:
        todo = {name: do for name, do in todo.items() if name.split()[1].rstrip(",") in over}
    todo["memcpy"] = partial(cells.memcpy, sizes)
    found = in_rounds(todo, rounds)
    return Rounds({"bytes": sizes, **found.medians}, found.spreads)


def measure_sizes(cells: Cells, sizes: list[int], rounds: int) -> Rounds:
    """Every operation on messages of each size, and the roofs."""
    todo: dict[str, Callable[[], Any]] = {
        f"zapex {kind} {size}": partial(cells.zapex, kind, served.of_size(size))
        for kind in ("shm", *NETWORK)
        for size in sizes
    }
    todo["zmq tcp"] = partial(cells.bare_zmq, "tcp", sizes)
    todo["memcpy"] = partial(cells.memcpy, sizes)
    found = in_rounds(todo, rounds)
    return Rounds({"bytes": sizes, **found.medians}, found.spreads)


def show(results: Result) -> None:
    """Milliseconds of rows and sizes."""
    for name, one in results.get("rows", {}).items():
        if name.startswith("zapex"):
            times = [one[f"{what}_us"]["p50"] for what in (*WHAT, "update")]
        elif name != "bytes":
            times = [one[i][f"{way}_us"]["p50"] for i, way in enumerate(("push", "pull", "pull"))]
        else:
            print("\nms: push of 800, parameters, sample(512), update of 512")
            continue
        print(f"  {name:28}" + "".join(f"{us / 1000:10.3f}" for us in times))
    for name, one in results.get("sizes", {}).items():
        if name.startswith("zapex"):
            line = "".join(f"{one[f'{what}_us']['p50'] / 1000:10.3f}" for what in WHAT)
            print(f"  {name:28}{line} ms: push, pull, sample")


def main(argv: Sequence[str] | None = None) -> int:
    """What a transport costs, beside a bare message and memcpy."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=["rows", "sizes"])
    kinds = ["shm", *NETWORK, *ZMTP]
    parser.add_argument("--over", nargs="+", choices=kinds, default=[], help="rows of these alone")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="connections for each cell")
    fstack_place.add_flags(parser)
    options = parser.parse_args(argv)
    served.warm()
    fstack = fstack_place.find(options)
    if isinstance(fstack, str):
        print(f"without fstack://: {fstack}")
        fstack = None
    quick = options.quick
    seconds, rounds = (0.05, 1) if quick else (0.4, options.rounds)
    setting = served.atari(capacity=8_000) if quick else served.atari()
    congestion = CONGESTION.read_text().strip()
    with Places() as places:
        print(f"one run on {places.kind}, congestion control {congestion}")
        cells, small = Cells(places, seconds, fstack), Cells(places, seconds / 2)
        parts: dict[str, Callable[[], Rounds]] = {
            "rows": lambda: measure_rows(cells, setting, rounds, options.over),
            "sizes": lambda: measure_sizes(small, SIZES[:3:2] if quick else SIZES, rounds),
        }
        found = {name: parts[name]() for name in options.only or parts}
    results = {name: one.medians for name, one in found.items()}
    show(results)
    write_json(
        options,
        "transport",
        results,
        rounds=rounds,
        place=places.kind,
        congestion_control=congestion,
        spreads={name: one.spreads for name, one in found.items()},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
