"""Batches go to a device, and results come back, while it computes: two buffers and two waits.

A device has two queues of work. The copier moves batches to it; the computer computes, and moves
results back. The host puts work into both and does not wait for it, except for a result:

    WAIT copied   the computer waits for the copy of a batch before it computes with it
    WAIT landed   the host waits for a result before it reads it

There are two seats, each with a buffer for a batch, and one for its result. The first wait orders
the copy before the computation, the second orders both before the host. So after `download`
returned a seat's result, nothing uses the seat, nor the host's memory that the batch came from.

    ticket = device.upload(memory)           # memory: do not write to it before `download`
    device.wait(ticket)
    device.compute(ticket, work)             # work(ticket, enter) -> ticket.out
    ...                                      # upload the next batch, compute with it
    numbers = device.download(ticket)

`Pipeline` learns this way: the results of a batch come while it learns from the next.
`DevicePolicy` and `Sizes` act this way.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zapex.agent.learning import DQN, Enter
from zapex.agent.networks import Network

_SEATS = 2
_EAGER = 3  # steps of a seat before it is recorded: libraries choose their methods in them


class Queues(Protocol):
    """The two queues of a device. Events are this object's own."""

    device: torch.device

    def host_memory(self, nbytes: int) -> Tensor:
        """Memory of the host, uint8 [nbytes], that the device can copy from and to."""

    def copy_in(self, to: Tensor, source: Tensor) -> Any:
        """Queue a copy from host memory for the copier. Returns the event of its end."""

    def copy_out(self, to: Tensor, source: Tensor) -> Any:
        """Queue a copy to host memory for the computer. Returns the event of its end."""

    def compute(self, work: Callable[[Enter], object], key: int | None = None) -> None:
        """Queue work for the computer.

        Args:
            work: called with a function to call when a phase begins.
            key: the work of one key is always the same work on the same memory; None: it varies.
        """

    def computer_waits(self, event: Any) -> None:
        """Work that is queued for the computer from now on begins after the event."""

    def host_waits(self, event: Any) -> None:
        """Return after the event."""

    def times(self, key: int) -> dict[str, float]:
        """Milliseconds of each phase of the key's last work, which must have ended."""


@dataclass(eq=False)
class Ticket:
    """A batch in progress. `memory` (uint8) and `out` (float32), its result, are on the device."""

    seat: int
    memory: Tensor
    out: Tensor
    landing: Tensor
    copied: Any = None
    landed: Any = None


class Device:
    """Two seats on a device. Use it from one thread.

    Args:
        queues: of the device.
        batch_bytes: the size of a batch's memory.
        results: how many float32 numbers come back.
    """

    def __init__(self, queues: Queues, batch_bytes: int, results: int) -> None:
        self.queues = queues
        self._seats = [
            Ticket(
                seat,
                torch.empty(batch_bytes, dtype=torch.uint8, device=queues.device),
                torch.empty(results, device=queues.device),
                queues.host_memory(4 * results).view(torch.float32),
            )
            for seat in range(_SEATS)
        ]
        self._taken = [False] * _SEATS
        self._next = 0

    def upload(self, memory: Tensor) -> Ticket:
        """Begin to copy a batch. Returns its ticket.

        Raises RuntimeError if both seats are taken: their results were not downloaded.
        """
        if self._taken[self._next]:
            raise RuntimeError("a batch's buffer is in use until its result is downloaded")
        ticket = self._seats[self._next]
        self._taken[self._next] = True
        self._next = (self._next + 1) % _SEATS
        ticket.copied = self.queues.copy_in(ticket.memory, memory)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Make the computer wait for the ticket's batch; the host does not wait."""
        self.queues.computer_waits(ticket.copied)  # WAIT copied

    def compute(self, ticket: Ticket, work: Callable[[Ticket, Enter], object]) -> None:
        """Queue the usual work on this ticket's memory, and the copy of its result."""
        self.queues.compute(lambda enter: work(ticket, enter), ticket.seat)
        ticket.landed = self.queues.copy_out(ticket.landing, ticket.out)

    def download(self, ticket: Ticket) -> np.ndarray:
        """Wait for the ticket's result, float32 [results], and free its seat."""
        self.queues.host_waits(ticket.landed)  # WAIT landed
        self._taken[ticket.seat] = False
        return ticket.landing.numpy().copy()

    def times(self, ticket: Ticket) -> dict[str, float]:
        """Milliseconds of each phase of the ticket's work, after its `download`."""
        return self.queues.times(ticket.seat)


class CudaQueues:
    """The queues of a GPU: a stream for copies beside the current stream of this thread.

    graphs: record the work of a key once as a CUDA graph, after a few times, and repeat that.
    """

    def __init__(self, device: torch.device, graphs: bool = True) -> None:
        self.device, self._graphs = device, graphs
        self._copier: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._recorded: dict[int, torch.cuda.CUDAGraph] = {}
        self._seen: dict[int, int] = {}
        self._phases: dict[int, dict[str, Any]] = {}

    def host_memory(self, nbytes: int) -> Tensor:
        """Page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy_in(self, to: Tensor, source: Tensor) -> Any:
        """Copy beside the computation."""
        with torch.cuda.stream(self._copier):
            to.copy_(source, non_blocking=True)
            return self._copier.record_event()

    def copy_out(self, to: Tensor, source: Tensor) -> Any:
        """Copy after the computation."""
        to.copy_(source, non_blocking=True)
        return torch.cuda.current_stream(self.device).record_event()

    def compute(self, work: Callable[[Enter], object], key: int | None = None) -> None:
        """Launch work, or the graph of its key."""
        if key is None:
            work(lambda phase: None)
            return
        phases = self._phases.setdefault(key, {})
        self._seen[key] = self._seen.get(key, 0) + 1
        if key not in self._recorded:
            if not self._graphs or self._seen[key] <= _EAGER:
                self._run(work, phases)
                return
            graph = torch.cuda.CUDAGraph()
            # This records without running. Other threads may allocate page-locked memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._run(work, phases)
            self._recorded[key] = graph
        self._recorded[key].replay()

    def _run(self, work: Callable[[Enter], object], phases: dict[str, Any]) -> None:
        def enter(phase: str) -> None:
            if phase not in phases:
                # External: a graph records it each time that it runs.
                event: Any = torch.cuda.Event
                phases[phase] = event(enable_timing=True, external=True)
            phases[phase].record()

        work(enter)
        enter("")

    def computer_waits(self, event: torch.cuda.Event) -> None:
        """The computing stream waits; the host does not."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def host_waits(self, event: torch.cuda.Event) -> None:
        """Synchronise with one event."""
        event.synchronize()

    def times(self, key: int) -> dict[str, float]:
        """From each phase's event to the next one's."""
        pairs = itertools.pairwise(self._phases[key].items())
        return {name: mark.elapsed_time(after) for (name, mark), (_, after) in pairs}


class Pipeline:
    """The steps of a DQN on a device, in order. A batch's memory is free after its `finish`.

        trainer = Pipeline(dqn, Device(...), batch.layout.tensors)
        trainer.begin(first)
        while True:
            trainer.begin(following)
            td_errors, facts, times = trainer.finish()      # of the batch before

    Args:
        dqn: its network is on the queues' device.
        device: with `dqn.results(batch size)` results.
        split: the columns by name of a batch's memory.
        prepare: what the device does with a batch before its step, besides the copy of its memory.
    """

    late = 1
    """How many batches may be in progress when the next one begins."""

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


class DevicePolicy:
    """Q values of a network on a device: one forward pass for all streams of an actor.

    Use it from one thread. The device computes `streams` rows each time.

    Args:
        network: on the queues' device.
        queues: of the device.
        streams: the most observations at a time.
        dtype: of the observations.
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
        """Load parameters from a buffer of float32 [n] or its bytes, in place."""
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
    """Like `DevicePolicy`, for a number of observations that varies.

    There is a policy for 1, 2, 4, ... groups, made when it is needed: a device is best at repeating
    work of a fixed size, and unused rows cost little.

    Args:
        make: makes the policy for so many observations.
        network: the one of all policies.
        group: observations come in groups of so many.
    """

    def __init__(self, make: Callable[[int], DevicePolicy], network: Network, group: int) -> None:
        self._make, self._network, self._group = make, network, group
        self._policies: dict[int, DevicePolicy] = {}

    def load_flat(self, buffer: Any) -> None:
        """Load parameters from a buffer of float32 [n] or its bytes, in place."""
        self._network.load_flat(buffer)

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Q values, float32 (S, num_actions), of observations (S, *obs_shape)."""
        groups = -(-len(obs) // self._group)
        size = self._group << (groups - 1).bit_length()
        if size not in self._policies:
            self._policies[size] = self._make(size)
        return self._policies[size].q_values(obs)
