"""From every role's words to one Snapshot, and from there to whoever shows or stores it.

The parent calls `tick()` as often as it likes; work is done when it is due. Views see a snapshot
twice a second, recorders one every few seconds together with what is new since their last one.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zapex.metrics import ELSEWHERE, EPISODE, TABLES, Role, RoleMetrics
from zapex.report import (
    Evaluation,
    Message,
    Recorder,
    Returns,
    RoleView,
    RunFacts,
    Snapshot,
    View,
)

LAST: Final = 100  # episodes in a mean: CleanRL's and the Ape-X paper's custom
LAST_GREEDY: Final = 10  # one stream ends few games, and an old one says little of the policy now
EPSILON_BANDS: Final = ((0.001, "ε<.001"), (0.01, "ε<.01"), (0.1, "ε<.1"), (np.inf, "ε≥.1"))
_WINDOW_S: Final = 5.0  # rates are means over this long
_PROCESS_PERIOD_S: Final = 2.0
_HISTORY_POINTS: Final = 256


class Episodes:
    """Returns of the last 100 episodes: of all streams, by epsilon, and of the greedy stream."""

    def __init__(self, greedy_stream: int) -> None:
        self._greedy_stream = greedy_stream
        self._all: deque[float] = deque(maxlen=LAST)
        self._greedy: deque[float] = deque(maxlen=LAST_GREEDY)
        self._bands: dict[str, deque[float]] = {}
        self._history: list[float] = []  # each point is the mean of _thinning greedy episodes
        self._pending: list[float] = []
        self._thinning = 1

    def add(self, records: NDArray[Any]) -> None:
        """Count finished episodes, dtype EPISODE, in the order of their end."""
        self._all.extend(records["game_return"].tolist())
        below = 0.0
        for limit, label in EPSILON_BANDS:
            in_band = (records["epsilon"] >= below) & (records["epsilon"] < limit)
            if in_band.any():
                band = self._bands.setdefault(label, deque(maxlen=LAST))
                band.extend(records["game_return"][in_band].tolist())
            below = limit
        for value in records["game_return"][records["stream"] == self._greedy_stream].tolist():
            self._greedy.append(value)
            self._pending.append(value)
            if len(self._pending) == self._thinning:
                self._history.append(_mean(self._pending))
                self._pending.clear()
            if len(self._history) == 2 * _HISTORY_POINTS:
                self._history = np.reshape(self._history, (-1, 2)).mean(axis=1).tolist()
                self._thinning *= 2

    def returns(self) -> Returns:
        labels = [label for _, label in EPSILON_BANDS if label in self._bands]
        return Returns(
            all_mean=_mean(self._all),
            greedy_mean=_mean(self._greedy),
            greedy_last=self._greedy[-1] if self._greedy else float("nan"),
            bands={label: _mean(self._bands[label]) for label in labels},
            greedy_history=tuple(self._history),
        )


class Monitor:
    """Looks at all roles and feeds one view and any number of recorders.

    An output that fails is reported once, as a message, and tried again: a full disk or a closed
    terminal must not end a run.

        monitor = Monitor(facts, [("actor 0", block), ...], view, recorders)
        while running: monitor.add_episodes(ring.poll()); monitor.tick()
        monitor.close()
    """

    def __init__(
        self,
        facts: RunFacts,
        roles: Sequence[tuple[str, RoleMetrics]],
        view: View | None = None,
        recorders: Sequence[Recorder] = (),
        *,
        evaluations: Sequence[Evaluation] = (),
        elsewhere: Collection[Role] = (),
        view_period_s: float = 0.5,
        record_period_s: float = 5.0,
    ) -> None:
        self.facts = facts
        self._roles = list(roles)
        self._elsewhere = elsewhere
        self._view = view
        self._recorders = list(recorders)
        self._view_period_ns = int(view_period_s * 1e9)
        self._record_period_ns = int(record_period_s * 1e9)
        self._view_due_ns = 0
        self._record_due_ns = time.perf_counter_ns() + self._record_period_ns
        self._episodes = Episodes(facts.greedy_stream)
        self._new_episodes: list[NDArray[Any]] = []
        self._evaluations = list(evaluations)  # of the run's earlier lives, too
        self._recorded_evaluations = len(self._evaluations)
        self._messages: deque[Message] = deque(maxlen=100)
        self._message_count = 0
        self._failed: set[int] = set()
        self._processes = _Processes()
        self._pids: dict[str, int] = {}
        # (time, per role sums) of the last few looks: the base of all rates.
        self._history: deque[tuple[int, dict[Role, dict[str, float]]]] = deque()
        self._first = (facts.started_ns, self._sums())

    def add_episodes(self, records: NDArray[Any]) -> None:
        """Take finished episodes, dtype EPISODE."""
        if len(records):
            self._episodes.add(records)
            self._new_episodes.append(records.copy())

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.append(evaluation)

    def message(self, text: str) -> None:
        """Say something to the person who watches: restarts, checkpoints, evaluations."""
        self._message_count += 1
        self._messages.append(Message(self._message_count, self.wall_s(), text))

    def wall_s(self) -> float:
        """Seconds since the command, and those of the run's earlier lives."""
        session_s = (time.perf_counter_ns() - self.facts.started_ns) / 1e9
        return session_s + self.facts.base.get("wall_s", 0.0)

    def tick(self) -> Snapshot | None:
        """Look, show and record if it is time; the snapshot if there was one."""
        now = time.perf_counter_ns()
        if now < self._view_due_ns:
            return None
        self._view_due_ns = now + self._view_period_ns
        snapshot = self.look()
        if now >= self._record_due_ns:
            self._record_due_ns = now + self._record_period_ns
            self._record(snapshot)
        self._show(snapshot)
        return snapshot

    def close(self) -> Snapshot:
        """Show and record the last state, then close all outputs."""
        snapshot = self.look(final=True)
        self._record(snapshot)
        self._show(snapshot)
        for recorder in self._recorders:
            self._guard(recorder, recorder.close)
        if self._view is not None:
            self._guard(self._view, self._view.close)
        return snapshot

    def look(self, final: bool = False) -> Snapshot:
        """Read every block now. At the end rates and shares are those of the whole session."""
        now = time.perf_counter_ns()
        if not final:  # by then the processes are gone: the last they used is remembered
            self._pids = {name: max(0, block.pid) for name, block in self._roles}
            self._processes.look(list(self._pids.values()), now)
        sums = self._sums()
        self._history.append((now, sums))
        while len(self._history) > 2 and now - self._history[1][0] >= _WINDOW_S * 1e9:
            self._history.popleft()
        then, before = self._history[0] if len(self._history) > 1 else (now, {})
        if final:
            then, before = self._first
        window_s = (now - then) / 1e9

        totals, rates = {}, {}
        sources: tuple[tuple[str, Role], ...] = (
            ("steps", "actor"),
            ("frames", "actor"),
            ("episodes", "actor"),
            ("batches", "learner"),
            ("samples", "learner"),
            ("inserted", "replay"),
        )
        for name, role in sources:
            value = sums.get(role, {}).get(name, 0.0)
            totals[name] = value + self.facts.base.get(name, 0.0)
            rates[name] = _ratio(value - before.get(role, {}).get(name, 0.0), window_s)

        replay, learner = sums.get("replay", {}), sums.get("learner", {})
        stale = replay.get("updates_stale", 0.0)
        wall_s = self.wall_s()
        progress, left_s = self._progress(wall_s, totals["frames"], rates["frames"])
        return Snapshot(
            facts=self.facts,
            time_ns=now,
            wall_s=wall_s,
            final=final,
            totals=totals,
            rates=rates,
            samples_per_insert=_ratio(replay.get("sampled", 0.0), replay.get("inserted", 0.0)),
            stale_share=_ratio(stale, stale + replay.get("updates_applied", 0.0)),
            progress=progress,
            left_s=left_s,
            roles=tuple(self._role_view(role, sums[role], before.get(role, {})) for role in sums),
            replay=replay,
            learner=learner,
            relay=sums.get("relay", {}),
            returns=self._episodes.returns(),
            evaluations=tuple(self._evaluations),
            messages=tuple(self._messages),
            cpu_cores=self._processes.cpu_cores(),
            parent_cpu_cores=self._processes.cpu_cores([os.getpid()]),
            memory_bytes=self._processes.private_bytes() + self.facts.shared_bytes,
            host_cpu_share=self._processes.host_cpu_share,
            host_memory_bytes=self._processes.host_memory_bytes,
        )

    def _silent(self, role: Role) -> tuple[float, str]:
        """How long the most silent process of a role has not changed phase, and its name."""
        now = time.perf_counter_ns()
        ages = [
            ((now - block.heartbeat_ns) / 1e9, name)
            for name, block in self._roles
            if block.role == role and block.pid
        ]
        return max(ages, default=(0.0, ""))

    def _sums(self) -> dict[Role, dict[str, float]]:
        """By role: counters and phases added up, of gauges the largest."""
        sums: dict[Role, dict[str, float]] = {}
        for _, block in self._roles:
            role = sums.setdefault(block.role, {})
            alive = block.pid == ELSEWHERE or self._processes.alive(block.pid)
            for name, value in block.snapshot(alive).items():
                if name in block.table.gauges:
                    role[name] = max(value, role.get(name, value))
                else:
                    role[name] = role.get(name, 0.0) + value
        return sums

    def _role_view(
        self, role: Role, sums: Mapping[str, float], before: Mapping[str, float]
    ) -> RoleView:
        table = TABLES[role]
        totals = {name: sums[f"phase/{name}"] for name in table.phases}
        window = {n: max(0.0, s - before.get(f"phase/{n}", 0.0)) for n, s in totals.items()}
        pids = [self._pids.get(name, 0) for name, block in self._roles if block.role == role]
        phases, phases_total = _shares(window), _shares(totals)
        there = sum(block.pid == ELSEWHERE for _, block in self._roles if block.role == role)
        return RoleView(
            role=role,
            processes=there if role in self._elsewhere else len(pids),
            elsewhere=role in self._elsewhere,
            shares={n: sum(phases[p] for p in parts) for n, parts in table.shown_as.items()},
            shares_total={
                n: sum(phases_total[p] for p in parts) for n, parts in table.shown_as.items()
            },
            phases=phases,
            phases_total=phases_total,
            cpu_cores=self._processes.cpu_cores(pids),
            private_bytes=self._processes.private_bytes(pids),
            silent=self._silent(role),
        )

    def _progress(
        self, wall_s: float, frames: float, frames_per_s: float
    ) -> tuple[float | None, float | None]:
        """Share done and seconds left of the limit that will be reached first."""
        limits = []
        if self.facts.max_wall_s:
            left_s = max(0.0, self.facts.max_wall_s - wall_s)
            limits.append((left_s, wall_s / self.facts.max_wall_s))
        if self.facts.max_frames and frames_per_s > 0:
            left_s = max(0.0, self.facts.max_frames - frames) / frames_per_s
            limits.append((left_s, frames / self.facts.max_frames))
        if not limits:
            return None, None
        left_s, done = min(limits)
        return min(1.0, done), left_s

    def _record(self, snapshot: Snapshot) -> None:
        parts = self._new_episodes
        episodes = np.concatenate(parts) if parts else np.empty(0, EPISODE)
        evaluations = self._evaluations[self._recorded_evaluations :]
        self._new_episodes = []
        self._recorded_evaluations = len(self._evaluations)
        for recorder in self._recorders:

            def write(recorder: Recorder = recorder) -> None:
                recorder.write(snapshot, episodes, evaluations)

            self._guard(recorder, write)

    def _show(self, snapshot: Snapshot) -> None:
        view = self._view
        if view is not None:
            self._guard(view, lambda: view.show(snapshot))

    def _guard(self, output: View | Recorder, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever it is, it is not worth a run
            if id(output) not in self._failed:
                self._failed.add(id(output))
                text = f"{type(output).__name__} failed, the run goes on: {error!r}"
                self.message(text)
                if output is self._view:
                    print(text, file=sys.stderr)


class _Processes:
    """Processor time and private memory of the roles' processes and of this one."""

    def __init__(self) -> None:
        self.host_cpu_share = 0.0
        self.host_memory_bytes = 0.0
        self._due_ns = 0
        self._handles: dict[int, Any] = {}
        self._cpu: dict[int, float] = {}
        self._private: dict[int, float] = {}

    def look(self, pids: Sequence[int], now_ns: int) -> None:
        """Ask the kernel, not more often than every two seconds: it costs more than all else."""
        unknown = any(pid and pid not in self._handles for pid in pids)
        if now_ns < self._due_ns and not unknown:
            return
        import psutil

        self._due_ns = now_ns + int(_PROCESS_PERIOD_S * 1e9)
        self.host_cpu_share = psutil.cpu_percent(None) / 100
        self.host_memory_bytes = float(psutil.virtual_memory().total)
        for pid in {*pids, os.getpid()} - {0}:
            try:
                handle = self._handles.get(pid) or psutil.Process(pid)
                self._cpu[pid] = handle.cpu_percent(None) / 100
                memory = handle.memory_info()
                # Shared memory is mapped by all and counted once, apart.
                self._private[pid] = float(memory.rss - memory.shared)
                self._handles[pid] = handle
            except psutil.Error:
                self._forget(pid)
        for pid in self._handles.keys() - {*pids, os.getpid()}:
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        self._handles.pop(pid, None)
        self._cpu.pop(pid, None)
        self._private.pop(pid, None)

    def alive(self, pid: int) -> bool:
        return pid in self._handles

    def cpu_cores(self, pids: Sequence[int] | None = None) -> float:
        known = self._cpu
        return sum(known.get(pid, 0.0) for pid in (known if pids is None else set(pids)))

    def private_bytes(self, pids: Sequence[int] | None = None) -> float:
        known = self._private
        return sum(known.get(pid, 0.0) for pid in (known if pids is None else set(pids)))


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {name: _ratio(value, whole) for name, value in seconds.items()}
