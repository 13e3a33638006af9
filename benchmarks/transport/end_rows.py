"""The rows of `bench transport --only ends`: which servers and clients, a table, and the goals."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

from rich.table import Table

from benchmarks.support.harness import Rounds, goal, in_rounds
from benchmarks.transport import ends
from benchmarks.transport.cells import Cells, Result

WAYS = {"blocking": False, "polling": True}
ROUTERS = ("libzmq", "zmtp")
SOCKETS = {  # polling, SO_BUSY_POLL in us, MSG_ZEROCOPY
    "socket blocking": (False, 0, False),
    "socket polling": (True, 0, False),
    "socket SO_BUSY_POLL": (False, ends.BUSY_POLL_US, False),
    "socket MSG_ZEROCOPY": (False, 0, True),
}
URING = "socket io_uring"  # where PyPI's liburing is installed
_ECHO = {"polling": 0.5, "blocking": 1.0}  # of libzmq's time
_IDLE = 0.02


def measure_ends(cells: Cells, rounds: int, ways: tuple[str, ...] = tuple(WAYS)) -> Rounds:
    """Every end, without keys and with them. ways: of the routers."""
    todo: dict[str, Any] = {}
    for way in ways:
        polling = WAYS[way]
        for with_keys in (False, True):
            for router in ROUTERS:
                name = f"{router} {way}{', keys' if with_keys else ''}"
                todo[name] = partial(cells.router_end, router, polling, with_keys)
    if cells.fstack is not None:  # which polls always; its client blocks
        for with_keys in (False, True):
            name = f"{cells.fstack.name}{', keys' if with_keys else ''}"
            todo[name] = partial(cells.router_end, "fstack", False, with_keys)
    todo |= {name: partial(cells.socket_end, *how) for name, how in SOCKETS.items()}
    if find_spec("liburing"):
        todo[URING] = cells.uring_end
    else:
        print("without io_uring: pip install liburing")
    return in_rounds(todo, rounds)


def end_table(found: Result, cycles_per_s: float) -> Table:
    """Echoes, large messages, and the cores that the server takes, of every end."""
    table = Table(title="one end alone")
    for name in ("", "echo of 64 B: p50, p99, p99.9 us", "its server's CPU us",
                 "MB/s into slots: 1 MiB", "8 MiB", "cycles a byte of 8 MiB: server, client",
                 "server's cores: echo, 8 MiB, idle"):  # fmt: skip
        table.add_column(name, justify="right" if name else "left")
    for name, one in found.items():
        echo, cycles = one["echo_us"], cycles_per_s / 1e9
        table.add_row(
            name, f"{echo['p50']:.1f}, {echo['p99']:.1f}, {echo['p99.9']:.1f}",
            f"{one['echo_server_cpu_us']:.1f}", f"{one['1_mib_mb_per_s']:,.0f}",
            f"{one['8_mib_mb_per_s']:,.0f}",
            f"{cycles * one['8_mib_server_cpu_ns_per_byte']:.2f}, "
            f"{cycles * one['8_mib_client_cpu_ns_per_byte']:.2f}",
            f"{one['echo_server_cores']:.2f}, {one['8_mib_server_cores']:.2f}, "
            f"{one['idle_cpu']:.2f}",
        )  # fmt: skip
    return table


def end_goals(found: Result) -> Iterator[str]:
    """Each goal of one end beside what was measured."""
    for way, limit in _ECHO.items():
        for keys in ("", ", keys"):
            if f"zmtp {way}{keys}" not in found:  # the quick form
                continue
            ours, theirs = found[f"zmtp {way}{keys}"], found[f"libzmq {way}{keys}"]
            ratio = ours["echo_us"]["p50"] / theirs["echo_us"]["p50"]
            yield goal(f"echo, {way}{keys}: zmtp / libzmq", ratio, limit)
    ours, theirs = found["zmtp blocking"], found["libzmq blocking"]
    for size in ("1_mib", "8_mib"):
        ratio = ours[f"{size}_mb_per_s"] / theirs[f"{size}_mb_per_s"]
        what = size.replace("_mib", " MiB")
        yield goal(f"{what} into slots, MB/s: zmtp / libzmq", ratio, 1.0, least=True)
    yield goal("CPU of zmtp while idle", ours["idle_cpu"], _IDLE)


def network_goals(rows: Result) -> Iterator[str]:
    """zmtp:// beside tcp:// with the Atari messages, each in the same run."""
    limits = {"push": 0.8, "sample": 0.9, "pull": 0.9}
    for keys in ("", "+curve"):
        if not {f"zapex {kind}{keys}" for kind in ("zmtp", "tcp")} <= rows.keys():
            continue
        for what, limit in limits.items():
            ours, theirs = (rows[f"zapex {kind}{keys}"][f"{what}_us"] for kind in ("zmtp", "tcp"))
            yield goal(f"{what}: zmtp{keys} / tcp{keys}", ours["p50"] / theirs["p50"], limit)
