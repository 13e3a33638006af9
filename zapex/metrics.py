"""What each role counts, and where its time goes, in words of shared memory that anyone may read.

Every process owns one block and is its only writer; the parent reads all blocks and never writes.
A block is a row of aligned 8-byte words, so that no reader can see half a number:

    header | phases (ns) | their processor time (ns) | counters (int64) | gauges (float64)

    I1  every word has exactly one writer: the role; of the header's last word, whoever looks on
    I2  sum(phases) = time of the last phase change - start: each nanosecond is in one phase
    I3  counters never step back; a role that was restarted attaches and goes on counting

By I2 a reader needs no stamp: what is missing from (now - start) belongs to the running phase.
Times are `time.perf_counter_ns()`, which is one clock for all processes of a Linux host. Processor
time is that of the role's thread; it takes a system call, so it is counted only once somebody asks.
"""

import os
import time
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np

from zapex.errors import SharedMemoryError

Role = Literal["actor", "replay", "learner", "evaluator", "relay"]
ELSEWHERE: Final = -1
"""Instead of a process's number: it runs on another host."""


@dataclass(frozen=True)
class RoleTable:
    """The words of one role, by name. The order is the layout.

    Attributes:
        phases: what the role can be doing; exactly one at a time.
        counters: int64, only grow.
        gauges: float64, the newest value.
        shown_as: the phases of each bar in the view; for actor and learner those of the paper
            (Furukawa & Matsutani, arXiv 2110.13506, fig. 3), with waiting told apart from work.
    """

    phases: tuple[str, ...]
    counters: tuple[str, ...]
    gauges: tuple[str, ...]
    shown_as: dict[str, tuple[str, ...]]


TABLES: Final[dict[Role, RoleTable]] = {
    "actor": RoleTable(
        phases=("pull", "environment", "forward", "push", "wait", "other"),
        counters=("steps", "frames", "transitions", "chunks", "episodes", "credit_waits"),
        gauges=("params_version",),
        shown_as={
            "pull": ("pull",),
            "compute": ("environment", "forward", "other"),
            "push": ("push",),
            "wait": ("wait",),
        },
    ),
    "replay": RoleTable(
        phases=("insert", "sample", "update", "idle", "other"),
        counters=(
            "inserted",
            "evicted",
            "sampled",
            "batches",
            "updates_applied",
            "updates_stale",
            "updates_refused",  # whole updates: a priority in them was not finite
        ),
        gauges=(
            "live",
            "capacity",
            "slots_free",
            "slots_granted",
            "slots_live",
            "slots_quarantined",
            "bytes_used",
            "limiter",
        ),
        shown_as={
            "insert": ("insert",),
            "sample": ("sample",),
            "update": ("update", "other"),
            "wait": ("idle",),
        },
    ),
    "learner": RoleTable(
        phases=(
            "wait",
            "gather",
            "forward",
            "backward",
            "optimiser",
            "update",
            "publish",
            "checkpoint",
            "other",
        ),
        counters=("batches", "samples", "torn_rows"),
        gauges=(
            "params_version",
            "loss",
            "q_mean",
            "td_abs_mean",
            "grad_norm",
            "priority_mean",
            "priority_max",
            "staleness",  # batches learned between asking for the last one and learning from it
        ),
        shown_as={
            "sample": ("gather",),
            "compute": ("forward", "backward", "optimiser", "checkpoint", "other"),
            "set": ("update", "publish"),
            "wait": ("wait",),
        },
    ),
    "evaluator": RoleTable(
        phases=("evaluate", "idle"),
        counters=("steps", "frames", "episodes", "evaluations"),
        gauges=("params_version",),
        shown_as={"compute": ("evaluate",), "wait": ("idle",)},
    ),
    "relay": RoleTable(
        phases=("push", "pull", "report", "idle", "other"),
        counters=("transitions", "chunks", "bytes", "acknowledged", "again", "versions"),
        gauges=("params_version", "unacknowledged", "slots"),
        shown_as={
            "pull": ("pull",),
            "push": ("push",),
            "report": ("report", "other"),
            "wait": ("idle",),
        },
    ),
}

LIMITER_STATES: Final = ("nobody waits", "filling", "actors wait", "learner waits")
"""What the replay's `limiter` gauge means, by its value."""

EPISODE: Final = np.dtype(
    [
        ("stream", np.int64),
        ("epsilon", np.float64),
        ("game_return", np.float64),  # the game's own score: unclipped, whole game
        ("steps", np.int64),
        ("frames", np.int64),
        ("time_ns", np.int64),  # perf_counter_ns at the end
        ("params_version", np.int64),  # at the end
    ]
)
"""One finished episode; actors send it, `zapex.monitor.Episodes` adds it up."""

_ROLE, _PID, _START, _PHASE, _HEARTBEAT, _COUNT_CPU, _HEADER_WORDS = range(7)
_MOST: Final = 1 << 62  # no count of ours; what a peer says is not believed beyond it
_MAGIC: Final = 0x7A61_7065_7800  # "zapex", and the role's number in the last byte


class RoleMetrics:
    """One role's words over a caller's buffer.

    Args:
        buffer: at least `required_bytes()` bytes, 8-byte aligned; writable for the role, read-only
            is enough to read.
        role: whose table this block follows.
        create: write a fresh, zero block; otherwise attach to one and leave its counts alone.

    Raises:
        SharedMemoryError: the buffer is too small, or holds another role's block.

    The role enters a phase first, which also takes the block for this process:

        metrics.enter("environment"); ...; metrics.enter("push"); metrics.add("chunks", 8)
    """

    def __init__(self, buffer: Any, role: Role, create: bool) -> None:
        table = TABLES[role]
        view = memoryview(buffer).cast("B")
        if len(view) < self.required_bytes():
            raise SharedMemoryError(
                f"a metrics block takes {self.required_bytes()} bytes, the buffer has {len(view)}"
            )
        words = view[: self.required_bytes()]
        self.role = role
        self.table = table
        # memoryview items are stored in one 8-byte copy, and several times faster than numpy's.
        self._words = words.cast("q")
        self._floats = words.cast("d")
        self._to_cpu = len(table.phases)  # from a phase's word to that of its processor time
        first_counter = _HEADER_WORDS + 2 * len(table.phases)
        first_gauge = first_counter + len(table.counters)
        self._phases = {name: _HEADER_WORDS + i for i, name in enumerate(table.phases)}
        self._counters = {name: first_counter + i for i, name in enumerate(table.counters)}
        self._gauges = {name: first_gauge + i for i, name in enumerate(table.gauges)}
        self._since_ns = 0
        self._cpu_since_ns = 0
        self._running = 0  # the running phase's word; 0 until this process enters one

        stamp = _MAGIC + get_args(Role).index(role)
        if create:
            words[:] = bytes(len(words))
            self._words[_ROLE] = stamp
        elif self._words[_ROLE] != stamp:
            raise SharedMemoryError(f"this memory does not hold the metrics of role {role!r}")

    @staticmethod
    def required_bytes() -> int:
        """Bytes of one block, the same for every role; whole pairs of cache lines."""
        most = max(2 * len(t.phases) + len(t.counters) + len(t.gauges) for t in TABLES.values())
        return -((_HEADER_WORDS + most) * 8 // -128) * 128

    def enter(self, phase: str) -> None:
        """Change the running phase; the time since the last change goes to the one left."""
        now = time.perf_counter_ns()
        word = self._phases[phase]
        words = self._words
        if self._running:
            words[self._running] += now - self._since_ns
        else:
            # A former life's phases stay; the time that nobody lived is nobody's.
            words[_START] = now - sum(words[i] for i in self._phases.values())
            words[_PID] = os.getpid()
        if words[_COUNT_CPU]:
            cpu = time.thread_time_ns()
            if self._running and self._cpu_since_ns:
                words[self._running + self._to_cpu] += cpu - self._cpu_since_ns
            self._cpu_since_ns = cpu
        words[_PHASE] = word
        words[_HEARTBEAT] = now
        self._running = word
        self._since_ns = now

    def add(self, counter: str, n: int = 1) -> None:
        """Add `n` >= 0 to a counter."""
        self._words[self._counters[counter]] += n

    def set(self, name: str, value: float) -> None:
        """Set a gauge; or a counter that is kept elsewhere and only copied here."""
        word = self._gauges.get(name)
        if word is None:
            self._words[self._counters[name]] = int(value)
        else:
            self._floats[word] = value

    def leave(self) -> None:
        """Account for the running phase and let the block go: nothing runs from here on."""
        if self._running:
            now = time.perf_counter_ns()
            self._words[self._running] += now - self._since_ns
            self._words[_PID] = 0
            self._running = 0

    def count_cpu(self) -> None:
        """For whoever looks on, over writable memory: from now on "cpu/<phase>" are counted too."""
        self._words[_COUNT_CPU] = 1

    def take_over(self, received: Any, last: Any, *, fresh: bool, clock_ns: int) -> None:
        """The same role's block on another host, as it is now: its counts go on in this one.

        received, last: a block's bytes. last is where the last look is kept, and must outlive this
        process as the block does. fresh: the sender is another one than the last time and began
        with nothing. clock_ns: what this host's clock is ahead of the sender's.

        Raises SharedMemoryError where the bytes are no block of this role.
        """
        new, old = memoryview(received).cast("q"), memoryview(last).cast("q")
        words = self._words
        phase = new[_PHASE]
        phases = range(_HEADER_WORDS, _HEADER_WORDS + self._to_cpu)
        if new[_ROLE] != words[_ROLE] or (phase not in phases and phase != 0):
            raise SharedMemoryError(f"a peer's metrics are not those of role {self.role!r}")
        first_gauge = _HEADER_WORDS + 2 * self._to_cpu + len(self._counters)
        deltas = [
            max(0, min(new[i] - (0 if fresh else old[i]), _MOST))
            for i in range(_HEADER_WORDS, first_gauge)
        ]
        # First: who dies in between has counted something too little, never twice.
        old[:] = new
        for i, delta in enumerate(deltas, start=_HEADER_WORDS):
            words[i] = min(words[i] + delta, _MOST)
        words[first_gauge:] = new[first_gauge : len(words)]
        changed_ns = max(0, min(new[_HEARTBEAT] + clock_ns, _MOST))
        spent_ns = min(sum(words[i] for i in phases), _MOST)
        words[_PHASE], words[_HEARTBEAT], words[_START] = phase, changed_ns, changed_ns - spent_ns
        words[_PID] = ELSEWHERE if new[_PID] and phase else 0

    def is_gone(self) -> None:
        """Nothing is heard of the role on the other host any more."""
        self._words[_PID] = 0

    def as_bytes(self) -> bytes:
        """The block as it is, for `take_over` on another host."""
        return self._words.tobytes()

    @property
    def pid(self) -> int:
        """The process that took the block; 0 before the first phase and after `leave`."""
        return self._words[_PID]

    @property
    def heartbeat_ns(self) -> int:
        """`perf_counter_ns` of the last phase change, the role's sign of life."""
        return self._words[_HEARTBEAT]

    @property
    def phase(self) -> str:
        """The phase entered last, "" before the first."""
        word = self._words[_PHASE]
        return self.table.phases[word - _HEADER_WORDS] if word else ""

    def snapshot(self, alive: bool = True) -> dict[str, float]:
        """All counters and gauges by name; "phase/<name>" and "cpu/<name>" in seconds.

        Args:
            alive: the process runs, so the time since its last phase change counts as well.
        """
        header = self._words[:_HEADER_WORDS].tolist()
        phases = {name: self._words[i] for name, i in self._phases.items()}
        values: dict[str, float] = {name: self._words[i] for name, i in self._counters.items()}
        values.update((name, self._floats[i]) for name, i in self._gauges.items())
        now = time.perf_counter_ns()
        if alive and header[_PID]:
            running = self.table.phases[header[_PHASE] - _HEADER_WORDS]
            phases[running] += max(0, now - header[_START] - sum(phases.values()))
        for name, i in self._phases.items():
            values[f"phase/{name}"] = phases[name] / 1e9
            values[f"cpu/{name}"] = self._words[i + self._to_cpu] / 1e9
        return values
