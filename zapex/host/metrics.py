"""The counts and times of each role, in words of shared memory that all processes may read.

Each process is the only writer of one block. The parent reads all blocks and does not write. A
block is an array of aligned 8-byte words, so a reader never sees half a number:

    header | phases (ns) | counters (int64) | gauges (float64)

    I1  every word has exactly one writer: the role
    I2  sum(phases) = time of the last phase change - start: each nanosecond is in one phase
    I3  counters never decrease; a role that was restarted attaches and continues counting

Because of I2 a reader needs no stamp: the rest of (now - start) belongs to the running phase.
Times are `time.perf_counter_ns()`, which is one clock for all processes of a Linux host.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np

from zapex.errors import SharedMemoryError
from zapex.machine.memory import align

Role = Literal["actor", "replay", "learner", "evaluator", "relay", "inference"]
ELSEWHERE: Final = -1
"""In place of a process id: the role runs on another host."""


@dataclass(frozen=True)
class RoleTable:
    """The words of one role, by name. The order is the layout.

    Attributes:
        phases: the activities of the role; it is in exactly one at a time.
        counters: int64; they only grow.
        gauges: float64; the newest value.
        shown_as: the phases of each bar in the view; for actor and learner those of the paper
            (Furukawa & Matsutani, arXiv 2110.13506, fig. 3), with wait separate from work.
    """

    phases: tuple[str, ...]
    counters: tuple[str, ...]
    gauges: tuple[str, ...]
    shown_as: dict[str, tuple[str, ...]]


TABLES: Final[dict[Role, RoleTable]] = {
    "actor": RoleTable(
        # inference: asks the role of that name and waits for its answer.
        phases=("pull", "environment", "forward", "push", "wait", "other", "inference"),
        counters=("steps", "frames", "transitions", "chunks", "episodes", "credit_waits"),
        gauges=("params_version",),
        shown_as={"pull": ("pull",), "compute": ("environment", "forward", "other"),
                  "push": ("push",), "wait": ("wait", "inference")},
    ),
    "replay": RoleTable(
        phases=("insert", "sample", "update", "idle", "other"),
        # updates_refused: whole updates with a priority that was not finite.
        # limiter: an index of LIMITER_STATES. owed: samples that the learner may still draw.
        counters=("inserted", "evicted", "sampled", "batches", "updates_applied", "updates_stale",
                  "updates_refused"),
        gauges=("live", "capacity", "slots_free", "slots_granted", "slots_live",
                "slots_quarantined", "bytes_used", "limiter", "owed"),
        shown_as={"insert": ("insert",), "sample": ("sample",), "update": ("update", "other"),
                  "wait": ("idle",)},
    ),
    "learner": RoleTable(
        phases=("wait", "gather", "forward", "backward", "optimiser", "update", "publish",
                "checkpoint", "other", "fill"),
        counters=("batches", "samples", "torn_rows", "shards_lost", "shards_back"),
        # fill: the wait for the first batch, while the replay fills.
        # unsaved: the error number if the disk refused the newest checkpoint (evaluator: the best).
        # staleness: batches learned between the last batch's request and its learning step.
        # shards: of the run, if it has several; how many are away now, how often one went and came.
        gauges=("params_version", "loss", "q_mean", "td_abs_mean", "grad_norm", "priority_mean",
                "priority_max", "staleness", "unsaved", "shards", "shards_away"),
        shown_as={"sample": ("gather",),
                  "compute": ("forward", "backward", "optimiser", "checkpoint", "other"),
                  "set": ("update", "publish"), "wait": ("wait", "fill")},
    ),
    "evaluator": RoleTable(
        phases=("evaluate", "idle"),
        counters=("steps", "frames", "episodes", "evaluations"),
        gauges=("params_version", "unsaved"),
        shown_as={"compute": ("evaluate",), "wait": ("idle",)},
    ),
    "relay": RoleTable(
        phases=("push", "pull", "report", "idle", "other"),
        counters=("transitions", "chunks", "bytes", "acknowledged", "again", "versions"),
        gauges=("params_version", "unacknowledged", "slots"),
        shown_as={"pull": ("pull",), "push": ("push",), "report": ("report", "other"),
                  "wait": ("idle",)},
    ),
    "inference": RoleTable(
        phases=("pull", "forward", "answer", "idle", "other"),
        # passes: forward passes. answers: questions of actors. streams: rows of all passes.
        counters=("passes", "answers", "streams"),
        gauges=("params_version",),
        shown_as={"pull": ("pull",), "compute": ("forward", "other"), "answer": ("answer",),
                  "wait": ("idle",)},
    ),
}  # fmt: skip

LIMITER_STATES: Final = (
    "no role waits",
    "filling",
    "actors wait",
    "learner waits",
    "no free slots",
)
"""What the replay's `limiter` gauge means, by its value."""

EPISODE: Final = np.dtype(
    [
        ("stream", np.int64),
        ("epsilon", np.float64),
        ("game_return", np.float64),  # the game's score, unclipped, of the whole game
        ("steps", np.int64),
        ("frames", np.int64),
        ("time_ns", np.int64),  # perf_counter_ns at the end
        ("params_version", np.int64),  # at the end
    ]
)
"""One finished episode; actors send it, `zapex.watch.monitor.Episodes` sums it."""

_ROLE, _PID, _START, _PHASE, _HEARTBEAT, _HEADER_WORDS = range(6)
_MOST: Final = 1 << 62  # larger than any real count; a peer's values are limited to it
_MAGIC: Final = 0x7A61_7065_7800  # "zapex", and the role's number in the last byte


class RoleMetrics:
    """One role's words in the caller's buffer.

    Args:
        buffer: at least `required_bytes()` bytes, 8-byte aligned; writable for the role,
            read-only is enough for readers.
        role: the role whose table defines this block.
        create: write a new block of zeros; otherwise attach to one and keep its counts.
        clock_ns: the clock of all blocks of a host.

    Raises:
        SharedMemoryError: the buffer is too small, or holds another role's block.

    First the role enters a phase. This also claims the block for this process:

        metrics.enter("environment"); ...; metrics.enter("push"); metrics.add("chunks", 8)
    """

    def __init__(
        self,
        buffer: Any,
        role: Role,
        create: bool,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        table = TABLES[role]
        view = memoryview(buffer).cast("B")
        if len(view) < self.required_bytes():
            raise SharedMemoryError(
                f"a metrics block takes {self.required_bytes()} bytes, the buffer has {len(view)}"
            )
        words = view[: self.required_bytes()]
        self.role = role
        self.table = table
        self._clock_ns = clock_ns
        # A memoryview stores an item in one 8-byte copy, several times faster than NumPy.
        self._words = words.cast("q")
        self._floats = words.cast("d")
        self.array = np.frombuffer(words, np.int64)
        first_counter = _HEADER_WORDS + len(table.phases)
        first_gauge = first_counter + len(table.counters)
        self._phases = {name: _HEADER_WORDS + i for i, name in enumerate(table.phases)}
        self._counters = {name: first_counter + i for i, name in enumerate(table.counters)}
        self._gauges = {name: first_gauge + i for i, name in enumerate(table.gauges)}
        # The words that may be summed over hosts.
        self._summed = (*self._phases.values(), *self._counters.values())
        self._added: dict[str, int] = {}
        self._since_ns = 0
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
        most = max(len(t.phases) + len(t.counters) + len(t.gauges) for t in TABLES.values())
        return align((_HEADER_WORDS + most) * 8, 128)

    def enter(self, phase: str) -> None:
        """Change the current phase; the time since the last change counts for the previous one."""
        now = self._clock_ns()
        word = self._phases[phase]
        words = self._words
        if self._running:
            words[self._running] += now - self._since_ns
        else:
            # The phases of a former incarnation stay; the time between both is in no phase.
            words[_START] = now - sum(words[i] for i in self._phases.values())
            words[_PID] = os.getpid()
        words[_PHASE] = word
        words[_HEARTBEAT] = now
        self._running = word
        self._since_ns = now

    def divide(self, times: Mapping[str, float]) -> None:
        """Count the running phase's time so far for these phases, in proportion to `times`.

        The running phase continues from now. No times: nothing changes.
        """
        total = sum(times.values())
        if not total:
            return
        now = self._clock_ns()
        spent, words, counted = now - self._since_ns, self._words, 0
        for phase, part in times.items():
            share = int(spent * part / total)
            words[self._phases[phase]] += share
            counted += share
        words[self._running] += spent - counted  # what was rounded off
        words[_HEARTBEAT] = self._since_ns = now

    def add(self, counter: str, n: int = 1) -> None:
        """Add `n` >= 0 to a counter."""
        self._words[self._counters[counter]] += n

    def add_up(self, **totals: int) -> None:
        """Add the new part of totals that another object counts from 0 in this process."""
        for counter, total in totals.items():
            self.add(counter, total - self._added.get(counter, 0))
        self._added.update(totals)

    def set(self, name: str, value: float) -> None:
        """Set a gauge, or a counter that another object counts and this block copies."""
        word = self._gauges.get(name)
        if word is None:
            self._words[self._counters[name]] = int(value)
        else:
            self._floats[word] = value

    def now_ns(self) -> int:
        """The time on the clock of all blocks of the host."""
        return self._clock_ns()

    def leave(self) -> None:
        """Count the current phase and release the block: from now on no phase runs."""
        if self._running:
            now = self._clock_ns()
            self._words[self._running] += now - self._since_ns
            self._words[_PID] = 0
            self._running = 0

    def take_over(
        self,
        received: Any,
        last: Any,
        *,
        fresh: bool,
        clock_ns: int,
    ) -> None:
        """Add the counts of the same role's block on another host.

        received, last: a block's bytes. last holds the bytes received before; like the block, it
        must exist longer than this process. fresh: the sender is a new one, and started at 0.
        clock_ns: this host's clock minus the sender's clock.

        Raises SharedMemoryError if the bytes are not a block of this role with finite gauges.
        """
        new, old = memoryview(received).cast("q"), memoryview(last).cast("q")
        words = self._words
        phase = new[_PHASE]
        phases = range(_HEADER_WORDS, _HEADER_WORDS + len(self._phases))
        if new[_ROLE] != words[_ROLE] or (phase not in phases and phase != 0):
            raise SharedMemoryError(f"a peer's metrics are not those of role {self.role!r}")
        gauges = memoryview(received).cast("d")
        if not all(math.isfinite(gauges[i]) for i in self._gauges.values()):
            raise SharedMemoryError(f"a peer's metrics of role {self.role!r} have no finite gauges")
        for i in self._summed:
            base = 0 if fresh else old[i]
            added = min(max(0, new[i] - base), _MOST)
            # First: if this process dies now, it has counted too little, but not twice.
            old[i] = base + added
            words[i] = min(words[i] + added, _MOST)
        for i in self._gauges.values():
            words[i] = new[i]
        changed_ns = max(0, min(new[_HEARTBEAT] + clock_ns, _MOST))
        spent_ns = min(sum(words[i] for i in phases), _MOST)
        words[_PHASE], words[_HEARTBEAT], words[_START] = phase, changed_ns, changed_ns - spent_ns
        words[_PID] = ELSEWHERE if new[_PID] and phase else 0

    def is_gone(self) -> None:
        """Record that the role on the other host has stopped sending."""
        self._words[_PID] = 0

    def as_bytes(self) -> bytes:
        """The block as it is, for `take_over` on another host."""
        return self._words.tobytes()

    @property
    def pid(self) -> int:
        """The process that claimed the block; 0 before the first phase and after `leave`."""
        return self._words[_PID]

    @property
    def heartbeat_ns(self) -> int:
        """`perf_counter_ns` of the last phase change; it shows that the role is alive."""
        return self._words[_HEARTBEAT]

    @property
    def phase(self) -> str:
        """The phase entered last; "" before the first."""
        word = self._words[_PHASE]
        return self.table.phases[word - _HEADER_WORDS] if word else ""

    def snapshot(self, alive: bool = True) -> dict[str, float]:
        """All counters and gauges by name; "phase/<name>" in seconds.

        Args:
            alive: the process runs, so the time since its last phase change counts, too.
        """
        return sums([self], lambda pid: alive)

    def value(self, name: str) -> float:
        """One counter or gauge."""
        word = self._gauges.get(name)
        return self._words[self._counters[name]] if word is None else self._floats[word]


def sums(blocks: Sequence[RoleMetrics], alive: Callable[[int], bool]) -> dict[str, float]:
    """The snapshots of many blocks of one role as one: sums, but of each gauge the largest.

    alive: whether the process of a pid runs, as in `RoleMetrics.snapshot`.
    """
    first = blocks[0]
    table, phases = first.table, len(first.table.phases)
    words = np.concatenate([block.array for block in blocks]).reshape(len(blocks), -1)
    spent, now = words[:, _HEADER_WORDS : _HEADER_WORDS + phases], first.now_ns()
    running = [i for i, pid in enumerate(words[:, _PID].tolist()) if pid and alive(pid)]
    rest = now - words[running, _START] - spent[running].sum(axis=1)
    spent[running, words[running, _PHASE] - _HEADER_WORDS] += np.maximum(rest, 0)
    total = words.sum(axis=0)[_HEADER_WORDS:].tolist()
    counters, gauges = phases, phases + len(table.counters)
    largest = words[:, _HEADER_WORDS + gauges :].view(np.float64).max(axis=0).tolist()
    values: dict[str, float] = dict(zip(table.counters, total[counters:gauges], strict=True))
    values.update(zip(table.gauges, largest, strict=False))
    values.update((f"phase/{name}", total[i] / 1e9) for i, name in enumerate(table.phases))
    return values
