"""A network whose parameters are one flat float32 tensor."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from zapex.errors import ConfigError


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

    def checked(self, obs: np.ndarray | Tensor) -> Tensor:
        """Observations (B, *obs_shape) as a tensor on the network's device."""
        tensor = obs if isinstance(obs, Tensor) else torch.from_numpy(obs)
        if tuple(tensor.shape[1:]) != self.obs_shape:
            raise ConfigError(
                f"observations must have shape (B, {', '.join(map(str, self.obs_shape))}), "
                f"got {tuple(tensor.shape)}"
            )
        return tensor.to(self.device, non_blocking=True)

    def learns(self) -> None:  # noqa: B027
        """Told once to the network that is trained."""

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
        """Observations (B, *obs_shape) of any strides as what `__call__` takes."""

    @abstractmethod
    def to_plain_input(self, obs: Tensor) -> Any:
        """`to_input` by operators that other programs know too."""

    @abstractmethod
    def __call__(self, inputs: Any) -> Tensor:
        """Q values, float32 (B, num_actions), of the inputs that `to_input` made."""
