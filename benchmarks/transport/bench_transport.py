"""Moving experience between hosts: zapex over tcp, zmtp, F-Stack and CURVE, and bare messages.

    python -m benchmarks.transport.bench_transport [--quick] [--json FILE] [--over KIND...]
                                                   [--rounds N]

A push of 800 Atari transitions, 13.17 MB of parameters, a batch of 512; beside the same bytes as a
bare ZeroMQ message. Server and clients are processes of their own; as root they live in two network
namespaces, otherwise on loopback. rig.py says what each operation is timed from and to. Latencies
are in microseconds; a cell is measured once a round, over a connection of its own, in an order
drawn anew.

fstack:// runs on the library that --fstack-lib and --fstack-conf name, whose port must be reachable
from here. Without them it runs on the tests' stand-in over the kernel's sockets; its rows say so.
"""

import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from benchmarks.support.harness import arguments, in_rounds, write_json
from benchmarks.support.processes import Process
from benchmarks.transport import fstack_place, rig, roofs
from benchmarks.transport import server as served
from benchmarks.transport.fstack_place import FstackPlace
from tests.support.netns import Namespaces, can_have_namespaces
from zapex.machine.tcp import SEND_BUFFER_BYTES

Result = dict[str, Any]
KINDS = ("tcp", "tcp+curve", "zmtp", "zmtp+curve")
WHAT = ("push", "pull", "sample")
TUNED = ", our send buffer"  # a bare message with it, beside one with the system's
ROUNDS = 5
SIDES = ("server", "clients")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Cells:
    """Every measurement, of `seconds` an operation, with a server of its own.

    hosts: with a namespace for each of SIDES; None: loopback. The port of a real F-Stack can be
    reached where this process is, not from a namespace made here.
    """

    def __init__(
        self, hosts: Namespaces | None, directory: Path, seconds: float, fstack: FstackPlace | None
    ) -> None:
        self._hosts, self._directory, self._seconds, self.fstack = hosts, directory, seconds, fstack
        self._ports = itertools.count(7000 + os.getpid() % 1000)

    def _with_server(
        self, server: Callable[[str], Any], client: Callable[[str], Any], address: str | None = None
    ) -> Any:
        """The result of a client of a server, which get their URL. address: outside of hosts."""
        places, where = ("", ""), address or "127.0.0.1"
        if self._hosts is not None and address is None:
            places = [self._hosts.prefix(side)[-1] for side in SIDES]
            where = self._hosts.address("server")
        url = f"tcp://{where}:{next(self._ports)}"
        with contextlib.ExitStack() as stack:
            running = []
            for work, place in zip((server, client), places, strict=True):
                running.append(Process(partial(work, url), place))
                stack.callback(running[-1].kill)
            return running[1].result(running[0])

    def zapex(self, kind: str, setting: served.Setting) -> Result:
        """Every operation of one client."""
        security = served.securities(self._directory / "keys" if kind.endswith("+curve") else None)
        scheme = kind.partition("+")[0]
        place = self.fstack if scheme == "fstack" else None

        def serve(url: str) -> None:
            url = url.replace("tcp", scheme, 1)
            fstack = place.setup if place else None
            served.NetworkServer(setting, url, security["replay"], None, fstack).serve_and_renew()

        found: Result = self._with_server(
            serve,
            lambda url: rig.measure(setting, url, security, self._seconds),
            place.address if place else None,
        )
        return found

    def bare(self, kind: str, sizes: list[int], send_buffer_bytes: int | None) -> list[Result]:
        """The same bytes as one bare message."""
        keys = zmq.curve_keypair() if kind == "tcp+curve" else None
        found: list[Result] = self._with_server(
            lambda url: roofs.zmq_server(url, keys, send_buffer_bytes),
            lambda url: roofs.zmq_client(
                url, sizes, self._seconds, keys and keys[0], send_buffer_bytes
            ),
        )
        return found


def measure(
    cells: Cells, setting: served.Setting, rounds: int, over: Sequence[str]
) -> tuple[Result, Result]:
    """Medians and spreads over everything, or over the kinds `over` alone."""
    first = cells.zapex("tcp", setting)  # how many bytes there really are
    sizes = [int(first[f"{what}_bytes"]) for what in WHAT]
    todo: dict[str, Callable[[], Any]] = {
        f"zapex {kind}": partial(cells.zapex, kind, setting) for kind in KINDS
    }
    if cells.fstack is not None:
        for keys in ("", "+curve"):
            name = f"zapex {cells.fstack.name}{keys}"
            todo[name] = partial(cells.zapex, f"fstack{keys}", setting)
    for kind in KINDS[:2]:
        for name, nbytes in (("", None), (TUNED, SEND_BUFFER_BYTES)):
            todo[f"zmq {kind}{name}"] = partial(cells.bare, kind, sizes, nbytes)
    if over:
        todo = {name: do for name, do in todo.items() if name.split()[1].rstrip(",") in over}
    found = in_rounds(todo, rounds)
    return {"bytes": sizes, **found.medians}, found.spreads


def main(argv: Sequence[str] | None = None) -> int:
    """What a transport costs, beside a bare message."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("--over", nargs="+", choices=KINDS, default=[], help="these kinds alone")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="connections for each cell")
    fstack_place.add_flags(parser)
    options = parser.parse_args(argv)
    served.warm()
    fstack = fstack_place.find(options)
    if isinstance(fstack, str):
        print(f"without fstack://: {fstack}")
        fstack = None
    seconds, rounds = (0.05, 1) if options.quick else (0.4, options.rounds)
    setting = served.atari(capacity=8_000) if options.quick else served.atari()
    congestion, why_not = CONGESTION.read_text().strip(), can_have_namespaces()
    place = f"one machine, {'loopback' if why_not else 'two network namespaces over veth'}"
    print(f"{place}, congestion control {congestion}")
    with contextlib.ExitStack() as stack:
        hosts = None if why_not else stack.enter_context(Namespaces(SIDES))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zapex-bench-")))
        cells = Cells(hosts, directory, seconds, fstack)
        rows, spreads = measure(cells, setting, rounds, options.over)
    print("\nms: push of 800, parameters, sample(512)")
    for name, one in rows.items():
        if name.startswith("zapex"):
            times = [one[f"{what}_us"]["p50"] for what in WHAT]
        elif name != "bytes":
            times = [one[i][f"{way}_us"]["p50"] for i, way in enumerate(("push", "pull", "pull"))]
        else:
            continue
        print(f"  {name:28}" + "".join(f"{us / 1000:10.3f}" for us in times))
    write_json(
        options, "transport", {"rows": rows}, rounds=rounds, place=place,
        congestion_control=congestion, spreads={"rows": spreads},
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
