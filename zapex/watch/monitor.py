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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zapex.host.metrics import (
    ELSEWHERE,
    EPISODE,
    LIMITER_STATES,
    TABLES,
    Role,
    RoleMetrics,
    sums,
)
from zapex.machine.disk import why_not_written
from zapex.machine.resources import memory_fact, processor_seconds
from zapex.replay.limiter import LimiterConfig
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

LAST: Final = 100  # episodes in a mean: the custom of CleanRL and the Ape-X paper
LAST_GREEDY: Final = 10  # one stream ends few games, and old ones say little
EPSILON_BANDS: Final = ((0.001, "ε<.001"), (0.01, "ε<.01"), (0.1, "ε<.1"), (np.inf, "ε≥.1"))
_WINDOW_S: Final = 5.0  # rates are means over this time
_HISTORY_POINTS: Final = 256
_WAITS: Final = 0.2  # a share of time that is worth an explanation
_PROCESS_PERIOD_S: Final = 2.0  # between two looks at what processes use: some 50 µs for each
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

Sums = dict[Role, dict[str, float]]
"""By role: the sums of counters and phases, and the largest gauges."""


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
        returns = records["game_return"]
        self._all.extend(returns.tolist())
        below = 0.0
        for limit, label in EPSILON_BANDS:
            in_band = (records["epsilon"] >= below) & (records["epsilon"] < limit)
            if in_band.any():
                self._bands.setdefault(label, deque(maxlen=LAST)).extend(returns[in_band].tolist())
            below = limit
        for value in returns[records["stream"] == self._greedy_stream].tolist():
            self._greedy.append(value)
            self._pending.append(value)
            if len(self._pending) == self._thinning:
                self._history.append(_mean(self._pending))
                self._pending.clear()
            if len(self._history) == 2 * _HISTORY_POINTS:
                self._history = np.reshape(self._history, (-1, 2)).mean(axis=1).tolist()
                self._thinning *= 2

    def returns(self) -> Returns:
        """The means of now."""
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
        limiter: LimiterConfig | None = None,
        view_period_s: float = 0.5,
        record_period_s: float = 5.0,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.facts = facts
        self._clock_ns = clock_ns
        self._roles: dict[Role, list[tuple[str, RoleMetrics]]] = {}
        for name, block in roles:
            self._roles.setdefault(block.role, []).append((name, block))
        self._elsewhere, self._limiter = elsewhere, limiter
        self._view, self._for_others = view, for_others
        self._recorders = list(recorders)
        self._view_period_ns = int(view_period_s * 1e9)
        self._record_period_ns = int(record_period_s * 1e9)
        self._view_due_ns = 0
        self._record_due_ns = clock_ns() + min(self._record_period_ns, 10**9)
        self._episodes = Episodes(facts.greedy_stream)
        self._new_episodes: list[NDArray[Any]] = []
        self._lost_episodes = False  # of a return that is not finite
        self._evaluations = list(evaluations)  # of the run's earlier sessions, too
        self._recorded_evaluations = len(self._evaluations)
        self._messages: deque[Note] = deque(maxlen=100)
        self._message_count = 0
        self._failed: dict[int, Exception] = {}
        self._processes = Processes()
        self._pids: dict[str, int] = {}
        start = self._sums()
        self._first = (facts.started_ns, start)
        self._startup_s = 0.0
        self._window = deque([(clock_ns(), start)])  # the last few looks, the base of all rates

    def add_episodes(self, records: NDArray[Any]) -> None:
        """Take finished episodes, dtype EPISODE. A return that is not finite counts nowhere."""
        finite = records[np.isfinite(records["game_return"])]
        if len(finite) < len(records) and not self._lost_episodes:
            self._lost_episodes = True
            self.message("a game's return is not finite: all such games are left out of the means")
        if len(finite):
            self._episodes.add(finite)
            self._new_episodes.append(finite)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Take an evaluation."""
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
            young_ns = max(1e9, snapshot.wall_s * 1e7)  # a hundred points at least, for the curve
            self._record_due_ns = now + int(min(self._record_period_ns, young_ns))
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
        self._window.append((now, found))
        while len(self._window) > 2 and now - self._window[1][0] >= _WINDOW_S * 1e9:
            self._window.popleft()
        base = self._first if final else self._window[0]
        rates = rates_between(base, (now, found))
        counted = {name: x + self.facts.base.get(name, 0.0) for name, x in totals(found).items()}
        replay, wall_s = found.get("replay", {}), self.wall_s()
        stale = replay.get("updates_stale", 0.0)
        if not totals(found)["steps"]:  # the limit's clock starts with the session's first step
            self._startup_s = wall_s - self.facts.base.get("wall_s", 0.0)
        played_s = wall_s - self._startup_s
        progress, left_s = progress_of(self.facts, played_s, counted["frames"], rates["frames"])
        roles = tuple(self._role_view(role, found[role], base[1][role]) for role in found)
        looks = [seen for _, seen in reversed(self._window)]
        return Snapshot(
            facts=self.facts,
            time_ns=now,
            wall_s=wall_s,
            final=final,
            totals=counted,
            rates=rates,
            samples_per_insert=_ratio(replay.get("sampled", 0.0), replay.get("inserted", 0.0)),
            stale_share=_ratio(stale, stale + replay.get("updates_applied", 0.0)),
            progress=progress,
            left_s=left_s,
            roles=roles,
            replay=replay,
            learner=found.get("learner", {}),
            relay=found.get("relay", {}),
            inference=found.get("inference", {}),
            returns=self._episodes.returns(),
            evaluations=tuple(self._evaluations),
            messages=tuple(self._messages),
            waiting=()
            if final
            else explain_waits(roles, looks, self._limiter, self._processes.host_cpu_share),
            cpu_cores=self._processes.cpu_cores(),
            parent_cpu_cores=self._processes.cpu_cores([os.getpid()]),
            memory_bytes=self._processes.private_bytes() + self.facts.shared_bytes,
            host_cpu_share=self._processes.host_cpu_share,
            host_memory_bytes=self._processes.host_memory_bytes,
        )

    def _sums(self) -> Sums:
        return {
            role: sums([block for _, block in blocks], self._processes.alive)
            for role, blocks in self._roles.items()
        }

    def _role_view(
        self, role: Role, now: Mapping[str, float], before: Mapping[str, float]
    ) -> RoleView:
        blocks = self._roles[role]
        spent = {name: now[f"phase/{name}"] for name in TABLES[role].phases}
        window = {name: max(0.0, s - before[f"phase/{name}"]) for name, s in spent.items()}
        pids = {self._pids.get(name, 0) for name, _ in blocks}
        there = sum(block.pid == ELSEWHERE for _, block in blocks)
        now_ns = self._clock_ns()
        ages = [((now_ns - b.heartbeat_ns) / 1e9, name) for name, b in blocks if b.pid]
        return RoleView(
            role=role,
            processes=there if role in self._elsewhere else len(blocks),
            elsewhere=role in self._elsewhere,
            phases=_shares(window),
            phases_total=_shares(spent),
            cpu_cores=self._processes.cpu_cores(pids),
            private_bytes=self._processes.private_bytes(pids),
            silent=max(ages, default=(0.0, "")),
        )

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
                    why += "; retrying every few seconds"
                text = f"{name} failed, the run continues: {why}"
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
        """Whether the view's terminal was closed without a SIGHUP."""
        error = self._failed.get(id(self._view))
        return isinstance(error, OSError) and error.errno == errno.EIO

    @property
    def unwritten(self) -> bool:
        """Whether the disk refused what a recorder wrote last."""
        written = [self._failed.get(id(recorder)) for recorder in self._recorders]
        return any(isinstance(error, OSError) for error in written)


def totals(found: Sums) -> dict[str, float]:
    """The counters of TOTALS; 0 where no role of this host counts one."""
    return {name: found.get(role, {}).get(name, 0.0) for name, role in TOTALS.items()}


def rates_between(before: tuple[int, Sums], now: tuple[int, Sums]) -> dict[str, float]:
    """The counters of TOTALS per second between two looks (time in ns, sums)."""
    seconds, first, last = (now[0] - before[0]) / 1e9, totals(before[1]), totals(now[1])
    return {name: _ratio(last[name] - first[name], seconds) for name in TOTALS}


def progress_of(
    facts: RunFacts, wall_s: float, frames: float, frames_per_s: float
) -> tuple[float | None, float | None]:
    """The share done and the seconds left of the limit that will be reached first."""
    limits = []
    if facts.max_wall_s:
        limits.append((facts.max_wall_s - wall_s, wall_s / facts.max_wall_s))
    if facts.max_frames and frames_per_s > 0:
        left_s = (facts.max_frames - frames) / frames_per_s
        limits.append((left_s, frames / facts.max_frames))
    if not limits:
        return None, None
    left_s, done = min(limits)
    return min(1.0, done), max(0.0, left_s)


def explain_waits(
    roles: Sequence[RoleView],
    looks: Sequence[Sums],
    limiter: LimiterConfig | None,
    host_cpu_share: float,
) -> tuple[str, ...]:
    """Why actors or the learner wait, a sentence for each that waits a fifth of its time.

    looks: the sums of the last few looks, the newest first.
    """
    replays = [seen["replay"] for seen in looks if seen.get("replay", {}).get("capacity")]

    def last_in(*states: str) -> Mapping[str, float] | None:
        return next((x for x in replays if LIMITER_STATES[int(x["limiter"])] in states), None)

    def explained(*states: str) -> str:
        """What the limiter said in one of these states; "": it was in none."""
        if limiter is None or (seen := last_in(*states)) is None:
            return ""
        filling = LIMITER_STATES[int(seen["limiter"])] == "filling"
        return limiter.explain(int(seen["live"]), None if filling else seen["owed"])

    views = {view.role: view for view in roles}
    busy = f"the host's cores are busy {host_cpu_share:.0%}"
    if (replay := views.get("replay")) is not None:
        busy = f"the replay is busy {1 - replay.phases['idle']:.0%}, {busy}"
    waits: list[tuple[float, str]] = []
    if (actor := views.get("actor")) is not None:
        if relay := looks[0].get("relay"):
            unacknowledged = f"{relay['unacknowledged']:.0f} of {relay['slots']:.0f} slots"
            why = f"actors wait for the replay: {unacknowledged} are unacknowledged"
        elif not (why := explained("actors wait")):
            why = f"actors wait for slots: {busy}"
            if full := last_in("no free slots"):
                unread = f"{full['slots_quarantined']:.0f} are free once the learner has read its"
                why = f"actors wait for free slots: {unread} batches"
        waits.append((actor.phases["wait"], why))
        waits.append((actor.phases["inference"], f"actors wait for Q values: {busy}"))
    if (learner := views.get("learner")) is not None:
        why = explained("filling", "learner waits") or f"the learner waits for batches: {busy}"
        waits.append((learner.phases["wait"] + learner.phases["fill"], why))
    return tuple(f"{share:.0%} of the time, {why}" for share, why in waits if share > _WAITS)


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {name: _ratio(value, whole) for name, value in seconds.items()}


class _Used(NamedTuple):
    """What a process had used at a time; `cores` since the look before."""

    started: int
    cpu_s: float
    at_ns: int
    cores: float
    private_bytes: float


class Processes:
    """Processor time and private memory of the roles' processes and of this one."""

    def __init__(self) -> None:
        self.host_cpu_share = 0.0
        self.host_memory_bytes = float(memory_fact("MemTotal"))
        self._cpus = range(os.cpu_count() or 1)
        self._spent = processor_seconds(self._cpus)
        self._due_ns = 0
        self._used: dict[int, _Used] = {}  # by pid

    def look(self, pids: Iterable[int], now_ns: int) -> None:
        """Ask the kernel about new processes at once, about all every two seconds."""
        wanted = {*pids, os.getpid()} - {0}
        if due := now_ns >= self._due_ns:
            self._due_ns = now_ns + int(_PROCESS_PERIOD_S * 1e9)
            spent = processor_seconds(self._cpus)
            idle, whole = (now - before for now, before in zip(spent, self._spent, strict=True))
            self._spent = spent
            self.host_cpu_share = max(0.0, 1 - idle / whole) if whole > 0 else 0.0
        before = self._used
        found = {
            pid: _ask_kernel(pid, before.get(pid), now_ns)
            if due or pid not in before
            else before[pid]
            for pid in wanted
        }
        self._used = {pid: used for pid, used in found.items() if used is not None}

    def alive(self, pid: int) -> bool:
        """Whether the process runs, here or on another host."""
        return pid == ELSEWHERE or pid in self._used

    def cpu_cores(self, pids: Collection[int] | None = None) -> float:
        """Cores that these processes use; None: all."""
        return sum(self._used[pid].cores for pid in self._known(pids))

    def private_bytes(self, pids: Collection[int] | None = None) -> float:
        """Private memory of these processes; None: of all."""
        return sum(self._used[pid].private_bytes for pid in self._known(pids))

    def _known(self, pids: Collection[int] | None) -> Iterable[int]:
        return self._used if pids is None else self._used.keys() & pids


def _ask_kernel(pid: int, before: _Used | None, at_ns: int) -> _Used | None:
    """None if the process is gone."""
    try:
        stat, statm = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("stat", "statm"))
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()  # the name before it may hold anything
    started, cpu_s = int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    cores = 0.0
    if before is not None and before.started == started:
        cores = (cpu_s - before.cpu_s) / max(1e-9, (at_ns - before.at_ns) / 1e9)
    # Shared memory is mapped by all processes and counted once, separately.
    _, resident, shared, *_ = map(int, statm.split())
    return _Used(started, cpu_s, at_ns, cores, float((resident - shared) * _PAGE_BYTES))
