"""An environment's own observations, and the form that training uses."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zapex.errors import ConfigError

Part = tuple[str, tuple[int, ...], str]
"""A key of a Dict observation, its shape and its dtype."""


class Observed(Protocol):
    """The part of an EnvironmentSpec that describes observations."""

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


class Form(NamedTuple):
    """The form of a space's observations in training."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()


def form_of(env_id: str, space: Any) -> Form:
    """The form of a Box, or of a Dict of them, which becomes one vector.

    uint8 images become (channels, height, width), a Dict of uint8 stays uint8, and all else becomes
    float32. Raises ConfigError for another space; the message names a wrapper that helps.
    """
    from gymnasium.spaces import Box, Dict

    if isinstance(space, Dict):
        return _form_of_dict(env_id, space)
    if not isinstance(space, Box):
        raise ConfigError(
            "training supports Box observations (uint8 images, or vectors of numbers) and a Dict "
            f"of them, but those of {env_id} are {space}: convert them with "
            "--wrapper gymnasium.wrappers:FlattenObservation, or your own wrapper"
        )
    shape, dtype = space.shape, space.dtype
    if dtype == np.uint8 and len(shape) == 2:
        return Form((1, *shape), "uint8")
    if dtype == np.uint8 and len(shape) == 3:
        if not is_channels_last(shape):
            return Form(shape, "uint8")
        turned = (shape[2], *shape[:2])
        note = f"images of {env_id} are converted from {shape} to {turned}"
        return Form(turned, "uint8", notes=(note,))
    if dtype == np.uint8 and len(shape) > 3:
        raise ConfigError(
            f"observations of {env_id} have {len(shape)} axes, {shape}, and images have three: "
            "make each frame grey before it is stacked, as --wrapper zapex.envs.wrappers:Grey84 "
            "--wrapper mine:Stack does"
        )
    if not np.issubdtype(dtype, np.floating):
        return Form(
            shape, "float32", notes=(f"observations of {env_id}, {dtype}, are learned as float32",)
        )
    return Form(shape, "float32")


def _form_of_dict(env_id: str, space: Any) -> Form:
    from gymnasium.spaces import Box

    parts = []
    for key, part in space.spaces.items():
        if not isinstance(part, Box):
            raise ConfigError(
                f"training supports a Dict of Box observations, but {key!r} of {env_id} is {part}: "
                "convert it with your own --wrapper"
            )
        parts.append((str(key), part.shape, "uint8" if part.dtype == np.uint8 else "float32"))
    if not parts:
        raise ConfigError(f"an observation of {env_id} is a Dict without keys")
    size = sum(math.prod(shape) for _, shape, _ in parts)
    dtype = "uint8" if all(dtype == "uint8" for *_, dtype in parts) else "float32"
    notes = [f"the Dict of {env_id} ({', '.join(key for key, *_ in parts)}) is kept as one vector"]
    if any(dtype == "uint8" and len(shape) > 1 for _, shape, dtype in parts):
        notes.append("for its images give your own --network: it gets each part by its key")
    return Form((size,), dtype, tuple(parts), tuple(notes))


def into(spec: Observed, obs: Any, out: NDArray[Any]) -> None:
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


def batch_of(spec: Observed, obs: Any) -> tuple[NDArray[Any], bool]:
    """The environment's observations as a batch for the network, and whether it was a single one.

    Raises ConfigError if they have neither the environment's shape nor one more axis in front.
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
