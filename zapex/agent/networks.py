"""Dueling networks whose parameters are one flat float32 tensor.

    uint8 images   (stack, H, W) -> conv c 8x8/4 -> 2c 4x4/2 -> 2c 3x3/1 -> two streams of `hidden`
    anything else  flattened     -> dense `hidden` -> two streams of `hidden`

The value and the advantage stream see the same features, so they are one matrix product of
2 x `hidden` units: Q(s, a) = V(s) + A(s, a) - mean over a' of A(s, a')  (Wang et al. 2016, eq. 9).

All parameters are one after another in `flat`: publishing, clipping and the optimiser each pass
over one array. The forward pass uses a copy of the trunk in `dtype` (or the parameters themselves
if that is float32); `refresh()` renews the copy. The output layers are always float32, because
bfloat16 would quantise the TD errors.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

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
from zapex.errors import ConfigError
from zapex.machine.resources import cpu_multiplies_bfloat16


def build(
    obs_shape: Sequence[int],
    obs_dtype: np.dtype[np.generic] | type[np.generic],
    num_actions: int,
    hidden: int | None = None,
    *,
    channels: int = NATURE_CHANNELS,
    precision: str = "auto",
    device: str = "auto",
    seed: int = 0,
) -> "DuelingNetwork":
    """The network for one observation (`obs_shape` without the batch axis) and `num_actions`.

    `hidden` is the units of each stream; the default is 512 for images and 128 for vectors.
    `channels` is the filters of the first convolution; the others have twice as many.
    `precision` of an image network's trunk is `float32`, `bfloat16`, or `auto`: bfloat16 if the
    hardware multiplies it faster. `device` is `cpu`, `cuda`, or `auto`: cuda if there is one.
    Raises ConfigError if no network fits the observations.
    """
    shape = tuple(int(n) for n in obs_shape)
    is_image = sees_images(shape, obs_dtype)
    trunk = trunk_layers(shape, obs_dtype, hidden, channels)
    place = _device(device)
    dtype = _dtype(precision, place) if is_image else torch.float32
    return DuelingNetwork(shape, trunk, num_actions, dtype=dtype, device=place, seed=seed)


def _device(name: str) -> torch.device:
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


class DuelingNetwork:
    """Q values of a batch of observations; see the module's docstring.

    `views` are the named parameters, each a view of `flat`. `leaves` are the tensors of the forward
    pass, in the same order. Gradients are taken with respect to them; `gather_gradients` copies
    these into the gradient of `flat`.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        trunk: list[Layer],
        num_actions: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        self.obs_shape = obs_shape
        self.num_actions = num_actions
        self.dtype = dtype
        self.device = device
        self._trunk = trunk
        self._hidden = trunk[-1].weight[0] // 2
        self._is_image = trunk[0].stride > 0
        # Bytes go in as they are; 1/255 is folded into the first layer's copy.
        self._input_scale = 1.0 / 255.0 if self._is_image else 1.0
        layers = [*trunk, *output_layers(trunk, num_actions)]
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in layers:
            shapes[f"{layer.name}.weight"] = layer.weight
            shapes[f"{layer.name}.bias"] = layer.weight[:1]
        self.shapes = shapes
        self.num_parameters = sum(math.prod(shape) for shape in shapes.values())
        self._bind(self._initial(layers, seed).to(device))

    def _bind(self, flat: Tensor) -> None:
        self.flat = flat
        self._packed = flat  # unused while _packed_rows is 0
        self._packed_rows = 0
        self.views = self.split(self.flat)
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

    def copy(self) -> "DuelingNetwork":
        """A copy of the network with separate memory."""
        twin = object.__new__(DuelingNetwork)
        twin.__dict__.update(self.__dict__)
        twin._bind(self.flat.clone())
        return twin

    def load_flat(self, parameters: Any) -> None:
        """Take all parameters: a tensor, or any buffer of float32 [n] or of its bytes."""
        if not isinstance(parameters, Tensor):
            size = memoryview(parameters).nbytes
            if size != 4 * self.num_parameters:
                raise ConfigError(
                    f"the parameters must be {4 * self.num_parameters} bytes, got {size}"
                )
            with warnings.catch_warnings():
                # A read-only buffer is fine: it is only read.
                warnings.simplefilter("ignore", UserWarning)
                parameters = torch.frombuffer(parameters, dtype=torch.float32)
        self.flat.copy_(parameters)
        self.refresh()

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of `flat`, a tensor with one number for each parameter."""
        views = {}
        start = 0
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            views[name] = flat[start:end].view(shape)
            start = end
        return views

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
        """Renew the copies of the forward pass after `flat` was changed."""
        self._packed_rows = 0
        with torch.no_grad():
            for name, view in self.views.items():
                leaf = self.leaves[name]
                if name == "conv1.weight":
                    leaf.copy_(view * self._input_scale)
                elif self._is_copied(name):
                    leaf.copy_(view)

    def pack(self, rows: int) -> None:
        """Prepare for batches of about `rows` without gradients, if the network is used often.

        A batch of another size uses the same copy: it is as fast, and its values are the same bits.
        """
        if not self._packed_rows:
            self._packed = fused.packed(self.leaves["streams.weight"], rows)
            self._packed_rows = rows

    def gather_gradients(self, gradients: Sequence[Tensor], out: dict[str, Tensor]) -> None:
        """Write the gradients of `leaves` into `out`, the views of a flat float32 tensor."""
        for (name, view), gradient in zip(out.items(), gradients, strict=True):
            view.copy_(gradient)
            if name == "conv1.weight":
                view.mul_(self._input_scale)

    def to_input(self, obs: np.ndarray | Tensor) -> Tensor:
        """Observations (B, *obs_shape) of any strides as the tensor that `__call__` takes."""
        tensor = obs if isinstance(obs, Tensor) else torch.from_numpy(obs)
        if tuple(tensor.shape[1:]) != self.obs_shape:
            raise ConfigError(
                f"observations must have shape (B, {', '.join(map(str, self.obs_shape))}), "
                f"got {tuple(tensor.shape)}"
            )
        tensor = tensor.to(self.device, non_blocking=True)
        if self._is_image:
            # Rearrange bytes before they become floats, which are four times as large.
            return pixels.channels_last(tensor).to(self.dtype)
        return tensor.reshape(len(tensor), -1).to(self.dtype)

    def to_plain_input(self, obs: Tensor) -> Tensor:
        """`to_input` by operators that other programs know too."""
        return (obs if self._is_image else obs.flatten(1)).to(self.dtype)

    def detached(self) -> "DuelingNetwork":
        """A copy of the network without gradients."""
        twin = self.copy()
        twin.leaves = {name: leaf.detach() for name, leaf in twin.leaves.items()}
        return twin

    def __call__(self, inputs: Tensor) -> Tensor:
        """Q values, float32 (B, num_actions), of the inputs that `to_input` made."""
        leaves = self.leaves
        use_packed = self._packed_rows > 0 and not torch.is_grad_enabled()
        x = inputs
        for layer in self._trunk:
            weight, bias = leaves[f"{layer.name}.weight"], leaves[f"{layer.name}.bias"]
            if layer.name == "streams" and use_packed:
                weight = self._packed
            if x.ndim == 4 and not layer.stride:
                # Features in (height, width, channel) order, which is their order in memory.
                x = x.permute(0, 2, 3, 1).flatten(1)
            x = fused.layer(x, weight, bias, layer.stride)
        x = x.float()
        value = F.linear(x[:, : self._hidden], leaves["value.weight"], leaves["value.bias"])
        advantage = F.linear(
            x[:, self._hidden :], leaves["advantage.weight"], leaves["advantage.bias"]
        )
        return value + advantage - advantage.mean(1, keepdim=True)
