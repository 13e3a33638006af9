"""The replay's ends of its learners' links: requests and priorities in, packed batches out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.store import ChunkStore
from zapex.net.server import LinkServer
from zapex.net.sessions import Session
from zapex.replay.draw import Draw
from zapex.wire import control as messages
from zapex.wire.batches import BatchPacker, check_batch_size, packed_bytes
from zapex.wire.compression import check_compresses
from zapex.wire.control import BULK, SMALL
from zapex.wire.header import Kind

_MOST_REQUESTS = 64
_FREE = 4  # free buffers of batches that are kept


class ZmqSampleSink:
    """Requests from learners and priorities back; batches are packed here, next to the data.

    No slot is read after `answer` returns, so evicted slots are free at once. A learner that does
    not receive its batches gets no more batches until it does.
    """

    def __init__(self, server: LinkServer, store: ChunkStore) -> None:
        form = server.form
        check_batch_size(form.batch_size, form.schema.stack)
        self._server, self._packer = server, BatchPacker(store)
        self._buffers: list[tuple[NDArray[np.uint8], Any]] = []  # buffers that libzmq holds
        self._free: list[NDArray[np.uint8]] = []
        self._updates: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
        self.issued = 0
        self.counts = dict.fromkeys(("batches", "dropped", "updates", "foreign"), 0)
        server.handlers[Kind.SAMPLE] = self._sample
        server.handlers[Kind.UPDATE] = self._update

    @property
    def released(self) -> int:
        """All answers: each one is a copy."""
        return self.issued

    def ready(self) -> bool:
        """Whether there are updates that were not taken yet."""
        return bool(self._updates)

    def requests(self) -> int:
        """How many batches are requested by learners that can receive one now."""
        learners, room = self._server.sessions.of_roles("learner"), self._server.room
        return sum(min(len(s.requests), room(s, BULK)) for s in learners)

    def rows(self) -> int:
        """The rows of the oldest request of a learner that can receive a batch now."""
        session = self._next()
        return session.oldest.rows if session else self._server.form.batch_size

    def _next(self) -> Session | None:
        learners, room = self._server.sessions.of_roles("learner"), self._server.room
        return next((s for s in learners if s.requests and room(s, BULK)), None)

    def answer(self, draw: Draw) -> None:
        """Answer the oldest request; it stays if the batch cannot be sent.

        One piece is on its way while the next is packed.
        """
        session = self._next()
        if session is None:  # its session was lost after `requests` counted
            self.counts["dropped"] += 1
            return
        request = session.requests.pop(session.oldest.sequence)
        self.issued += 1
        rows = min(request.piece_rows or request.rows, request.rows)  # whatever a learner says
        for first in range(0, len(draw.keys), rows):
            buffer = self._take_buffer(packed_bytes(self._server.form.schema, rows))
            if not self._send(session, request, draw.piece(first, rows), first, buffer):
                session.requests[request.sequence] = request
                self.counts["dropped"] += 1
                return
        self.counts["batches"] += 1

    def _send(
        self, session: Session, request: messages.Sample, draw: Draw, first: int,
        buffer: NDArray[np.uint8],
    ) -> bool:  # fmt: skip
        message = self._packer.pack(
            draw, epoch=self._server.roster.epoch, sequence=request.sequence, memory=buffer,
            first=first,
        )  # fmt: skip
        tracker = self._server.send(session, BULK, message, request.compressed)
        if tracker is None:
            self._free.append(buffer)
        else:
            self._buffers.append((buffer, tracker))
        return tracker is not None

    def _take_buffer(self, nbytes: int) -> NDArray[np.uint8]:
        held = []
        for buffer, tracker in self._buffers:
            if tracker.done:
                self._free.append(buffer)
            else:
                held.append((buffer, tracker))
        self._buffers = held
        # Buffers that a slow learner needed once are not kept for ever.
        del self._free[_FREE:]
        while self._free:
            buffer = self._free.pop()
            if buffer.nbytes >= nbytes:
                return buffer
        return np.empty(nbytes, np.uint8)

    def updates(self) -> Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Priority updates since the last call."""
        updates, self._updates = self._updates, []
        return updates

    def _sample(self, session: Session, sample: messages.Sample) -> None:
        if len(session.requests) >= _MOST_REQUESTS:
            text = f"at most {_MOST_REQUESTS} batches can be asked for ahead"
            self._server.send(session, SMALL, messages.Error(messages.Fault.BAD, text))
            return
        if sample.compressed:
            check_compresses()
        session.requests[sample.sequence] = sample

    def _update(self, session: Session, update: messages.Update) -> None:
        if update.sequence >= session.next_update:
            session.next_update = update.sequence + 1
            if update.epoch == self._server.roster.epoch:
                self._updates.append((update.keys.copy(), update.priorities.copy()))
                self._server.priorities.learned(update.priorities)
                self.counts["updates"] += 1
            else:
                self.counts["foreign"] += len(update.keys)
        ack = messages.UpdateAck(session.next_update, self.counts["foreign"])
        self._server.send(session, SMALL, ack)
