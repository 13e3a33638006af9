"""What a Python program is told of its run: a report each second, a result at the end."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from zapex.watch.report import Snapshot


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
