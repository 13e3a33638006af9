"""The state of a run at one moment, as data; the outputs for it; and what `zapex.train` reports."""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

from numpy.typing import NDArray

from zapex.envs.scores import Games
from zapex.host.metrics import TABLES, Role

TOTALS: Final[Mapping[str, Role]] = {
    "steps": "actor",
    "frames": "actor",
    "episodes": "actor",
    "batches": "learner",
    "samples": "learner",
    "inserted": "replay",
}
"""The counters of a whole run, and the role that counts each."""


@dataclass(frozen=True)
class RunFacts:
    """Facts that do not change during a run.

    Attributes:
        environment, preset: as the title shows them.
        part: which part of a run on several hosts this host runs, as text; "": all.
        resume: the command that continues this run.
        films: whether the environment can be filmed.
        cores: how many the run may use.
        streams: environment streams of all actors together; an actor has `envs_per_actor` of them.
        greedy_stream: number of the stream with the lowest epsilon, the headline.
        plain_transition_bytes: bytes of one transition in a buffer that stores s and s' whole.
        shared_bytes: shared memory that the run holds, counted once for all roles.
        started_ns: `perf_counter_ns` when the command began; all results count from it.
        max_wall_s, max_frames: limits of the run, earlier sessions included; 0 is no limit.
        base: wall_s and TOTALS at the checkpoint that the run continues from; 0 if missing.
        references: name -> return of the lines to compare with ("random", "human").
        watched: another process shows the run, so Ctrl-C does not end it.
    """

    environment: str
    preset: str = ""
    part: str = ""
    resume: str = ""
    films: bool = True
    run_dir: Path | None = None
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    streams: int = 1
    envs_per_actor: int = 1
    greedy_stream: int = 0
    plain_transition_bytes: int = 0
    shared_bytes: int = 0
    started_ns: int = field(default_factory=time.perf_counter_ns)
    max_wall_s: float = 0.0
    max_frames: int = 0
    base: Mapping[str, float] = field(default_factory=dict)
    references: Mapping[str, float] = field(default_factory=dict)
    watched: bool = False


@dataclass(frozen=True)
class Evaluation(Games):
    """Greedy games of one published network; clock and counters of the whole run."""

    params_version: int
    steps: int
    frames: int
    wall_s: float


def best_of(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """The first with the highest mean of those whose mean is finite; None: there is none."""
    finite = (one for one in evaluations if math.isfinite(one.mean))
    return max(finite, key=lambda one: one.mean, default=None)


@dataclass(frozen=True)
class RoleView:
    """All processes of one role. Phases are shares of the role's wall time and sum to 1."""

    role: Role
    processes: int
    phases: dict[str, float]  # over the window
    phases_total: dict[str, float]  # since the start
    cpu_cores: float
    private_bytes: float
    silent: tuple[float, str]  # the longest time since a change of phase, and of which process
    elsewhere: bool = False  # on other hosts: cpu and memory are unknown

    @property
    def shares(self) -> dict[str, float]:
        """Phases as the table shows them, over the window."""
        return self._shown(self.phases)

    @property
    def shares_total(self) -> dict[str, float]:
        """The same, since the start."""
        return self._shown(self.phases_total)

    def _shown(self, phases: Mapping[str, float]) -> dict[str, float]:
        shown = TABLES[self.role].shown_as
        return {name: sum(phases[part] for part in parts) for name, parts in shown.items()}


@dataclass(frozen=True)
class Returns:
    """Means of the last 100 episodes; NaN if there is none yet."""

    all_mean: float
    greedy_mean: float
    greedy_last: float
    bands: dict[str, float]
    greedy_history: tuple[float, ...]  # whole run, evenly thinned


@dataclass(frozen=True)
class Note:
    """A message to the user. number: counts the messages of a run, from 1."""

    number: int
    wall_s: float
    text: str


@dataclass(frozen=True)
class Snapshot:
    """The state of the whole run. Counters include those of the run's earlier sessions."""

    facts: RunFacts
    time_ns: int
    wall_s: float
    final: bool  # rates and shares are those of the whole session, not of the window
    totals: dict[str, float]  # of TOTALS
    rates: dict[str, float]  # the same, per second, over the window
    samples_per_insert: float
    stale_share: float
    progress: float | None
    left_s: float | None
    roles: tuple[RoleView, ...]
    replay: dict[str, float]
    learner: dict[str, float]
    returns: Returns
    evaluations: tuple[Evaluation, ...]
    messages: tuple[Note, ...]
    cpu_cores: float  # of all roles and the parent
    parent_cpu_cores: float
    memory_bytes: float  # private memory of all, and the shared memory once
    host_cpu_share: float
    host_memory_bytes: float
    relay: dict[str, float] = field(default_factory=dict)
    inference: dict[str, float] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()  # why actors or the learner wait, a sentence each

    def role(self, role: Role) -> RoleView | None:
        """The processes of a role; None: the run has no such role."""
        return next((view for view in self.roles if view.role == role), None)

    @property
    def best_evaluation(self) -> Evaluation | None:
        """The evaluation with the highest mean; None: there is none yet."""
        return best_of(self.evaluations)


class View(Protocol):
    """Shows the newest snapshot to a person."""

    def show(self, snapshot: Snapshot) -> None:
        """Show it in place of the last one."""

    def close(self) -> None:
        """Free what the view holds, such as the terminal."""


class Recorder(Protocol):
    """Stores snapshots."""

    def write(
        self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: Sequence[Evaluation]
    ) -> None:
        """Store it. episodes (dtype EPISODE), evaluations: those since the last call."""

    def close(self) -> None:
        """Store what is left."""


@dataclass(frozen=True)
class Report:
    """The state of a run at one moment, for the `on_report` of `zapex.train`.

    Attributes:
        run_dir: directory of the run.
        wall_s: seconds of the run, earlier sessions included.
        steps, frames, episodes, batches: counted since the run's start.
        steps_per_s, batches_per_s: means over the last seconds.
        mean_return: of the last 100 episodes of all streams; NaN before the first.
        greedy_return: of the last 10 episodes of the stream with the lowest epsilon; NaN before.
        last_return, best_return: mean returns of the last and the best evaluation; None before.
        loss, q_values: of the last batch; 0 before the first.
    """

    run_dir: Path
    wall_s: float
    steps: int
    frames: int
    episodes: int
    batches: int
    steps_per_s: float
    batches_per_s: float
    mean_return: float
    greedy_return: float
    last_return: float | None
    best_return: float | None
    loss: float
    q_values: float

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """The report of a snapshot."""
        totals, rates, best = snapshot.totals, snapshot.rates, snapshot.best_evaluation
        return cls(
            run_dir=snapshot.facts.run_dir or Path(),
            wall_s=snapshot.wall_s,
            steps=int(totals["steps"]),
            frames=int(totals["frames"]),
            episodes=int(totals["episodes"]),
            batches=int(totals["batches"]),
            steps_per_s=rates["steps"],
            batches_per_s=rates["batches"],
            mean_return=snapshot.returns.all_mean,
            greedy_return=snapshot.returns.greedy_mean,
            last_return=snapshot.evaluations[-1].mean if snapshot.evaluations else None,
            best_return=best.mean if best is not None else None,
            loss=snapshot.learner.get("loss", 0.0),
            q_values=snapshot.learner.get("q_mean", 0.0),
        )


@dataclass(frozen=True)
class Result:
    """How a run of `zapex.train` ended.

    Attributes:
        run_dir: directory of the run: `zapex.load_policy` takes it.
        best_return, last_return: mean returns of the best and the last evaluation; None if there
            was none (`eval_period_s` sets how often).
        steps: steps of all environments since the run's start.
        reason: why it ended, in words.
    """

    run_dir: Path
    best_return: float | None
    last_return: float | None
    steps: int
    reason: str

    @classmethod
    def of(cls, snapshot: Snapshot, reason: str) -> Self:
        """The result of a run whose last state this is."""
        last = Report.of(snapshot)
        return cls(last.run_dir, last.best_return, last.last_return, last.steps, reason)
