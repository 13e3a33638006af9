"""Wrappers: one to name with --wrapper, and one around environments with integers."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from zapex.chunks.arguments import column
from zapex.errors import ConfigError

_SIDE = 84
_GREY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601


class Grey84(gymnasium.ObservationWrapper[NDArray[np.uint8], Any, Any]):
    """Images of any size as one grey image of 84x84: each pixel is the mean of its area."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        shape = env.observation_space.shape or ()
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3)):
            raise ConfigError(f"Grey84 takes images (H, W), (H, W, 1) or (H, W, 3), got {shape}")
        self._rows, self._columns = (_means(size) for size in shape[:2])
        self.observation_space = gymnasium.spaces.Box(0, 255, (_SIDE, _SIDE), np.uint8)

    def observation(self, observation: Any) -> NDArray[np.uint8]:
        image = np.asarray(observation, np.float32)
        if image.ndim == 3:
            image = image @ _GREY if image.shape[2] == 3 else image[:, :, 0]
        small: NDArray[np.uint8] = (self._rows @ image @ self._columns.T).round().astype(np.uint8)
        return small


class Fitted(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Observations in the dtypes of their space: NumPy would wrap integers that do not fit.

    Raises SchemaError for one that does not.
    """

    def observation(self, observation: Any) -> Any:
        return _fitted(self.observation_space, observation, "an observation")


def has_integers(space: gymnasium.Space[Any]) -> bool:
    """Whether a space, or a part of a Dict, is of integers."""
    if isinstance(space, gymnasium.spaces.Dict):
        return any(map(has_integers, space.values()))
    return space.dtype is not None and space.dtype.kind in "iu"


def _fitted(space: Any, obs: Any, name: str) -> Any:
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _fitted(part, obs[key], f"{name}'s {key!r}") for key, part in space.items()}
    return column(obs, space.dtype, space.shape, name)


def _means(size: int) -> NDArray[np.float32]:
    """(84, size): row i has the share of each pixel in the i-th of 84 equal parts."""
    edges = np.linspace(0.0, size, _SIDE + 1)
    pixels = np.arange(size)
    inside = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    shares: NDArray[np.float64] = inside.clip(0.0)
    means: NDArray[np.float32] = (shares / shares.sum(1, keepdims=True)).astype(np.float32)
    return means
