"""What a run keeps of its learner: full checkpoints to go on from, and the best network seen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zapex import checkpoint
from zapex.agent.learning import DQN, memory_given_back
from zapex.agent.networks import DuelingNetwork
from zapex.environments import EnvironmentSpec
from zapex.errors import CheckpointError


def _facts(spec: EnvironmentSpec) -> dict[str, Any]:
    """What a checkpoint was made for: a network fits only an environment of the same shapes."""
    return {
        "env_id": spec.env_id,
        "observation_shape": list(spec.observation_shape),
        "observation_dtype": spec.observation_dtype,
        "num_actions": spec.num_actions,
    }


class RunCheckpoints:
    """Writes a checkpoint when `period_s` has passed (0: only when told); reads the newest."""

    def __init__(
        self,
        run_dir: Path,
        spec: EnvironmentSpec,
        seed: int,
        clock_s: Callable[[], float],
        period_s: float,
        totals: Callable[[], dict[str, float]],
    ) -> None:
        self._run_dir, self._spec, self._seed = run_dir, spec, seed
        self._clock_s, self._period_s, self._totals = clock_s, period_s, totals
        self._saved_s = clock_s()
        self.version = 0

    def due(self) -> bool:
        """It is time for one."""
        return self._period_s > 0 and self._clock_s() - self._saved_s >= self._period_s

    def save(self, dqn: DQN, version: int) -> None:
        """Write networks, optimiser and counters."""
        totals = self._totals()
        state = {
            "schema": _facts(self._spec),
            "counters": dqn.counters(),
            "params_version": version,
            "totals": totals,
            # The learner draws nothing. What actors and replay draw in a life comes from these two.
            "random": {"seed": self._seed, "steps_before": int(totals.get("steps", 0))},
        }
        tensors = {name: t.cpu().numpy() for name, t in dqn.state_dict_tensors().items()}
        name = checkpoint.step_name(int(totals.get("steps", 0)))
        with memory_given_back():
            checkpoint.save(self._run_dir / "checkpoints", name, tensors, state)
        self._saved_s = self._clock_s()

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
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} lacks what a learner goes on from: {error!r}") from error


class BestNetwork:
    """Keeps the network of the best evaluation of the run under the name "best"."""

    def __init__(self, run_dir: Path, spec: EnvironmentSpec, network: DuelingNetwork) -> None:
        self._run_dir, self._spec, self._network = run_dir, spec, network
        path = checkpoint.best(run_dir)
        self._mean = checkpoint.load(path).state["mean_return"] if path else float("-inf")

    def offer(self, mean: float, version: int, totals: dict[str, float]) -> None:
        """The network as it is now had this mean return: keep it if none was better."""
        if mean <= self._mean:
            return
        self._mean = mean
        state = {
            "schema": _facts(self._spec),
            "params_version": version,
            "totals": totals,
            "mean_return": mean,
        }
        tensors = {f"online.{n}": view.numpy() for n, view in self._network.views.items()}
        checkpoint.save(self._run_dir / "checkpoints", checkpoint.BEST, tensors, state)
