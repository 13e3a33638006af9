"""The layers of a network as shapes, and the size of its parameters, without torch."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zapex.errors import ConfigError

NATURE_CHANNELS = 32  # of the first convolution (Mnih et al. 2015); the others have twice as many
_CONVOLUTIONS = (
    (36, ((8, 4), (4, 2), (3, 1))),
    (16, ((4, 2), (3, 2), (3, 1))),
    (7, ((3, 1), (3, 1), (3, 1))),
)
"""Kernel and stride of each convolution, for images of at least so many pixels a side."""
MIN_IMAGE_SIDE = 7  # a smaller image leaves nothing for the third convolution
_MOST_FEATURES = 1 << 16  # of one image: with more, most parameters would be in one dense layer
SMALLER = "--wrapper zapex.envs.wrappers:Grey84"


class Layer(NamedTuple):
    """One layer's shape: `weight` is (out, in), or (out, in, k, k) of a convolution."""

    name: str
    weight: tuple[int, ...]
    stride: int = 0  # 0: dense


def sees_images(shape: Sequence[int], dtype: np.dtype[np.generic] | type[np.generic]) -> bool:
    """Whether observations are stacks of uint8 images; anything else is flattened."""
    return np.dtype(dtype) == np.uint8 and len(shape) == 3


def trunk_layers(
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic] | type[np.generic],
    hidden: int | None = None,
    channels: int = NATURE_CHANNELS,
    dueling: bool = True,
    max_pool: int = 0,
) -> list[Layer]:
    """The layers up to both streams. Raises ConfigError if no network fits the observations.

    dueling: else there is one stream. max_pool: the side of the image that the convolutions leave;
    0: as it comes.
    """
    streams = 2 if dueling else 1
    if sees_images(shape, dtype):
        return _convolutions(shape, streams * (hidden or 512), channels, max_pool)
    return _dense(shape, hidden or 128, streams)


def output_layers(trunk: list[Layer], num_actions: int, dueling: bool = True) -> list[Layer]:
    """The two heads: V(s), and A(s, a) for each action; without `dueling` the second is Q."""
    hidden = trunk[-1].weight[0] // (2 if dueling else 1)
    advantage = Layer("advantage", (num_actions, hidden))
    return [Layer("value", (1, hidden)), advantage] if dueling else [advantage]


def parameter_count(
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic] | type[np.generic],
    num_actions: int,
    hidden: int | None = None,
    channels: int = NATURE_CHANNELS,
    dueling: bool = True,
    max_pool: int = 0,
) -> int:
    """Parameters of the whole network: float32 numbers in one flat array."""
    trunk = trunk_layers(shape, dtype, hidden, channels, dueling, max_pool)
    layers = [*trunk, *output_layers(trunk, num_actions, dueling)]
    return sum(math.prod(layer.weight) + layer.weight[0] for layer in layers)


def state_shapes(
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic] | type[np.generic],
    num_actions: int,
    hidden: int | None = None,
    channels: int = NATURE_CHANNELS,
    dueling: bool = True,
    max_pool: int = 0,
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a learner's state, by the names of `DQN.state_dict_tensors`."""
    trunk = trunk_layers(shape, dtype, hidden, channels, dueling, max_pool)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in [*trunk, *output_layers(trunk, num_actions, dueling)]:
        for part in ("online", "target", "optimiser.mean", "optimiser.mean_square"):
            shapes[f"{part}.{layer.name}.weight"] = layer.weight
            shapes[f"{part}.{layer.name}.bias"] = layer.weight[:1]
    return shapes


def _convolutions(shape: tuple[int, ...], units: int, filters: int, max_pool: int) -> list[Layer]:
    stack, height, width = shape
    side = min(height, width)
    if side < MIN_IMAGE_SIDE:
        raise ConfigError(
            f"images must be at least {MIN_IMAGE_SIDE} pixels high and wide, got {shape}: give "
            "them as a vector, --wrapper gymnasium.wrappers:FlattenObservation"
        )
    convolutions = next(layers for least, layers in _CONVOLUTIONS if side >= least)
    layers = []
    channels = stack
    for n, (kernel, stride) in enumerate(convolutions):
        out = filters if n == 0 else 2 * filters
        layers.append(Layer(f"conv{n + 1}", (out, channels, kernel, kernel), stride))
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        channels = out
    if max_pool:
        height, width = min(height, max_pool), min(width, max_pool)
    features = channels * height * width
    if features > _MOST_FEATURES:
        raise ConfigError(
            f"images of shape {shape} leave {features:,} features, which is more than "
            f"{_MOST_FEATURES:,}: make them smaller with {SMALLER}, or give --max-pool 6"
        )
    return [*layers, Layer("streams", (units, features))]


def _dense(shape: tuple[int, ...], hidden: int, streams: int) -> list[Layer]:
    features = math.prod(shape)
    if features < 1:
        raise ConfigError(f"an observation must have at least one element, got shape {shape}")
    return [Layer("dense1", (hidden, features)), Layer("streams", (streams * hidden, hidden))]
