"""The replay's faces over its socket: chunks in, batches and parameters out."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.batch_packing import BatchPacker, check_batch_size, packed_bytes
from zapex.chunk_store import ChunkStore, set_state_kernel
from zapex.errors import BadMessage
from zapex.experience_messages import Push
from zapex.message_header import Kind, Part, as_part
from zapex.messages import (
    BULK,
    SMALL,
    Ack,
    Error,
    Fault,
    Params,
    Publish,
    PublishAck,
    Pull,
    Sample,
    Update,
    UpdateAck,
    encode,
)
from zapex.replay import Draw
from zapex.roster import NOBODY
from zapex.schema import (
    ACTOR,
    COMMITTED,
    COUNT,
    GRANT_SEQUENCE,
    GRANTED,
    HOST,
    INCARNATION,
    SEQUENCE,
    STATE,
    STREAM,
)
from zapex.shm_mailbox import Mailbox
from zapex.transport import Life
from zapex.zmq_server import Session, ZmqServer

_MOST_REQUESTS = 64
_UNACKNOWLEDGED = 16  # chunks that may be committed before any of them is acknowledged
_FREE = 4  # batches' buffers that are kept


class ZmqExperienceSource:
    """Chunks from relays, each straight into a slot granted to its actor.

    A life, as the replay's intake counts it, is a host's: actors that a relay starts again play on
    with the same slots. An acknowledgement leaves after the slot's state is stored, one a relay for
    all that comes one behind another: not while the actor's next push is under way, as the last one
    said, unless a look brought nothing or `_UNACKNOWLEDGED` chunks have come.
    """

    def __init__(self, server: ZmqServer, store: ChunkStore) -> None:
        self._server, self._store = server, store
        self._roster = server.roster
        actors = range(self._roster.actors)
        self._lives = dict.fromkeys(actors, NOBODY)
        self._slots: list[deque[int]] = [deque() for _ in actors]
        self._committed: list[list[int]] = [[] for _ in actors]
        self._touched: set[int] = set()  # actors whose state goes to their relays
        self._awaited: set[int] = set()  # the same, but their next push follows at once
        self._answered = 0  # chunks, when the last acknowledgement left
        self.counts = dict.fromkeys(("chunks", "bytes", "doubled", "early", "uncredited"), 0)
        rows = store.header_rows
        self._next_grant = int(rows[:, GRANT_SEQUENCE].max(initial=-1)) + 1
        for slot in np.flatnonzero(rows[:, STATE] == GRANTED).tolist():
            actor = int(rows[slot, ACTOR])
            # What another host was granted, or what was half written, the intake takes back.
            if rows[slot, INCARNATION] == self._roster.host(actor) != NOBODY:
                self._slots[actor].append(slot)
        server.handlers[Kind.PUSH] = self._push
        server.credit_bytes = self._credit_bytes

    def ready(self) -> bool:
        """Something has come."""
        due = self._touched or self._awaited
        return self._server.ready() or bool(due) or any(self._committed)

    def lives(self) -> list[Life]:
        """Takes in what has come; actors whose host came, left or was replaced since."""
        self._server.do_work()
        changed = []
        for actor, known in self._lives.items():
            host = self._roster.host(actor)
            if host != known:
                self._lives[actor] = host
                if known != NOBODY:
                    self._slots[actor].clear()
                changed.append(Life(actor, host))
                self._touched.add(actor)
        if self.counts["chunks"] - self._answered >= _UNACKNOWLEDGED or not any(self._committed):
            self._touched |= self._awaited
        self._acknowledge()
        return changed

    def committed(self, actor: int) -> NDArray[np.int64]:
        """Slots filled since the last call, in order."""
        slots = np.array(self._committed[actor], np.int64)
        self._committed[actor].clear()
        return slots

    def has_room(self, actor: int, count: int) -> bool:
        """Credit is only a number."""
        return True

    def next_grant(self, actor: int) -> int:
        """Above all there are: a slot is given by what its header says, as soon as it says so."""
        return self._next_grant

    def grant(self, actor: int, incarnation: int, slots: NDArray[np.int64]) -> None:
        """These slots are the actor's next chunks'; its relay is told."""
        self._next_grant += len(slots)
        self._slots[actor].extend(slots.tolist())
        session = self._server.session_of(actor)
        if session is not None and actor not in self._awaited:
            self._server.send(session, SMALL, Ack(self._server.actor_states([actor])))

    def _is_settled(self, actor: int) -> bool:
        """The intake knows of the host that plays it now; the slots of one before are not its."""
        return self._lives[actor] == self._roster.host(actor)

    def _credit_bytes(self, actor: int) -> int:
        slots = len(self._slots[actor]) if self._is_settled(actor) else 0
        return slots * self._store.layout.body_bytes

    def _push(self, session: Session, push: Push) -> None:
        actor = push.actor
        if actor >= self._roster.actors:
            raise BadMessage(f"the run has {self._roster.actors} actors, got number {actor}")
        if not self._is_settled(actor) or self._lives[actor] != session.host:
            self._out_of_season(session, "uncredited", len(push.chunks))
            return
        incarnation, expected = self._roster.state(actor)
        (self._awaited if push.more else self._touched).add(actor)
        count, slots = len(push.chunks), self._slots[actor]
        # How many of these are known; what is left begins with exactly the next one, or is early.
        known = (expected if push.incarnation == incarnation else 0) - push.sequence
        if push.incarnation < incarnation or known >= count:
            self._out_of_season(session, "doubled", count)
            return
        if known < 0:
            self._out_of_season(session, "early", count)
            return
        self.counts["doubled"] += known
        taken = min(count - known, len(slots))
        self.counts["bytes"] += sum(part.nbytes for part in push.body)
        for number in range(known, known + taken):
            self._commit(slots.popleft(), push, number)
        if known + taken < count:
            self._out_of_season(session, "uncredited", count - known - taken)
        else:
            self._server.forgive(session, BULK)

    def _out_of_season(self, session: Session, what: str, chunks: int) -> None:
        self.counts[what] += chunks
        self._server.strike(session, BULK)

    def _commit(self, slot: int, push: Push, number: int) -> None:
        store, chunk, sequence = self._store, push.chunks[number], push.sequence + number
        push.write(number, store.layout, store.mem, store.body(slot))
        header = store.header_rows[slot]
        header[COUNT], header[STREAM], header[SEQUENCE] = chunk.rows, chunk.stream, sequence
        header[INCARNATION], header[HOST] = push.incarnation, self._roster.host(push.actor)
        # SYNC chunk-whole: the one store that commits; a server that dies before it took nothing
        set_state_kernel(store.headers, slot, COMMITTED)
        self._roster.advance(push.actor, push.incarnation, sequence + 1)
        self._committed[push.actor].append(slot)
        self.counts["chunks"] += 1

    def _acknowledge(self) -> None:
        touched, self._touched = self._touched, set()
        if not touched:
            return
        self._awaited -= touched
        self._answered = self.counts["chunks"]
        by_session: dict[Session, list[int]] = {}
        for actor in sorted(touched):
            session = self._server.session_of(actor)
            if session is not None:
                by_session.setdefault(session, []).append(actor)
        for session, actors in by_session.items():
            self._server.send(session, SMALL, Ack(self._server.actor_states(actors)))


class ZmqSampleSink:
    """Requests from learners and priorities back; batches are packed here, next to the data.

    Nothing is read from a slot after `answer` returns, so evicted slots wait for nobody. A learner
    that does not take what it has asked for gets no more before it does.
    """

    def __init__(self, server: ZmqServer, store: ChunkStore) -> None:
        form = server.form
        check_batch_size(form.batch_size, form.schema.stack)
        self._server, self._packer = server, BatchPacker(store)
        self._buffer_bytes = packed_bytes(form.schema, form.batch_size)
        self._buffers: list[tuple[NDArray[np.uint8], Any]] = []  # in libzmq's hands
        self._free: list[NDArray[np.uint8]] = []
        self._updates: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
        self.issued = 0
        self.counts = dict.fromkeys(("batches", "dropped", "updates", "foreign"), 0)
        server.handlers[Kind.SAMPLE] = self._sample
        server.handlers[Kind.UPDATE] = self._update

    @property
    def released(self) -> int:
        """Every answer is a copy."""
        return self.issued

    def ready(self) -> bool:
        """There are updates that were not taken yet."""
        return bool(self._updates)

    def requests(self) -> int:
        """Batches that are asked for by learners that can be sent one now."""
        room = self._server.room
        return sum(min(len(s.requests), room(s, BULK)) for s in self._server.sessions("learner"))

    def answer(self, draw: Draw) -> None:
        """Answer the oldest request; it stays where the batch cannot be sent."""
        learners, room = self._server.sessions("learner"), self._server.room
        session = next((s for s in learners if s.requests and room(s, BULK)), None)
        if session is None:  # it was lost since `requests` counted
            self.counts["dropped"] += 1
            return
        sequence = next(iter(session.requests))
        del session.requests[sequence]
        self.issued += 1
        buffer = self._take_buffer()
        message = self._packer.pack(
            draw.keys, draw.indices, draw.leaves, draw.total, draw.smallest, draw.count,
            epoch=self._server.roster.epoch, sequence=sequence, memory=buffer,
        )  # fmt: skip
        tracker = self._server.send(session, BULK, message)
        if tracker is None:
            session.requests[sequence] = None
            self._free.append(buffer)
            self.counts["dropped"] += 1
        else:
            self._buffers.append((buffer, tracker))
            self.counts["batches"] += 1

    def _take_buffer(self) -> NDArray[np.uint8]:
        held = []
        for buffer, tracker in self._buffers:
            if tracker.done:
                self._free.append(buffer)
            else:
                held.append((buffer, tracker))
        self._buffers = held
        # What one slow learner once needed is not kept for ever.
        del self._free[_FREE:]
        return self._free.pop() if self._free else np.empty(self._buffer_bytes, np.uint8)

    def updates(self) -> Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Priority updates since the last call."""
        updates, self._updates = self._updates, []
        return updates

    def _sample(self, session: Session, sample: Sample) -> None:
        if len(session.requests) >= _MOST_REQUESTS:
            text = f"at most {_MOST_REQUESTS} batches can be asked for ahead"
            self._server.send(session, SMALL, Error(Fault.BAD, text))
            return
        session.requests[sample.sequence] = None

    def _update(self, session: Session, update: Update) -> None:
        if update.sequence >= session.next_update:
            session.next_update = update.sequence + 1
            if update.epoch == self._server.roster.epoch:
                self._updates.append((update.keys.copy(), update.priorities.copy()))
                self.counts["updates"] += 1
            else:
                self.counts["foreign"] += len(update.keys)
        self._server.send(session, SMALL, UpdateAck(session.next_update, self.counts["foreign"]))


class ZmqParameters:
    """The newest parameters, kept in memory that outlives the server, for whoever asks.

    A version is encoded once, and the same bytes go to everybody. Those that came over the network
    are sent on from the frame that they came in.
    """

    def __init__(self, server: ZmqServer, mailbox: Mailbox) -> None:
        self._server, self._mailbox = server, mailbox
        self._version = 0
        self._parts: Sequence[Part] = ()  # of the message; never written again, libzmq may hold it
        self.counts = dict.fromkeys(("sent", "kept"), 0)
        server.handlers[Kind.PUBLISH] = self._publish
        server.handlers[Kind.PULL] = self._pull
        server.chores.append(self.do_work)

    def _publish(self, session: Session, publish: Publish) -> None:
        newer = publish.version > self._mailbox.version
        if newer:
            self._mailbox.publish(publish.version, np.frombuffer(publish.parameters, np.uint8))
        self._server.send(session, SMALL, PublishAck(0, self._mailbox.version))
        if newer:
            self._keep(publish.version, publish.parameters)
        self.do_work()

    def _pull(self, session: Session, pull: Pull) -> None:
        session.wants_newer_than = pull.value
        self.do_work()

    def _keep(self, version: int, parameters: Part) -> None:
        self._version = version
        self._parts = encode(Params(version, parameters))
        self.counts["kept"] += 1

    def do_work(self) -> int:
        """Send the newest to whoever waits for it; to how many."""
        newest, sent = self._mailbox.version, 0
        if newest != self._version:
            # Published in this host's memory. Before anybody asks: a pull then waits for no copy.
            value = np.empty(self._mailbox.value_bytes, np.uint8)
            version = self._mailbox.read_newer(self._version, value)
            if not version:
                return 0
            self._keep(version, as_part(value))
        for session in self._server.sessions("relay", "learner", "reader"):
            wanted = session.wants_newer_than
            if wanted is None or self._version <= wanted or not self._server.room(session, BULK):
                continue
            if self._server.send_parts(session, BULK, self._parts) is not None:
                session.wants_newer_than = None
                sent += 1
        self.counts["sent"] += sent
        return sent
