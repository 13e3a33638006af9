"""The machines of a simulated run and zapex's roles on them, over memory and a network.

The roles, their ends of the links, intakes, ledgers and limiters are the production classes, wired
as run/topologies.py and run/networked.py do. Games, Q values and what learns are not: their
contents can be checked (tests/simulation/truth.py). A process dies at a named step of the
protocol in this way: at the step its machine's memory is copied; when its turn is over, of which
nothing leaves the process any more, the copy is put back. Where it stops at a step instead, time
goes on for the others before the step's call returns.
"""

import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulation.checker import Checker, Memory
from tests.simulation.clock import Timeline
from tests.simulation.network import Network, SimDealers, SimListener
from tests.simulation.truth import (
    ACTIONS,
    FRAME_WORDS,
    SCHEMA,
    STACK,
    TableStreams,
    Violation,
    values_of,
)
from tests.stress import steps
from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.layout import COMMITTED, INCARNATION, STATE, BatchLayout
from zapex.errors import Fenced, Refused, RunOver
from zapex.host import roster
from zapex.host.metrics import EPISODE, RoleMetrics
from zapex.host.parts import PARTS
from zapex.host.plan import HostPlan
from zapex.host.roster import Roster, Routes
from zapex.machine import waiting
from zapex.machine.exchange import Exchange, ExchangeShape
from zapex.machine.waiting import Waker
from zapex.net import sample_source, shard_samples
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.net.replay_ends import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.server import LinkServer
from zapex.net.shard_samples import ShardedSampleSource
from zapex.net.statistics import StatsHandler, StatsReader, StatsSender
from zapex.replay import snapshots
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.limiter import LimiterConfig
from zapex.roles.actor import Actor
from zapex.roles.intake import Intake
from zapex.roles.learner import Learner
from zapex.roles.relay import Outbox, Relay
from zapex.roles.replay_server import ReplayServer
from zapex.roles.values import Inference, OwnValues, Pull
from zapex.run import keeping
from zapex.run.keeping import Keeper
from zapex.run.networked import BothSinks
from zapex.shm_transport import HostMemory
from zapex.wire.messages import LEARNER, SMALL, Bye
from zapex.wire.protocol import ROLES, Form
from zapex.zmq_transport import (
    ChunkSender,
    ShardedChunkSender,
    ZmqParameterSink,
    ZmqParameterSource,
)

STREAMS, CHUNK, PREFETCH, PARAMETER_BYTES, BETA = 2, 8, 3, 1 << 12, 0.4
_DAY_NS = 1_800_000_000 * 10**9
CHECK_EVERY = 20  # turns of a replay between two looks at all leaves
CALM_S = 80.0
"""After a fault. For 60 s a replay keeps the numbers of an actor host that only said hello."""
_START_S = 4.0  # of replays and clients, in any order
_SILENT_S = 5.0
_LOST_PLACE_S = 20.0  # after a fault: who has lost its place to another has heard of it
_SLEEP_S = 2.0, 0.5  # about; who has sockets looks for silence, too, each second


@dataclass(frozen=True)
class Shape:
    """What a seed chooses of a run. shards 0: one machine has all of it."""

    shards: int
    actor_hosts: int
    actors: int  # of each machine
    capacity: int
    batch: int
    samples_per_insert: float
    central: bool  # an inference role computes for the actors
    copies: bool
    places: bool
    learns_there: bool  # the learner is on the replay's machine
    chunk_age: int
    rival: bool  # a second learner tries to come in
    ahead: bool  # the learner's next batch is unpacked in a thread
    saves: bool  # the memory, and loads it after a loss of power
    loses_shard: bool  # the second of two shards is gone when the faults end
    piece_rows: int  # of one message of a batch; 0: a batch comes in one
    tight: bool  # the actors are hardly ahead of the learner

    @classmethod
    def of(cls, time: Timeline) -> "Shape":
        """A shape."""
        rng = time.rng
        shards = rng.choice((0, 1, 1, 1, 2))
        rare = random.Random(f"shape {time.seed}")
        return cls(
            shards, rng.choice((1, 2)) if shards else 0, rng.choice((1, 2)),
            rng.choice((160, 320, 640)), rng.choice((8, 16)), rng.choice((0.0, 1.0, 4.0)),
            rng.random() < 0.4, rng.random() < 0.5, rng.random() < 0.5,
            shards == 1 and rng.random() < 0.3, rng.choice((0, 11)), rng.random() < 0.25,
            rare.random() < 0.5, rare.random() < 0.2, rare.random() < 0.3,
            3 * (time.seed % 7 == 1), time.seed % 7 == 5,
        )  # fmt: skip

    @property
    def all_actors(self) -> int:
        """Of the run."""
        return self.actors * max(1, self.actor_hosts)

    def limiter(self, relay: bool = False) -> LimiterConfig:
        """Of the replay, or of a relay."""
        grant = STREAMS * CHUNK
        ratio, ahead = 0.0 if relay else self.samples_per_insert, 2 if self.tight else 8
        return LimiterConfig(
            samples_per_insert=ratio,
            min_size_to_sample=1 if relay else 4 * self.batch // max(1, self.shards),
            tolerance=int(ahead * (ratio * grant * self.all_actors + self.batch)), grant=grant,
            batch=self.batch, capacity=self.capacity,
        )  # fmt: skip


class Bell(Waker):
    """Calls a function where a Waker would write to an eventfd."""

    def wake(self) -> None:
        if waiting._sleeps_kernel(self._words, self._index):
            call: Any = self._fd
            call()


class BelledMemory(HostMemory):
    """Its processes sleep until they are due, or somebody rings."""

    def waker(self, name: str) -> Waker:
        bell = self.eventfds[self.plan.role_index(name)]
        return Bell(self.sleeping, self.sleeping_word(name), bell)


class Process:
    """A role of a machine, life after life."""

    def __init__(self, host: "Host", name: str, make: Callable[["Process"], Any]) -> None:
        self.host, self.name, self._make = host, name, make
        self.time = host.cluster.time
        self.role: Any = None
        self.life = self.incarnation = 0
        self._wasted: int | None = None  # messages, when all was calm
        self.sockets: list[Any] = []
        self.links: list[ZmqLink] = []
        self.asleep = self._woken = False
        self._turns = 0  # counts those that were planned
        # A step, at which of its passages, and the time until which it stops there; 0: it dies.
        self.order: tuple[str, int, float] | None = None
        self.held = False  # stopped at a step
        self.stopped_until_s = 0.0

        self.title = f"{host.name}/{name}"
        self._in_memory = host.memory is not None and name in dict(host.memory.plan.roles)

    def start(self) -> None:
        """A new life: its incarnation is announced, and then the role begins."""
        self.life += 1
        self.incarnation = max(self.host.wall_ns(), self.incarnation + 1)
        self._announce(self.incarnation)
        self.time.soon(0.05, 1.0, partial(self._begin, self.life))

    def _announce(self, incarnation: int) -> None:
        if self._in_memory:
            self.host.memory.set_incarnation(self.name, incarnation)

    def _begin(self, life: int) -> None:
        if life == self.life:
            self.time.say(f"{self.title} begins")
            self._declare(asleep=False)  # a former life may have died in its sleep
            role = self._run(lambda: self._make(self))
            if life == self.life:
                self.role = role
                self._again(0.001)

    def _turn(self, turn: int) -> None:
        if turn != self._turns or self.role is None:
            return
        if self.stopped_until_s > self.time.now_s:
            self.time.after(self.stopped_until_s - self.time.now_s, partial(self._turn, turn))
            return
        life, woken, self._woken = self.life, self._woken, False
        if self.asleep:
            self._declare(asleep=False)
        knew = woken and self._run(self.role.ready)
        if life != self.life:
            return
        work = self._run(self.role.do_work)
        if life == self.life:
            self._look_for_waste()
        if work:
            self.time.say(f"{self.title} {work}")
            self.host.cluster.checker.woken[self.name.split()[0], bool(knew)] += woken
        if life == self.life:
            sleeps = not work and self._run(self._falls_asleep)
            about_s = _SLEEP_S[bool(self.sockets)] if sleeps else self.host.cluster.turn_s
            self._again(about_s)

    def _again(self, about_s: float) -> None:
        self._turns += 1
        self.time.soon(0.2 * about_s, 1.8 * about_s, partial(self._turn, self._turns))

    def _look_for_waste(self) -> None:
        """Where nothing has failed for long, nothing is sent twice or turned down."""
        found = sum(link.counts["bad"] + link.counts["renewed"] for link in self.links)
        found += getattr(self.role, "wasted", lambda: 0)()
        calm = self.host.cluster.is_calm
        before, self._wasted = self._wasted, found if calm else None
        if calm and before is not None and found > before:
            raise Violation(f"stuck: {self.title} has {found - before} messages in vain")

    def wake(self) -> None:
        """Something has come for it: it does not sleep on (machine/waiting.py)."""
        if self.asleep:
            self._woken = True
            self._declare(asleep=False)
            if not self.held:
                self._again(0.5 * self.host.cluster.turn_s)

    def _falls_asleep(self) -> bool:
        self._declare(asleep=True)
        role = self.role
        if role.ready() and role is self.role:
            self._declare(asleep=False)
        return self.asleep

    def _declare(self, *, asleep: bool) -> None:
        self.asleep = asleep
        if self._in_memory:
            memory = self.host.memory
            memory.sleeping[memory.sleeping_word(self.name)] = asleep

    def _run(self, call: Callable[[], Any]) -> Any:
        """Let it run; it may die or stop at the step of its order."""
        cluster, host, life, order = self.host.cluster, self.host, self.life, self.order
        copied: list[Any] = []

        def comes_to_it() -> None:
            assert order is not None
            if order[2]:
                self._stand_still(*order)
            if not order[2] or life != self.life:
                cluster.net.ghost = True
                copied.extend(block.copy() for block in host.blocks)

        if order is not None:
            steps.order(*order[:2], comes_to_it)
        found: Any = None
        running, cluster.running = cluster.running, self
        try:
            found = call()
        except (Fenced, Refused, RunOver) as error:
            second = isinstance(host, LearnerMachine) and self.links[0].welcome is None
            replaced = "has replaced this" in str(error) and cluster.is_calm_for(_LOST_PLACE_S)
            # A rival whose clock was set back is told that it is the older one.
            rival = second and "rival" in cluster.hosts and isinstance(error, Fenced)
            refused = rival or (second and isinstance(error, Refused))
            if (replaced and not rival) or (cluster.is_calm and not refused):
                raise Violation(f"stuck: {self.title} leaves: {error!r}") from error
            if not copied:
                self.role = None
                self.life += 1
                life = self.life
                for link in self.links:
                    link.send(SMALL, Bye())
                why = type(error).__name__
                self.time.soon(0.01, 0.05, lambda: life == self.life and host.leave(why))
        except Exception as error:
            if not copied and cluster.failure is None:
                if isinstance(error, Violation):
                    raise
                raise Violation(f"crash: {self.title}: {traceback.format_exc()}") from error
        finally:
            cluster.running, cluster.net.ghost = running, False
            left = steps.withdraw()
            if order is not None and self.order is order:
                self.order = order[0], left, order[2]
        if cluster.failure is not None:
            raise cluster.failure
        if copied:
            for block, as_it_was in zip(host.blocks, copied, strict=True):
                block[:] = as_it_was
            if life == self.life:
                self.time.say(f"{self.title} dies at {order[0] if order else ''}")
                self.die()
        elif found and self.life == life and self.role is not None and host.watch is not None:
            host.watch(self)
        return None if copied or self.life != life else found

    def _stand_still(self, step: str, _: int, until_s: float) -> None:
        """In the middle of its turn, while the others go on. It may be killed meanwhile."""
        self.order, self.held, life = None, True, self.life
        self.time.say(f"{self.title} stops at {step}")
        try:
            self.time.run(max(self.time.now_s, until_s))
        except Exception as error:  # which does not pass through a kernel
            self.host.cluster.failure = error
        if life == self.life:
            self.held = False

    def dial(self, url: str, security: Any, largest: int, connections: int) -> SimDealers:
        """Its connections to a listener."""
        dealers = SimDealers(self.host.cluster.net, self, url, connections)
        self.sockets.append(dealers)
        return dealers

    def listen(self, url: str, *_: Any, **__: Any) -> SimListener:
        """Its listener."""
        listener = SimListener(self.host.cluster.net, self, url, 1024)
        self.sockets.append(listener)
        return listener

    def die(self, *, silent: bool = False) -> None:
        """It is gone. Its parent starts it again, if the machine is there."""
        self.life += 1
        life, self.role, self.order, self._wasted = self.life, None, None, None
        self.asleep = self._woken = self.held = False
        self.stopped_until_s = 0.0
        for socket in self.sockets:
            socket.close(silent=silent)
        self.sockets.clear()
        self.links.clear()
        if silent:
            return
        self.time.say(f"{self.title} is dead")
        self.host.bury(self)
        self.time.soon(0.001, 0.1, lambda: life == self.life and self._announce(0))
        longest_s = self.time.rng.choice((1.0, 2.0, 8.0))
        self.time.soon(0.1, longest_s, lambda: life == self.life and self.start())


def in_vain(source: ZmqExperienceSource) -> int:
    """Chunks that a replay got and did not take."""
    return sum(source.counts[what] for what in ("doubled", "early", "uncredited", "refused"))


class Host:
    """A machine: its memory, its clock, its processes. It loses all when it loses its power."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.cluster, self.name = cluster, name
        self.memory: Any = None  # HostMemory, while there is some
        self.blocks: list[NDArray[np.uint8]] = []
        self.processes: dict[str, Process] = {}
        self.number = 0
        self.boots = 0
        self.ahead_ns = 0  # its time of day
        self.off = False
        self.watch: Callable[[Process], None] | None = None

    def wall_ns(self) -> int:
        """Its time of day."""
        return _DAY_NS + int(self.cluster.time.now_s * 1e9) + self.ahead_ns

    def boot(self) -> None:
        """It has power, and runs its part with new memory."""
        self.off = False
        self.boots += 1
        self.number = self.cluster.time.rng.getrandbits(62) + 1
        self.cluster.time.say(f"{self.name} boots")
        self.begin()

    def begin(self) -> None:
        """Make the memory, start the roles."""
        raise NotImplementedError

    def allocate(self, plan: HostPlan) -> None:
        """New memory of a plan."""
        self.blocks = [aligned_zeros(plan.nbytes), aligned_zeros(max(64, plan.experience_bytes))]
        bells: Any = [partial(self._ring, name) for name, _ in plan.roles]
        self.memory = BelledMemory(plan, *self.blocks, bells, create=True)

    def _ring(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and not self.cluster.net.ghost:
            process.wake()

    def attach(self) -> HostMemory:
        """As a process sees the memory."""
        assert self.memory is not None
        return BelledMemory(self.memory.plan, *self.blocks, self.memory.eventfds)

    def start(self, makers: dict[str, Callable[[Process], Any]]) -> None:
        """Start these processes, in any order."""
        last = max([self.wall_ns(), *(p.incarnation for p in self.processes.values())])
        self.processes = {name: Process(self, name, make) for name, make in makers.items()}
        for process in self.processes.values():
            process.incarnation = last
            process.start()

    def lose_power(self) -> None:
        """All processes are gone, and nobody is told."""
        self.cluster.time.say(f"{self.name} loses its power")
        self.off = True
        self._end(silent=True)

    def _end(self, *, silent: bool) -> None:
        for process in self.processes.values():
            process.die(silent=silent)
            process.life += 1  # the machine has no parent any more that starts it
        self.forget()

    def forget(self) -> None:
        """The memory is lost."""

    def bury(self, process: Process) -> None:
        """It has died, and the memory is as it left it."""

    def leave(self, why: str) -> None:
        """A role may not go on: an actor host joins again, as another one."""
        self.cluster.time.say(f"{self.name} leaves: {why}")
        boots = self.boots
        self._end(silent=False)
        self.off = True
        self.cluster.time.soon(0.5, 2.0, lambda: self.boots == boots and self.boot())

    # What roles are made of.

    def plan(self, part: str, actors: int, capacity: int, *, central: bool = False) -> HostPlan:
        """The plan of a part."""
        streams = actors * STREAMS
        size = STREAMS, (STACK, FRAME_WORDS), "<i8", ACTIONS
        return HostPlan(
            replay=ReplayLayout(SCHEMA, capacity, streams, CHUNK), actors=actors,
            envs_per_actor=STREAMS, batch_size=self.cluster.shape.batch, prefetch=PREFETCH,
            parameter_bytes=PARAMETER_BYTES, beta=BETA, eval_episodes=1,
            part=PARTS[part].acting("central" if central else "cpu"),
            exchange=ExchangeShape(actors, *size) if central else None,
        )  # fmt: skip

    def actor_makers(self, numbers: Sequence[int]) -> dict[str, Callable[[Process], Any]]:
        """The actors and what computes for them."""
        makers: dict[str, Callable[[Process], Any]] = {
            f"actor {i}": partial(self._make_actor, i, number) for i, number in enumerate(numbers)
        }
        if self.cluster.shape.central:
            makers["inference"] = self._make_inference
        return makers

    def _make_actor(self, index: int, number: int, process: Process) -> Actor:
        memory = self.attach()
        sink = memory.experience_sink(index, process.incarnation)
        metrics = memory.metrics(process.name)
        shape, first = self.cluster.shape, number * STREAMS
        builder = ChunkBuilder(
            sink.store, STREAMS, actor=index, incarnation=process.incarnation, first_stream=first,
            max_chunk_age_steps=shape.chunk_age,
        )  # fmt: skip
        games: Any = TableStreams(self.cluster.checker.truth, number, process.incarnation, STREAMS)
        values: Any
        if shape.central:
            exchange = memory.plan.exchange
            assert exchange is not None
            wake = memory.waker("inference").wake
            values = Exchange(memory.part_of("exchange"), exchange).asker(index, wake)
        else:
            values = OwnValues(*self._policy(process, memory, metrics), metrics)
        commit = sink.commit

        def committed(slots: NDArray[np.int64]) -> None:
            checker = self.cluster.checker
            if not self.cluster.net.ghost:
                checker.made[number] += len(slots)
                if not shape.shards:
                    checker.owe(sink.store, slots, process.title)
            commit(slots)

        watched: Any = sink
        watched.commit = committed
        return Actor(
            games, values, sink, builder, metrics,
            memory.ring(f"episodes {index}").producer().try_offer, epsilons=np.zeros(STREAMS),
            first_stream=first, reward_clip=False, priorities=True,
            rng=np.random.default_rng(process.life), clock_ns=lambda: int(1e9 * time.monotonic()),
            may_step=lambda: not self.cluster.is_over,
        )  # fmt: skip

    def _policy(self, process: Process, memory: HostMemory, metrics: RoleMetrics) -> Any:
        policy: Any = Judge(self.cluster.checker, f"{process.title} {process.incarnation}")
        mailbox = memory.mailbox()
        return policy, Pull(policy, mailbox, metrics, period=4, parameter_bytes=PARAMETER_BYTES)

    def _make_inference(self, process: Process) -> Inference:
        memory = self.attach()
        assert memory.plan.exchange is not None
        metrics = memory.metrics("inference")
        policy, pull = self._policy(process, memory, metrics)
        wakers = [memory.waker(f"actor {i}").wake for i in range(memory.plan.actors)]
        answerer = Exchange(memory.part_of("exchange"), memory.plan.exchange).answerer(wakers)
        return Inference(answerer, policy, pull, metrics, streams=STREAMS)

    def link(
        self, process: Process, role: str, shard: int, form: Any, actors: int = 0, epoch: int = 0
    ) -> ZmqLink:
        """A link to a shard."""
        cluster = self.cluster

        link = ZmqLink(
            f"tcp://{shard}:1", role, self.number, process.incarnation, form,
            cluster.settings(shard), Security(insecure_network=True), schema_hash=SCHEMA.hash,
            actors=actors, epoch=epoch, dial=process.dial,
        )  # fmt: skip
        process.links.append(link)
        return link

    def make_learner(self, process: Process) -> Any:
        """With the replay on this machine."""
        memory = self.attach()
        return self.learner(memory, memory.sample_source(), memory.mailbox())

    def learner(self, memory: HostMemory, source: Any, sink: Any) -> Learner:
        """A learner."""
        cluster = self.cluster
        cluster.learners += 1
        beta = BETA if cluster.shape.shards < 2 else 0.0
        dqn: Any = CheckingDqn(cluster.checker, cluster.learners, beta)
        no_checkpoints: Any = SimpleNamespace(due=lambda: False)
        ahead = cluster.shape.ahead
        return Learner(
            dqn, source, StampedSink(cluster, sink),
            [Batch.empty(BatchLayout(SCHEMA, cluster.shape.batch)) for _ in range(1 + ahead)],
            memory.metrics("learner"), no_checkpoints, prefetch=PREFETCH, publish_period_s=0.5,
            clock_s=time.monotonic,
        )  # fmt: skip


class Judge:
    """A policy that checks its parameters, and whose values name what was asked."""

    def __init__(self, checker: Checker, who: str) -> None:
        self._checker, self._who = checker, who

    def load_flat(self, buffer: Any) -> None:
        self._checker.load(self._who, buffer.view(np.int64))

    def q_values(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        return values_of(self._checker.truth, obs)


class CheckingDqn:
    """Learns nothing; looks at every row."""

    def __init__(self, checker: Checker, who: int, beta: float) -> None:
        self._checker, self._who, self._beta = checker, who, beta

    def flat_parameters(self) -> NDArray[np.float32]:
        return np.zeros(PARAMETER_BYTES // 4, np.float32)

    def learn(self, batch: Batch, enter: Any) -> Any:
        facts = dict.fromkeys(("td_loss", "q_values", "td_error", "gradient_norm"), 0.0)
        return self._checker.batch(batch, self._who, self._beta), facts


class StampedSink:
    """Every word of published parameters is their version."""

    def __init__(self, cluster: "Cluster", sink: Any) -> None:
        self._cluster, self._sink = cluster, sink

    @property
    def version(self) -> int:
        return int(self._sink.version)

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        if not self._cluster.net.ghost:
            self._cluster.checker.published = max(self._cluster.checker.published, version)
        self._sink.publish(version, np.full(PARAMETER_BYTES // 8, version, np.int64).view(np.uint8))


class ReplayMachine(Host):
    """A replay: of a run on this machine alone, or a shard of a run on several."""

    def __init__(self, cluster: "Cluster", name: str, shard: int) -> None:
        super().__init__(cluster, name)
        self.shard = shard
        self.known: Memory | None = None
        self.server: LinkServer | None = None
        self._saved: dict[Any, Any] = {}  # what was saved last, as Checker.leaves_of says it
        self.watch = self._look
        self._looks = 0

    def begin(self) -> None:
        shape = self.cluster.shape
        alone = not shape.shards
        part = "all" if alone else "replay with learner" if shape.learns_there else "replay"
        actors = shape.all_actors
        self.allocate(self.plan(part, actors, shape.capacity, central=alone and shape.central))
        self.known = Memory(
            f"{self.name} {self.boots}", shape.shards > 1, networked=not alone,
            with_learner=alone or shape.learns_there,
        )  # fmt: skip
        makers: dict[str, Callable[[Process], Any]] = {"replay": self._make_replay}
        if alone:
            makers |= self.actor_makers(range(actors))
        if alone or shape.learns_there:
            makers["learner"] = self.make_learner
        self.start(makers)

    def forget(self) -> None:
        assert self.known is not None
        self.cluster.checker.lose(self.attach().store(), self.known)

    def bury(self, process: Process) -> None:
        if process.name.startswith("actor "):  # what it has filled is taken over
            store = self.attach().store()
            rows, life = store.header_rows, process.incarnation
            filled = (rows[:, INCARNATION] == life) & (rows[:, STATE] == COMMITTED)
            self.cluster.checker.owe(store, np.flatnonzero(filled), process.title)

    def _make_replay(self, process: Process) -> Any:
        cluster, memory, shape = self.cluster, self.attach(), self.cluster.shape
        plan = memory.plan
        make = partial(
            ReplayCore, plan.replay, alpha=1.0, eps=0.0, seed=process.life,
            buffer=memory.experience, shard=0,
        )  # fmt: skip
        keeper = Keeper(cluster.run_of(self.name), memory, lambda text: None)
        loads = not keeper.words.loaded
        replay = keeper.memory(make)
        assert self.known is not None
        if loads and self._saved:
            cluster.tell(f"{self.name} has loaded {len(replay)} transitions")
            cluster.checker.restored(replay, self.known, self._saved)
        cluster.checker.watch(replay, self.known, lambda: cluster.net.ghost)
        sink: Any
        if not shape.shards:
            source: Any = memory.experience_source()
            sink = memory.sample_sink()
        else:
            numbers = Roster(memory.part_of("roster"), plan.actors, replay.store.header_rows)
            mailbox = memory.mailbox()
            server = LinkServer(
                process.listen(f"tcp://{self.shard}:1"), cluster.form,
                cluster.settings(self.shard), numbers,
                incarnation=process.incarnation, params_version=lambda: mailbox.version,
                takes_learner=not shape.learns_there, tell=cluster.tell,
            )  # fmt: skip
            server.guard.close()  # its thread has nothing to guard here
            self.server = server
            ends: list[Any] = [
                ZmqParameters(server, mailbox),
                StatsHandler(server, memory),
            ]
            if shape.learns_there:
                sink = memory.sample_sink()
            else:
                sink = ZmqSampleSink(server, replay.store)
                ends.append(sink)
            source = ZmqExperienceSource(server, replay.store, ends)
        intake = Intake(source, replay, shape.limiter(), streams_per_actor=STREAMS)
        known = self.known
        known.limiter, known.began = intake.limiter, len(replay)
        role = ReplayServer(
            replay, intake, source, sink, memory.metrics("replay"), method="stratified"
        )
        replay.warn = cluster.time.say  # a small memory is meant to be full early

        def do_work() -> int:
            work = role.do_work()
            written, on_evict = keeper._saves.manifest_crc32, replay.ledger.on_evict
            keeper.do_work()
            replay.ledger.on_evict = on_evict  # the checker's, which a save removes
            if keeper._saves.manifest_crc32 != written:
                self._saved = cluster.checker.leaves_of(replay.store, known)
            return work

        return SimpleNamespace(
            do_work=do_work, ready=role.ready, replay=replay, intake=intake,
            wasted=partial(in_vain, source) if shape.shards else lambda: 0,
        )  # fmt: skip

    def _look(self, process: Process) -> None:
        if process.name != "replay":
            return
        server, known, checker = process.role, self.known, self.cluster.checker
        assert known is not None
        checker.take(server.replay.store, known)
        learner = self.server and self.server.sessions.learner
        if learner and learner.host != known.place:
            known.place, known.updates = learner.host, {}
        self._looks += 1
        if self._looks % CHECK_EVERY == 0:
            checker.check_leaves(server.replay, known)
            checker.check_slots(process.title, server.intake, server.replay)
            if self.server is not None:
                self.cluster.look_for_silence(self.server)
                actors = range(self.cluster.shape.all_actors)
                counts = {i: self.memory.metrics(f"actor {i}").value("chunks") for i in actors}
                checker.check_statistics(known, counts)


class ActorMachine(Host):
    """Actors and their relay. First it asks the replay for their numbers."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        super().__init__(cluster, name)
        self.numbers: tuple[int, ...] = ()
        self._epoch = 0
        self.watch = self._look

    def begin(self) -> None:
        self.memory, self.numbers = None, ()
        self.start({"join": self._make_joiner})

    def _make_joiner(self, process: Process) -> Any:
        link = self.link(process, "relay", 0, None, self.cluster.shape.actors)

        def look() -> int:
            work = link.do_work()
            if link.is_open and link.welcome is not None:
                self.numbers = tuple(link.welcome.actors["actor"].tolist())
                self._epoch = link.welcome.epoch
                link._dealers.close()
                process.life += 1
                self._play()
            return work

        return SimpleNamespace(do_work=look, ready=link.ready)

    def _play(self) -> None:
        shape = self.cluster.shape
        room = 2 * STREAMS * shape.actors * CHUNK
        self.allocate(self.plan("actor", shape.actors, room, central=shape.central))
        self.cluster.time.say(f"{self.name} has the actors {self.numbers}")
        self.start({"relay": self._make_relay, **self.actor_makers(self.numbers)})

    def _make_relay(self, process: Process) -> Any:
        cluster, memory, shape = self.cluster, self.attach(), self.cluster.shape
        plan, store, source = memory.plan, memory.store(), memory.experience_source()
        routes = Routes(memory.part_of("routes"), plan.actors, self.wall_ns)
        epochs = self._epoch, *routes.epochs[1 : shape.shards]
        links = [
            self.link(process, "relay", shard, cluster.form, plan.actors, epoch)
            for shard, epoch in enumerate(epochs)
        ]
        link = links[0]

        def check(welcome: Any, channel: int) -> None:
            if welcome.epoch != self._epoch:
                raise Fenced("the replay has another memory")

        link.register(on_welcome=check)
        sender: Any
        if len(links) == 1:
            sender = ChunkSender(link, store)
        else:
            sender = ShardedChunkSender(links, store, routes, self.numbers, cluster.tell)
        outbox = Outbox(store, plan.replay, sender)
        take_freed = sender.take_freed

        def freed() -> list[int]:
            slots: list[int] = take_freed()
            if not cluster.net.ghost:
                cluster.checker.owe(store, slots, process.title)
            return slots

        sender.take_freed = freed
        intake = Intake(source, outbox, shape.limiter(relay=True), streams_per_actor=STREAMS)
        blocks = {n: memory.metrics(f"actor {i}") for i, n in enumerate(self.numbers)}
        relay = Relay(
            intake, outbox, source, ZmqParameterSource(link), memory.mailbox(),
            memory.metrics("relay"), parameter_bytes=PARAMETER_BYTES,
            link_ready=lambda: any(one.ready() for one in links),
            report=StatsSender(link, blocks).do_work,
            ended=lambda: False,
        )  # fmt: skip
        return SimpleNamespace(
            do_work=relay.do_work, ready=relay.ready, intake=intake, outbox=outbox,
            wasted=lambda: sender.counts["again"],
        )  # fmt: skip

    def _look(self, process: Process) -> None:
        if process.name == "relay":
            role = process.role
            self.cluster.checker.check_slots(
                process.title, role.intake, role.outbox, role.outbox.on_their_way
            )


class LearnerMachine(Host):
    """The learner."""

    def begin(self) -> None:
        shape = self.cluster.shape
        self.allocate(self.plan("learner", shape.all_actors, shape.capacity))
        self.start({"learner": self._make_learner})

    def _make_learner(self, process: Process) -> Any:
        cluster, memory = self.cluster, self.attach()
        links = [
            self.link(process, "learner", s, cluster.form) for s in range(cluster.shape.shards)
        ]
        link = links[0]
        piece_rows = cluster.shape.piece_rows
        sources = [ZmqSampleSource(one, BETA, piece_rows=piece_rows) for one in links]
        source: Any = sources[0]
        if len(links) > 1:
            source = ShardedSampleSource(sources, BETA, "stratified", process.life, cluster.tell)
        sink = ZmqParameterSink(link)
        StatsReader(link, memory)
        sender = StatsSender(link, {LEARNER: memory.metrics("learner")})
        role: list[Any] = []  # once the link is open

        def do_work() -> int:
            work = int((role or links)[0].do_work())
            if link.is_open and not role:
                role.append(self.learner(memory, source, BothSinks(memory.mailbox(), sink)))
            for chore in (*links, sender) if role else ():
                chore.do_work()
            return work

        def ready() -> bool:
            return bool((role or links)[0].ready())

        return SimpleNamespace(do_work=do_work, ready=ready)


class _AtOnce:
    """A thread whose work is done when it is started."""

    def __init__(self, net: Network, target: Callable[[], object], **_: Any) -> None:
        self._net, self._work = net, target

    def start(self) -> None:
        if not self._net.ghost:
            self._work()

    def is_alive(self) -> bool:
        return False


class Cluster:
    """All machines of a run."""

    def __init__(self, time: Timeline) -> None:
        self.time, self.checker = time, Checker()
        self.learners = 0  # lives of learners
        self.shape = shape = Shape.of(time)
        self.net = Network(time, copies=shape.copies, places=shape.places)
        self.failure: Exception | None = None  # while somebody stopped at a step
        self.running: Any = None  # the process whose turn it is
        self.library: Any = None  # the shape, if replays are served to programs
        self.is_over = False
        self.trouble_s = -np.inf  # when the last fault ends
        self.turn_s = time.rng.choice((0.1, 0.3, 1.0))
        layout = ReplayLayout(
            SCHEMA, shape.capacity, shape.all_actors * STREAMS, CHUNK
        ).chunk_layout
        self.form = Form(
            layout, shape.batch, PARAMETER_BYTES, RoleMetrics.required_bytes(), EPISODE.itemsize
        )
        self.hosts: dict[str, Host] = {}
        self.disk = TemporaryDirectory()
        rng = random.Random(f"secrets {time.seed}")
        snapshots.secrets = roster.secrets = SimpleNamespace(  # type: ignore[assignment]
            randbelow=rng.randrange, randbits=rng.getrandbits,
            token_hex=lambda n: f"{rng.getrandbits(8 * n):0{2 * n}x}",
        )  # fmt: skip
        keeping.threading = SimpleNamespace(Thread=partial(_AtOnce, self.net))  # type: ignore[assignment]
        for module in (sample_source, shard_samples):
            module.ThreadPoolExecutor = self._thread  # type: ignore[attr-defined]

    def _thread(self, *_: Any) -> Any:
        """Does its work between two turns, or at last when the result is wanted."""

        def submit(call: Any, *args: Any) -> Any:
            work = cache(partial(call, *args))
            self.time.soon(0.0, self.turn_s, work)
            return SimpleNamespace(result=lambda timeout_s: work())

        return SimpleNamespace(submit=submit)

    def run_of(self, host: str) -> Any:
        """What a keeper asks of its run, which is always resumed."""
        env = SimpleNamespace(env="chaos", env_kwargs={}, wrapper="", reward_clip=False)
        saves = SimpleNamespace(save_replay="always" if self.shape.saves else "never")
        run = SimpleNamespace(resume=True, checkpoint_minutes=0.1)
        config = SimpleNamespace(env=env, replay=saves, run=run)
        directory = Path(self.disk.name) / host
        directory.mkdir(exist_ok=True)
        return SimpleNamespace(config=config, run_dir=directory)

    def build(self) -> None:
        """The machines of a run."""
        shape = self.shape
        for shard in range(max(1, shape.shards)):
            self._add(ReplayMachine(self, f"replay{shard}", shard))
        for i in range(shape.actor_hosts):
            self._add(ActorMachine(self, f"actors{i}"))
        if shape.shards and not shape.learns_there:
            self._add(LearnerMachine(self, "learner"))
            if shape.rival:
                self._add(LearnerMachine(self, "rival"))

    def _add(self, host: Host) -> None:
        self.hosts[host.name] = host

    def boot(self) -> None:
        """All machines, at about the same time."""
        for host in self.hosts.values():
            self.time.soon(*((10.0, 40.0) if host.name == "rival" else (0.0, 2.0)), host.boot)

    @property
    def is_calm(self) -> bool:
        """Whether nobody has a reason to fail, as all had time to recover from the last fault."""
        return self.is_calm_for(CALM_S)

    def is_calm_for(self, seconds: float) -> bool:
        """Whether the last fault ended so long ago."""
        since_s = max(_START_S, self.trouble_s + seconds)
        return self.turn_s < 1.0 and self.time.now_s > since_s and not self.is_over

    def look_for_silence(self, server: LinkServer) -> None:
        """A client that is connected says something each second, whatever it waits for."""
        if not self.is_calm:
            return
        for session in server.sessions.of_roles(*ROLES):
            if any(session.peers) and self.time.now_s - session.heard_s > _SILENT_S:
                raise Violation(f"stuck: {session} says nothing")

    def tell(self, text: str) -> None:
        """What a role says to the user: where all is calm, nothing."""
        if self.is_calm:
            raise Violation(f"stuck: a role says {text!r}")
        self.time.say(f"said: {text}")

    def settings(self, shard: int) -> dict[str, object]:
        """What both ends of a link compare."""
        return {"env": "chaos", "shard": f"{shard} of {self.shape.shards}"}

    @property
    def processes(self) -> list[Process]:
        """All that may run."""
        return [p for host in self.hosts.values() for p in host.processes.values()]
