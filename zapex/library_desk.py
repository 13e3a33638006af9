"""A served library's calls: batches, priorities and counts, for any number of clients."""

import json
import time
from collections.abc import Callable
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from zapex.batch_packing import BatchPacker, packed_bytes
from zapex.errors import TELLABLE, NotEnoughData, PeerError, ZapexError
from zapex.library_messages import CAN_SAMPLE, KEYS, SAMPLE, STATS, UPDATE, Call, Reply
from zapex.message_header import Kind, as_part
from zapex.messages import BULK, SMALL
from zapex.rate_limiter import RateLimiter
from zapex.replay import PrioritizedReplay
from zapex.replay_core import Method
from zapex.schema import ACTOR, COUNT, INCARNATION, LIVE, SEQUENCE, STATE
from zapex.zmq_server import Session, ZmqServer

_METHODS = get_args(Method)
_MOST_CALLS = 64  # of one client that may wait


class LibraryDesk:
    """Answers calls; `do_work()` after the intake's, so that what has come in is seen.

    A client's calls are answered in order. A batch that the limiter does not allow yet, or whose
    client has not taken those before, waits, at most timeout_s. Where an answer cannot be sent now,
    its client calls again.
    """

    def __init__(
        self, server: ZmqServer, replay: PrioritizedReplay, limiter: RateLimiter,
        *, timeout_s: float, clock_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._server, self._replay, self._limiter = server, replay, limiter
        self._timeout_s, self._clock_s = timeout_s, clock_s
        self._packer = BatchPacker(replay.store)
        self._calls: list[tuple[Session, Call, float]] = []
        self.counts = dict.fromkeys(("calls", "dropped"), 0)
        server.handlers[Kind.CALL] = self._take

    @property
    def waiting(self) -> int:
        """Calls without an answer yet."""
        return len(self._calls)

    def _take(self, session: Session, call: Call) -> None:
        mine = [waiting.sequence for s, waiting, _ in self._calls if s is session]
        # The same again: its client has grown impatient.
        if call.sequence not in mine and len(mine) < _MOST_CALLS:
            self._calls.append((session, call, self._clock_s()))

    def do_work(self) -> int:
        """Answer what can be answered; how many."""
        calls, self._calls = self._calls, []
        for session, call, since_s in calls:
            if call.what == SAMPLE and not self._may_sample(session, call.rows):
                if self._clock_s() - since_s < self._timeout_s:
                    self._calls.append((session, call, since_s))
                else:
                    self._give_up(session, call)
                continue
            try:
                self._answer(session, call)
            except ZapexError as error:
                self._fail(session, call, error)
        self.counts["calls"] += len(calls) - len(self._calls)
        return len(calls) - len(self._calls)

    def _may_sample(self, session: Session, rows: int) -> bool:
        return bool(self._server.room(session, BULK)) and self._is_allowed(rows)

    def _is_allowed(self, rows: int) -> bool:
        # Below the minimum the replay itself says so at once.
        return not self._limiter.open or self._limiter.can_sample(rows)

    def _give_up(self, session: Session, call: Call) -> None:
        if self._server.room(session, BULK):
            text = f"after {self._timeout_s:g} s: {self._limiter.explain()}"
            self._fail(session, call, NotEnoughData(text))
        else:
            self.counts["dropped"] += 1

    def _fail(self, session: Session, call: Call, error: ZapexError) -> None:
        known = type(error) if type(error) in TELLABLE else PeerError
        words = str(error).encode(errors="replace")[:4096]
        reply = Reply(call.sequence, 1 + TELLABLE.index(known), body=as_part(words))
        self._server.send(session, SMALL, reply)

    def _answer(self, session: Session, call: Call) -> None:
        replay = self._replay
        if call.what == SAMPLE:
            self._sample(session, call)
            return
        a = b = 0
        body = b""
        if call.what == UPDATE:
            # Copies: what came over the network is read-only, and kernels have one signature.
            a, b = replay.update_priorities(call.keys.copy(), call.priorities.copy())
        elif call.what == CAN_SAMPLE:
            a = int(replay.can_sample(call.rows) and self._is_allowed(call.rows))
        elif call.what == STATS:
            a, body = len(replay), json.dumps(replay.stats()).encode()
        elif call.what == KEYS:
            body = self._keys(call.rows, call.incarnation, call.option).astype("<i8").tobytes()
        self._server.send(session, SMALL, Reply(call.sequence, 0, a, b, as_part(body)))

    def _sample(self, session: Session, call: Call) -> None:
        replay, rows = self._replay, call.rows
        replay.demand(max(rows, replay.min_size_to_sample))
        draw = replay.draw(rows, _METHODS[call.option % len(_METHODS)])
        buffer = np.empty(packed_bytes(replay.schema, rows), np.uint8)
        message = self._packer.pack(
            draw.keys, draw.indices, draw.leaves, draw.total, draw.smallest, draw.count,
            epoch=self._server.roster.epoch, sequence=call.sequence, memory=buffer,
        )  # fmt: skip
        if self._server.send(session, BULK, message) is None:
            self.counts["dropped"] += 1
            return
        replay.sampled += rows
        if self._limiter.open:
            self._limiter.sample(rows)

    def _keys(self, actor: int, incarnation: int, sequence: int) -> NDArray[np.int64]:
        """Of a chunk's transitions as long as it is there; none after that."""
        store = self._replay.store
        rows = store.header_rows
        there = (
            (rows[:, STATE] == LIVE) & (rows[:, ACTOR] == actor)
            & (rows[:, INCARNATION] == incarnation) & (rows[:, SEQUENCE] == sequence)
        )  # fmt: skip
        slots = np.flatnonzero(there)
        if not len(slots):
            return np.empty(0, np.int64)
        first = int(slots[0]) * store.layout.chunk
        return store.keys_of(first + np.arange(int(rows[slots[0], COUNT])), self._replay.shard)
