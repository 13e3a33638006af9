"""Losses: functions of predictions and targets that return the loss of each row."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zapex.agent import LOSSES
from zapex.errors import ConfigError
from zapex.machine.named import load

Loss = Callable[[Tensor, Tensor], Tensor]
"""Predictions and targets, both float32 (B,) -> the loss of each row, (B,)."""
_ROWS = 3


def squared(prediction: Tensor, target: Tensor) -> Tensor:
    """Half the square of the error."""
    return 0.5 * F.mse_loss(prediction, target, reduction="none")


def huber(prediction: Tensor, target: Tensor) -> Tensor:
    """Half the square of the error up to an error of 1; beyond it the slope is 1."""
    return F.huber_loss(prediction, target, reduction="none")


def quantile_huber(prediction: Tensor, target: Tensor) -> Tensor:
    """Of quantiles, both (B, N): Dabney et al. 2018 (arXiv 1710.10044), equation 10, kappa 1.

    Theirs is a sum over the predicted quantiles, this a mean: so one optimiser's eps suits every
    N, and the loss of a mean return.
    """
    n = prediction.shape[1]
    middle = (torch.arange(n, device=prediction.device) + 0.5) / n
    mine, theirs = prediction.unsqueeze(2).expand(-1, -1, n), target.unsqueeze(1).expand(-1, n, -1)
    share = (middle.view(1, -1, 1) - (theirs < mine).float()).abs()
    rows: Tensor = (share * F.huber_loss(mine, theirs, reduction="none")).mean((1, 2))
    return rows


def named(name: str) -> Loss:
    """The loss `name`: one of LOSSES, or module:function.

    Raises:
        ConfigError: it is not a differentiable function that returns the loss of each row.
    """
    loss: Loss = load(LOSSES.get(name, name), "--loss")
    if name in LOSSES:
        return loss
    about = f"--loss {name}"
    prediction, target = torch.zeros(_ROWS, requires_grad=True), torch.ones(_ROWS)
    try:
        rows = loss(prediction, target)
        if tuple(rows.shape) != (_ROWS,):
            raise ValueError(
                f"it returned shape {tuple(rows.shape)} for ({_ROWS},) (reduction='none'?)"
            )
        (slopes,) = torch.autograd.grad(rows.sum(), prediction)
    except Exception as error:
        raise ConfigError(
            f"{about} must be a differentiable function (predictions, targets) of two tensors (B,) "
            f"that returns the loss of each row (B,): {type(error).__name__}: {error}"
        ) from error
    if not (torch.isfinite(rows).all() and torch.isfinite(slopes).all()):
        raise ConfigError(f"{about} or its slope is not finite at a prediction of 0 and target 1")
    return loss
