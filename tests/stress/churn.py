"""Hosts that come and go all the time, on real sockets: each is let in, and none shares a number.

    python -m tests.stress.churn [--minutes 5] [--hosts 64] [--a-minute 100] [--real 5] [--json F]

A replay server and protocol-level actor hosts (a relay's link and sender, chunks that say who made
them) in a few processes; 64 are there on average, and 100 a minute join or leave: with a word,
without one, or by falling silent for some seconds. Beside them real `zapex actor` commands join and
leave. The server's process looks at every session and every chunk:

    doubled        actor numbers that two connected hosts had at the same time
    robbed         numbers taken from a host that was connected and heard
    refused wrongly  hosts that were refused although enough numbers were free
    twice          chunks that were taken in twice
    lost           acknowledged chunks that the replay never took in
"""

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.harness import add_json, evidence, percentiles
from benchmarks.support.machine import ROOT, Watch
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import ACTOR, COMMITTED, COUNT, HOST, INCARNATION, SEQUENCE, STATE, STREAM
from zapex.chunks.store import ChunkStore
from zapex.config.settings import Config
from zapex.envs import environments
from zapex.errors import Fenced, Refused
from zapex.host.roster import NO_HOST, Roster
from zapex.machine.mailbox import Mailbox
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.net.listener import listen
from zapex.net.replay_ends import ZmqExperienceSource, ZmqParameters
from zapex.net.sample_sink import ZmqSampleSink
from zapex.net.server import LinkServer
from zapex.net.sessions import Session
from zapex.processes.child import PARENT_VARIABLE, child_setup
from zapex.replay.core import ReplayCore
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.run.run import Membership, Run
from zapex.wire.control import Bye, Error, Fault
from zapex.zmq_transport import ChunkSender

NUMBERS = 96  # actors of the run: 64 hosts, real ones, and those that left without a word
_SILENT_S = 10.0
_PROCESSES = 4
_START_S, _END_S = 180.0, 60.0
_LOOK_S = 0.05


def run_of(url: str) -> Run:
    """The run that all take part in."""
    config = Config().replace(
        env="CartPole-v1", preset="smoke", capacity=20_000, envs_per_actor=2, actors=NUMBERS,
        learning_starts=1_000, batch_size=64, hidden=64,
    )  # fmt: skip
    spec = environments.check("CartPole-v1", {})
    return Run(config, spec, Path(), membership=Membership("replay", url))


class Server:
    """A replay server's own parts, and what they may never do."""

    def __init__(self) -> None:
        run = run_of("tcp://127.0.0.1:0")
        self._run, plan = run, run.plan
        layout = plan.replay
        self.replay = ReplayCore(layout, seed=1, buffer=aligned_zeros(layout.nbytes))
        roster = aligned_zeros(Roster.required_bytes(NUMBERS))
        self.roster = Roster(roster, NUMBERS, self.replay.store.header_rows)
        words = aligned_zeros(Mailbox.required_bytes(plan.parameter_bytes))
        mailbox = Mailbox(words, plan.parameter_bytes, create=True)
        self.server = LinkServer(
            listen(run.membership.url, Security(), run.form.largest_request_bytes),  # type: ignore[union-attr]
            run.form, run.config.shared(), self.roster, incarnation=time.time_ns(),
            params_version=lambda: mailbox.version,
        )  # fmt: skip
        self.source = ZmqExperienceSource(self.server, self.replay.store)
        self.sink = ZmqSampleSink(self.server, self.replay.store)
        ZmqParameters(self.server, mailbox)
        streams = run.config.actor.envs_per_actor
        limits = LimiterConfig(
            samples_per_insert=0, tolerance=0, min_size_to_sample=1, batch=1,
            grant=streams * layout.chunk, capacity=layout.capacity,
        )  # fmt: skip
        self.intake = Intake(
            self.source, self.replay, limits, actors=NUMBERS, streams_per_actor=streams
        )
        self.counts = Counter({"refused": 0, "refused wrongly": 0})
        self.taken: Counter[int] = Counter()  # chunks, by host
        self._seen: set[tuple[int, ...]] = set()
        self._had: dict[int, tuple[int, ...]] = {}
        self._watch()

    def _watch(self) -> None:
        sessions, accept = self.server.sessions, self.replay.accept
        join = sessions.join

        def joined(peer: bytes, hello: Any, role: Any, address: str) -> Session | Error:
            now_s, here = time.monotonic(), list(sessions.of_roles("relay"))
            found = join(peer, hello, role, address)
            if isinstance(found, Error) and found.fault == Fault.FULL:
                there = {s.host for s in here if now_s - s.heard_s < 60}
                owners = [self.roster.host(n) for n in range(NUMBERS)]
                free = sum(o in (NO_HOST, hello.host) or o not in there for o in owners)
                self.counts["refused"] += 1
                self.counts["refused wrongly"] += free >= hello.actors
            return found

        def accepted(slot: int) -> int:
            header = self.replay.store.header_rows[slot]
            who = tuple(header[[HOST, ACTOR, INCARNATION, SEQUENCE]].tolist())
            self.counts["twice"] += who in self._seen
            self._seen.add(who)
            self.taken[who[0]] += 1
            self.counts["chunks"] += 1
            return accept(slot)

        sessions.join = joined  # type: ignore[method-assign]
        self.replay.accept = accepted  # type: ignore[method-assign]

    def look(self) -> None:
        """Who has which numbers, now."""
        now_s, owner = time.monotonic(), {}
        sessions = list(self.server.sessions.of_roles("relay"))
        there = [s for s in sessions if any(s.peers) and now_s - s.heard_s < _SILENT_S - 1]
        for session in there:
            for number in session.actors:
                self.counts["doubled"] += owner.setdefault(number, session.host) != session.host
                self.counts["robbed"] += self.roster.host(number) != session.host
            self.counts["sessions"] += self._had.get(session.host) is None and bool(session.actors)
            self._had[session.host] = session.actors
        self.counts["looks"] += 1
        self.counts["most hosts"] = max(self.counts["most hosts"], len(there))

    def serve(self) -> None:
        """Until the parent says so; then print what was seen."""
        print(json.dumps(self.server.url), flush=True)
        look_s = 0.0
        while not select.select([sys.stdin], [], [], 0)[0]:
            self.intake.do_work(self.sink.issued, self.sink.released)
            if time.monotonic() > look_s:
                self.look()
                look_s = time.monotonic() + _LOOK_S
            self.server.wait(self.source.ready, 0.02)
        bad = self.server.counts["bad"] + self.server.counts["forbidden"]
        print(json.dumps({**self.counts, "bad": bad, "taken": dict(self.taken)}), flush=True)


class Host:
    """An actor host as the replay sees one: a relay's link, and chunks of one actor."""

    def __init__(self, run: Run, url: str, number: int, rng: random.Random) -> None:
        self.number, self._rng, self.began_s = number, rng, time.monotonic()
        self._form, self._layout = run.form, run.plan.replay.chunk_layout
        self.link = ZmqLink(
            url, "relay", number, time.time_ns(), self._form, run.config.shared(), Security(),
            schema_hash=self._layout.schema.hash, actors=1,
        )  # fmt: skip
        slots = 4
        nbytes = ChunkStore.required_bytes(self._layout, slots)
        self.store = ChunkStore(aligned_zeros(nbytes), self._layout, slots)
        self.sender, self._free = ChunkSender(self.link, self.store), list(range(slots))
        self._incarnation, self._sequence = time.time_ns(), 0
        self.joined_s = self.quiet_until_s = self._next_s = 0.0
        self.numbers: tuple[int, ...] = ()

    def turn(self) -> None:
        """What a relay does. Raises Fenced when its numbers are another host's now."""
        if time.monotonic() < self.quiet_until_s:
            return
        self.link.do_work()
        if self.link.is_open and self.link.welcome is not None:
            numbers = tuple(self.link.welcome.actors["actor"].tolist())
            if self.numbers and numbers != self.numbers:
                raise Fenced("another host has its number")
            if not self.numbers:
                self.numbers, self.joined_s = numbers, time.monotonic()
        self.sender.do_work()
        self._free += self.sender.take_freed()
        if self.numbers and self._free and time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + self._rng.uniform(0.2, 0.6)
            self._make(self._free.pop())

    def _make(self, slot: int) -> None:
        store, rows = self.store, self._rng.randint(1, self._layout.chunk)
        schema = self._layout.schema
        frames = np.arange(self._layout.chunk, dtype=np.uint16)[:, None]
        store.column(slot, "obs")[...] = 0.01
        store.column(slot, "obs_frames")[:] = frames
        store.column(slot, "next_obs_frames")[:] = frames + np.uint16(schema.n_step)
        for name, value in (("reward", 1.0), ("discount", 0.5), ("priority", 1.0)):
            store.column(slot, name)[:] = value
        header = store.header_rows[slot]
        header[COUNT], header[ACTOR], header[STREAM] = rows, 0, 0
        header[INCARNATION], header[SEQUENCE] = self._incarnation, self._sequence
        header[STATE] = COMMITTED
        self._sequence += 1
        self.sender.offer([slot])

    def leave(self, bye: bool) -> int:
        """Go. Returns how many of its chunks were acknowledged."""
        self.link.close(bye=Bye() if bye else None)
        return self._sequence - self.sender.unacknowledged


def hosts(url: str, share: int, a_minute: float, minutes: float, seed: int) -> dict[str, Any]:
    """One process's share of the hosts, which come and go."""
    run, rng = run_of(url), random.Random(seed)
    there: list[Host] = []
    counts: Counter[str] = Counter()
    acked: dict[int, int] = {}
    waits_s: list[float] = []
    numbers = iter(range(1 + (seed << 32), (seed + 1) << 32))
    stop_s, next_s = time.monotonic() + 60 * minutes, 0.0

    def gone(host: Host, how: str) -> None:
        counts[how] += 1
        acked[host.number] = host.leave(how == "with a word")
        there.remove(host)

    while time.monotonic() < stop_s:
        for host in list(there):
            before = host.joined_s
            try:
                host.turn()
            except (Fenced, Refused):
                gone(host, "lost its number")
                continue
            if host.joined_s and not before and counts["came"] > share:  # not the first ones
                waits_s.append(host.joined_s - host.began_s)
        if time.monotonic() > next_s:
            full = len(there) >= share
            next_s = time.monotonic() + (rng.expovariate(a_minute / 60) if full else 0.05)
            joined = [host for host in there if host.numbers]
            if joined and (len(there) > share or (full and rng.random() < 0.5)):
                host, how = rng.choice(joined), rng.random()
                if how < 0.2:
                    counts["fell silent"] += 1
                    host.quiet_until_s = time.monotonic() + rng.choice((2.0, 8.0, 15.0))
                else:
                    gone(host, "with a word" if how < 0.6 else "without a word")
            else:
                counts["came"] += 1
                there.append(Host(run, url, next(numbers), rng))
        time.sleep(0.004)
    waiting = sum(not host.numbers for host in there)
    for host in list(there):
        gone(host, "at the end")
    return {"counts": counts, "acknowledged": acked, "waits_s": waits_s, "waiting": waiting}


def _child(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stress.churn", "--role", *words], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())},
    )  # fmt: skip


def _answer(child: subprocess.Popen[str], patience_s: float) -> Any:
    if not select.select([child.stdout], [], [], patience_s)[0]:
        raise TimeoutError(f"a child has not answered within {patience_s:g} s")
    assert child.stdout is not None
    return json.loads(child.stdout.readline())


def _real(url: str, directory: Path, number: int) -> subprocess.Popen[bytes]:
    """A real actor host."""
    words = ["actor", "--replay", url, "--actors", "1", "--run-dir", f"real{number}"]
    words += ["--config", "run.toml", "--plain"]
    with (directory / f"real{number}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "zapex", *words], cwd=directory, stdout=log,
            stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def _keep_real(
    url: str, directory: Path, a_minute: float, minutes: float, ended: Callable[[], bool]
) -> tuple[int, list[str]]:
    """Real hosts that come, and go after some seconds by SIGINT or SIGKILL. Returns what is odd."""
    rng, started, odd = random.Random(7), 0, []
    (directory / "run.toml").write_text(run_of(url).config.to_toml())
    there: list[tuple[subprocess.Popen[bytes], float, int]] = []
    stop_s, next_s = time.monotonic() + 60 * minutes, time.monotonic()
    try:
        while time.monotonic() < stop_s and not ended():
            now_s = time.monotonic()
            if a_minute and now_s > next_s:
                next_s = now_s + 60 / a_minute
                there.append((_real(url, directory, started), now_s + rng.uniform(15, 25), started))
                started += 1
            for one in list(there):
                process, leaves_s, number = one
                if process.poll() is not None:
                    said = (directory / f"real{number}.txt").read_text()[-400:]
                    odd.append(f"real host {number} ended by itself ({process.returncode}): {said}")
                    there.remove(one)
                elif now_s > leaves_s:
                    process.send_signal(rng.choice((signal.SIGINT, signal.SIGKILL)))
                    process.wait(_END_S)
                    there.remove(one)
            time.sleep(0.1)
    finally:
        for process, _, _ in there:
            process.send_signal(signal.SIGINT)
        for process, _, _ in there:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return started, odd


def churn(minutes: float, count: int, a_minute: float, real: float, seed: int) -> dict[str, Any]:
    """All of it. Returns the facts."""
    children = [_child("server")]
    try:
        url = _answer(children[0], _START_S)
        share, rate = count // _PROCESSES, a_minute / _PROCESSES
        for i in range(_PROCESSES):
            words = [url, str(share), str(rate), str(minutes), str(1 + seed * _PROCESSES + i)]
            children.append(_child("hosts", *words))
        with tempfile.TemporaryDirectory(prefix="zapex-churn-") as name:
            started, odd = _keep_real(
                url, Path(name), real, minutes,
                lambda: any(child.poll() is not None for child in children),
            )  # fmt: skip
        found = [_answer(child, 60 * minutes + _START_S) for child in children[1:]]
        time.sleep(1.0)
        assert children[0].stdin is not None
        children[0].stdin.write("over\n")
        children[0].stdin.flush()
        seen = _answer(children[0], _END_S)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    taken = {int(host): chunks for host, chunks in seen.pop("taken").items()}
    acked = {int(h): n for one in found for h, n in one["acknowledged"].items()}
    counts: Counter[str] = sum((Counter(one["counts"]) for one in found), Counter())
    waits_s = [wait for one in found for wait in one["waits_s"]]
    left = sum(counts[how] for how in ("with a word", "without a word", "fell silent"))
    return {
        "minutes": minutes, "joins_and_leaves_a_minute": (counts["came"] + left) / minutes,
        "hosts": dict(counts), "real_hosts": started, "odd": odd,
        "join_ms": percentiles(waits_s, 1e-3), "still_waiting": sum(o["waiting"] for o in found),
        "acknowledged": sum(acked.values()),
        "lost": sum(max(0, n - taken.get(host, 0)) for host, n in acked.items()),
        "server": seen,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Hosts that come and go; the exit code says whether anything was wrong."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--role"]:
        child_setup(f"churn {words[1]}")
        if words[1] == "server":
            Server().serve()
        else:
            url, share, rate, minutes, seed = words[2:]
            print(json.dumps(hosts(url, int(share), float(rate), float(minutes), int(seed))))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--a-minute", type=float, default=100.0, help="joins and leaves")
    parser.add_argument("--real", type=float, default=5.0, help="`zapex actor` joins a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(words)
    watch = Watch()
    facts = churn(options.minutes, options.hosts, options.a_minute, options.real, options.seed)
    print(json.dumps(facts, indent=1))
    if options.json:
        add_json(options.json, "churn", "churn", facts, evidence(watch, None))
    seen = facts["server"]
    wrong = [seen.get(k, 0) for k in ("doubled", "robbed", "refused wrongly", "twice", "bad")]
    return int(any((*wrong, facts["lost"], facts["odd"])))


if __name__ == "__main__":
    sys.exit(main())
