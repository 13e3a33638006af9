"""State of a host that must outlive its processes: who has which actor numbers, routes, saves.

Roster: the host and the progress of each actor, at a replay. One store commits a chunk: its slot's
state. The words here are written after it. So a reader uses the slot headers first. These words add
only the chunks that were evicted since:

    magic | epoch | actors
    actor i: host, incarnation, sequence (the next one)

    I1  each word has one writer, the server
    I2  (incarnation, sequence) of an actor never names a chunk that is not committed: a new
        incarnation is stored between a sequence of 0 and its own

Routes: which shard each actor of a host sends to. An actor's stay at a shard is a visit. At the
shard a visit is an incarnation of the actor, and its chunks are numbered from 0. So a shard needs
no word for what an actor sent elsewhere, and drops repeats as always:

    shard s: the epoch of its memory
    actor i: shard + 1 (0: none) | visit | incarnation | base | next

    I3  a chunk of that incarnation with base <= sequence < next is (visit, sequence - base)
    I4  a visit's number is above all earlier ones of its actor

SaveWords: what is loaded and saved of the experience.
"""

import secrets
import time
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.keys import GENERATION_MASK
from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    GENERATION,
    HOST,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
)
from zapex.errors import SharedMemoryError
from zapex.machine.memory import Section, lay_out
from zapex.replay.shards import MOST_SHARDS

_MAGIC = 0x7A61706578_0301  # "zapex", roster, layout 1
_HEADER_WORDS = 8
_MAGIC_WORD, _EPOCH_WORD, _ACTORS_WORD = range(3)
_HOST, _INCARNATION, _SEQUENCE, _ACTOR_WORDS = 0, 1, 2, 4
NO_HOST = 0
_SHARD, _VISIT, _ACTED, _BASE, _NEXT, _ROUTE_WORDS = 0, 1, 2, 3, 4, 8
_LOAD, _END, _DONE, _TOTAL, _UNSAVED, _SAVE_WORDS = range(6)
_UNDER_WAY, _OVER = 1, 2


class Roster:
    """The table in a buffer. Only one server may use it at a time.

    buffer: uint8 (8-byte aligned) of `required_bytes(actors)`; zero when new.
    headers: the slots' headers (slots, HEADER_WORDS), with the last commits of a former server.
    Those of a new memory get a random generation, so that keys of a former one are stale.
    """

    def __init__(self, buffer: NDArray[np.uint8], actors: int, headers: NDArray[np.int64]) -> None:
        sections, nbytes = self._layout(actors)
        if buffer.nbytes < nbytes:
            raise SharedMemoryError(
                f"a roster of {actors} actors needs {nbytes} bytes, the buffer has {buffer.nbytes}"
            )
        words = sections["words"].view(buffer)
        if words[_MAGIC_WORD] == 0:
            words[_EPOCH_WORD] = 1 + secrets.randbits(59)  # a hello has it as a sequence
            words[_ACTORS_WORD] = actors
            if (headers[:, GENERATION] <= 1).all():  # what was loaded has random ones already
                # A client may update a batch of a former memory after a batch of this one.
                headers[:, GENERATION] = 1 + secrets.randbelow(GENERATION_MASK)
            words[_MAGIC_WORD] = _MAGIC
        if words[_MAGIC_WORD] != _MAGIC or words[_ACTORS_WORD] != actors:
            raise SharedMemoryError(f"the buffer holds no roster of {actors} actors")
        self.actors = actors
        self.epoch = int(words[_EPOCH_WORD])
        self._rows = sections["actors"].view(buffer)
        self._recover(headers)

    @classmethod
    def required_bytes(cls, actors: int) -> int:
        """Bytes of the table."""
        return cls._layout(actors)[1]

    @staticmethod
    def _layout(actors: int) -> tuple[dict[str, Section], int]:
        rows = ("actors", (actors, _ACTOR_WORDS), np.int64)
        return lay_out([("words", (_HEADER_WORDS,), np.int64), rows], boundary=8)

    def _recover(self, headers: NDArray[np.int64]) -> None:
        """Record the chunks that were committed but are not in this table."""
        there = headers[np.isin(headers[:, STATE], (COMMITTED, LIVE))]
        for actor in range(self.actors):
            # A number with a new host starts again: the clocks of two hosts cannot be compared.
            host = self.host(actor)
            mine = there[(there[:, ACTOR] == actor) & (there[:, HOST] == host)]
            if host != NO_HOST and len(mine):
                incarnation = int(mine[:, INCARNATION].max())
                newest = mine[mine[:, INCARNATION] == incarnation]
                reached = (incarnation, int(newest[:, SEQUENCE].max()) + 1)
                if reached > self.state(actor):
                    self.advance(actor, *reached)

    def host(self, actor: int) -> int:
        """The host that runs the actor, or NO_HOST."""
        return int(self._rows[actor, _HOST])

    def state(self, actor: int) -> tuple[int, int]:
        """(incarnation, sequence): all chunks of the actor before that sequence are committed."""
        row = self._rows[actor]
        return int(row[_INCARNATION]), int(row[_SEQUENCE])

    def advance(self, actor: int, incarnation: int, sequence: int) -> None:
        """Record that chunks of that incarnation before `sequence` are committed."""
        row = self._rows[actor]
        if row[_INCARNATION] != incarnation:
            row[_SEQUENCE] = 0
            row[_INCARNATION] = incarnation
        row[_SEQUENCE] = sequence

    def actors_of(self, host: int) -> list[int]:
        """The actor numbers of a host."""
        return np.flatnonzero(self._rows[:, _HOST] == host).tolist()

    def assign(self, host: int, count: int, gone: Iterable[int] = ()) -> list[int] | None:
        """Give a host `count` actor numbers, first its former ones; None if too few are free.

        gone: hosts whose numbers may be taken if no others are free.
        """
        mine = self.actors_of(host)[:count]
        for owner in dict.fromkeys((NO_HOST, *gone)):
            mine += self.actors_of(owner)[: count - len(mine)]
        if len(mine) < count:
            return None
        for actor in set(self.actors_of(host)) - set(mine):
            self._rows[actor, _HOST] = NO_HOST
        for actor in mine:
            row = self._rows[actor]
            if row[_HOST] != host:
                row[_SEQUENCE] = row[_INCARNATION] = 0
                row[_HOST] = host
        return sorted(mine)

    def release(self, host: int) -> None:
        """Free the actor numbers of a host that has left."""
        self._rows[self.actors_of(host), _HOST] = NO_HOST


class Routes:
    """The table in a buffer: uint8 (8-byte aligned) of `required_bytes(actors)`; zero when new.

    clock_ns: the time of day; a visit's number is not below it.
    """

    def __init__(
        self,
        buffer: NDArray[np.uint8],
        actors: int,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock_ns = clock_ns
        words = buffer[: self.required_bytes(actors)].view(np.int64)
        self._epochs = words[:MOST_SHARDS]
        self._rows = words[MOST_SHARDS:].reshape(actors, _ROUTE_WORDS)

    @staticmethod
    def required_bytes(actors: int) -> int:
        """Bytes of the table."""
        return 8 * (MOST_SHARDS + actors * _ROUTE_WORDS)

    def place(self, actor: int, shard: int, incarnation: int, sequence: int) -> tuple[int, int]:
        """The incarnation and the sequence of a chunk at `shard`.

        A chunk that does not follow the last one there begins a visit. Then one that was sent
        under an earlier visit, and is placed again, counts as another chunk.
        """
        row = self._rows[actor]
        goes_on = row[_SHARD] == shard + 1 and row[_ACTED] == incarnation
        if not goes_on or not row[_BASE] <= sequence <= row[_NEXT]:
            visit = max(int(row[_VISIT]) + 1, incarnation, self._clock_ns())
            row[_SHARD] = 0  # a relay that dies here leaves no route
            row[[_VISIT, _ACTED, _BASE, _NEXT]] = visit, incarnation, sequence, sequence
            row[_SHARD] = shard + 1
        row[_NEXT] = max(int(row[_NEXT]), sequence + 1)
        return int(row[_VISIT]), sequence - int(row[_BASE])

    @property
    def epochs(self) -> list[int]:
        """Of the shards' memories, as they were last noted; 0: never."""
        return [int(epoch) for epoch in self._epochs]

    def is_new_memory(self, shard: int, epoch: int) -> bool:
        """Note a shard's epoch. Whether it had another one: then all visits to it end."""
        known, self._epochs[shard] = int(self._epochs[shard]), epoch
        if known in (0, epoch):
            return False
        self._rows[self._rows[:, _SHARD] == shard + 1, _SHARD] = 0
        return True


class SaveWords:
    """The words in a buffer. One process loads and saves; the parent reads.

    buffer: uint8 (8-byte aligned) of `required_bytes()`; zero when new.
    """

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self._words = buffer[: self.required_bytes()].view(np.int64)

    @staticmethod
    def required_bytes() -> int:
        """Bytes of the words."""
        return 8 * _SAVE_WORDS

    @property
    def loaded(self) -> bool:
        """Whether the memory is as it should be: what was saved is in it, or nothing was."""
        return bool(self._words[_LOAD] == _OVER)

    @property
    def half_loaded(self) -> bool:
        """Whether a process died while it loaded."""
        return bool(self._words[_LOAD] == _UNDER_WAY)

    def load(self, over: bool) -> None:
        """A load begins, or is over."""
        self._words[_LOAD] = _OVER if over else _UNDER_WAY

    @property
    def last_is_over(self) -> bool:
        """Whether the save at the end of the run is over, written or not."""
        return bool(self._words[_END] == _OVER)

    def last(self, over: bool) -> None:
        """The save at the end of the run begins, or is over."""
        self._words[_END] = _OVER if over else _UNDER_WAY

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of chunks that are on the disk, and of all that the present save writes."""
        return int(self._words[_DONE]), int(self._words[_TOTAL])

    def set_progress(self, done_bytes: int, total_bytes: int) -> None:
        """Set both."""
        self._words[_DONE], self._words[_TOTAL] = done_bytes, total_bytes

    @property
    def unsaved(self) -> int:
        """The error number if the newest save failed; 0: it was written."""
        return int(self._words[_UNSAVED])

    @unsaved.setter
    def unsaved(self, code: int) -> None:
        self._words[_UNSAVED] = code
