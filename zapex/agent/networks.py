"""Networks: the built-in ones, nature and impala, and custom torch modules.

The parameters of a network are one flat float32 tensor, so that publishing, clipping and the
optimiser each pass over one array.
"""

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zapex.agent import NETWORKS, fused
from zapex.agent.architecture import Layer, layers, parameter_shapes, sees_images
from zapex.errors import ConfigError
from zapex.machine import named
from zapex.machine.resources import cpu_multiplies_bfloat16

Part = tuple[str, tuple[int, ...], str]
"""A key of a Dict observation, its shape and its dtype."""


def build(
    obs_shape: Sequence[int],
    obs_dtype: np.dtype[np.generic] | type[np.generic],
    num_actions: int,
    hidden: int | None = None,
    *,
    network: str = "nature",
    parts: Sequence[Part] = (),
    channels: int = 32,
    dueling: bool = True,
    layer_norm: bool = False,
    max_pool: int = 0,
    quantiles: int = 0,
    precision: str = "auto",
    device: str = "auto",
    seed: int = 0,
) -> "Network":
    """The network for one kind of observation.

    Args:
        obs_shape: of one observation.
        obs_dtype: of one observation.
        num_actions: Q values of an observation.
        hidden: units of each stream; None: 512 for images and 128 for vectors.
        network: one of NETWORKS, or module:Class of a torch module, which takes the spaces of
            observations and actions and none of the options below up to `quantiles`.
        parts: of a Dict observation, which is flattened; only custom networks take it apart.
        channels: filters of an image network's first convolution.
        dueling: two streams, V(s) and A(s, a); False: one.
        layer_norm: normalise the output of each dense layer before its ReLU.
        max_pool: pool the output of the convolutions to at most this side; 0: do not.
        quantiles: of the return's distribution, for each action (Dabney et al. 2018); only of
            nature. Q is their mean. 0: Q alone.
        precision: of the trunk of nature for images: float32, bfloat16, or auto: bfloat16 if the
            hardware multiplies it faster. Other networks compute in float32.
        device: cpu, cuda, or auto: cuda if there is one.
        seed: of the initial parameters.

    Raises:
        ConfigError: no network fits the observations, or a custom one cannot be imported or made,
            or does not return Q values.
    """
    shape, place = tuple(int(n) for n in obs_shape), _device(device)
    make = named.load(NETWORKS.get(network, network), "--network")
    if make is Nature:
        return Nature(
            shape,
            layers(shape, obs_dtype, num_actions, hidden, channels, dueling, max_pool, quantiles),
            dtype=_dtype(precision, place) if sees_images(shape, obs_dtype) else torch.float32,
            device=place,
            seed=seed,
            layer_norm=layer_norm,
            max_pool=max_pool,
            quantiles=quantiles,
        )
    if quantiles:
        raise ConfigError(f"--quantiles needs --network nature, and the network is {network}")
    options: dict[str, Any] = {}
    if network in NETWORKS:
        options = {
            "hidden": hidden or 512,
            "channels": channels,
            "dueling": dueling,
            "layer_norm": layer_norm,
            "max_pool": max_pool,
        }
    about = f"--network {network}"
    spaces = _spaces(shape, np.dtype(obs_dtype), num_actions, parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _module(about, lambda: make(*spaces, **options))
        _try(about, module, shape, num_actions, parts)
    return ModuleNetwork(module, shape, num_actions, place, parts)


def _device(name: str) -> torch.device:
    """The device for cpu, cuda or auto. Raises ConfigError if torch finds no GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch finds no GPU: use cpu or auto")
    return torch.device(name)


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of an image network's trunk."""
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


class Network(ABC):
    """Q values of a batch of observations.

    All parameters are one after another in `flat`: publishing, clipping and the optimiser each
    pass over one array. `views` are the named parameters, each a view of `flat`. `leaves` are the
    tensors of the forward pass, in the same order. Gradients are taken with respect to them;
    `gather_gradients` copies these into the gradient of `flat`.
    """

    flat: Tensor
    views: dict[str, Tensor]
    leaves: dict[str, Tensor]
    quantiles = 0

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        num_actions: int,
        device: torch.device,
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        self.obs_shape = obs_shape
        self.num_actions = num_actions
        self.device = device
        self.shapes = shapes
        self.num_parameters = sum(math.prod(shape) for shape in shapes.values())

    def _bind(self, flat: Tensor) -> None:
        """Make `flat` the parameters."""
        self.flat = flat
        self.views = self.split(flat)

    def copy(self) -> Self:
        """A copy of the network with separate memory."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._bind(self.flat.clone())
        return twin

    def detached(self) -> Self:
        """A copy of the network without gradients."""
        twin = self.copy()
        twin.leaves = {name: leaf.detach() for name, leaf in twin.leaves.items()}
        return twin

    def load_flat(self, parameters: Any) -> None:
        """Load all parameters: a tensor, or any buffer of float32 [n] or of its bytes."""
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

    def checked(self, obs: np.ndarray | Tensor) -> Tensor:
        """Observations (B, *obs_shape) as a tensor on the network's device."""
        tensor = obs if isinstance(obs, Tensor) else torch.from_numpy(obs)
        if tuple(tensor.shape[1:]) != self.obs_shape:
            raise ConfigError(
                f"observations must have shape (B, {', '.join(map(str, self.obs_shape))}), "
                f"got {tuple(tensor.shape)}"
            )
        return tensor.to(self.device, non_blocking=True)

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Q values, float32 (S, num_actions), of observations (S, *obs_shape); without gradient."""
        self.pack(len(obs))
        with torch.inference_mode():
            q: np.ndarray = self(self.to_input(obs)).cpu().numpy()
        return q

    def __call__(self, inputs: Any) -> Tensor:
        """Q values, float32 (B, num_actions), of the inputs that `to_input` made."""
        return self.q_of(self.head(self.features(inputs)))

    def q_of(self, values: Tensor) -> Tensor:
        """Q values of what `head` returned."""
        return values.mean(2) if self.quantiles else values

    def features(self, inputs: Any) -> Any:
        """What `head` makes values from: a trunk's output, or the inputs if there is no trunk."""
        return inputs

    @abstractmethod
    def head(self, features: Any) -> Tensor:
        """Q values (B, num_actions), or if it has `quantiles` N, these (B, num_actions, N)."""

    def learns(self) -> None:  # noqa: B027
        """Called once on the network that is trained."""

    def pack(self, rows: int) -> None:  # noqa: B027
        """Prepare for batches of `rows` without gradients, if the network is used often."""

    @abstractmethod
    def refresh(self) -> None:
        """Renew what the forward pass keeps of `flat`, after that was changed."""

    @abstractmethod
    def gather_gradients(self, gradients: Sequence[Tensor], out: dict[str, Tensor]) -> None:
        """Write the gradients of `leaves` into `out`, the views of a flat float32 tensor."""

    @abstractmethod
    def to_input(self, obs: np.ndarray | Tensor) -> Any:
        """Observations (B, *obs_shape) of any strides as what `features` takes."""

    @abstractmethod
    def to_plain_input(self, obs: Tensor) -> Any:
        """`to_input` by operators that ONNX has, too."""


class Nature(Network):
    """Convolutions or a dense layer, then the two streams of a dueling network.

        uint8 images   (stack, H, W) -> conv c 8x8/4 -> 2c 4x4/2 -> 2c 3x3/1 -> two streams
        anything else  flattened     -> dense -> two streams

    The value and the advantage stream see the same features, so they are one matrix product:
    Q(s, a) = V(s) + A(s, a) - mean over a' of A(s, a')  (Wang et al. 2016, eq. 9).

    The convolutions are smaller for images below 36 pixels. Without two streams, the output of the
    only one is Q. The forward pass uses a copy of the trunk in `dtype` (or the parameters
    themselves if that is float32); `refresh()` renews the copy. The output layers are always
    float32, because bfloat16 would quantise the TD errors.

    Args:
        obs_shape: of one observation.
        layers: from `architecture.layers`.
        dtype: of the trunk's forward pass.
        device: where it computes.
        seed: of the initial parameters.
        layer_norm: normalise the output of each dense layer of the trunk before its ReLU.
        max_pool: as for `architecture.layers`.
        quantiles: as for `architecture.layers`.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        layers: list[Layer],
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        layer_norm: bool = False,
        max_pool: int = 0,
        quantiles: int = 0,
    ) -> None:
        self.dtype, self.quantiles = dtype, quantiles
        self._trunk = layers[: [layer.name for layer in layers].index("streams") + 1]
        self._dueling = layers[-2].name == "value"
        self._layer_norm, self._max_pool = layer_norm, max_pool
        outputs, self._hidden = layers[-1].weight
        num_actions = outputs // (quantiles or 1)
        self._is_image = layers[0].stride > 0
        # Bytes go in as they are; 1/255 is folded into the first layer's copy.
        self._input_scale = 1.0 / 255.0 if self._is_image else 1.0
        self._in_blocks = device.type == "cuda" and fused.fits_blocks(layers[0], obs_shape)
        super().__init__(obs_shape, num_actions, device, parameter_shapes(layers))
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
            if name == "conv1.weight" and self._in_blocks:
                view = fused.in_blocks(view)
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
                    weight = view * self._input_scale
                    leaf.copy_(fused.in_blocks(weight) if self._in_blocks else weight)
                elif self._is_copied(name):
                    leaf.copy_(view)

    def pack(self, rows: int) -> None:
        if not self._packed_rows and not self._layer_norm:
            self._packed = fused.packed(self.leaves["streams.weight"], rows)
            self._packed_rows = rows

    def gather_gradients(self, gradients: Sequence[Tensor], out: dict[str, Tensor]) -> None:
        for (name, view), gradient in zip(out.items(), gradients, strict=True):
            if name != "conv1.weight":
                view.copy_(gradient)
                continue
            view.copy_(F.pixel_shuffle(gradient, 4) if self._in_blocks else gradient)
            view.mul_(self._input_scale)

    def to_input(self, obs: np.ndarray | Tensor) -> Tensor:
        tensor = self.checked(obs)
        if self._is_image:
            # Rearrange bytes before they become floats, which are four times as large.
            arranged = fused.in_blocks if self._in_blocks else fused.channels_last
            return arranged(tensor).to(self.dtype)
        return tensor.reshape(len(tensor), -1).to(self.dtype)

    def to_plain_input(self, obs: Tensor) -> Tensor:
        return (obs if self._is_image else obs.flatten(1)).to(self.dtype)

    def features(self, inputs: Tensor) -> Tensor:
        leaves = self.leaves
        use_packed = self._packed_rows > 0 and not torch.is_grad_enabled()
        x = inputs
        for layer in self._trunk:
            weight, bias = leaves[f"{layer.name}.weight"], leaves[f"{layer.name}.bias"]
            stride = 1 if self._in_blocks and layer.name == "conv1" else layer.stride
            if layer.name == "streams" and use_packed:
                weight = self._packed
            if x.ndim == 4 and not stride:
                if self._max_pool:
                    x = pooled(x, self._max_pool)
                # Features in (height, width, channel) order, which is their order in memory.
                x = x.permute(0, 2, 3, 1).flatten(1)
            if self._layer_norm and not stride:
                x = F.linear(x, weight, bias)
                x = F.relu(F.layer_norm(x, [int(x.shape[1])]))
            else:
                x = fused.layer(x, weight, bias, stride)
        return x.float()

    def head(self, features: Tensor) -> Tensor:
        leaves, x = self.leaves, features
        right = x[:, self._hidden :] if self._dueling else x
        advantage = F.linear(right, leaves["advantage.weight"], leaves["advantage.bias"])
        if self.quantiles:
            advantage = advantage.view(-1, self.num_actions, self.quantiles)
        if not self._dueling:
            return advantage
        value = F.linear(x[:, : self._hidden], leaves["value.weight"], leaves["value.bias"])
        if self.quantiles:
            value = value.unsqueeze(1)
        return value + advantage - advantage.mean(1, keepdim=True)


def pooled(x: Tensor, side: int) -> Tensor:
    """The maxima (B, C, h, w) of x (B, C, H, W), with h and w at most `side`."""
    full = int(x.shape[2]), int(x.shape[3])
    height, width = min(side, full[0]), min(side, full[1])
    if fused.use.allowed:
        return F.adaptive_max_pool2d(x, (height, width))
    # The same by operators that ONNX has, too.
    rows = [x[:, :, slice(*_window(i, full[0], height))].amax(2) for i in range(height)]
    whole = torch.stack(rows, 2)
    columns = [whole[..., slice(*_window(j, full[1], width))].amax(3) for j in range(width)]
    return torch.stack(columns, 3)


def _window(n: int, size: int, out: int) -> tuple[int, int]:
    return n * size // out, -(-(n + 1) * size // out)


class ModuleNetwork(Network):
    """A torch module as a network; its parameters become views of one flat tensor.

    The module takes observations as float32 (B, *shape), images from 0 to 255 and channels first;
    of a Dict, a dict of such tensors. It returns Q values (B, num_actions).
    """

    dtype = torch.float32

    def __init__(
        self,
        module: nn.Module,
        obs_shape: tuple[int, ...],
        num_actions: int,
        device: torch.device,
        parts: Sequence[Part] = (),
    ) -> None:
        self._module = module.to(device, torch.float32)
        self._parts = parts
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        super().__init__(obs_shape, num_actions, device, shapes)
        parameters = [p.detach().reshape(-1) for p in module.parameters()]
        self._bind(torch.cat([torch.empty(0, device=device), *parameters]))

    def _bind(self, flat: Tensor) -> None:
        self._module = copy.deepcopy(self._module)  # a copied network must not share it
        super()._bind(flat)
        self.leaves = dict(self._module.named_parameters())
        for name, parameter in self.leaves.items():
            parameter.data = self.views[name]

    def detached(self) -> "ModuleNetwork":
        twin = self.copy()
        twin._module.requires_grad_(False)
        return twin

    def learns(self) -> None:
        """Dropout and noise are active only in the network that learns."""
        self._module.train()

    def refresh(self) -> None:
        """Nothing: the module computes with `flat` itself."""

    def gather_gradients(self, gradients: Sequence[Tensor], out: dict[str, Tensor]) -> None:
        for view, gradient in zip(out.values(), gradients, strict=True):
            view.copy_(gradient)

    def to_input(self, obs: np.ndarray | Tensor) -> Any:
        # Contiguous: a batch may lie in memory channel by channel, and modules like to reshape.
        return self.to_plain_input(self.checked(obs).contiguous())

    def to_plain_input(self, obs: Tensor) -> Any:
        if not self._parts:
            return obs.float()
        sizes = [int(np.prod(shape)) for _, shape, _ in self._parts]
        columns = torch.split(obs.float(), sizes, 1)
        return {
            key: column.reshape(-1, *shape)
            for (key, shape, _), column in zip(self._parts, columns, strict=True)
        }

    def head(self, features: Any) -> Tensor:
        q: Tensor = self._module(features)
        return q.float()


class Impala(nn.Module):
    """The residual network of IMPALA (Espeholt et al. 2018, figure 3, right), with two streams.

    Three stages of a convolution, a max-pool and two residual blocks; then a dense layer.

    Args:
        observation_space: uint8 images, channels first.
        action_space: discrete.
        hidden: units of each stream.
        channels: of the second and third stage; the first has half as many.
        dueling: as for `build`.
        layer_norm: normalise the dense layers before their ReLU.
        max_pool: the side that the image is pooled to before the dense layer; 0: not at all.
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


def _spaces(
    obs_shape: tuple[int, ...],
    obs_dtype: np.dtype[Any],
    num_actions: int,
    parts: Sequence[Part],
) -> tuple[Any, Any]:
    """The spaces that a custom network is made from; float32 has no bounds here."""
    from gymnasium.spaces import Box, Dict, Discrete

    def box(shape: tuple[int, ...], dtype: str) -> Any:
        if dtype == "uint8":
            return Box(0, 255, shape, np.uint8)
        return Box(-np.inf, np.inf, shape, np.float32)

    if parts:
        return Dict({key: box(shape, dtype) for key, shape, dtype in parts}), Discrete(num_actions)
    return box(obs_shape, np.dtype(obs_dtype).name), Discrete(num_actions)


def _module(about: str, make: Callable[[], object]) -> nn.Module:
    """Make the module of a network. about: the setting, for messages."""
    try:
        module = make()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{about} cannot be made: {_one_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{about} must make a torch.nn.Module, got {type(module).__name__}")
    kept = [key for key, _ in module.named_buffers() if key in module.state_dict()]
    if kept:
        raise ConfigError(
            f"{about} has buffers that would not reach the actors ({', '.join(kept)}): use "
            "LayerNorm or GroupNorm in place of BatchNorm, and register constants with "
            "persistent=False"
        )
    return module.eval()


def _try(
    about: str, module: nn.Module, shape: tuple[int, ...], num_actions: int, parts: Sequence[Part]
) -> None:
    """Ask for the Q values of two observations of zeros, which also initialises lazy layers."""
    if parts:
        zeros: Any = {key: torch.zeros(2, *each) for key, each, _ in parts}
    else:
        zeros = torch.zeros(2, *shape)
    try:
        with torch.no_grad():
            q = module(zeros)
    except Exception as error:
        seen = {key: (2, *each) for key, each, _ in parts} or (2, *shape)
        raise ConfigError(
            f"{about} fails with observations of shape {seen}: {_one_line(error)}"
        ) from error
    if not isinstance(q, Tensor) or tuple(q.shape) != (2, num_actions):
        found = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ConfigError(
            f"{about} must return Q values of shape (B, {num_actions}), one for each action; for "
            f"two observations it returned {found}"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError(f"{about} has no parameters to learn")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
