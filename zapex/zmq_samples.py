"""tcp:// and ipc://: a learner's batches over its link to the replay.

What is under way survives a lost connection and a replay's new process: a request is kept until
its answer has come, an update until it has arrived; both are sent again when the replay says that
a connection is new to it, and told apart there by their numbers.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex import messages
from zapex.batch import Batch
from zapex.batch_packing import BatchUnpacker, check_batch_size
from zapex.experience_messages import BatchMessage
from zapex.message_header import Kind
from zapex.messages import BULK, SMALL, Sample, Update, UpdateAck, Welcome
from zapex.replay import importance_weights
from zapex.schema import BatchLayout
from zapex.transport import Sampled
from zapex.zmq_client import ZmqLink

_UPDATES = 16  # updates that may be under way
_DEADLINE_S = 60.0  # for milliseconds of work on a thread of ours

_Unpacked = tuple[BatchMessage, NDArray[np.float64]]
"""A message, and the leaves of its batch."""


@dataclass(frozen=True)
class _Job:
    batch: Batch
    fresh: bool  # the link has not seen the message yet
    work: Future[_Unpacked]

    @property
    def message(self) -> BatchMessage:
        """Raises BadMessage."""
        return self.work.result(_DEADLINE_S)[0]


class ZmqSampleSource:
    """A learner's batches, packed by the replay; several requests in flight.

    Where polls say which memory comes `following`, a thread checks the next batch and unpacks it
    there while the learner learns.
    """

    def __init__(self, link: ZmqLink, beta: float) -> None:
        form = link.form
        assert form is not None
        check_batch_size(form.batch_size, form.schema.stack)
        self._link, self._form, self._beta = link, form, beta
        self._unpackers: dict[BatchLayout, BatchUnpacker] = {}
        self._pending: dict[int, BatchMessage | None] = {}
        self._unsent: set[int] = set()
        self._next_request = self._next_update = 0
        self._updates: deque[tuple[Update, bool]] = deque()
        self._epoch = 0
        self._thread: ThreadPoolExecutor | None = None
        self._come: deque[list[Any]] = deque()  # not checked yet
        self._job: _Job | None = None  # what the thread is at
        self._ahead: tuple[Batch, _Unpacked] | None = None  # what it has done
        self.counts = dict.fromkeys(("doubled", "foreign"), 0)
        link.handlers[Kind.BATCH] = self._batch
        link.handlers[Kind.UPDATE_ACK] = self._update_ack
        link.on_bad.append(self._ask_again)
        link.on_welcome.append(self._welcome)

    @property
    def outstanding(self) -> int:
        """Requests without an answer polled."""
        return len(self._pending)

    @property
    def updates_under_way(self) -> int:
        """Updates that the replay may not have yet."""
        return len(self._updates)

    def request(self) -> None:
        """Ask for one more batch."""
        sequence = self._next_request
        self._next_request += 1
        self._pending[sequence] = None
        self._ask(sequence)

    def ready(self) -> bool:
        """A batch can be polled."""
        self._link.do_work()
        if self._oldest() is None:
            self._finish_job()
        while self._come and self._oldest() is None:
            self._link.accept(BULK, partial(messages.decode, self._come.popleft(), self._form))
        return self._oldest() is not None

    def _oldest(self) -> tuple[int, BatchMessage] | None:
        """The request that was asked first of those that are answered, and its answer."""
        answered = ((s, a) for s, a in self._pending.items() if a is not None)
        return next(answered, None)

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        """The oldest batch that has come, into `batch`, weights and keys included; or None."""
        self._finish_job()  # it may be writing there
        if not self.ready():
            return None
        oldest, (ahead, self._ahead) = self._oldest(), (self._ahead, None)
        assert oldest is not None
        sequence, message = oldest
        if ahead is not None and ahead[0] is batch and ahead[1][0] is message:
            leaves = ahead[1][1]
        else:
            leaves, _, _ = self._unpacker(batch.layout).unpack(message, batch)
        batch.weights[:] = importance_weights(leaves, self._beta)
        self._epoch = message.epoch
        del self._pending[sequence]
        if following is not None:
            self._begin_job(following)
        return Sampled(torn=0, live=message.live)

    def _unpacker(self, layout: BatchLayout) -> BatchUnpacker:
        if layout not in self._unpackers:
            self._unpackers[layout] = BatchUnpacker(layout, self._form.layout)
        return self._unpackers[layout]

    def _begin_job(self, batch: Batch) -> None:
        """Have the next answer, where one has come, checked and unpacked into `batch`.

        Begun here and no earlier: a thread that runs while the learner sends and asks would only
        be in its way.
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
            return message, unpacker.unpack(message, batch)[0]

        self._job = _Job(batch, known is None, self._thread.submit(unpack))

    def _finish_job(self) -> None:
        """The thread touches no batch from here on, and what it has checked is taken in."""
        job, self._job = self._job, None
        if job is None:
            return
        taken = not job.fresh or self._link.accept(BULK, lambda: job.message) is not None
        if taken:
            self._ahead = job.batch, job.work.result(_DEADLINE_S)

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> bool:
        """Send new priorities; False while too many are under way."""
        self._link.do_work()
        if len(self._updates) >= _UPDATES:
            return False
        update = Update(self._epoch, self._next_update, keys.copy(), priorities.copy())
        self._next_update += 1
        self._updates.append((update, self._link.send(SMALL, update) is not None))
        return True

    def _ask(self, sequence: int) -> None:
        if self._link.send(SMALL, Sample(sequence, self._form.batch_size)) is None:
            self._unsent.add(sequence)
        else:
            self._unsent.discard(sequence)

    def _ask_again(self) -> None:
        """An answer that broke the rules may have been a batch: the replay would not know."""
        for sequence, answer in self._pending.items():
            if answer is None:
                self._ask(sequence)

    def _batch(self, message: BatchMessage) -> None:
        if self._pending.get(message.sequence, message) is None:
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
        # What could not go, or went into a connection that is no more.
        for i, (update, sent) in enumerate(self._updates):
            if not sent or (welcome.fresh and channel == SMALL):
                self._updates[i] = update, self._link.send(SMALL, update) is not None
