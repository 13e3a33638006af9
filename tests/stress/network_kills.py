"""Processes on a network killed, links cut: every acknowledged chunk is at the replay, once.

    python -m tests.stress.network_kills [--kills 300] [--cuts 100] [--long-cut 60]
                                         [--scheme fstack] [--json FILE]

A replay server, an actor host's actor and relay, and a learner, each a process, talk over TCP
through a link that is one more process. What their parents own in a real run (the replay's memory,
the memory of the actor host) is shared memory here; the four are killed with SIGKILL at random
times and forked again, the actor alone or together with its relay, and the link is cut, or frozen
(half open), or cuts messages short. The replay's memory is large enough that nothing is evicted: at
the end it must hold every chunk that was ever committed on the actors' host, whole and once, each
incarnation from its first on without a gap, and every slot of the actor host must be free.
"""

import argparse
import json
import mmap
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.harness import add_json, evidence
from benchmarks.support.machine import Watch
from tests.stress.forks import Child, sleep_until
from tests.support import fstack
from tests.support.lossy_link import LossyLink
from tests.support.relays import fill, is_whole, wrong_rows
from tests.support.transport_rigs import (
    BATCH,
    BETA,
    OPEN,
    PARAMETER_BYTES,
    SCHEMA,
    Memory,
    NetworkReplay,
    layout_of,
    make_intake,
    make_link,
)
from zapex.chunks.batch import Batch
from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    FREE,
    HOST,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
    BatchLayout,
)
from zapex.chunks.store import set_state_kernel
from zapex.host.parts import PARTS
from zapex.host.plan import HostPlan
from zapex.net.sample_source import ZmqSampleSource
from zapex.roles.relay import Outbox, Relay
from zapex.shm_transport import HostMemory
from zapex.zmq_transport import ChunkSender, ZmqParameterSink, ZmqParameterSource

_HOST_NUMBER, _STREAMS, _STUCK_S = 7, 8, 90.0
_ROOM = 3  # chunks of each stream on the actor host, as a real one has them
(_SERVER_PORT, _LINK_PORT, _LIFE, _BATCHES, _WRONG, _PUBLISHED, _COMMAND, _WAITING,
 _STALE) = range(9)  # fmt: skip
_MOST_LIVES = 1 << 16
_KILLS = (("server",), ("relay",), ("learner",), ("actor",), ("actor", "relay"), ("relay", "actor"))
_OF = {"tcp": "", "zmtp": "_zmtp", "fstack": "_fstack"}  # in the name of a result
_IN_FLIGHT = 16  # acknowledgements that the relay had received and not counted
_NOTHING, _CUT, _FREEZE, _TRUNCATE, _HEAL = range(5)


def shared(nbytes: int) -> np.ndarray:
    """Zeros that forked children share."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class Plan:
    """The memory that outlives every process but this one."""

    def __init__(self, transitions: int, scheme: str = "tcp") -> None:
        self.scheme, self.server_host = scheme, "127.0.0.1"  # of the server's sockets
        self.layout = layout_of(transitions, _STREAMS)
        self.memory = Memory.__new__(Memory)
        own = Memory(self.layout, 1)
        self.memory.layout, self.memory.actors = self.layout, 1
        for name in ("experience", "roster", "parameters"):
            buffer = shared(getattr(own, name).nbytes)
            buffer[:] = getattr(own, name)
            setattr(self.memory, name, buffer)
        self.words = shared(8 * 64).view(np.int64)
        self.made = shared(8 * _MOST_LIVES).view(np.int64)  # chunks of each life of the actor
        if scheme == "fstack":  # which does not choose a port
            self.server_host = fstack.addresses(fstack.setup())[0]
            self.words[_SERVER_PORT] = fstack.free_port()
        self.host_plan = HostPlan(
            replay=layout_of(_ROOM * _STREAMS * self.layout.chunk, _STREAMS), actors=1,
            envs_per_actor=_STREAMS, batch_size=BATCH, prefetch=1,
            parameter_bytes=PARAMETER_BYTES, beta=BETA,
            eval_episodes=1, part=PARTS["actor"],
        )  # fmt: skip
        blocks = shared(self.host_plan.nbytes), shared(self.host_plan.replay.nbytes)
        self.eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in self.host_plan.roles]
        self.host = HostMemory(self.host_plan, *blocks, self.eventfds, create=True)

    def host_again(self) -> HostMemory:
        """The actor host's memory, as a child that attaches to it sees it."""
        return HostMemory(self.host_plan, self.host.control, self.host.experience, self.eventfds)

    def new_life(self) -> int:
        """A larger incarnation than any before."""
        self.words[_LIFE] += 1
        return int(self.words[_LIFE])

    @property
    def acknowledged(self) -> int:
        """Chunks, as far as the relay's lives came to count them."""
        return int(self.host.metrics("relay").snapshot(alive=False)["acknowledged"])


# The processes.


def server(plan: Plan) -> Callable[[], object]:
    """A replay server; answers whatever is asked."""
    made: list[NetworkReplay] = []

    def work() -> None:
        if not made:
            port = int(plan.words[_SERVER_PORT])
            made.append(NetworkReplay(plan.memory, f"{plan.scheme}://{plan.server_host}:{port}"))
            plan.words[_SERVER_PORT] = int(made[0].url.rpartition(":")[2])
        replay = made[0]
        replay.turn()
        for keys, priorities in replay.sink.updates():
            _, stale = replay.replay.reprioritise(keys, priorities.astype(np.float64))
            plan.words[_STALE] += stale
        for _ in range(replay.sink.requests()):
            if len(replay.replay) < BATCH:
                break
            replay.sink.answer(replay.replay.draw(BATCH))
        replay.server.wait(replay.source.ready, 0.001)

    return work


def actor(plan: Plan, incarnation: int) -> Callable[[], object]:
    """Makes chunks of rows that say who made them, as fast as it gets slots."""
    host = plan.host_again()
    sink, rng = host.experience_sink(0, incarnation), np.random.default_rng(incarnation)
    store = sink.store
    numbers = iter(range(1 << 60))

    def work() -> None:
        slots = sink.try_claim()
        if slots is None:
            time.sleep(100e-6)
            return
        for stream, slot in enumerate(slots.tolist()):
            fill(store, slot, (0, incarnation, next(numbers)), stream, rng)
            set_state_kernel(store.headers, slot, COMMITTED)
            plan.made[incarnation] += 1
            sink.commit(np.array([slot]))

    return work


def relay(plan: Plan) -> Callable[[], object]:
    """The real one, over the link."""
    made: list[Any] = []

    def work() -> None:
        if not made:
            host, layout = plan.host_again(), plan.host_plan.replay
            link = make_link(
                f"tcp://127.0.0.1:{plan.words[_LINK_PORT]}", "relay", _HOST_NUMBER, plan.layout,
                actors=1, incarnation=plan.new_life(),
            )  # fmt: skip
            source, store = host.experience_source(), host.store()
            outbox = Outbox(store, layout, ChunkSender(link, store))
            made.append(link)
            made.append(
                Relay(
                    make_intake(source, outbox, 1), outbox, source, ZmqParameterSource(link),
                    host.mailbox(), host.metrics("relay"), parameter_bytes=PARAMETER_BYTES,
                    link_ready=link.ready, report=lambda: 0, ended=lambda: False,
                )
            )  # fmt: skip
        link, role = made
        role.do_work()
        plan.words[_WAITING] += bool(link.waiting)
        link.wait(role.ready, 0.001)

    return work


def learner(plan: Plan) -> Callable[[], object]:
    """Checks each row of each batch, sends priorities back, publishes."""
    made: list[Any] = []
    batch = Batch.empty(BatchLayout(SCHEMA, BATCH))

    def work() -> None:
        words = plan.words
        if not made:
            url = f"tcp://127.0.0.1:{words[_LINK_PORT]}"
            link = make_link(url, "learner", 8, plan.layout, incarnation=plan.new_life())
            made.extend(
                (link, ZmqSampleSource(link, BETA, piece_rows=BATCH // 3), ZmqParameterSink(link))
            )
        link, source, sink = made
        if source.outstanding < 2:
            source.request()
        if source.poll(batch) is not None:
            words[_WRONG] += wrong_rows(batch, plan.layout.chunk_layout)
            source.update(batch.keys, np.ones(BATCH, np.float32))
            words[_BATCHES] += 1
            if words[_BATCHES] % 50 == 0 and link.is_open:
                version = max(sink.version, int(words[_PUBLISHED])) + 1
                sink.publish(version, np.full(PARAMETER_BYTES, version % 256, np.uint8))
                words[_PUBLISHED] = version
        link.wait(link.ready, 0.001)

    return work


def link(plan: Plan) -> Callable[[], object]:
    """The wire between the clients and the server; obeys the parent's commands."""
    made: list[LossyLink] = []

    def work() -> None:
        if not made:
            made.append(LossyLink(int(plan.words[_SERVER_PORT]), target_host=plan.server_host))
            plan.words[_LINK_PORT] = made[0].port
        command = int(plan.words[_COMMAND])
        if command:
            wire = made[0]
            if command == _CUT:
                wire.cut()
            elif command == _FREEZE:
                wire.freeze()
            elif command == _TRUNCATE:
                wire.truncate_after = 20_000
            else:
                wire.heal()
            plan.words[_COMMAND] = _NOTHING
        time.sleep(0.002)

    return work


def warm_up() -> None:
    """Every kernel is loaded before the first fork: all roles in turn, and no wire between."""
    plan = Plan(10_000)
    words = plan.words
    plan.host.set_incarnation("actor 0", 1)
    serve = server(plan)
    serve()
    words[_LINK_PORT] = words[_SERVER_PORT]
    roles = [serve, relay(plan), learner(plan), actor(plan, 1)]

    def turned() -> bool:
        for work in roles:
            work()
        return bool(words[_PUBLISHED])

    sleep_until(turned, _STUCK_S, "the warm-up")
    while OPEN:
        OPEN.pop().close()


# The run.


class Run:
    """All processes, and what is done to them."""

    def __init__(self, seed: int, transitions: int, scheme: str) -> None:
        self.plan, self.draw = Plan(transitions, scheme), random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.children: dict[str, Child] = {}
        self._makers = {"server": server, "link": link, "relay": relay, "learner": learner}
        for name in (*self._makers, "actor"):
            self._start(name)
            port = {"server": _SERVER_PORT, "link": _LINK_PORT}.get(name)
            if port is not None:
                sleep_until(lambda port=port: self.plan.words[port], _STUCK_S, name)  # type: ignore[misc]

    def _start(self, name: str) -> None:
        if name == "actor":
            incarnation = self.plan.new_life()
            self.plan.host.set_incarnation("actor 0", incarnation)
            self.children[name] = Child(actor(self.plan, incarnation))
        else:
            self.children[name] = Child(self._makers[name](self.plan))

    def _end(self, *names: str) -> None:
        """Kill them in one moment; then tell of the actor, as its parent does."""
        for name in names:
            os.kill(self.children[name].pid, signal.SIGKILL)
        for name in names:
            self.children.pop(name).kill()
        if "actor" in names:
            self.plan.host.set_incarnation("actor 0", 0)

    def progress(self) -> None:
        """Wait until chunks are acknowledged and batches come again."""
        words, plan = self.plan.words, self.plan
        chunks, batches = plan.acknowledged, int(words[_BATCHES])
        sleep_until(
            lambda: plan.acknowledged > chunks + 5 and words[_BATCHES] > batches, _STUCK_S,
            f"progress after {dict(self.counts)}",
        )  # fmt: skip

    def kill(self) -> None:
        """One of the four, or two, at some time of their work; started again at once."""
        names = self.draw.choice(_KILLS)
        kind = f"kills of the {' and the '.join(names)}"
        self._end(*names)
        self.counts[kind] += 1
        for name in names:
            self._start(name)

    def command(self, what: int) -> None:
        self.plan.words[_COMMAND] = what
        sleep_until(lambda: self.plan.words[_COMMAND] == _NOTHING, _STUCK_S, "the link")

    def cut(self, seconds: float) -> None:
        """The link is cut, frozen, or cuts short, and healed."""
        what = self.draw.choice((_CUT, _CUT, _FREEZE, _TRUNCATE))
        kind = {_CUT: "cuts", _FREEZE: "freezes", _TRUNCATE: "short messages"}[what]
        self.command(what)
        began_at = self.plan.acknowledged
        time.sleep(seconds)
        if what == _CUT and self.plan.acknowledged > began_at + _IN_FLIGHT:
            raise RuntimeError(f"{self.plan.acknowledged - began_at} chunks came over a cut link")
        self.command(_HEAL)
        self.counts[kind] += 1

    def settle(self) -> dict[str, int]:
        """End the actor's work, let all arrive, and take stock."""
        self.progress()
        self._end("actor")
        rows = self.plan.host.store().header_rows
        sleep_until(lambda: not np.any(rows[:, STATE] != FREE), _STUCK_S, "all slots are free")
        time.sleep(0.5)
        for child in self.children.values():
            child.kill()
        return self._audit()

    def _audit(self) -> dict[str, int]:
        replay = self.plan.memory.replay()
        store, rows = replay.store, replay.store.header_rows
        slots = np.flatnonzero(np.isin(rows[:, STATE], (COMMITTED, LIVE)))
        seen: Counter[tuple[int, int]] = Counter()
        torn = 0
        for slot in slots.tolist():
            header = rows[slot]
            assert header[HOST] == _HOST_NUMBER
            assert header[ACTOR] == 0
            seen[int(header[INCARNATION]), int(header[SEQUENCE])] += 1
            torn += not is_whole(store, slot)
        made = {int(life): int(self.plan.made[life]) for life in np.flatnonzero(self.plan.made)}
        return {
            "committed_by_actors": sum(made.values()),
            "at_the_replay": len(seen),
            **account(seen, made),
            "torn": torn,
        }


def account(seen: Mapping[tuple[int, int], int], made: Mapping[int, int]) -> dict[str, int]:
    """How many chunks are lost and doubled, life by life: one too many hides no other's loss.

    seen: how often each (incarnation, sequence) is there. made: how many chunks each incarnation
    counted; one that was killed between its commit and its count has made one more.
    """
    lives: dict[int, set[int]] = {life: set() for life in made}
    for life, sequence in seen:
        lives.setdefault(life, set()).add(sequence)
    wanted = {life: max(made.get(life, 0), max(found, default=-1) + 1)
              for life, found in lives.items()}  # fmt: skip
    return {
        "lost": sum(wanted[life] - len(found) for life, found in lives.items()),
        "doubled": sum(seen.values()) - len(seen),
    }


def run(
    kills: int, cuts: int, long_cut_s: float, seed: int, transitions: int, scheme: str
) -> dict[str, Any]:
    """Kills and cuts in random order, then the audit."""
    start = time.monotonic()
    warm_up()
    it = Run(seed, transitions, scheme)
    try:
        it.progress()
        todo = ["kill"] * kills + ["cut"] * cuts
        it.draw.shuffle(todo)
        for what in todo:
            time.sleep(it.draw.random() * 0.3)
            if what == "kill":
                it.kill()
            else:
                it.cut(it.draw.random() * 1.0)
            # One in four is followed by the next at once, so that faults fall together, too.
            if it.draw.random() < 0.75:
                it.progress()
        it.progress()
        if long_cut_s:
            it.command(_CUT)
            waited = int(it.plan.words[_WAITING])
            time.sleep(long_cut_s)
            told = int(it.plan.words[_WAITING]) > waited
            it.command(_HEAL)
            it.counts["long cuts"] += 1
            it.counts["long cuts that clients told of"] += told
            it.progress()
        found = it.settle()
    finally:
        for child in it.children.values():
            try:
                child.kill()
            except (OSError, RuntimeError):
                continue
    words = it.plan.words
    return {
        **found,
        "acknowledged": it.plan.acknowledged,
        "batches": int(words[_BATCHES]),
        "wrong_rows": int(words[_WRONG]),
        "versions_published": int(words[_PUBLISHED]),
        "seconds": round(time.monotonic() - start, 1),
        "done": dict(it.counts),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills and cuts of a run over TCP.")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--long-cut", type=float, default=60.0, help="seconds of one more cut")
    parser.add_argument(
        "--transitions", type=int, default=1_600_000, help="the replay has room for"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--scheme", choices=tuple(_OF), default="tcp", help="of the server: libzmq, or not"
    )
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    watch = Watch()
    result = run(
        chosen.kills, chosen.cuts, chosen.long_cut, chosen.seed, chosen.transitions, chosen.scheme
    )
    print(json.dumps(result, indent=1))
    if chosen.json:
        add_json(
            chosen.json,
            "kills",
            f"network_kills{_OF[chosen.scheme]}",
            result,
            evidence(watch, None),
        )
    bad = result["lost"] + result["doubled"] + result["torn"] + result["wrong_rows"]
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
