"""A served library's calls: batches, priorities and counts, for any number of clients."""

import json
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.layout import ACTOR, COMMIT_SEQUENCE, INCARNATION, LIVE, SEQUENCE, STATE
from zapex.errors import NotEnoughData, ZapexError, tell
from zapex.library.owner import OwnedReplay
from zapex.net.server import End, LinkServer
from zapex.net.sessions import Session
from zapex.replay.draw import METHODS
from zapex.replay.limiter import RateLimiter
from zapex.wire.batches import BatchPacker, packed_bytes
from zapex.wire.compression import check_compresses
from zapex.wire.messages import BULK, PRESENT, SMALL, Call, Reply, Request
from zapex.wire.protocol import Kind, as_buffer

_MOST_CALLS = 64  # calls of one client that may wait


class CallHandler(End):
    """Answers calls. Call `answer()` after the intake, so that answers include new chunks.

    A client's calls are answered in order. A batch waits, at most timeout_s, while the limiter does
    not allow it or its client has not received the earlier batches. If an answer cannot be sent
    now, the client sends its call again.
    """

    def __init__(
        self,
        server: LinkServer,
        replay: OwnedReplay,
        *,
        timeout_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._replay = server, replay
        self._timeout_s, self._clock_s = timeout_s, clock_s
        self._packer = BatchPacker(replay.store)
        self._calls: list[tuple[Session, Call, float]] = []
        self.dropped = 0  # calls that got no answer because none could be sent
        self.handlers = {Kind.CALL: self._take}

    @property
    def waiting(self) -> int:
        """Calls without an answer yet."""
        return len(self._calls)

    def _take(self, session: Session, call: Call) -> None:
        if call.compressed:
            check_compresses()
        mine = [waiting.sequence for s, waiting, _ in self._calls if s is session]
        # A repeat: the client sends a call again if it waits too long for the answer.
        if call.sequence not in mine and len(mine) < _MOST_CALLS:
            self._calls.append((session, call, self._clock_s()))

    def answer(self, limiter: RateLimiter) -> int:
        """Answer all calls that can be answered now. Returns how many."""
        calls, self._calls = self._calls, []
        for session, call, since_s in calls:
            if call.what == Request.SAMPLE and not self._may_sample(limiter, session, call.rows):
                if self._clock_s() - since_s < self._timeout_s:
                    self._calls.append((session, call, since_s))
                else:
                    self._give_up(limiter, session, call)
                continue
            try:
                self._answer(limiter, session, call)
            except ZapexError as error:
                self._fail(session, call, error)
        return len(calls) - len(self._calls)

    def _may_sample(self, limiter: RateLimiter, session: Session, rows: int) -> bool:
        return bool(self._server.room(session, BULK)) and _is_allowed(limiter, rows)

    def _give_up(self, limiter: RateLimiter, session: Session, call: Call) -> None:
        if self._server.room(session, BULK):
            text = f"after {self._timeout_s:g} s: {limiter.explain()}"
            self._fail(session, call, NotEnoughData(text))
        else:
            self.dropped += 1

    def _fail(self, session: Session, call: Call, error: ZapexError) -> None:
        words = str(error).encode(errors="replace")[:4096]
        reply = Reply(call.sequence, tell(error), body=as_buffer(words))
        self._server.send(session, SMALL, reply)

    def _answer(self, limiter: RateLimiter, session: Session, call: Call) -> None:
        replay = self._replay
        if call.what == Request.SAMPLE:
            self._sample(limiter, session, call)
            return
        a = b = 0
        body = b""
        if call.what == Request.UPDATE:
            # Copies: received arrays are read-only, and kernels are compiled for writable ones.
            a, b = replay.reprioritise(call.keys.copy(), call.priorities.copy())
            body = self._present()
        elif call.what == Request.CAN_SAMPLE:
            a = int(replay.can_sample(call.rows) and _is_allowed(limiter, call.rows))
            body = self._present()
        elif call.what == Request.STATS:
            a, body = len(replay), json.dumps(replay.stats()).encode()
        elif call.what == Request.KEYS:
            body = self._keys(call.rows, call.incarnation, call.option).astype("<i8").tobytes()
        self._server.send(session, SMALL, Reply(call.sequence, 0, a, b, as_buffer(body)))

    def _present(self) -> bytes:
        """What a client of several replays shares out by."""
        tree = self._replay.tree
        return PRESENT.pack(tree.total, len(self._replay), tree.min_positive)

    def _sample(self, limiter: RateLimiter, session: Session, call: Call) -> None:
        replay, rows = self._replay, call.rows
        part, method = divmod(call.option, len(METHODS))
        # Of a part, the client knows whether all replays together hold enough.
        replay.demand(max(1 if part else rows, replay.min_size_to_sample))
        draw = replay.draw(rows, METHODS[method])
        buffer = np.empty(packed_bytes(replay.layout.schema, rows), np.uint8)
        message = self._packer.pack(
            draw, epoch=self._server.roster.epoch, sequence=call.sequence, memory=buffer
        )
        if self._server.send(session, BULK, message, call.compressed) is None:
            self.dropped += 1
            return
        replay.sampled += rows
        if limiter.open:
            limiter.sample(rows)

    def _keys(self, actor: int, incarnation: int, sequence: int) -> NDArray[np.int64]:
        """The keys of a chunk's transitions while it is in the memory; after that none."""
        store = self._replay.store
        rows = store.header_rows
        there = (
            (rows[:, STATE] == LIVE) & (rows[:, ACTOR] == actor)
            & (rows[:, INCARNATION] == incarnation) & (rows[:, SEQUENCE] == sequence)
        )  # fmt: skip
        slots = np.flatnonzero(there)
        if not len(slots):
            return np.empty(0, np.int64)
        # A client that has gone had the same number: the newest chunk is the one asked for.
        newest = slots[rows[slots, COMMIT_SEQUENCE].argmax()]
        return store.keys_of(store.indices(int(newest)), self._replay.shard)


def _is_allowed(limiter: RateLimiter, rows: int) -> bool:
    # Below the minimum size the replay itself raises at once.
    return not limiter.open or limiter.can_sample(rows)
