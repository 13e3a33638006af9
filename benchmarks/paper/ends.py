"""The ends of every system: an actor that pushes and pulls, a learner that samples and sets.

All have the same calls, so that the paced roles are the same whatever is between them:

    actor     push() -> bytes, pull() -> bytes (0: nothing is newer)
    learner   sample(), update(), set(), serve(until_s): what it does beside its computation
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.paper.experience import fill, store_of
from benchmarks.transport.rig import NetworkClient, ShmClient
from benchmarks.transport.server import BETA, NetworkServer, Setting
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import SEQUENCE, BatchLayout
from zapex.host.metrics import RoleMetrics
from zapex.net.keys import Security
from zapex.net.redis_link import RedisLink, most_waiting
from zapex.redis_transport import (
    RedisChunkSender,
    RedisExperienceSource,
    RedisParameterSink,
    RedisParameterSource,
)
from zapex.replay.core import ReplayCore
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.roles.local_samples import LocalSampleSource
from zapex.shm_transport import HostMemory
from zapex.wire.header import Kind

_DEADLINE_S = 120.0
_PAUSE_S = 0.0005
OPEN = dict.fromkeys(("replay", "relay", "learner"), Security(insecure_network=True))


def until(done: Callable[[], object], what: str) -> None:
    """Call it until it is true."""
    deadline = time.monotonic() + _DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, f"nothing came in time: {what}"
        time.sleep(_PAUSE_S)


class RedisActor:
    """Pushes pairs, or chunks, into the list of a Redis."""

    def __init__(
        self, setting: Setting, bodies: np.ndarray, url: str, number: int, pairs: bool
    ) -> None:
        self._link = RedisLink(url, "", setting.form)
        self._store = store_of(setting, len(setting.rows))
        fill(setting, self._store, bodies)
        self._store.header_rows[:, 1] = 1  # a generation that keys can have
        most = most_waiting(setting.form, setting.actors)
        self._sender = RedisChunkSender(self._link, self._store, (number,), most, pairs)
        self._source = RedisParameterSource(self._link)
        self._parameters = np.zeros(setting.parameter_bytes, np.uint8)
        self._version = self._sequence = 0

    def push(self) -> int:
        """All transitions of a push are in Redis."""
        before, slots = self._sender.counts["bytes"], range(self._store.slots)
        for slot in slots:
            self._store.header_rows[slot, SEQUENCE] = self._sequence
            self._sequence += 1
        self._sender.offer(list(slots))
        until(lambda: self._sender.do_work() < 0 or not self._sender.unacknowledged, "a push")
        self._sender.take_freed()
        return self._sender.counts["bytes"] - before

    def pull(self) -> int:
        """The newest parameters, if there are newer ones."""
        version = self._source.newer_than(self._version, self._parameters)
        self._version = max(version, self._version)
        return self._parameters.nbytes if version else 0


class LinkActor:
    """A relay's link over ZeroMQ."""

    def __init__(self, setting: Setting, bodies: np.ndarray, url: str, number: int) -> None:
        self._client = NetworkClient(setting, url, OPEN, 1 + number)
        fill(setting, self._client.store, bodies)
        self._nbytes = setting.parameter_bytes

    def push(self) -> int:
        """A push, acknowledged."""
        self._client.push()
        return int(self._client.push_bytes)

    def pull(self) -> int:
        """The newest parameters, if they have come."""
        before = self._client._version
        self._client.pull_if_there()
        return self._nbytes if self._client._version != before else 0


class ShmActor:
    """Slots of shared memory; what is pushed is their numbers."""

    def __init__(self, setting: Setting, bodies: np.ndarray, host: HostMemory, number: int):
        self._client, self._nbytes = ShmClient(setting, host, number), setting.parameter_bytes
        self._source, self._version = host.mailbox(), 0
        self._parameters = np.zeros(setting.parameter_bytes, np.uint8)

    def push(self) -> int:
        """Chunks written into their slots, until the replay has made them live."""
        self._client.commit(self._client.claim())
        return self._client.push_bytes

    def pull(self) -> int:
        """The newest parameters, if there are newer ones."""
        version = self._source.newer_than(self._version, self._parameters)
        self._version = max(version, self._version)
        return self._nbytes if version else 0


class _Learner:
    """What all learners have: two batches, because a prefetching source fills one ahead."""

    pulled = 0

    def __init__(self, setting: Setting) -> None:
        layout = BatchLayout(setting.schema, setting.batch)  # as a learner on a GPU takes them
        self.batch, self._following = Batch.empty(layout), Batch.empty(layout)
        self._priorities = np.random.default_rng(1).random(setting.batch, np.float32)
        self._parameters = np.zeros(setting.parameter_bytes, np.uint8)
        self._version = 0

    def phases(self) -> dict[str, float]:
        """Nothing: the memory is elsewhere."""
        return {}

    def take(self, poll: Callable[[Batch, Batch], object]) -> None:
        """The oldest batch; the source's thread gathers the one after it."""
        poll(self._following, self.batch)
        self.batch, self._following = self._following, self.batch

    def serve(self, until_s: float) -> None:
        """Nothing: others serve the actors."""
        time.sleep(max(0.0, until_s - time.monotonic()))


class _OwnReplay(_Learner):
    """A learner that keeps the replay and draws its own batches."""

    def keep(self, setting: Setting, source: Any, store: ReplayCore, actors: int) -> None:
        """Drain `source` into this replay."""
        streams = len(setting.rows)
        limits = LimiterConfig(
            samples_per_insert=0, tolerance=0, min_size_to_sample=setting.batch,
            batch=setting.batch, grant=streams * setting.chunk, capacity=setting.capacity,
        )  # fmt: skip
        self.metrics = RoleMetrics(
            aligned_zeros(RoleMetrics.required_bytes()), "replay", create=True
        )
        intake = Intake(source, store, limits, actors=actors, streams_per_actor=streams)
        self._samples = LocalSampleSource(
            store, intake, self.metrics, batch_size=setting.batch, method="stratified", beta=BETA
        )

    def phases(self) -> dict[str, float]:
        """Seconds of its memory: taking in (with waiting for Redis), drawing, priorities."""
        found = self.metrics.snapshot()
        return {name: found[f"phase/{name}"] for name in ("insert", "sample", "update")}

    @property
    def pulled(self) -> int:  # type: ignore[override]
        """Transitions taken in so far."""
        return self._samples.intake.inserted

    def sample(self) -> None:
        """Pull everything, then draw a batch."""
        if not self._samples.outstanding:
            self._samples.request()
        until(lambda: self._samples.poll(self.batch) is not None, "a batch")

    def update(self) -> None:
        """New priorities, in its own memory."""
        self._samples.update(self.batch.keys.copy(), self._priorities)


class RedisLearner(_OwnReplay):
    """The paper's baseline."""

    def __init__(self, setting: Setting, url: str) -> None:
        super().__init__(setting)
        link = RedisLink(url, "", setting.form)
        core = ReplayCore(setting.layout, seed=1)
        self._sink = RedisParameterSink(link)
        self.keep(setting, RedisExperienceSource(link, core.store, 1), core, 1)

    def set(self) -> None:
        """SET new parameters."""
        self._version += 1
        self._sink.publish(self._version, self._parameters)


class ServingLearner(_OwnReplay):
    """Actors connect to the learner itself, over ZeroMQ; it serves them while it computes too."""

    def __init__(self, setting: Setting, url: str) -> None:
        super().__init__(setting)
        self._made = NetworkServer(setting, url, OPEN["replay"])
        replay = self._made.duty.role.replay
        self.keep(setting, self._made.source, replay, setting.actors)

    def serve(self, until_s: float) -> None:
        """Take in and acknowledge until then, as a thread beside the computation would."""
        server = self._made.server
        while (left_s := until_s - time.monotonic()) > 0:
            if not self._samples.drain():
                server.wait(self._made.source.ready, left_s)

    def set(self) -> None:
        """New parameters, in the memory that actors are served from."""
        self._made.mailbox.publish(self._made.mailbox.version + 1, self._parameters)


class LinkLearner(_Learner):
    """Batches of a replay in the network."""

    def __init__(self, setting: Setting, url: str) -> None:
        super().__init__(setting)
        self._client = NetworkClient(setting, url, OPEN, 0)
        for _ in range(2):
            self._client.samples.request()

    def sample(self) -> None:
        """The batch that was asked for longest ago, and ask for one more."""
        self.take(self._client.take)
        self._client.samples.request()
        self.pulled += len(self._priorities)

    @property
    def batch_bytes(self) -> int:
        """Received in batches so far."""
        return self._client._received[Kind.BATCH]

    def update(self) -> None:
        """New priorities, on their way."""
        until(
            lambda: self._client.samples.update(self.batch.keys.copy(), self._priorities),
            "room for an update",
        )

    def set(self) -> None:
        """New parameters, acknowledged."""
        self._client.publish()


class ShmLearner(_Learner):
    """Batches of a replay on the same host."""

    def __init__(self, setting: Setting, host: HostMemory) -> None:
        super().__init__(setting)
        from benchmarks.transport.server import waiter

        self._samples, self._wait = host.sample_source(1), waiter(host, "learner")
        self._mailbox = host.mailbox()
        for _ in range(2):
            self._samples.request()

    def sample(self) -> None:
        """The batch that was asked for longest ago, and ask for one more."""
        assert self._wait(self._samples.ready, _DEADLINE_S), "no batch came in time"
        self.take(self._poll)
        self._samples.request()
        self.pulled += len(self._priorities)

    def _poll(self, batch: Batch, following: Batch) -> None:
        assert self._samples.poll(batch, following) is not None

    def update(self) -> None:
        """New priorities, in the ring."""
        until(
            lambda: self._samples.update(self.batch.keys.copy(), self._priorities),
            "room for an update",
        )

    def set(self) -> None:
        """New parameters, in the mailbox."""
        self._mailbox.publish(self._mailbox.version + 1, self._parameters)
