"""Optimisers that change one flat parameter tensor in one pass.

On a CPU a step is one loop over the parameters. Tensor operations would need about eight passes
through memory. A GPU has the bandwidth for these eight, so they are used there.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zapex.machine.jit import kernel

FloatArray = npt.NDArray[np.float32]

_ZERO = np.float32(0)
_BETA1, _BETA2 = 0.9, 0.999


class Optimiser:
    """Running means of the gradient and of its square; `parameters` and `gradient` are flat."""

    def __init__(self, parameters: Tensor, gradient: Tensor, lr: float, eps: float) -> None:
        self.lr, self.eps = lr, eps
        self.parameters, self.gradient = parameters, gradient
        self.mean, self.mean_square = torch.zeros_like(gradient), torch.zeros_like(gradient)
        # On the device, because a step that changes nothing is not counted.
        self._steps = torch.zeros((), dtype=torch.float64, device=parameters.device)
        self._arrays: tuple[FloatArray, ...] = ()
        if parameters.device.type == "cpu":
            operands = (parameters, gradient, self.mean, self.mean_square)
            self._arrays = tuple(t.numpy() for t in operands)

    @property
    def steps(self) -> int:
        """Steps so far. This waits for the device."""
        return int(self._steps)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps.fill_(steps)

    @property
    def state(self) -> dict[str, Tensor]:
        """The state of the next step, apart from `steps`."""
        return {"mean": self.mean, "mean_square": self.mean_square}

    @torch.no_grad()
    def step(self, scale: Tensor, wanted: Tensor) -> None:
        """Change the parameters by one step for `scale` x the gradient.

        Args:
            scale: float32 [], on the parameters' device. A GPU is not waited for.
            wanted: bool []; if it is false, nothing changes, whatever the gradient.
        """
        self._steps += wanted
        if not self._arrays:
            # Not `where`: it would copy its number from the host, and wait for that.
            gradient = (self.gradient * scale).masked_fill_(~wanted, 0.0)
            self._step_tensors(gradient, wanted.to(gradient.dtype))
        elif wanted:
            self._step_arrays(np.float32(scale.item()))

    def _step_arrays(self, scale: np.float32) -> None:
        raise NotImplementedError

    def _step_tensors(self, gradient: Tensor, wanted: Tensor) -> None:
        raise NotImplementedError


class CentredRMSProp(Optimiser):
    """lr g / sqrt(E[g^2] - E[g]^2 + eps): Mnih et al. 2015; Ape-X (Horgan et al. 2018), C."""

    def __init__(
        self, parameters: Tensor, gradient: Tensor, lr: float, eps: float, decay: float
    ) -> None:
        super().__init__(parameters, gradient, lr, eps)
        self.decay = decay

    def _step_arrays(self, scale: np.float32) -> None:
        lr, new, eps = np.float32(self.lr), np.float32(1.0 - self.decay), np.float32(self.eps)
        _rmsprop_kernel(self._arrays, scale, lr, new, eps)

    def _step_tensors(self, gradient: Tensor, wanted: Tensor) -> None:
        new = (1.0 - self.decay) * wanted
        self.mean.lerp_(gradient, new)
        self.mean_square.lerp_(gradient * gradient, new)
        # Rounding can leave the variance a little below zero.
        variance = (self.mean_square - self.mean * self.mean).clamp_min_(0.0)
        self.parameters.addcdiv_(gradient, variance.add_(self.eps).sqrt_(), value=-self.lr)


class Adam(Optimiser):
    """Kingma and Ba 2015, algorithm 1 in the order of its section 2, with its betas."""

    def _step_arrays(self, scale: np.float32) -> None:
        steps = self.steps
        # The correction for means that start at 0.
        root = math.sqrt(1.0 - _BETA2**steps)
        rate, eps = self.lr * root / (1.0 - _BETA1**steps), self.eps * root
        new1, new2 = np.float32(1.0 - _BETA1), np.float32(1.0 - _BETA2)
        _adam_kernel(self._arrays, scale, np.float32(rate), new1, new2, np.float32(eps))

    def _step_tensors(self, gradient: Tensor, wanted: Tensor) -> None:
        steps = self._steps.clamp_min(1.0)  # 0 if the first step is not wanted
        root = (1.0 - _BETA2**steps).sqrt()
        rate = (self.lr * root / (1.0 - _BETA1**steps)).float() * wanted
        self.mean.lerp_(gradient, (1.0 - _BETA1) * wanted)
        self.mean_square.lerp_(gradient * gradient, (1.0 - _BETA2) * wanted)
        divisor = self.mean_square.sqrt().add_((self.eps * root).float())
        self.parameters.sub_(self.mean * rate / divisor)


# np.divide: Numba's / checks for zero, and LLVM does not vectorise a loop with checks.


@kernel
def _rmsprop_kernel(
    arrays: tuple[FloatArray, ...],
    scale: np.float32,
    lr: np.float32,
    new: np.float32,
    eps: np.float32,
) -> None:
    parameters, gradient, mean, square = arrays
    for i in range(parameters.size):
        g = gradient[i] * scale
        m = mean[i] + new * (g - mean[i])
        s = square[i] + new * (g * g - square[i])
        mean[i] = m
        square[i] = s
        variance = s - m * m
        variance = variance if variance > _ZERO else _ZERO  # rounding can leave it below
        parameters[i] -= np.divide(lr * g, np.sqrt(variance + eps))


@kernel
def _adam_kernel(
    arrays: tuple[FloatArray, ...],
    scale: np.float32,
    rate: np.float32,
    new1: np.float32,
    new2: np.float32,
    eps: np.float32,
) -> None:
    parameters, gradient, mean, square = arrays
    for i in range(parameters.size):
        g = gradient[i] * scale
        m = mean[i] + new1 * (g - mean[i])
        s = square[i] + new2 * (g * g - square[i])
        mean[i] = m
        square[i] = s
        parameters[i] -= np.divide(rate * m, np.sqrt(s) + eps)
