"""The built-in network: convolutions or a dense layer, then the two streams of a dueling network.

    uint8 images   (stack, H, W) -> conv c 8x8/4 -> 2c 4x4/2 -> 2c 3x3/1 -> two streams of `hidden`
    anything else  flattened     -> dense `hidden` -> two streams of `hidden`

The value and the advantage stream see the same features, so they are one matrix product of
2 x `hidden` units: Q(s, a) = V(s) + A(s, a) - mean over a' of A(s, a')  (Wang et al. 2016, eq. 9).

The convolutions are smaller for images below 36 pixels. Without `dueling` there is one stream,
whose output is Q. The forward pass uses a copy of the trunk in `dtype` (or the parameters
themselves if that is float32); `refresh()` renews the copy. The output layers are always float32,
because bfloat16 would quantise the TD errors.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zapex.agent import fused, pixels
from zapex.agent.architecture import (
    NATURE_CHANNELS,
    Layer,
    output_layers,
    sees_images,
    trunk_layers,
)
from zapex.agent.flat import Network
from zapex.errors import ConfigError
from zapex.machine.resources import cpu_multiplies_bfloat16


def build(
    obs_shape: Sequence[int],
    obs_dtype: np.dtype[np.generic] | type[np.generic],
    num_actions: int,
    hidden: int | None = None,
    *,
    channels: int = NATURE_CHANNELS,
    dueling: bool = True,
    layer_norm: bool = False,
    max_pool: int = 0,
    precision: str = "auto",
    device: str = "auto",
    seed: int = 0,
) -> "DuelingNetwork":
    """The network for one observation (`obs_shape` without the batch axis) and `num_actions`.

    `hidden` is the units of each stream; the default is 512 for images and 128 for vectors.
    `channels` is the filters of the first convolution; the others have twice as many.
    `dueling` and `max_pool` are as in `architecture.trunk_layers`. `layer_norm` normalises what
    each layer of the trunk gives, before its ReLU.
    `precision` of an image network's trunk is `float32`, `bfloat16`, or `auto`: bfloat16 if the
    hardware multiplies it faster. `device` is `cpu`, `cuda`, or `auto`: cuda if there is one.
    Raises ConfigError if no network fits the observations.
    """
    shape = tuple(int(n) for n in obs_shape)
    is_image = sees_images(shape, obs_dtype)
    trunk = trunk_layers(shape, obs_dtype, hidden, channels, dueling, max_pool)
    place = device_of(device)
    dtype = _dtype(precision, place) if is_image else torch.float32
    return DuelingNetwork(
        shape, trunk, num_actions, dtype=dtype, device=place, seed=seed, dueling=dueling,
        layer_norm=layer_norm, max_pool=max_pool,
    )  # fmt: skip


def device_of(name: str) -> torch.device:
    """The device that `cpu`, `cuda` or `auto` means. Raises ConfigError if torch finds no GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch finds no GPU: use cpu or auto")
    return torch.device(name)


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if precision in dtypes:
        return dtypes[precision]
    if precision != "auto":
        raise ConfigError(f"precision must be auto, float32 or bfloat16, got {precision!r}")
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = cpu_multiplies_bfloat16()
    return torch.bfloat16 if fast else torch.float32


class DuelingNetwork(Network):
    """Q values of a batch of observations; see the module's docstring."""

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        trunk: list[Layer],
        num_actions: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        dueling: bool = True,
        layer_norm: bool = False,
        max_pool: int = 0,
    ) -> None:
        self.dtype = dtype
        self._trunk = trunk
        self._dueling, self._layer_norm, self._max_pool = dueling, layer_norm, max_pool
        self._hidden = trunk[-1].weight[0] // (2 if dueling else 1)
        self._is_image = trunk[0].stride > 0
        # Bytes go in as they are; 1/255 is folded into the first layer's copy.
        self._input_scale = 1.0 / 255.0 if self._is_image else 1.0
        layers = [*trunk, *output_layers(trunk, num_actions, dueling)]
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in layers:
            shapes[f"{layer.name}.weight"] = layer.weight
            shapes[f"{layer.name}.bias"] = layer.weight[:1]
        super().__init__(obs_shape, num_actions, device, shapes)
        self._bind(self._initial(layers, seed).to(device))

    def _bind(self, flat: Tensor) -> None:
        self._packed = flat  # unused while _packed_rows is 0
        self._packed_rows = 0
        super()._bind(flat)
        self.leaves = {name: self._leaf(name, view) for name, view in self.views.items()}
        self.refresh()

    def _initial(self, layers: list[Layer], seed: int) -> Tensor:
        """Uniform in +-1/sqrt(fan in), weights and biases alike."""
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for layer in layers:
            bound = 1.0 / math.sqrt(math.prod(layer.weight[1:]))
            size = math.prod(layer.weight) + layer.weight[0]
            parts.append(torch.empty(size).uniform_(-bound, bound, generator=generator))
        return torch.cat(parts)

    def _leaf(self, name: str, view: Tensor) -> Tensor:
        if self._is_copied(name):
            form = torch.channels_last if view.ndim == 4 else torch.contiguous_format
            leaf = torch.empty_like(view, dtype=self.dtype, memory_format=form)
        else:
            leaf = view
        return leaf.detach().requires_grad_()

    def _is_copied(self, name: str) -> bool:
        """Whether the forward pass uses a copy of a parameter."""
        if name.startswith(("value", "advantage")):
            return False
        return self.dtype != torch.float32 or (self._input_scale != 1.0 and name == "conv1.weight")

    def refresh(self) -> None:
        self._packed_rows = 0
        with torch.no_grad():
            for name, view in self.views.items():
                leaf = self.leaves[name]
                if name == "conv1.weight":
                    leaf.copy_(view * self._input_scale)
                elif self._is_copied(name):
                    leaf.copy_(view)

    def pack(self, rows: int) -> None:
        if not self._packed_rows and not self._layer_norm:
            self._packed = fused.packed(self.leaves["streams.weight"], rows)
            self._packed_rows = rows

    def gather_gradients(self, gradients: Sequence[Tensor], out: dict[str, Tensor]) -> None:
        for (name, view), gradient in zip(out.items(), gradients, strict=True):
            view.copy_(gradient)
            if name == "conv1.weight":
                view.mul_(self._input_scale)

    def to_input(self, obs: np.ndarray | Tensor) -> Tensor:
        tensor = self.checked(obs)
        if self._is_image:
            # Rearrange bytes before they become floats, which are four times as large.
            return pixels.channels_last(tensor).to(self.dtype)
        return tensor.reshape(len(tensor), -1).to(self.dtype)

    def to_plain_input(self, obs: Tensor) -> Tensor:
        return (obs if self._is_image else obs.flatten(1)).to(self.dtype)

    def __call__(self, inputs: Tensor) -> Tensor:
        leaves = self.leaves
        use_packed = self._packed_rows > 0 and not torch.is_grad_enabled()
        x = inputs
        for layer in self._trunk:
            weight, bias = leaves[f"{layer.name}.weight"], leaves[f"{layer.name}.bias"]
            if layer.name == "streams" and use_packed:
                weight = self._packed
            if x.ndim == 4 and not layer.stride:
                if self._max_pool:
                    x = pooled(x, self._max_pool)
                # Features in (height, width, channel) order, which is their order in memory.
                x = x.permute(0, 2, 3, 1).flatten(1)
            if self._layer_norm:
                stride = layer.stride
                x = F.conv2d(x, weight, bias, stride) if stride else F.linear(x, weight, bias)
                x = F.relu(F.layer_norm(x, [int(n) for n in x.shape[1:]]))
            else:
                x = fused.layer(x, weight, bias, layer.stride)
        x = x.float()
        if not self._dueling:
            return F.linear(x, leaves["advantage.weight"], leaves["advantage.bias"])
        value = F.linear(x[:, : self._hidden], leaves["value.weight"], leaves["value.bias"])
        advantage = F.linear(
            x[:, self._hidden :], leaves["advantage.weight"], leaves["advantage.bias"]
        )
        return value + advantage - advantage.mean(1, keepdim=True)


def pooled(x: Tensor, side: int) -> Tensor:
    """The maxima (B, C, h, w) of x (B, C, H, W), with h and w at most `side`."""
    full = int(x.shape[2]), int(x.shape[3])
    height, width = min(side, full[0]), min(side, full[1])
    if fused.use.allowed:
        return F.adaptive_max_pool2d(x, (height, width))
    # The same by operators that other programs know too.
    rows = [x[:, :, slice(*_window(i, full[0], height))].amax(2) for i in range(height)]
    whole = torch.stack(rows, 2)
    columns = [whole[..., slice(*_window(j, full[1], width))].amax(3) for j in range(width)]
    return torch.stack(columns, 3)


def _window(n: int, size: int, out: int) -> tuple[int, int]:
    return n * size // out, -(-(n + 1) * size // out)
