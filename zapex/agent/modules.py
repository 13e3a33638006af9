"""Networks that are a torch module: the user's own, and IMPALA's."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zapex.agent.flat import Network
from zapex.errors import ConfigError
from zapex.machine import named

BUILT_IN = {"impala": "zapex.agent.impala:Impala"}
Part = tuple[str, tuple[int, ...], str]
"""A key of a Dict observation, its shape and its dtype."""


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
        self._module = copy.deepcopy(self._module)  # of a copy of this network: one of its own
        super()._bind(flat)
        self.leaves = dict(self._module.named_parameters())
        for name, parameter in self.leaves.items():
            parameter.data = self.views[name]

    def detached(self) -> "ModuleNetwork":
        twin = self.copy()
        twin._module.requires_grad_(False)
        return twin

    def learns(self) -> None:
        """Dropout and noise work in a network that learns, and in no other."""
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

    def __call__(self, inputs: Any) -> Tensor:
        q: Tensor = self._module(inputs)
        return q.float()


def spaces(
    obs_shape: tuple[int, ...],
    obs_dtype: np.dtype[Any],
    num_actions: int,
    parts: Sequence[Part],
) -> tuple[Any, Any]:
    """The spaces that a network of one's own is made from; float32 has no bounds here."""
    from gymnasium.spaces import Box, Dict, Discrete

    def box(shape: tuple[int, ...], dtype: str) -> Any:
        if dtype == "uint8":
            return Box(0, 255, shape, np.uint8)
        return Box(-np.inf, np.inf, shape, np.float32)

    if parts:
        return Dict({key: box(shape, dtype) for key, shape, dtype in parts}), Discrete(num_actions)
    return box(obs_shape, np.dtype(obs_dtype).name), Discrete(num_actions)


def build(
    name: str,
    obs_shape: tuple[int, ...],
    obs_dtype: np.dtype[Any],
    num_actions: int,
    device: torch.device,
    *,
    parts: Sequence[Part] = (),
    seed: int = 0,
    options: dict[str, Any] | None = None,
) -> ModuleNetwork:
    """The network `name`: one of BUILT_IN, which takes `options` too, or module:Class.

    Raises ConfigError: it cannot be imported or made, or does not return Q values.
    """
    about = f"--network {name}"
    make: Callable[..., Any] = named.load(BUILT_IN.get(name, name), "--network")
    more = (options or {}) if name in BUILT_IN else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = make(*spaces(obs_shape, obs_dtype, num_actions, parts), **more)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{about} cannot be made: {_said(error)}") from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"{about} must make a torch.nn.Module, got {type(module).__name__}")
        module.eval()
        _try(about, module, obs_shape, num_actions, parts)
    kept = [key for key, _ in module.named_buffers() if key in module.state_dict()]
    if kept:
        raise ConfigError(
            f"{about} has buffers that would not reach the actors ({', '.join(kept)}): use "
            "LayerNorm or GroupNorm in place of BatchNorm, and register constants with "
            "persistent=False"
        )
    return ModuleNetwork(module, obs_shape, num_actions, device, parts)


def _try(
    about: str, module: nn.Module, shape: tuple[int, ...], num_actions: int, parts: Sequence[Part]
) -> None:
    """Ask for the Q values of two observations of zeros; lazy layers learn their sizes here."""
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
            f"{about} fails with observations of shape {seen}: {_said(error)}"
        ) from error
    if not isinstance(q, Tensor) or tuple(q.shape) != (2, num_actions):
        found = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ConfigError(
            f"{about} must return Q values of shape (B, {num_actions}), one for each action; for "
            f"two observations it returned {found}"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError(f"{about} has no parameters to learn")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
