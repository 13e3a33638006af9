"""What a run keeps of its learner: full checkpoints to resume from, and the best network."""

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from zapex.agent.learning import DQN, memory_given_back
from zapex.agent.networks import Network
from zapex.checkpoints import file as checkpoint
from zapex.config.settings import NETWORK_FIELDS, LearnerConfig
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import CheckpointError

Report = Callable[[int], object]
_RETRY_S = 30.0  # after the disk has refused


def _facts(spec: EnvironmentSpec) -> dict[str, Any]:
    """The facts that a checkpoint is for: a network fits only an environment of the same shapes."""
    return {
        "env_id": spec.env_id,
        "observation_shape": list(spec.observation_shape),
        "observation_dtype": spec.observation_dtype,
        "num_actions": spec.num_actions,
    }


def _made_with(spec: EnvironmentSpec, config: LearnerConfig) -> dict[str, Any]:
    """What another program needs to make the network: `zapex.load_policy` reads it."""
    return {
        "environment": asdict(spec),
        "network": {name: getattr(config, name) for name in NETWORK_FIELDS},
    }


def _saved(
    run_dir: Path, name: str, tensors: Mapping[str, Any], state: Mapping[str, Any], report: Report
) -> bool:
    """Write a checkpoint. A full disk must not end a run: returns whether it was written."""
    try:
        checkpoint.save(run_dir / "checkpoints", name, tensors, state)
    except CheckpointError as error:
        report(getattr(error.__cause__, "errno", None) or errno.EIO)
        return False
    report(0)
    return True


class RunCheckpoints:
    """Writes a checkpoint when `period_s` has passed (0: only on request); reads the newest.

    report: called after each attempt, with the error number of the disk; 0: it was written.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: EnvironmentSpec,
        seed: int,
        clock_s: Callable[[], float],
        period_s: float,
        totals: Callable[[], dict[str, float]],
        report: Report,
        config: LearnerConfig | None = None,
    ) -> None:
        self._run_dir, self._spec, self._seed, self._report = run_dir, spec, seed, report
        self._policy = _made_with(spec, config or LearnerConfig())
        self._clock_s, self._period_s, self._totals = clock_s, period_s, totals
        self._saved_s, self._wait_s = clock_s(), period_s
        self.version = 0

    def due(self) -> bool:
        """Whether it is time for one."""
        return self._period_s > 0 and self._clock_s() - self._saved_s >= self._wait_s

    def save(self, dqn: DQN, version: int) -> None:
        """Write networks, optimiser and counters; if the disk refuses, again a little later."""
        totals = self._totals()
        state = {
            "schema": _facts(self._spec),
            "policy": self._policy,
            "counters": dqn.counters(),
            "params_version": version,
            "totals": totals,
            # The learner draws nothing. Actors and replay seed each incarnation from these two.
            "random": {"seed": self._seed, "steps_before": int(totals.get("steps", 0))},
        }
        tensors = {name: t.cpu().numpy() for name, t in dqn.state_dict_tensors().items()}
        name = checkpoint.step_name(int(totals.get("steps", 0)))
        with memory_given_back():
            saved = _saved(self._run_dir, name, tensors, state, self._report)
        self._saved_s = self._clock_s()
        self._wait_s = self._period_s if saved else min(self._period_s, _RETRY_S)

    def restore(self, dqn: DQN) -> None:
        """Take over the newest checkpoint of the run, if there is one.

        Raises CheckpointError for one that is damaged or was made for another environment.
        """
        path = checkpoint.latest(self._run_dir)
        if path is None:
            return
        loaded = checkpoint.load(path)
        checkpoint.check_schema(loaded, _facts(self._spec))
        try:
            dqn.load_state(loaded.tensors, loaded.state["counters"])
            self.version = int(loaded.state["params_version"])
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} lacks what a learner resumes from: {error!r}") from error


class BestNetwork:
    """Keeps the network of the best evaluation of the run under the name "best".

    report: as in RunCheckpoints. What the disk refuses is written with a later evaluation.
    """

    def __init__(
        self, run_dir: Path, spec: EnvironmentSpec, network: Network, report: Report,
        config: LearnerConfig | None = None,
    ) -> None:  # fmt: skip
        self._policy = _made_with(spec, config or LearnerConfig())
        self._run_dir, self._spec, self._network = run_dir, spec, network
        self._report = report
        self._unwritten: tuple[dict[str, Any], dict[str, Any]] | None = None
        path = checkpoint.best(run_dir)
        self._mean = checkpoint.load(path).state["mean_return"] if path else float("-inf")

    def offer(self, returns: Sequence[float], version: int, totals: dict[str, float]) -> None:
        """Keep the present network if its mean return is the best so far."""
        mean = float(np.mean(returns))
        if mean > self._mean:
            self._mean = mean
            self._unwritten = self._best(mean, returns, version, totals)
        if self._unwritten and _saved(
            self._run_dir, checkpoint.BEST, *self._unwritten, self._report
        ):
            self._unwritten = None

    def _best(
        self, mean: float, returns: Sequence[float], version: int, totals: dict[str, float]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The present network, copied, and its state."""
        state = {
            "schema": _facts(self._spec),
            "policy": self._policy,
            "params_version": version,
            "totals": totals,
            "mean_return": mean,
            "returns": list(returns),
        }
        views = self._network.views
        return {f"online.{name}": view.numpy().copy() for name, view in views.items()}, state
