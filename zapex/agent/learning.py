"""A double DQN learner: one call turns a batch into a better network and new TD errors.

learner = DQN(networks.build((4, 84, 84), np.uint8, num_actions=4), lr=1e-4)
while True:
    batch = replay.sample(512, beta=0.4)
    td_errors, metrics = learner.learn(batch)
    replay.update_priorities(batch.keys, td_errors)
    publish(learner.flat_parameters())
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zapex.agent.networks import DuelingNetwork
from zapex.agent.optimisers import Adam, CentredRMSProp, Optimiser
from zapex.errors import CheckpointError, ConfigError, ZapexError

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_MMAPS = 1 << 16  # glibc's own default


class DQN:
    """Online and target network, loss and optimiser; Ape-X's values where none are given.

    `optimiser` is `rmsprop` (centred) or `adam`; `optimiser_eps` is added to its denominator.
    `loss` is `huber` (slope 1 beyond an error of 1) or `squared` (half the square), each times
    the importance weight, averaged over the batch. `max_grad_norm` 0 does not clip. The target
    becomes the online network after every `target_period` batches.

    Make it in the thread that will call `learn`. On a CPU, making one also tells the process to
    keep freed memory, and this thread to take numbers below 1e-38 for 0.
    """

    def __init__(
        self,
        network: DuelingNetwork,
        *,
        lr: float = 0.00025 / 4,
        optimiser: str = "rmsprop",
        rmsprop_decay: float = 0.95,
        optimiser_eps: float = 1.5e-7,
        loss: str = "huber",
        max_grad_norm: float = 40.0,
        target_period: int = 2500,
    ) -> None:
        if loss not in ("huber", "squared"):
            raise ConfigError(f"loss must be huber or squared, got {loss!r}")
        if target_period < 1:
            raise ConfigError(f"target_period must be at least 1 batch, got {target_period}")
        if not max_grad_norm >= 0.0:
            raise ConfigError(f"max_grad_norm must be 0 (off) or more, got {max_grad_norm}")
        if network.device.type == "cpu":
            _prepare_this_thread()
        self.online = network
        self.target = network.copy()
        self.batches = 0
        self._loss = loss
        self._max_grad_norm = max_grad_norm
        self._target_period = target_period
        self.gradient = torch.zeros_like(network.flat)
        self._gradient_views = network.split(self.gradient)
        self.optimiser = _optimiser(
            optimiser, network.flat, self.gradient, lr, rmsprop_decay, optimiser_eps
        )

    def learn(
        self, batch: Any, enter: Callable[[str], object] = lambda phase: None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """One step on a batch: (TD errors, float32 [B], target minus prediction; metrics).

        `enter` is told of the phases forward, backward and optimiser as they begin.

        `batch` has, as attributes or keys, numpy arrays or tensors: obs and next_obs
        [B, *obs_shape] (images are best in channels_last memory), action [B], and float32 reward,
        discount (0 where the episode ended) and weights [B]. The target is
        reward + discount * Q_target(next_obs, argmax_a Q_online(next_obs, a)).
        Raises ZapexError, with the parameters unchanged, when the loss or its gradient is not
        finite.
        """
        enter("forward")
        online, device = self.online, self.online.device
        obs = online.to_input(_column(batch, "obs"))
        next_obs = online.to_input(_column(batch, "next_obs"))
        action = _tensor(batch, "action", device, torch.int64)
        reward = _tensor(batch, "reward", device, torch.float32)
        discount = _tensor(batch, "discount", device, torch.float32)
        weights = _tensor(batch, "weights", device, torch.float32)

        self.target.pack(len(action))
        with torch.no_grad():
            greedy = online(next_obs).argmax(1, keepdim=True)
            bootstrap = self.target(next_obs).gather(1, greedy).squeeze(1)
            target = reward + discount * bootstrap
        q = online(obs).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            td = target - q
            slope = td.clamp(-1.0, 1.0) if self._loss == "huber" else td
            loss = (weights * slope * (td - 0.5 * slope)).mean()
        enter("backward")
        pull = weights * slope / -len(td)  # the loss's derivative by q
        gradients = torch.autograd.grad(q, list(online.leaves.values()), pull)
        online.gather_gradients(gradients, self._gradient_views)
        enter("optimiser")
        td_loss, norm = torch.stack((loss, torch.linalg.vector_norm(self.gradient))).tolist()
        if not math.isfinite(td_loss + norm):
            raise ZapexError(
                f"the loss or its gradient is not finite after {self.batches} batches: lower lr, "
                "or look for infinite rewards or observations"
            )
        clip = self._max_grad_norm
        self.optimiser.step(clip / norm if 0.0 < clip < norm else 1.0)
        online.refresh()
        self.batches += 1
        if self.batches % self._target_period == 0:
            self.target.load_flat(online.flat)
        td_errors = td.cpu().numpy()
        return td_errors, {
            "td_loss": td_loss,
            "q_values": float(q.detach().mean()),
            "td_error": float(np.abs(td_errors).mean()),
            "gradient_norm": norm,
        }

    def flat_parameters(self) -> np.ndarray:
        """The online parameters, float32 [n]: on a CPU the live memory itself, else a copy."""
        flat: np.ndarray = self.online.flat.cpu().numpy()
        return flat

    def state_dict_tensors(self) -> dict[str, Tensor]:
        """Everything that `load_state` wants, by name; with `counters` it resumes bit for bit."""
        tensors = {f"online.{name}": view for name, view in self.online.views.items()}
        tensors |= {f"target.{name}": view for name, view in self.target.views.items()}
        for key, flat in self.optimiser.state.items():
            views = self.online.split(flat)
            tensors |= {f"optimiser.{key}.{name}": view for name, view in views.items()}
        return tensors

    def counters(self) -> dict[str, int]:
        """The JSON part of the state."""
        return {"batches": self.batches, "optimiser_steps": self.optimiser.steps}

    def load_state(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        """Go on from a state; CheckpointError, and nothing changed, where it does not fit."""
        own = self.state_dict_tensors()
        missing, unknown = own.keys() - tensors.keys(), tensors.keys() - own.keys()
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint is of another agent: it lacks {sorted(missing)} "
                f"and has unknown {sorted(unknown)}"
            )
        wrong = [
            f"{name} is {tuple(tensors[name].shape)}, here {tuple(view.shape)}"
            for name, view in own.items()
            if tuple(tensors[name].shape) != tuple(view.shape)
        ]
        if wrong:
            raise CheckpointError(f"the checkpoint is of another network: {'; '.join(wrong)}")
        absent = self.counters().keys() - counters.keys()
        if absent:
            raise CheckpointError(f"the checkpoint lacks the counters {sorted(absent)}")
        with torch.no_grad():
            for name, view in own.items():
                view.copy_(torch.as_tensor(tensors[name]))
        self.online.refresh()
        self.target.refresh()
        self.batches = int(counters["batches"])
        self.optimiser.steps = int(counters["optimiser_steps"])


def _prepare_this_thread() -> None:
    """Spare each batch the page faults, and the slow arithmetic near 0 of units that died."""
    torch.set_flush_denormal(True)
    # Activations of tens of MB are made and freed in each batch; by default glibc gives them back
    # to the system every time, and a sixth of the time goes into getting them again.
    _mallopt(_M_MMAP_MAX, 0)
    _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _mallopt(parameter: int, value: int) -> None:
    """Where the C library is glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """Large blocks that are allocated in here come from the system, and go back to it whole.

    The heap keeps everything once a DQN is made on a CPU. A checkpoint's copies would now and then
    find no hole in it that is large enough, and a run of days would grow.
    """
    _mallopt(_M_MMAP_MAX, _MMAPS)
    try:
        yield
    finally:
        _mallopt(_M_MMAP_MAX, 0)


def _optimiser(
    name: str, parameters: Tensor, gradient: Tensor, lr: float, decay: float, eps: float
) -> Optimiser:
    for what, value in (("lr", lr), ("optimiser_eps", eps)):
        if not value > 0.0:
            raise ConfigError(f"{what} must be above 0, got {value}")
    if name == "rmsprop":
        return CentredRMSProp(parameters, gradient, lr, decay=decay, eps=eps)
    if name == "adam":
        return Adam(parameters, gradient, lr, eps=eps)
    raise ConfigError(f"optimiser must be rmsprop or adam, got {name!r}")


def _column(batch: Any, name: str) -> Any:
    return batch[name] if isinstance(batch, Mapping) else getattr(batch, name)


def _tensor(batch: Any, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(_column(batch, name))
    return tensor.to(device, dtype, non_blocking=True)
