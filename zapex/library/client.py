"""The base of HandleClient and UrlClient: calls as requests and answers."""

import json
import os
import threading
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.arguments import MOST_TIMEOUT_S, magnitudes, within
from zapex.chunks.schema import Schema
from zapex.errors import ReplayError
from zapex.library.interface import ReplayInterface, SlotProvider
from zapex.library.writer import Autoreset, Writer
from zapex.wire.messages import Request


class Answer(NamedTuple):
    """Two counts and a text; their meaning depends on the request."""

    a: int
    b: int
    text: str = ""


class ProcessLock:
    """A re-entrant lock of one process. In a fork it raises: it might never be released."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock. Returns False if it is taken and `blocking` is False."""
        if os.getpid() != self._pid:
            raise ReplayError(
                "this client belongs to the process that this one was forked from: connect again"
            )
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class ReplayClient(ReplayInterface):
    """A replay of another process or host. Public methods are thread-safe."""

    _lock: AbstractContextManager[Any]
    """Held during a group of calls."""

    def __init__(self, schema: Schema, timeout_s: float) -> None:
        super().__init__(schema)
        self.timeout_s = within(timeout_s, "timeout_s", 1e-3, MOST_TIMEOUT_S)

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        return bool(self._ask(Request.CAN_SAMPLE, min(batch_size, self._most_rows)).a)

    def stats(self) -> dict[str, float]:
        """Counters of the replay, by name; see PrioritizedReplay.stats."""
        found: dict[str, float] = json.loads(self._ask(Request.STATS).text)
        return found

    def __len__(self) -> int:
        return self._ask(Request.STATS).a

    def _update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> tuple[int, int]:
        magnitudes(priorities, len(keys))  # checked here, so that all parts are sent, or none
        applied = stale = 0
        with self._lock:
            for first in range(0, max(1, len(keys)), self._most_rows):
                some = slice(first, first + self._most_rows)
                answer = self._send_update(keys[some], priorities[some])
                applied, stale = applied + answer.a, stale + answer.b
        return applied, stale

    def _writer(self, num_envs: int, autoreset: Autoreset) -> Writer:
        link = self._writer_link(num_envs)
        try:
            link.reserve_streams(num_envs)
            return Writer(link, num_envs, autoreset)
        except BaseException:
            link.give_up()
            raise

    def close(self) -> None:
        """Disconnect. Writers work until they are closed. Added transitions stay."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What differs between the two clients.

    def _ask(self, what: Request, rows: int = 0) -> Answer:
        raise NotImplementedError

    def _send_update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> Answer:
        """At most `_most_rows` of an update."""
        raise NotImplementedError

    def _writer_link(self, num_envs: int) -> SlotProvider:
        raise NotImplementedError
