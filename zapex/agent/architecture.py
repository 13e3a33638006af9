"""The layers of a network as shapes, and the size of its parameters, without torch."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zapex.errors import ConfigError

NATURE_CHANNELS = 32  # of the first convolution (Mnih et al. 2015); the others have twice as many
MIN_IMAGE_SIDE = 36  # a smaller image leaves nothing for the third convolution


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
) -> list[Layer]:
    """The layers up to both streams. Raises ConfigError if no network fits the observations."""
    if sees_images(shape, dtype):
        return _convolutions(shape, hidden or 512, channels)
    return _dense(shape, hidden or 128)


def output_layers(trunk: list[Layer], num_actions: int) -> list[Layer]:
    """The two heads: V(s), and A(s, a) for each action."""
    hidden = trunk[-1].weight[0] // 2
    return [Layer("value", (1, hidden)), Layer("advantage", (num_actions, hidden))]


def parameter_count(
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic] | type[np.generic],
    num_actions: int,
    hidden: int | None = None,
    channels: int = NATURE_CHANNELS,
) -> int:
    """Parameters of the whole network: float32 numbers in one flat array."""
    trunk = trunk_layers(shape, dtype, hidden, channels)
    layers = [*trunk, *output_layers(trunk, num_actions)]
    return sum(math.prod(layer.weight) + layer.weight[0] for layer in layers)


def state_shapes(
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic] | type[np.generic],
    num_actions: int,
    hidden: int | None = None,
    channels: int = NATURE_CHANNELS,
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a learner's state, by the names of `DQN.state_dict_tensors`."""
    trunk = trunk_layers(shape, dtype, hidden, channels)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in [*trunk, *output_layers(trunk, num_actions)]:
        for part in ("online", "target", "optimiser.mean", "optimiser.mean_square"):
            shapes[f"{part}.{layer.name}.weight"] = layer.weight
            shapes[f"{part}.{layer.name}.bias"] = layer.weight[:1]
    return shapes


def _convolutions(shape: tuple[int, ...], hidden: int, filters: int) -> list[Layer]:
    stack, height, width = shape
    if min(height, width) < MIN_IMAGE_SIDE:
        raise ConfigError(
            "images have shape (stack, height, width) with height and width at least "
            f"{MIN_IMAGE_SIDE}, got {shape}; resize or transpose them, or give a flat vector"
        )
    layers = []
    channels = stack
    for name, out, kernel, stride in (
        ("conv1", filters, 8, 4),
        ("conv2", 2 * filters, 4, 2),
        ("conv3", 2 * filters, 3, 1),
    ):
        layers.append(Layer(name, (out, channels, kernel, kernel), stride))
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        channels = out
    return [*layers, Layer("streams", (2 * hidden, channels * height * width))]


def _dense(shape: tuple[int, ...], hidden: int) -> list[Layer]:
    features = math.prod(shape)
    if features < 1:
        raise ConfigError(f"an observation must have at least one element, got shape {shape}")
    return [Layer("dense1", (hidden, features)), Layer("streams", (2 * hidden, hidden))]
