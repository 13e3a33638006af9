"""Every role's metrics become one Snapshot, which views show and recorders store.

The parent calls `tick()` as often as it likes; work is done when it is due. A view gets a snapshot
twice a second. A recorder gets one every few seconds, with what is new since its last one.
"""

import contextlib
import errno
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zapex.host.metrics import ELSEWHERE, EPISODE, TABLES, Role, RoleMetrics, sums
from zapex.machine.disk import why_not_written
from zapex.watch.processes import Processes
from zapex.watch.report import (
    TOTALS,
    Evaluation,
    Note,
    Recorder,
    Returns,
    RoleView,
    RunFacts,
    Snapshot,
    View,
)

LAST: Final = 100  # episodes in a mean: CleanRL's and the Ape-X paper's custom
LAST_GREEDY: Final = 10  # one stream ends few games; old ones say little
EPSILON_BANDS: Final = ((0.001, "ε<.001"), (0.01, "ε<.01"), (0.1, "ε<.1"), (np.inf, "ε≥.1"))
_WINDOW_S: Final = 5.0  # rates are means over this time
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
        for_others: View | None = None,
        evaluations: Sequence[Evaluation] = (),
        elsewhere: Collection[Role] = (),
        view_period_s: float = 0.5,
        record_period_s: float = 5.0,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.facts = facts
        self._clock_ns = clock_ns
        self._roles: dict[Role, list[tuple[str, RoleMetrics]]] = {}
        for name, block in roles:
            self._roles.setdefault(block.role, []).append((name, block))
        self._elsewhere = elsewhere
        self._view, self._for_others = view, for_others
        self._recorders = list(recorders)
        self._view_period_ns = int(view_period_s * 1e9)
        self._record_period_ns = int(record_period_s * 1e9)
        self._view_due_ns = 0
        self._record_due_ns = clock_ns() + self._record_period_ns
        self._episodes = Episodes(facts.greedy_stream)
        self._new_episodes: list[NDArray[Any]] = []
        self._evaluations = list(evaluations)  # of the run's earlier sessions, too
        self._recorded_evaluations = len(self._evaluations)
        self._messages: deque[Note] = deque(maxlen=100)
        self._message_count = 0
        self._failed: dict[int, Exception] = {}
        self._processes = Processes()
        self._pids: dict[str, int] = {}
        # (time, sums by role) of the last few snapshots: the base of all rates.
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
        """Show a message to the user: restarts, checkpoints, evaluations."""
        self._message_count += 1
        self._messages.append(Note(self._message_count, self.wall_s(), text))

    def wall_s(self) -> float:
        """Seconds since the command, and those of the run's earlier sessions."""
        session_s = (self._clock_ns() - self.facts.started_ns) / 1e9
        return session_s + self.facts.base.get("wall_s", 0.0)

    def tick(self) -> Snapshot | None:
        """Read, show and record if it is time. Returns the snapshot, if there was one."""
        now = self._clock_ns()
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
        self._record(self.look(final=True))
        for recorder in self._recorders:
            self._guard(recorder, recorder.close)
        snapshot = self.look(final=True)  # once more: with what the recorders could not write
        self._show(snapshot)
        if self._view is not None:
            self._guard(self._view, self._view.close)
        return snapshot

    def look(self, final: bool = False) -> Snapshot:
        """Read every block now. At the end rates and shares are those of the whole session."""
        now = self._clock_ns()
        if not final:  # then the processes are gone: what they used last is kept
            every = [one for blocks in self._roles.values() for one in blocks]
            self._pids = {name: max(0, block.pid) for name, block in every}
            self._processes.look(self._pids.values(), now)
        found = self._sums()
        self._history.append((now, found))
        while len(self._history) > 2 and now - self._history[1][0] >= _WINDOW_S * 1e9:
            self._history.popleft()
        then, before = self._history[0] if len(self._history) > 1 else (now, {})
        if final:
            then, before = self._first
        window_s = (now - then) / 1e9

        totals, rates = {}, {}
        for name, role in TOTALS.items():
            value = found.get(role, {}).get(name, 0.0)
            totals[name] = value + self.facts.base.get(name, 0.0)
            rates[name] = _ratio(value - before.get(role, {}).get(name, 0.0), window_s)

        replay, learner = found.get("replay", {}), found.get("learner", {})
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
            roles=tuple(self._role_view(role, found[role], before.get(role, {})) for role in found),
            replay=replay,
            learner=learner,
            relay=found.get("relay", {}),
            inference=found.get("inference", {}),
            returns=self._episodes.returns(),
            evaluations=tuple(self._evaluations),
            messages=tuple(self._messages),
            cpu_cores=self._processes.cpu_cores(),
            parent_cpu_cores=self._processes.cpu_cores([os.getpid()]),
            memory_bytes=self._processes.private_bytes() + self.facts.shared_bytes,
            host_cpu_share=self._processes.host_cpu_share,
            host_memory_bytes=self._processes.host_memory_bytes,
        )

    def _sums(self) -> dict[Role, dict[str, float]]:
        """By role: the sums of counters and phases, and the largest gauges."""
        return {
            role: sums([block for _, block in blocks], self._processes.alive)
            for role, blocks in self._roles.items()
        }

    def _role_view(
        self, role: Role, now: Mapping[str, float], before: Mapping[str, float]
    ) -> RoleView:
        blocks = self._roles[role]
        totals = {name: now[f"phase/{name}"] for name in TABLES[role].phases}
        window = {n: max(0.0, s - before.get(f"phase/{n}", 0.0)) for n, s in totals.items()}
        pids = {self._pids.get(name, 0) for name, _ in blocks}
        there = sum(block.pid == ELSEWHERE for _, block in blocks)
        now_ns = self._clock_ns()
        ages = [((now_ns - b.heartbeat_ns) / 1e9, name) for name, b in blocks if b.pid]
        return RoleView(
            role=role,
            processes=there if role in self._elsewhere else len(blocks),
            elsewhere=role in self._elsewhere,
            phases=_shares(window),
            phases_total=_shares(totals),
            cpu_cores=self._processes.cpu_cores(pids),
            private_bytes=self._processes.private_bytes(pids),
            silent=max(ages, default=(0.0, "")),
        )

    def _progress(
        self, wall_s: float, frames: float, frames_per_s: float
    ) -> tuple[float | None, float | None]:
        """The share done and the seconds left of the limit that will be reached first."""
        facts, limits = self.facts, []
        if facts.max_wall_s:
            limits.append((facts.max_wall_s - wall_s, wall_s / facts.max_wall_s))
        if facts.max_frames and frames_per_s > 0:
            left_s = (facts.max_frames - frames) / frames_per_s
            limits.append((left_s, frames / facts.max_frames))
        if not limits:
            return None, None
        left_s, done = min(limits)
        return min(1.0, done), max(0.0, left_s)

    def _record(self, snapshot: Snapshot) -> None:
        episodes = np.concatenate([np.empty(0, EPISODE), *self._new_episodes])
        evaluations = self._evaluations[self._recorded_evaluations :]
        self._new_episodes = []
        self._recorded_evaluations = len(self._evaluations)
        for recorder in self._recorders:
            self._guard(recorder, partial(recorder.write, snapshot, episodes, evaluations))

    def _show(self, snapshot: Snapshot) -> None:
        for view in filter(None, (self._view, self._for_others)):
            self._guard(view, partial(view.show, snapshot))

    def show_in(self, view: View) -> None:
        """Show the run in another view from now on, and close the former one."""
        former, self._view = self._view, view
        if former is not None:
            self._guard(former, former.close)

    def _guard(self, output: View | Recorder, call: Callable[[], None]) -> None:
        name = type(output).__name__
        try:
            call()
        except Exception as error:  # no failure of an output may end a run
            if id(output) not in self._failed:
                why = repr(error)
                if isinstance(error, OSError) and error.errno and output is not self._view:
                    why = why_not_written(error.errno, self.facts.run_dir)
                    why += "; it is tried again every few seconds"
                text = f"{name} failed, the run goes on: {why}"
                self.message(text)
                if output is self._view:
                    with contextlib.suppress(OSError):  # it may be the same terminal
                        print(text, file=sys.stderr)
            self._failed[id(output)] = error
        else:
            if self._failed.pop(id(output), None) is not None:
                self.message(f"{name} works again")

    @property
    def terminal_is_gone(self) -> bool:
        """Whether the view's terminal was closed and nobody has sent SIGHUP."""
        error = self._failed.get(id(self._view))
        return isinstance(error, OSError) and error.errno == errno.EIO

    @property
    def unwritten(self) -> bool:
        """Whether the disk refused what a recorder wrote last."""
        written = [self._failed.get(id(recorder)) for recorder in self._recorders]
        return any(isinstance(error, OSError) for error in written)


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {name: _ratio(value, whole) for name, value in seconds.items()}
