"""Processes on a network killed, links cut: every acknowledged chunk is at the replay, once.

    python -m tests.stress.network_kills [--kills 300] [--cuts 100] [--long-cut 60] [--json FILE]

A replay server, an actor host's relay and a learner, each a process, talk over tcp through a link
that is one more process. What their parents own in a real run (the replay's memory, the slots of
the actors' host) is shared memory here; the three are killed with SIGKILL at random times and
forked again, and the link is cut, or frozen (half open), or cuts messages short. The replay's
memory is large enough that nothing is evicted: at the end it must hold every chunk that was ever
committed on the actors' host, whole and once, each incarnation from its first on without a gap.
"""

import argparse
import json
import mmap
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import add_json
from tests.lossy_link import LossyLink
from tests.stress.forks import Child, sleep_until
from tests.test_zmq_faults import Relay
from tests.transport_rigs import (
    BATCH,
    BETA,
    PARAMETER_BYTES,
    SCHEMA,
    Memory,
    NetworkReplay,
    layout_of,
    make_link,
)
from zapex.batch import Batch
from zapex.chunk_store import ChunkStore
from zapex.schema import (
    ACTOR,
    COMMITTED,
    COUNT,
    HOST,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
    BatchLayout,
)
from zapex.zmq_transport import ZmqParameterSink, ZmqSampleSource

_SLOTS, _HOST_NUMBER, _STUCK_S = 64, 7, 90.0
(_SERVER_PORT, _LINK_PORT, _LIFE, _MADE, _ACKNOWLEDGED, _BATCHES, _WRONG, _PUBLISHED, _COMMAND,
 _DONE, _WAITING, _STALE) = range(12)  # fmt: skip
_NOTHING, _CUT, _FREEZE, _TRUNCATE, _HEAL = range(5)


def shared(nbytes: int) -> np.ndarray:
    """Zeros that forked children share."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class Plan:
    """The memory that outlives every process but this one."""

    def __init__(self, transitions: int) -> None:
        self.layout = layout_of(transitions)
        self.memory = Memory.__new__(Memory)
        own = Memory(self.layout, 1)
        self.memory.layout, self.memory.actors = self.layout, 1
        for name in ("experience", "roster", "parameters"):
            buffer = shared(getattr(own, name).nbytes)
            buffer[:] = getattr(own, name)
            setattr(self.memory, name, buffer)
        chunk = self.layout.chunk_layout
        self.slots = shared(ChunkStore.required_bytes(chunk, _SLOTS))
        self.words = shared(8 * 64).view(np.int64)


# The processes.


def server(plan: Plan) -> Callable[[], object]:
    """A replay server; answers whatever is asked."""
    made: list[NetworkReplay] = []

    def work() -> None:
        if not made:
            port = int(plan.words[_SERVER_PORT])
            made.append(NetworkReplay(plan.memory, f"tcp://127.0.0.1:{port}"))
            plan.words[_SERVER_PORT] = int(made[0].url.rpartition(":")[2])
        replay = made[0]
        replay.turn()
        for keys, priorities in replay.sink.updates():
            _, stale = replay.replay.update_priorities(keys, priorities)
            plan.words[_STALE] += stale
        for _ in range(replay.sink.requests()):
            if len(replay.replay) < BATCH:
                break
            replay.sink.answer(replay.replay.draw(BATCH))
        replay.server.wait(replay.source.ready, 0.001)

    return work


class _SharedRelay(Relay):
    """A relay and its actor in one process; their slots are the parent's."""

    def __init__(self, plan: Plan) -> None:
        words, chunk = plan.words, plan.layout.chunk_layout
        self.layout, self.host, self.actors = plan.layout, _HOST_NUMBER, 1
        self.store = ChunkStore(plan.slots, chunk, _SLOTS)
        states = self.store.header_rows[:, STATE]
        self.free = np.flatnonzero(states != COMMITTED).tolist()
        words[_LIFE] += 1
        self.life = int(words[_LIFE]) - 1
        self.incarnation, self.next = {0: int(words[_LIFE])}, {0: 0}
        self.offered = set()
        self.rng = np.random.default_rng(int(words[_LIFE]))
        self.connect(f"tcp://127.0.0.1:{words[_LINK_PORT]}")


def relay(plan: Plan) -> Callable[[], object]:
    """Makes chunks as fast as they are taken."""
    made: list[_SharedRelay] = []

    def work() -> None:
        if not made:
            made.append(_SharedRelay(plan))
        it = made[0]
        before = it.sender.counts["acknowledged"]
        if it.sender.unacknowledged < 24 and it.make():
            plan.words[_MADE] += 1
        it.turn()
        plan.words[_ACKNOWLEDGED] += it.sender.counts["acknowledged"] - before
        plan.words[_WAITING] += bool(it.link.waiting)
        it.link.wait(lambda: it.link.ready() or it.sender.unacknowledged < 24, 0.001)

    return work


def learner(plan: Plan) -> Callable[[], object]:
    """Checks each row of each batch, sends priorities back, publishes."""
    made: list[Any] = []
    batch = Batch.empty(BatchLayout(SCHEMA, BATCH))

    def work() -> None:
        words = plan.words
        if not made:
            words[_LIFE] += 1
            url = f"tcp://127.0.0.1:{words[_LINK_PORT]}"
            link = make_link(url, "learner", 8, plan.layout, incarnation=int(words[_LIFE]))
            made.extend((link, ZmqSampleSource(link, BETA), ZmqParameterSink(link)))
        link, source, sink = made
        if source.outstanding < 2:
            source.request()
        if source.ready():
            source.poll(batch)
            # A chunk's rows say which incarnation made them: 1 or more.
            words[_WRONG] += int((batch["mask"][:, 1] < 1).sum() + (batch["mask"][:, 0] != 0).sum())
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
            made.append(LossyLink(int(plan.words[_SERVER_PORT])))
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


# The run.


class Run:
    """All processes, and what is done to them."""

    def __init__(self, seed: int, transitions: int) -> None:
        self.plan, self.draw = Plan(transitions), random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.children: dict[str, Child] = {}
        self._makers = {"server": server, "link": link, "relay": relay, "learner": learner}
        for name in self._makers:
            self._start(name)
            port = {"server": _SERVER_PORT, "link": _LINK_PORT}.get(name)
            if port is not None:
                sleep_until(lambda port=port: self.plan.words[port], _STUCK_S, name)  # type: ignore[misc]
        self.longest_s = 0.0

    def _start(self, name: str) -> None:
        self.children[name] = Child(self._makers[name](self.plan))

    def progress(self) -> None:
        """Wait until chunks are acknowledged and batches come again."""
        words = self.plan.words
        chunks, batches = int(words[_ACKNOWLEDGED]), int(words[_BATCHES])
        took = sleep_until(
            lambda: words[_ACKNOWLEDGED] > chunks + 5 and words[_BATCHES] > batches, _STUCK_S,
            f"progress after {dict(self.counts)}",
        )  # fmt: skip
        self.longest_s = max(self.longest_s, took)

    def kill(self) -> None:
        """One of the three, at some time of its work; started again at once."""
        name = self.draw.choice(("server", "relay", "learner"))
        self.children[name].kill()
        self.counts[f"kills of the {name}"] += 1
        self._start(name)

    def command(self, what: int) -> None:
        self.plan.words[_COMMAND] = what
        sleep_until(lambda: self.plan.words[_COMMAND] == _NOTHING, _STUCK_S, "the link")

    def cut(self, seconds: float) -> None:
        """The link is cut, frozen, or cuts short, and healed."""
        what = self.draw.choice((_CUT, _CUT, _FREEZE, _TRUNCATE))
        self.command(what)
        time.sleep(seconds)
        self.command(_HEAL)
        self.counts[{_CUT: "cuts", _FREEZE: "freezes", _TRUNCATE: "short messages"}[what]] += 1

    def settle(self) -> dict[str, int]:
        """End the relay's work, let all arrive, and take stock."""
        words = self.plan.words
        self.progress()
        store = ChunkStore(self.plan.slots, self.plan.layout.chunk_layout, _SLOTS)
        self.children.pop("relay").kill()
        draining = Child(self._drain())
        sleep_until(
            lambda: not (store.header_rows[:, STATE] == COMMITTED).any(), _STUCK_S, "the rest"
        )
        draining.kill()
        time.sleep(0.5)
        for child in self.children.values():
            child.kill()
        return self._audit(int(words[_MADE]))

    def _drain(self) -> Callable[[], object]:
        made: list[_SharedRelay] = []

        def work() -> None:
            if not made:
                made.append(_SharedRelay(self.plan))
            made[0].turn()
            made[0].link.wait(made[0].link.ready, 0.001)

        return work

    def _audit(self, made: int) -> dict[str, int]:
        replay = self.plan.memory.replay()
        store, rows = replay.store, replay.store.header_rows
        slots = np.flatnonzero(np.isin(rows[:, STATE], (COMMITTED, LIVE)))
        seen: Counter[tuple[int, int]] = Counter()
        torn = 0
        for slot in slots.tolist():
            header = rows[slot]
            assert header[HOST] == _HOST_NUMBER
            assert header[ACTOR] == 0
            who, count = (int(header[INCARNATION]), int(header[SEQUENCE])), int(header[COUNT])
            seen[who] += 1
            same = (
                (store.column(slot, "mask")[:count, 1] == who[0]).all()
                and (store.column(slot, "action")[:count] == who[1]).all()
                and (store.column(slot, "reward")[:count] == np.arange(count)).all()
            )
            torn += not same
        lives: dict[int, set[int]] = {}
        for incarnation, sequence in seen:
            lives.setdefault(incarnation, set()).add(sequence)
        gaps = sum(max(found) + 1 - len(found) for found in lives.values())
        return {
            "committed_by_actors": made,
            "at_the_replay": len(seen),
            # A relay killed between its commit and its own count has made one more.
            "lost": gaps + max(0, made - len(seen)),
            "doubled": sum(seen.values()) - len(seen),
            "torn": torn,
        }


def run(kills: int, cuts: int, long_cut_s: float, seed: int, transitions: int) -> dict[str, Any]:
    """Kills and cuts in random order, then the audit."""
    start = time.monotonic()
    it = Run(seed, transitions)
    try:
        it.progress()
        todo = ["kill"] * kills + ["cut"] * cuts
        it.draw.shuffle(todo)
        for i, what in enumerate(todo):
            time.sleep(it.draw.random() * 0.3)
            if what == "kill":
                it.kill()
            else:
                it.cut(it.draw.random() * 1.0)
            if i % 4 == 3:
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
        "acknowledged": int(words[_ACKNOWLEDGED]),
        "batches": int(words[_BATCHES]),
        "wrong_rows": int(words[_WRONG]),
        "versions_published": int(words[_PUBLISHED]),
        "longest_standstill_s": round(it.longest_s, 2),
        "seconds": round(time.monotonic() - start, 1),
        "done": dict(it.counts),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills and cuts of a run over tcp.")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--long-cut", type=float, default=60.0, help="seconds of one more cut")
    parser.add_argument(
        "--transitions", type=int, default=1_600_000, help="the replay has room for"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    result = run(chosen.kills, chosen.cuts, chosen.long_cut, chosen.seed, chosen.transitions)
    print(json.dumps(result, indent=1))
    if chosen.json:
        add_json(chosen.json, "hostile", "kills_and_cuts", result)
    bad = result["lost"] + result["doubled"] + result["torn"] + result["wrong_rows"]
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
