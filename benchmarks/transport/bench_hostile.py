"""A run among peers that mean harm: what is left of its throughput, and of its memory's bound.

    floods   1,000 connections of random bytes at 100 MB/s in all, and whole ZeroMQ messages that
             are none of ours: rounds with and without, in turns, in one run
    memory   relays that push on beyond their credit, messages that never end, learners that read
             nothing and half-open connections, all at once beside an honest run, for --minutes

The run is a replay server in a process of its own and honest clients in another: pushes of 800
Atari transitions, batches of 512 and their priorities. It is paced (--rate rounds a second, as a
run is whose actors and learner have work of their own) or as fast as it goes (--rate 0).
"""

import mmap
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from benchmarks.support.harness import add_json, arguments, evidence, goal
from benchmarks.support.processes import start
from benchmarks.transport.rig import NetworkClient
from benchmarks.transport.server import NetworkServer, Setting, atari
from tests.support import hostile_peers
from zapex.net.guard import own_bytes
from zapex.net.keys import Security
from zapex.wire import control as m

MIB = 1 << 20
(_PORT, _BASE, _OWN, _PEAK, _HUNG_UP, _BAD, _UNKNOWN, _FORBIDDEN, _MESSAGES, _EARLY, _UNCREDITED,
 _ROUNDS, _CHUNKS, _CPU_MS, _GARBAGE, _RECONNECTS, _CONNECTIONS) = range(17)  # fmt: skip


def serve(setting: Setting, words: np.ndarray, bound_bytes: int) -> None:
    """The replay server's process."""
    made = NetworkServer(setting, "tcp://127.0.0.1:0", Security(), memory_bytes=bound_bytes)
    mailbox, server, source, role = made.mailbox, made.server, made.source, made.duty.role
    mailbox.publish(1, np.ones(setting.parameter_bytes, np.uint8))
    words[_BASE] = own_bytes()
    words[_PORT] = int(server.url.rpartition(":")[2])
    version, bumped_s = 1, time.monotonic()
    while True:
        if not role.do_work():
            server.wait(role.ready, 0.005)
        counts = server.counts
        words[_BAD], words[_UNKNOWN] = counts["bad"], counts["unknown"]
        words[_FORBIDDEN], words[_MESSAGES] = counts["forbidden"], counts["messages"]
        words[_EARLY], words[_UNCREDITED] = source.counts["early"], source.counts["uncredited"]
        words[_HUNG_UP], words[_CHUNKS] = server.guard.hung_up, source.counts["chunks"]
        words[_CPU_MS] = int(1000 * time.process_time())
        if time.monotonic() - bumped_s > 1.0:  # a learner publishes once a second
            version, bumped_s = version + 1, time.monotonic()
            mailbox.publish(version, np.full(setting.parameter_bytes, version % 256, np.uint8))
            made.parameters.do_work()


def honest(setting: Setting, words: np.ndarray, rate: float) -> None:
    """A relay and a learner that keep to the rules: a push, a batch and its priorities a round."""
    url = f"tcp://127.0.0.1:{words[_PORT]}"
    client = NetworkClient(setting, url, {"relay": Security(), "learner": Security()}, 0)
    due_s = time.monotonic()
    while True:
        client.push()
        client.sample()
        client.update()
        words[_ROUNDS] += 1
        links = (client.relay, client.learner)
        words[_RECONNECTS] = sum(link.counts["connections"] - 2 for link in links)
        due_s = max(due_s + (1 / rate if rate else 0), time.monotonic() - 1)
        time.sleep(max(0.0, due_s - time.monotonic()))


def attack(behaviour: str, setting: Setting, words: np.ndarray, **more: Any) -> int:
    """A hostile peer's process, until it is killed."""
    hash_, number = setting.schema.hash, 1000 + len(behaviour)

    def work() -> None:
        def hello(role: str, channel: int) -> m.Hello:
            return m.Hello(role, number + os.getpid(), 1, channel, hash_, 1, {})

        def tell(sent: int, made: int) -> None:
            words[_GARBAGE], words[_CONNECTIONS] = before[0] + sent, before[1] + made

        before = int(words[_GARBAGE]), int(words[_CONNECTIONS])
        if behaviour == "garbage":
            more["tell"] = tell
        url = f"tcp://127.0.0.1:{words[_PORT]}"
        hostile_peers.run(behaviour, url, 1e9, setting.form, hello, **more)

    return start(work, nice=10)


def end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class Run:
    """The honest run's two processes."""

    def __init__(self, setting: Setting, bound_bytes: int, rate: float) -> None:
        self.words = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
        words = self.words
        self.server = start(lambda: serve(setting, words, bound_bytes))
        deadline = time.monotonic() + 100
        while not words[_PORT]:
            assert time.monotonic() < deadline, "no server"
            time.sleep(0.05)
        self.pids = [self.server, start(lambda: honest(setting, words, rate))]
        while words[_ROUNDS] < max(3, 2 * rate):  # the first ones compile kernels
            assert time.monotonic() < deadline, "no rounds"
            time.sleep(0.05)

    def own_bytes(self) -> int:
        """Memory of the server that is not shared, now."""
        with open(f"/proc/{self.server}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def rounds_per_s(self, seconds: float) -> float:
        """Over so long."""
        before, start = int(self.words[_ROUNDS]), time.monotonic()
        time.sleep(seconds)
        return float((self.words[_ROUNDS] - before) / (time.monotonic() - start))


def floods(setting: Setting, rate: float, behaviour: str, window_s: float, rounds: int,
           **more: Any) -> dict[str, Any]:  # fmt: skip
    """Rounds a second with and without a flood, in turns."""
    run = Run(setting, 1 << 30, rate)
    quiet, flooded, cpu = [], [], []
    try:
        for _ in range(rounds):
            before = int(run.words[_CPU_MS])
            quiet.append(run.rounds_per_s(window_s / 2))
            used = 2 * (int(run.words[_CPU_MS]) - before)
            flood = attack(behaviour, setting, run.words, **more)
            time.sleep(1.0)
            before = int(run.words[_CPU_MS])
            flooded.append(run.rounds_per_s(window_s))
            cpu.append((int(run.words[_CPU_MS]) - before - used) / window_s / 1000)
            end([flood])
        words = run.words
        own = {name: int(words[at]) for name, at in
               (("bad", _BAD), ("before_hello", _UNKNOWN), ("hung_up", _HUNG_UP))}  # fmt: skip
        reconnects = int(words[_RECONNECTS])
    finally:
        end(run.pids)
    ratios = [f / q for f, q in zip(flooded, quiet, strict=True)]
    return {
        "rate_asked": rate,
        "rounds_per_s_quiet": round(float(np.median(quiet)), 3),
        "rounds_per_s_flooded": round(float(np.median(flooded)), 3),
        "share_kept": round(float(np.median(ratios)), 3),
        "shares": [round(r, 3) for r in ratios],
        "cores_the_server_spends_more": round(float(np.median(cpu)), 3),
        "messages": own,
        "honest_reconnects": reconnects,
        "flooded_s": window_s * rounds,
        **(_garbage(words, (window_s + 1) * rounds) if behaviour == "garbage" else {}),
        **more,
    }


def _garbage(words: np.ndarray, seconds: float) -> dict[str, Any]:
    """What was offered in raw connections."""
    return {
        "garbage_mb_per_s": round(int(words[_GARBAGE]) / 1e6 / seconds, 1),
        "garbage_connections_made": int(words[_CONNECTIONS]),
    }


def overload(setting: Setting, bound_bytes: int, rate: float, seconds: float) -> dict[str, Any]:
    """Memory of the server among all that mean harm at once."""
    run = Run(setting, bound_bytes, rate)
    attackers = [
        attack(behaviour, setting, run.words)
        for behaviour in ("pushes", "pushes", "deaf", "endless", "half-open", "noise")
    ]
    words, peak, samples = run.words, 0, 0
    start, rounds = time.monotonic(), int(words[_ROUNDS])
    try:
        while time.monotonic() < start + seconds:
            peak = max(peak, run.own_bytes())
            samples += 1
            time.sleep(0.005)
        took = time.monotonic() - start
        done = int(words[_ROUNDS]) - rounds
        alive = [pid for pid in (*run.pids, *attackers) if os.waitpid(pid, os.WNOHANG) == (0, 0)]
    finally:
        end([*attackers, *run.pids])
    chunks = done * len(setting.rows)
    names = {"messages": _MESSAGES, "chunks_taken": _CHUNKS, "bad": _BAD, "before_hello": _UNKNOWN,
             "out_of_order": _EARLY, "without_credit": _UNCREDITED, "forbidden": _FORBIDDEN,
             "hung_up": _HUNG_UP, "honest_reconnects": _RECONNECTS}  # fmt: skip
    counts = {name: int(words[at]) for name, at in names.items()}
    honest_messages = max(1, chunks)
    return {
        "seconds": round(took, 1),
        "bound_mib": bound_bytes // MIB,
        "peak_mib": round((peak - int(words[_BASE])) / MIB, 1),
        "share_of_bound": round((peak - int(words[_BASE])) / bound_bytes, 3),
        "looks": samples,
        "counts": counts,
        "overload": round(counts["messages"] / honest_messages, 1),
        "honest_rounds_per_s": round(done / took, 3),
        "processes_alive_at_the_end": len(alive),
        "processes": 2 + len(attackers),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=("floods", "memory"))
    parser.add_argument("--minutes", type=float, default=10.0, help="of overload")
    parser.add_argument("--bound", type=int, default=512, help="MiB of --network-memory")
    parser.add_argument("--rate", type=float, default=2.0, help="rounds a second; 0: as they go")
    chosen = parser.parse_args(argv)
    setting = atari(actors=4, capacity=10_000)
    results: dict[str, Any] = {}
    window_s, rounds, minutes = (1.5, 1, 0.1) if chosen.quick else (20.0, 5, chosen.minutes)
    if chosen.only != "memory":
        kinds: dict[str, dict[str, Any]] = {
            "garbage": {"connections": 1000, "bytes_per_s": 100e6}, "noise": {},
        }  # fmt: skip
        for behaviour, more in kinds.items():
            for rate in (chosen.rate, 0.0):
                result = floods(setting, rate, behaviour, window_s, rounds, **more)
                name = f"flood_{behaviour}_{'paced' if rate else 'saturated'}"
                print(name, result)
                print(goal("share of the run's throughput kept", result["share_kept"], 0.8,
                           least=True))  # fmt: skip
                results[name] = result
    if chosen.only != "floods":
        result = overload(setting, chosen.bound * MIB, chosen.rate, 60 * minutes)
        print("memory", result)
        print(goal("memory's share of its bound", result["share_of_bound"], 1.05))
        results["memory_under_overload"] = result
    # The file has results of tests/stress, too.
    found = evidence(chosen.watch, rounds, chosen.quick)
    for name, result in results.items() if chosen.json is not None else ():
        add_json(chosen.json, "hostile", name, result, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
