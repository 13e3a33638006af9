"""Acting on a device: one forward pass there for all streams of an actor."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from zapex.agent.device import Device, Enter, Queues, Ticket
from zapex.agent.flat import Network


class DevicePolicy:
    """What `Policy` does, over the two queues of a device. Use it from one thread.

    network: on the queues' device. streams, dtype: how many observations come at a time at most,
    and as what numbers. The device computes as many at every time.
    """

    def __init__(
        self, network: Network, queues: Queues, streams: int, dtype: np.dtype[Any]
    ) -> None:
        self._network, self._shape = network, (streams, *network.obs_shape)
        self._dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        nbytes = math.prod(self._shape) * dtype.itemsize
        self._sent = queues.host_memory(nbytes)
        self._staged = self._sent.view(self._dtype).view(self._shape).numpy()
        self._device = Device(queues, nbytes, streams * network.num_actions)

    def load_flat(self, buffer: Any) -> None:
        """Take parameters from a buffer of float32 [n] or its bytes, in place."""
        self._network.load_flat(buffer)

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Q values, float32 (S, num_actions), of observations (S, *obs_shape)."""
        np.copyto(self._staged[: len(obs)], obs)
        ticket = self._device.upload(self._sent)
        self._device.wait(ticket)
        self._device.compute(ticket, self._forward)
        return self._device.download(ticket).reshape(self._shape[0], -1)[: len(obs)]

    def _forward(self, ticket: Ticket, enter: Enter) -> None:
        with torch.inference_mode():
            enter("forward")
            obs = ticket.memory.view(self._dtype).view(self._shape)
            q = self._network(self._network.to_input(obs))
            ticket.out.copy_(q.reshape(-1))


class Sizes:
    """What `DevicePolicy` does, where the number of observations changes from time to time.

    They come in groups of `group`. There is a policy for 1, 2, 4, ... groups, made when it is
    needed: a device repeats work of a fixed size best, and rows that nobody asked for cost little.
    make: makes the policy for so many observations. network: the one of all policies.
    """

    def __init__(self, make: Callable[[int], DevicePolicy], network: Network, group: int) -> None:
        self._make, self._network, self._group = make, network, group
        self._policies: dict[int, DevicePolicy] = {}

    def load_flat(self, buffer: Any) -> None:
        """Take parameters from a buffer of float32 [n] or its bytes, in place."""
        self._network.load_flat(buffer)

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Q values, float32 (S, num_actions), of observations (S, *obs_shape)."""
        groups = -(-len(obs) // self._group)
        size = self._group << (groups - 1).bit_length()
        if size not in self._policies:
            self._policies[size] = self._make(size)
        return self._policies[size].q_values(obs)
