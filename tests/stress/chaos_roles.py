"""The roles of the chaos harness: zapex's own protocol code around content that can be checked.

Actor, inference, replay server, intake and the learner's duty cycle are the real ones. The games,
the Q values and what learns are not: no torch, no environment.
"""

import contextlib
import mmap
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stress.chaos_content import (
    ACTIONS,
    FRAME_WORDS,
    SCHEMA,
    STACK,
    ChaosStreams,
    Violation,
    check_chunk,
    check_rows,
    priorities,
    q_values,
)
from tests.stress.chaos_updates import Witness, fraction, is_of
from zapex.chunks.batch import Batch
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.layout import (
    ACTOR,
    COMMIT_SEQUENCE,
    COUNT,
    INCARNATION,
    SEQUENCE,
    STREAM,
    BatchLayout,
)
from zapex.host.parts import PARTS
from zapex.machine.child import Stop, child_setup, end_by_sigterm, run_until_stopped
from zapex.machine.exchange import Exchange, ExchangeShape
from zapex.machine.segment import Segment
from zapex.machine.waiting import Waiter
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.limiter import LimiterConfig
from zapex.roles.actor import Actor
from zapex.roles.intake import Intake
from zapex.roles.learner import Learner
from zapex.roles.replay_server import ReplayServer
from zapex.roles.values import Inference, Pull
from zapex.shm_ring import ShmRing
from zapex.shm_transport import HostMemory, HostPlan
from zapex.transport import Sampled

ACTORS, STREAMS, BATCH, PREFETCH = 3, 2, 16, 3
PARAMETER_BYTES = 64 << 10
QUESTIONS = ExchangeShape(ACTORS, STREAMS, (STACK, FRAME_WORDS), "<i8", ACTIONS)
AUDIT = np.dtype(
    [(name, np.int64) for name in ("commit_sequence", "actor", "incarnation", "sequence", "stream",
                                   "first", "count", "slot")]
)  # fmt: skip
_AUDIT_RECORDS = 1 << 14
ROWS_CHECKED, CHUNKS_CHECKED, VALUES_CHECKED = range(3)  # a role's own counters


def shared(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory that forked processes share: the harness's own, beside the run's segments."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


@dataclass
class World:
    """All memory of one run of the harness; made before the first fork."""

    capacity: int = 512
    samples_per_insert: float = 1.0
    chunk: int = 8
    plan: HostPlan = field(init=False)
    host: HostMemory = field(init=False)
    orders: Any = field(init=False)  # a role's words, for tests/stress/steps.py
    counters: NDArray[np.int64] = field(init=False)
    audit: ShmRing = field(init=False)
    updates: NDArray[np.uint8] = field(init=False)  # the witness's

    def __post_init__(self) -> None:
        self.plan = plan = HostPlan(
            replay=ReplayLayout(SCHEMA, self.capacity, ACTORS * STREAMS, self.chunk),
            actors=ACTORS, envs_per_actor=STREAMS, batch_size=BATCH, prefetch=PREFETCH,
            parameter_bytes=PARAMETER_BYTES, beta=0.4, eval_episodes=1,
            part=PARTS["all"].acting("central"), exchange=QUESTIONS,
        )  # fmt: skip
        eventfds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in plan.roles]
        self._segments = [
            Segment.create("chaos-control", plan.nbytes),
            Segment.create("chaos-experience", plan.replay.nbytes),
        ]
        self.host = HostMemory(plan, *(s.buffer for s in self._segments), eventfds, create=True)
        roles = len(plan.roles)
        words = memoryview(mmap.mmap(-1, roles * 128)).cast("q")
        self.orders = {name: words[16 * i : 16 * i + 16] for i, name in enumerate(self.names)}
        self.counters = shared(roles * 128).view(np.int64).reshape(roles, 16)
        self.updates = shared(Witness.required_bytes(plan.replay))
        audit = shared(ShmRing.required_bytes(_AUDIT_RECORDS, AUDIT))
        self.audit = ShmRing(audit, _AUDIT_RECORDS, AUDIT, create=True)

    @property
    def names(self) -> list[str]:
        """The processes."""
        return [name for name, role in self.plan.roles if role != "evaluator"]

    def counter(self, name: str) -> NDArray[np.int64]:
        """A role's own words, for the account."""
        return self.counters[self.plan.role_index(name)]

    @property
    def limiter(self) -> LimiterConfig:
        """Actors may run far ahead: they must not all wait whenever the learner is dead."""
        return LimiterConfig(
            samples_per_insert=self.samples_per_insert, min_size_to_sample=4 * BATCH,
            tolerance=16 * self.capacity, grant=STREAMS * self.chunk, batch=BATCH,
            capacity=self.capacity,
        )  # fmt: skip


def make_actor(world: World, actor: int, incarnation: int) -> Actor:
    """The real actor; the inference role answers it."""
    host, first = world.host, actor * STREAMS
    sink, metrics = host.experience_sink(actor, incarnation), host.metrics(f"actor {actor}")
    builder = ChunkBuilder(
        sink.store, STREAMS, actor=actor, incarnation=incarnation, first_stream=first,
        max_chunk_age_steps=11 if actor == 0 else 0,
    )  # fmt: skip
    games: Any = ChaosStreams(actor, incarnation, STREAMS)
    exchange = Exchange(host.part_of("exchange"), QUESTIONS)
    return Actor(
        games, exchange.asker(actor, host.waker("inference").wake), sink, builder, metrics,
        host.ring(f"episodes {actor}").producer().try_offer, epsilons=np.zeros(STREAMS),
        first_stream=first, reward_clip=False, priorities=True,
        rng=np.random.default_rng(incarnation), clock_ns=time.monotonic_ns,
    )  # fmt: skip


class Judge:
    """A policy that checks its parameters, and whose values name what was asked."""

    def __init__(self, counter: NDArray[np.int64]) -> None:
        self._counter = counter

    def load_flat(self, buffer: Any) -> None:
        words = buffer.view(np.int64)
        if (words != words[0]).any():
            raise Violation(f"torn: parameters hold {sorted(set(words.tolist()))[:4]}")
        self._counter[VALUES_CHECKED] += 1

    def q_values(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        return q_values(obs)


def make_inference(world: World) -> Inference:
    """The real duty cycle around a network that only checks."""
    host, metrics = world.host, world.host.metrics("inference")
    policy: Any = Judge(world.counter("inference"))
    pull = Pull(policy, host.mailbox(), metrics, period=2, parameter_bytes=PARAMETER_BYTES)
    wakers = [host.waker(f"actor {i}").wake for i in range(ACTORS)]
    return Inference(
        Exchange(host.part_of("exchange"), QUESTIONS).answerer(wakers), policy, pull, metrics,
        streams=STREAMS,
    )  # fmt: skip


class WatchedSource:
    """The learner's real source; remembers which leaves the batch was drawn by."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.request, self.ready, self.update = source.request, source.ready, source.update
        self.leaves = np.empty(BATCH)

    @property
    def next_update(self) -> int:
        """The number of the update that is sent next: its place in the ring, in every life."""
        return int(self._source._updates.ring.tail)

    @property
    def outstanding(self) -> int:
        return int(self._source.outstanding)

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        if not self._source.ready():
            return None  # one that comes between two looks would bring the leaves of another
        ring = self._source._answers.ring
        self.leaves[:] = ring.record(ring.head)["draw"]["leaves"]
        sampled: Sampled | None = self._source.poll(batch)
        return sampled


class CheckingDqn:
    """Learns nothing; looks at every row, and publishes values that can be checked."""

    def __init__(self, world: World, source: WatchedSource) -> None:
        self._source = source
        self._counter = world.counter("learner")
        self._parameters = world.host.mailbox()

    def flat_parameters(self) -> NDArray[np.float32]:
        """Every word is the version that they are published as."""
        version = self._parameters.version + 1
        return np.full(PARAMETER_BYTES // 8, version, np.int64).view(np.float32)

    def learn(self, batch: Batch, enter: Any) -> Any:
        whole = batch.keys >= 0
        if (batch.weights[~whole] != 0.0).any() or (batch.weights[whole] <= 0.0).any():
            raise Violation(f"torn: weights {batch.weights} of keys {batch.keys}")
        names = ("action", "obs", "next_obs", "reward", "discount")
        stamps = check_rows({name: batch[name][whole] for name in names}, "a batch")
        given = priorities(stamps)
        leaves = self._source.leaves[whole]
        foreign = ~is_of(leaves, given)
        if foreign.any():
            row = int(np.argmax(foreign))
            raise Violation(f"foreign: {stamps[row].tolist()} came for a leaf of {leaves[row]}")
        self._counter[ROWS_CHECKED] += len(stamps)
        errors = np.ones(len(batch.keys), np.float32)
        errors[whole] = given
        errors += np.float32(fraction(self._source.next_update))
        facts = dict.fromkeys(("td_loss", "q_values", "td_error", "gradient_norm"), 0.0)
        return errors, facts


class NoCheckpoints:
    def due(self) -> bool:
        return False

    def save(self, dqn: Any, version: int) -> None: ...


def make_replay(world: World) -> tuple[ReplayServer, ReplayCore]:
    """The real server; each chunk is looked at, and told to the account, before it is evicted."""
    host, layout = world.host, world.plan.replay
    replay = ReplayCore(layout, alpha=1.0, eps=0.0, buffer=host.experience)
    counter = world.counter("replay")
    producer = world.audit.producer()

    def tell(slot: int) -> None:
        record = chunk_record(replay, slot)
        deadline_s = time.monotonic() + 10
        while not producer.try_offer(record):
            assert time.monotonic() < deadline_s, "the account is not kept"
            time.sleep(1e-3)
        counter[CHUNKS_CHECKED] += 1

    source, sink = host.experience_source(), host.sample_sink()
    intake = Intake(source, replay, world.limiter, streams_per_actor=STREAMS)
    replay.ledger.on_evict = tell
    Witness(replay, world.updates)
    server = ReplayServer(replay, intake, source, sink, host.metrics("replay"), method="stratified")
    return server, replay


def chunk_record(replay: ReplayCore, slot: int) -> NDArray[Any]:
    """What the account keeps of a live chunk, once it is found to be whole."""
    first = check_chunk(replay.store, slot)
    header = replay.store.header_rows[slot]
    words = [COMMIT_SEQUENCE, ACTOR, INCARNATION, SEQUENCE, STREAM]
    values = (*header[words].tolist(), first, int(header[COUNT]), slot)
    return np.array([values], AUDIT)


def make_learner(world: World) -> Learner:
    """The real duty cycle around a network that only checks."""
    source = WatchedSource(world.host.sample_source())
    dqn: Any = CheckingDqn(world, source)
    return Learner(
        dqn,
        source,
        world.host.mailbox(),
        [Batch.empty(BatchLayout(SCHEMA, BATCH))],
        world.host.metrics("learner"),
        NoCheckpoints(),
        prefetch=PREFETCH,
        publish_period_s=0.005,
        clock_s=time.monotonic,
    )


def make_role(world: World, name: str, incarnation: int) -> Any:
    if name == "replay":
        return make_replay(world)[0]
    if name == "learner":
        return make_learner(world)
    if name == "inference":
        return make_inference(world)
    return make_actor(world, int(name.split()[1]), incarnation)


def live(world: World, name: str) -> None:
    """One life of a role in a forked process, as zapex.machine.child leads it."""
    from tests.stress import steps

    incarnation = child_setup(f"chaos {name}")
    steps.obey(world.orders[name])
    host = world.host
    plain = HostMemory(world.plan, host.control, host.experience, host.eventfds)
    world.host = plain
    waiter = Waiter(plain.sleeping, plain.sleeping_word(name),
                    plain.eventfds[world.plan.role_index(name)])  # fmt: skip
    role = make_role(world, name, incarnation)
    run_until_stopped(role, lambda ready: waiter.wait(ready, 0.2), Stop())
    role.close()
    end_by_sigterm()


def warm_up() -> None:
    """Every kernel is loaded before the first fork: all roles in turn, in a world of their own."""
    world = World()
    host = world.host
    for name in world.names:
        host.set_incarnation(name, 1)
    roles = [make_role(world, name, 1) for name in reversed(world.names)]
    for _ in range(2000):
        for role in roles:
            role.do_work()
    rows, chunks = world.counter("learner")[ROWS_CHECKED], world.counter("replay")[CHUNKS_CHECKED]
    assert rows, "the warm-up did not get as far as the learner"
    assert chunks, "the warm-up did not get as far as an eviction"
    for role in roles:
        with contextlib.suppress(AttributeError):
            role.close()
