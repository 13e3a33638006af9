"""Optimisers over one flat parameter tensor, one cache-sized block at a time.

Each step is some ten elementwise operations. Over the whole tensor each of them would go to
memory and back; over a block of it they stay in the cache. On a GPU the whole tensor is one block.
"""

import math

import torch
from torch import Tensor

_BLOCK = 1 << 15  # 128 KiB an operand: the five operands fit in a core's L2 cache


class Optimiser:
    """Running means of the gradient and of its square; `parameters` and `gradient` are flat."""

    def __init__(self, parameters: Tensor, gradient: Tensor, lr: float) -> None:
        self.lr = lr
        self.steps = 0
        self.state = {
            "mean": torch.zeros_like(parameters),
            "mean_square": torch.zeros_like(parameters),
        }
        block = _BLOCK if parameters.device.type == "cpu" else parameters.numel()
        operands = [parameters, gradient, *self.state.values()]
        self._blocks = list(zip(*(torch.split(t, block) for t in operands), strict=True))
        self._scratch = torch.empty_like(parameters[:block])

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Change the parameters by one step for `scale` x the gradient, which is used up."""
        self.steps += 1
        for parameters, gradient, mean, square in self._blocks:
            if scale != 1.0:
                gradient.mul_(scale)
            self._step_block(parameters, gradient, mean, square, self._scratch[: len(parameters)])

    def _step_block(self, p: Tensor, g: Tensor, mean: Tensor, square: Tensor, x: Tensor) -> None:
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

    def _step_block(self, p: Tensor, g: Tensor, mean: Tensor, square: Tensor, x: Tensor) -> None:
        keep = 1.0 - self.decay
        mean.lerp_(g, keep)
        square.mul_(self.decay).addcmul_(g, g, value=keep)
        torch.addcmul(square, mean, mean, value=-1.0, out=x)
        # Rounding can leave the variance a little below zero.
        x.clamp_min_(0.0).add_(self.eps).sqrt_()
        p.addcdiv_(g, x, value=-self.lr)


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

    def _step_block(self, p: Tensor, g: Tensor, mean: Tensor, square: Tensor, x: Tensor) -> None:
        root = math.sqrt(1.0 - self.beta2**self.steps)
        rate = self.lr * root / (1.0 - self.beta1**self.steps)
        mean.lerp_(g, 1.0 - self.beta1)
        square.mul_(self.beta2).addcmul_(g, g, value=1.0 - self.beta2)
        torch.sqrt(square, out=x)
        p.addcdiv_(mean, x.add_(self.eps * root), value=-rate)
