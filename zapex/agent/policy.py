"""Acting: Q values of a few observations at a time from parameters that were received."""

from typing import Any

import numpy as np
import torch

from zapex.agent.networks import DuelingNetwork


class Policy:
    """A network that only looks forward; the caller's thread count is its own."""

    def __init__(self, network: DuelingNetwork) -> None:
        self._network = network

    def load_flat(self, buffer: Any) -> None:
        """Take parameters from a buffer of float32 [n] or its bytes: `DQN.flat_parameters`."""
        self._network.load_flat(buffer)

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Q values, float32 (S, num_actions), of observations (S, *obs_shape)."""
        self._network.pack(len(obs))
        with torch.inference_mode():
            q: np.ndarray = self._network(self._network.to_input(obs)).cpu().numpy()
        return q
