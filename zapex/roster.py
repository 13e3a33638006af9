"""Which host plays which actor and how far each came, in memory that outlives the server.

A chunk is committed by one store, its slot's state; the words here follow it, so the slot headers
are looked at first and these only add what has been evicted since:

    magic | epoch | actors
    actor i: host, incarnation, sequence (the next one)

    I1  every word has one writer, the server
    I2  (incarnation, sequence) of an actor never names a chunk that is not committed: a new
        incarnation is stored between a sequence of 0 and its own
"""

import secrets
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from zapex.errors import SharedMemoryError
from zapex.schema import ACTOR, COMMITTED, HOST, INCARNATION, LIVE, SEQUENCE, STATE

_MAGIC = 0x7A61706578_0301  # "zapex", roster, layout 1
_HEADER_WORDS = 8
_MAGIC_WORD, _EPOCH_WORD, _ACTORS_WORD = range(3)
_HOST, _INCARNATION, _SEQUENCE, _ACTOR_WORDS = 0, 1, 2, 4
NOBODY = 0


class Roster:
    """The table over a buffer; one server at a time.

    buffer: uint8 (8-byte aligned) of `required_bytes(actors)`; zero when new.
    headers: the slots' headers (slots, HEADER_WORDS), to see what a former life committed last.
    """

    def __init__(self, buffer: NDArray[np.uint8], actors: int, headers: NDArray[np.int64]) -> None:
        if buffer.nbytes < self.required_bytes(actors):
            raise SharedMemoryError(
                f"a roster of {actors} actors needs {self.required_bytes(actors)} bytes, "
                f"the buffer has {buffer.nbytes}"
            )
        words = buffer[: self.required_bytes(actors)].view(np.int64)
        if words[_MAGIC_WORD] == 0:
            words[_EPOCH_WORD] = 1 + secrets.randbits(62)
            words[_ACTORS_WORD] = actors
            words[_MAGIC_WORD] = _MAGIC
        if words[_MAGIC_WORD] != _MAGIC or words[_ACTORS_WORD] != actors:
            raise SharedMemoryError(f"the buffer holds no roster of {actors} actors")
        self.actors = actors
        self.epoch = int(words[_EPOCH_WORD])
        self._rows = words[_HEADER_WORDS:].reshape(actors, _ACTOR_WORDS)
        self._recover(headers)

    @staticmethod
    def required_bytes(actors: int) -> int:
        """Bytes of the table."""
        return 8 * (_HEADER_WORDS + actors * _ACTOR_WORDS)

    def _recover(self, headers: NDArray[np.int64]) -> None:
        """Take in what was committed and not noted."""
        there = headers[np.isin(headers[:, STATE], (COMMITTED, LIVE))]
        for actor in range(self.actors):
            # A number that changed hosts starts anew: two hosts' clocks are not comparable.
            host = self.host(actor)
            mine = there[(there[:, ACTOR] == actor) & (there[:, HOST] == host)]
            if host != NOBODY and len(mine):
                incarnation = int(mine[:, INCARNATION].max())
                newest = mine[mine[:, INCARNATION] == incarnation]
                reached = (incarnation, int(newest[:, SEQUENCE].max()) + 1)
                if reached > self.state(actor):
                    self.advance(actor, *reached)

    def host(self, actor: int) -> int:
        """Who plays it; NOBODY."""
        return int(self._rows[actor, _HOST])

    def state(self, actor: int) -> tuple[int, int]:
        """(incarnation, sequence): everything of it before that sequence is committed."""
        row = self._rows[actor]
        return int(row[_INCARNATION]), int(row[_SEQUENCE])

    def advance(self, actor: int, incarnation: int, sequence: int) -> None:
        """Chunks of that incarnation before `sequence` are committed."""
        row = self._rows[actor]
        if row[_INCARNATION] != incarnation:
            row[_SEQUENCE] = 0
            row[_INCARNATION] = incarnation
        row[_SEQUENCE] = sequence

    def actors_of(self, host: int) -> list[int]:
        """The numbers of a host."""
        return np.flatnonzero(self._rows[:, _HOST] == host).tolist()

    def assign(self, host: int, count: int, gone: Iterable[int] = ()) -> list[int] | None:
        """`count` numbers for a host, those that it had before among them; None: too few are free.

        gone: hosts whose numbers may be taken where none else are free.
        """
        mine = self.actors_of(host)[:count]
        for owner in (NOBODY, *gone):
            mine += self.actors_of(owner)[: count - len(mine)]
        if len(mine) < count:
            return None
        for actor in set(self.actors_of(host)) - set(mine):
            self._rows[actor, _HOST] = NOBODY
        for actor in mine:
            row = self._rows[actor]
            if row[_HOST] != host:
                row[_SEQUENCE] = row[_INCARNATION] = 0
                row[_HOST] = host
        return sorted(mine)

    def release(self, host: int) -> None:
        """A host has left."""
        self._rows[self.actors_of(host), _HOST] = NOBODY
