"""zapex's own transports, measured: the real replay role in one process, real clients in others.

    push     closed chunks that lie in slots, until the replay has acknowledged all of them
             (over shm: until it has made them live)
    pull     parameters newer than the last, asked for, until they lie in the reader's memory
    sample   one batch asked for, until it is assembled in the learner's memory
    update   priorities of one batch, until the replay has acknowledged them
    push_and_sample   a batch asked for, then one push, until both are there

Throughput is with several under way: two pushes, two batches.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.transport.roofs import pulls, rate, timed
from benchmarks.transport.server import BETA, PREFETCH, Setting, waiter
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    COUNT,
    INCARNATION,
    LIVE,
    SEQUENCE,
    STATE,
    STREAM,
    BatchLayout,
)
from zapex.chunks.store import ChunkStore
from zapex.host.roster import Routes
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.shard_samples import ShardedSampleSource
from zapex.shm_transport import HostMemory
from zapex.wire.protocol import Kind
from zapex.zmq_transport import (
    ChunkSender,
    ShardedChunkSender,
    ZmqParameterSink,
    ZmqParameterSource,
)

_DEADLINE_S = 60.0


def write_chunk(setting: Setting, store: ChunkStore, slot: int, rows: int, actor: int) -> None:
    """A closed chunk of random frames, but for its sequence."""
    layout, schema = store.layout, setting.schema
    window = np.arange(schema.stack, dtype=np.uint16)
    first = np.arange(rows, dtype=np.uint16)[:, None] + window
    column = layout.column("obs_frames", store.mem, store.body(slot))
    column[:rows] = first
    store.column(slot, "next_obs_frames")[:rows] = first + np.uint16(schema.n_step)
    for name, value in (("reward", 0.0), ("discount", 1.0), ("priority", 1.0)):
        store.column(slot, name)[:rows] = value
    header = store.header_rows[slot]
    header[COUNT], header[ACTOR], header[INCARNATION], header[STREAM] = rows, actor, 1, 0


class NetworkClient:
    """One actor host's relay, and, for the first of them, the learner.

    url: of the replay, or of all shards of a run with commas between them; then all but `update`.
    """

    def __init__(self, setting: Setting, url: str, security: dict[str, Security], number: int):
        self._setting = setting
        layout = setting.layout

        def links(role: str, host: int, actors: int) -> list[ZmqLink]:
            return [
                ZmqLink(
                    one, role, host, 1, setting.form, {}, security[role],
                    schema_hash=layout.schema.hash, actors=actors,
                )
                for one in url.split(",")
            ]  # fmt: skip

        self._relays = links("relay", 1 + number, 1)
        self.relay = self._relays[0]
        slots = 2 * len(setting.rows)
        self.store = ChunkStore(
            aligned_zeros(ChunkStore.required_bytes(layout.chunk_layout, slots)),
            layout.chunk_layout, slots,
        )  # fmt: skip
        rng = np.random.default_rng(number)
        for slot in range(slots):
            frames = self.store.column(slot, "obs").reshape(-1).view(np.uint8)
            frames[:] = rng.integers(0, 255, frames.size, np.uint8)
            write_chunk(setting, self.store, slot, setting.rows[slot % len(setting.rows)], 0)
            self.store.header_rows[slot, STATE] = COMMITTED
        half = slots // 2
        # Two pushes take turns, so that each has the same chunks: one short among the whole ones.
        self._pushes = deque((range(half), range(half, slots)))
        self._free = set(range(slots))
        self._sequence = 0
        self.sender: ChunkSender | ShardedChunkSender
        if len(self._relays) == 1:
            self.sender = ChunkSender(self.relay, self.store)
        else:
            routes = Routes(aligned_zeros(Routes.required_bytes(1)), 1)
            self.sender = ShardedChunkSender(self._relays, self.store, routes, (number,), print)
        self._source = ZmqParameterSource(self.relay)
        self._parameters = np.zeros(setting.parameter_bytes, np.uint8)
        self._version = self.push_bytes = 0
        self._received: dict[Kind, int] = {}
        self._weigh(self.relay, Kind.PARAMS)
        for one in self._relays:
            one.open(_DEADLINE_S)
        if number == 0:
            self._learners = links("learner", 1000, 0)
            self.learner = self._learners[0]
            self.samples: Any
            if len(self._learners) == 1:
                self.samples = ZmqSampleSource(self.learner, BETA)
            else:
                self.samples = ShardedSampleSource(
                    [ZmqSampleSource(link, BETA) for link in self._learners],
                    BETA,
                    "stratified",
                    1,
                    print,
                )
            self._sink = ZmqParameterSink(self.learner)
            for one in self._learners:
                self._weigh(one, Kind.BATCH)
                one.open(_DEADLINE_S)
            channels_last = setting.schema.stack > 1  # as a learner on a CPU takes them
            self.batch = Batch.empty(BatchLayout(setting.schema, setting.batch, channels_last))
            self.priorities = np.ones(setting.batch, np.float32)

    def _weigh(self, link: ZmqLink, kind: Kind) -> None:
        """Count the bytes of messages of a kind, as they are received."""
        raw = kind in link._raw
        take = link._raw[kind] if raw else link.handlers[kind]
        self._received.setdefault(kind, 0)

        def weigh(message: Any) -> None:
            frames = message if raw else [message.parameters]
            self._received[kind] += sum(memoryview(frame).nbytes for frame in frames)
            take(message)

        if raw:
            link.register(raw={kind: weigh})
        else:
            link.register({kind: weigh})

    def bytes_of(self, call: Callable[[], object], kind: Kind) -> int:
        """What one call receives in messages of a kind."""
        before = self._received[kind]
        call()
        return self._received[kind] - before

    def _offer(self) -> None:
        slots = list(self._pushes[0])
        self._pushes.rotate()
        self._free -= set(slots)
        for slot in slots:
            self.store.header_rows[slot, SEQUENCE] = self._sequence
            self._sequence += 1
        self.sender.offer(slots)

    def _until(self, done: Callable[[], object], link: ZmqLink, *more: ZmqLink) -> None:
        """more: links that `done` receives from, too."""
        also = tuple(fd for one in more for fd in one.fds)
        assert link.wait(done, _DEADLINE_S, also=also), link.waiting or "nothing came in time"

    def _turn(self) -> None:
        self.relay.do_work()
        self.sender.do_work()
        self._free |= set(self.sender.take_freed())

    def _room(self) -> bool:
        """The slots of the next push are free."""
        self._turn()
        return self._free.issuperset(self._pushes[0])

    def _acknowledged(self) -> bool:
        """Nothing is under way."""
        self._turn()
        return self.sender.unacknowledged == 0

    def push(self) -> None:
        """One push, acknowledged."""
        # What push_on left under way is not part of this push.
        self._until(self._acknowledged, *self._relays)
        self._until(self._room, *self._relays)
        before = self.sender.counts["bytes"]
        self._offer()
        self._until(self._acknowledged, *self._relays)
        self.push_bytes = self.sender.counts["bytes"] - before

    def push_on(self) -> int:
        """Wait until there is room for one more push, and begin it; bytes acknowledged."""
        before = self.sender.counts["acknowledged"]
        self._until(self._room, *self._relays)
        self._offer()
        self._turn()
        chunks = self.sender.counts["acknowledged"] - before
        return chunks * self.push_bytes // len(self._setting.rows)

    def pull(self) -> None:
        """The newest parameters, in our memory."""

        def newer() -> bool:
            version = self._source.newer_than(self._version, self._parameters)
            self._version = max(version, self._version)
            return version > 0

        self._until(newer, self.relay)

    def pull_if_there(self) -> None:
        """The newest parameters, where there are new ones."""
        version = self._source.newer_than(self._version, self._parameters)
        self._version = max(version, self._version)

    def begin_publish(self) -> None:
        """New parameters, on their way."""
        self._sink.publish(time.monotonic_ns(), self._parameters)

    def publish(self) -> None:
        """New parameters, acknowledged."""
        sink = self._sink
        sink.publish(time.monotonic_ns(), self._parameters)  # above what the server renews
        self._until(lambda: self.learner.do_work() < 0 or not sink.under_way, self.learner)

    def sample(self) -> None:
        """One batch."""
        self.samples.request()
        self.poll()

    def poll(self) -> None:
        """The next batch, in our memory."""
        self.take(self.batch)

    def take(self, batch: Batch, following: Batch | None = None) -> None:
        """The next batch, in `batch`; a thread may fill `following`."""
        self._until(lambda: self.samples.poll(batch, following) is not None, *self._learners)

    def sample_on(self) -> int:
        """The next batch, and ask for one more; its bytes."""
        received = self.bytes_of(self.poll, Kind.BATCH)
        self.samples.request()
        return received

    def update(self) -> None:
        """New priorities for the last batch, acknowledged."""
        assert self.samples.update(self.batch.keys, self.priorities)
        self._until(
            lambda: self.learner.do_work() < 0 or not self.samples.updates_under_way, self.learner
        )


class ShmClient:
    """The same over shared memory: slots are written in place, rows are gathered from theirs."""

    def __init__(self, setting: Setting, host: HostMemory, number: int) -> None:
        self._setting, self._host, self._number = setting, host, number
        self._sink = host.experience_sink(number, 1)
        self._wait = waiter(host, f"actor {number}")
        self._learner_wait = waiter(host, "learner")
        self._sequence = self._version = 0
        self._source = host.mailbox()
        self._parameters = np.zeros(setting.parameter_bytes, np.uint8)
        if number == 0:
            self.samples = host.sample_source()
            channels_last = setting.schema.stack > 1
            self.batch = Batch.empty(BatchLayout(setting.schema, setting.batch, channels_last))
            self.priorities = np.ones(setting.batch, np.float32)
        self._written: set[int] = set()

    def claim(self) -> np.ndarray:
        """Slots with chunks in them; the frames were written the first time."""
        found: list[np.ndarray] = []

        def claim() -> bool:
            slots = self._sink.try_claim()
            if slots is not None:
                found.append(slots)
            return bool(found)

        assert self._wait(claim, _DEADLINE_S)
        store = self._sink.store
        for slot, rows in zip(found[0].tolist(), self._setting.rows, strict=True):
            write_chunk(self._setting, store, slot, rows, self._number)
            header = store.header_rows[slot]
            header[SEQUENCE], header[STATE] = self._sequence, COMMITTED
            self._sequence += 1
        return found[0]

    def commit(self, slots: np.ndarray) -> None:
        """Hand over, until the replay has made them live."""
        last = int(slots[-1])
        self._sink.commit(slots)
        deadline = time.monotonic() + _DEADLINE_S
        while self._sink.store.state(last) != LIVE:
            os.sched_yield()
            assert time.monotonic() < deadline

    @property
    def push_bytes(self) -> int:
        """What crosses: slot numbers; the frames are where they belong."""
        return 8 * len(self._setting.rows)

    def pull(self) -> None:
        """The newest parameters, in our memory."""
        deadline = time.monotonic() + _DEADLINE_S
        while not self._source.newer_than(self._version, self._parameters):
            os.sched_yield()
            assert time.monotonic() < deadline
        self._version = self._source.version

    def sample(self) -> None:
        """One batch."""
        self.samples.request()
        self.sample_poll()

    def sample_poll(self) -> None:
        """The next batch."""
        assert self._learner_wait(self.samples.ready, _DEADLINE_S)
        assert self.samples.poll(self.batch) is not None

    def update(self) -> None:
        """New priorities for the last batch, taken by the replay."""
        ring = self._host.ring("updates")
        assert self.samples.update(self.batch.keys, self.priorities)
        self._host.waker("replay").wake()
        deadline = time.monotonic() + _DEADLINE_S
        while ring.tail > ring.head:
            os.sched_yield()
            assert time.monotonic() < deadline


def measure_network(client: NetworkClient, setting: Setting, seconds: float) -> dict[str, Any]:
    """Every operation of one client that is relay and learner at once."""
    found: dict[str, Any] = {}
    # The whole memory is filled before anything is timed, or drawn from it.
    per_push = sum(setting.rows)
    for _ in range(-(-setting.capacity // per_push)):
        client.push_on()
    client.push()
    found["push_us"] = timed(client.push, seconds)
    found["push_mb_per_s"] = rate(client.push_on, seconds)
    found["push_bytes"] = client.push_bytes
    client.push()  # what is under way has arrived
    found["pull_us"] = pulls(client.pull, seconds)
    found["pull_bytes"] = client.bytes_of(client.pull, Kind.PARAMS)
    found["publish_us"] = timed(client.publish, seconds)
    found["sample_us"] = timed(client.sample, seconds)
    found["sample_bytes"] = client.bytes_of(client.sample, Kind.BATCH)
    for _ in range(PREFETCH):
        client.samples.request()
    found["sample_mb_per_s"] = rate(client.sample_on, seconds)
    for _ in range(PREFETCH):
        client.poll()
    found["update_us"], found["update_bytes"] = timed(client.update, seconds), 12 * setting.batch
    return found


def measure_shm(client: ShmClient, setting: Setting, seconds: float) -> dict[str, Any]:
    """The same over shared memory."""
    found: dict[str, Any] = {}
    times: list[float] = []
    stop = time.monotonic() + seconds
    filled = -(-setting.capacity // sum(setting.rows))
    while len(times) < filled + 5 or time.monotonic() < stop:
        slots = client.claim()
        start = time.perf_counter_ns()
        client.commit(slots)
        times.append(time.perf_counter_ns() - start)
    found["push_us"] = {"p50": float(np.median(times[2:])) / 1000, "n": len(times) - 2}
    found["push_bytes"] = client.push_bytes
    found["pull_us"], found["pull_bytes"] = pulls(client.pull, seconds), setting.parameter_bytes
    found["sample_us"] = timed(client.sample, seconds)
    found["sample_bytes"] = client.batch.memory.nbytes
    found["update_us"], found["update_bytes"] = timed(client.update, seconds), 12 * setting.batch
    return found
