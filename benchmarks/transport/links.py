"""Links between two processes, all with the same calls: send(n messages), receive() -> bytes.

Every copy that a user would make is made: into the link and out of it, on both sides.
"""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from zapex.machine.mailbox import Mailbox
from zapex.machine.segment import Segment
from zapex.machine.waiting import Waiter, Waker
from zapex.shm_ring import ShmRing


class RingLink:
    """A ring for each direction; whoever waits looks, and yields its core in between."""

    def __init__(self, size: int, sleeps: bool = False) -> None:
        self.batch = max(1, min(512, (1 << 20) // size))
        capacity = 4 * self.batch
        dtype = np.dtype((np.void, size))
        ring_bytes = -(-ShmRing.required_bytes(capacity, dtype) // 128) * 128
        self._segment = Segment.create("bench-ring", 256 + 2 * ring_bytes)
        self._segment.populate()
        words = self._segment.buffer[:256].view(np.int64)
        parts = [self._segment.buffer[256 + i * ring_bytes :][:ring_bytes] for i in range(2)]
        rings = [ShmRing(part, capacity, dtype, create=True) for part in parts]
        fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self._ends = [
            (rings[i].producer(), rings[1 - i].consumer(), Waker(words, 16 * (1 - i), fds[1 - i]),
             Waiter(words, 16 * i, fds[i]) if sleeps else None)
            for i in range(2)
        ]  # fmt: skip
        self._out = np.zeros(self.batch, dtype)
        self._messages = np.zeros(self.batch, dtype)
        self._use(0)
        self.send(1)  # compiled before the fork
        self._use(1)
        self.receive()
        self._use(0)

    def _use(self, end: int) -> None:
        self._producer, self._consumer, self._waker, self._waiter = self._ends[end]

    def become_peer(self) -> None:
        """In the child: the other end is ours."""
        self._segment.populate()
        self._use(1)

    def send(self, n: int) -> None:
        """n messages."""
        rows = self._messages[:n]
        while not self._producer.try_offer(rows):
            os.sched_yield()
        if self._waiter:
            self._waker.wake()

    def receive(self) -> int:
        """At least one message, at most a batch: their bytes."""
        ring = self._consumer.ring
        while True:
            rows = self._consumer.take(self.batch, self._out)
            if rows.size:
                return int(rows.nbytes)
            if self._waiter:
                self._waiter.wait(lambda: ring.tail > ring.head, timeout_s=10)
            else:
                os.sched_yield()


class MailboxLink:
    """A mailbox for each direction; a value that is not read in time is passed over."""

    batch = 1

    def __init__(self, size: int) -> None:
        box_bytes = -(-Mailbox.required_bytes(size) // 128) * 128
        self._segment = Segment.create("bench-mailboxes", 2 * box_bytes)
        self._segment.populate()
        parts = [self._segment.buffer[i * box_bytes :][:box_bytes] for i in range(2)]
        self._boxes = [Mailbox(part, size, create=True) for part in parts]
        self._message, self._out = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        self._seen = 0
        for box in self._boxes:  # compiled before the fork
            box.publish(1, self._message)
            box.newer_than(0, self._out)
        self._seen = 1

    def become_peer(self) -> None:
        """In the child: the other end is ours."""
        self._segment.populate()
        self._boxes.reverse()

    def send(self, n: int) -> None:
        """The newest value."""
        box = self._boxes[0]
        box.publish(box.version + 1, self._message)

    def receive(self) -> int:
        """A newer value than the last: its bytes."""
        box = self._boxes[1]
        while not (version := box.newer_than(self._seen, self._out)):
            os.sched_yield()
        self._seen = version
        return self._out.nbytes


class PipeLink:
    """multiprocessing.Pipe with raw bytes: no pickling."""

    batch = 1

    def __init__(self, size: int) -> None:
        self._here, self._there = multiprocessing.Pipe()
        self._message = bytearray(size)
        self._out = bytearray(size)

    def become_peer(self) -> None:
        self._here = self._there

    def send(self, n: int) -> None:
        self._here.send_bytes(self._message)

    def receive(self) -> int:
        return self._here.recv_bytes_into(self._out)


class QueueLink:
    """multiprocessing.Queue of NumPy arrays, or torch.multiprocessing's of tensors."""

    batch = 1

    def __init__(self, size: int, torch: bool = False) -> None:
        self._message: Any = np.zeros(size, np.uint8)
        if torch:
            import torch as torch_module
            import torch.multiprocessing as module

            torch_module.set_num_threads(1)
            context: Any = module.get_context("fork")
            self._wrap: Any = lambda: torch_module.from_numpy(self._message).clone()
        else:
            context = multiprocessing.get_context("fork")
            self._wrap = lambda: self._message
        self._queues = [context.Queue(), context.Queue()]

    def become_peer(self) -> None:
        self._queues.reverse()

    def send(self, n: int) -> None:
        self._queues[0].put(self._wrap())

    def receive(self) -> int:
        received = self._queues[1].get(timeout=60)
        return int(received.nbytes)


LINKS: dict[str, Callable[[int], Any]] = {
    "ring": RingLink,
    "ring, sleeping": lambda size: RingLink(size, sleeps=True),
    "mailbox": MailboxLink,
    "Pipe": PipeLink,
    "Queue": QueueLink,
    "torch Queue": lambda size: QueueLink(size, torch=True),
}
