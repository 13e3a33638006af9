"""Optimisers that change one flat parameter tensor in one pass.

On a CPU a step is one loop over the parameters; as tensor operations it would be some eight, each
of them through memory. A GPU has the bandwidth, and there it is those eight.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zapex.jit import kernel

FloatArray = npt.NDArray[np.float32]

_ZERO = np.float32(0)


class Optimiser:
    """Running means of the gradient and of its square; `parameters` and `gradient` are flat."""

    def __init__(self, parameters: Tensor, gradient: Tensor, lr: float) -> None:
        self.lr = lr
        self.steps = 0
        self.parameters, self.gradient = parameters, gradient
        self.mean, self.mean_square = torch.zeros_like(gradient), torch.zeros_like(gradient)
        self._arrays: tuple[FloatArray, ...] = ()
        if parameters.device.type == "cpu":
            operands = (parameters, gradient, self.mean, self.mean_square)
            self._arrays = tuple(t.numpy() for t in operands)

    @property
    def state(self) -> dict[str, Tensor]:
        """What the next step depends on, apart from `steps`."""
        return {"mean": self.mean, "mean_square": self.mean_square}

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Change the parameters by one step for `scale` x the gradient."""
        self.steps += 1
        if self._arrays:
            self._step_arrays(np.float32(scale))
        else:
            self._step_tensors(self.gradient * scale)

    def _step_arrays(self, scale: np.float32) -> None:
        raise NotImplementedError

    def _step_tensors(self, gradient: Tensor) -> None:
        raise NotImplementedError


class CentredRMSProp(Optimiser):
    """lr g / sqrt(E[g^2] - E[g]^2 + eps): Mnih et al. 2015; Ape-X (Horgan et al. 2018), C."""

    def __init__(
        self,
        parameters: Tensor,
        gradient: Tensor,
        lr: float,
        *,
        decay: float = 0.95,
        eps: float = 1.5e-7,
    ) -> None:
        super().__init__(parameters, gradient, lr)
        self.decay, self.eps = decay, eps

    def _step_arrays(self, scale: np.float32) -> None:
        lr, new, eps = np.float32(self.lr), np.float32(1.0 - self.decay), np.float32(self.eps)
        _rmsprop_kernel(self._arrays, scale, lr, new, eps)

    def _step_tensors(self, gradient: Tensor) -> None:
        new = 1.0 - self.decay
        self.mean.lerp_(gradient, new)
        self.mean_square.lerp_(gradient * gradient, new)
        # Rounding can leave the variance a little below zero.
        variance = (self.mean_square - self.mean * self.mean).clamp_min_(0.0)
        self.parameters.addcdiv_(gradient, variance.add_(self.eps).sqrt_(), value=-self.lr)


class Adam(Optimiser):
    """Kingma and Ba 2015, algorithm 1 in the order of its section 2."""

    def __init__(
        self,
        parameters: Tensor,
        gradient: Tensor,
        lr: float,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, gradient, lr)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def _rate_and_eps(self) -> tuple[float, float]:
        """The step size and the eps that also undo the means' start at 0."""
        root = math.sqrt(1.0 - self.beta2**self.steps)
        return self.lr * root / (1.0 - self.beta1**self.steps), self.eps * root

    def _step_arrays(self, scale: np.float32) -> None:
        rate, eps = self._rate_and_eps()
        new1, new2 = np.float32(1.0 - self.beta1), np.float32(1.0 - self.beta2)
        _adam_kernel(self._arrays, scale, np.float32(rate), new1, new2, np.float32(eps))

    def _step_tensors(self, gradient: Tensor) -> None:
        rate, eps = self._rate_and_eps()
        self.mean.lerp_(gradient, 1.0 - self.beta1)
        self.mean_square.lerp_(gradient * gradient, 1.0 - self.beta2)
        self.parameters.addcdiv_(self.mean, self.mean_square.sqrt().add_(eps), value=-rate)


# np.divide, because Numba's / checks for zero, and a loop with checks does not become vector code.


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
