"""One run: its faults, drawn from its seed, and what came of it."""

import math
import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.simulation import handles, library
from tests.simulation.clock import Timeline
from tests.simulation.cluster import (
    CALM_S,
    ActorMachine,
    Cluster,
    LearnerMachine,
    Process,
    ReplayMachine,
)
from tests.simulation.truth import Violation

FAULTY_S = 60.0  # how long there are faults
PROGRESS_S = 240.0
"""Once there are none. A host that only said hello keeps its numbers for 60 s; where turns take
a second, an actor needs more than a second for a row."""
_CALM_S = 30.0  # at the end of some runs, and nobody may complain
DRAIN_S = 60.0  # for what is committed when the run is over
_ORDER_S = 5.0  # that a process has to come to the step of its order
_RING = ["ring-written", "ring-committed", "ring-read", "ring-released"]
_MAILBOX = ["cell-marked", "cell-written", "cell-stamped", "value-published"]
_GRANTS = ["slot-reclaimed", "grant-written", "slot-granted"]
_ACTORS = [*_RING, "commits-taken", "grants-sent"]
_SAMPLES = [
    *_RING, "answer-written", "answer-given", "request-released", "update-applied",
    "update-released",
]  # fmt: skip
_REPLAY = [
    *_GRANTS, "leaves-set", "accept-stamped", "slot-live", "leaves-cleared", "generation-bumped",
    "slot-evicted", "slot-freed", "quarantine-ended",
]  # fmt: skip
_PUSHES = ["push-written", "push-committed"]
_ACTOR = [
    *_RING, "grants-taken", "slot-opened", "frame-written", "row-written", "chunk-stamped",
    "chunk-committed", "chunks-announced",
]  # fmt: skip
STEPS = {
    "actor": [*_ACTOR, "value-copied"],
    "actor that asks": [*_ACTOR, "question-written", "question-asked"],
    "inference": ["values-written", "question-answered", "value-copied"],
    "replay": [*_REPLAY, *_ACTORS, *_SAMPLES],
    "replay with learner": [*_REPLAY, *_SAMPLES, *3 * _PUSHES, "value-copied"],
    "replay on a network": [*_REPLAY, *_MAILBOX, *3 * _PUSHES, "value-copied"],
    "learner": [
        *_RING, *_MAILBOX, "batch-requested", "columns-copied", "rows-copied", "batch-gathered",
        "batch-released", "update-written", "update-sent",
    ],
    "learner on a network": _MAILBOX,
    "served replay": _REPLAY,
    "client": [],
    "owner": [],
    "program": [
        "slot-opened", "frame-written", "row-written", "chunk-stamped", "chunk-committed", *_RING,
        "batch-requested", "columns-copied", "rows-copied", "update-written", "update-sent",
    ],
    "relay": [*_GRANTS, *_ACTORS, *_MAILBOX],
    "join": [],
}  # fmt: skip
"""The steps of zapex's source that a role passes (docs/ring_protocol.md), where it may die."""


def _steps_of(process: Process) -> list[str]:
    shape, role = process.host.cluster.shape, process.name.split()[0]
    match role:
        case "replay" if process.host.cluster.library:
            role = "served replay"
        case "actor" if shape.central:
            role = "actor that asks"
        case "replay" if shape.shards:
            role = "replay with learner" if shape.learns_there else "replay on a network"
        case "learner" if isinstance(process.host, LearnerMachine):
            role = "learner on a network"
    return STEPS[role]


@dataclass(frozen=True)
class Fault:
    """What goes wrong at a time. The numbers say where and how, whatever is there then."""

    at_s: float
    kind: str
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.at_s:.2f} {self.kind} {' '.join(f'{n:.4f}' for n in self.numbers)}"


KINDS = {
    "die": 10,
    "stop": 2,
    "cut": 3,
    "cut one way": 3,
    "reset": 3,
    "slow": 2,
    "power": 1,
    "clock": 2,
}
_OF_ONE_MACHINE = {"die": 10, "stop": 10, "power": 1, "clock": 1}


def kind_of(seed: int) -> str:
    """What is simulated: mostly a run; or a replay's programs, by URL or by its handle."""
    return "url" if seed % 5 == 2 else "handle" if seed % 10 == 8 else "run"


def faults_of(seed: int) -> list[Fault]:
    """A run's faults. Some runs have few, so that others are not hidden by them."""
    rng = random.Random(f"faults {seed}")
    weights = _OF_ONE_MACHINE if kind_of(seed) == "handle" else KINDS
    kinds = rng.sample(list(weights), rng.randint(1, len(weights)))
    many = rng.choice((3, 15, 30, 60))
    chosen = rng.choices(kinds, [weights[kind] for kind in kinds], k=many)
    faults = [
        Fault(rng.uniform(0, FAULTY_S), kind, tuple(rng.random() for _ in range(4)))
        for kind in chosen
    ]
    return sorted(faults, key=lambda fault: fault.at_s)


def _pick(things: Sequence[Any], number: float) -> Any:
    return things[int(number * len(things))] if things else None


@dataclass
class Outcome:
    """What came of a run."""

    seed: int
    faults: Sequence[Fault]
    violation: str = ""
    history: list[str] = field(default_factory=list)
    simulated_s: float = 0.0
    facts: dict[str, int] = field(default_factory=dict)
    shape: Any = None

    @property
    def kind(self) -> str:
        """The first word of what is wrong."""
        return self.violation.partition(":")[0]


class _Nemesis:
    """Does the faults, and ends them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._time = cluster, cluster.time

    def do(self, fault: Fault) -> None:
        """A fault happens."""
        self._time.say(f"fault: {fault}")
        lasts_s = self._do(fault, FAULTY_S - self._time.now_s)
        self._cluster.trouble_s = max(self._cluster.trouble_s, self._time.now_s + lasts_s)

    def _do(self, fault: Fault, left_s: float) -> float:
        """Do it. Returns how long it lasts at most."""
        a, b, c, d = fault.numbers
        hosts = list(self._cluster.hosts.values())
        match fault.kind:
            case "die" | "stop":
                process = _pick([p for p in self._cluster.processes if p.role is not None], a)
                if process is None:
                    return 0.0
                named = _steps_of(process)
                lasts_s = min(left_s, 60 * b**3)
                until_s = self._time.now_s + lasts_s
                if fault.kind == "stop" and (c < 0.5 or not named):
                    process.stopped_until_s = until_s
                elif fault.kind == "stop":
                    self._order(process, _pick(named, 2 * c - 1), d, until_s)
                elif b < 0.2 or not named:
                    process.die()
                else:
                    self._order(process, _pick(named, c), d)
                return max(lasts_s, _ORDER_S)
            case "cut" | "cut one way":
                here, there = self._ends(a, b)
                lasts_s = min(left_s, 40 * c**2)
                for ways in ((here, there), (there, here))[: 1 + (fault.kind == "cut")]:
                    self._cluster.net.block(*ways, blocked=True)
                    self._time.after(
                        lasts_s, lambda w=ways: self._cluster.net.block(*w, blocked=False)
                    )
                return lasts_s
            case "reset":
                self._cluster.net.reset(*self._ends(a, b))
            case "slow":
                path = self._cluster.net.path(*self._ends(a, b))
                path.delay_s, path.bytes_per_s = (0.0, 2 * c**2), 10 ** (3 + 3 * d)
                lasts_s = min(left_s, 30 * d)
                self._time.after(lasts_s, lambda: self._heal(path))
                return lasts_s
            case "power":
                host = _pick(hosts, a)
                lasts_s = min(left_s, 20 * b)
                if not host.off and host.processes:
                    host.lose_power()
                    boots = host.boots
                    self._time.after(lasts_s, lambda: host.boots == boots and host.boot())
                return lasts_s
            case "clock":
                _pick(hosts, a).ahead_ns += int((b - 0.5) * 2e10)
        return 0.0

    @staticmethod
    def _heal(path: Any) -> None:
        path.delay_s, path.bytes_per_s = (0.0001, 0.002), 1e9

    def _ends(self, a: float, b: float) -> tuple[str, str]:
        """A machine with a replay and one with something else, in any order."""
        hosts = self._cluster.hosts.values()
        replays = [h.name for h in hosts if h.name.startswith("replay")]
        others = [h.name for h in hosts if h.name not in replays] or replays
        ends = _pick(replays, a), _pick(others, b)
        return ends if a * 8 % 1 < 0.5 else (ends[1], ends[0])

    def _order(self, process: Process, step: str, count: float, until_s: float = 0.0) -> None:
        process.order = step, 1 + int(20 * count**3), until_s
        life = process.life

        def late() -> None:
            if life == process.life and process.order is not None and process.order[2] == until_s:
                process.order = None
                if not until_s:
                    process.die()

        self._time.after(_ORDER_S, late)


def run(seed: int, faults: Sequence[Fault] | None = None) -> Outcome:
    """A run with its own faults, or with others."""
    faults = faults_of(seed) if faults is None else faults
    time = Timeline(seed)
    cluster = Cluster(time)
    builds = {"url": library.build, "handle": handles.build, "run": Cluster.build}
    builds[kind_of(seed)](cluster)
    outcome = Outcome(seed, faults, history=time.history, shape=cluster.library or cluster.shape)
    nemesis = _Nemesis(cluster)
    time.say(str(outcome.shape))
    for fault in faults:
        time.after(fault.at_s, lambda f=fault: nemesis.do(f))
    try:
        cluster.boot()
        time.run(FAULTY_S)
        time.say("no faults any more")
        second = cluster.hosts.get("replay1")
        if cluster.shape.loses_shard and isinstance(second, ReplayMachine):
            second.lose_power()
            cluster.trouble_s = math.inf
        _progress(cluster)
        if seed % 9 == 4 and cluster.trouble_s < math.inf:
            time.run(max(time.now_s, cluster.trouble_s + CALM_S) + _CALM_S)
        _settle(cluster)
    except Violation as violation:
        outcome.violation = str(violation)
    except Exception:
        outcome.violation = f"crash: {traceback.format_exc()}"
    try:
        for host in cluster.hosts.values():
            for program in host.programs if isinstance(host, library.ClientMachine) else ():
                program.end()
    except Exception:
        outcome.violation = outcome.violation or f"crash: {traceback.format_exc()}"
    cluster.disk.cleanup()
    checker = cluster.checker
    time.say(f"outcome: {outcome.violation or 'fine'}")
    outcome.simulated_s = time.now_s
    outcome.facts = {
        "chunks": len(checker.arrived), "rows": checker.rows, "batches": checker.batches,
        "versions": checker.published, "events": len(time.history),
    }  # fmt: skip
    return outcome


def _progress(cluster: Cluster) -> None:
    """Every actor, the learner and the parameters go on, in a stated time."""
    checker, time = cluster.checker, cluster.time
    batches, published, updates = checker.batches, checker.published, checker.updates
    for process in cluster.processes:
        process.stopped_until_s = 0.0
    lives = checker.lives.copy()
    users = [h for h in cluster.hosts.values() if isinstance(h, library.ClientMachine)]
    calls = {host.name: host.calls for host in users}

    def missing() -> list[str]:
        found = ["batches"] if checker.batches < batches + 5 else []
        found += ["updates"] if checker.updates < updates + 3 else []
        found += [f"calls of {host.name}" for host in users if host.calls < calls[host.name] + 5]
        for host in () if users else cluster.hosts.values():
            actors = [p for name, p in host.processes.items() if name.startswith("actor ")]
            numbers = getattr(host, "numbers", range(len(actors)))
            for process, number in zip(actors, numbers, strict=True):
                life = number, process.incarnation
                if checker.lives[life] < lives[life] + 3:
                    found.append(f"chunks of {process.title}")
            if isinstance(host, ActorMachine) and not actors:
                found.append(f"actors of {host.name}")
            elsewhere = isinstance(host, ReplayMachine) and host.shard > 0
            elsewhere |= isinstance(host, LearnerMachine)  # one of two
            memory = host.memory
            if not elsewhere and (memory is None or memory.mailbox().version <= published):
                found.append(f"parameters at {host.name}")
        return found

    if not time.run(time.now_s + PROGRESS_S, lambda: not missing()):
        raise Violation(f"stuck: for {PROGRESS_S:.0f} s without faults no {', '.join(missing())}")


def _settle(cluster: Cluster) -> None:
    """The run is over: the actors stop, and what they have committed arrives."""
    time = cluster.time
    cluster.is_over = True
    replays = [host for host in cluster.hosts.values() if isinstance(host, ReplayMachine)]
    for host in replays:
        if host.server is not None:
            host.server.over = time.rng.choice(("", "enough"))
    time.run(time.now_s + 8.0 + 20 * cluster.turn_s)

    def is_known(relay: Process) -> bool:
        known = [h.server.sessions for h in replays if not h.off and h.server is not None]
        sessions = [[s for s in k.of_roles("relay") if all(s.peers)] for k in known]
        return all(relay.host.number in [s.host for s in some] for some in sessions)

    def waiting() -> list[str]:
        there = [p for p in cluster.processes if p.role is not None]
        # One that died at the end, or whose replay did, and is not welcomed again, loses some.
        relays = [p for p in there if p.name == "relay" and p.links[0].is_open and is_known(p)]
        found = [p.title for p in relays if p.role.outbox.on_their_way]
        limiters = [p.role.intake.limiter for p in there if p.name == "replay"] if found else []
        learner_is_slow = not all(one.can_insert(one.config.grant) for one in limiters)
        return [] if learner_is_slow else found

    if not time.run(time.now_s + DRAIN_S, lambda: not waiting()):
        raise Violation(
            f"stuck: {DRAIN_S:.0f} s after the end chunks wait at {', '.join(waiting())}"
        )
    cluster.checker.settle()
