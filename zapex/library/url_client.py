"""A replay served by `zapex replay --schema`, on any host, with the names of PrioritizedReplay.

Chunks are sent when they are closed, as a relay's are: they are kept until acknowledged and sent
again when the replay is back, and the replay never takes a chunk twice. Everything else is a call
and its answer; a call without an answer is sent again. So when the replay's process dies and is
started again, the client only waits.
"""

import itertools
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.keys import NO_KEY
from zapex.chunks.layout import ACTOR, INCARNATION, SEQUENCE, BatchLayout
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError, PeerDied, PeerError, PeerTimeout, told
from zapex.library.client import Answer, ProcessLock, ReplayClient
from zapex.library.interface import Extender, Rows
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.replay.core import ReplayLayout
from zapex.replay.draw import METHODS, Draw
from zapex.sumtree_numba import Method
from zapex.wire.batches import BatchUnpacker
from zapex.wire.compression import check_installed
from zapex.wire.experience import BatchMessage
from zapex.wire.messages import SMALL, Bye, Call, Reply, Request, Welcome, most_rows
from zapex.wire.protocol import Form, Kind
from zapex.zmq_transport import ChunkSender

CONFIG = {"library": 1}
"""The settings that both ends must share, besides the schema."""
_LOOK_S = 0.2  # period of the thread that says hello for idle links


def form_of(layout: ReplayLayout) -> Form:
    """The Form of a library's messages."""
    return Form(layout.chunk_layout, most_rows(layout.schema), 1)


class UrlLink:
    """One link, its lock, and how long to wait; `close()` may be called twice."""

    def __init__(
        self,
        url: str,
        schema: Schema,
        form: Form | None,
        security: Security,
        timeout_s: float,
        *,
        actors: int = 0,
        lock: ProcessLock | None = None,
        compress: bool = False,
    ) -> None:
        """form: None only asks for `welcome`. compress: what is pushed.

        Raises PeerTimeout, Refused, Fenced, ConfigError.
        """
        self.lock = lock or ProcessLock()
        self.timeout_s = timeout_s
        self.chores: list[Callable[[], object]] = []
        self._closed = False
        self.link = ZmqLink(
            url,
            "client",
            1 + secrets.randbits(62),
            1,
            form,
            CONFIG,
            security,
            schema_hash=schema.hash,
            actors=actors,
            compressed=compress,
        )
        try:
            self.link.open(timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def welcome(self) -> Welcome:
        """The replay's last answer to a hello."""
        assert self.link.welcome is not None
        return self.link.welcome

    def check(self) -> None:
        """Raises PeerDied if it is closed."""
        if self._closed:
            raise PeerDied("this client is closed")

    def wait(self, ready: Callable[[], object], for_what: str) -> None:
        """Wait until `ready()`, with the lock held. Raises PeerTimeout, and the link's errors."""
        self.check()

        def looked() -> object:
            self.link.do_work()
            return ready()

        if not self.link.wait(looked, self.timeout_s):
            raise PeerTimeout(
                self.link.waiting
                or f"{for_what} did not come from {self.link.url} within {self.timeout_s:g} s"
            )

    def look(self) -> bool:
        """Do an idle link's work, if no thread uses it now. Returns False if closed or unusable."""
        if not self.lock.acquire(blocking=False):
            return True
        try:
            if self._closed:
                return False
            self.link.do_work()
            for chore in self.chores:
                chore()
            return True
        except PeerError:  # the user's next call raises it
            return False
        finally:
            self.lock.release()

    def look_while_idle(self) -> None:
        """Start a thread that says hello, and receives messages, while no other uses the link."""

        def look() -> None:
            while self.look():
                time.sleep(_LOOK_S)

        threading.Thread(target=look, name="zapex client", daemon=True).start()

    def close(self) -> None:
        """Send a BYE and disconnect."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self.link.close(bye=Bye())


class UrlSlots:
    """Private slots; their chunks are sent over a separate link when they are closed.

    elsewhere: opens a link to another replay, with the lock that it is given, for what this one
    does not take in time.
    """

    shard = 0

    def __init__(
        self,
        link: UrlLink,
        layout: ReplayLayout,
        streams: int,
        elsewhere: Callable[[ProcessLock], UrlLink] | None = None,
    ) -> None:
        self.layout, self._elsewhere = layout, elsewhere
        self._link, self.lock = link, link.lock
        slots = 2 * streams + 4
        memory = aligned_zeros(ChunkStore.required_bytes(layout.chunk_layout, slots))
        self.store = ChunkStore(memory, layout.chunk_layout, slots)
        self._free = deque(range(slots))
        self._sender = ChunkSender(link.link, self.store)
        self._sequence = itertools.count()
        self.sent: list[int] = []  # sequences since the caller last cleared this list
        link.chores.append(self._pump)

    @property
    def number(self) -> int:
        """Its actor number at the replay."""
        return int(self._link.welcome.actors["actor"][0])

    def _pump(self) -> None:
        self._sender.do_work()
        self._free.extend(self._sender.take_freed())

    def reserve_streams(self, streams: int) -> None:
        """Nothing to do: the slots were made for these streams."""

    def release_streams(self, streams: int, slots: NDArray[np.int64]) -> None:
        """Send the last chunks, and close the link of a closed writer."""
        self.settle()
        self.close()

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def admit(self, rows: int) -> None:
        """Nothing to wait for: the credit limits each chunk."""
        self._link.check()

    def open_slot(self) -> int:
        """Get a slot to fill. Raises PeerTimeout if the replay takes no chunk for too long."""

        def is_free() -> bool:
            self._pump()
            return bool(self._free)

        if not self._free:
            self._wait(is_free, "room for more chunks")
        return self._free.popleft()

    def _wait(self, ready: Callable[[], object], for_what: str) -> None:
        try:
            self._link.wait(ready, for_what)
        except PeerTimeout:
            if self._elsewhere is None:
                raise
            self._move(self._elsewhere(self.lock))
            self._link.wait(ready, for_what)

    def _move(self, link: UrlLink) -> None:
        """Send what is not acknowledged over another link, where all of it is new."""
        left = self._sender.take_back()
        self._link.close()
        self._free.extend(self._sender.take_freed())
        self._link, self._sender = link, ChunkSender(link.link, self.store)
        self._sequence = itertools.count()
        link.chores.append(self._pump)
        self.grown(np.empty(0, np.int64), np.empty(0), np.array(left, np.int64))

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64],
    ) -> None:
        """Send the `closed` slots; rows of open slots stay here."""
        if not len(closed):
            return
        self._link.check()
        rows = self.store.header_rows
        for slot in closed.tolist():
            sequence = next(self._sequence)
            rows[slot, [ACTOR, INCARNATION, SEQUENCE]] = 0, 1, sequence
            self.sent.append(sequence)
        self._sender.offer(closed)
        self._link.link.do_work()
        self._pump()

    def settle(self) -> None:
        """Wait until the replay has all closed chunks. Raises PeerTimeout."""

        def arrived() -> bool:
            self._pump()
            return not self._sender.unacknowledged

        if not arrived():
            self._wait(arrived, "an acknowledgement")


_AGAIN_S = 2.0  # without an answer for this long, the call is sent again


class UrlClient(ReplayClient):
    """A replay's client, made by `zapex.connect(url, schema=...)`. Public methods are thread-safe.

    Transitions of a writer can be drawn when their chunk is closed: it is full, or `flush` was
    called. `extend` closes its chunks, so give it many rows at once. Weights and priorities are the
    same as in the replay itself; priorities of new transitions are float32.

    With `prefetch`, `sample` also requests the next batches now. They are drawn by the priorities
    of now.
    """

    _where = "over a network"

    def __init__(
        self,
        url: str,
        schema: Schema,
        *,
        timeout_s: float = 10.0,
        prefetch: int = 0,
        security: Security | None = None,
        compress: bool = False,
    ) -> None:
        """Raises PeerTimeout, Refused (another schema, no library), ConfigError."""
        super().__init__(schema, timeout_s)
        if not 0 <= prefetch <= 16:
            raise ConfigError(f"prefetch must be 0 to 16 batches, got {prefetch}")
        if compress:
            check_installed("compress=True")
        self.url, self.prefetch, self._compress = url, prefetch, compress
        self._security = security or Security()
        asking = UrlLink(url, schema, None, self._security, timeout_s)
        chunk = asking.welcome.chunk  # only the replay knows it
        asking.close()
        self._layout = ReplayLayout(schema, max(1, chunk), 1, chunk)
        self._form = form_of(self._layout)
        self._most_rows = self._form.batch_size
        self._unpackers: dict[BatchLayout, BatchUnpacker] = {}
        self._link = self._open()
        self._lock = self._link.lock
        self._sequence = itertools.count()
        self._waiting: dict[int, Call] = {}
        self._answers: dict[int, Reply | BatchMessage] = {}
        self._ahead: deque[Call] = deque()
        self._extending: tuple[UrlSlots, Extender] | None = None
        self._extending_lock = ProcessLock()
        link = self._link.link
        answers = {Kind.REPLY: self._take_answer, Kind.BATCH: self._take_answer}
        link.register(answers, on_welcome=self._call_again)

    def _open(self, actors: int = 0, lock: ProcessLock | None = None) -> UrlLink:
        link = UrlLink(
            self.url,
            self.schema,
            self._form,
            self._security,
            self.timeout_s,
            actors=actors,
            lock=lock,
            compress=self._compress,
        )
        link.look_while_idle()
        return link

    # Calls.

    def _call(self, what: Request, rows: int = 0, option: int = 0, **more: Any) -> Any:
        """Return the answer. Raises the replay's error, PeerTimeout, Refused."""
        with self._link.lock:
            return self._await(self._send(what, rows, option, **more))

    def _send(self, what: Request, rows: int = 0, option: int = 0, **more: Any) -> Call:
        self._link.check()
        compressed = self._compress and what == Request.SAMPLE
        call = Call(next(self._sequence), what, rows, option, compressed=compressed, **more)
        self._waiting[call.sequence] = call
        self._link.link.send(SMALL, call)
        return call

    def _await(self, call: Call, silence_s: float = math.inf) -> Reply | BatchMessage:
        link = self._link.link
        asked_s = time.monotonic()

        def answered() -> bool:
            nonlocal asked_s
            if call.sequence not in self._answers and time.monotonic() - asked_s > _AGAIN_S:
                asked_s = time.monotonic()
                link.send(SMALL, call)
            return call.sequence in self._answers or link.silent_s > silence_s

        try:
            self._link.wait(answered, "an answer")
            if call.sequence not in self._answers:
                raise PeerTimeout(
                    link.waiting or f"{self.url} has said nothing for {link.silent_s:.1f} s"
                )
            answer = self._answers.pop(call.sequence)
        finally:
            self._waiting.pop(call.sequence, None)
        if isinstance(answer, Reply) and answer.error:
            raise told(answer.error, answer.text)
        if isinstance(answer, BatchMessage) != (call.what == Request.SAMPLE):
            raise PeerError(
                f"{self.url} answers {Request(call.what).name} with a {answer.kind.name}: it is "
                "not a replay of this version"
            )
        return answer

    def _take_answer(self, answer: Reply | BatchMessage) -> None:
        if answer.sequence in self._waiting:  # else it is a repeat
            self._answers[answer.sequence] = answer

    def _call_again(self, welcome: Welcome, channel: int) -> None:
        if welcome.fresh:
            for sequence, call in self._waiting.items():
                if sequence not in self._answers:
                    self._link.link.send(SMALL, call)

    # For a batch of several replays (sharded.py): calls whose answers are taken later.

    def ask(self, what: Request, rows: int = 0, option: int = 0, **more: Any) -> Call:
        """Send a call; `answer` or `part` takes what comes. Raises the link's errors."""
        with self._link.lock:
            return self._send(what, rows, option, **more)

    def answer(self, call: Call, silence_s: float) -> Reply:
        """The answer to a call that asked for no batch.

        Raises as other calls do, and PeerTimeout if nothing at all came for `silence_s`.
        """
        with self._link.lock:
            return cast(Reply, self._await(call, silence_s))

    def part(self, call: Call, batch: Batch, first: int, silence_s: float) -> Draw:
        """Put the rows of a SAMPLE call into `batch`, from row `first` on. Raises as `answer`."""
        with self._link.lock:
            message: Any = self._await(call, silence_s)
            return self._unpack(message, batch, first)

    def has_come(self, call: Call) -> bool:
        """Whether a call is answered; receives what has come."""
        with self._link.lock:
            self._link.link.do_work()
            return call.sequence in self._answers

    def forget(self, call: Call) -> None:
        """Take no answer to a call."""
        with self._link.lock:
            self._forget(call)

    def abandon_extending(self) -> None:
        """Drop the rows of a failed `extend` that were not acknowledged."""
        with self._extending_lock:
            extending, self._extending = self._extending, None
        if extending is not None:
            extending[0].close()

    # The names of PrioritizedReplay.

    def writer_slots(
        self, num_envs: int, elsewhere: Callable[[ProcessLock], UrlLink] | None = None
    ) -> UrlSlots:
        """Slots of a new writer. elsewhere: as UrlSlots takes it."""
        return UrlSlots(self.open_writer(), self._layout, num_envs, elsewhere)

    def open_writer(self, lock: ProcessLock | None = None) -> UrlLink:
        """A link with one actor number."""
        return self._open(1, lock)

    def _writer_link(self, num_envs: int) -> UrlSlots:
        return self.writer_slots(num_envs)

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        with self._extending_lock:
            if self._extending is None:
                slots = self._writer_link(1)
                self._extending = slots, Extender(slots)
            slots, extender = self._extending
            with slots.lock:
                slots.sent.clear()
                extender.extend(rows)
                extender.close()
                slots.settle()
                sent = list(slots.sent)
            return self._keys_of(slots.number, sent, len(rows.magnitudes))

    def _keys_of(self, actor: int, sent: list[int], rows: int) -> NDArray[np.int64]:
        """Keys of the rows in these chunks, in order; -1 for a row whose chunk is evicted."""
        found = []
        for sequence in sent:
            reply: Reply = self._call(Request.KEYS, actor, sequence, incarnation=1)
            found.append(np.frombuffer(reply.body, "<i8"))
        keys = np.concatenate([np.empty(0, np.int64), *found])
        # The first chunks are evicted first.
        return np.concatenate([np.full(rows - len(keys), NO_KEY, np.int64), keys])

    def _holds(self, key: int) -> bool:
        return key != NO_KEY

    def _draw(self, batch: Batch, beta: float, method: Method, by_memory: bool) -> None:
        batch_size, option = batch.layout.batch_size, METHODS.index(method)
        with self._link.lock:
            while self._ahead and (self._ahead[0].rows, self._ahead[0].option) != (
                batch_size,
                option,
            ):
                self._forget(self._ahead.popleft())
            if not self._ahead:
                self._ahead.append(self._send(Request.SAMPLE, batch_size, option))
            call = self._ahead.popleft()
            while len(self._ahead) < self.prefetch:
                self._ahead.append(self._send(Request.SAMPLE, batch_size, option))
            try:
                message: Any = self._await(call)
            except BaseException:
                while self._ahead:
                    self._forget(self._ahead.popleft())
                raise
            draw = self._unpack(message, batch)
        draw.weigh(batch.weights, beta, by_memory=by_memory)

    def _unpack(self, message: BatchMessage, batch: Batch, first: int = 0) -> Draw:
        layout = batch.layout
        if layout not in self._unpackers:
            self._unpackers[layout] = BatchUnpacker(layout, self._form.layout)
        return self._unpackers[layout].unpack(message, batch, first)

    def _forget(self, call: Call) -> None:
        self._waiting.pop(call.sequence, None)
        self._answers.pop(call.sequence, None)

    def _ask(self, what: Request, rows: int = 0) -> Answer:
        reply: Reply = self._call(what, rows)
        return Answer(reply.a, reply.b, reply.text)

    def _send_update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> Answer:
        reply: Reply = self._call(Request.UPDATE, len(keys), keys=keys, priorities=priorities)
        return Answer(reply.a, reply.b)

    def close(self) -> None:
        """Disconnect. Added transitions stay. Writers work until they are closed."""
        self._link.close()
        if self._extending is not None:
            self._extending[0].close()
