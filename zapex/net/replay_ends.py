"""The replay's ends of its links: chunks in, batches and parameters out."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import (
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
from zapex.chunks.store import ChunkStore, set_state_kernel
from zapex.errors import BadMessage, ZapexError, tell
from zapex.host.roster import NO_HOST
from zapex.machine.mailbox import Mailbox
from zapex.net.server import End, LinkServer
from zapex.net.sessions import Session
from zapex.replay.draw import Draw
from zapex.transport import Incarnation
from zapex.wire import messages
from zapex.wire.batches import BatchPacker, check_batch_size, packed_bytes
from zapex.wire.compression import check_compresses
from zapex.wire.experience import Push, claimed_push
from zapex.wire.messages import BULK, SMALL
from zapex.wire.protocol import MAY_SEND, Buffer, Kind, as_buffer

_UNACKNOWLEDGED = 16  # chunks that may be committed before an ack is sent
_MOST_REQUESTS = 64
_FREE = 4  # free buffers of batches that are kept


class _SlotMemory:
    """Slots as the memory that pushes are received into, where the transport can do that.

    A slot is in use here while a buffer of it exists: a part of a push that is being received, or
    that waits to be handled. So a push that is cut, refused or doubled leaves its slot free as soon
    as its buffers are gone. No header of a slot changes here; only the commit makes a chunk count.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store, layout = store, store.layout
        sections = [layout.sections[name] for name in layout.schema.obs_columns]
        self._columns = [(section.offset, section.nbytes) for section in sections]
        # By slot, the array of its body. Every buffer that `_part` gives keeps it alive. A plain
        # dictionary, as a WeakValueDictionary is slow to ask; what has ended leaves it.
        self._used: dict[int, ref[NDArray[np.uint8]]] = {}
        # By the id of such an array, its slot. While it exists, no other object has its id.
        self._slots: dict[int, int] = {}
        self._peers: dict[int, bytes] = {}

    def unused(self, slots: Iterable[int]) -> list[int]:
        """Those of the slots that nothing is received into."""
        return [slot for slot in slots if slot not in self._used]

    def peers(self, slots: Iterable[int]) -> set[bytes]:
        """The peers whose pushes are in these slots."""
        return {self._peers[slot] for slot in slots if slot in self._used}

    def begin(self, peer: bytes, slot: int, nbytes: int) -> Buffer | None:
        """Memory for the first observation column of a peer's push; None: it does not fit."""
        start = self._store.body(slot)
        body = self._store.mem[start : start + self._store.layout.body_bytes]
        used, slots, key = self._used, self._slots, id(body)
        assert slot not in used

        def end(_: ref[NDArray[np.uint8]]) -> None:
            del used[slot], slots[key]

        used[slot], slots[key], self._peers[slot] = ref(body, end), slot, peer
        return self._part(body, 0, nbytes)

    def continue_with(self, parts: Sequence[Buffer], nbytes: int) -> Buffer | None:
        """Memory for the next column, in the slot of these parts; None: they are in no slot."""
        body = parts[0].obj
        if id(body) not in self._slots:
            return None
        assert isinstance(body, np.ndarray)
        return self._part(body, len(parts), nbytes)

    def _part(self, body: NDArray[np.uint8], column: int, nbytes: int) -> Buffer | None:
        if column >= len(self._columns):
            return None
        offset, most = self._columns[column]
        return body.data[offset : offset + nbytes] if nbytes <= most else None

    def slot_of(self, part: Buffer, slots: Collection[int]) -> int | None:
        """The slot whose body this is a part of; None: it is none of these slots."""
        slot = self._slots.get(id(part.obj))
        return slot if slot in slots else None


class ZmqExperienceSource(End):
    """Chunks from relays, each into a slot granted to its actor.

    A transport that can does so while it receives them (`_place`); else they are copied.
    Here the intake's incarnation of an actor is the number of its host. So an actor that a relay
    starts again continues with the same slots. Acks are sent after the commit, one per relay and
    group of pushes: pushes that say `more` share one ack with the next. It is sent earlier when no
    other chunk has come, or when `_UNACKNOWLEDGED` chunks wait for it.

    ends: the other ends of the same server, which get their messages in `take_in`.
    """

    def __init__(self, server: LinkServer, store: ChunkStore, ends: Sequence[End] = ()) -> None:
        self._server, self._store, self._ends = server, store, ends
        self.handlers = {Kind.PUSH: self._push}
        self._all_handlers = {k: h for end in (self, *ends) for k, h in end.handlers.items()}
        self._roster = server.roster
        self._memory = _SlotMemory(store)
        actors = range(self._roster.actors)
        self._incarnations = dict.fromkeys(actors, NO_HOST)
        self._slots: list[deque[int]] = [deque() for _ in actors]
        self._committed: list[list[int]] = [[] for _ in actors]
        self._touched: set[int] = set()  # actors whose state must be sent to their relays
        self._awaited: set[int] = set()  # the same, but their next push is announced (`more`)
        self._answered = 0  # chunks, when the last ack was sent
        self.counts = dict.fromkeys(
            ("chunks", "bytes", "doubled", "early", "uncredited", "refused"), 0
        )
        rows = store.header_rows
        self._next_grant = int(rows[:, GRANT_SEQUENCE].max(initial=-1)) + 1
        for slot in np.flatnonzero(rows[:, STATE] == GRANTED).tolist():
            actor = int(rows[slot, ACTOR])
            # The intake takes back slots that another host was granted, or that are half written.
            if rows[slot, INCARNATION] == self._roster.host(actor) != NO_HOST:
                self._slots[actor].append(slot)
        server.listener.place = self._place

    def ready(self) -> bool:
        """Whether a message, a commit or an ack waits to be handled."""
        due = self._touched or self._awaited
        return self._server.listener.ready() or bool(due) or any(self._committed)

    def take_in(self) -> list[Incarnation]:
        """Receive messages. Returns the actors whose host came, left or was replaced since."""
        self._server.do_work(self._all_handlers, self._states)
        for end in self._ends:
            end.do_work()
        changed = []
        for actor, known in self._incarnations.items():
            host = self._roster.host(actor)
            if host != known:
                self._incarnations[actor] = host
                # No peer may write into slots that the intake takes back.
                for peer in self._memory.peers(self._slots[actor]):
                    self._server.guard.hang_up(peer)
                if known != NO_HOST:
                    self._slots[actor].clear()
                changed.append(Incarnation(actor, host))
                self._touched.add(actor)
        if self.counts["chunks"] - self._answered >= _UNACKNOWLEDGED or not any(self._committed):
            self._touched |= self._awaited
        self._acknowledge()
        return changed

    def committers(self) -> list[int]:
        """Actors with slots filled since the last `committed`."""
        return [actor for actor, slots in enumerate(self._committed) if slots]

    def committed(self, actor: int) -> NDArray[np.int64]:
        """Slots filled since the last call, in order."""
        slots = np.array(self._committed[actor], np.int64)
        self._committed[actor].clear()
        return slots

    def has_room(self, actor: int, count: int) -> bool:
        """True: credit is only a number."""
        return True

    def next_grant(self, actor: int) -> int:
        """Above all others: a slot counts as granted as soon as its header says so."""
        return self._next_grant

    def grant(self, actor: int, incarnation: int, slots: NDArray[np.int64]) -> None:
        """Use these slots for the actor's next chunks, and tell its relay."""
        self._next_grant += len(slots)
        self._slots[actor].extend(slots.tolist())
        session = self._server.sessions.of_actor(actor)
        if session is not None and actor not in self._awaited:
            self._server.send(session, SMALL, messages.Ack(self._states([actor])))

    def _is_settled(self, actor: int) -> bool:
        """Whether the intake knows the actor's host; slots of a former host are not valid."""
        return self._incarnations[actor] == self._roster.host(actor)

    def _states(self, actors: Iterable[int]) -> NDArray[np.void]:
        """ACTOR_STATE records as they are now."""
        states = [(a, *self._roster.state(a), self.credit_bytes(a)) for a in actors]
        return np.array(states, messages.ACTOR_STATE)

    def credit_bytes(self, actor: int) -> int:
        """How much an actor may push now."""
        slots = len(self._slots[actor]) if self._is_settled(actor) else 0
        return slots * self._store.layout.body_bytes

    def _place(self, peer: bytes, earlier: Sequence[Buffer], nbytes: int) -> Buffer | None:
        """Where a frame of the push that is expected next belongs; None: it is another message.

        Whatever a header claims, a slot that its sender was granted is the only memory it gets.
        All checks of `_push` follow when the message is whole.
        """
        if len(earlier) != 1:
            return self._memory.continue_with(earlier[1:], nbytes) if earlier else None
        session = self._server.sessions.known(peer)
        claimed = claimed_push(earlier[0], self._server.form)
        if session is None or claimed is None or Kind.PUSH not in MAY_SEND[session.role]:
            return None
        actor, incarnation, sequence = claimed
        if actor >= self._roster.actors or self._incarnations[actor] != session.host:
            return None
        if not self._is_settled(actor):
            return None
        slots, (known, expected) = self._slots[actor], self._roster.state(actor)
        unused = self._memory.unused(slots)
        # Others of the actor that wait in slots come before it.
        before = len(slots) - len(unused) + (expected if incarnation == known else 0)
        if not unused or incarnation < known or sequence != before:
            return None
        return self._memory.begin(peer, unused[0], nbytes)

    def _push(self, session: Session, push: Push) -> None:
        actor = push.actor
        if actor >= self._roster.actors:
            raise BadMessage(f"the run has {self._roster.actors} actors, got number {actor}")
        if not self._is_settled(actor) or self._incarnations[actor] != session.host:
            self.counts["uncredited"] += len(push.chunks)
            return
        incarnation, expected = self._roster.state(actor)
        (self._awaited if push.more else self._touched).add(actor)
        count, slots = len(push.chunks), self._slots[actor]
        # How many of these are known. The rest begins with the next expected one, or is early.
        known = (expected if push.incarnation == incarnation else 0) - push.sequence
        if push.incarnation < incarnation or known >= count:
            self.counts["doubled"] += count
            return
        if known < 0:
            self.counts["early"] += count
            return
        self.counts["doubled"] += known
        placed = self._memory.slot_of(push.body[0], slots)
        unused = self._memory.unused(slots) if placed is None else [placed]
        taken = min(count - known, len(unused))
        self.counts["bytes"] += sum(part.nbytes for part in push.body)
        for number, slot in zip(range(known, known + taken), unused, strict=False):
            if self._commit(session, slot, push, number, frames=placed is None):
                slots.remove(slot)
        if known + taken < count:
            self.counts["uncredited"] += count - known - taken

    def _commit(
        self, session: Session, slot: int, push: Push, number: int, *, frames: bool
    ) -> bool:
        """Commit a chunk to a slot; False: no run produces its values, so it is only acknowledged.

        frames: whether they must be copied.
        """
        store, chunk, sequence = self._store, push.chunks[number], push.sequence + number
        push.write(number, store.layout, store.mem, store.body(slot), frames=frames)
        breach = self._server.form.limits.breach(store, slot, chunk.rows, chunk.frames)
        if breach:
            self._roster.advance(push.actor, push.incarnation, sequence + 1)
            self.counts["refused"] += 1
            self._server.refuse(session, f"actor {push.actor}'s chunk with {breach}")
            return False
        header = store.header_rows[slot]
        header[COUNT], header[STREAM], header[SEQUENCE] = chunk.rows, chunk.stream, sequence
        header[INCARNATION], header[HOST] = push.incarnation, self._roster.host(push.actor)
        # STEP push-written
        # SYNC chunk-whole: this one store commits; before it the chunk does not count
        set_state_kernel(store.headers, slot, COMMITTED)
        # STEP push-committed
        self._roster.advance(push.actor, push.incarnation, sequence + 1)
        self._committed[push.actor].append(slot)
        self.counts["chunks"] += 1
        return True

    def _acknowledge(self) -> None:
        touched, self._touched = self._touched, set()
        if not touched:
            return
        self._awaited -= touched
        self._answered = self.counts["chunks"]
        by_session: dict[Session, list[int]] = {}
        for actor in sorted(touched):
            session = self._server.sessions.of_actor(actor)
            if session is not None:
                by_session.setdefault(session, []).append(actor)
        for session, actors in by_session.items():
            self._server.send(session, SMALL, messages.Ack(self._states(actors)))


class ZmqSampleSink(End):
    """Requests from learners and priorities back; batches are packed here, next to the data.

    No slot is read after `answer` returns, so evicted slots are free at once. A learner that does
    not receive its batches gets no more batches until it does. So does a library's client.
    """

    def __init__(
        self,
        server: LinkServer,
        store: ChunkStore,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        form = server.form
        check_batch_size(form.batch_size, form.schema.stack)
        self._server, self._packer, self._clock_s = server, BatchPacker(store), clock_s
        self._buffers: list[tuple[NDArray[np.uint8], Any]] = []  # buffers that libzmq holds
        self._free: list[NDArray[np.uint8]] = []
        self._updates: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
        self.issued = 0
        self.counts = dict.fromkeys(("batches", "dropped", "updates", "foreign"), 0)
        self.handlers = {Kind.SAMPLE: self._sample, Kind.UPDATE: self._update}

    @property
    def released(self) -> int:
        """All answers: each one is a copy."""
        return self.issued

    def ready(self) -> bool:
        """Whether there are updates that were not taken yet."""
        return bool(self._updates)

    def requests(self) -> int:
        """How many batches are requested by learners that can receive one now."""
        return sum(min(len(s.requests), self._server.room(s, BULK)) for s in self._asking())

    @property
    def waits(self) -> bool:
        """Whether a request waits, for a client that can receive a batch now or not."""
        return any(self._asking())

    def _asking(self) -> list[Session]:
        sessions = self._server.sessions.of_roles("learner", "client")
        return [session for session in sessions if session.requests]

    def rows(self) -> int:
        """The rows of the oldest request of a learner that can receive a batch now."""
        oldest = self.oldest()
        return oldest.rows if oldest else self._server.form.batch_size

    def oldest(self) -> messages.Sample | None:
        """The oldest request of those clients that can receive a batch now."""
        session = self._next()
        return session.oldest if session else None

    def _next(self) -> Session | None:
        there = (s for s in self._asking() if self._server.room(s, BULK))
        return min(there, key=lambda session: session.oldest.came_s, default=None)

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

    def refuse(self, error: ZapexError) -> None:
        """Answer the oldest request with an error."""
        session = self._next()
        if session is not None:
            request = session.requests.pop(session.oldest.sequence)
            answer = messages.NoBatch(request.sequence, tell(error), str(error))
            self._server.send(session, SMALL, answer)

    def _send(
        self,
        session: Session,
        request: messages.Sample,
        draw: Draw,
        first: int,
        buffer: NDArray[np.uint8],
    ) -> bool:
        message = self._packer.pack(
            draw,
            epoch=self._server.roster.epoch,
            sequence=request.sequence,
            memory=buffer,
            first=first,
        )
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
        # Buffers that a slow learner needed once are not kept forever.
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
        session.requests.setdefault(sample.sequence, replace(sample, came_s=self._clock_s()))

    def _update(self, session: Session, update: messages.Update) -> None:
        if 0 < session.next_update < update.sequence:
            return  # those between were lost with a connection: all come again after the welcome
        if update.sequence >= session.next_update:
            session.next_update = update.sequence + 1
            if update.epoch == self._server.roster.epoch:
                self._updates.append((update.keys.copy(), update.priorities.copy()))
                self.counts["updates"] += 1
            else:
                self.counts["foreign"] += len(update.keys)
        ack = messages.UpdateAck(session.next_update, self.counts["foreign"])
        self._server.send(session, SMALL, ack)


class ZmqParameters(End):
    """The newest parameters, in memory that outlives the server, for all clients that ask.

    A version is encoded once, and all clients get the same bytes. Parameters that came over the
    network are sent from the frame in which they came.
    """

    def __init__(self, server: LinkServer, mailbox: Mailbox) -> None:
        self._server, self._mailbox = server, mailbox
        self._version = 0
        self._parts: Sequence[Buffer] = ()  # never written to: libzmq may hold them
        self._is_due = False  # whether a client may wait for this version
        self.counts = dict.fromkeys(("sent", "kept"), 0)
        self.handlers = {Kind.PUBLISH: self._publish, Kind.PULL: self._pull}

    def _publish(self, session: Session, publish: messages.Publish) -> None:
        newer = publish.version > self._mailbox.version
        if newer:
            self._mailbox.publish(publish.version, np.frombuffer(publish.parameters, np.uint8))
        self._server.send(session, SMALL, messages.PublishAck(0, self._mailbox.version))
        if newer:
            self._keep(publish.version, publish.parameters)
        self.do_work()

    def _pull(self, session: Session, pull: messages.Pull) -> None:
        session.wants_newer_than = pull.value
        self._is_due = True
        self.do_work()

    def _keep(self, version: int, parameters: Buffer) -> None:
        self._version, self._is_due = version, True
        self._parts = messages.encode(messages.Params(version, parameters))
        self.counts["kept"] += 1

    def do_work(self) -> int:
        """Send the newest to the clients that wait for it. Returns how many."""
        if self._mailbox.version != self._version:
            # Published in this host's memory. It is copied now, so a pull does not wait for a copy.
            value = np.empty(self._mailbox.value_bytes, np.uint8)
            version = self._mailbox.newer_than(self._version, value)
            if version:
                self._keep(version, as_buffer(value))
        if not self._is_due:
            return 0
        self._is_due, sent = False, 0
        for session in self._server.sessions.of_roles("relay", "learner", "reader"):
            wanted = session.wants_newer_than
            if wanted is None or self._version <= wanted:
                continue
            tracker = None
            if self._server.room(session, BULK):
                tracker = self._server.send_encoded(session, BULK, self._parts)
            if tracker is None:
                self._is_due = True  # again in the next cycle
            else:
                session.wants_newer_than = None
                sent += 1
        self.counts["sent"] += sent
        return sent
