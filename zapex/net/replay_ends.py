"""The replay's ends of its links: chunks in, parameters out. Batches: net/sample_sink.py."""

from collections import deque
from collections.abc import Sequence

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
from zapex.errors import BadMessage
from zapex.host.roster import NO_HOST
from zapex.machine.mailbox import Mailbox
from zapex.net.server import LinkServer
from zapex.net.sessions import MAY_SEND, Session
from zapex.net.slot_memory import SlotMemory
from zapex.transport import Incarnation
from zapex.wire import control as messages
from zapex.wire.control import BULK, SMALL
from zapex.wire.experience import Push, claimed_push
from zapex.wire.header import Buffer, Kind, as_buffer

_UNACKNOWLEDGED = 16  # chunks that may be committed before an ack is sent


class ZmqExperienceSource:
    """Chunks from relays, each into a slot granted to its actor.

    A transport that can does so while it receives them (`_place`); else they are copied.
    Here the intake's incarnation of an actor is the number of its host. So an actor that a relay
    starts again continues with the same slots. Acks are sent after the commit, one per relay and
    group of pushes: pushes that say `more` share one ack with the next. It is sent earlier when no
    other chunk has come, or when `_UNACKNOWLEDGED` chunks wait for it.
    """

    def __init__(self, server: LinkServer, store: ChunkStore) -> None:
        self._server, self._store = server, store
        self._roster = server.roster
        self._memory = SlotMemory(store)
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
        server.handlers[Kind.PUSH] = self._push
        server.listener.place = self._place
        server.credit_bytes = self._credit_bytes
        self._transitions = [0] * self._roster.actors
        server.transitions = self._transitions.__getitem__

    def ready(self) -> bool:
        """Whether a message, a commit or an ack waits to be handled."""
        due = self._touched or self._awaited
        return self._server.listener.ready() or bool(due) or any(self._committed)

    def take_in(self) -> list[Incarnation]:
        """Receive messages. Returns the actors whose host came, left or was replaced since."""
        self._server.do_work()
        changed = []
        for actor, known in self._incarnations.items():
            host = self._roster.host(actor)
            if host != known:
                self._incarnations[actor] = host
                # Nobody may write into slots that the intake takes back.
                for peer in self._memory.peers(self._slots[actor]):
                    self._server.guard.hang_up(peer)
                if known != NO_HOST:
                    self._slots[actor].clear()
                    self._server.priorities.forget(known)
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
        """Use these slots for the actor's next chunks; its relay is told."""
        self._next_grant += len(slots)
        self._slots[actor].extend(slots.tolist())
        session = self._server.sessions.of_actor(actor)
        if session is not None and actor not in self._awaited:
            self._server.send(session, SMALL, messages.Ack(self._server.actor_states([actor])))

    def _is_settled(self, actor: int) -> bool:
        """Whether the intake knows the actor's host; slots of a former host are not valid."""
        return self._incarnations[actor] == self._roster.host(actor)

    def _credit_bytes(self, actor: int) -> int:
        slots = len(self._slots[actor]) if self._is_settled(actor) else 0
        return slots * self._store.layout.body_bytes

    def _place(self, peer: bytes, earlier: Sequence[Buffer], nbytes: int) -> Buffer | None:
        """Where a frame of the push that is expected next belongs; None: it is another message.

        Whatever a header claims, a slot that its sender was granted is the only memory it gets.
        All checks of `_push` follow when the message is whole.
        """
        if len(earlier) != 1:
            return self._memory.go_on(earlier[1:], nbytes) if earlier else None
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
            self._out_of_season(session, "uncredited", len(push.chunks))
            return
        incarnation, expected = self._roster.state(actor)
        (self._awaited if push.more else self._touched).add(actor)
        count, slots = len(push.chunks), self._slots[actor]
        # How many of these are known. The rest begins with the next expected one, or is early.
        known = (expected if push.incarnation == incarnation else 0) - push.sequence
        if push.incarnation < incarnation or known >= count:
            self._out_of_season(session, "doubled", count)
            return
        if known < 0:
            self._out_of_season(session, "early", count)
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
            self._out_of_season(session, "uncredited", count - known - taken)
        else:
            self._server.judge(session, BULK, in_season=True)

    def _out_of_season(self, session: Session, what: str, chunks: int) -> None:
        self.counts[what] += chunks
        self._server.judge(session, BULK, in_season=False)

    def _commit(
        self, session: Session, slot: int, push: Push, number: int, *, frames: bool
    ) -> bool:
        """Commit a chunk to a slot; False: no run produces its values, and it is only counted.

        frames: whether they must be copied.
        """
        store, chunk, sequence = self._store, push.chunks[number], push.sequence + number
        push.write(number, store.layout, store.mem, store.body(slot), frames=frames)
        self._transitions[push.actor] += chunk.rows
        breach = self._server.form.limits.breach(store, slot, chunk.rows, chunk.frames)
        if breach:
            self._roster.advance(push.actor, push.incarnation, sequence + 1)
            self._out_of_season(session, "refused", 1)
            self._server.refuse(session, f"actor {push.actor}'s chunk with {breach}")
            return False
        if not self._server.form.any_rows:  # a library has no learner to compare with
            priorities = store.column(slot, "priority")[: chunk.rows]
            self._server.priorities.limit(session.host, priorities)
        header = store.header_rows[slot]
        header[COUNT], header[STREAM], header[SEQUENCE] = chunk.rows, chunk.stream, sequence
        header[INCARNATION], header[HOST] = push.incarnation, self._roster.host(push.actor)
        # SYNC chunk-whole: this one store commits; before it the chunk does not count
        set_state_kernel(store.headers, slot, COMMITTED)
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
            self._server.send(session, SMALL, messages.Ack(self._server.actor_states(actors)))


class ZmqParameters:
    """The newest parameters, in memory that outlives the server, for all clients that ask.

    A version is encoded once, and all clients get the same bytes. Parameters that came over the
    network are sent from the frame in which they came.
    """

    def __init__(self, server: LinkServer, mailbox: Mailbox) -> None:
        self._server, self._mailbox = server, mailbox
        self._version = 0
        self._parts: Sequence[Buffer] = ()  # never written to: libzmq may hold them
        self.counts = dict.fromkeys(("sent", "kept"), 0)
        server.handlers[Kind.PUBLISH] = self._publish
        server.handlers[Kind.PULL] = self._pull
        server.chores.append(self.do_work)

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
        self.do_work()

    def _keep(self, version: int, parameters: Buffer) -> None:
        self._version = version
        self._parts = messages.encode(messages.Params(version, parameters))
        self.counts["kept"] += 1

    def do_work(self) -> int:
        """Send the newest to the clients that wait for it. Returns how many."""
        newest, sent = self._mailbox.version, 0
        if newest != self._version:
            # Published in this host's memory. It is copied now, so a pull does not wait for a copy.
            value = np.empty(self._mailbox.value_bytes, np.uint8)
            version = self._mailbox.newer_than(self._version, value)
            if not version:
                return 0
            self._keep(version, as_buffer(value))
        for session in self._server.sessions.of_roles("relay", "learner", "reader"):
            wanted = session.wants_newer_than
            if wanted is None or self._version <= wanted or not self._server.room(session, BULK):
                continue
            if self._server.send_encoded(session, BULK, self._parts) is not None:
                session.wants_newer_than = None
                sent += 1
        self.counts["sent"] += sent
        return sent
