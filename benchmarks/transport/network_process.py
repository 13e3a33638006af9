"""The replay as two processes: one for the network, one that adds and samples; rings between them.

    clients <- sockets -> network process <- commits, grants, requests, answers -> replay process

The parts are those of a run. Pushes are received into the slots, which both processes share. The
replay process draws and packs a batch into shared memory, and the network process sends it from
there. This is what arXiv 2110.13506 does with threads. It is here to be measured beside one
process that does both (docs/decisions/0016); it has no answer to the death of one of the two.
"""

import time
from collections import deque
from typing import Any

import numpy as np

from benchmarks.transport.server import Server, Setting, serve, waiter
from zapex.chunks.batch import aligned_zeros
from zapex.host.roster import Roster
from zapex.machine.memory import align
from zapex.machine.segment import Segment
from zapex.machine.waiting import Waiter
from zapex.net.keys import Security
from zapex.net.listener import listen
from zapex.net.replay_ends import ZmqExperienceSource, ZmqParameters
from zapex.net.sample_sink import ZmqSampleSink
from zapex.net.server import LinkServer
from zapex.replay.draw import Draw
from zapex.shm_transport import HostMemory
from zapex.wire.batches import BatchPacker, packed_bytes
from zapex.wire.control import BULK
from zapex.wire.experience import BatchMessage, batch_rows_bytes
from zapex.wire.header import as_buffer

_NETWORK = "actor 0"  # whose words and eventfd the network process waits on
_LONGEST_WAIT_S = 0.2


class Packed:
    """Shared memory of packed batches: that of answer n is number n, modulo their count."""

    def __init__(self, setting: Setting, count: int) -> None:
        nbytes = packed_bytes(setting.schema, setting.batch)
        memory = Segment.create("bench-packed", count * nbytes + 8 * count)
        memory.populate()
        self.buffers = memory.buffer[: count * nbytes].reshape(count, nbytes)
        self.frames = memory.buffer[count * nbytes :].view(np.int64)


class PackingSink:
    """The replay process's SampleSink: batches are packed here."""

    def __init__(self, host: HostMemory, packed: Packed) -> None:
        self._inner, self._packed = host.sample_sink(), packed
        self._packer, self._network = BatchPacker(host.store()), host.waker(_NETWORK)
        self.ready, self.requests = self._inner.ready, self._inner.requests
        self.rows = self._inner.rows
        self.updates = self._inner.updates

    @property
    def issued(self) -> int:
        """How many answers were given."""
        return self._inner.issued

    @property
    def released(self) -> int:
        """All answers: each one is a copy."""
        return self.issued

    def answer(self, draw: Draw) -> None:
        """Pack one batch, and hand it over."""
        number = self.issued % len(self._packed.buffers)
        memory = self._packed.buffers[number]
        message = self._packer.pack(draw, epoch=0, sequence=0, memory=memory)
        self._packed.frames[number] = message.frames
        self._inner.answer(draw)
        self._network.wake()


class Bridge:
    """The network process: its duty cycle moves what came on one side to the other."""

    def __init__(
        self, setting: Setting, host: HostMemory, packed: Packed, url: str, security: Security
    ) -> None:
        self._setting, self._packed, self.mailbox = setting, packed, host.mailbox()
        store, mailbox = host.store(), self.mailbox
        roster = Roster(aligned_zeros(Roster.required_bytes(1)), 1, store.header_rows)
        self.server = LinkServer(
            listen(url, security, setting.form.largest_request_bytes), setting.form, {}, roster,
            incarnation=time.time_ns(), params_version=lambda: mailbox.version,
        )  # fmt: skip
        self._source = ZmqExperienceSource(self.server, store)
        self._requests_there = ZmqSampleSink(self.server, store)
        self.parameters = ZmqParameters(self.server, mailbox)
        self._slots, self._replay = host.experience_sink(0, 1), host.waker("replay")
        self._requests = host.ring("requests").producer()
        self._answers = host.ring("answers").consumer()
        self._updates = host.ring("updates").producer()
        self._sent: deque[Any] = deque()  # trackers of answers that are not released
        self._held: deque[Any] = deque()  # updates that the ring has no room for

    def ready(self) -> bool:
        """Whether something has come on either side."""
        return (
            self._source.ready() or self._slots.ready()
            or self._answers.ring.used > len(self._sent) or self._requests_there.ready()
        )  # fmt: skip

    def do_work(self) -> int:
        """Move everything. Returns how much that was."""
        before = self.server.counts["messages"]
        self._source.take_in()
        for actor in self._source.committers():
            self._slots.commit(self._source.committed(actor))
        if (slots := self._slots.try_claim()) is not None:
            self._source.grant(0, 1, slots)
        self._held.extend(self._requests_there.updates())
        while self._held and self._hand_over(*self._held[0]):
            self._held.popleft()
        ring = self._answers.ring
        first, count = self._answers.poll(ring.capacity)
        answers = range(first + len(self._sent), first + count)
        for sequence in answers:
            self._send(sequence)
        while self._sent and self._sent[0].done:
            self._sent.popleft()
            self._answers.release(1)
        under_way = self._requests.ring.tail - ring.head
        wanted = min(len(self._sent) + self._requests_there.requests(), ring.capacity) - under_way
        if wanted > 0:
            self._requests.try_offer(np.full(wanted, self._setting.batch))
            self._replay.wake()
        return self.server.counts["messages"] - before + len(answers) + len(self._held)

    def _hand_over(self, keys: Any, priorities: Any) -> bool:
        """New priorities; False while the ring is full."""
        sequence = self._updates.try_claim(1)
        if sequence < 0:
            return False
        record = self._updates.ring.record(sequence)
        record["keys"], record["priorities"] = keys, priorities
        self._updates.commit(1)
        self._replay.wake()
        return True

    def _send(self, sequence: int) -> None:
        """An answer, to the learner, from where it was packed."""
        schema, rows = self._setting.schema, self._setting.batch
        number = sequence % len(self._packed.buffers)
        memory, frames = self._packed.buffers[number], int(self._packed.frames[number])
        row_bytes = batch_rows_bytes(schema, rows)
        at, body = align(row_bytes), []
        for column in schema.obs_columns.values():
            body.append(as_buffer(memory[at : at + frames * column.item_bytes]))
            at += frames * column.item_bytes
        (session,) = self.server.sessions.of_roles("learner")
        asked = next(iter(session.requests))
        del session.requests[asked]
        live = int(self._answers.ring.record(sequence)["count"])
        message = BatchMessage(
            schema.hash, self.server.roster.epoch, asked, live, rows, frames, 0,
            (*body, as_buffer(memory[:row_bytes])),
        )  # fmt: skip
        tracker = self.server.send(session, BULK, message)
        assert tracker is not None, "the learner takes no more"
        self._sent.append(tracker)


def serve_replay(setting: Setting, host: HostMemory, packed: Packed) -> None:
    """The replay process, for ever: it adds and samples."""
    sink = PackingSink(host, packed)
    source = host.experience_source()
    role = Server(setting, source, sink, host.experience, host.metrics("replay")).role
    wait = waiter(host, "replay")
    while True:
        if not role.do_work():
            wait(role.ready, _LONGEST_WAIT_S)


def serve_sockets(
    setting: Setting, host: HostMemory, packed: Packed, url: str, security: Security
) -> None:
    """The network process, for ever."""
    bridge = Bridge(setting, host, packed, url, security)
    index = host.plan.role_index(_NETWORK)
    wait = Waiter(
        host.sleeping, host.sleeping_word(_NETWORK), host.eventfds[index],
        also=bridge.server.listener.fds or (),
    ).wait  # fmt: skip
    serve(bridge, wait, bridge.mailbox, lambda: bridge.parameters.counts["sent"])
