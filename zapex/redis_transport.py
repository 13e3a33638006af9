"""redis:// and rediss://: experience and parameters through a Redis that the user runs.

This is the baseline of Furukawa & Matsutani (arXiv 2110.13506). Relays push plain pairs with their
priorities into one list, the learner pulls all of it, and parameters are SET and GET:

    zapex:experience   list     Pairs (or Push: chunks), at most `most_waiting`; relays wait
    zapex:parameters   string   the newest parameters (Params); zapex:version is their number
    zapex:statistics   list     host (i64) and Stats; the oldest give way
    zapex:settings     string   Hello: the settings of the run, and its schema
    zapex:run          string   Welcome: epoch, actors, transitions a chunk
    zapex:over         string   why the run has ended
    zapex:numbers      hash     actor's number -> its host
    zapex:learner      string   the learner's host; expires
    zapex:host:N       string   an actor host that is alive; expires

A value is a message of the wire protocol, its buffers joined, checked as every message is. No call
waits longer than a socket's timeout. When Redis does not answer, `attempt` returns at once for a
moment, so that the roles go on.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    COUNT,
    HOST,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
    STREAM,
)
from zapex.chunks.store import ChunkStore, set_state_kernel
from zapex.errors import ConfigError
from zapex.net.redis_link import EXPERIENCE, PARAMETERS, VERSION, RedisLink
from zapex.transport import Incarnation
from zapex.wire import control as messages
from zapex.wire.experience import Push
from zapex.wire.header import as_buffer, joined
from zapex.wire.pairs import PairMaker, Pairs, PairWriter

_LOOK_S = 0.1  # between two looks for newer parameters
_PUSHES = 8  # in one duty cycle


class RedisChunkSender:
    """Pushes closed slots of some actors as plain pairs; a ChunkLink.

    A push that may not have arrived is made again. The learner knows repeats by their sequence.

    numbers: the actors' numbers in the run. most: how many messages may wait in the list. pairs:
    False sends chunks, each frame once; only benchmarks do.
    """

    def __init__(
        self, link: RedisLink, store: ChunkStore, numbers: Sequence[int], most: int,
        pairs: bool = True,
    ) -> None:  # fmt: skip
        self._link, self._store, self._numbers, self._most = link, store, numbers, most
        self._maker = PairMaker(store) if pairs else None
        self._slots: deque[int] = deque()
        self._value = b""  # of the first slot, so that a full list costs nothing
        self._freed: list[int] = []
        self.full = False
        self.counts = dict.fromkeys(("chunks", "bytes", "acknowledged", "again"), 0)

    @property
    def unacknowledged(self) -> int:
        """How many chunks are not in Redis yet."""
        return len(self._slots)

    def offer(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Take whole chunks to send, in their order."""
        self._slots.extend(np.asarray(slots, np.int64).tolist())

    def take_freed(self) -> list[int]:
        """Slots whose pairs are in Redis."""
        freed, self._freed = self._freed, []
        return freed

    def do_work(self) -> int:
        """Push while the list has room. Returns how many chunks."""
        self._link.do_work()
        if not self._slots:
            return 0
        done, room = 0, self._most - self._link.attempt(lambda r: r.llen(EXPERIENCE), self._most)
        self.full = room <= 0 and not self._link.problem
        while self._slots and done < min(room, _PUSHES):
            self._value = self._value or self._encoded(self._slots[0])
            length = self._link.attempt(lambda r: r.rpush(EXPERIENCE, self._value), 0)
            if not length:
                self.counts["again"] += 1
                break
            self.counts["bytes"] += len(self._value)
            self.counts["chunks"] += 1
            self.counts["acknowledged"] += 1
            self._value = b""
            self._freed.append(self._slots.popleft())
            done += 1
        return done

    def _encoded(self, slot: int) -> bytes:
        store, header = self._store, self._store.header_rows[slot].tolist()
        rows, stream = header[COUNT], header[STREAM]
        who = {
            "actor": self._numbers[header[ACTOR]], "incarnation": header[INCARNATION],
            "sequence": header[SEQUENCE],
        }  # fmt: skip
        message: Any
        if self._maker is not None:
            message = self._maker.of_slot(slot, rows, stream=stream, **who)
        else:
            chunks = [(store.body(slot), stream, rows)]
            message = Push.of_chunks(store.layout, store.mem, chunks, **who)
        return joined(messages.encode(message))


class RedisExperienceSource:
    """The learner's end: pulls what waits in the list, into slots of its own memory.

    To the intake it is one actor, number 0, of this incarnation: pairs go into whatever slot it was
    granted. So experience is pulled only as the limiter lets it in; else the list fills and actors
    wait.
    """

    def __init__(self, link: RedisLink, store: ChunkStore, incarnation: int) -> None:
        assert link.form is not None
        self._link, self._store, self._limits = link, store, link.form.limits
        self._writer = PairWriter(store)
        self._slots: deque[int] = deque()
        self._rest: deque[tuple[Any, int]] = deque()  # messages that have no slot yet, and from
        self._committed: list[int] = []
        self._new = [Incarnation(0, incarnation)]
        self._next_grant = 0
        # Actor -> (incarnation, the next sequence); a former process's are in the headers.
        self._known: dict[int, tuple[int, int]] = {}
        rows = store.header_rows
        for row in rows[np.isin(rows[:, STATE], (COMMITTED, LIVE))].tolist():
            at = row[INCARNATION], row[SEQUENCE] + 1
            self._known[row[HOST]] = max(self._known.get(row[HOST], (0, 0)), at)
        self.counts = dict.fromkeys(("messages", "transitions", "bytes", "doubled", "refused"), 0)

    def ready(self) -> bool:
        """Whether a message may wait."""
        return bool(self._slots)

    def take_in(self) -> list[Incarnation]:
        """Pull as many messages as there are slots for. Returns this end itself, once."""
        self._link.do_work()
        wanted = len(self._slots) - len(self._rest)
        if wanted > 0:
            values = self._link.attempt(lambda r: r.lpop(EXPERIENCE, wanted), None)
            for value in values or ():
                self._take(value)
        while self._rest and self._slots:
            self._store_rows(*self._rest.popleft())
        new, self._new = self._new, []
        return new

    def _take(self, value: bytes) -> None:
        message = self._link.decode(value, Pairs, Push)
        if message is None:
            self.counts["refused"] += 1
            return
        self.counts["messages"] += 1
        self.counts["bytes"] += len(value)
        at = message.incarnation, message.sequence
        if at < self._known.get(message.actor, (0, 0)):
            self.counts["doubled"] += 1
            return
        self._known[message.actor] = at[0], at[1] + 1
        if isinstance(message, Pairs) and self._limits.breach_of(
            message.columns(self._store.layout.schema)
        ):
            self.counts["refused"] += 1
            return
        self._rest.append((message, 0))

    def _store_rows(self, message: Any, first: int) -> None:
        store, slot = self._store, self._slots.popleft()
        if isinstance(message, Pairs):
            done, stream = self._writer.write(message, first, slot), message.stream
            whole = done == message.rows
        else:
            message.write(first, store.layout, store.mem, store.body(slot))
            chunk = message.chunks[first]
            store.header_rows[slot, COUNT], stream = chunk.rows, chunk.stream
            done, whole = first + 1, first + 1 == len(message.chunks)
            if self._limits.breach(store, slot, chunk.rows, chunk.frames):
                self.counts["refused"] += 1
                self._slots.append(slot)
                return
        header = store.header_rows[slot]
        header[STREAM], header[HOST] = stream, message.actor
        header[INCARNATION], header[SEQUENCE] = message.incarnation, message.sequence
        set_state_kernel(store.headers, slot, COMMITTED)
        self.counts["transitions"] += int(header[COUNT])
        self._committed.append(slot)
        if not whole:
            self._rest.appendleft((message, done))

    def committers(self) -> list[int]:
        """This end, if it has filled slots since the last `committed`."""
        return [0] if self._committed else []

    def committed(self, actor: int) -> NDArray[np.int64]:
        """Slots filled since the last call, in order."""
        slots, self._committed = self._committed, []
        return np.array(slots, np.int64)

    def has_room(self, actor: int, count: int) -> bool:
        """True: a grant is only a note here."""
        return True

    def next_grant(self, actor: int) -> int:
        """0 at first: what a former process was granted and has not filled is free again."""
        return self._next_grant

    def grant(self, actor: int, incarnation: int, slots: NDArray[np.int64]) -> None:
        """Fill these slots next."""
        self._next_grant += len(slots)
        self._slots.extend(slots.tolist())


class RedisParameterSource:
    """GETs the newest parameters; looks for a newer version ten times a second at most."""

    def __init__(self, link: RedisLink, clock_s: Callable[[], float] = time.monotonic) -> None:
        assert link.form is not None
        self._link, self._clock_s, self._look_s = link, clock_s, 0.0
        self._version, self._most_bytes = 0, link.form.parameter_bytes + 256  # and its header

    @property
    def version(self) -> int:
        """The newest version that is known; 0 is none."""
        now_s = self._clock_s()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            found = self._link.get(VERSION, 18)
            self._version = int(found) if found.isdigit() else self._version
        return self._version

    def newer_than(self, version: int, out: NDArray[np.uint8]) -> int:
        """Copy the newest into `out` if it is newer than `version`. Returns its version, or 0."""
        if self.version <= max(0, version):
            return 0
        value = self._link.get(PARAMETERS, self._most_bytes)
        params = self._link.decode(value, messages.Params) if value else None
        if params is None or params.version <= max(0, version):
            return 0
        out[:] = np.frombuffer(params.parameters, np.uint8)
        return int(params.version)


class RedisParameterSink:
    """SETs a learner's parameters; the newest are kept until Redis has them."""

    def __init__(self, link: RedisLink) -> None:
        self._link, self._value, self._newest, self._sent = link, b"", 0, 0
        link.on_beat.append(self.do_work)

    @property
    def version(self) -> int:
        """The largest version that was published here; 0 is none."""
        return self._newest

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        """Make these parameters the newest."""
        if version <= self._newest:
            raise ConfigError(f"a version must be above the newest, {self._newest}, got {version}")
        message = messages.Params(version, as_buffer(parameters))
        self._value, self._newest = joined(messages.encode(message)), version
        self.do_work()

    def do_work(self) -> None:
        """SET the newest, unless Redis has it."""
        if self._newest == self._sent:
            return
        both: Any = {PARAMETERS: self._value, VERSION: self._newest}
        if self._link.attempt(lambda client: client.mset(both), False):
            self._sent = self._newest

    def again(self) -> None:
        """Redis has lost them."""
        self._sent = 0
