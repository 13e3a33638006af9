"""A library client's links to a served replay: one for its calls, one for each writer.

A writer's chunks are built in private slots and go over its link when they are closed, as a relay's
do: kept until acknowledged, and sent again when the replay comes back.
"""

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zapex import library_messages as library
from zapex.batch import aligned_zeros
from zapex.chunk_store import ChunkStore
from zapex.errors import PeerDied, PeerError, PeerTimeout
from zapex.message_header import Form
from zapex.messages import Bye
from zapex.replay_core import ReplayLayout
from zapex.schema import ACTOR, INCARNATION, SEQUENCE
from zapex.zmq_client import ZmqLink
from zapex.zmq_socket import Security
from zapex.zmq_transport import ChunkSender

CONFIG = {"library": 1}
"""What both ends must agree on besides the schema."""
_LOOK_S = 0.2  # between two looks of the thread that says hello for idle links


def form_of(layout: ReplayLayout) -> Form:
    """What a library's messages look like."""
    return Form(layout.chunk_layout, library.most_rows(layout.schema), 1, any_rows=True)


class UrlLink:
    """One link, its lock, and how long to wait; `close()` may be called twice."""

    def __init__(
        self, url: str, form: Form, security: Security, timeout_s: float, *, actors: int = 0
    ) -> None:
        """Raises PeerTimeout, Refused, Fenced, ConfigError."""
        self.lock = threading.RLock()
        self.timeout_s = timeout_s
        self.chores: list[Callable[[], object]] = []
        self._closed = False
        self.link = ZmqLink(
            url, "client", 1 + secrets.randbits(62), 1, form, CONFIG, security,
            schema_hash=form.schema.hash, actors=actors,
        )  # fmt: skip
        try:
            self.link.open(timeout_s)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises PeerDied where it is closed."""
        if self._closed:
            raise PeerDied("this client is closed")

    def wait(self, ready: Callable[[], object], for_what: str) -> None:
        """Until `ready()`, the lock held. Raises PeerTimeout, and what the link does."""
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
        """What an idle link needs, if nobody is using it; False: it is closed or of no use."""
        if not self.lock.acquire(blocking=False):
            return True
        try:
            if self._closed:
                return False
            self.link.do_work()
            for chore in self.chores:
                chore()
            return True
        except PeerError:  # the user's next call says it
            return False
        finally:
            self.lock.release()

    def close(self) -> None:
        """Say goodbye."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self.link.close(bye=Bye())


class UrlHome:
    """Private slots whose chunks go over a link of their own when they are closed."""

    shard = 0

    def __init__(self, link: UrlLink, layout: ReplayLayout, streams: int) -> None:
        self.layout = layout
        self._link, self.lock = link, link.lock
        slots = 2 * streams + 4
        memory = aligned_zeros(ChunkStore.required_bytes(layout.chunk_layout, slots))
        self.store = ChunkStore(memory, layout.chunk_layout, slots)
        self._free = deque(range(slots))
        self._sender = ChunkSender(link.link, self.store)
        self._sequence = itertools.count()
        self.sent: list[int] = []  # sequences since somebody last looked
        link.chores.append(self._pump)

    @property
    def number(self) -> int:
        """Its actor number at the replay."""
        welcome = self._link.link.welcome
        assert welcome is not None
        return int(welcome.actors["actor"][0])

    def _pump(self) -> None:
        self._sender.do_work()
        self._free.extend(self._sender.take_freed())

    def reserve_streams(self, streams: int) -> None:
        """There is room for those that it was made for."""

    def release_streams(self, streams: int) -> None:
        """The writer is closed, and so is its link."""
        self.settle()
        self._link.close()

    def admit(self, rows: int) -> None:
        """Credit says it, chunk by chunk."""
        self._link.check()

    def open_slot(self) -> int:
        """A slot to fill. Raises PeerTimeout where the replay takes nothing for too long."""

        def is_free() -> bool:
            self._pump()
            return bool(self._free)

        if not self._free:
            self._link.wait(is_free, "room for more chunks")
        return self._free.popleft()

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64] | None = None,
    ) -> None:
        """Rows stay here until their slot is full; `closed` ones go."""
        if closed is None or not len(closed):
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
        """Open slots without a row."""
        self._free.extend(slots.tolist())

    def settle(self) -> None:
        """Wait until the replay has all that was closed. Raises PeerTimeout."""

        def arrived() -> bool:
            self._pump()
            return not self._sender.unacknowledged

        if not arrived():
            self._link.wait(arrived, "an acknowledgement")


class Keeper(threading.Thread):
    """Says hello, and takes in what has come, for links that nobody uses just now."""

    def __init__(self) -> None:
        super().__init__(name="zapex client", daemon=True)
        self._links: list[UrlLink] = []
        self._lock = threading.Lock()

    def keep(self, link: UrlLink) -> UrlLink:
        with self._lock:
            self._links.append(link)
        return link

    def run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                links = list(self._links)
            gone = [link for link in links if not link.look()]
            with self._lock:
                self._links = [link for link in self._links if link not in gone]
                if not self._links:
                    return
