"""The network that the settings of a run ask for, and its size: without torch where possible."""

import math
from typing import TYPE_CHECKING

import numpy as np

from zapex.agent import architecture
from zapex.config.settings import NETWORK_FIELDS, LearnerConfig
from zapex.envs.environments import EnvironmentSpec

if TYPE_CHECKING:
    from zapex.agent.networks import Network

_known_shapes: dict[str, dict[str, tuple[int, ...]]] = {}


def network_of(
    spec: EnvironmentSpec, config: LearnerConfig, device: str, precision: str, seed: int = 0
) -> "Network":
    """The network that `config` asks for, on `device`, for the environment's observations."""
    from zapex.agent import networks

    return networks.build(
        spec.observation_shape,
        np.dtype(spec.observation_dtype),
        spec.num_actions,
        **{name: getattr(config, name) for name in NETWORK_FIELDS},
        parts=spec.parts,
        precision=precision,
        device=device,
        seed=seed,
    )


def check(spec: EnvironmentSpec, config: LearnerConfig, learns: bool) -> None:
    """Raise ConfigError if the network does not fit the environment, or the loss is unusable.

    learns: whether this host needs the loss.
    """
    parameters(spec, config)
    if learns and ":" in config.loss:
        from zapex.agent import losses

        losses.named(config.loss)


def parameters(spec: EnvironmentSpec, config: LearnerConfig) -> int:
    """How many numbers the network has."""
    return sum(math.prod(shape) for shape in _parameter_shapes(spec, config).values())


def state_shapes(spec: EnvironmentSpec, config: LearnerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a learner's state, by the names of `DQN.state_dict_tensors`."""
    return architecture.state_shapes(_parameter_shapes(spec, config))


def _parameter_shapes(spec: EnvironmentSpec, config: LearnerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the network's parameters; only networks other than nature load torch."""
    if config.network != "nature":
        key = repr((spec, config))
        if key not in _known_shapes:
            _known_shapes[key] = network_of(spec, config, "cpu", "float32").shapes
        return _known_shapes[key]
    dtype = np.dtype(spec.observation_dtype)
    return architecture.parameter_shapes(
        architecture.layers(
            spec.observation_shape,
            dtype,
            spec.num_actions,
            config.hidden,
            config.channels,
            config.dueling,
            config.max_pool,
            config.quantiles,
        )
    )
