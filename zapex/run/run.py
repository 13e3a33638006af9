"""One run as one host sees it, as data: its settings, its memory, and its part."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zapex.chunks.limits import Limits
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.fstack import Setup
from zapex.host.metrics import EPISODE, Role, RoleMetrics
from zapex.host.parts import PARTS, Part, PartName
from zapex.host.plan import HostPlan
from zapex.machine.exchange import ExchangeShape
from zapex.replay.core import ReplayLayout
from zapex.replay.limiter import LimiterConfig
from zapex.run.network import parameters
from zapex.wire.protocol import Form

NOT_ACTORS = 1 << 32  # random streams of roles that are not actors start here


@dataclass(frozen=True)
class Membership:
    """How one of several hosts takes part in a run, and what the replay assigned when it joined.

    Attributes:
        part: of the run.
        url: of the replay; on the replay's host the address to listen at.
        urls: of all shards, shard 0 first, which is `url` too; empty if there is one replay.
        shard: which of `shards` a replay's host is.
        keys: a directory of `zapex keygen`; "": none.
        insecure_network: no keys are needed.
        compress: experience and batches, on the way.
        take_over: a learner replaces one of another host.
        network_memory_bytes: a bound for messages in flight at the replay.
        fstack_lib, fstack_conf, fstack_eal: what fstack:// needs, as the flags.
        host: one number for one join of this host's parent.
        numbers: the numbers of its actors in the run.
        total_actors, chunk, epoch: the run's, as in a Welcome.
    """

    part: PartName
    url: str
    urls: tuple[str, ...] = ()
    shard: int = 0
    shards: int = 1
    keys: str = ""
    insecure_network: bool = False
    compress: bool = False
    take_over: bool = False
    network_memory_bytes: int = 1 << 30
    fstack_lib: str = ""
    fstack_conf: str = ""
    fstack_eal: str = ""
    host: int = 0
    numbers: tuple[int, ...] = ()
    total_actors: int = 0
    chunk: int = 0
    epoch: int = 0

    @property
    def all_urls(self) -> tuple[str, ...]:
        """Of all shards."""
        return self.urls or (self.url,)

    @property
    def fstack(self) -> Setup:
        """What F-Stack is started with, if `url` asks for it."""
        return Setup(self.fstack_lib, self.fstack_conf, self.fstack_eal)


@dataclass(frozen=True)
class Run:
    """One run on one host: what each process must know.

    Attributes:
        steps_before: before the run was resumed.
        membership: None: the host has all of the run.
        parameters: of the network, if another process has counted them; 0: not counted yet.
        wrap: "module:function" that takes the learner's DQN and returns one to use instead.
    """

    config: Config
    spec: EnvironmentSpec
    run_dir: Path
    steps_before: int = 0
    membership: Membership | None = None
    parameters: int = 0
    wrap: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command that runs this host's part, without the run's settings."""
        if self.membership is None:
            return ("zapex", "train")
        part, membership = self.part, self.membership
        words = ["zapex", *part.command, f"--{part.address}", ",".join(membership.all_urls)]
        if membership.shards > 1 and part.listens:
            words += ["--shards", str(membership.shards), "--shard", str(membership.shard)]
        words += ["--keys", membership.keys] if membership.keys else []
        if membership.url.startswith("fstack:"):
            words += ["--fstack-lib", membership.fstack_lib]
            words += ["--fstack-conf", membership.fstack_conf]
            words += [f"--fstack-eal={membership.fstack_eal}"] if membership.fstack_eal else []
        return (*words, *(["--insecure-network"] if membership.insecure_network else []))

    @property
    def part(self) -> Part:
        """The part that this host runs."""
        part = PARTS[self.membership.part if self.membership is not None else "all"]
        return part.acting(self.config.actor.inference)

    @property
    def processes(self) -> list[tuple[str, Role]]:
        """Name and role of each process that is started on this host."""
        evaluates = self.config.evaluator.eval_period_s > 0
        return [(n, role) for n, role in self.plan.roles if role != "evaluator" or evaluates]

    @property
    def streams(self) -> int:
        """Streams of the whole run."""
        joined = self.membership is not None and self.membership.total_actors
        return (joined or self.config.actor.actors) * self.config.actor.envs_per_actor

    def number(self, actor: int) -> int:
        """The number of an actor of this host in the whole run."""
        numbers = self.membership.numbers if self.membership is not None else ()
        return numbers[actor] if numbers else actor

    @property
    def _layout(self) -> ReplayLayout:
        config = self.config
        schema = self.spec.schema(config.replay.n_step, config.replay.gamma)
        joined = self.membership.chunk if self.membership is not None else 0
        chunk = joined or config.chunk_transitions
        if self.part.intake == "relay":
            # Room for each stream: the chunk being written, one granted ahead and two in flight.
            return ReplayLayout(schema, 2 * config.streams * chunk, config.streams, chunk)
        return ReplayLayout(schema, config.replay.capacity, self.streams, chunk)

    @property
    def plan(self) -> HostPlan:
        """The layout of the shared memory."""
        config, spec, part = self.config, self.spec, self.part
        joined = self.membership.total_actors if self.membership is not None else 0
        numbers = joined if "actor" in part.elsewhere else 0
        return HostPlan(
            replay=self._layout,
            actors=numbers or config.actor.actors,
            envs_per_actor=config.actor.envs_per_actor,
            batch_size=config.learner.batch_size,
            prefetch=config.replay.prefetch,
            parameter_bytes=4 * (self.parameters or parameters(spec, config.learner)),
            beta=config.replay.beta,
            eval_episodes=config.evaluator.eval_episodes,
            part=part,
            exchange=self._exchange if "inference" in part.roles else None,
        )

    @property
    def _exchange(self) -> ExchangeShape:
        config, spec = self.config.actor, self.spec
        dtype = np.dtype(spec.observation_dtype).str
        size, item = config.envs_per_actor, spec.observation_shape
        return ExchangeShape(config.actors, size, tuple(item), dtype, spec.num_actions)

    @property
    def form(self) -> Form:
        """The form of this run's messages."""
        plan = self.plan
        return Form(
            plan.replay.chunk_layout,
            plan.batch_size,
            plan.parameter_bytes,
            RoleMetrics.required_bytes(),
            EPISODE.itemsize,
            limits=Limits.of_run(
                plan.replay.schema,
                actions=self.spec.num_actions,
                clipped=self.config.env.reward_clip,
            ),
        )

    @property
    def limiter(self) -> LimiterConfig:
        """The samples-per-insert limiter's settings."""
        config = self.config
        shards = self.membership.shards if self.membership is not None else 1
        return LimiterConfig(
            samples_per_insert=config.replay.samples_per_insert,
            tolerance=config.limiter_tolerance,
            min_size_to_sample=-(-config.replay.learning_starts // shards),
            capacity=config.replay.capacity,
            grant=config.actor.envs_per_actor * config.chunk_transitions,
            batch=config.learner.batch_size,
        )

    def settings_at(self, shard: int) -> dict[str, object]:
        """The settings that both ends of a link to a shard compare, with the shard's own place."""
        membership, shared = self.membership, self.config.shared()
        if membership is None or membership.shards == 1:
            return shared
        return {**shared, "shard": f"{shard} of {membership.shards}"}

    @property
    def relay_limiter(self) -> LimiterConfig:
        """On an actor host only the replay's credit limits anything."""
        layout = self._layout
        grant = self.config.actor.envs_per_actor * layout.chunk
        return LimiterConfig(
            samples_per_insert=0,
            tolerance=0,
            min_size_to_sample=1,
            batch=1,
            grant=grant,
            capacity=layout.capacity,
        )

    @property
    def param_steps(self) -> int:
        """Steps of one stream between two pulls of parameters."""
        return max(1, self.config.actor.param_period // self.spec.frames_per_step)

    def seed(self, *part: int) -> np.random.SeedSequence:
        """Independent random numbers for each part of the run, and for each time it is resumed.

        A host that takes a number over from one that has left must not play its games again.
        """
        host = [self.membership.host] if self.membership is not None else []
        return np.random.SeedSequence([self.config.run.seed, self.steps_before, *host, *part])


@dataclass(frozen=True)
class Clock:
    """The time: real, or counted in duty cycles if a run must repeat bit for bit."""

    now_ns: Callable[[], int] = time.perf_counter_ns

    def now_s(self) -> float:
        """Seconds, of an arbitrary origin."""
        return self.now_ns() / 1e9
