"""zapex's links to a replay on another host, as a relay and as a learner.

push     closed chunks that lie in slots, until the replay has acknowledged all of them
pull     parameters newer than the last, asked for, until they lie in the reader's memory
sample   one batch asked for, until it is assembled in the learner's memory
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.transport.roofs import pulls, timed
from benchmarks.transport.server import BETA, Setting
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import (
    ACTOR,
    COMMITTED,
    COUNT,
    INCARNATION,
    SEQUENCE,
    STATE,
    STREAM,
    BatchLayout,
)
from zapex.chunks.store import ChunkStore
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.net.sample_source import ZmqSampleSource
from zapex.wire.protocol import Kind
from zapex.zmq_transport import ChunkSender, ZmqParameterSink, ZmqParameterSource

_DEADLINE_S = 60.0


def write_chunk(setting: Setting, store: ChunkStore, slot: int, rows: int, actor: int) -> None:
    """A closed chunk, but for its frames and its sequence."""
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
    header[STATE] = COMMITTED


class _End:
    """One link. url: of the replay."""

    def __init__(
        self, setting: Setting, url: str, security: dict[str, Security],
        role: str, host: int, actors: int,
    ) -> None:  # fmt: skip
        self.link = ZmqLink(
            url, role, host, 1, setting.form, {}, security[role],
            schema_hash=setting.schema.hash, actors=actors,
        )  # fmt: skip

    def until(self, done: Callable[[], object]) -> None:
        """Receive until it is true."""
        assert self.link.wait(done, _DEADLINE_S), self.link.waiting or "nothing came in time"


class Relay(_End):
    """One actor host's relay; its chunks have random frames."""

    def __init__(self, setting: Setting, url: str, security: dict[str, Security], number: int):
        super().__init__(setting, url, security, "relay", 1 + number, 1)
        layout, slots = setting.layout.chunk_layout, 2 * len(setting.rows)
        memory = aligned_zeros(ChunkStore.required_bytes(layout, slots))
        self.store = ChunkStore(memory, layout, slots)
        rng = np.random.default_rng(number)
        for slot in range(slots):
            frames = self.store.column(slot, "obs").reshape(-1).view(np.uint8)
            frames[:] = rng.integers(0, 255, frames.size, np.uint8)
            write_chunk(setting, self.store, slot, setting.rows[slot % len(setting.rows)], 0)
        half = slots // 2
        self._pushes = deque((range(half), range(half, slots)))  # in turns
        self._free = set(range(slots))
        self._sequence = 0
        self._sender = ChunkSender(self.link, self.store)
        self._source = ZmqParameterSource(self.link)
        self._parameters = np.zeros(setting.parameter_bytes, np.uint8)
        self._version = self.push_bytes = 0
        self.link.open(_DEADLINE_S)

    def push(self) -> None:
        """One push, acknowledged."""
        slots = list(self._pushes[0])
        self.until(lambda: self._turn() or self._free.issuperset(slots))
        before = self._sender.counts["bytes"]
        self._pushes.rotate()
        self._free -= set(slots)
        for slot in slots:
            self.store.header_rows[slot, SEQUENCE] = self._sequence
            self._sequence += 1
        self._sender.offer(slots)
        self.until(lambda: self._turn() or self._sender.unacknowledged == 0)
        self.push_bytes = self._sender.counts["bytes"] - before

    def _turn(self) -> None:
        self.link.do_work()
        self._sender.do_work()
        self._free |= set(self._sender.take_freed())

    def pull(self) -> None:
        """The newest parameters, in our memory."""
        self.until(self.pull_if_there)

    def pull_if_there(self) -> bool:
        """The newest parameters, where there are new ones."""
        version = self._source.newer_than(self._version, self._parameters)
        self._version = max(version, self._version)
        return version > 0


class Learner(_End):
    """The learner's link. batch_bytes: received in batches so far."""

    def __init__(self, setting: Setting, url: str, security: dict[str, Security]) -> None:
        super().__init__(setting, url, security, "learner", 1000, 0)
        self.samples = ZmqSampleSource(self.link, BETA)
        self._sink = ZmqParameterSink(self.link)
        self._parameters = np.zeros(setting.parameter_bytes, np.uint8)
        self.batch_bytes = 0
        take = self.link._raw[Kind.BATCH]

        def weigh(frames: list[Any]) -> None:
            self.batch_bytes += sum(memoryview(frame).nbytes for frame in frames)
            take(frames)

        self.link.register(raw={Kind.BATCH: weigh})
        self.link.open(_DEADLINE_S)

    def take(self, batch: Batch, following: Batch | None = None) -> None:
        """The next batch, in `batch`; a thread may fill `following`."""
        self.until(lambda: self.samples.poll(batch, following) is not None)

    def publish(self) -> None:
        """New parameters, acknowledged."""
        self._sink.publish(time.monotonic_ns(), self._parameters)  # above what the server renews
        self.until(lambda: self.link.do_work() < 0 or not self._sink.under_way)


def measure(
    setting: Setting, url: str, security: dict[str, Security], seconds: float
) -> dict[str, Any]:
    """Every operation of one client that is relay and learner at once."""
    relay, learner = Relay(setting, url, security, 0), Learner(setting, url, security)
    batch = Batch.empty(BatchLayout(setting.schema, setting.batch, True))  # as a CPU takes them

    def sample() -> None:
        learner.samples.request()
        learner.take(batch)

    # The whole memory is filled before anything is timed, or drawn from it.
    for _ in range(-(-setting.capacity // sum(setting.rows))):
        relay.push()
    found = {"push_us": timed(relay.push, seconds), "push_bytes": relay.push_bytes}
    found |= {"pull_us": pulls(relay.pull, seconds), "pull_bytes": setting.parameter_bytes}
    found["sample_us"] = timed(sample, seconds)
    before = learner.batch_bytes
    sample()
    return {**found, "sample_bytes": learner.batch_bytes - before}
