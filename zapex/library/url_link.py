"""A library client's links to a served replay: one for its calls, one for each writer.

A writer's chunks are built in private slots and sent over its link when they are closed, as a
relay's are: kept until acknowledged, and sent again when the replay is back.
"""

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import ACTOR, INCARNATION, SEQUENCE
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import PeerDied, PeerError, PeerTimeout
from zapex.library.client import ProcessLock
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.replay.core import ReplayLayout
from zapex.wire.messages import Bye, Welcome, most_rows
from zapex.wire.protocol import Form
from zapex.zmq_transport import ChunkSender

CONFIG = {"library": 1}
"""The settings that both ends must share, besides the schema."""
_LOOK_S = 0.2  # period of the thread that says hello for idle links


def form_of(layout: ReplayLayout) -> Form:
    """The Form of a library's messages."""
    return Form(layout.chunk_layout, most_rows(layout.schema), 1, any_rows=True)


class UrlLink:
    """One link, its lock, and how long to wait; `close()` may be called twice."""

    def __init__(
        self, url: str, schema: Schema, form: Form | None, security: Security, timeout_s: float,
        *, actors: int = 0, lock: ProcessLock | None = None, compress: bool = False,
    ) -> None:  # fmt: skip
        """form: None only asks for `welcome`. compress: what is pushed.

        Raises PeerTimeout, Refused, Fenced, ConfigError.
        """
        self.lock = lock or ProcessLock()
        self.timeout_s = timeout_s
        self.chores: list[Callable[[], object]] = []
        self._closed = False
        self.link = ZmqLink(
            url, "client", 1 + secrets.randbits(62), 1, form, CONFIG, security,
            schema_hash=schema.hash, actors=actors, compressed=compress,
        )  # fmt: skip
        try:
            self.link.open(timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def welcome(self) -> Welcome:
        """The replay's last answer to a hello."""
        assert self.link.welcome is not None
        return self.link.welcome

    def check(self) -> None:
        """Raises PeerDied if it is closed."""
        if self._closed:
            raise PeerDied("this client is closed")

    def wait(self, ready: Callable[[], object], for_what: str) -> None:
        """Wait until `ready()`, with the lock held. Raises PeerTimeout, and the link's errors."""
        self.check()

        def looked() -> object:
            self.link.do_work()
            return ready()

        if not self.link.wait(looked, self.timeout_s):
            raise PeerTimeout(
                self.link.waiting
                or f"{for_what} did not come from {self.link.url} within {self.timeout_s:g} s"
            )

    def look(self) -> bool:
        """Do an idle link's work, if no thread uses it now. Returns False if closed or unusable."""
        if not self.lock.acquire(blocking=False):
            return True
        try:
            if self._closed:
                return False
            self.link.do_work()
            for chore in self.chores:
                chore()
            return True
        except PeerError:  # the user's next call raises it
            return False
        finally:
            self.lock.release()

    def look_while_idle(self) -> None:
        """Start a thread that says hello, and receives messages, while no other uses the link."""

        def look() -> None:
            while self.look():
                time.sleep(_LOOK_S)

        threading.Thread(target=look, name="zapex client", daemon=True).start()

    def close(self) -> None:
        """Send a BYE and disconnect."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self.link.close(bye=Bye())


class UrlSlots:
    """Private slots; their chunks are sent over a separate link when they are closed.

    elsewhere: opens a link to another replay, with the lock that it is given, for what this one
    does not take in time.
    """

    shard = 0

    def __init__(
        self,
        link: UrlLink,
        layout: ReplayLayout,
        streams: int,
        elsewhere: Callable[[ProcessLock], UrlLink] | None = None,
    ) -> None:
        self.layout, self._elsewhere = layout, elsewhere
        self._link, self.lock = link, link.lock
        slots = 2 * streams + 4
        memory = aligned_zeros(ChunkStore.required_bytes(layout.chunk_layout, slots))
        self.store = ChunkStore(memory, layout.chunk_layout, slots)
        self._free = deque(range(slots))
        self._sender = ChunkSender(link.link, self.store)
        self._sequence = itertools.count()
        self.sent: list[int] = []  # sequences since the caller last cleared this list
        link.chores.append(self._pump)

    @property
    def number(self) -> int:
        """Its actor number at the replay."""
        return int(self._link.welcome.actors["actor"][0])

    def _pump(self) -> None:
        self._sender.do_work()
        self._free.extend(self._sender.take_freed())

    def reserve_streams(self, streams: int) -> None:
        """Nothing to do: the slots were made for these streams."""

    def release_streams(self, streams: int) -> None:
        """Send the last chunks, and close the link of a closed writer."""
        self.settle()
        self.close()

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def admit(self, rows: int) -> None:
        """Nothing to wait for: the credit limits each chunk."""
        self._link.check()

    def open_slot(self) -> int:
        """Get a slot to fill. Raises PeerTimeout if the replay takes no chunk for too long."""

        def is_free() -> bool:
            self._pump()
            return bool(self._free)

        if not self._free:
            self._wait(is_free, "room for more chunks")
        return self._free.popleft()

    def _wait(self, ready: Callable[[], object], for_what: str) -> None:
        try:
            self._link.wait(ready, for_what)
        except PeerTimeout:
            if self._elsewhere is None:
                raise
            self._move(self._elsewhere(self.lock))
            self._link.wait(ready, for_what)

    def _move(self, link: UrlLink) -> None:
        """Send what is not acknowledged over another link, where all of it is new."""
        left = self._sender.take_back()
        self._link.close()
        self._free.extend(self._sender.take_freed())
        self._link, self._sender = link, ChunkSender(link.link, self.store)
        self._sequence = itertools.count()
        link.chores.append(self._pump)
        self.grown(np.empty(0, np.int64), np.empty(0), np.array(left, np.int64))

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64],
    ) -> None:
        """Send the `closed` slots; rows of open slots stay here."""
        if not len(closed):
            return
        self._link.check()
        rows = self.store.header_rows
        for slot in closed.tolist():
            sequence = next(self._sequence)
            rows[slot, [ACTOR, INCARNATION, SEQUENCE]] = 0, 1, sequence
            self.sent.append(sequence)
        self._sender.offer(closed)
        self._link.link.do_work()
        self._pump()

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Return open slots without a row."""
        self._free.extend(slots.tolist())

    def settle(self) -> None:
        """Wait until the replay has all closed chunks. Raises PeerTimeout."""

        def arrived() -> bool:
            self._pump()
            return not self._sender.unacknowledged

        if not arrived():
            self._wait(arrived, "an acknowledgement")
