"""Losses of a user's own: a function of predictions and targets."""

from collections.abc import Callable

import torch
from torch import Tensor

from zapex.errors import ConfigError
from zapex.machine import named

Loss = Callable[[Tensor, Tensor], Tensor]
"""Predictions and targets, both float32 (B,) -> the loss of each row, (B,)."""
_ROWS = 3


def named_loss(text: str) -> Loss:
    """The loss `module:function`. Raises ConfigError if it is none; the message says the rule."""
    loss: Loss = named.load(text, "--loss")
    about = f"--loss {text}"
    try:
        rows, slopes = rows_and_slopes(loss, torch.zeros(_ROWS), torch.ones(_ROWS))
    except Exception as error:
        raise ConfigError(
            f"{about} must be a differentiable function (predictions, targets) of two tensors (B,) "
            f"that returns the loss of each row (B,): {type(error).__name__}: {error}"
        ) from error
    if not (torch.isfinite(rows).all() and torch.isfinite(slopes).all()):
        raise ConfigError(f"{about} or its slope is not finite at a prediction of 0 and target 1")
    return loss


def rows_and_slopes(loss: Loss, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row (B,), and its derivative by the prediction (B,)."""
    with torch.enable_grad():
        leaf = prediction.detach().requires_grad_()
        rows = loss(leaf, target)
        if tuple(rows.shape) != tuple(prediction.shape):
            shapes = tuple(rows.shape), tuple(prediction.shape)
            raise ValueError(f"it returned shape {shapes[0]} for {shapes[1]} (reduction='none'?)")
        (slopes,) = torch.autograd.grad(rows.sum(), leaf)
    return rows.detach(), slopes
