"""The owner's end of `replay.handle`: takes rows in, answers, and clears up behind the dead.

One daemon thread looks at the links' rings, and sleeps on an eventfd and their sockets. Requests
are looked at before commits and answered after them, so that whoever asks sees what it, or whoever
told it, wrote before. Commits alone wake nobody before there are many: every call that could tell
the difference, the owner's own included, takes them in first.

A slot is filled in place by the client that asked for it; its rows can be drawn from the moment
that their commits are taken. A client that dies leaves its rows: those that it had committed; the
slot is then full, or free again where there was none.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import numpy as np
from numpy.typing import NDArray

from zapex import handle
from zapex.errors import TELLABLE, NotEnoughData, PeerError, ReplayError, ZapexError
from zapex.handle import Handle, LinkMemory
from zapex.idle import MAX_SLEEP_S, Waiter, Waker
from zapex.jit import kernel
from zapex.replay_core import Method
from zapex.schema import COUNT
from zapex.shm_ring import RingConsumer, RingProducer
from zapex.shm_segment import Populator, Segment, peer_of, send_offer

if TYPE_CHECKING:
    from zapex.replay import PrioritizedReplay

_METHODS = get_args(Method)
_CLOSE_S = 10.0
_DEFERRED_S = 1e-3  # between two looks at a request that the limiter lets wait
_NOBODY = -1


@kernel
def announce_kernel(records: Any, link: int, chunk: int, holders: Any, announced: Any) -> int:
    """Count rows and full slots that a client tells; how many records are right, up to a wrong one.

    records (R,): COMMIT["index"]. A slot must be the link's own, and its rows come in order.
    """
    for r in range(len(records)):
        index = records[r]
        slot = -1 - index if index < 0 else index // chunk
        if slot >= len(holders) or holders[slot] != link:
            return r
        if index < 0:
            holders[slot] = _NOBODY
            announced[slot] = -1
        elif announced[slot] != index - slot * chunk:
            return r
        else:
            announced[slot] += 1
    return len(records)


class ForkedLock:
    """The lock of a replay in a fork of its owner: nobody gets it."""

    def __enter__(self) -> NoReturn:
        raise ReplayError(
            "this process is a fork of the one that owns the replay: use "
            "zapex.connect(replay.handle) here, and start processes with spawn or forkserver"
        )

    def __exit__(self, *_: object) -> None:
        """Never entered."""


@dataclass(eq=False)
class _Link:
    """A client's link, and what it holds."""

    number: int
    connection: socket.socket
    pidfd: int  # -1: no such process can be seen from here
    segment: Segment
    eventfd: int
    memory: LinkMemory = field(init=False)
    streams: int = 0
    slots: int = 0
    answer: int = 0  # the number of the last sample, until it is released
    asked_s: float = 0.0  # since when the limiter lets its request wait; 0: it does not
    is_broken: bool = False  # told us what cannot be

    def __post_init__(self) -> None:
        self.memory = LinkMemory(self.segment.buffer, create=True)
        self.requests: RingConsumer = self.memory.requests.consumer()
        self.answers: RingProducer = self.memory.answers.producer()
        self.commits: RingConsumer = self.memory.commits.consumer()
        self.client = Waker(self.memory.sleeping, 0, self.eventfd)

    @property
    def descriptors(self) -> list[int]:
        """Those that say that it is over."""
        return [self.connection.fileno(), *([self.pidfd] if self.pidfd >= 0 else [])]

    def has_request(self) -> bool:
        ring = self.memory.requests
        return ring.tail > ring.head

    def has_many_commits(self) -> bool:
        ring = self.memory.commits
        return ring.tail - ring.head >= handle.MANY_COMMITS

    def holds_answer(self) -> bool:
        ring = self.memory.answers
        return self.answer > 0 and ring.tail > ring.head

    def close(self) -> None:
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        os.close(self.eventfd)
        self.segment.close()


class HandleServer:
    """Serves one replay to other processes until `close()`."""

    def __init__(self, replay: "PrioritizedReplay", segment: Segment) -> None:
        """segment: the replay's memory. Raises SharedMemoryError, OSError."""
        self._replay, self._segment = replay, segment
        layout = replay.layout
        # Abstract: no file that a killed owner would leave behind.
        address = f"zapex-{os.getpid()}-{secrets.token_hex(16)}"
        self.handle = Handle(
            address, json.dumps(layout.schema.describe()), layout.capacity, layout.streams,
            layout.chunk, replay.shard, bool(replay.samples_per_insert), replay.timeout_s,
        )  # fmt: skip
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind("\0" + address)
        self._listener.listen(64)
        self._bell = Segment.create("zapex bell", handle.BELL_BYTES)
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiter = Waiter(self._bell.buffer.view(np.int64), 0, self._eventfd)
        self._waiter.watch(self._listener.fileno())
        self._links: dict[int, _Link] = {}
        self._numbers = 0
        self._holders = np.full(replay.store.slots, _NOBODY, np.int64)
        self._stopping = False
        replay.released = self._released
        self._populator = Populator(segment)
        self._thread = threading.Thread(target=self._run, name="zapex handle", daemon=True)
        _SERVERS.add(self)
        self._populator.start()
        self._thread.start()

    @property
    def serves(self) -> bool:
        """It has neither been closed nor failed."""
        return self._thread.is_alive()

    @property
    def links(self) -> int:
        """How many there are; a client has one for each of its writers and up to two more."""
        return len(self._links)

    def close(self) -> None:
        """Serve no more: every client's next call raises PeerDied.

        Slots that clients were filling stay as they are: a client may still write into them.
        Raises ReplayError where another thread has held the replay for ten seconds.
        """
        self._stopping = True
        with contextlib.suppress(OSError):  # it has failed and is closed already
            os.eventfd_write(self._eventfd, 1)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise ReplayError(f"a thread of this process has held the replay for {_CLOSE_S:g} s")
        self._populator.stop()

    # The duty cycle.

    def _run(self) -> None:
        try:
            while not self._stopping:
                deferred = any(link.asked_s for link in self._links.values())
                woken = self._waiter.sleep(self._is_ready, _DEFERRED_S if deferred else MAX_SLEEP_S)
                if woken:
                    self._come_and_go(woken)
                self._do_work()
        finally:  # also of a failure, which threading reports
            self._hang_up()

    def _is_ready(self) -> bool:
        return any(
            (not link.asked_s and link.has_request()) or link.has_many_commits() or link.is_broken
            for link in self._links.values()
        )

    def _do_work(self) -> None:
        asking = [link for link in self._links.values() if link.has_request()]
        with self._replay.lock:
            self.take_in()
            for link in asking:
                if not link.is_broken:
                    self._serve(link)
            for link in [link for link in self._links.values() if link.is_broken]:
                self._forget(link)

    def take_in(self) -> None:
        """All that clients have committed; by any thread that holds the replay's lock."""
        for link in self._links.values():
            self._take_commits(link)

    def _released(self) -> int:
        """Answers that no client gathers from any more (ChunkStore's quarantine asks)."""
        held = [link.answer for link in self._links.values() if link.holds_answer()]
        return min(held) - 1 if held else self._replay.issued

    # Coming and going.

    def _come_and_go(self, woken: list[int]) -> None:
        if self._listener.fileno() in woken:
            self._accept()
        gone = [
            link for link in self._links.values() if not set(woken).isdisjoint(link.descriptors)
        ]
        for link in gone:
            self._leave(link)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: the others go on, and it is tried again
            time.sleep(_DEFERRED_S)
            return
        connection.setblocking(False)
        pid, uid = peer_of(connection)
        if uid != os.getuid():
            connection.close()
            return
        pidfd = -1
        with contextlib.suppress(OSError):  # gone already, which the socket will tell
            pidfd = os.pidfd_open(pid) if pid else -1
        self._numbers += 1
        try:
            segment = Segment.create("zapex link", handle.LINK_BYTES)
            eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:  # the client is told by the hang-up
            connection.close()
            return
        link = _Link(self._numbers, connection, pidfd, segment, eventfd)
        descriptors = {
            "memory": self._segment.fd, "link": link.segment.fd, "event": link.eventfd,
            "bell": self._bell.fd, "bell_event": self._eventfd,
        }  # fmt: skip
        if not send_offer(connection, ({"schema": self._replay.schema.hash}, descriptors)):
            link.close()
            return
        with self._replay.lock:
            self._links[link.number] = link
        for fd in link.descriptors:
            self._waiter.watch(fd)

    def _leave(self, link: _Link) -> None:
        """A client is gone for sure: the kernel closed its socket, or its pidfd fired."""
        replay = self._replay
        with replay.lock:
            self._take_commits(link)
            self._forget(link)

    def _forget(self, link: _Link) -> None:
        replay, ledger = self._replay, self._replay.ledger
        del self._links[link.number]
        for fd in link.descriptors:
            self._waiter.forget(fd)
        link.close()
        slots = np.flatnonzero(self._holders == link.number)
        begun = slots[ledger.announced[slots] > 0]
        # What the header counts beyond what was told may be half written.
        replay.store.header_rows[begun, COUNT] = ledger.announced[begun]
        empty = slots[ledger.announced[slots] == 0]
        self._holders[slots] = ledger.announced[slots] = -1
        replay.grown(np.empty(0, np.int64), np.empty(0), begun)
        replay.give_back(empty)
        replay.release_streams(link.streams)

    def _hang_up(self) -> None:
        self._listener.close()
        with self._replay.lock:
            for link in self._links.values():
                link.close()
            self._links.clear()
        self._bell.close()
        os.close(self._eventfd)

    # What clients send.

    def _take_commits(self, link: _Link) -> None:
        ring = link.memory.commits
        if link.is_broken or ring.tail == ring.head:
            return
        records = link.commits.take(ring.capacity)
        replay, ledger = self._replay, self._replay.ledger
        indices = np.ascontiguousarray(records["index"])
        right = announce_kernel(
            indices, link.number, replay.layout.chunk, self._holders, ledger.announced
        )
        indices, told = indices[:right], records["magnitude"][:right]
        rows = indices >= 0
        full = -1 - indices[~rows]
        link.slots -= len(full)
        replay.grown(indices[rows], told[rows], full)
        link.is_broken = right < len(records)  # no client of ours is

    def _serve(self, link: _Link) -> None:
        """Answer a link's request, unless it has to wait for the limiter."""
        sequence, _ = link.requests.poll(1)
        ring = link.memory.requests
        request = ring.records[sequence & (ring.capacity - 1)]
        answer = np.zeros(1, handle.ANSWER)
        try:
            values = self._call(
                link, int(request["kind"]), int(request["rows"]), int(request["option"])
            )
            if values is None:
                return
            answer["a"], answer["b"], answer["x"] = values
        except ZapexError as error:
            known = type(error) if type(error) in TELLABLE else PeerError
            answer["error"] = 1 + TELLABLE.index(known)
            link.memory.text = str(error)
        link.asked_s = 0.0
        link.requests.release(1)
        link.answers.try_offer(answer)
        link.client.wake()

    def _call(
        self, link: _Link, kind: int, rows: int, option: int
    ) -> tuple[int, int, float] | None:
        """Do what is asked; the answer's a, b, x, or None: not yet. Raises ZapexError."""
        replay = self._replay
        if kind == handle.SAMPLE:
            if self._must_wait(link, replay.sample_waits(rows), NotEnoughData):
                return None
            self._check_rows(rows)
            method, by_memory = _METHODS[option // 2 % len(_METHODS)], option % 2
            keys, probabilities, smallest = replay.issue(rows, method, bool(by_memory))
            link.memory.keys[:rows], link.memory.numbers[:rows] = keys, probabilities
            link.answer = replay.issued
            return 0, 0, smallest
        link.answer = 0
        if kind == handle.UPDATE:
            self._check_rows(rows)
            told: tuple[NDArray[Any], NDArray[Any]] = link.memory.keys, link.memory.numbers
            applied, stale = replay.update_priorities(*(array[:rows].copy() for array in told))
            return applied, stale, 0.0
        if kind == handle.SLOT:
            if link.slots >= link.streams:
                raise ReplayError(f"{link.streams} streams hold a slot each and not one more")
            slot = replay.open_slot()
            link.slots += 1
            self._holders[slot], replay.ledger.announced[slot] = link.number, 0
            return slot, 0, 0.0
        if kind == handle.GIVE_BACK:
            mine = np.flatnonzero(self._holders == link.number)
            if rows in mine and replay.ledger.announced[rows] == 0:
                self._holders[rows] = replay.ledger.announced[rows] = -1
                link.slots -= 1
                replay.give_back(np.array([rows]))
            return 0, 0, 0.0
        if kind == handle.ADMIT:
            if self._must_wait(link, replay.insert_waits(rows), ReplayError):
                return None
            return 0, 0, 0.0
        if kind == handle.RESERVE:
            replay.reserve_streams(rows)
            link.streams += rows
            return 0, 0, 0.0
        if kind == handle.RELEASE:
            rows = min(rows, link.streams)
            replay.release_streams(rows)
            link.streams -= rows
            return 0, 0, 0.0
        if kind == handle.CAN_SAMPLE:
            return replay.can_sample(rows), 0, 0.0
        if kind != handle.STATS:
            raise PeerError(f"there is no request of kind {kind}")
        link.memory.text = json.dumps(replay.stats())
        return len(replay), 0, 0.0

    @staticmethod
    def _check_rows(rows: int) -> None:
        if not 0 <= rows <= handle.MOST_ROWS:
            raise PeerError(f"a request is of at most {handle.MOST_ROWS} rows, got {rows}")

    def _must_wait(self, link: _Link, why: str, error: type[ReplayError]) -> bool:
        """Whether the limiter lets the request wait, `why` ("": no); raises past the deadline."""
        if not why:
            return False
        now_s = time.monotonic()
        link.asked_s = link.asked_s or now_s
        if now_s - link.asked_s >= self._replay.timeout_s:
            raise error(f"after {self._replay.timeout_s:g} s: {why}")
        return True


_SERVERS: "weakref.WeakSet[HandleServer]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A fork shares the memory with the owner, and must not write to it."""
    for server in list(_SERVERS):
        server._replay.lock = ForkedLock()  # type: ignore[assignment]
        with contextlib.suppress(OSError):
            server._listener.close()
        for link in server._links.values():
            # Closed without a word: the other ends are the owner's business.
            with contextlib.suppress(OSError):
                link.connection.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
