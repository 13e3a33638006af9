"""The owner's end of a client's link: memory, descriptors, and the client's slots and answer."""

import contextlib
import os
import socket

from zapex.library.handle import LINK_BYTES, MANY_COMMITS, LinkMemory
from zapex.machine.segment import Segment
from zapex.machine.waiting import Waker
from zapex.shm_ring import RingConsumer, RingProducer


class OwnerLink:
    """HandleServer's facts about a client; `close` closes all that this object opened."""

    def __init__(self, number: int, connection: socket.socket, pid: int) -> None:
        """pid: the client's process; 0: not visible from here. Raises OSError."""
        self.number, self.connection = number, connection
        self.streams = self.slots = 0
        self.answer = 0  # the number of the last sample until its release
        self.asked_s = 0.0  # when its request began to wait for the limiter; 0: none waits
        self.is_broken = False  # it sent an invalid record
        with contextlib.ExitStack() as opened:
            self.descriptors = [connection.fileno()]  # become readable when the client ends
            with contextlib.suppress(OSError):  # the client is gone; the socket reports it
                if pid:
                    self.descriptors.append(os.pidfd_open(pid))
                    opened.callback(os.close, self.descriptors[1])
            self.segment = opened.enter_context(Segment.create("zapex link", LINK_BYTES))
            self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            opened.callback(os.close, self.eventfd)
            self._opened = opened.pop_all()
        self.memory = LinkMemory(self.segment.buffer, create=True)
        self.requests: RingConsumer = self.memory.requests.consumer()
        self.answers: RingProducer = self.memory.answers.producer()
        self.commits: RingConsumer = self.memory.commits.consumer()
        self.client = Waker(self.memory.sleeping, 0, self.eventfd)

    def has_request(self) -> bool:
        """Whether a request waits."""
        return self.memory.requests.used > 0

    def has_many_commits(self) -> bool:
        """Whether enough rows were committed to take them in."""
        return self.memory.commits.used >= MANY_COMMITS

    def holds_answer(self) -> bool:
        """Whether the client may still gather the rows of its last sample."""
        return self.answer > 0 and self.memory.answers.used > 0

    def close(self) -> None:
        """Close everything; the client sees its socket end."""
        self.connection.close()
        self._opened.close()
