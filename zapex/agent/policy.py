"""Acting: Q values of a few observations."""

from typing import Any, Protocol

import numpy as np
import torch

from zapex.agent.flat import Network


class Acting(Protocol):
    """What an actor computes with."""

    def load_flat(self, buffer: Any) -> None:
        """Take parameters from a buffer of float32 [n] or its bytes: `DQN.flat_parameters`."""

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Q values, float32 (S, num_actions), of observations (S, *obs_shape)."""


class Policy:
    """A network for the forward pass only; it does not change the caller's number of threads."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def load_flat(self, buffer: Any) -> None:
        """Take parameters from a buffer of float32 [n] or its bytes: `DQN.flat_parameters`."""
        self.network.load_flat(buffer)

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Q values, float32 (S, num_actions), of observations (S, *obs_shape)."""
        self.network.pack(len(obs))
        with torch.inference_mode():
            q: np.ndarray = self.network(self.network.to_input(obs)).cpu().numpy()
        return q
