"""A whole system in one thread with a known game: real roles, no torch.

Every observation says which step of which game it is, so whoever samples can tell what was written.
Actors die at arbitrary moments: a fuse burns at each call that they make, and ends one of them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch, aligned_zeros
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.layout import (
    COMMIT_SEQUENCE,
    COMMITTED,
    COUNT,
    EVICTED,
    FREE,
    GRANTED,
    LIVE,
    STATE,
    BatchLayout,
)
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.envs.streams import Episode, Step
from zapex.roles.actor import Actor
from zapex.roles.learner import Learner
from zapex.roles.replay_server import ReplayServer
from zapex.roles.values import OwnValues, Pull
from zapex.run.run import Clock, Run
from zapex.run.topologies import Start, make_core, make_replay, may_step
from zapex.shm_transport import HostMemory

ACTIONS = 3
SIDE = 36


def spec(stack: int) -> EnvironmentSpec:
    """Vectors of six numbers for stack 1, else stacks of small images."""
    shape, dtype = ((6,), "float32") if stack == 1 else ((stack, SIDE, SIDE), "uint8")
    return EnvironmentSpec(
        env_id="fake", env_kwargs={}, observation_shape=shape, observation_dtype=dtype,
        stack=stack, num_actions=ACTIONS, frames_per_step=1, atari=False, describe="a fake game",
    )  # fmt: skip


@dataclass(frozen=True)
class Game:
    """One episode, fixed by who plays it: step t leads from observation t to t + 1."""

    length: int
    terminated: bool  # else it is truncated
    rewards: tuple[float, ...]
    lives_lost: tuple[bool, ...]

    def transition(self, t: int, n: int, gamma: float) -> tuple[float, float, int]:
        """The naive twin of the n-step return: its sum, its discount, and the step of s'."""
        total = 0.0
        for k in range(n):
            step = t + k
            total += gamma**k * self.rewards[step]
            last = step == self.length - 1
            if self.lives_lost[step] or (last and self.terminated):
                return total, 0.0, step + 1
            if last:
                return total, gamma ** (k + 1), step + 1
        return total, gamma**n, t + n


@lru_cache(maxsize=4096)
def game(stream: int, life: int, episode: int) -> Game:
    rng = np.random.default_rng([stream, life, episode])
    length = int(rng.integers(1, 30))
    return Game(
        length,
        bool(rng.random() < 0.6),
        tuple(rng.choice([-1.0, 0.0, 1.0], length).tolist()),
        (*(rng.random(length - 1) < 0.1).tolist(), False),
    )


Moment = tuple[int, int, int, int]  # stream, life, episode, step


@lru_cache(maxsize=65536)
def frame(stack: int, moment: Moment) -> NDArray[Any]:
    """What is seen at that moment; no two are alike, and none is zero."""
    checksum = sum(n * p for n, p in zip(moment, (8191, 131, 31, 7), strict=True)) % 251
    if stack == 1:
        return np.array([*moment, checksum, 1], np.float32)
    picture = np.full((SIDE, SIDE), 1 + checksum, np.uint8)
    picture[0, :8] = np.array(moment, ">u2").view(np.uint8)
    return picture


def moment_of(stack: int, obs: NDArray[Any]) -> Moment:
    numbers = obs[:4] if stack == 1 else obs[-1, 0, :8].copy().view(">u2")
    stream, life, episode, step = numbers.astype(int).tolist()
    return stream, life, episode, step


def observation(stack: int, moment: Moment) -> NDArray[Any]:
    if stack == 1:
        return frame(1, moment)
    *who, step = moment
    frames = [
        frame(stack, (*who, t)) if t >= 0 else np.zeros((SIDE, SIDE), np.uint8)
        for t in range(step - stack + 1, step + 1)
    ]
    return np.stack(frames)


class Dead(Exception):
    """An actor's process was killed."""


class Fuse:
    """Burns at every call that an actor makes; at the last one it dies."""

    left = -1

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Dead


class FakeStreams:
    """The environments of one life of an actor."""

    def __init__(self, system: "System", first: int, count: int, life: int, fuse: Fuse) -> None:
        self.spec, self.num_streams = system.spec, count
        self.finished: list[Episode] = []
        self._played, self._fuse = system.played, fuse
        self._who = [(first + i, life) for i in range(count)]
        self._episode = [0] * count
        self._t = [0] * count
        self._over = np.zeros(count, np.bool_)

    def _obs(self) -> NDArray[Any]:
        moments = zip(self._who, self._episode, self._t, strict=True)
        return np.stack([observation(self.spec.stack, (*who, e, t)) for who, e, t in moments])

    def reset(self) -> NDArray[Any]:
        return self._obs()

    def step(self, actions: NDArray[np.int64]) -> Step:
        self._fuse.burn()
        count = self.num_streams
        reward = np.zeros(count, np.float32)
        terminated, truncated, life_lost = (np.zeros(count, np.bool_) for _ in range(3))
        started = self._over
        self.finished = []
        for i in range(count):
            if started[i]:
                self._episode[i] += 1
                self._t[i] = 0
                continue
            now, t = game(*self._who[i], self._episode[i]), self._t[i]
            self._played[(*self._who[i], self._episode[i], t)] = int(actions[i])
            reward[i], life_lost[i] = now.rewards[t], now.lives_lost[t]
            self._t[i] = t + 1
            if t + 1 == now.length:
                terminated[i], truncated[i] = now.terminated, not now.terminated
                self.finished.append(Episode(i, sum(now.rewards), now.length, now.length))
        self._over = terminated | truncated
        self._fuse.burn()
        return Step(self._obs(), reward, terminated, truncated, life_lost, started)


class FakePolicy:
    def __init__(self, fuse: Fuse) -> None:
        self._fuse = fuse
        self._rng = np.random.default_rng(1)

    def load_flat(self, buffer: Any) -> None:
        self._fuse.burn()

    def q_values(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        self._fuse.burn()
        return self._rng.normal(size=(len(obs), ACTIONS)).astype(np.float32)


class MortalSink:
    """An actor's sink; the actor may die on either side of each call."""

    def __init__(self, sink: Any, fuse: Fuse) -> None:
        self.store, self._sink, self._fuse = sink.store, sink, fuse
        self.ready = sink.ready

    def try_claim(self) -> NDArray[np.int64] | None:
        slots = self._sink.try_claim()
        self._fuse.burn()
        return slots  # type: ignore[no-any-return]

    def commit(self, slots: NDArray[np.int64]) -> None:
        self._fuse.burn()
        self._sink.commit(slots)
        self._fuse.burn()


class FakeDqn:
    """Learns nothing, but looks at every row."""

    def __init__(self, system: "System") -> None:
        self._system = system
        self._rng = np.random.default_rng(2)

    def flat_parameters(self) -> NDArray[np.float32]:
        return np.zeros(self._system.host.plan.parameter_bytes // 4, np.float32)

    def learn(self, batch: Batch, phase: Callable[[str], None]) -> Any:
        self._system.check_batch(batch)
        facts = {"td_loss": 0.0, "q_values": 0.0, "td_error": 0.0, "gradient_norm": 0.0}
        return self._rng.normal(size=len(batch.keys)).astype(np.float32), facts


class NoCheckpoints:
    def due(self) -> bool:
        return False

    def save(self, dqn: Any, version: int) -> None: ...


@dataclass
class System:
    """Roles over one host's memory; `step(name)` is a duty cycle, `kill` lights an actor's fuse."""

    config: Config
    spec: EnvironmentSpec
    played: dict[Moment, int] = field(default_factory=dict)
    roles: dict[str, Any] = field(default_factory=dict)
    fuses: dict[int, Fuse] = field(default_factory=dict)
    policy: Any = None  # of every actor; None: a FakePolicy
    builders: dict[int, ChunkBuilder] = field(default_factory=dict)
    rows_checked: int = 0
    replay_lives: int = 0
    _incarnation: int = 0
    _ticks: int = 0

    def __post_init__(self) -> None:
        self.run = Run(self.config, self.spec, Path("nowhere"))
        self.plan = plan = self.run.plan
        memory = aligned_zeros(plan.nbytes), aligned_zeros(plan.replay.nbytes)
        self.host = HostMemory(plan, *memory, [-1] * len(plan.roles), create=True)
        self.clock = Clock(lambda: self._ticks * 10_000_000)
        self.start_learner()
        self.start_replay()
        for actor in range(plan.actors):
            self.start_actor(actor)

    def start_replay(self) -> None:
        self.replay_lives += 1
        server: Any = make_replay(
            Start("replay", self.run, self.host),
            make_core(self.run, self.host),
            self.host.experience_source(),
            self.host.sample_sink(),
        )
        assert isinstance(server, ReplayServer)
        self.roles["replay"] = server
        self.replay, self.intake, self.limiter = server.replay, server.intake, server.intake.limiter
        server.do_work()  # nobody looks before

    def start_learner(self) -> None:
        dqn: Any = FakeDqn(self)
        self.sample_source = self.host.sample_source()
        self.host.set_incarnation("learner", 1)
        self.roles["learner"] = Learner(
            dqn,
            self.sample_source,
            self.host.mailbox(),
            [Batch.empty(BatchLayout(self.plan.replay.schema, self.plan.batch_size, True))],
            self.host.metrics("learner"),
            NoCheckpoints(),
            prefetch=self.plan.prefetch,
            publish_period_s=self.config.learner.publish_period_s,
            clock_s=self.clock.now_s,
        )

    def start_actor(self, actor: int) -> None:
        self._incarnation += 1
        life, size = self._incarnation, self.config.actor.envs_per_actor
        name, first = f"actor {actor}", actor * size
        fuse = self.fuses[actor] = Fuse()
        self.host.set_incarnation(name, life)
        streams: Any = FakeStreams(self, first, size, life, fuse)
        policy: Any = self.policy or FakePolicy(fuse)
        sink = MortalSink(self.host.experience_sink(actor, life), fuse)
        builder = self.builders[actor] = ChunkBuilder(
            sink.store,
            size,
            actor=actor,
            incarnation=life,
            first_stream=first,
            max_chunk_age_steps=self.config.actor.max_chunk_age_steps,
        )
        metrics = self.host.metrics(name)
        pull = Pull(
            policy, self.host.mailbox(), metrics, period=self.config.actor.param_period,
            parameter_bytes=self.plan.parameter_bytes,
        )  # fmt: skip
        self.roles[name] = Actor(
            streams,
            OwnValues(policy, pull, metrics),
            sink,
            builder,
            metrics,
            self.host.ring(f"episodes {actor}").producer().try_offer,
            epsilons=np.full(size, 0.5),
            first_stream=first,
            reward_clip=self.config.env.reward_clip,
            priorities=self.config.replay.initial_priority == "actor",
            cut_exploratory=self.config.replay.cut_exploratory,
            rng=np.random.default_rng(life),
            may_step=may_step(self.run, self.host),
            clock_ns=self.clock.now_ns,
        )

    def step(self, name: str) -> int:
        """One duty cycle; an actor that dies in it is reported as the parent would."""
        self._ticks += 1
        try:
            return int(self.roles[name].do_work())
        except Dead:
            del self.roles[name]
            self.host.set_incarnation(name, 0)
            return 1

    def calm_round(self) -> int:
        """Every role once, in an order that does not change; how much work it was."""
        return sum(self.step(name) for name in sorted(self.roles))

    def count(self, name: str, counter: str) -> int:
        return int(self.host.metrics(name).snapshot(alive=False)[counter])

    def goes_on(self, batches: int, chunks: int, most_rounds: int = 20_000) -> None:
        """Let it run until so much more was learned from and inserted; AssertionError if stuck."""
        batches += self.count("learner", "batches")
        fifo_end = self._accepted() + chunks
        for _ in range(most_rounds):
            work = self.calm_round()
            learned = self.count("learner", "batches") >= batches
            if learned and self._accepted() >= fifo_end:
                return
            assert work, f"everybody waits: {self.limiter.explain()}, {self.replay.ledger.counts}"
        raise AssertionError(f"no progress: {self.limiter.explain()}, {self.replay.ledger.counts}")

    def _accepted(self) -> int:
        """How many chunks the replay has ever taken over."""
        return int(self.replay.store.header_rows[:, COMMIT_SEQUENCE].max())

    def check_batch(self, batch: Batch) -> None:
        """Every row is what was written; torn ones too, as long as quarantine keeps their slots."""
        schema = self.plan.replay.schema
        stack = self.spec.stack
        obs: Any = batch.obs
        next_obs: Any = batch.next_obs
        for row in range(len(batch.keys)):
            if batch.keys[row] < 0:
                assert batch.weights[row] == 0.0
                if self.replay_lives > 1:
                    continue
            else:
                assert 0.0 < batch.weights[row] <= 1.0 + 1e-6
            moment = moment_of(stack, obs[row])
            stream, life, episode, t = moment
            wanted = game(stream, life, episode).transition(t, schema.n_step, schema.gamma)
            total, discount, then = wanted
            assert np.array_equal(obs[row], observation(stack, moment))
            after = observation(stack, (stream, life, episode, then))
            assert np.array_equal(next_obs[row], after)
            assert batch.action[row] == self.played[moment]
            assert abs(batch.reward[row] - total) < 1e-5
            assert abs(batch.discount[row] - discount) < 1e-6
            self.rows_checked += 1

    def check_slots(self) -> None:
        """The naive twin of the accounting: every slot is in one place, every counter agrees."""
        ledger, chunk = self.replay.ledger, self.plan.replay.chunk
        rows = self.replay.store.header_rows
        places = {
            "free": ledger.free_slots,
            "live": ledger.live,
            "quarantined": ledger.quarantined,
            "granted": [slot for held in self.intake.granted.values() for slot in held],
        }
        assert sorted(itertools.chain(*places.values())) == list(range(len(rows)))
        assert ledger.counts == {place: len(slots) for place, slots in places.items()}
        states = {"free": {FREE}, "live": {LIVE}, "quarantined": {EVICTED}}
        states["granted"] = {GRANTED, COMMITTED}
        for place, slots in places.items():
            assert set(rows[slots, STATE].tolist()) <= states[place]
        assert len(self.replay) == rows[places["live"], COUNT].sum() <= self.config.replay.capacity
        assert self.limiter.outstanding == chunk * len(places["granted"])
        leaves = self.replay.tree[np.arange(len(rows) * chunk)].reshape(len(rows), chunk)
        drawable = np.zeros((len(rows), chunk), np.bool_)
        for slot in places["live"]:
            drawable[slot, : rows[slot, COUNT]] = True
        assert np.array_equal(leaves > 0, drawable)
        for actor, held in self.intake.granted.items():
            role = self.roles.get(f"actor {actor}")
            if role is not None:
                assert set(self.builders[actor].held.tolist()) <= held
