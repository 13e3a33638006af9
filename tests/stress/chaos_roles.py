"""The roles of the chaos harness: zapex's own protocol code around content that can be checked.

Replay server, intake, sample source and sink, learner's duty cycle, chunk builder, rings, mailbox
and slots are the real ones. What plays and what learns is not: no torch, no game.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stress.chaos_content import (
    N_STEP,
    SCHEMA,
    Violation,
    actions,
    check_chunk,
    check_rows,
    episode_steps,
    observations,
    priorities,
    rewards,
)
from tests.stress.chaos_updates import Witness, fraction, is_of
from zapex.chunks.batch import Batch
from zapex.chunks.builder import CUT, END, ChunkBuilder
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
from zapex.roles.intake import Intake
from zapex.roles.learner import Learner
from zapex.roles.replay_server import ReplayServer
from zapex.roles.values import Inference, Pull
from zapex.shm_ring import ShmRing
from zapex.shm_transport import HostMemory, HostPlan
from zapex.transport import Sampled

ACTORS, STREAMS, BATCH, PREFETCH = 3, 2, 16, 3
PARAMETER_BYTES = 64 << 10
QUESTIONS = ExchangeShape(ACTORS, STREAMS, (64,), "<i8", 64)
AUDIT = np.dtype(
    [(name, np.int64) for name in ("commit_sequence", "actor", "incarnation", "sequence", "stream",
                                   "first", "count", "slot")]
)  # fmt: skip
_AUDIT_RECORDS = 1 << 14
ROWS_CHECKED, CHUNKS_CHECKED, VALUES_CHECKED = range(3)  # a role's own counters
COMMITTED_OF, COMMITTED = 3, 4  # an actor's: its incarnation, and how many chunks it committed


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


class ChaosActor:
    """Plays streams of known content through the real builder and sink."""

    def __init__(self, world: World, actor: int, incarnation: int) -> None:
        host = world.host
        self._sink = host.experience_sink(actor, incarnation)
        self._parameters = host.mailbox()
        self._builder = ChunkBuilder(
            self._sink.store, STREAMS, actor=actor, incarnation=incarnation,
            first_stream=actor * STREAMS, max_chunk_age_steps=11 if actor == 0 else 0,
        )  # fmt: skip
        self._stamps = np.zeros((STREAMS, 4), np.int64)
        self._stamps[:, 0], self._stamps[:, 1] = actor, incarnation
        self._stamps[:, 2] = actor * STREAMS + np.arange(STREAMS)
        self._counter = world.counter(f"actor {actor}")
        self._counter[COMMITTED] = 0
        self._counter[COMMITTED_OF] = incarnation
        self._value = np.empty(PARAMETER_BYTES, np.uint8)
        self._version = 0
        exchange = Exchange(host.part_of("exchange"), QUESTIONS)
        self._values = exchange.asker(actor, host.waker("inference").wake)
        self._playing = self._play()

    def do_work(self) -> int:
        """One step of every stream; 0 while there is no credit."""
        return next(self._playing)

    def ready(self) -> bool:
        return self._values.answered() if self._values.waits else self._sink.ready()

    def close(self) -> None:
        """Hand over what is half a chunk."""
        self._builder.flush()
        self._commit()

    def _commit(self) -> None:
        closed = self._builder.take_closed()
        if len(closed):
            self._sink.commit(closed)
            self._counter[COMMITTED] += len(closed)

    def _until_done(self, call: Any) -> Iterator[int]:
        """The builder's call, with slots as it needs them."""
        while True:
            done = call() == STREAMS
            self._commit()
            if done:
                return
            slots = self._sink.try_claim()
            if slots is None:
                yield 0
            else:
                self._builder.provide(slots)

    def _play(self) -> Iterator[int]:
        stamps, builder = self._stamps, self._builder
        everyone = np.ones(STREAMS, np.bool_)
        length = episode_steps(stamps[:, 2])
        zero = np.zeros(STREAMS, np.int64)
        first = observations(stamps, zero, zero)
        yield from self._until_done(lambda: builder.begin(everyone, {"obs": first}))
        while True:
            numbers = stamps[:, 3]
            episode, step = numbers // length, numbers % length
            last = step == length - 1
            flags = last * END + (last & (episode % 2 == 0)) * CUT
            after = observations(stamps, episode, step + 1)
            builder.staged["action"], builder.staged["stamp"] = actions(stamps), stamps
            reward, priority = rewards(numbers), priorities(stamps)
            yield from self._until_done(
                lambda f=flags, a=after, r=reward, p=priority: builder.add(
                    everyone, f, {"obs": a}, r, priority=p
                )
            )
            numbers += 1
            if last.any():
                first = observations(stamps, numbers // length, zero)
                yield from self._until_done(lambda m=last, o=first: builder.begin(m, {"obs": o}))
            if numbers[0] % 16 == 0:
                self._read_parameters()
                if self._version:  # without parameters nobody is answered
                    yield from self._ask()
            yield 1

    def _ask(self) -> Iterator[int]:
        """What this life asks is answered, and with nothing else than its own answer."""
        words = self._stamps[:, [1, 3]].sum(axis=1) % 100_003 * 10 + self._stamps[:, 0]
        items = np.repeat(words[:, None], QUESTIONS.item[0], axis=1)
        self._values.ask(items)
        while (answer := self._values.take()) is None:
            yield 0
        if (answer[0] != judged(items)).any():
            raise Violation(f"foreign: {answer[0][:, :2].tolist()} for {words.tolist()}")

    def _read_parameters(self) -> None:
        version = self._parameters.newer_than(self._version, self._value)
        if version:
            words = self._value.view(np.int64)
            if words[0] != version or (words != version).any():
                raise Violation(
                    f"torn: parameters {version} hold {sorted(set(words.tolist()))[:4]}"
                )
            self._version = version
            self._counter[VALUES_CHECKED] += 1


def judged(items: NDArray[Any]) -> NDArray[np.float32]:
    """Values that only these items have; float32 holds them."""
    return items.astype(np.float32) + np.arange(QUESTIONS.width, dtype=np.float32)


class Judge:
    """A policy that checks its parameters, and whose values say what was asked."""

    def __init__(self, counter: NDArray[np.int64]) -> None:
        self._counter = counter

    def load_flat(self, buffer: Any) -> None:
        words = buffer.view(np.int64)
        if (words != words[0]).any():
            raise Violation(f"torn: parameters hold {sorted(set(words.tolist()))[:4]}")
        self._counter[VALUES_CHECKED] += 1

    def q_values(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        return judged(obs)


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
        rows = {name: batch[name][whole] for name in
                ("stamp", "action", "obs", "next_obs", "reward", "discount")}  # fmt: skip
        check_rows(rows, "a batch")
        stamps = rows["stamp"]
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
    return ChaosActor(world, int(name.split()[1]), incarnation)


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


def fill(world: World, incarnation: int) -> None:
    """Play until the memory is full, in this process: a life of actor 1 that then ends."""
    host = world.host
    host.set_incarnation("actor 1", incarnation)
    server, replay = make_replay(world)
    actor = ChaosActor(world, 1, incarnation)
    almost = world.plan.replay.live_slots - 8 * STREAMS
    while replay.ledger.counts["live"] < almost and len(replay) < almost * world.chunk:
        if not actor.do_work():
            server.do_work()
    host.set_incarnation("actor 1", 0)
    server.do_work()


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


assert N_STEP == 2, "check_rows and the episodes know it"
