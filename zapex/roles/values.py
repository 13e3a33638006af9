"""An actor's own forward pass: Q values of parameters that the actor pulls itself."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zapex.host.metrics import RoleMetrics
from zapex.transport import ParameterSource

if TYPE_CHECKING:  # it loads torch, which only a maker of policies needs
    from zapex.agent.policy import Acting


class Pull:
    """Loads a policy with the newest parameters, every so many passes.

    period: passes between two pulls; a pass may count as several.
    """

    def __init__(
        self, policy: "Acting", parameters: ParameterSource, metrics: RoleMetrics, *, period: int,
        parameter_bytes: int,
    ) -> None:  # fmt: skip
        self._policy, self._parameters, self._metrics = policy, parameters, metrics
        self._received = np.empty(parameter_bytes, np.uint8)
        self._period, self._left = period, 0
        self.version = 0  # 0: there are none yet

    def ready(self) -> bool:
        """Whether there are parameters."""
        return self.version > 0 or self._parameters.version > 0

    def newest(self, passes: int = 1) -> int:
        """Pull if it is time, before so many passes. Returns the version, 0 if there is none."""
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
    """A ValueSource that computes when it is asked."""

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
