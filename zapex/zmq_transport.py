"""tcp:// and ipc://: chunks and parameters over a client's link to the replay.

What is under way survives a lost connection and a replay's new process: a chunk is kept until it
is acknowledged, and sent again when the replay says that a connection is new to it; it is told
apart there by its numbers. Batches: zmq_samples.py.
"""

import bisect
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunk_store import ChunkStore
from zapex.errors import ConfigError, Fenced
from zapex.experience_messages import Push
from zapex.message_header import Kind, as_part
from zapex.messages import (
    BULK,
    SMALL,
    Ack,
    Params,
    Publish,
    PublishAck,
    Pull,
    Welcome,
)
from zapex.schema import ACTOR, COUNT, INCARNATION, SEQUENCE, STREAM
from zapex.zmq_client import ZmqLink

RESEND_S = 2.0  # nothing was acknowledged for so long: all of it goes again


@dataclass(order=True)
class _Chunk:
    incarnation: int
    sequence: int
    slot: int = field(compare=False)
    stream: int = field(default=0, compare=False)
    rows: int = field(default=0, compare=False)
    trackers: list[Any] = field(default_factory=list, compare=False)

    @property
    def let_go(self) -> bool:
        """libzmq reads the slot no more."""
        return all(tracker.done for tracker in self.trackers)


@dataclass
class _Queue:
    """One actor's chunks, in order; the first `sent` are under way."""

    chunks: list[_Chunk] = field(default_factory=list)
    sent: int = 0
    credit_bytes: int = 0
    moved_s: float = 0.0


class ChunkSender:
    """Closed slots of some actors, straight from memory to the replay, until it has them.

    An actor's chunks go in order of (incarnation, sequence), those of a new incarnation only when
    all before are acknowledged. Small ones that are there go together; none waits for another.
    store: where the slots lie. Actor i of the store (its slots' headers) is the i-th of the numbers
    that the replay gave this host.
    """

    def __init__(
        self, link: ZmqLink, store: ChunkStore, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._store, self._clock_s = link, store, clock_s
        assert link.form is not None
        self._most = link.form.most_pushed
        self._queues: dict[int, _Queue] = {}
        self._numbers: list[int] = []
        self._leaving: deque[_Chunk] = deque()
        self.counts = dict.fromkeys(("chunks", "bytes", "acknowledged", "again"), 0)
        link.handlers[Kind.ACK] = self._ack
        link.on_welcome.append(self._welcome)

    @property
    def unacknowledged(self) -> int:
        """Chunks that the replay may not have yet."""
        return sum(len(queue.chunks) for queue in self._queues.values())

    def offer(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Whole chunks; they stay in their slots until `take_freed` names these."""
        for slot in np.asarray(slots, np.int64).tolist():
            header = self._store.header_rows[slot].tolist()
            chunk = _Chunk(
                header[INCARNATION], header[SEQUENCE], slot, header[STREAM], header[COUNT]
            )
            bisect.insort(self._queues.setdefault(header[ACTOR], _Queue()).chunks, chunk)

    def take_freed(self) -> list[int]:
        """Slots whose chunks are acknowledged and that libzmq has let go of."""
        if not self._leaving:
            return []
        freed = [chunk.slot for chunk in self._leaving if chunk.let_go]
        self._leaving = deque(chunk for chunk in self._leaving if not chunk.let_go)
        return freed

    def do_work(self) -> int:
        """Send what credit there is for; how many chunks."""
        done, now_s = 0, self._clock_s()
        for actor, queue in self._queues.items():
            if actor >= len(self._numbers) or not queue.chunks:
                continue
            if queue.sent and now_s - queue.moved_s > RESEND_S:
                self._again(queue)
            credit = queue.credit_bytes // self._store.layout.body_bytes
            following = _Chunk(queue.chunks[0].incarnation + 1, 0, -1)
            end = min(credit, bisect.bisect_left(queue.chunks, following))
            while queue.sent < end:
                group = self._group(queue.chunks, queue.sent, end)
                more = queue.sent + len(group) < end
                if not self._send(self._numbers[actor], group, more):
                    break
                if queue.sent == 0:
                    queue.moved_s = now_s
                queue.sent += len(group)
                done += len(group)
        return done

    def _group(self, chunks: list[_Chunk], start: int, end: int) -> list[_Chunk]:
        """Chunks from number `start` on that go in one message, all in front of number `end`."""
        group = chunks[start : min(end, start + self._most)]
        follow = (c.sequence == group[0].sequence + i for i, c in enumerate(group))
        return list(itertools.compress(group, itertools.takewhile(bool, follow)))

    def _send(self, number: int, group: list[_Chunk], more: bool) -> bool:
        store, first = self._store, group[0]
        push = Push.of_chunks(
            store.layout, store.mem, [(store.body(c.slot), c.stream, c.rows) for c in group],
            actor=number, incarnation=first.incarnation, sequence=first.sequence, more=more,
        )  # fmt: skip
        tracker = self._link.send(BULK, push)
        if tracker is None:
            return False
        if not tracker.done:  # copied, mostly
            for chunk in group:
                chunk.trackers.append(tracker)
        self.counts["chunks"] += len(group)
        self.counts["bytes"] += sum(part.nbytes for part in push.body)
        return True

    def _again(self, queue: _Queue) -> None:
        self.counts["again"] += queue.sent
        queue.sent = 0

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        numbers = welcome.actors["actor"].tolist()
        if self._numbers and numbers != self._numbers:
            raise Fenced(f"actors {self._numbers} of this host were given to another meanwhile")
        self._numbers = numbers
        self._states(welcome.actors)
        if channel == BULK and welcome.fresh:
            for queue in self._queues.values():
                self._again(queue)

    def _ack(self, ack: Ack) -> None:
        self._states(ack.actors)

    def _states(self, states: NDArray[np.void]) -> None:
        for number, incarnation, sequence, credit_bytes in states.tolist():
            if number not in self._numbers:
                continue
            queue = self._queues.setdefault(self._numbers.index(number), _Queue())
            queue.credit_bytes = credit_bytes
            there = bisect.bisect_left(queue.chunks, _Chunk(incarnation, sequence, -1))
            if there:
                self._leaving.extend(queue.chunks[:there])
                del queue.chunks[:there]
                queue.sent = max(0, queue.sent - there)
                queue.moved_s = self._clock_s()
                self.counts["acknowledged"] += there


class ZmqExperienceSink:
    """An actor without a relay: chunks are built in private slots and sent from there."""

    def __init__(
        self, link: ZmqLink, store: ChunkStore, *, streams: int, slots: Sequence[int]
    ) -> None:
        """slots: of `store`, this actor's own; at least two for each of its streams."""
        if len(slots) < 2 * streams:
            raise ConfigError(f"{streams} streams need {2 * streams} slots, got {len(slots)}")
        self.store = store
        self._link, self._streams = link, streams
        self._sender = ChunkSender(link, store)
        self._free = deque(slots)

    @property
    def unacknowledged(self) -> int:
        """Chunks that the replay may not have yet."""
        return self._sender.unacknowledged

    def ready(self) -> bool:
        """There may be slots to claim."""
        self._look()
        return len(self._free) >= self._streams

    def try_claim(self) -> NDArray[np.int64] | None:
        """Free slots, one for each stream; None while too few chunks are acknowledged."""
        self._look()
        if len(self._free) < self._streams:
            return None
        return np.array([self._free.popleft() for _ in range(self._streams)], np.int64)

    def commit(self, slots: NDArray[np.int64]) -> None:
        """Hand over chunks that are whole, in their order."""
        self._sender.offer(slots)
        self._look()

    def _look(self) -> None:
        self._link.do_work()
        self._sender.do_work()
        self._free.extend(self._sender.take_freed())


class ZmqParameterSource:
    """The newest parameters, asked for once the last ones were taken."""

    def __init__(self, link: ZmqLink) -> None:
        self._link = link
        self._newest: Params | None = None
        self._taken = 0
        self._asked = False
        link.handlers[Kind.PARAMS] = self._params
        link.on_bad.append(self._ask_again)
        link.on_welcome.append(self._welcome)

    @property
    def version(self) -> int:
        """The newest version that has come; 0: none."""
        self._look()
        return self._newest.version if self._newest is not None else 0

    def newer_than(self, version: int, out: NDArray[np.uint8]) -> int:
        """Copy the newest into `out` if it is newer than `version`; its version, or 0."""
        self._look()
        newest = self._newest
        if newest is None or newest.version <= version:
            return 0
        out[:] = np.frombuffer(newest.parameters, np.uint8)
        self._taken = newest.version
        return newest.version

    def _look(self) -> None:
        self._link.do_work()
        have = self._newest.version if self._newest is not None else 0
        if not self._asked and self._taken == have:
            self._asked = self._link.send(SMALL, Pull(0, have)) is not None

    def _ask_again(self) -> None:
        self._asked = False

    def _params(self, params: Params) -> None:
        self._asked = False
        if self._newest is None or params.version > self._newest.version:
            self._newest = params

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        if welcome.fresh:
            self._asked = False


class ZmqParameterSink:
    """A learner's parameters: one version under way at a time, the newest kept until it arrives."""

    def __init__(self, link: ZmqLink) -> None:
        self._link = link
        self._newest: Publish | None = None
        self._acknowledged = 0
        self._flying = 0  # the version under way; 0: none
        self._epoch = 0
        link.handlers[Kind.PUBLISH_ACK] = self._publish_ack
        link.on_welcome.append(self._welcome)

    @property
    def version(self) -> int:
        """The largest version that the replay has seen, or that is on its way there; 0: none."""
        self._link.do_work()
        return max(self._acknowledged, self._newest.version if self._newest is not None else 0)

    @property
    def under_way(self) -> bool:
        """The replay may not have the newest yet."""
        return self._newest is not None and self._newest.version > self._acknowledged

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        """Make these the newest. A version before them that could not go yet never goes."""
        if version <= self.version:
            raise ConfigError(f"a version must be above the newest, {self.version}, got {version}")
        self._newest = Publish(version, as_part(parameters.copy()))
        self._send()

    def _send(self) -> None:
        newest = self._newest
        if newest is not None and newest.version > self._acknowledged and not self._flying:
            sent = self._link.send(BULK, newest) is not None
            self._flying = newest.version if sent else 0

    def _arrived(self, version: int) -> None:
        self._acknowledged = max(self._acknowledged, version)
        if self._flying <= self._acknowledged:
            self._flying = 0
        self._send()

    def _publish_ack(self, ack: PublishAck) -> None:
        self._arrived(ack.value)

    def _welcome(self, welcome: Welcome, channel: int) -> None:
        if welcome.epoch != self._epoch:
            # Another memory: what the one before had is gone, and actors wait for it.
            self._epoch, self._acknowledged = welcome.epoch, 0
        if welcome.fresh and channel == BULK:
            self._flying = 0
        self._arrived(welcome.params_version)
