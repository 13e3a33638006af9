"""tcp:// and ipc://: batches of a learner or a library's client over its link to the replay.

No request or update is lost when a connection breaks or the replay's process dies. A request is
kept until its answer has come. An update is kept until it is acknowledged. Both are sent again when
the replay says that a connection is new to it. The replay recognises repeats by their sequence
numbers.

The replay draws a batch once and sends a large one in pieces: while one is packed, another is on
its way and a third is unpacked.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.layout import BatchLayout
from zapex.chunks.schema import Schema
from zapex.errors import BadMessage, ZapexError, told
from zapex.net.link import ZmqLink
from zapex.replay.draw import METHODS, Draw
from zapex.sumtree_numba import Method
from zapex.transport import Sampled
from zapex.wire import messages
from zapex.wire.batches import BatchUnpacker, check_batch_size, packed_bytes
from zapex.wire.experience import BatchMessage
from zapex.wire.messages import MOST_PIECES, SMALL, NoBatch, Sample, Update, UpdateAck, Welcome
from zapex.wire.protocol import Form, Kind

_UPDATES = 16  # updates that may be in flight
_DEADLINE_S = 60.0  # for the separate thread, whose work takes milliseconds
_PIECE_BYTES = 6 << 20  # of the most that a batch can take

_Decoded = BatchMessage | BadMessage
"""A message, or what is wrong with it."""


@lru_cache(maxsize=256)
def _piece_rows(schema: Schema, rows: int) -> int:
    """Rows in one piece of a batch; 0: it comes in one."""
    pieces = min(packed_bytes(schema, rows) // _PIECE_BYTES, MOST_PIECES)
    return -(-rows // pieces) if pieces > 1 else 0


@dataclass(eq=False)
class _Request:
    """A request. come: pieces of its answer, in order. draws: of those unpacked into `batch`.

    refused: why the replay cannot answer it.
    """

    sample: Sample
    refused: ZapexError | None = None
    come: list[BatchMessage] = field(default_factory=list)
    batch: Batch | None = None
    draws: list[Draw] = field(default_factory=list)

    @property
    def _rows_come(self) -> int:
        return sum(piece.rows for piece in self.come)

    @property
    def is_whole(self) -> bool:
        return self._rows_come == self.sample.rows

    @property
    def is_answered(self) -> bool:
        return self.is_whole or self.refused is not None

    @property
    def has_news(self) -> bool:
        """Whether `poll` can do something."""
        return self.is_answered or len(self.draws) < len(self.come)

    def restart(self) -> None:
        """Expect the first piece."""
        self.come, self.draws = [], []

    def take(self, piece: BatchMessage) -> bool:
        """Whether it is the next piece, or the first one of another answer to this request."""
        if piece.first == 0 and not self.is_whole:
            self.restart()
        rest = self.sample.rows - self._rows_come
        fits = piece.first == self._rows_come and piece.rows <= rest
        fits = fits and piece.rows in (rest, self.sample.piece_rows)
        if fits:
            self.come.append(piece)
        return fits

    def unpack(self, unpacker: BatchUnpacker, batch: Batch) -> None:
        """Put all pieces that have come into `batch`."""
        if self.batch is not batch:
            self.batch, self.draws = batch, []
        for piece in self.come[len(self.draws) :]:
            self.draws.append(unpacker.unpack(piece, batch, piece.first))


class ZmqSampleSource:
    """Batches that the replay draws and packs; several requests in flight.

    If `poll` gets the memory of the `following` batch, a thread decodes the next answer and unpacks
    it there while the learner trains. Until `_finish_job` has waited for it, the thread alone
    touches that request and the messages that have come.

    Args:
        link: a learner's, or a library client's.
        beta: of the weights.
        piece_rows: rows of one piece of a batch; 0: it comes in one; None: as its size needs.

    Attributes:
        epoch: of the memory that the last batch is of.
        memory: the epoch of the replay's memory, from its last welcome; 0: none yet.
        counts: answers that came twice, and updates of rows that were gone.
    """

    def __init__(self, link: ZmqLink, beta: float, *, piece_rows: int | None = None) -> None:
        form = link.form
        assert form is not None
        check_batch_size(form.batch_size, form.schema.stack)
        self._link, self._form, self._beta = link, form, beta
        self._piece_rows = piece_rows
        self._unpackers: dict[BatchLayout, BatchUnpacker] = {}
        self._pending: dict[int, _Request] = {}
        self._unsent: set[int] = set()
        self._next_request = self._next_update = 0
        self._updates: deque[tuple[Update, bool]] = deque()
        self.epoch = self.memory = 0
        self._come: deque[list[Any]] = deque()  # messages that are not decoded yet
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[list[_Decoded]] | None = None
        self.counts = dict.fromkeys(("doubled", "foreign"), 0)
        link.register(
            {Kind.UPDATE_ACK: self._update_ack, Kind.NO_BATCH: self._refused},
            raw={Kind.BATCH: self._come.append},
            on_welcome=self._welcome,
            on_lost=self._ask_again,
        )

    @property
    def form(self) -> Form:
        """The form of the run's messages."""
        return self._form

    @property
    def url(self) -> str:
        """The replay's address."""
        return self._link.url

    @property
    def silent_s(self) -> float:
        """Seconds since the replay's last message."""
        return self._link.silent_s

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

    def do_work(self) -> None:
        """Receive, and say hello if it is due."""
        self._link.do_work()

    def request(self, rows: int = 0, method: Method = "stratified", *, part: bool = False) -> int:
        """Ask for one more batch. Returns the request's number.

        rows: 0: the run's batch size. method: a run's replay draws by its own. part: only some
        rows of a batch of several replays, for `take`.
        """
        sequence, rows = self._next_request, rows or self._form.batch_size
        self._next_request += 1
        piece_rows = self._piece_rows
        if part:
            piece_rows = 0
        elif piece_rows is None:
            piece_rows = _piece_rows(self._form.schema, rows)
        compressed, number = self._link.compressed, METHODS.index(method)
        sample = Sample(sequence, rows, compressed, piece_rows, number, part)
        self._pending[sequence] = _Request(sample)
        self._ask(sequence)
        return sequence

    def take(self, sequence: int) -> BatchMessage | ZapexError | None:
        """The answer to a request for a part, in place of `poll`; None if it has not come.

        An error is the answer of a library's replay that has nothing to give.
        """
        self._decode_all()
        request = self._pending.get(sequence)
        if request is None or not request.has_news:
            return None
        self.forget(sequence)
        if request.refused is not None:
            return request.refused
        (message,) = request.come
        return message

    def forget(self, sequence: int) -> None:
        """Expect no answer to a request any more."""
        del self._pending[sequence]
        self._unsent.discard(sequence)

    def forget_all(self) -> None:
        """Expect no answer any more."""
        self._finish_job()
        self._pending.clear()
        self._unsent.clear()

    def ready(self) -> bool:
        """Whether a batch, or a piece of one, has come that `poll` can unpack."""
        self._link.do_work()
        self._finish_job()
        while self._come and not self._has_news():
            self._accept(self._decode(self._come.popleft()))
        return self._has_news()

    def _current(self) -> tuple[int, _Request] | None:
        """The request that is being unpacked, or else the oldest of whose answer something came."""
        begun = (one for one in self._pending.items() if one[1].draws)
        come = (one for one in self._pending.items() if one[1].has_news)
        return next(begun, None) or next(come, None)

    def _has_news(self) -> bool:
        current = self._current()
        return current is not None and current[1].has_news

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        """Unpack into `batch` what has come of the oldest; None until all is there."""
        draw = self.poll_draw(batch)
        if draw is None:
            return None
        draw.weigh(batch.weights, self._beta)
        if following is not None:
            self._begin_job(following)
        return Sampled(torn=0, live=draw.count)

    def poll_draw(self, batch: Batch) -> Draw | None:
        """As `poll`, without the weights: they are of this draw.

        Raises the error that the replay of a library answers.
        """
        while self.ready():
            current = self._current()
            assert current is not None
            sequence, request = current
            if request.refused is not None:
                self.forget(sequence)
                raise request.refused
            request.unpack(self._unpacker(batch.layout), batch)
            if request.is_whole:
                self.epoch = request.come[0].epoch
                self.forget(sequence)
                return Draw.whole(request.draws)
        return None

    def _unpacker(self, layout: BatchLayout) -> BatchUnpacker:
        if layout not in self._unpackers:
            self._unpackers[layout] = BatchUnpacker(layout, self._form.layout)
        return self._unpackers[layout]

    def _begin_job(self, batch: Batch) -> None:
        """Let the thread decode the next answer, if some of it has come, and unpack it.

        The job begins only here. If the thread ran while the learner sends and requests, it would
        slow the learner down.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "batches")
        current = self._current()
        if current is None and self._come:  # the oldest is most likely answered next
            current = next(iter(self._pending.items()), None)
        if current is not None:
            unpacker = self._unpacker(batch.layout)
            self._job = self._thread.submit(self._unpack_ahead, *current, unpacker, batch)

    def _unpack_ahead(
        self, sequence: int, request: _Request, unpacker: BatchUnpacker, batch: Batch
    ) -> list[_Decoded]:
        """In the thread: unpack an answer's pieces. Returns messages that are no pieces of it."""
        others: list[_Decoded] = []
        request.unpack(unpacker, batch)
        while not request.is_whole and self._come:
            message = self._decode(self._come.popleft())
            if not isinstance(message, BatchMessage):
                return [*others, message]
            if message.sequence == sequence and request.take(message):
                request.unpack(unpacker, batch)
            else:
                others.append(message)
        return others

    def _finish_job(self) -> None:
        """Wait for the thread, which may be writing into a batch."""
        job, self._job = self._job, None
        if job is not None:
            for message in job.result(_DEADLINE_S):
                self._accept(message)

    def _decode_all(self) -> None:
        self._finish_job()
        while self._come:
            self._accept(self._decode(self._come.popleft()))

    def _decode(self, parts: list[Any]) -> _Decoded:
        try:
            message: BatchMessage = messages.decode(parts, self._form)
        except BadMessage as error:
            return error
        return message

    def _accept(self, message: _Decoded) -> None:
        if not isinstance(message, BatchMessage):
            self._link.reject(message)
            return
        request = self._pending.get(message.sequence)
        if request is None or not request.take(message):
            self.counts["doubled"] += 1

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float32]) -> bool:
        """Send new priorities; False while too many are in flight."""
        self._link.do_work()
        if self.is_full:
            return False
        update = Update(self.epoch, self._next_update, keys.copy(), priorities.copy())
        self._next_update += 1
        waits = bool(self._updates) and not self._updates[-1][1]  # they are taken in order
        sent = not waits and self._link.send(SMALL, update) is not None
        self._updates.append((update, sent))
        return True

    def _ask(self, sequence: int) -> None:
        request = self._pending[sequence]
        request.restart()
        if self._link.send(SMALL, request.sample) is None:
            self._unsent.add(sequence)
        else:
            self._unsent.discard(sequence)

    def _ask_again(self) -> None:
        """An invalid answer may have been a batch, so requests are sent again."""
        self._finish_job()
        for sequence, request in self._pending.items():
            if not request.is_answered:
                self._ask(sequence)

    def _refused(self, answer: NoBatch) -> None:
        self._finish_job()
        request = self._pending.get(answer.sequence)
        if request is not None:
            request.refused = told(answer.error, answer.text)

    def _update_ack(self, ack: UpdateAck) -> None:
        self.counts["foreign"] = ack.value
        while self._updates and self._updates[0][0].sequence < ack.sequence:
            self._updates.popleft()

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        self.memory = welcome.epoch
        if welcome.fresh or self._unsent:
            self._finish_job()
            for sequence, request in self._pending.items():
                if not request.is_answered and (welcome.fresh or sequence in self._unsent):
                    self._ask(sequence)
        # Updates that could not be sent, or were sent over a connection that is closed.
        all_sent = True
        for i, (update, sent) in enumerate(self._updates):
            if not sent or (welcome.fresh and channel == SMALL):
                all_sent = all_sent and self._link.send(SMALL, update) is not None
                self._updates[i] = update, all_sent
