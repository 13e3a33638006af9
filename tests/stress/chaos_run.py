"""A parent, its forked roles and a nemesis: kills, stops, continues, and accounts for everything.

The parent is zapex's: its supervisor with pidfds and incarnations, lives announced when they began
and ended for sure. Each role has a nemesis of its own, whose schedule is drawn from the seed alone.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stress import steps
from tests.stress.chaos_account import Account
from tests.stress.chaos_content import Violation, priorities, stamp_of
from tests.stress.chaos_roles import (
    CHUNKS_CHECKED,
    ROWS_CHECKED,
    VALUES_CHECKED,
    World,
    chunk_record,
    live,
    make_replay,
    warm_up,
)
from tests.stress.chaos_updates import is_of
from zapex.chunks.layout import COMMITTED as STATE_COMMITTED
from zapex.chunks.layout import COUNT, FREE, GRANTED, INCARNATION, LIVE, SEQUENCE, STATE
from zapex.machine.supervisor import (
    Died,
    Exited,
    GaveUp,
    ProcessSpec,
    RestartPolicy,
    Started,
    Supervisor,
)

STUCK_S = 30.0  # on a loaded machine; what is stuck stays so
_TICK_S = 0.002
_ORDER_S = 0.4  # that a role has to come to a step
POLICY = RestartPolicy(
    first_s=0.002, longest_s=0.01, short_start_s=0.0, most_short_starts=1 << 30, most_deaths=1 << 30
)

RINGS = ["ring-written", "ring-committed", "ring-read", "ring-released"]
STEPS = {
    "actor": [
        *RINGS, "grants-taken", "slot-opened", "frame-written", "row-written", "chunk-stamped",
        "chunk-committed", "chunks-announced", "question-written", "question-asked",
    ],
    "replay": [
        *RINGS, "commits-taken", "leaves-set", "accept-stamped", "slot-live", "leaves-cleared",
        "generation-bumped", "slot-evicted", "slot-freed", "quarantine-ended", "slot-reclaimed",
        "grant-written", "slot-granted", "grants-sent", "answer-written", "answer-given",
        "request-released", "update-applied", "update-released",
    ],
    "learner": [
        *RINGS, "cell-marked", "cell-written", "cell-stamped", "value-published",
        "batch-requested", "columns-copied", "rows-copied", "batch-gathered", "batch-released",
        "update-written", "update-sent",
    ],
    "inference": ["values-written", "question-answered", "value-copied"],
}  # fmt: skip
NETWORK_STEPS = ["push-written", "push-committed"]  # of a replay that is on a network


class Stuck(Exception):
    """Somebody made no progress in time, or died without being killed."""


class Forked:
    """What a supervisor needs of a Popen, for a process that is forked instead."""

    def __init__(self, work: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                work()
            except BaseException:
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
                os._exit(70)
            os._exit(0)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkingSupervisor(Supervisor):
    """The real one; only the process comes into being in milliseconds instead of seconds."""

    def __init__(self, world: World, **settings: Any) -> None:
        super().__init__(**settings)
        self._world = world

    def _execute(self, spec: ProcessSpec, env: dict[str, str], log: Any) -> Any:
        def work() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.environ.update(env)
            live(self._world, spec.name)

        return Forked(work)


@dataclass(frozen=True)
class Fault:
    """One deed of a nemesis: after `delay_s`, `kind`; a stop holds for `hold_s`."""

    delay_s: float
    kind: str  # "kill" or "stop"
    step: str | None  # at its `count`-th passage; None: wherever it is
    count: int
    hold_s: float
    killed_after_stop: bool
    at_once: bool  # do not wait until the role works again


def schedule(seed: int, name: str, stops: float, only: str = "") -> Iterator[Fault]:
    """Endless, and the same for the same seed and role.

    only: "replay: slot-granted" is that role killed there, again and again, and no other fault.
    """
    rng = random.Random(f"{seed} {name}")
    kind = name.partition(" ")[0]
    named = STEPS[kind]
    if only:
        whom, _, step = only.partition(": ")
        while whom == kind:
            count = rng.randrange(1, 4)
            yield Fault(rng.random() * 0.03, "kill", step, count, 0.0, False, False)
        return
    queue: list[str] = []
    while True:
        if not queue:  # every step comes up as often as any other
            queue = rng.sample(named, len(named))
        at_step = rng.random() < 0.6
        yield Fault(
            delay_s=rng.random() ** 2 * 0.06,
            kind="stop" if rng.random() < stops else "kill",
            step=queue.pop() if at_step else None,
            count=rng.choice([1, 1, 2, 3, 5, 8, 13]),
            hold_s=rng.random() ** 2 * 0.15,
            killed_after_stop=rng.random() < 0.3,
            at_once=rng.random() < 0.15,
        )


@dataclass
class Role:
    """What the parent knows of a process, and what its nemesis is about to do."""

    name: str
    faults: Iterator[Fault]
    incarnation: int = 0
    alive: bool = False
    stopped: bool = False
    progress: int = -1
    progress_s: float = 0.0
    killed_ns: int = 0  # the last SIGKILL from outside
    said_before: int = 0  # chunks that former lives of an actor had counted
    waits_for: int = -1  # progress that shows that it works again
    fault: Fault | None = None
    due_s: float = 0.0
    ordered_s: float = 0.0  # 0: no order is out
    helped: bool = False  # killed, because a new life may come to the step
    held_until_s: float = 0.0

    @property
    def kind(self) -> str:
        return self.name.split()[0]


@dataclass
class Result:
    """What a run was and what it found."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    kills_at: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)


class Chaos:
    """One run of the harness."""

    def __init__(self, seed: int, *, stops: float = 0.25, only: str = "") -> None:
        self.world = World()
        self.host = self.world.host
        self.account = Account()
        self.result = Result(seed)
        self.roles = {
            name: Role(name, schedule(seed, name, stops, only)) for name in self.world.names
        }
        self._audit = self.world.audit.consumer()
        self._store = self.host.store()
        self._slots_out: list[tuple[int, int]] = []  # actor, incarnation
        self._log = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._words = {
            "actor": [self.host.ring(f"commits {i}") for i in range(self.world.plan.actors)],
            "replay": self.host.ring("answers"),
            "learner": self.host.ring("answers"),
        }
        self._answers = self.host.metrics("inference")

    # Lives.

    def _on_death(self, event: Exited | Died) -> None:
        """As the parent of a run: first of all, the life is over for everybody."""
        role = self.roles[event.name]
        if role.kind == "actor":
            said = self._chunks_said(role) - role.said_before
            actor = int(role.name.split()[1])
            self.account.end(actor, role.incarnation, said, self._store.header_rows)
        self.host.set_incarnation(event.name, 0)
        role.alive = role.stopped = False

    def _tell(self, event: Any) -> None:
        if isinstance(event, Started):
            role = self.roles[event.name]
            role.incarnation, role.alive = event.incarnation, True
            if role.kind == "actor":  # it has no slots yet
                role.said_before = self._chunks_said(role)
                self.account.begin(int(role.name.split()[1]), event.incarnation)
            self.host.set_incarnation(event.name, event.incarnation)
        elif isinstance(event, Died):
            self._after_death(self.roles[event.name], event)
        elif isinstance(event, GaveUp):
            raise Stuck(str(event))

    def _after_death(self, role: Role, event: Died) -> None:
        words = self.world.orders[role.name]
        if "SIGKILL" not in event.how:
            last = event.traceback.strip().splitlines()
            known = [line for line in last if line.startswith("tests.stress.chaos_content.Viol")]
            if known:
                raise Violation(known[-1].partition(": ")[2])
            raise Stuck(f"{event}")
        step = words[steps.LAST]
        if step and words[steps.LAST_NS] > role.killed_ns:
            self.result.kills_at[f"{role.kind}: {steps.STEPS[step - 1]}"] += 1
        words[steps.LAST] = 0
        self.result.kills[role.kind] += 1
        role.waits_for = self._progress(role) + 1
        if role.kind == "actor":
            actor = int(role.name.split()[1])
            self._slots_out.append((actor, event.incarnation))
        if role.ordered_s and not words[steps.ORDER]:
            role.ordered_s = 0.0
            role.fault = None

    def _chunks_said(self, role: Role) -> int:
        """How many chunks an actor's lives have committed, by their own count."""
        return int(self.host.metrics(role.name).snapshot(alive=False)["chunks"])

    def _progress(self, role: Role) -> int:
        """A word that grows when the role does its work: a ring that only it moves."""
        if role.kind == "actor":
            return int(self._words["actor"][int(role.name.split()[1])].tail)
        if role.kind == "inference":
            return int(self._answers.value("answers"))
        ring = self._words[role.kind]
        return int(ring.tail if role.kind == "replay" else ring.head)

    # The nemesis.

    def _kill(self, role: Role) -> None:
        role.killed_ns = time.monotonic_ns()
        self.supervisor.send_signal(role.name, signal.SIGKILL)

    def _stop(self, role: Role) -> None:
        role.stopped = True
        self.result.stops[role.kind] += 1

    def _stands_still(self, role: Role) -> bool:
        """Its process is stopped: one that is about to stop itself would not hear a SIGCONT."""
        pid = self.supervisor.pids.get(role.name)
        try:
            return (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2][0] == "T"
        except OSError:
            return False

    def _leave_in_peace(self, role: Role) -> None:
        """No more faults for this role."""
        words = self.world.orders[role.name]
        steps.withdraw(words)
        role.ordered_s, role.fault = 0.0, None
        if self._stands_still(role):
            self._continue(role)

    def _continue(self, role: Role) -> None:
        role.stopped = False
        self.supervisor.send_signal(role.name, signal.SIGCONT)

    def _plot(self, role: Role, now_s: float) -> None:
        """One look of a role's nemesis."""
        words, fault = self.world.orders[role.name], role.fault
        if role.stopped:
            if fault is None or now_s < role.held_until_s:
                return  # None: it was killed, and has yet to be buried
            if fault.killed_after_stop:
                self._kill(role)
                role.fault = None
            elif fault.step is None or self._stands_still(role):
                self._continue(role)
                role.fault = None
            return
        if role.alive and words[steps.LAST] and words[steps.SIGNAL] == signal.SIGSTOP:
            self._note_stop(role, words, now_s)
            return
        if fault is None:
            role.fault = next(role.faults, None)
            if role.fault is None:
                return
            role.due_s = now_s + role.fault.delay_s
            return
        if role.ordered_s:
            self._follow_order(role, fault, words, now_s)
            return
        works = role.waits_for < 0 or fault.at_once
        if not role.alive or not works or now_s < role.due_s:
            if works is False:
                role.due_s = now_s + fault.delay_s
            return
        if fault.step is not None:
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            steps.order(words, fault.step, fault.count, number)
            role.ordered_s, role.helped = now_s, False
        elif fault.kind == "kill":
            role.fault = None
            self._kill(role)
        else:
            self.supervisor.send_signal(role.name, signal.SIGSTOP)
            role.held_until_s = now_s + fault.hold_s
            self._stop(role)

    def _note_stop(self, role: Role, words: Any, now_s: float) -> None:
        """It has stopped itself at a step, or is about to; perhaps after its order's time."""
        step = steps.STEPS[words[steps.LAST] - 1]
        words[steps.LAST] = 0
        if role.fault is None or role.fault.step != step:
            role.fault = Fault(0.0, "stop", step, 1, 0.05, False, False)
        role.ordered_s = 0.0
        role.held_until_s = now_s + role.fault.hold_s
        self.result.kills_at[f"{role.kind}: {step}, stopped"] += 1
        self._stop(role)

    def _follow_order(self, role: Role, fault: Fault, words: Any, now_s: float) -> None:
        """An order is out: has it been carried out, or is it time to help?"""
        if now_s > role.ordered_s + 2 * _ORDER_S:
            steps.withdraw(words)
            role.ordered_s = 0.0
            role.fault = None
        elif now_s > role.ordered_s + _ORDER_S and role.alive and not role.helped:
            # It may be a step that only a new life comes to.
            role.helped = True
            self._kill(role)

    # What must hold at every moment.

    def _look(self, now_s: float) -> None:
        rows = self._store.header_rows.copy() if self._slots_out else None
        # After the look at the headers: what was evicted since is told.
        self.account.take(self._audit.take(self._audit.ring.capacity))
        if rows is not None:
            self._look_for_slots(rows)
        for role in self.roles.values():
            progress = self._progress(role)
            if 0 <= role.waits_for <= progress:
                role.waits_for = -1
            if progress != role.progress:
                role.progress, role.progress_s = progress, now_s
            elif now_s > role.progress_s + STUCK_S:
                raise Stuck(f"{role.name} made no progress in {STUCK_S} s: {self._state()}")

    def _look_for_slots(self, rows: NDArray[np.int64]) -> None:
        """Are the slots of the dead back, and all that they had committed with them?"""
        out = rows[np.isin(rows[:, STATE], (GRANTED, STATE_COMMITTED)), INCARNATION]
        still = []
        for actor, incarnation in self._slots_out:
            if (out == incarnation).any():
                still.append((actor, incarnation))
                continue
            mine = (rows[:, INCARNATION] == incarnation) & (rows[:, STATE] == LIVE)
            self.account.settle(actor, incarnation, rows[mine, SEQUENCE])
        self._slots_out = still

    def _state(self) -> str:
        states = np.bincount(self._store.header_rows[:, STATE], minlength=5).tolist()
        rings = {
            name: (ring.head, ring.tail)
            for name, ring in self.host._rings.items()
            if not name.startswith(("episodes", "evaluations"))
        }
        lives = {r.name: (r.alive, r.stopped, r.waits_for, r.progress) for r in self.roles.values()}
        return f"slots free, granted, committed, live, evicted {states}; {rings}; {lives}"

    def _done(self, wanted: dict[str, int]) -> bool:
        return bool(wanted) and all(self.result.kills[k] >= n for k, n in wanted.items())

    def run(self, seconds: float, kills: dict[str, int]) -> None:
        """Until the time is over or so many of each kind were killed. Raises Violation, Stuck."""
        began_s = time.monotonic()
        with ForkingSupervisor(
            self.world, policy=POLICY, on_death=self._on_death, seed=self.result.seed
        ) as self.supervisor:
            self.supervisor.install_signal_handlers()
            for name in self.world.names:
                self._tell(self.supervisor.start(
                    ProcessSpec(name=name, argv=[], restart=True, log_path=self._log / name)
                ))  # fmt: skip
                self.roles[name].progress_s = began_s
            while self.supervisor.stop_signal is None:
                now_s = time.monotonic()
                if now_s > began_s + seconds or self._done(kills):
                    break
                for event in self.supervisor.poll(_TICK_S):
                    self._tell(event)
                now_s = time.monotonic()
                self._look(now_s)
                for role in self.roles.values():
                    if not kills or self.result.kills[role.kind] < kills.get(role.kind, 0):
                        self._plot(role, now_s)
                    else:
                        self._leave_in_peace(role)
            self._calm_down()
        self.seconds = time.monotonic() - began_s
        self._close()
        shutil.rmtree(self._log)  # of a run that failed it is kept

    def _calm_down(self) -> None:
        """No more faults; everybody must work again."""
        calm = {name: self._progress(role) + 20 for name, role in self.roles.items()}
        while any(self._progress(role) < calm[name] for name, role in self.roles.items()):
            for role in self.roles.values():
                self._leave_in_peace(role)
            for event in self.supervisor.poll(_TICK_S):
                self._tell(event)
            self._look(time.monotonic())
        for event in self.supervisor.shutdown(5.0):
            if not isinstance(event, Exited):
                self._tell(event)

    def _close(self) -> None:
        """All are dead: a last life of the replay finds every slot free or live, and whole."""
        self.account.take(self._audit.take(self._audit.ring.capacity))
        server, replay = make_replay(self.world)
        server.do_work()
        self.account.take(self._audit.take(self._audit.ring.capacity))
        rows = self._store.header_rows
        replay.ledger.release(self.host.sample_sink().issued)
        if not np.isin(rows[:, STATE], (FREE, LIVE)).all():
            raise Violation(f"lost: slots at the end: {self._state()}")
        self.live_at_the_end = len(replay)
        valid, why = replay.tree.check_valid()
        if not valid:
            raise Violation(f"torn: the tree: {why}")
        chunk = self.world.plan.replay.chunk
        leaves = replay.tree.leaves.reshape(len(rows), chunk)
        for slot in replay.ledger.live:
            self.account.take(chunk_record(replay, slot))
            count = int(rows[slot, COUNT])
            given = priorities(np.array([stamp_of(self._store, slot, row) for row in range(count)]))
            drawable = leaves[slot, :count]
            if not is_of(drawable, given).all() or (leaves[slot, count:] != 0).any():
                raise Violation(f"foreign: leaves {leaves[slot]} of slot {slot}, given {given}")
        self.account.close()

    def facts(self) -> dict[str, Any]:
        """The run as JSON."""
        result, counters = self.result, self.world.counters
        return {
            "seed": result.seed,
            "seconds": round(self.seconds, 1),
            "kills": dict(result.kills),
            "stops": dict(result.stops),
            "at_steps": dict(sorted(result.kills_at.items())),
            "capacity": self.world.capacity,
            "live_at_the_end": self.live_at_the_end,
            "chunks_accounted": self.account.chunks,
            "transitions_accounted": self.account.transitions,
            "rows_checked": int(counters[:, ROWS_CHECKED].sum()),
            "chunks_checked": int(counters[:, CHUNKS_CHECKED].sum()),
            "parameters_checked": int(counters[:, VALUES_CHECKED].sum()),
            "rows_refused_by_generation": int(
                self.host.metrics("learner").snapshot(alive=False)["torn_rows"]
            ),
            # The first of these ends a run, with no facts but itself.
            "torn": 0, "foreign": 0, "doubled": 0, "lost": 0, "stuck": 0,
        }  # fmt: skip


def run(seed: int, seconds: float, kills: dict[str, int], **settings: Any) -> dict[str, Any]:
    """One run; its facts. Raises Violation or Stuck."""
    warm_up()
    chaos = Chaos(seed, **settings)
    chaos.run(seconds, kills)
    return chaos.facts()
