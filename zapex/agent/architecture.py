"""The layers of the built-in network as shapes, without torch: most processes need only these."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from zapex.errors import ConfigError

_CONVOLUTIONS = (
    (36, ((8, 4), (4, 2), (3, 1))),
    (16, ((4, 2), (3, 2), (3, 1))),
    (7, ((3, 1), (3, 1), (3, 1))),
)
"""Kernel and stride of each convolution, for images of at least so many pixels a side."""
MIN_IMAGE_SIDE = 7  # a smaller image leaves nothing for the third convolution
_MOST_FEATURES = 1 << 16  # of one image: with more, most parameters would be in one dense layer
_SMALLER = "--wrapper zapex.envs.wrappers:Grey84"


class Layer(NamedTuple):
    """One layer's shape: `weight` is (out, in), or (out, in, k, k) of a convolution."""

    name: str
    weight: tuple[int, ...]
    stride: int = 0  # 0: dense


def sees_images(shape: Sequence[int], dtype: np.dtype[np.generic] | type[np.generic]) -> bool:
    """Whether observations are stacks of uint8 images; anything else is flattened."""
    return np.dtype(dtype) == np.uint8 and len(shape) == 3


def layers(
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic] | type[np.generic],
    num_actions: int,
    hidden: int | None = None,
    channels: int = 32,
    dueling: bool = True,
    max_pool: int = 0,
    quantiles: int = 0,
) -> list[Layer]:
    """The layers of a network; "streams" is the last one before the heads.

    Args:
        shape: of one observation.
        dtype: of one observation.
        num_actions: outputs of the head "advantage".
        hidden: units of each stream; None: 512 for images and 128 for vectors.
        channels: filters of the first convolution (Mnih et al. 2015: 32); the others have twice as
            many.
        dueling: two streams with a head each, V(s) and A(s, a); False: one, Q(s, a).
        max_pool: largest side of the image that the convolutions leave; 0: any.
        quantiles: outputs of a head for each action (and of V); 0: one, without a distribution.

    Raises:
        ConfigError: no network fits the observations.
    """
    streams = 2 if dueling else 1
    if sees_images(shape, dtype):
        hidden = hidden or 512
        trunk = _convolutions(shape, streams * hidden, channels, max_pool)
    else:
        hidden = hidden or 128
        trunk = _dense(shape, hidden, streams)
    each = quantiles or 1
    value = [Layer("value", (each, hidden))] if dueling else []
    return [*trunk, *value, Layer("advantage", (num_actions * each, hidden))]


def parameter_shapes(layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by its name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        shapes[f"{layer.name}.weight"] = layer.weight
        shapes[f"{layer.name}.bias"] = layer.weight[:1]
    return shapes


def state_shapes(parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a learner's state, by the names of `DQN.state_dict_tensors`."""
    parts = ("online", "target", "optimiser.mean", "optimiser.mean_square")
    return {f"{part}.{name}": shape for part in parts for name, shape in parameters.items()}


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
            f"{_MOST_FEATURES:,}: make them smaller with {_SMALLER}, or give --max-pool 6"
        )
    return [*layers, Layer("streams", (units, features))]


def _dense(shape: tuple[int, ...], hidden: int, streams: int) -> list[Layer]:
    features = math.prod(shape)
    if features < 1:
        raise ConfigError(f"an observation must have at least one element, got shape {shape}")
    return [Layer("dense1", (hidden, features)), Layer("streams", (streams * hidden, hidden))]
