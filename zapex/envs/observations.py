"""An environment's own observations and actions, and the form in which training has them."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError

Part = tuple[str, tuple[int, ...], str]
"""A key of a Dict observation, its shape and its dtype."""


class Seen(Protocol):
    """What an EnvironmentSpec says of observations."""

    @property
    def observation_shape(self) -> tuple[int, ...]: ...
    @property
    def observation_dtype(self) -> str: ...
    @property
    def played_shape(self) -> tuple[int, ...]: ...
    @property
    def parts(self) -> tuple[Part, ...]: ...


def is_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether images of this shape are (height, width, channels), as in most of Gymnasium."""
    return len(shape) == 3 and shape[2] in (1, 3, 4) and shape[0] > 4


def into(spec: Seen, obs: Any, out: NDArray[Any]) -> None:
    """Write a batch of the environment's observations into `out` (B, *observation_shape).

    The parts of a Dict are flattened, one after the other in the order of `spec.parts`.
    """
    if spec.parts:
        start = 0
        for key, shape, _ in spec.parts:
            end = start + math.prod(shape)
            out[:, start:end] = np.reshape(obs[key], (len(out), -1))
            start = end
        return
    if spec.observation_dtype == "uint8" and is_channels_last(spec.played_shape):
        obs = np.moveaxis(obs, -1, 1)
    out[:] = obs.reshape(out.shape)


def batch_of(spec: Seen, obs: Any) -> tuple[NDArray[Any], bool]:
    """The environment's observations as a batch for the network, and whether it was just one.

    Raises ConfigError if they have another shape than the environment's, with or without one more
    axis in front.
    """
    many, array = 0, obs
    for key, shape in [(key, shape) for key, shape, _ in spec.parts] or [("", spec.played_shape)]:
        if spec.parts and not (isinstance(obs, Mapping) and key in obs):
            raise ConfigError(f"an observation must be a dict with the key {key!r}, got {obs!r}")
        array = np.asarray(obs[key] if spec.parts else obs)
        if array.shape == shape:
            rows = 1
        elif array.shape[1:] == shape:
            rows = len(array)
        else:
            raise ConfigError(
                f"an observation{key and f' {key!r}'} must have shape {shape}, or "
                f"(B, {', '.join(map(str, shape))}) for B of them, got {array.shape}"
            )
        single = array.shape == shape
        if many not in (0, rows):
            raise ConfigError(f"the parts of an observation must be of one batch, got {rows}")
        many = rows
    out = np.empty((many, *spec.observation_shape), spec.observation_dtype)
    whole = obs if spec.parts else array.reshape(many, *spec.played_shape)
    into(spec, whole, out)
    return out, single
