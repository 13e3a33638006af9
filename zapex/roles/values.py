"""Q values for actors: from an actor's own network, or from the inference role of its host."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zapex.host.metrics import RoleMetrics
from zapex.machine.exchange import Answerer
from zapex.transport import ParameterSource

if TYPE_CHECKING:  # it loads torch, which only a maker of policies needs
    from zapex.agent.policy import Acting


class Pull:
    """Loads the newest parameters into a policy, every so many passes.

    Args:
        policy: takes the parameters.
        parameters: where they come from.
        metrics: of the role.
        period: passes between two pulls; a pass may count as several.
        parameter_bytes: of all float32 parameters.
    """

    def __init__(
        self,
        policy: "Acting",
        parameters: ParameterSource,
        metrics: RoleMetrics,
        *,
        period: int,
        parameter_bytes: int,
    ) -> None:
        self._policy, self._parameters, self._metrics = policy, parameters, metrics
        self._received = np.empty(parameter_bytes, np.uint8)
        self._period, self._left = period, 0
        self.version = 0  # 0: there are none yet

    def ready(self) -> bool:
        """Whether there are parameters."""
        return self.version > 0 or self._parameters.version > 0

    def newest(self, passes: int = 1) -> int:
        """Pull if it is time, before `passes` passes. Returns the version, 0 if there is none."""
        self._left -= passes
        if self._left >= 0 and self.version:
            return self.version
        self._metrics.enter("pull")
        version = self._parameters.newer_than(self.version, self._received)
        if version:
            self._policy.load_flat(self._received)
            self.version = version
            self._metrics.set("params_version", version)
        self._left = self._period - passes if self.version else 0
        return self.version


class OwnValues:
    """A ValueSource that computes by itself, with parameters that it pulls."""

    phase = "wait"

    def __init__(self, policy: "Acting", pull: Pull, metrics: RoleMetrics) -> None:
        self._policy, self._pull, self._metrics = policy, pull, metrics
        self._obs: NDArray[np.generic] | None = None

    def ask(self, obs: NDArray[np.generic]) -> None:
        """Keep the observations for `take`."""
        self._obs = obs

    def answered(self) -> bool:
        """Whether there are parameters."""
        return self._pull.ready()

    def take(self) -> tuple[NDArray[np.float32], int] | None:
        """The values of what was asked, or None before the first parameters."""
        version = self._pull.newest() if self._obs is not None else 0
        if self._obs is None or not version:
            return None
        obs, self._obs = self._obs, None
        self._metrics.enter("forward")
        return self._policy.q_values(obs), version


class Inference:
    """The role that computes for all actors of its host, with one forward pass for all that wait.

    It never waits to fill a batch: requests that arrive during a pass are answered in the next one
    (docs/decisions.md).

    Args:
        questions: the actors' requests.
        policy: what computes.
        pull: loads parameters into `policy`.
        metrics: of the role.
        streams: of each actor.
    """

    def __init__(
        self,
        questions: Answerer,
        policy: "Acting",
        pull: Pull,
        metrics: RoleMetrics,
        *,
        streams: int,
    ) -> None:
        self._questions, self._policy, self._pull = questions, policy, pull
        self._metrics, self._streams = metrics, streams
        metrics.enter("other")

    def do_work(self) -> int:
        """Answer waiting actors. Returns how many streams; 0: none, or no parameters."""
        metrics = self._metrics
        asked = len(self._questions.find())
        if not asked or not self._pull.newest(asked):
            metrics.enter("idle")
            return 0
        metrics.enter("forward")
        places = self._questions.find()  # more may have asked during the pull
        q = self._policy.q_values(self._questions.items(places))
        metrics.enter("answer")
        self._questions.answer(q, self._pull.version)
        metrics.add("passes")
        metrics.add("answers", len(places))
        metrics.add("streams", len(places) * self._streams)
        metrics.enter("idle")
        return len(places) * self._streams

    def ready(self) -> bool:
        """Whether an actor waits and there are parameters: for `wait(ready, timeout_s)`."""
        return len(self._questions.find()) > 0 and self._pull.ready()

    def close(self) -> None:
        """Stop. The next incarnation answers the actors that wait now."""
        self._metrics.leave()
