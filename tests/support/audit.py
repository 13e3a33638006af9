"""Checks a run's memory from outside: is every committed chunk still there, and whole?"""

import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import (
    ACTOR,
    COMMIT_SEQUENCE,
    COUNT,
    GRANTED,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
)
from zapex.chunks.store import ChunkStore
from zapex.errors import SharedMemoryError
from zapex.run.run import Run
from zapex.shm_transport import HostMemory

Chunk = tuple[int, int, int]  # actor, incarnation, sequence
_LOOKS = 5  # attempts, for what may only have changed during the check


def attach(pid: int, run: Run) -> HostMemory | None:
    """The memory that the parent `pid` of a run holds; None while it is being created.

    A host without slots, such as a learner's, has its counters here and no store. Only for the same
    user. Nothing may be written to it.
    """
    plan = run.plan
    try:
        control, experience = _map(pid, "zapex-control"), np.empty(0, np.uint8)
        if plan.experience_bytes:
            experience = _map(pid, "zapex-experience")[: plan.replay.nbytes]
        host = HostMemory(plan, control[: plan.nbytes], experience, [])
        for name, _ in plan.roles:
            host.metrics(name)
    except (OSError, ValueError, SharedMemoryError):
        return None
    return host


def _map(pid: int, name: str) -> NDArray[np.uint8]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if f"memfd:{name}" in os.readlink(link):
            with link.open("r+b") as file:  # words are read atomically: NumPy cannot be read-only
                return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    raise FileNotFoundError(f"process {pid} holds no {name}")


def _chunk_of(header: NDArray[np.int64]) -> Chunk:
    return int(header[ACTOR]), int(header[INCARNATION]), int(header[SEQUENCE])


@dataclass(frozen=True)
class _Seen:
    slot: int
    commit_sequence: int
    checksum: int


class ChunkAudit:
    """Accounts for every chunk of a store that other processes write; call `look()` repeatedly.

    lost: chunks that disappeared before older ones, and gaps in the numbers of an incarnation's
    chunks. torn: chunks whose bytes have changed since they were first seen. doubled: chunks that
    are there twice. chunks, transitions: all that were ever seen.
    """

    def __init__(self, store: ChunkStore) -> None:
        self.store = store
        self.chunks = self.transitions = self.lost = self.torn = self.doubled = 0
        self._there: dict[Chunk, _Seen] = {}

    def granted(self, actor: int, incarnation: int) -> int:
        """Slots that this incarnation of an actor holds."""
        rows = self.store.header_rows
        held = (rows[:, STATE] == GRANTED) & (rows[:, ACTOR] == actor)
        return int((held & (rows[:, INCARNATION] == incarnation)).sum())

    def look(self) -> bool:
        """Check every chunk. Returns whether the memory is whole."""
        self._check_those_seen()
        for _ in range(_LOOKS):
            live, gaps = self._live()
            if not gaps:
                break
        self.lost += gaps
        for slot in live:
            self._take(slot)
        return self.whole

    @property
    def whole(self) -> bool:
        """Nothing was ever lost, torn or doubled."""
        return not (self.lost or self.torn or self.doubled)

    def __str__(self) -> str:
        return (
            f"{self.transitions:,} transitions in {self.chunks:,} chunks: "
            f"{self.lost} lost, {self.torn} torn, {self.doubled} twice"
        )

    def taken(self, slot: int) -> None:
        """Called with each slot that holds a chunk seen for the first time."""

    def _take(self, slot: int) -> None:
        header = self.store.header_rows[slot].copy()
        chunk = _chunk_of(header)
        seen = _Seen(slot, int(header[COMMIT_SEQUENCE]), self._checksum(slot))
        if self.store.state(slot) != LIVE or (self.store.header_rows[slot] != header).any():
            return  # it was evicted during the check
        known = self._there.get(chunk)
        if known is not None:
            self.doubled += known.slot != slot
            return
        self._there[chunk] = seen
        self.chunks += 1
        self.transitions += int(header[COUNT])
        self.taken(slot)

    def _check_those_seen(self) -> None:
        gone = []
        for chunk, seen in self._there.items():
            whole = self._checksum(seen.slot) == seen.checksum
            if self._is_there(chunk, seen):
                self.torn += not whole
            else:
                gone.append(chunk)
        if not gone:
            return
        live, _ = self._live()
        oldest = self.store.header_rows[live, COMMIT_SEQUENCE].min(initial=1 << 62)
        for chunk in gone:
            # First in, first out: what is gone was older than everything that is there.
            self.lost += self._there.pop(chunk).commit_sequence > oldest

    def _is_there(self, chunk: Chunk, seen: _Seen) -> bool:
        there = _chunk_of(self.store.header_rows[seen.slot]) == chunk
        return there and self.store.state(seen.slot) == LIVE

    def _live(self) -> tuple[list[int], int]:
        """Live slots in the order of their commits, and gaps in the numbers of their chunks."""
        rows = self.store.header_rows.copy()
        live = np.flatnonzero(rows[:, STATE] == LIVE)
        numbers: dict[tuple[int, int], list[int]] = {}
        for actor, incarnation, sequence in rows[live][:, [ACTOR, INCARNATION, SEQUENCE]].tolist():
            numbers.setdefault((actor, incarnation), []).append(sequence)
        gaps = sum(max(found) - min(found) + 1 - len(set(found)) for found in numbers.values())
        return live[np.argsort(rows[live, COMMIT_SEQUENCE])].tolist(), gaps

    def _checksum(self, slot: int) -> int:
        body = self.store.body(slot)
        count = self.store.header_rows[slot, COUNT].tobytes()
        end = body + self.store.layout.body_bytes
        return zlib.crc32(self.store.mem[body:end].data, zlib.crc32(count))
