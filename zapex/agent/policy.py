"""Acting: Q values of a few observations, and epsilon-greedy actions; without torch."""

from typing import Any, Protocol

import numpy as np


class Acting(Protocol):
    """What an actor computes with: a `Network`, or a policy on a device."""

    def load_flat(self, buffer: Any) -> None:
        """Load parameters from a buffer of float32 [n] or its bytes: `DQN.flat_parameters`."""

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Q values, float32 (S, num_actions), of observations (S, *obs_shape)."""


def epsilon_ladder(num_streams: int, base: float = 0.4, alpha: float = 7.0) -> np.ndarray:
    """eps_i = base^(1 + alpha i / (N - 1)), float64 [N]; one stream: base (Horgan et al. 2018)."""
    rank = np.arange(num_streams) / max(num_streams - 1, 1)
    return np.asarray(base ** (1.0 + alpha * rank))


def linear_epsilon(frames: float, over: int, end: float) -> float:
    """Epsilon after `frames` of a run: a line from 1 to `end` over `over` frames (DQN's)."""
    return max(end, 1.0 - (1.0 - end) * frames / over)


def epsilon_greedy(
    q: np.ndarray, epsilons: np.ndarray | float, rng: np.random.Generator
) -> np.ndarray:
    """Actions, int64 [S], of Q values (S, num_actions): random with probability epsilons [S].

    Draws the same amount of randomness whatever the Q values are, so that runs repeat.
    """
    num_streams, num_actions = q.shape
    explores = rng.random(num_streams) < epsilons
    random = rng.integers(num_actions, size=num_streams)
    return np.where(explores, random, q.argmax(1))
