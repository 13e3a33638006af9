"""The network that the settings of a run ask for, and its size, without torch where that can be."""

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from zapex.agent import architecture
from zapex.config.settings import LearnerConfig
from zapex.envs.environments import EnvironmentSpec

if TYPE_CHECKING:
    from zapex.agent.flat import Network


def network_of(
    spec: EnvironmentSpec, config: LearnerConfig, device: str, precision: str, seed: int = 0
) -> "Network":
    """The network that `config` asks for, on `device`, for the environment's observations.

    precision: of the built-in CNN; other networks compute in float32.
    """
    from zapex.agent import modules, networks

    shape, dtype = spec.observation_shape, np.dtype(spec.observation_dtype)
    options = {
        "hidden": config.hidden,
        "channels": config.channels,
        "dueling": config.dueling,
        "layer_norm": config.layer_norm,
        "max_pool": config.max_pool,
    }
    if config.network != "nature":
        place = networks.device_of(device)
        return modules.build(
            config.network, shape, dtype, spec.num_actions, place, parts=spec.parts, seed=seed,
            options=options,
        )  # fmt: skip
    return networks.build(
        shape, dtype, spec.num_actions, precision=precision, device=device, seed=seed,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def check(spec: EnvironmentSpec, config: LearnerConfig, learns: bool) -> None:
    """Raise ConfigError if the network does not fit the environment, or the loss is none."""
    parameters(spec, config)
    if learns and ":" in config.loss:
        from zapex.agent import losses

        losses.named(config.loss)


def parameters(spec: EnvironmentSpec, config: LearnerConfig) -> int:
    """How many numbers the network has."""
    shapes = state_shapes(spec, config).items()
    return sum(math.prod(shape) for name, shape in shapes if name.startswith("online."))


def state_shapes(spec: EnvironmentSpec, config: LearnerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a learner's state, by the names of `DQN.state_dict_tensors`."""
    if config.network == "nature":
        dtype = np.dtype(spec.observation_dtype)
        return architecture.state_shapes(
            spec.observation_shape, dtype, spec.num_actions, config.hidden, config.channels,
            config.dueling, config.max_pool,
        )  # fmt: skip
    return {
        f"{part}.{name}": shape
        for part in ("online", "target", "optimiser.mean", "optimiser.mean_square")
        for name, shape in _shapes(_Same(spec, config)).items()
    }


class _Same:
    """An environment and a network; equal ones need not be made twice."""

    def __init__(self, spec: EnvironmentSpec, config: LearnerConfig) -> None:
        self.spec, self.config = spec, config
        self._key = repr((spec, config))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=8)
def _shapes(same: _Same) -> dict[str, tuple[int, ...]]:
    return network_of(same.spec, same.config, "cpu", "float32").shapes
