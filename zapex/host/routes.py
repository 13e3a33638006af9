"""Which shard each actor of a host sends to, in memory that remains when the relay dies.

An actor's stay at a shard is a visit. At the shard a visit is an incarnation of the actor, and its
chunks are numbered from 0. So a shard needs no word for what an actor sent elsewhere, and drops
repeats as always:

    shard s: the epoch of its memory
    actor i: shard + 1 (0: none) | visit | incarnation | base | next

    I1  a chunk of that incarnation with base <= sequence < next is (visit, sequence - base)
    I2  a visit's number is above all earlier ones of its actor
"""

import time

import numpy as np
from numpy.typing import NDArray

from zapex.replay.shards import MOST_SHARDS

_SHARD, _VISIT, _INCARNATION, _BASE, _NEXT, _ROUTE_WORDS = 0, 1, 2, 3, 4, 8


class Routes:
    """The table in a buffer: uint8 (8-byte aligned) of `required_bytes(actors)`; zero when new."""

    def __init__(self, buffer: NDArray[np.uint8], actors: int) -> None:
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
        goes_on = row[_SHARD] == shard + 1 and row[_INCARNATION] == incarnation
        if not goes_on or not row[_BASE] <= sequence <= row[_NEXT]:
            visit = max(int(row[_VISIT]) + 1, incarnation, time.time_ns())
            row[_SHARD] = 0  # a relay that dies here leaves no route
            row[[_VISIT, _INCARNATION, _BASE, _NEXT]] = visit, incarnation, sequence, sequence
            row[_SHARD] = shard + 1
        row[_NEXT] = max(int(row[_NEXT]), sequence + 1)
        return int(row[_VISIT]), sequence - int(row[_BASE])

    def is_new_memory(self, shard: int, epoch: int) -> bool:
        """Note a shard's epoch. Whether it had another one: then no visit to it goes on."""
        known, self._epochs[shard] = int(self._epochs[shard]), epoch
        if known in (0, epoch):
            return False
        self._rows[self._rows[:, _SHARD] == shard + 1, _SHARD] = 0
        return True
