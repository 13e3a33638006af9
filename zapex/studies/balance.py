"""`zapex balance`: how fast actors and learner are on this machine, and how many of each fit."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.machine.power import Meter
from zapex.machine.resources import Machine, hardware_threads
from zapex.studies.crew import Crew
from zapex.studies.plan import Trial, trials
from zapex.studies.saturation import Model, Point, error, fit

Say = Callable[[str], object]


@dataclass(frozen=True)
class Effort:
    """seconds: of each measurement. rounds: how often each is made; the median counts."""

    seconds: float
    rounds: int
    quick: bool


QUICK, FULL = Effort(0.5, 1, True), Effort(1.5, 5, False)


@dataclass
class Found:
    """A trial, what its rounds found, and what the model says of it."""

    trial: Trial
    rounds: list[dict[str, Any]]

    def value(self, name: str) -> float | None:
        """The median of the rounds; None if it could not be read."""
        values = [found[name] for found in self.rounds if found.get(name) is not None]
        return median(values) if values else None

    def rate(self, name: str) -> float:
        """The median of what every round has."""
        return float(median(found[name] for found in self.rounds))

    def point(self, full: float) -> Point:
        """A trial of actors, for the model. full: the share of a core that counts as all of it."""
        trial, busy = self.trial, min(1.0, self.rate("cpu_share") / full)
        return Point(trial.actors, trial.envs, trial.cores, self.rate("steps_per_s"), busy)

    def describe(self, models: dict[str, Model], full: float) -> dict[str, Any]:
        """As JSON has it: medians, and p10 and p90 are the extremes of few rounds."""
        names = {name for found in self.rounds for name in found}
        rows: dict[str, Any] = {**asdict(self.trial), "rounds": len(self.rounds)}
        for name in sorted(names):
            values = [found[name] for found in self.rounds if found.get(name) is not None]
            rows[name] = median(values) if values else None
            if values and name.endswith("per_s"):
                rows[f"{name}_range"] = [min(values), max(values)]
        if self.trial.do != "learn":
            model = models[self.trial.where]
            point = self.point(full)
            rows["predicted_steps_per_s"] = point.steps_per_s * (1 + error(model, point))
            rows["error"] = error(model, point)
        return rows


class Balance:
    """The measurements. say: takes a line of progress for each."""

    def __init__(
        self, config: Config, spec: EnvironmentSpec, machine: Machine, effort: Effort,
        *, step_s: float = 0.0, say: Say = print, meter: Meter | None = None,
    ) -> None:  # fmt: skip
        """step_s: of a learner that is not measured; 0: measure it."""
        self._config, self._spec, self._machine = config, spec, machine
        self._effort, self._say, self._step_s = effort, say, step_s
        self._meter = meter or Meter()
        self.threads = hardware_threads()
        self.gpu = machine.learns_on_gpu and config.learner.device != "cpu"

    def run(self) -> dict[str, Any]:
        """Measure all. Returns {"points", "models", "learner", "kernels", ...}."""
        found = self._measure()
        acting = [one for one in found if one.trial.do == "play"]
        full = max(x.rate("cpu_share") for x in acting)  # a measurement's ends are never busy
        models = {
            where: fit(
                [x.point(full) for x in acting if x.trial.where == where and not x.trial.held_out],
                self._machine.cores,
            )
            for where in dict.fromkeys(x.trial.where for x in acting)
        }
        checks = [
            abs(error(models[x.trial.where], x.point(full))) for x in acting if x.trial.held_out
        ]
        learned = {x.trial.learner_threads: x for x in found if x.trial.do == "learn"}
        rates = {n: x.rate("batches_per_s") for n, x in learned.items()}
        paced = self._step_s > 0
        learner = {
            "paced": paced,
            "device": "paced" if paced else "cuda" if self.gpu else "cpu",
            "batch_size": self._config.learner.batch_size,
            "batches_per_s_by_threads": {0: 1 / self._step_s} if paced else rates,
        }
        return {
            "points": [x.describe(models, full) for x in found],
            "models": {where: asdict(model) for where, model in models.items()},
            "held_out_error": max(checks, default=None),
            "learner": learner,
            "kernels": self._kernels,
            "foreign_share": max(x.rate("foreign_share") for x in found),
            "power": {"cpu": self._meter.rapl.why, "gpu": self._meter.nvml.why},
        }

    def _measure(self) -> list[Found]:
        """Every trial once a round, in an order drawn anew, so that a disturbance meets all."""
        every = trials(
            self._machine, len(self.threads), self.gpu, self._effort.quick, self._step_s > 0
        )
        found = [Found(trial, []) for trial in every]
        turns = [one for _ in range(self._effort.rounds) for one in self._shuffled(found)]
        began_s = 0.0
        kinds = {(t.actors, t.envs): 1 for t in every if t.where == "central"}
        with Crew(self._config, self._spec, list(kinds)) as crew:
            self._kernels = {} if self._step_s else self._profile(crew)
            for done, one in enumerate(turns):
                one.rounds.append(self._trial(crew, one.trial))
                # The first one starts the workers, which takes longest: nothing follows from it.
                began_s = began_s or time.monotonic()
                left_s = (time.monotonic() - began_s) / max(1, done) * (len(turns) - done - 1)
                self._say(self._line(done + 1, len(turns), one, left_s))
        return found

    def _shuffled(self, found: Sequence[Found]) -> list[Found]:
        return random.Random(0).sample(list(found), len(found))

    @staticmethod
    def _line(done: int, of: int, one: Found, left_s: float) -> str:
        last = one.rounds[-1]
        rates = {"steps_per_s": "steps/s", "batches_per_s": "batches/s"}
        text = ", ".join(
            f"{last[name]:,.5g} {unit}" for name, unit in rates.items() if name in last
        )
        return (
            f"{done} of {of}: {one.trial}: {text} {f' ({left_s:.0f} s left)' if done > 1 else ''}"
        )

    def _profile(self, crew: Crew) -> dict[str, Any]:
        self._say("the learner's kernels, and the time to load everything")
        order = {"do": "profile", "cores": self.threads, "threads": 1}
        found: dict[str, Any] = crew.work([order], 0.0)[0]
        return found

    def _trial(self, crew: Crew, trial: Trial) -> dict[str, Any]:
        """One measurement. The learner, if there is one, has the last hardware threads."""
        seconds, cores = self._effort.seconds, self.threads[: trial.cores]
        orders: list[dict[str, Any]] = []
        if trial.do != "learn":
            orders += [
                {
                    "do": "play", "where": trial.where, "envs": trial.envs, "actors": trial.actors,
                    "cores": self._place(i, trial), "threads": self._config.actor.actor_threads,
                }
                for i in range(trial.actors)
            ]  # fmt: skip
        if trial.where == "central":
            orders.append({**orders[0], "do": "answer", "cores": cores})
        if trial.do != "play":
            n = trial.learner_threads
            mine = self.threads[-n:] if n else self.threads
            orders.append({"do": "learn", "cores": mine, "threads": max(1, n)})
            cores = sorted({*cores, *mine})
        answers = crew.work(orders, seconds, lambda: self._meter.begin(cores))
        found: dict[str, Any] = dict(self._meter.end())
        mine_s = sum(answer["cpu_s"] for answer in answers)
        found["foreign_share"] = max(0.0, found["cpu_share"] - mine_s / (seconds * len(cores)))
        rates = [answer["done"] / answer["seconds"] for answer in answers]
        if trial.do != "play":
            found["batches_per_s"] = rates.pop()
        if trial.where == "central":
            found["actors_a_pass"] = answers[len(rates) - 1]["actors_a_pass"]
            rates.pop()
        if trial.do != "learn":
            found["steps_per_s"] = sum(rates)
            found["environment_share"] = median(x.get("environment_share", 0.0) for x in answers)
        return found

    def _place(self, actor: int, trial: Trial) -> list[int]:
        """The hardware threads of an actor: one of its own, or all if there are too few."""
        mine = self.threads[: trial.cores]
        return [mine[actor]] if trial.actors <= trial.cores else mine
