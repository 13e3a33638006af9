"""The owner's end of `replay.handle`: takes rows in, answers, frees slots of dead clients.

One daemon thread reads the links' rings, and sleeps on an eventfd and their sockets. It reads
requests before it takes in what clients have written, and answers them after that. So a client sees
the rows that it wrote before, and those of other processes that it knows of. Rows do not wake the
thread. Every call whose result depends on them, also the owner's, takes them in first.

The client that asked for a slot fills it in place. The slot's header counts its whole rows, so
nothing has to be sent for a row. A Reclaimer takes over full slots. When a client dies, its rows
stay: its slot then counts as full, or is free again if it has no row.
"""

import contextlib
import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zapex.errors import NotEnoughData, PeerError, ReplayError, ZapexError, tell
from zapex.library.handle import (
    BELL_BYTES,
    DESCRIPTORS,
    LINK_BYTES,
    MOST_ROWS,
    Handle,
    LinkMemory,
)
from zapex.machine.segment import Populator, Segment, peer_of, send_offer
from zapex.machine.waiting import MAX_SLEEP_S, Waiter, Waker, spin_seconds
from zapex.replay.draw import METHODS, Draw
from zapex.replay.sequences import Sequences, most_pieces
from zapex.roles.intake import Reclaimer
from zapex.shm_transport import Answerer
from zapex.transport import Incarnation
from zapex.wire.messages import Request

if TYPE_CHECKING:
    from zapex.library.prioritized import OwnedReplay


class OwnerLink:
    """HandleServer's facts about a client; `close` closes all that this object opened."""

    def __init__(self, number: int, connection: socket.socket, pid: int) -> None:
        """pid: the client's process; 0: not visible from here. Raises OSError."""
        self.number, self.connection = number, connection
        self.streams = 0
        self.answer = 0  # the number of the last sample until its release
        self.asked_s = 0.0  # when its request began to wait for the limiter; 0: none waits
        with contextlib.ExitStack() as opened:
            self.descriptors = [connection.fileno()]  # become readable when the client ends
            with contextlib.suppress(OSError):  # the client is gone; the socket reports it
                if pid:
                    self.descriptors.append(os.pidfd_open(pid))
                    opened.callback(os.close, self.descriptors[1])
            self.segment = opened.enter_context(Segment.create("zapex link", LINK_BYTES))
            self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            opened.callback(os.close, self.eventfd)
            self._opened = opened.pop_all()
        self.memory = LinkMemory(self.segment.buffer, create=True)
        client = Waker(self.memory.sleeping, 0, self.eventfd)
        self.calls = Answerer(self.memory.calls, client)
        self.commits = self.memory.commits.consumer()

    def holds_answer(self) -> bool:
        """Whether the client may still gather the rows of its last sample."""
        return self.answer > 0 and self.calls.released < self.calls.issued

    def close(self) -> None:
        """Close everything; the client sees its socket end."""
        self.connection.close()
        self._opened.close()


_NO_SLOTS = np.empty(0, np.int64)
_CLOSE_S = 10.0
_DEFERRED_S = 1e-3  # between two checks of a request that waits for the limiter
_BREAK_S = 2e-3  # without an answer; then a client that asks again may do so more often
_SLEEPY_ANSWERS = 8  # answers after which nobody is waited for, since one did not come


_Handler = Callable[[OwnerLink, int, int], tuple[int, int] | Draw | None]
"""Handles a request of `rows` with `option`: the answer's a and b, or a draw; None: not yet."""


class _Commits:
    """The commits of all links, for a Reclaimer; `ended`: the numbers of those that have ended."""

    def __init__(self, links: dict[int, OwnerLink]) -> None:
        self._links = links
        self.ended: list[int] = []

    def take_in(self) -> list[Incarnation]:
        """The links that have ended since the last call."""
        ended, self.ended = self.ended, []
        return [Incarnation(number, 0) for number in ended]

    def committers(self) -> list[int]:
        """The links with full slots."""
        links = self._links.items()
        return [n for n, link in links if link.streams and link.memory.commits.used]

    def committed(self, number: int) -> NDArray[np.int64]:
        """The full slots that a link has reported since the last call."""
        link = self._links[number]
        return link.commits.take(link.memory.commits.capacity)


class HandleServer:
    """Serves one replay to other processes until `close()`."""

    def __init__(self, replay: "OwnedReplay", segment: Segment) -> None:
        """segment: the replay's memory. Raises SharedMemoryError, OSError."""
        self._replay, self._segment = replay, segment
        layout = replay.layout
        # An abstract socket: a killed owner leaves no file.
        address = f"zapex-{os.getpid()}-{secrets.token_hex(16)}"
        self.handle = Handle(
            address,
            json.dumps(layout.schema.describe()),
            layout.capacity,
            layout.streams,
            layout.chunk,
            replay.shard,
            bool(replay.samples_per_insert),
            replay.timeout_s,
        )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind("\0" + address)
        self._listener.listen(64)
        self._bell = Segment.create("zapex bell", BELL_BYTES)
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiter = Waiter(self._bell.buffer.view(np.int64), 0, self._eventfd)
        self._waiter.watch(self._listener.fileno())
        self._links: dict[int, OwnerLink] = {}
        self._numbers = 0
        self._commits = _Commits(self._links)
        self._reclaimer = Reclaimer(self._commits, replay)
        self._answered_s, self._asks_soon, self._sleepy = 0.0, False, 0
        self._spin_s = spin_seconds(1, 100e-6)
        self._stopping = False
        self._handlers: dict[int, _Handler] = {
            Request.SAMPLE: self._sample,
            Request.SEQUENCES: self._sequences,
            Request.UPDATE: self._update,
            Request.STATS: self._stats,
            Request.CAN_SAMPLE: self._can_sample,
            Request.STREAMS: self._set_streams,
            Request.ADMIT: self._admit,
            Request.SLOT: self._open_slot,
        }
        self._populator = Populator(segment)
        self._thread = threading.Thread(target=self._run, name="zapex handle", daemon=True)
        _SERVERS.add(self)
        self._populator.start()
        self._thread.start()

    @property
    def serves(self) -> bool:
        """Whether it still runs: not closed, not failed."""
        return self._thread.is_alive()

    @property
    def links(self) -> int:
        """The number of links; a client has one for each of its writers and up to two more."""
        return len(self._links)

    def close(self) -> None:
        """Stop serving: every client's next call raises PeerDied.

        Slots that clients fill now do not change state: a client may still write into them.
        Raises ReplayError if another thread has held the replay for ten seconds.
        """
        self._stopping = True
        with contextlib.suppress(OSError):  # it failed and is closed
            os.eventfd_write(self._eventfd, 1)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise ReplayError(f"a thread of this process has held the replay for {_CLOSE_S:g} s")
        self._populator.stop()

    # The duty cycle.

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._stays_awake():
                    deferred = any(link.asked_s for link in self._links.values())
                    longest_s = _DEFERRED_S if deferred else MAX_SLEEP_S
                    if woken := self._waiter.sleep(self._is_ready, longest_s):
                        self._come_and_go(woken)
                self._do_work()
        finally:  # also after a failure, which threading reports
            self._hang_up()

    def _stays_awake(self) -> bool:
        """After an answer to a client that asks soon again, wait for it without sleep.

        Returns whether a request came. To sleep and to be woken takes longer than a small request.
        """
        nothing = select.poll()
        while self._asks_soon and time.monotonic() < self._answered_s + self._spin_s:
            if self._is_ready():
                return True
            nothing.poll(0)  # other threads may have the interpreter; time.sleep(0) takes 80 us
        if self._asks_soon:
            self._asks_soon, self._sleepy = False, _SLEEPY_ANSWERS  # in vain
        return False

    def _is_ready(self) -> bool:
        return any(not link.asked_s and link.calls.is_asked() for link in self._links.values())

    def _do_work(self) -> None:
        asking = [link for link in self._links.values() if link.calls.is_asked()]
        with self._replay.lock:
            self.take_in()
            for link in asking:
                self._serve(link)

    def take_in(self) -> None:
        """Take in what clients have written; for any thread that holds the replay's lock."""
        if self._links:
            self._replay.take_rows()
            self._reclaimer.take_in()
            self._replay.evict_surplus()

    @property
    def released(self) -> int:
        """How many answers no client reads from any more, for the quarantine."""
        held = [link.answer for link in self._links.values() if link.holds_answer()]
        return min(held) - 1 if held else self._replay.issued

    # Connections.

    def _come_and_go(self, woken: list[int]) -> None:
        if self._listener.fileno() in woken:
            self._accept()
        gone = [
            link for link in self._links.values() if not set(woken).isdisjoint(link.descriptors)
        ]
        # A client is certainly gone: the kernel closed its socket, or its pidfd fired.
        for link in gone:
            with self._replay.lock:
                self._end_streams(link)
                del self._links[link.number]
            for fd in link.descriptors:
                self._waiter.forget(fd)
            link.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: the other links continue; try again later
            time.sleep(_DEFERRED_S)
            return
        connection.setblocking(False)
        pid, uid = peer_of(connection)
        if uid != os.getuid():
            connection.close()
            return
        self._numbers += 1
        try:
            link = OwnerLink(self._numbers, connection, pid)
        except OSError:  # closing the connection tells the client
            connection.close()
            return
        sent = self._segment.fd, link.segment.fd, link.eventfd, self._bell.fd, self._eventfd
        descriptors = dict(zip(DESCRIPTORS, sent, strict=True))
        if not send_offer(connection, ({"schema": self._replay.layout.schema.hash}, descriptors)):
            link.close()
            return
        with self._replay.lock:
            self._links[link.number] = link
        for fd in link.descriptors:
            self._waiter.watch(fd)

    def _end_streams(self, link: OwnerLink) -> None:
        """Take back the slots of a link that fills none any more."""
        self._commits.ended.append(link.number)
        self.take_in()
        self._replay.release_streams(link.streams, _NO_SLOTS)
        link.streams = 0

    def _hang_up(self) -> None:
        self._listener.close()
        with self._replay.lock:
            for link in self._links.values():
                link.close()
            self._links.clear()
        self._bell.close()
        os.close(self._eventfd)

    # What clients send.

    def _serve(self, link: OwnerLink) -> None:
        """Answer a link's request, unless it must wait for the limiter."""
        kind, rows, option = link.calls.request()
        try:
            if kind not in self._handlers:
                raise PeerError(f"there is no request of kind {kind}")
            if kind not in (Request.SAMPLE, Request.SEQUENCES):
                link.answer = 0
            found = self._handlers[kind](link, rows, option)
            if found is None:
                return
            if isinstance(found, Draw):
                link.calls.reply(draw=found)
            else:
                link.calls.reply(*found)
        except ZapexError as error:
            link.memory.text = str(error)
            link.calls.reply(error=tell(error))
        link.asked_s = 0.0
        before_s, self._answered_s = self._answered_s, time.monotonic()
        gap_s = self._answered_s - before_s
        self._sleepy = max(0, self._sleepy - 1) if gap_s < _BREAK_S else 0
        self._asks_soon = gap_s < 4 * self._spin_s and not self._sleepy  # both may have slept

    # Each handles one request. Raises ZapexError.

    def _sample(self, link: OwnerLink, rows: int, option: int) -> Draw | None:
        replay = self._replay
        if self._must_wait(link, replay.sample_waits(rows), NotEnoughData):
            return None
        self._check_rows(rows)
        method = METHODS[option // 2 % len(METHODS)]
        return self._issued(link, replay.draw_counted(rows, method, bool(option % 2)))

    def _sequences(self, link: OwnerLink, rows: int, option: int) -> Draw | None:
        replay, asked = self._replay, Sequences.of_option(option)
        self._check_rows(rows * most_pieces(asked.steps, replay.layout.chunk))
        if self._must_wait(link, replay.sample_waits(rows * asked.length), NotEnoughData):
            return None
        return self._issued(link, replay.draw_sequences(rows, asked))

    def _issued(self, link: OwnerLink, draw: Draw) -> Draw:
        """Note that the client reads these rows until its next request."""
        self._replay.issued += 1
        link.answer = self._replay.issued
        return draw

    def _update(self, link: OwnerLink, rows: int, option: int) -> tuple[int, int]:
        self._check_rows(rows)
        counts = 0, 0
        for keys, priorities in link.calls.updates():  # one
            # Copies: the client could write there while they are checked.
            counts = self._replay.reprioritise(keys[:rows].copy(), priorities[:rows].copy())
        return counts

    def _stats(self, link: OwnerLink, rows: int, option: int) -> tuple[int, int]:
        link.memory.text = json.dumps(self._replay.stats())
        return len(self._replay), 0

    def _can_sample(self, link: OwnerLink, rows: int, option: int) -> tuple[int, int]:
        return self._replay.can_sample(rows), 0

    def _set_streams(self, link: OwnerLink, rows: int, option: int) -> tuple[int, int]:
        self._check_rows(rows)
        if rows:
            self._replay.reserve_streams(rows - link.streams)
            link.streams = rows
        else:
            self._end_streams(link)
        return 0, 0

    def _admit(self, link: OwnerLink, rows: int, option: int) -> tuple[int, int] | None:
        waits = self._must_wait(link, self._replay.insert_waits(rows), ReplayError)
        return None if waits else (0, 0)

    def _open_slot(self, link: OwnerLink, rows: int, option: int) -> tuple[int, int]:
        held = self._reclaimer.granted[link.number]
        if len(held) >= link.streams:
            raise ReplayError(f"{link.streams} streams may hold one slot each, and all of them do")
        slot = self._replay.open_slot(elsewhere=True)
        held.add(slot)
        return slot, 0

    @staticmethod
    def _check_rows(rows: int) -> None:
        if not 0 <= rows <= MOST_ROWS:
            raise PeerError(f"a request is of at most {MOST_ROWS} rows, got {rows}")

    def _must_wait(self, link: OwnerLink, why: str, error: type[ReplayError]) -> bool:
        """Whether the request must wait for the limiter, `why` ("": no); raises at the deadline."""
        if not why:
            return False
        now_s = time.monotonic()
        link.asked_s = link.asked_s or now_s
        if now_s - link.asked_s >= self._replay.timeout_s:
            raise error(f"after {self._replay.timeout_s:g} s: {why}")
        return True


_SERVERS: "weakref.WeakSet[HandleServer]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The owner's connections are not the fork's. OwnedReplay refuses all calls in it."""
    for server in list(_SERVERS):
        with contextlib.suppress(OSError):
            server._listener.close()
        for link in server._links.values():
            # Close without a message: the other ends belong to the owner.
            with contextlib.suppress(OSError):
                link.connection.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
