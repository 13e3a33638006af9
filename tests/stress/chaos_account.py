"""The account of a chaos run: every chunk of every incarnation came in once, none is missing."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stress.chaos_content import Violation
from zapex.chunks.layout import ACTOR, COMMITTED, INCARNATION, LIVE, SEQUENCE, STATE

Life = tuple[int, int]  # actor, incarnation


@dataclass
class _Book:
    """One life's chunks, as they left the FIFO."""

    committed: int = 0  # at least so many: seen at its death, or said by itself
    expected: int = 0  # every chunk before this one is there
    ahead: dict[int, Any] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)  # next transition of each stream


class Account:
    """Takes records of chunks (chaos_roles.AUDIT) in the order of the FIFO.

    A chunk may be told more than once, by lives of the replay that died before it was gone: then
    its commit sequence is the same. Twice under two commit sequences is doubled.
    """

    def __init__(self) -> None:
        self._books: dict[Life, _Book] = {}
        self._newest = -1  # commit sequence
        self.chunks = self.transitions = 0

    def begin(self, actor: int, incarnation: int) -> None:
        """A life of an actor began."""
        self._books[actor, incarnation] = _Book()

    def end(self, actor: int, incarnation: int, said: int, headers: NDArray[np.int64]) -> None:
        """It is dead: what it had said, and what it left in the headers, is committed."""
        rows = headers[(headers[:, ACTOR] == actor) & (headers[:, INCARNATION] == incarnation)]
        rows = rows[np.isin(rows[:, STATE], (COMMITTED, LIVE))]
        book = self._books[actor, incarnation]
        book.committed = max(said, int(rows[:, SEQUENCE].max(initial=-1)) + 1)

    def settle(self, actor: int, incarnation: int, live: NDArray[np.int64]) -> None:
        """None of its slots is out any more; `live`: sequences of its chunks that are live.

        What was live in an instant before is live, or told: everything committed is there.
        """
        book = self._books[actor, incarnation]
        there = set(live.tolist()) | set(book.ahead)
        missing = set(range(book.expected, book.committed)) - there
        if missing:
            raise Violation(
                f"lost: {(actor, incarnation)} committed {book.committed} chunks or more, "
                f"{sorted(missing)[:9]} are missing"
            )

    def take(self, records: NDArray[Any]) -> None:
        """Chunks that were evicted, or are live at the end."""
        for record in records:
            self._take(record)

    def _take(self, record: Any) -> None:
        life = int(record["actor"]), int(record["incarnation"])
        if life not in self._books:
            raise Violation(f"foreign: a chunk of {life}, a life that nobody began")
        book, sequence = self._books[life], int(record["sequence"])
        if record["commit_sequence"] <= self._newest:
            if record["commit_sequence"] == self._newest:
                return  # told again
            raise Violation(f"doubled: {record} left the FIFO out of its order")
        self._newest = int(record["commit_sequence"])
        if sequence < book.expected or sequence in book.ahead:
            raise Violation(f"doubled: chunk {sequence} of {life} came again: {record}")
        book.ahead[sequence] = record.copy()
        while book.expected in book.ahead:
            self._count(book, life, book.ahead.pop(book.expected))
            book.expected += 1

    def _count(self, book: _Book, life: Life, record: Any) -> None:
        stream, first, count = (int(record[name]) for name in ("stream", "first", "count"))
        wanted = book.numbers.get(stream, 0)
        if first != wanted:
            kind = "lost" if first > wanted else "doubled"
            raise Violation(f"{kind}: stream {stream} of {life} goes on at {first}, not {wanted}")
        book.numbers[stream] = first + count
        self.chunks += 1
        self.transitions += count

    def close(self) -> None:
        """Everything has been told."""
        for life, book in self._books.items():
            self.settle(*life, np.empty(0, np.int64))
            if book.ahead:
                raise Violation(f"lost: chunk {book.expected} of {life}, with others after it")
