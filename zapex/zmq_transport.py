"""tcp:// and ipc://: chunks and parameters over a client's link to the replay.

The sender keeps a chunk until it is acknowledged. It sends the chunk again when the replay says
that a connection is new to it. So no chunk is lost when a connection breaks or the replay's process
dies. The replay recognises repeats by their sequence numbers. Batches: net/sample_source.py.
"""

import bisect
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import ACTOR, COUNT, INCARNATION, SEQUENCE, STREAM
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError
from zapex.host.roster import Routes
from zapex.net.link import ZmqLink
from zapex.wire import messages
from zapex.wire.experience import Push
from zapex.wire.messages import BULK, SMALL
from zapex.wire.protocol import Kind, as_buffer

GONE_S = 10.0  # of silence; longer than the process of a replay takes to start again
_LOOK_S = 1.0  # a relay that looks less often was busy, and cannot judge a silence
RESEND_S = 2.0  # without an ack for this long, all unacknowledged chunks are sent again


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
        """Whether libzmq has released the slot."""
        return all(tracker.done for tracker in self.trackers)


@dataclass
class _Queue:
    """One actor's chunks, in order; the first `sent` are sent and not yet acknowledged."""

    chunks: list[_Chunk] = field(default_factory=list)
    sent: int = 0
    credit_bytes: int = 0
    moved_s: float = 0.0


class ChunkSender:
    """Sends closed slots of some actors from memory to the replay, until they are acknowledged.

    An actor's chunks are sent in order of (incarnation, sequence). Chunks of a new incarnation are
    sent only when all earlier chunks are acknowledged. Small chunks that are ready share a message;
    no chunk waits for another one.

    Args:
        link: a relay's or a library client's link.
        store: where the slots are. Actor i in its headers is the i-th of the actor numbers that the
            replay gave this host.
        clock_s: monotonic, in seconds; for tests.

    Attributes:
        counts: chunks and bytes sent, acknowledged, and sent again.
        leaving: chunks that are acknowledged, and that libzmq may still read.
    """

    def __init__(
        self, link: ZmqLink, store: ChunkStore, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._store, self._clock_s = link, store, clock_s
        assert link.form is not None
        self._most = link.form.most_pushed
        self._queues: dict[int, _Queue] = {}
        self._numbers: list[int] = []
        self.leaving: list[_Chunk] = []
        self.counts = dict.fromkeys(("chunks", "bytes", "acknowledged", "again"), 0)
        link.register({Kind.ACK: self._ack}, on_welcome=self._welcome)

    @property
    def unacknowledged(self) -> int:
        """How many chunks the replay may not have yet."""
        return sum(len(queue.chunks) for queue in self._queues.values())

    def offer(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Take whole chunks to send; they stay in their slots until `take_freed` returns these."""
        for slot in np.asarray(slots, np.int64).tolist():
            incarnation, sequence = self._store.header_rows[slot, [INCARNATION, SEQUENCE]].tolist()
            self.offer_as(slot, incarnation, sequence)

    def offer_as(self, slot: int, incarnation: int, sequence: int) -> None:
        """As `offer`, with an incarnation and a sequence that are not those of the header."""
        header = self._store.header_rows[slot].tolist()
        chunk = _Chunk(incarnation, sequence, slot, header[STREAM], header[COUNT])
        bisect.insort(self._queues.setdefault(header[ACTOR], _Queue()).chunks, chunk)

    def credit(self, actor: int) -> int:
        """How many chunks of an actor may be sent and not acknowledged."""
        queue = self._queues.get(actor, _Queue())
        return queue.credit_bytes // self._store.layout.body_bytes

    def take_freed(self) -> list[int]:
        """Slots whose chunks are acknowledged and that libzmq no longer reads."""
        let_go = [chunk.let_go for chunk in self.leaving]  # read once: libzmq's thread changes it
        leaving = list(zip(self.leaving, let_go, strict=True))
        self.leaving = [chunk for chunk, gone in leaving if not gone]
        return [chunk.slot for chunk, gone in leaving if gone]

    def take_back(self) -> list[int]:
        """Slots that are not acknowledged, in order; this sender forgets them."""
        chunks = [chunk for queue in self._queues.values() for chunk in queue.chunks]
        self._queues.clear()
        return [chunk.slot for chunk in chunks]

    def do_work(self) -> int:
        """Send what the credit allows. Returns how many chunks."""
        done, now_s = 0, self._clock_s()
        for actor, queue in self._queues.items():
            if actor >= len(self._numbers) or not queue.chunks:
                continue
            if queue.sent and now_s - queue.moved_s > RESEND_S:
                self._again(queue)
            following = _Chunk(queue.chunks[0].incarnation + 1, 0, -1)
            end = min(self.credit(actor), bisect.bisect_left(queue.chunks, following))
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
        """Chunks from index `start` that go in one message, all before index `end`."""
        group = chunks[start : min(end, start + self._most)]
        follow = (c.sequence == group[0].sequence + i for i, c in enumerate(group))
        return list(itertools.compress(group, itertools.takewhile(bool, follow)))

    def _send(self, number: int, group: list[_Chunk], more: bool) -> bool:
        store, first = self._store, group[0]
        push = Push.of_chunks(
            store.layout,
            store.mem,
            [(store.body(c.slot), c.stream, c.rows) for c in group],
            actor=number,
            incarnation=first.incarnation,
            sequence=first.sequence,
            more=more,
        )
        tracker = self._link.send(BULK, push)
        if tracker is None:
            return False
        if not tracker.done:  # mostly it is done: the buffers were copied
            for chunk in group:
                chunk.trackers.append(tracker)
        self.counts["chunks"] += len(group)
        self.counts["bytes"] += sum(part.nbytes for part in push.body)
        return True

    def _again(self, queue: _Queue) -> None:
        self.counts["again"] += queue.sent
        queue.sent = 0

    def _welcome(self, welcome: messages.Welcome, channel: int) -> None:
        self._numbers = welcome.actors["actor"].tolist()  # others only at another memory
        # There is no order between the two connections. A welcome on BULK may be older than the
        # last ack on SMALL, which has told the credit since that connection's own welcome.
        self._states(
            welcome.actors, late=channel == BULK and welcome.incarnation == self._link.server
        )
        if channel == BULK and welcome.fresh:
            for queue in self._queues.values():
                self._again(queue)

    def _ack(self, ack: messages.Ack) -> None:
        self._states(ack.actors)

    def _states(self, states: NDArray[np.void], late: bool = False) -> None:
        for number, incarnation, sequence, credit_bytes in states.tolist():
            if number not in self._numbers:
                continue
            queue = self._queues.setdefault(self._numbers.index(number), _Queue())
            if not late:
                queue.credit_bytes = credit_bytes
            there = bisect.bisect_left(queue.chunks, _Chunk(incarnation, sequence, -1))
            if there:
                self.leaving.extend(queue.chunks[:there])
                del queue.chunks[:there]
                queue.sent = max(0, queue.sent - there)
                queue.moved_s = self._clock_s()
                if late:  # the credit was for chunks after the last ack, and these are some of them
                    spent = there * self._store.layout.body_bytes
                    queue.credit_bytes = max(0, queue.credit_bytes - spent)
                self.counts["acknowledged"] += there


def preferences(number: int, shards: int) -> list[int]:
    """The shards in the order in which an actor prefers them, by its number in the run.

    The first is in turn, so that few actors are spread evenly; then by rendezvous hashing, so that
    a lost shard's actors are spread over all others.
    """
    first = number % shards

    def score(shard: int) -> bytes:
        return hashlib.blake2b(f"{number} {shard}".encode(), digest_size=8).digest()

    return [first, *sorted((s for s in range(shards) if s != first), key=score)]


class ShardedChunkSender:
    """The ChunkLink of a relay with several replays: each actor has a shard, and the next as spare.

    Args:
        links: one to each shard; each asks for numbers of all of the host's actors.
        store: where the slots are.
        routes: of the host's actors.
        numbers: the actors' numbers in the run.
        tell: takes a line about actors that move.
        clock_s: monotonic, in seconds; for tests.

    Attributes:
        moved: chunks that were sent to another shard than before.
    """

    def __init__(
        self,
        links: Sequence[ZmqLink],
        store: ChunkStore,
        routes: Routes,
        numbers: Sequence[int],
        tell: Callable[[str], object],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links, self._store, self._tell, self._clock_s = links, store, tell, clock_s
        self._routes = routes
        self._preferred = [preferences(number, len(links)) for number in numbers]
        self._looked_s = clock_s()
        self._there_s = [self._looked_s] * len(links)  # a pause of this process moves it on
        self._gone = [False] * len(links)
        self.moved = 0
        # Before the senders' own: a shard with another memory gives other numbers.
        for shard, link in enumerate(links):
            link.register(on_welcome=partial(self._welcome, shard))
        self._senders = [ChunkSender(link, store, clock_s) for link in links]

    @property
    def counts(self) -> dict[str, int]:
        """As of ChunkSender, of all shards; chunks that moved count as sent again."""
        names = self._senders[0].counts
        total = {name: sum(s.counts[name] for s in self._senders) for name in names}
        return {**total, "again": total["again"] + self.moved}

    @property
    def unacknowledged(self) -> int:
        """How many chunks no shard may have yet."""
        return sum(sender.unacknowledged for sender in self._senders)

    def offer(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Take whole chunks to send; they stay in their slots until `take_freed` returns these."""
        for slot in np.asarray(slots, np.int64).tolist():
            header = self._store.header_rows[slot]
            actor, incarnation, sequence = header[[ACTOR, INCARNATION, SEQUENCE]].tolist()
            shard = self._shard_of(actor)
            wire = self._routes.place(actor, shard, incarnation, sequence)
            self._senders[shard].offer_as(slot, *wire)

    def _shard_of(self, actor: int) -> int:
        """The first shard in the actor's order that is there, or its first if none is."""
        preferred = self._preferred[actor]
        return next((shard for shard in preferred if not self._gone[shard]), preferred[0])

    def take_freed(self) -> list[int]:
        """Slots whose chunks are acknowledged and that libzmq no longer reads."""
        return [slot for sender in self._senders for slot in sender.take_freed()]

    def do_work(self) -> int:
        """Receive, move what is at a shard that is gone, send. Returns how many chunks."""
        now_s = self._clock_s()
        pause_s, self._looked_s = now_s - self._looked_s, now_s
        for shard, link in enumerate(self._links):
            link.do_work()
            if pause_s > _LOOK_S:
                self._there_s[shard] += pause_s
            if link.is_open and link.silent_s < GONE_S:
                self._there_s[shard] = max(self._there_s[shard], now_s - link.silent_s)
            gone = now_s - self._there_s[shard] > GONE_S
            if gone != self._gone[shard]:
                self._gone[shard] = gone
                self._leave(shard) if gone else self._come_back(shard)
        return sum(sender.do_work() for sender in self._senders)

    def _leave(self, shard: int) -> None:
        if all(self._gone):
            return  # there is no other: wait here
        slots = self._senders[shard].take_back()
        self.moved += len(slots)
        self._tell(
            f"shard {shard} at {self._links[shard].url} has not answered for {GONE_S:.0f} s: its "
            f"actors go to the others, with {len(slots)} chunks that it had not acknowledged"
        )
        self.offer(slots)

    def _come_back(self, shard: int) -> None:
        self._tell(f"shard {shard} answers again: its actors go back to it")
        for other, gone in enumerate(self._gone):
            if gone and self._senders[other].unacknowledged:  # from when all were gone
                self._leave(other)

    def _welcome(self, shard: int, welcome: messages.Welcome, channel: int) -> None:
        if self._routes.is_new_memory(shard, welcome.epoch):
            # What the former memory had is gone; what it had not is sent to this one.
            slots = self._senders[shard].take_back()
            self.offer(slots)


class ZmqParameterSource:
    """Gets the newest parameters; asks for newer ones after the last were taken."""

    def __init__(self, link: ZmqLink) -> None:
        self._link = link
        self._newest = messages.Params(0, memoryview(b""))
        self._taken = 0
        self._asked = False
        link.register(
            {Kind.PARAMS: self._params}, on_welcome=self._welcome, on_lost=self._ask_again
        )

    @property
    def version(self) -> int:
        """The newest version that has arrived; 0 is none."""
        self._look()
        return self._newest.version

    def newer_than(self, version: int, out: NDArray[np.uint8]) -> int:
        """Copy the newest into `out` if it is newer than `version`. Returns its version, or 0."""
        self._look()
        newest = self._newest
        if newest.version <= max(0, version):
            self._taken = newest.version  # the caller has it, perhaps from before this link
            return 0
        out[:] = np.frombuffer(newest.parameters, np.uint8)
        self._taken = newest.version
        return newest.version

    def _look(self) -> None:
        self._link.do_work()
        have = self._newest.version
        if not self._asked and self._taken == have:
            self._asked = self._link.send(SMALL, messages.Pull(0, have)) is not None

    def _ask_again(self) -> None:
        self._asked = False

    def _params(self, params: messages.Params) -> None:
        self._asked = False
        if params.version > self._newest.version:
            self._newest = params

    def _welcome(self, welcome: messages.Welcome, channel: int) -> None:
        if welcome.fresh:
            self._asked = False


class ZmqParameterSink:
    """Publishes a learner's parameters: one version in flight, the newest kept until it arrives."""

    def __init__(self, link: ZmqLink) -> None:
        self._link = link
        self._newest = messages.Publish(0, memoryview(b""))
        self._acknowledged = 0
        self._flying = 0  # the version sent and not acknowledged; 0: none
        self._epoch = 0
        link.register({Kind.PUBLISH_ACK: self._publish_ack}, on_welcome=self._welcome)

    @property
    def version(self) -> int:
        """The largest version that the replay has or that is being sent to it; 0 is none."""
        self._link.do_work()
        return self._largest

    @property
    def _largest(self) -> int:
        return max(self._acknowledged, self._newest.version)

    @property
    def under_way(self) -> bool:
        """Whether the replay may not have the newest version yet."""
        return self._newest.version > self._acknowledged

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        """Make these parameters the newest. An older version that was not sent yet is dropped."""
        if version <= self._largest:
            raise ConfigError(f"a version must be above the newest, {self._largest}, got {version}")
        self._newest = messages.Publish(version, as_buffer(parameters.copy()))
        self._send()

    def _send(self) -> None:
        if self.under_way and not self._flying:
            sent = self._link.send(BULK, self._newest) is not None
            self._flying = self._newest.version if sent else 0

    def _arrived(self, version: int) -> None:
        self._acknowledged = max(self._acknowledged, version)
        if self._flying <= self._acknowledged:
            self._flying = 0
        self._send()

    def _publish_ack(self, ack: messages.PublishAck) -> None:
        self._arrived(ack.value)

    def _welcome(self, welcome: messages.Welcome, channel: int) -> None:
        if welcome.epoch != self._epoch:
            # Another memory: the parameters of the former one are lost, and actors wait for them.
            self._epoch, self._acknowledged = welcome.epoch, 0
        if welcome.fresh and channel == BULK:
            self._flying = 0
        self._arrived(welcome.params_version)
