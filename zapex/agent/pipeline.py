"""A DQN whose steps wait for nothing: the results of a batch come while it learns from the next.

trainer = Pipeline(dqn, Device(...), batch.layout.tensors)
trainer.begin(first)
while True:
    trainer.begin(following)
    td_errors, facts, times = trainer.finish()      # of the batch before
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from zapex.agent.device import Device, Enter, Ticket
from zapex.agent.learning import DQN


class Pipeline:
    """The steps of `dqn` on a device, in order. A batch's memory is free after its `finish`.

    Args:
        dqn: its network is on the queues' device.
        device: with `dqn.results(batch size)` results.
        split: the columns by name of a batch's memory.
        prepare: what the device does with a batch before its step, besides the copy of its memory.
    """

    late = 1
    """How many batches may be under way when the next one begins."""

    def __init__(
        self,
        dqn: DQN,
        device: Device,
        split: Callable[[Tensor], dict[str, Any]],
        prepare: Callable[[Any], object] | None = None,
    ) -> None:
        self._dqn, self._device, self._split = dqn, device, split
        self._prepare = prepare
        self._under_way: deque[Ticket] = deque()

    def begin(self, batch: Any, enter: Enter = lambda phase: None) -> None:
        """Begin a step on a batch (its memory as `batch.block`, a uint8 tensor)."""
        enter("forward")
        ticket = self._device.upload(batch.block)
        self._device.wait(ticket)
        if (prepare := self._prepare) is not None:
            self._device.queues.compute(lambda enter: prepare(batch))
        self._device.compute(ticket, self._learn)
        # After the step, in the order of the computer's queue.
        if self._dqn.count():
            self._device.queues.compute(lambda enter: self._dqn.renew_target())
        self._under_way.append(ticket)

    def _learn(self, ticket: Ticket, enter: Enter) -> None:
        batch = self._dqn.without_unusable_rows(self._split(ticket.memory))
        self._dqn.step(batch, ticket.out, enter)

    def finish(self) -> tuple[np.ndarray, dict[str, float], dict[str, float]]:
        """Wait for the oldest step: (TD errors, metrics) as of `learn`, and the time of each phase.

        Raises Diverged; later steps have changed nothing either if their loss was not finite.
        """
        ticket = self._under_way.popleft()
        td_errors, facts = self._dqn.read(self._device.download(ticket))
        return td_errors, facts, self._device.times(ticket)
