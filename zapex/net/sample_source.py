"""tcp:// and ipc://: a learner's batches over its link to the replay.

No request or update is lost when a connection breaks or the replay's process dies. A request is
kept until its answer has come. An update is kept until it is acknowledged. Both are sent again when
the replay says that a connection is new to it. The replay recognises repeats by their sequence
numbers.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.layout import BatchLayout
from zapex.net.link import ZmqLink
from zapex.replay.draw import Draw
from zapex.transport import Sampled
from zapex.wire import control as messages
from zapex.wire.batches import BatchUnpacker, check_batch_size
from zapex.wire.control import BULK, SMALL, Sample, Update, UpdateAck, Welcome
from zapex.wire.experience import BatchMessage
from zapex.wire.header import Kind

_UPDATES = 16  # updates that may be in flight
_DEADLINE_S = 60.0  # for the separate thread, whose work takes milliseconds

_Unpacked = tuple[BatchMessage, Draw]
"""A message, and what was drawn for it."""


class ZmqSampleSource:
    """A learner's batches, packed by the replay; several requests in flight.

    If `poll` is told the memory of the `following` batch, a thread checks the next batch and
    unpacks it there while the learner trains.
    """

    def __init__(self, link: ZmqLink, beta: float) -> None:
        form = link.form
        assert form is not None
        check_batch_size(form.batch_size, form.schema.stack)
        self._link, self._form, self._beta = link, form, beta
        self._unpackers: dict[BatchLayout, BatchUnpacker] = {}
        self._pending: dict[int, BatchMessage | None] = {}
        self._rows: dict[int, int] = {}  # of each pending request
        self._unsent: set[int] = set()
        self._next_request = self._next_update = 0
        self._updates: deque[tuple[Update, bool]] = deque()
        self._epoch = 0
        self._thread: ThreadPoolExecutor | None = None
        self._come: deque[list[Any]] = deque()  # messages that came and are not checked yet
        # The thread's current work: the batch, whether the link has not seen its message yet.
        self._job: tuple[Batch, bool, Future[_Unpacked]] | None = None
        self._ahead: tuple[Batch, _Unpacked] | None = None  # the thread's last result
        self.counts = dict.fromkeys(("doubled", "foreign"), 0)
        link.handlers[Kind.BATCH] = self._batch
        link.handlers[Kind.UPDATE_ACK] = self._update_ack
        link.on_bad.append(self._ask_again)
        link.on_welcome.append(self._welcome)

    @property
    def outstanding(self) -> int:
        """Requests whose answer was not polled yet."""
        return len(self._pending)

    @property
    def updates_under_way(self) -> int:
        """How many updates the replay may not have yet."""
        return len(self._updates)

    @property
    def is_full(self) -> bool:
        """Whether `update` would refuse."""
        return len(self._updates) >= _UPDATES

    def request(self, rows: int = 0) -> int:
        """Ask for one more batch, or for `rows` of one. Returns the request's number."""
        sequence = self._next_request
        self._next_request += 1
        self._pending[sequence] = None
        self._rows[sequence] = rows or self._form.batch_size
        self._ask(sequence)
        return sequence

    def take(self, sequence: int) -> BatchMessage | None:
        """The answer to a request, in place of `poll`; None if it has not come."""
        message = self._pending.get(sequence)
        if message is not None:
            self.forget(sequence)
            self._epoch = message.epoch
        return message

    def forget(self, sequence: int) -> None:
        """Expect no answer to a request any more."""
        del self._pending[sequence], self._rows[sequence]
        self._unsent.discard(sequence)

    def ready(self) -> bool:
        """Whether a batch can be polled."""
        self._link.do_work()
        if self._oldest() is None:
            self._finish_job()
        while self._come and self._oldest() is None:
            self._link.accept(BULK, partial(messages.decode, self._come.popleft(), self._form))
        return self._oldest() is not None

    def _oldest(self) -> tuple[int, BatchMessage] | None:
        """The oldest request that is answered, and its answer."""
        answered = ((s, a) for s, a in self._pending.items() if a is not None)
        return next(answered, None)

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        """Unpack the oldest batch that has come, with its weights, into `batch`; or return None."""
        self._finish_job()  # the thread may be writing into `batch`
        if not self.ready():
            return None
        oldest, (ahead, self._ahead) = self._oldest(), (self._ahead, None)
        assert oldest is not None
        sequence, message = oldest
        if ahead is not None and ahead[0] is batch and ahead[1][0] is message:
            draw = ahead[1][1]
        else:
            draw = self._unpacker(batch.layout).unpack(message, batch)
        draw.weigh(batch.weights, self._beta)
        self._epoch = message.epoch
        self.forget(sequence)
        if following is not None:
            self._begin_job(following)
        return Sampled(torn=0, live=message.live)

    def _unpacker(self, layout: BatchLayout) -> BatchUnpacker:
        if layout not in self._unpackers:
            self._unpackers[layout] = BatchUnpacker(layout, self._form.layout)
        return self._unpackers[layout]

    def _begin_job(self, batch: Batch) -> None:
        """Let the thread check the next answer, if one has come, and unpack it into `batch`.

        The job begins only here. If the thread ran while the learner sends and requests, it would
        slow the learner down.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "batches")
            self._link.aside[Kind.BATCH] = self._come.append
        known, unpacker = self._oldest(), self._unpacker(batch.layout)
        if known is None and not self._come:
            return
        parts = self._come.popleft() if known is None else []

        def unpack() -> _Unpacked:
            message = known[1] if known is not None else messages.decode(parts, self._form)
            return message, unpacker.unpack(message, batch)

        self._job = batch, known is None, self._thread.submit(unpack)

    def _finish_job(self) -> None:
        """Wait for the thread, and accept the message that it has checked."""
        job, self._job = self._job, None
        if job is None:
            return
        batch, fresh, work = job
        if not fresh or self._link.accept(BULK, lambda: work.result(_DEADLINE_S)[0]) is not None:
            self._ahead = batch, work.result(_DEADLINE_S)

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> bool:
        """Send new priorities; False while too many are in flight."""
        self._link.do_work()
        if self.is_full:
            return False
        update = Update(self._epoch, self._next_update, keys.copy(), priorities.copy())
        self._next_update += 1
        self._updates.append((update, self._link.send(SMALL, update) is not None))
        return True

    def _ask(self, sequence: int) -> None:
        sample = Sample(sequence, self._rows[sequence], self._link.compressed)
        if self._link.send(SMALL, sample) is None:
            self._unsent.add(sequence)
        else:
            self._unsent.discard(sequence)

    def _ask_again(self) -> None:
        """An invalid answer may have been a batch, so requests are sent again."""
        for sequence, answer in self._pending.items():
            if answer is None:
                self._ask(sequence)

    def _batch(self, message: BatchMessage) -> None:
        asked = self._rows.get(message.sequence) == message.rows
        if asked and self._pending[message.sequence] is None:
            self._pending[message.sequence] = message
        else:
            self.counts["doubled"] += 1

    def _update_ack(self, ack: UpdateAck) -> None:
        self.counts["foreign"] = ack.value
        while self._updates and self._updates[0][0].sequence < ack.sequence:
            self._updates.popleft()

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        for sequence, answer in self._pending.items():
            if answer is None and (welcome.fresh or sequence in self._unsent):
                self._ask(sequence)
        # Updates that could not be sent, or were sent over a connection that is closed.
        for i, (update, sent) in enumerate(self._updates):
            if not sent or (welcome.fresh and channel == SMALL):
                self._updates[i] = update, self._link.send(SMALL, update) is not None
