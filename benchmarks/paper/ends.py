"""The ends of every system: an actor that pushes and pulls, a learner that samples and sets.

All have the same calls, so that the paced roles are the same whatever is between them:

    actor     push() -> bytes, pull() -> bytes (0: nothing is newer)
    learner   sample(), update(), set(), serve(until_s): what it does beside its computation
"""

import os
import time
from collections.abc import Callable

import numpy as np

from benchmarks.paper.baseline import Memory, Parameters, Sender, connect, most_waiting
from benchmarks.paper.experience import fill, store_of
from benchmarks.support.harness import Clock
from benchmarks.transport import rig
from benchmarks.transport.server import BETA, NetworkServer, Setting, waiter
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.layout import GENERATION, LIVE, SEQUENCE, BatchLayout
from zapex.host.metrics import RoleMetrics
from zapex.library.prioritized import PrioritizedReplay
from zapex.net.keys import Security
from zapex.shm_transport import HostMemory

_PHASES = ("insert", "sample", "update")
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
        client, self._store = connect(url), store_of(setting, len(setting.rows))
        fill(setting, self._store, bodies)
        self._store.header_rows[:, GENERATION] = 1  # one that keys can have
        most = most_waiting(setting.layout, setting.actors)
        self._sender = Sender(client, self._store, most, None if pairs else setting.form)
        self._source = Parameters(client)
        self._parameters = np.zeros(setting.parameter_bytes, np.uint8)
        self._version = 0

    def push(self) -> int:
        """All transitions of a push are in Redis."""
        before = self._sender.sent_bytes
        for slot in range(self._store.slots):
            until(self._sender.has_room, "room in the list")
            self._sender.push(slot)
        return self._sender.sent_bytes - before

    def pull(self) -> int:
        """The newest parameters, if there are newer ones."""
        version = self._source.newer_than(self._version, self._parameters)
        self._version = max(version, self._version)
        return self._parameters.nbytes if version else 0


class LinkActor:
    """A relay's link over ZeroMQ."""

    def __init__(self, setting: Setting, bodies: np.ndarray, url: str, number: int) -> None:
        self._relay = rig.Relay(setting, url, OPEN, number)
        fill(setting, self._relay.store, bodies)
        self._nbytes = setting.parameter_bytes

    def push(self) -> int:
        """A push, acknowledged."""
        self._relay.push()
        return int(self._relay.push_bytes)

    def pull(self) -> int:
        """The newest parameters, if they have come."""
        return self._nbytes if self._relay.pull_if_there() else 0


class ShmActor:
    """Slots of shared memory; what is pushed is their numbers."""

    def __init__(self, setting: Setting, host: HostMemory, number: int) -> None:
        self._setting, self._number = setting, number
        self._sink = host.experience_sink(number, 1)
        self._wait = waiter(host, f"actor {number}")
        self._source, self._version, self._sequence = host.mailbox(), 0, 0
        self._parameters = np.zeros(setting.parameter_bytes, np.uint8)

    def push(self) -> int:
        """Chunks written into their slots, until the replay has made them live."""
        found: list[np.ndarray] = []

        def claim() -> bool:
            slots = self._sink.try_claim()
            if slots is not None:
                found.append(slots)
            return bool(found)

        assert self._wait(claim, _DEADLINE_S)
        store, slots = self._sink.store, found[0]
        for slot, rows in zip(slots.tolist(), self._setting.rows, strict=True):
            rig.write_chunk(self._setting, store, slot, rows, self._number)
            store.header_rows[slot, SEQUENCE] = self._sequence
            self._sequence += 1
        self._sink.commit(slots)
        deadline = time.monotonic() + _DEADLINE_S
        while store.state(int(slots[-1])) != LIVE:
            os.sched_yield()
            assert time.monotonic() < deadline
        return 8 * len(slots)

    def pull(self) -> int:
        """The newest parameters, if there are newer ones."""
        version = self._source.newer_than(self._version, self._parameters)
        self._version = max(version, self._version)
        return self._parameters.nbytes if version else 0


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


class RedisLearner(_Learner):
    """The paper's baseline: it pulls all experience, and draws its own batches."""

    def __init__(self, setting: Setting, url: str, pairs: bool) -> None:
        super().__init__(setting)
        client = connect(url)
        replay = PrioritizedReplay(setting.capacity, setting.schema, seed=1, chunk=setting.chunk)
        self._memory = Memory(client, replay, None if pairs else setting.form)
        self._sink = Parameters(client)
        self._clock = Clock()

    @property
    def pulled(self) -> int:  # type: ignore[override]
        """Transitions taken in so far."""
        return self._memory.pulled

    def phases(self) -> dict[str, float]:
        """Seconds of its memory: taking in (with waiting for Redis), drawing, priorities."""
        self._clock.enter("idle")
        return {name: self._clock.spent.get(name, 0.0) for name in _PHASES}

    def sample(self) -> None:
        """Pull everything, then draw a batch."""
        self._clock.enter("insert")
        self._memory.pull()
        until(lambda: self._enough() or self._memory.pull() < 0, "a batch")
        self._clock.enter("sample")
        self._memory.replay.sample(len(self._priorities), BETA, self.batch)
        self._clock.enter("idle")

    def _enough(self) -> bool:
        return self._memory.replay.can_sample(len(self._priorities))

    def update(self) -> None:
        """New priorities, in its own memory."""
        self._clock.enter("update")
        self._memory.replay.update_priorities(self.batch.keys, self._priorities)
        self._clock.enter("idle")

    def set(self) -> None:
        """SET new parameters."""
        self._version += 1
        self._sink.publish(self._version, self._parameters)


class ServingLearner(_Learner):
    """Actors connect to the learner itself, over ZeroMQ; it serves them while it computes too."""

    def __init__(self, setting: Setting, url: str) -> None:
        super().__init__(setting)
        self._metrics = aligned_zeros(RoleMetrics.required_bytes())
        self._made = NetworkServer(setting, url, OPEN["replay"], self._metrics)
        self._role, self._clock = self._made.role, Clock()

    @property
    def pulled(self) -> int:  # type: ignore[override]
        """Transitions taken in so far."""
        return int(self._role.intake.inserted)

    def phases(self) -> dict[str, float]:
        """Seconds of its memory: taking in and acknowledging, drawing, priorities."""
        found = RoleMetrics(self._metrics, "replay", create=False).snapshot()
        own = {name: self._clock.spent.get(name, 0.0) for name in ("sample", "update")}
        return {"insert": found["phase/insert"], **own}

    def serve(self, until_s: float) -> None:
        """Take in and acknowledge until then, as a thread beside the computation would."""
        server = self._made.server
        while (left_s := until_s - time.monotonic()) > 0:
            if not self._role.do_work():
                server.wait(self._role.ready, left_s)

    def sample(self) -> None:
        """Take in what has come, then draw a batch."""
        replay = self._role.replay
        rows = len(self._priorities)
        until(lambda: self._role.do_work() < 0 or len(replay) >= rows, "a batch")
        self._clock.enter("sample")
        replay.draw(rows).gather(replay.store, self.batch, BETA)
        self._clock.enter("other")

    def update(self) -> None:
        """New priorities, in its own memory."""
        self._clock.enter("update")
        self._role.replay.reprioritise(self.batch.keys, self._priorities.astype(np.float64))
        self._clock.enter("other")

    def set(self) -> None:
        """New parameters, in the memory that actors are served from."""
        self._made.mailbox.publish(self._made.mailbox.version + 1, self._parameters)


class LinkLearner(_Learner):
    """Batches of a replay in the network."""

    def __init__(self, setting: Setting, url: str) -> None:
        super().__init__(setting)
        self._end = rig.Learner(setting, url, OPEN)
        for _ in range(2):
            self._end.samples.request()

    def sample(self) -> None:
        """The batch that was asked for longest ago, and ask for one more."""
        self.take(self._end.take)
        self._end.samples.request()
        self.pulled += len(self._priorities)

    @property
    def batch_bytes(self) -> int:
        """Received in batches so far."""
        return self._end.batch_bytes

    def update(self) -> None:
        """New priorities, on their way."""
        until(
            lambda: self._end.samples.update(self.batch.keys.copy(), self._priorities),
            "room for an update",
        )

    def set(self) -> None:
        """New parameters, acknowledged."""
        self._end.publish()


class ShmLearner(_Learner):
    """Batches of a replay on the same host."""

    def __init__(self, setting: Setting, host: HostMemory) -> None:
        super().__init__(setting)
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
