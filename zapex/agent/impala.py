"""The residual network of IMPALA (Espeholt et al. 2018, figure 3, right) with dueling streams."""

from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zapex.agent.networks import pooled
from zapex.errors import ConfigError


class Impala(nn.Module):
    """Three stages of a convolution, a max-pool and two residual blocks; then a dense layer.

    observation_space: uint8 images, channels first. channels: of the second and third stage; the
    first has half as many. max_pool: the side that the image is pooled to; 0: as it comes.
    layer_norm: normalise the dense layers before their ReLU.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        *,
        hidden: int = 512,
        channels: int = 32,
        dueling: bool = True,
        layer_norm: bool = False,
        max_pool: int = 0,
    ) -> None:
        super().__init__()
        shape = observation_space.shape
        if shape is None or len(shape) != 3:
            raise ConfigError(f"--network impala needs images, and observations are {shape}")
        self._max_pool, self._layer_norm = max_pool, layer_norm
        widths = [shape[0], max(1, channels // 2), channels, channels]
        self.stages = nn.ModuleList(_Stage(a, b) for a, b in pairwise(widths))
        with torch.no_grad():
            features = self._seen(torch.zeros(1, *shape)).shape[1]
        self.hidden = nn.Linear(features, hidden * (2 if dueling else 1))
        self.value = nn.Linear(hidden, 1) if dueling else None
        self.advantage = nn.Linear(hidden, int(action_space.n))

    def _seen(self, obs: Tensor) -> Tensor:
        x = obs / 255.0
        for stage in self.stages:
            x = stage(x)
        if self._max_pool:
            x = pooled(x, self._max_pool)
        return F.relu(x).flatten(1)

    def forward(self, obs: Tensor) -> Tensor:
        """Q values (B, actions) of images (B, channels, height, width) from 0 to 255."""
        x = self.hidden(self._seen(obs))
        x = F.relu(F.layer_norm(x, [int(x.shape[1])]) if self._layer_norm else x)
        if self.value is None:
            return cast(Tensor, self.advantage(x))
        left, right = x.chunk(2, 1)
        advantage = self.advantage(right)
        return cast(Tensor, self.value(left) + advantage - advantage.mean(1, keepdim=True))


class _Stage(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, padding=1)
        self.blocks = nn.ModuleList(_block(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x), 3, stride=2, padding=1)
        for block in self.blocks:
            x = x + block(x)
        return x


def _block(width: int) -> nn.Module:
    first, second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
    return nn.Sequential(nn.ReLU(), first, nn.ReLU(), second)
