"""The state of a run at one moment, as data, and the two kinds of outputs for it."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from zapex.envs.games import Games
from zapex.host.metrics import TABLES, Role

TOTALS: Final[Mapping[str, Role]] = {
    "steps": "actor", "frames": "actor", "episodes": "actor",
    "batches": "learner", "samples": "learner",
    "inserted": "replay",
}  # fmt: skip
"""The counters of a whole run, and the role that counts each."""


@dataclass(frozen=True)
class RunFacts:
    """Facts that do not change during a run.

    Attributes:
        environment, preset: as the title shows them.
        part: which part of a run on several hosts this host runs, in words; "": all.
        resume: the command that continues this run.
        own_code: whether a wrapper, the network or the loss is code of the user's.
        cores: how many the run may use.
        streams: environment streams of all actors together; an actor has `envs_per_actor` of them.
        greedy_stream: number of the stream with the lowest epsilon, the headline.
        plain_transition_bytes: bytes of one transition in a buffer that stores s and s' whole.
        shared_bytes: shared memory that the run holds, counted once for all roles.
        started_ns: `perf_counter_ns` when the command began; all results count from it.
        max_wall_s, max_frames: limits of the run, earlier sessions included; 0 is no limit.
        base: wall_s and TOTALS at the checkpoint that the run continues from; 0 if missing.
        references: name -> return of the lines to compare with ("random", "human").
        watched: these are shown by another process than the run's, which Ctrl-C does not end.
    """

    environment: str
    preset: str = ""
    part: str = ""
    resume: str = ""
    own_code: bool = False
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
