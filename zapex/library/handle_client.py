"""A client of a replay that another process of this host owns.

Transitions are written into the replay's slots in place, and batches are gathered from there. Only
slot numbers, keys and priorities are sent. Every wait has a deadline: a call raises PeerDied at
once when the owner is dead, and PeerTimeout when it does not answer.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch, SequenceBatch
from zapex.chunks.store import ChunkStore
from zapex.errors import ConfigError, PeerDied, PeerError, PeerTimeout, told
from zapex.library.client import Answer, ProcessLock, ReplayClient
from zapex.library.handle import (
    BELL_BYTES,
    DESCRIPTORS,
    LINK_BYTES,
    MOST_ROWS,
    Handle,
    LinkMemory,
)
from zapex.library.interface import Extender, Rows
from zapex.machine.segment import Segment, connect_unix, map_ahead, peer_of, receive_offer
from zapex.machine.waiting import MAX_SLEEP_S, Waiter, Waker, spin_seconds
from zapex.replay.draw import METHODS
from zapex.replay.sequences import Sequences, compile_kernels, gather, most_pieces, weigh
from zapex.shm_transport import Caller
from zapex.sumtree_numba import Method
from zapex.wire.messages import Request

_LOOK_S = 0.1  # between two checks that the owner lives, for calls that do not wait
_MAP_STEP_BYTES = 16 << 20


def _map_slowly(memory: NDArray[np.uint8]) -> None:
    """Map all pages now, at the lowest priority. Else a gather has a page fault for each."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    for start in range(0, memory.nbytes, _MAP_STEP_BYTES):
        map_ahead(memory[start : start + _MAP_STEP_BYTES])


def _close_all(fds: dict[str, int]) -> None:
    for fd in fds.values():
        os.close(fd)


def _mapped(fds: dict[str, int], name: str, expected_bytes: int | None = None) -> NDArray[np.uint8]:
    """A segment's memory, which outlives its descriptor. Raises SharedMemoryError."""
    with Segment.attach(fds[name], expected_bytes) as segment:
        del fds[name]
        return segment.buffer


class HandleLink:
    """One link to the owner, and the `SlotProvider` of one writer. `lock`: one thread at a time."""

    def __init__(
        self, source: Handle, timeout_s: float, memory: NDArray[np.uint8] | None = None
    ) -> None:
        """memory: the replay's, if another link has mapped it.

        Raises PeerDied, PeerTimeout, PeerError, SharedMemoryError.
        """
        self.lock = ProcessLock()
        self.layout, self.shard = source.layout, source.shard
        self._timeout_s, self._waits_s = timeout_s, source.timeout_s
        self._limited, self._streams = source.limited, 0
        self._why = ""
        with contextlib.ExitStack() as opened:
            self._connection = opened.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            fds = self._receive(source.address)
            opened.callback(_close_all, fds)
            if memory is None:
                memory = _mapped(fds, "memory")
            else:
                os.close(fds.pop("memory"))
            self.mapped = memory
            self.store = ChunkStore(self.mapped, self.layout.chunk_layout, self.layout.slots)
            self.at = LinkMemory(_mapped(fds, "link", LINK_BYTES))
            bell = _mapped(fds, "bell", BELL_BYTES)
            owner_waker = Waker(bell.view(np.int64), 0, fds["bell_event"])
            self._waiter = Waiter(self.at.sleeping, 0, fds["event"])
            owner, _ = peer_of(self._connection)
            try:
                # The socket is not enough: a fork of the owner would keep it open.
                pidfd = os.pidfd_open(owner)
            except OSError as error:
                raise PeerDied(f"the replay's owner (process {owner}) is gone: {error}") from error
            opened.callback(os.close, pidfd)
            self._opened = opened.pop_all()
        self.calls, self._owner = Caller(self.at.calls, owner_waker), owner_waker
        self._commits = self.at.commits.producer()
        self._spin_s = spin_seconds(1, 100e-6)  # this thread waits in any case
        self._poll = select.poll()
        for fd in (self._connection.fileno(), pidfd):
            self._waiter.watch(fd)
            self._poll.register(fd, select.POLLIN)
        self._looked_s = time.monotonic()

    def _receive(self, address: str) -> dict[str, int]:
        """The owner's descriptors by name, after a check that they are of this replay."""
        self._connection.settimeout(self._timeout_s)
        try:
            connect_unix(self._connection, "\0" + address, self._timeout_s)
            facts, fds = receive_offer(self._connection, address)
        except TimeoutError as error:
            raise PeerTimeout(
                f"the replay's owner did not answer in {self._timeout_s:g} s"
            ) from error
        except (ConnectionError, FileNotFoundError) as error:
            raise PeerDied(f"the replay's owner is gone, or serves no more ({error})") from error
        if facts != {"schema": self.layout.schema.hash} or fds.keys() != set(DESCRIPTORS):
            _close_all(fds)
            raise PeerError(
                f"another replay answers at this handle: it says {facts} and sends "
                f"{sorted(fds)}; get a new handle from the replay's owner"
            )
        return fds

    # One request at a time.

    def ask(self, kind: int, rows: int = 0) -> Answer:
        """Return the owner's answer, released. Raises the owner's error, PeerDied, PeerTimeout."""
        with self.lock:
            a, b = self.call(kind, rows)
            words = self.at.text if kind == Request.STATS else ""
            self.calls.release()
            return Answer(a, b, words)

    def call(self, kind: int, rows: int = 0, option: int = 0) -> tuple[int, int]:
        """As `ask`, with the lock held: the answer's numbers.

        Its transitions do not change until `calls.release()`.
        """
        self._check()
        self.calls.ask(kind, rows, option)
        self._wait(self.calls.ready, self._timeout_s + (self._waits_s if self._limited else 0.0))
        error, a, b = self.calls.answer() or (0, 0, 0)
        if error:
            reason = told(error, self.at.text)
            self.calls.release()
            raise reason
        return a, b

    def _wait(
        self, ready: Callable[[], object], timeout_s: float, look_s: float = MAX_SLEEP_S
    ) -> None:
        """Wait until `ready()`, checked every look_s. If it never comes, the link is unusable."""
        now_s = time.monotonic()
        deadline_s, spin_until_s = now_s + timeout_s, now_s + self._spin_s
        try:
            while not ready():
                now_s = time.monotonic()
                if now_s < spin_until_s:
                    os.sched_yield()
                elif self._waiter.sleep(ready, min(deadline_s - now_s, look_s)):
                    if not ready():
                        raise PeerDied("the replay's owner is gone, or serves no more")
                elif now_s >= deadline_s:
                    raise PeerTimeout(
                        f"the replay's owner runs but did not answer in {timeout_s:g} s: is it "
                        "stopped, or does it hold the interpreter for so long?"
                    )
        except BaseException as error:  # an interrupt too: else the next call gets this answer
            self._fail(f"this client failed before: {error}")
            raise

    def _check(self) -> None:
        """Raise if the link is unusable."""
        if self._why:
            raise PeerDied(self._why)
        now_s = time.monotonic()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            if self._poll.poll(0):
                self._fail("the replay's owner is gone, or serves no more")
                raise PeerDied(self._why)

    def _fail(self, why: str) -> None:
        self._why = self._why or why
        self._connection.close()  # for the owner this is the end of the link

    def close(self) -> None:
        """End the link. May be called twice."""
        with self.lock:
            self._why = self._why or "this client is closed"
            self._opened.close()

    # The slots of a writer.

    def reserve_streams(self, streams: int) -> None:
        """Announce `streams` more streams, each with a slot. Raises ConfigError."""
        self.ask(Request.STREAMS, self._streams + streams)
        self._streams += streams

    def release_streams(self, streams: int, slots: NDArray[np.int64]) -> None:
        """Announce streams that open no more chunks; after the last stream the link is closed.

        Then the owner takes back all slots.
        """
        self._streams -= streams
        self.ask(Request.STREAMS, self._streams)
        if not self._streams:
            self.close()

    def admit(self, rows: int) -> None:
        """Wait until the limiter admits `rows` transitions. Raises ReplayError at the deadline."""
        self._check()  # once the link has ended, its slots may be another writer's
        if self._limited:
            self.ask(Request.ADMIT, rows)

    def open_slot(self) -> int:
        """Get a slot to fill."""
        return self.ask(Request.SLOT).a

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64],
    ) -> None:
        """Announce `closed` slots; the owner finds whole rows by the headers of the open ones."""
        self._check()
        most = self._commits.ring.capacity
        for first in range(0, len(closed), most):
            some = closed[first : first + most]
            if not self._commits.try_offer(some):
                # The owner takes in what was committed before it answers.
                self.ask(Request.STREAMS, self._streams)
                self._commits.try_offer(some)
        if self._limited:  # others may wait for these rows
            self._owner.wake()

    def give_up(self) -> None:
        """End the link; what the owner can see of the writer's rows stays."""
        self.close()

    def settle(self) -> None:
        """Nothing to do: the owner takes in commits before it answers a request."""


class HandleClient(ReplayClient):
    """A replay's client, made by `zapex.connect(replay.handle)`. Public methods are thread-safe.

    `torn`: rows of batches so far that were overwritten during their copy (weight 0, key -1). This
    happens only if this process stops during the copy for the time in which many chunks come in.

    timeout_s: how long a call waits for an owner that lives. Every call can raise PeerDied and
    PeerTimeout, and the errors of the same method of PrioritizedReplay.
    """

    _most_rows, _where = MOST_ROWS, "from another process"

    def __init__(self, source: Handle, timeout_s: float = 10.0) -> None:
        super().__init__(source.layout.schema, timeout_s)
        self.source = source
        self.torn = 0
        self._link = HandleLink(source, timeout_s)
        self._lock = self._link.lock
        # A separate link: `extend` may have to wait until another thread samples.
        self._extending = self._writer_link(1)
        self._extender = Extender(self._extending)
        memory = self._link.store.mem
        threading.Thread(target=_map_slowly, args=(memory,), name="zapex map", daemon=True).start()

    def _writer_link(self, num_envs: int) -> HandleLink:
        return HandleLink(self.source, self.timeout_s, self._link.mapped)

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        with self._extending.lock:
            return self._extender.extend(rows)

    def _holds(self, key: int) -> bool:
        return self._link.store.holds(key)

    def _draw(self, batch: Batch, beta: float, method: Method, by_memory: bool) -> None:
        link, rows = self._link, batch.layout.batch_size
        with link.lock:
            link.call(Request.SAMPLE, rows, 2 * METHODS.index(method) + by_memory)
            draw = link.calls.draw(rows)
            self.torn += draw.gather(link.store, batch, beta, by_memory=by_memory)
            link.calls.release()  # now slots that were evicted meanwhile may be filled again

    def _draw_sequences(self, batch: SequenceBatch, asked: Sequences, beta: float) -> None:
        link, rows = self._link, batch.layout.batch_size
        pieces = most_pieces(asked.steps, link.layout.chunk)
        if rows * pieces > MOST_ROWS:
            raise ConfigError(f"at most {MOST_ROWS // pieces} such sequences at once, got {rows}")
        if not link.store.plans:  # first here: the owner, which has a deadline, finds them cached
            compile_kernels(link.store)
        with link.lock:
            link.call(Request.SEQUENCES, rows, asked.option)
            draw = link.calls.draw(rows * pieces)
            self.torn += gather(draw, link.store, batch, asked.stride)
            weigh(batch, draw.leaves[::pieces], beta)
            link.calls.release()

    def _ask(self, what: Request, rows: int = 0) -> Answer:
        return self._link.ask(what, rows)

    def _send_update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> Answer:
        self._link.calls.update(keys, priorities)
        return self._link.ask(Request.UPDATE, len(keys))

    def close(self) -> None:
        """Disconnect. Writers work until they are closed. Added transitions stay."""
        self._link.close()
        self._extending.close()
