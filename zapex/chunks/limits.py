"""What the values of a chunk can be: bounds that follow from the settings of a run."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.machine.jit import kernel

LARGEST = 2.0**32
"""Its fourth power is the largest float32: the loss squares a TD error, and the norm of the
gradient squares that again."""
_FINITE = float(np.finfo(np.float32).max)
_ROUNDING = 1 + 1e-5  # of float32 sums


@dataclass(frozen=True)
class Limits:
    """The largest values of a chunk's transitions. The defaults only ask for finite numbers.

    reward: of an n-step return, without its sign. discount: of the factor of the bootstrap.
    priority: a larger |priority| counts as this. actions: how many there are; 0: an action may be
    any value. frame: of a number in an observation, without its sign; 0: it may be any value.
    """

    reward: float = _FINITE
    discount: float = _FINITE
    priority: float = _FINITE
    actions: int = 0
    frame: float = 0.0

    @classmethod
    def of_run(cls, schema: Schema, *, actions: int, clipped: bool) -> "Limits":
        """The bounds of a run. clipped: its rewards are clipped to [-1, 1].

        Then an n-step return is at most the sum of gamma^k for k < n, a value is at most
        1 / (1 - gamma) (Sutton & Barto, eq. 3.10), and a TD error at most a return and two values.
        """
        gamma, reward, priority = schema.gamma, LARGEST, LARGEST
        if clipped:
            reward = _ROUNDING * sum(gamma**k for k in range(schema.n_step))
            if gamma < 1.0:
                priority = min(LARGEST, reward + 2 / (1 - gamma))
        discount = _ROUNDING * gamma
        return cls(reward, discount, priority, actions, LARGEST)

    def breach(self, store: ChunkStore, slot: int, rows: int, frames: int) -> str:
        """What no run can produce in the chunk of a slot; "" if nothing. Limits its priorities."""
        reward, discount, priority, action = (
            store.column(slot, name)[:rows] for name in ("reward", "discount", "priority", "action")
        )
        return_, least, largest, magnitude = _extremes_kernel(reward, discount, priority)
        if not return_ <= self.reward:
            return f"a return that is not within {self.reward:.6g}"
        if not (least >= 0.0 and largest <= self.discount):
            return f"a discount that is not within 0 to {self.discount:.6g}"
        if not magnitude <= _FINITE:
            return "a priority that is not finite"
        if self.actions and not 0 <= action.min() <= action.max() < self.actions:
            return f"an action that is not within 0 to {self.actions - 1}"
        for name, c in store.layout.schema.obs_columns.items() if self.frame else ():
            column = store.column(slot, name)[:frames]
            # NaN is not below any number.
            if np.dtype(c.dtype).kind == "f" and not np.abs(column).max() <= self.frame:
                return f"an observation that is not within {self.frame:.6g}"
        if self.priority < _FINITE:
            np.minimum(priority, self.priority, out=priority)
        return ""


@kernel
def _extremes_kernel(
    reward: NDArray[np.float32], discount: NDArray[np.float32], priority: NDArray[np.float32]
) -> tuple[float, float, float, float]:
    """Largest |reward|, least and largest discount, largest |priority|; inf or -inf for NaN.

    One pass: four calls of NumPy take longer than the rest of a small chunk.
    """
    rewards, least, largest, priorities = 0.0, np.inf, -np.inf, 0.0
    for i in range(len(reward)):
        r, d, p = abs(reward[i]), discount[i], abs(priority[i])
        rewards = max(rewards, r) if not np.isnan(r) else np.inf
        least = min(least, d) if not np.isnan(d) else -np.inf
        largest = max(largest, d)
        priorities = max(priorities, p) if not np.isnan(p) else np.inf
    return rewards, least, largest, priorities
