"""What a run has to report at one moment, and the two kinds of listeners it reports to."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.metrics import Role


@dataclass(frozen=True)
class RunFacts:
    """What does not change while a run runs.

    Attributes:
        environment, preset: as the title says them.
        part: what this host has of a run on several, in words; "": all of it.
        replay_url: where the replay of a run on several hosts is.
        cores: how many the run may use.
        streams: environment streams of all actors together.
        greedy_stream: number of the stream with the lowest epsilon, the headline.
        plain_transition_bytes: bytes of one transition in a buffer that stores s and s' whole.
        shared_bytes: shared memory that the run holds, counted once for all roles.
        started_ns: `perf_counter_ns` when the command began; the clock of all results.
        max_wall_s, max_frames: where the run ends, its earlier lives counted in; 0 is no limit.
        base: counters at the checkpoint that the run goes on from: wall_s, steps, frames,
            episodes, batches, samples, inserted (those that are missing are 0).
        references: name -> return of the lines to compare with ("random", "human").
    """

    environment: str
    preset: str = ""
    part: str = ""
    replay_url: str = ""
    run_dir: Path | None = None
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    streams: int = 1
    greedy_stream: int = 0
    plain_transition_bytes: int = 0
    shared_bytes: int = 0
    started_ns: int = field(default_factory=time.perf_counter_ns)
    max_wall_s: float = 0.0
    max_frames: int = 0
    base: Mapping[str, float] = field(default_factory=dict)
    references: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Games:
    """What games of one policy brought, in the game's own score."""

    returns: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """The returns' standard deviation (of these games, not of the mean)."""
        return float(np.std(self.returns))


@dataclass(frozen=True)
class Evaluation(Games):
    """Greedy games of one published network; clock and counters of the whole run."""

    params_version: int
    steps: int
    frames: int
    wall_s: float


@dataclass(frozen=True)
class RoleView:
    """All processes of one role. Shares are of the role's wall time and sum to 1."""

    role: Role
    processes: int
    shares: dict[str, float]  # the table's shown_as, over the window
    shares_total: dict[str, float]  # the same, since the start
    phases: dict[str, float]  # every phase, over the window
    phases_total: dict[str, float]
    cpu_cores: float
    private_bytes: float
    silent: tuple[float, str]  # seconds since the last sign of life, of whom: the longest
    elsewhere: bool = False  # on other hosts: processes are those heard of, cpu and memory unknown


@dataclass(frozen=True)
class Returns:
    """Means of the last 100 episodes; NaN where there is none yet."""

    all_mean: float
    greedy_mean: float
    greedy_last: float
    bands: dict[str, float]
    greedy_history: tuple[float, ...]  # whole run, evenly thinned


@dataclass(frozen=True)
class Message:
    number: int
    wall_s: float
    text: str


@dataclass(frozen=True)
class Snapshot:
    """One look at the whole run. Counters include those of the run's earlier lives."""

    facts: RunFacts
    time_ns: int
    wall_s: float
    final: bool  # rates and shares are those of the whole session, not of the window
    totals: dict[str, float]  # steps, frames, episodes, batches, samples, inserted
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
    messages: tuple[Message, ...]
    cpu_cores: float  # of all roles and the parent
    parent_cpu_cores: float
    memory_bytes: float  # private memory of all, and the shared memory once
    host_cpu_share: float
    host_memory_bytes: float
    relay: dict[str, float] = field(default_factory=dict)

    def role(self, role: Role) -> RoleView | None:
        return next((view for view in self.roles if view.role == role), None)

    @property
    def best_evaluation(self) -> Evaluation | None:
        return max(self.evaluations, key=lambda e: e.mean, default=None)


class View(Protocol):
    """Shows the newest snapshot to a person."""

    def show(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


class Recorder(Protocol):
    """Stores snapshots; `episodes` (dtype EPISODE) and `evaluations` are new since the last."""

    def write(
        self, snapshot: Snapshot, episodes: NDArray[Any], evaluations: Sequence[Evaluation]
    ) -> None: ...
    def close(self) -> None: ...
