"""A replay of another process of this host, with the names of PrioritizedReplay.

Transitions are written into the replay's slots in place, and batches are gathered from there; only
slot numbers, keys and priorities travel. Nothing waits for longer than a deadline: an owner that is
dead is PeerDied at once, one that does not answer is PeerTimeout.
"""

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zapex import handle
from zapex.arguments import FLOAT64, INT64, column
from zapex.batch import Batch
from zapex.chunk_store import NO_KEY, OFFSET_BITS, SLOT_BITS, ChunkStore
from zapex.errors import (
    TELLABLE,
    ConfigError,
    InvalidPriority,
    PeerDied,
    PeerTimeout,
    ReplayError,
)
from zapex.handle import Handle, LinkMemory
from zapex.idle import MAX_SLEEP_S, Waiter, Waker, spin_seconds
from zapex.replay_core import Method
from zapex.replay_face import Extender, Normalise, ReplayFace, Rows
from zapex.sampling import weigh_kernel
from zapex.shm_ring import FULL
from zapex.shm_segment import Segment, map_ahead, peer_of, receive_offer
from zapex.writer import Autoreset, Writer

_METHODS = get_args(Method)  # in the order of sampling.py
_LOOK_S = 0.1  # between two looks at whether the owner lives, for calls that wait for nothing
_MAP_STEP_BYTES = 16 << 20
_FULL_RING_S = 1e-3  # between two looks at a ring that the owner empties


def _map_slowly(memory: NDArray[np.uint8]) -> None:
    """Map it whole, at the lowest priority: a gather would take a fault for each page."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    for start in range(0, memory.nbytes, _MAP_STEP_BYTES):
        map_ahead(memory[start : start + _MAP_STEP_BYTES])


class HandleLink:
    """One link to the owner; also the `Home` of one writer. One thread at a time: `lock`."""

    def __init__(
        self, source: Handle, timeout_s: float, memory: NDArray[np.uint8] | None = None
    ) -> None:
        """memory: the replay's, where another link has mapped it already.

        Raises PeerDied, PeerTimeout, SharedMemoryError.
        """
        self.lock = threading.RLock()
        self.layout, self.shard = source.layout, source.shard
        self._timeout_s, self._waits_s = timeout_s, source.timeout_s
        self._limited, self._streams = source.limited, 0
        self._pid, self._why = os.getpid(), ""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(timeout_s)
        try:
            self._connection.connect("\0" + source.address)
            facts, fds = receive_offer(self._connection, source.address)
        except TimeoutError as error:
            self._connection.close()
            raise PeerTimeout(f"the replay's owner did not answer in {timeout_s:g} s") from error
        except (ConnectionError, FileNotFoundError) as error:
            self._connection.close()
            raise PeerDied(f"the replay's owner is gone, or serves no more ({error})") from error
        self._eventfds = [fds.pop(name) for name in ("event", "bell_event")]
        assert facts["schema"] == self.layout.schema.hash, "a handle of another replay"
        if memory is not None:
            os.close(fds.pop("memory"))
        mapped = {}
        for name, fd in fds.items():
            with Segment.attach(fd) as segment:
                mapped[name] = segment.buffer  # a mapping outlives its descriptor
        self.mapped = mapped["memory"] if memory is None else memory
        self.store = ChunkStore(self.mapped, self.layout.chunk_layout, self.layout.slots)
        self.at = LinkMemory(mapped["link"])
        self._requests = self.at.requests.producer()
        self._answers = self.at.answers.consumer()
        self._commits = self.at.commits.producer()
        self._owner = Waker(mapped["bell"].view(np.int64), 0, self._eventfds[1])
        self._waiter = Waiter(self.at.sleeping, 0, self._eventfds[0])
        self._spin_s = spin_seconds(2)
        owner, _ = peer_of(self._connection)
        try:
            # The socket alone does not say it: a fork of the owner would hold it open.
            self._pidfd = os.pidfd_open(owner)
        except OSError as error:
            raise PeerDied(f"the replay's owner (process {owner}) is gone: {error}") from error
        self._poll = select.poll()
        for fd in (self._connection.fileno(), self._pidfd):
            self._waiter.watch(fd)
            self._poll.register(fd, select.POLLIN)
        self._looked_s = time.monotonic()

    # One request at a time.

    def ask(self, kind: int, rows: int = 0, option: int = 0) -> np.void:
        """The owner's answer, released. Raises what it raised, PeerDied, PeerTimeout."""
        with self.lock:
            answer = self.call(kind, rows, option)
            self.release()
            return answer

    def call(self, kind: int, rows: int = 0, option: int = 0) -> np.void:
        """As `ask`, the lock held; what an answer's keys name stays as it is until `release`."""
        self._check()
        self._requests.try_offer(np.array([(kind, rows, option)], handle.REQUEST))
        self._owner.wake()
        ring = self.at.answers
        patience_s = self._timeout_s + (self._waits_s if self._limited else 0.0)
        self._wait(lambda: ring.tail > ring.head, patience_s)
        sequence, _ = self._answers.poll(1)
        answer: np.void = ring.records[sequence & (ring.capacity - 1)].copy()
        if answer["error"]:
            error, words = TELLABLE[int(answer["error"]) - 1], self.at.text
            self.release()
            raise error(words)
        return answer

    def release(self) -> None:
        """Done with the last answer."""
        self._answers.release(1)

    def _wait(
        self, ready: Callable[[], object], timeout_s: float, look_s: float = MAX_SLEEP_S
    ) -> None:
        """Until `ready()`, looked at each look_s; the link is of no use where that never came."""
        now_s = time.monotonic()
        deadline_s, spin_until_s = now_s + timeout_s, now_s + self._spin_s
        try:
            while not ready():
                now_s = time.monotonic()
                if now_s < spin_until_s:
                    os.sched_yield()
                elif now_s >= deadline_s:
                    raise PeerTimeout(
                        f"the replay's owner lives and did not answer in {timeout_s:g} s: is it "
                        "stopped, or does it hold the interpreter for so long?"
                    )
                elif self._waiter.sleep(ready, min(deadline_s - now_s, look_s)) and not ready():
                    raise PeerDied("the replay's owner is gone, or serves no more")
        except (
            BaseException
        ) as error:  # an interrupt too: the next call would get this one's answer
            self._fail(f"this client failed before: {error}")
            raise

    def _check(self) -> None:
        """Raise where the link is of no use."""
        if os.getpid() != self._pid:
            raise ReplayError(
                "this client is of the process that this one was forked from: connect again here"
            )
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
        self._connection.close()  # the owner takes it for our end

    def close(self) -> None:
        """End the link. May be called twice."""
        with self.lock:
            if self._pidfd < 0:
                return
            self._why = self._why or "this client is closed"
            self._connection.close()
            for fd in (self._pidfd, *self._eventfds):
                os.close(fd)
            self._pidfd = -1

    # The home of a writer.

    def reserve_streams(self, streams: int) -> None:
        """So many more streams will hold a slot each. Raises ConfigError."""
        self.ask(handle.RESERVE, streams)
        self._streams += streams

    def release_streams(self, streams: int) -> None:
        """Streams that will open no more chunks; with the last one the link ends."""
        self.ask(handle.RELEASE, streams)
        self._streams -= streams
        if not self._streams:
            self.close()

    def admit(self, rows: int) -> None:
        """Wait until so many transitions may come in. Raises ReplayError past the deadline."""
        if self._limited:
            self.ask(handle.ADMIT, rows)

    def open_slot(self) -> int:
        """A slot to fill."""
        return int(self.ask(handle.SLOT)["a"])

    def grown(
        self,
        indices: NDArray[np.int64],
        magnitudes: NDArray[np.float64],
        closed: NDArray[np.int64] | None = None,
    ) -> None:
        """Rows (R,) of our slots are whole, with |priorities| (-1: none); `closed` are full."""
        self._check()
        full = 0 if closed is None else len(closed)
        records = np.empty(len(indices) + full, handle.COMMIT)
        records["index"][: len(indices)] = indices
        records["magnitude"][: len(indices)] = magnitudes
        if closed is not None:
            records["index"][len(indices) :] = -1 - closed
        most = self._commits.ring.capacity // 2
        for first in range(0, len(records), most):
            self._tell(records[first : first + most])

    def _tell(self, records: NDArray[np.void]) -> None:
        if self._commits.try_claim(len(records)) == FULL:
            self._wait(
                lambda: self._commits.try_claim(len(records)) != FULL, self._timeout_s, _FULL_RING_S
            )
        self._commits.try_offer(records)
        ring = self._commits.ring
        if self._limited or ring.tail - ring.head >= handle.MANY_COMMITS:
            self._owner.wake()

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Open slots without a row."""
        for slot in slots.tolist():
            self.ask(handle.GIVE_BACK, slot)

    def settle(self) -> None:
        """What was told is seen by whoever asks for it."""


class HandleClient(ReplayFace):
    """A replay's client, made by `zapex.connect(replay.handle)`. Public methods are thread-safe.

    `torn`: rows of batches, so far, that were overwritten while they were copied (weight 0, key
    -1): only where this process was held up in the middle for as long as many chunks took to come.

    timeout_s: how long a call waits for an owner that lives. Every call raises PeerDied and
    PeerTimeout besides what its namesake raises.
    """

    def __init__(self, source: Handle, timeout_s: float = 10.0) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, got {timeout_s}")
        super().__init__(source.layout.schema)
        self.source, self.timeout_s = source, timeout_s
        self.torn = 0
        self._link = HandleLink(source, timeout_s)
        # Its own: whoever extends may have to wait for whoever samples.
        self._extending = HandleLink(source, timeout_s, self._link.mapped)
        self._extender = Extender(self._extending)
        memory = self._link.store.mem
        threading.Thread(target=_map_slowly, args=(memory,), name="zapex map", daemon=True).start()

    def writer(self, num_envs: int, autoreset: Autoreset = "next_step") -> Writer:
        """Streams of steps of vectorised environments, a link of their own; see Writer."""
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1, got {num_envs}")
        link = HandleLink(self.source, self.timeout_s, self._link.mapped)
        try:
            link.reserve_streams(num_envs)
            return Writer(link, num_envs, autoreset)
        except BaseException:
            link.close()
            raise

    def _take(self, rows: Rows) -> NDArray[np.int64]:
        with self._extending.lock:
            return self._extender.extend(rows)

    def sample(
        self,
        batch_size: int,
        beta: float = 0.4,
        out: Batch | None = None,
        *,
        method: Method = "stratified",
        normalise: Normalise = "batch",
    ) -> Batch:
        """`batch_size` transitions by priority; see PrioritizedReplay.sample."""
        if batch_size > handle.MOST_ROWS:
            raise ConfigError(
                f"a batch from another process has at most {handle.MOST_ROWS} rows, "
                f"got {batch_size}: draw several"
            )
        batch = self._batch_for(out, batch_size, method, normalise, _METHODS)
        by_memory = normalise == "memory"
        link = self._link
        with link.lock:
            answer = link.call(handle.SAMPLE, batch_size, 2 * _METHODS.index(method) + by_memory)
            keys = link.at.keys[:batch_size]
            probabilities = link.at.numbers[:batch_size]
            slots = keys >> OFFSET_BITS & ((1 << SLOT_BITS) - 1)
            batch.indices[:] = slots * link.layout.chunk + (keys & ((1 << OFFSET_BITS) - 1))
            smallest = float(answer["x"]) if by_memory else float(probabilities.min())
            weigh_kernel(probabilities, smallest, float(beta), batch.weights)
            torn = link.store.gather(keys, batch.layout, batch.memory, batch.keys)
            link.release()  # from here on slots that were evicted meanwhile may be filled again
            self.torn += torn
        if torn:
            batch.weights[batch.keys == NO_KEY] = 0.0
        return batch

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return at once."""
        return bool(self._link.ask(handle.CAN_SAMPLE, batch_size)["a"])

    def update_priorities(self, keys: ArrayLike, priorities: ArrayLike) -> tuple[int, int]:
        """New priorities for the transitions of `keys`; see PrioritizedReplay.update_priorities."""
        keys = np.asarray(keys)
        keys = column(keys, INT64, (keys.size,), "keys")
        given = column(priorities, FLOAT64, keys.shape, "priorities")
        if not np.isfinite(given).all():  # here: all pieces or none
            row = int(np.flatnonzero(~np.isfinite(given))[0])
            raise InvalidPriority(
                f"a priority must be finite, got {given[row]} in row {row}: has the loss diverged? "
                "Nothing was updated"
            )
        link, applied, stale = self._link, 0, 0
        with link.lock:
            for first in range(0, max(1, len(keys)), handle.MOST_ROWS):
                some = slice(first, first + handle.MOST_ROWS)
                rows = len(keys[some])
                link.at.keys[:rows], link.at.numbers[:rows] = keys[some], given[some]
                answer = link.ask(handle.UPDATE, rows)
                applied, stale = applied + int(answer["a"]), stale + int(answer["b"])
        return applied, stale

    def stats(self) -> dict[str, float]:
        """Counters of the replay, by name; see PrioritizedReplay.stats."""
        with self._link.lock:
            self._link.call(handle.STATS)
            words = self._link.at.text
            self._link.release()
        found: dict[str, float] = json.loads(words)
        return found

    def __len__(self) -> int:
        return int(self._link.ask(handle.STATS)["a"])

    def close(self) -> None:
        """Disconnect. Writers go on until they are closed; what was extended stays."""
        self._link.close()
        self._extending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
