"""One point: a system with so many paced actors, each role a process in a namespace of its own.

It is looked at in several windows, one after the other: figures are the windows' medians, and
`spreads` holds their p10 and p90.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.paper import ends
from benchmarks.paper.experience import plain, plain_bodies, setting_of
from benchmarks.paper.roles import (
    ACTOR_COMMUNICATION,
    LEARNER_COMMUNICATION,
    OVER,
    READY,
    actor,
    learner,
)
from benchmarks.support.harness import joined, p10_p90
from benchmarks.support.machine import cpu_seconds
from benchmarks.support.processes import Process
from benchmarks.transport import redis_server
from benchmarks.transport.server import NetworkServer, Setting, make_host, make_role, waiter
from tests.support.netns import Namespaces
from zapex.fstack import Setup
from zapex.host.metrics import RoleMetrics
from zapex.replay.core import ReplayCore
from zapex.shm_transport import HostMemory

LOAD_LIMIT = 0.8  # above it roles wait for cores, not for the network
_PORT = 7300
_START_S = 120.0
_SPREAD = (
    "communication_share", "actor_push_ms", "actor_pull_ms", "learner_set_ms", "learner_sample_ms",
    "learner_pull_experiences_per_s", "push_hz", "moving_share", "steps_per_s", "batches_per_s",
)  # fmt: skip
FORMATS = {
    "a": "pairs", "a-fstack": "pairs", "a2": "chunks", "b": "pairs", "b2": "chunks", "c": "chunks",
    "d-zmtp": "chunks", "d-fstack": "chunks", "e": "chunks",
}  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """Seconds of computation: of an actor for each push, of a learner for each batch."""

    actor_s: float
    learner_s: float
    set_every: int = 8


@dataclass(frozen=True)
class Point:
    """system: see bench_paper. gbit: of each cable; 0: as fast as the kernel is."""

    system: str
    actors: int
    gbit: float = 0.0

    @property
    def key(self) -> tuple[str, int, float]:
        """What names it in a result."""
        return self.system, self.actors, self.gbit


@dataclass
class Bench:
    """What all points share. bodies: recorded chunks. seconds: of a window.

    apart: roles get namespaces.
    """

    bodies: np.ndarray
    windows: int
    seconds: float
    warm_s: float
    quick: bool
    apart: bool
    redis_url: str = ""
    fstack: Setup | None = None
    fstack_address: str = ""
    ports: Iterator[int] = field(default_factory=lambda: iter(range(_PORT, _PORT + 900)))


def _serve_here(setting: Setting, host: HostMemory) -> None:
    """A replay over shared memory, for ever."""
    source, sink = host.experience_source(), host.sample_sink()
    replay = ReplayCore(setting.layout, seed=1, buffer=host.experience)
    role = make_role(setting, replay, source, sink, host.metrics("replay"))
    wait = waiter(host, "replay")
    while True:
        if not role.do_work():
            wait(role.ready, 0.2)


@contextmanager
def _places(bench: Bench, point: Point) -> Iterator[tuple[dict[str, str], str]]:
    """Namespace of each role, and the server's address."""
    roles = ["server", "learner", *(f"actor{i}" for i in range(point.actors))]
    outside = point.system in ("e", "a-fstack") or (
        point.system == "d-fstack" and bench.fstack_address
    )
    if not bench.apart or outside:
        yield dict.fromkeys(roles, ""), "127.0.0.1"
        return
    rate = f"{point.gbit:g}gbit" if point.gbit else ""
    with Namespaces(roles, rate) as made:
        names = {role: made.prefix(role)[-1] for role in roles}
        # A learner that serves itself is where the server is.
        names["learner"] = names["server"] if point.system in ("b", "b2") else names["learner"]
        yield names, made.address("server")


def measure(bench: Bench, point: Point, pace: Pace) -> dict[str, Any]:
    """One point, measured; as a row of the result, without the machine's facts."""
    setting = setting_of(point.actors, bench.quick)
    bodies = bench.bodies
    if point.system == "b":
        bodies, setting = plain_bodies(setting, bodies), plain(setting)
    words = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    metrics = np.frombuffer(mmap.mmap(-1, RoleMetrics.required_bytes()), np.uint8)
    running: dict[str, Process] = {}
    with ExitStack() as stack:
        names, address = stack.enter_context(_places(bench, point))

        def begin(role: str, work: Callable[[], Any]) -> None:
            place = names.get(role.replace(" ", ""), "")
            running[role] = Process(work, place)
            stack.callback(running[role].kill)

        actor_of, learner_of = _ends(bench, point, setting, bodies, address, begin, metrics)
        places = list(range(2, 2 + point.actors))
        begin(
            "learner",
            lambda: learner(learner_of, words, places, 1, pace.learner_s, pace.set_every),
        )
        for i in range(point.actors):
            begin(f"actor {i}", partial(actor, partial(actor_of, i), words, 2 + i, pace.actor_s))
        wait_until(running, lambda: all(words[1 : 2 + point.actors] == READY))
        time.sleep(bench.warm_s)
        replay = RoleMetrics(metrics, "replay", create=False) if metrics.any() else None
        facts = []
        for window in range(1, 1 + bench.windows):
            before = replay.snapshot() if replay else {}
            words[0] = window
            looked = _look(running)
            time.sleep(bench.seconds)
            after = replay.snapshot() if replay else {}
            phases = {
                k.removeprefix("phase/"): after[k] - before[k] for k in after if "phase/" in k
            }
            facts.append({**_between(looked, _look(running)), "server_phases": phases})
        words[0] = OVER
        found = {r: c.result(timeout_s=_START_S) for r, c in running.items() if r != "server"}
    rows = [
        _row(point, pace, cycles_of(found, window), {**seen, "push": sum(setting.rows)})
        for window, seen in enumerate(facts, 1)
    ]
    row = over(rows)
    known = row["machine"]
    known["windows"] = bench.windows
    known["shortest_step_s"] = min(one["machine"]["shortest_step_s"] for one in rows)
    return {**row, "host_bound": known["load"] > LOAD_LIMIT}


def _look(running: dict[str, Process]) -> dict[str, Any]:
    """Processor seconds of all cores and of each role so far, and when."""
    roles = {name: sum(psutil.Process(one.pid).cpu_times()[:2]) for name, one in running.items()}
    busy_s, _ = cpu_seconds(Path("/proc/stat").read_text())
    return {"at_s": time.monotonic(), "busy_s": busy_s, "roles": roles}


def _between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """load: the share of all cores that was busy, with what else the machine did."""
    seconds = after["at_s"] - before["at_s"]
    cpu = {name: {"all": {"cpu_s": after["roles"][name] - before["roles"][name]}}
           for name in before["roles"]}  # fmt: skip
    load = (after["busy_s"] - before["busy_s"]) / (seconds * (os.cpu_count() or 1))
    return {"load": load, "seconds": seconds, "core_seconds": cpu}


def cycles_of(found: dict[str, Any], window: int) -> dict[str, Any]:
    """What each role returned of a window. Raises RuntimeError if one had no whole cycle in it."""
    there = {role: one.get(str(window)) for role, one in found.items()}
    if slow := [role for role, one in there.items() if one is None]:
        raise RuntimeError(f"no whole cycle of {', '.join(slow)} in a window: give more --seconds")
    return there


def _ends(
    bench: Bench, point: Point, setting: Setting, bodies: np.ndarray, address: str,
    begin: Callable[[str, Callable[[], Any]], None], metrics: np.ndarray,
) -> tuple[Callable[[int], Any], Callable[[], Any]]:  # fmt: skip
    """What makes the actors' ends and the learner's; starts the server between them."""
    system, port = point.system, next(bench.ports)
    if system in ("a", "a2", "a-fstack"):
        url = bench.redis_url if system == "a-fstack" else ""
        if not url:
            begin("server", lambda: redis_server.server(address, port, "/tmp"))
            url = f"redis://{address}:{port}/0"
        pairs = FORMATS[system] == "pairs"
        return (
            lambda i: ends.RedisActor(setting, bodies, url, i, pairs),
            lambda: ends.RedisLearner(setting, url, pairs),
        )
    if system == "e":
        host = make_host(setting)
        begin("server", lambda: _serve_here(setting, host))
        return (
            lambda i: ends.ShmActor(setting, host, i),
            lambda: ends.ShmLearner(setting, host),
        )
    url = f"tcp://{address}:{port}"
    if system in ("b", "b2"):
        return (
            lambda i: ends.LinkActor(setting, bodies, url, i),
            lambda: ends.ServingLearner(setting, url),
        )
    scheme = {"c": "tcp", "d-zmtp": "zmtp", "d-fstack": "fstack"}[system]
    if scheme == "fstack" and bench.fstack_address:
        url = f"tcp://{bench.fstack_address}:{port}"
    fstack = bench.fstack if scheme == "fstack" else None
    listen = url.replace("tcp", scheme, 1)
    begin(
        "server",
        lambda: NetworkServer(setting, listen, ends.OPEN["replay"], metrics, fstack).serve(),
    )
    return (
        lambda i: ends.LinkActor(setting, bodies, url, i),
        lambda: ends.LinkLearner(setting, url),
    )


def wait_until(running: dict[str, Process], done: Callable[[], object]) -> None:
    """Raises RuntimeError if a role ends before, TimeoutError after two minutes."""
    deadline = time.monotonic() + _START_S
    while not done():
        over = [role for role, child in running.items() if child.has_ended()]
        if over:
            raise RuntimeError(f"{', '.join(over)} ended too early; the error is above")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the roles were not ready after {_START_S:.0f} s")
        time.sleep(0.02)


def over(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows of one point, of several windows or runs, made one: each figure's median.

    "spreads": the p10 and p90 of those that are no shares of one role.
    """
    figures = [{name: row[name] for name in _SPREAD if name in row} for row in rows]
    return {**joined(rows, _median), "spreads": joined(figures, p10_p90)}


def _median(values: Sequence[float]) -> float:
    """A count that is the same in all windows stays one."""
    return values[0] if len(set(values)) == 1 else float(np.median(values))


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    whole = sum(seconds.values()) or 1.0
    return {phase: spent / whole for phase, spent in seconds.items()}


def _row(
    point: Point, pace: Pace, found: dict[str, Any], facts: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """One window, with the keys that the page names. Shares of actors are their mean."""
    actors = [one for role, one in found.items() if role.startswith("actor")]
    learns = found["learner"]
    shares = [_shares(one["seconds"]) for one in actors]
    phases = sorted({phase for one in shares for phase in one})
    actor_share = {p: float(np.mean([one.get(p, 0.0) for one in shares])) for p in phases}
    learner_share = _shares(learns["seconds"])
    communication = np.mean([
        sum(actor_share.get(p, 0.0) for p in ACTOR_COMMUNICATION),
        sum(learner_share.get(p, 0.0) for p in LEARNER_COMMUNICATION),
    ])  # fmt: skip
    sampling_s = learns["seconds"].get("sample", 0.0)
    nbytes = {**actors[0]["bytes"], **learns["bytes"]}
    if learns["phases"]:  # it pulls what was pushed
        nbytes["sample"] = nbytes["push"] / facts["push"] * learns["pulled"] / learns["steps"]

    def ms(of: list[dict[str, Any]], name: str) -> dict[str, float]:
        known = [one["ms"][name] for one in of if one["ms"].get(name)]
        return {k: float(np.median([one[k] for one in known])) for k in (known[0] if known else ())}

    return {
        "system": point.system, "actors": point.actors,
        "gbit": point.gbit or None, "format": FORMATS[point.system],
        "paced": {"actor_ms": 1000 * pace.actor_s, "learner_ms": 1000 * pace.learner_s,
                  "set_every": pace.set_every},
        "bytes": nbytes,
        "host_bound": facts["load"] > LOAD_LIMIT,
        "communication_share": float(communication),
        "actor_share": actor_share, "learner_share": learner_share,
        "core_seconds": facts["core_seconds"],
        "actor_push_ms": ms(actors, "push"), "actor_pull_ms": ms(actors, "pull"),
        "learner_set_ms": ms([learns], "set"), "learner_sample_ms": ms([learns], "sample"),
        "learner_pull_experiences_per_s": learns["pulled"] / sampling_s if sampling_s else 0.0,
        "push_hz": sum(one["pushes"] / sum(one["seconds"].values()) for one in actors),
        "ideal_push_hz": point.actors / pace.actor_s,
        "machine": {
            "load": facts["load"], "seconds": facts["seconds"],
            "server_phases_s": learns["phases"] or facts["server_phases"], "steps": learns["steps"],
            "pushes": sum(one["pushes"] for one in actors),
            "shortest_step_s": learns["shortest_step_s"], "transitions_per_push": facts["push"],
        },
    }  # fmt: skip
