"""The host and the progress of each actor, in memory that remains when the server dies.

One store commits a chunk: its slot's state. The words here are written after it. So a reader uses
the slot headers first. These words add only the chunks that were evicted since:

    magic | epoch | actors
    actor i: host, incarnation, sequence (the next one)

    I1  each word has one writer, the server
    I2  (incarnation, sequence) of an actor never names a chunk that is not committed: a new
        incarnation is stored between a sequence of 0 and its own
"""

import secrets
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import ACTOR, COMMITTED, HOST, INCARNATION, LIVE, SEQUENCE, STATE
from zapex.errors import SharedMemoryError
from zapex.machine.memory import Section, lay_out

_MAGIC = 0x7A61706578_0301  # "zapex", roster, layout 1
_HEADER_WORDS = 8
_MAGIC_WORD, _EPOCH_WORD, _ACTORS_WORD = range(3)
_HOST, _INCARNATION, _SEQUENCE, _ACTOR_WORDS = 0, 1, 2, 4
NO_HOST = 0


class Roster:
    """The table in a buffer. Only one server may use it at a time.

    buffer: uint8 (8-byte aligned) of `required_bytes(actors)`; zero when new.
    headers: the slots' headers (slots, HEADER_WORDS), with the last commits of a former server.
    """

    def __init__(self, buffer: NDArray[np.uint8], actors: int, headers: NDArray[np.int64]) -> None:
        sections, nbytes = self._layout(actors)
        if buffer.nbytes < nbytes:
            raise SharedMemoryError(
                f"a roster of {actors} actors needs {nbytes} bytes, the buffer has {buffer.nbytes}"
            )
        words = sections["words"].view(buffer)
        if words[_MAGIC_WORD] == 0:
            words[_EPOCH_WORD] = 1 + secrets.randbits(62)
            words[_ACTORS_WORD] = actors
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
