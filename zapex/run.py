"""One run as one host sees it, as data: its settings, its memory, and where the host stands."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from zapex.agent.architecture import parameter_count
from zapex.config import Config
from zapex.environments import EnvironmentSpec
from zapex.host_plan import HostPlan, Part
from zapex.rate_limiter import LimiterConfig
from zapex.replay import ReplayLayout

if TYPE_CHECKING:
    from zapex.agent.learning import DQN
    from zapex.agent.networks import DuelingNetwork

NOT_ACTORS = 1 << 32  # random streams of the roles that are not actors start here


class DutyCycle(Protocol):
    """What every role is."""

    def do_work(self) -> int:
        """Do what there is to do without waiting; how much it was."""

    def ready(self) -> bool:
        """Something to do may have come."""

    def close(self) -> None:
        """Asked to end: save what there is to save."""


@dataclass(frozen=True)
class Place:
    """Where one of several hosts stands in a run, and what the replay said when it joined.

    url: of the replay; its own, to listen at. keys: a directory of `zapex keygen`; "": none.
    network_memory_bytes: what messages under way may take at the replay.
    host: one number for one life of this host's parent. numbers: what its actors are called in
    the run. total_actors, chunk, epoch: the run's, as in a Welcome.
    """

    part: Part
    url: str
    keys: str = ""
    insecure_network: bool = False
    network_memory_bytes: int = 1 << 30
    host: int = 0
    numbers: tuple[int, ...] = ()
    total_actors: int = 0
    chunk: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class Run:
    """One run on one host: what each process is told."""

    config: Config
    spec: EnvironmentSpec
    run_dir: Path
    steps_before: int = 0  # of the run's earlier lives
    place: Place | None = None  # None: the host has all of it

    @property
    def streams(self) -> int:
        """Streams of the whole run."""
        joined = self.place is not None and self.place.total_actors
        return (joined or self.config.actor.actors) * self.config.actor.envs_per_actor

    def number(self, actor: int) -> int:
        """What an actor of this host is called in the whole run."""
        return self.place.numbers[actor] if self.place and self.place.numbers else actor

    @property
    def _layout(self) -> ReplayLayout:
        config, place = self.config, self.place
        schema = self.spec.schema(config.replay.n_step, config.replay.gamma)
        if place is not None and place.part == "actor":
            # Room for every stream's chunk that is written, one granted ahead and two on their way.
            streams = config.streams
            return ReplayLayout(schema, 2 * streams * place.chunk, streams, place.chunk)
        chunk = place.chunk if place is not None and place.chunk else config.chunk_transitions
        return ReplayLayout(schema, config.replay.capacity, self.streams, chunk)

    @property
    def plan(self) -> HostPlan:
        """The layout of the shared memory."""
        config, spec, place = self.config, self.spec, self.place
        part: Part = place.part if place is not None else "all"
        parameters = parameter_count(
            spec.observation_shape,
            np.dtype(spec.observation_dtype),
            spec.num_actions,
            config.learner.hidden,
            config.learner.channels,
        )
        elsewhere = place.total_actors if place is not None and part == "learner" else 0
        return HostPlan(
            replay=self._layout,
            actors=elsewhere or config.actor.actors,
            envs_per_actor=config.actor.envs_per_actor,
            batch_size=config.learner.batch_size,
            prefetch=config.replay.prefetch,
            parameter_bytes=4 * parameters,
            beta=config.replay.beta,
            eval_episodes=config.evaluator.eval_episodes,
            part=part,
        )

    @property
    def limiter(self) -> LimiterConfig:
        """The samples-per-insert limiter's settings."""
        config = self.config
        return LimiterConfig(
            samples_per_insert=config.replay.samples_per_insert,
            tolerance=config.limiter_tolerance,
            min_size=config.replay.learning_starts,
            capacity=config.replay.capacity,
            grant=config.actor.envs_per_actor * config.chunk_transitions,
            batch=config.learner.batch_size,
        )

    @property
    def relay_limiter(self) -> LimiterConfig:
        """On an actor host nobody but the replay's credit limits anything."""
        layout = self._layout
        grant = self.config.actor.envs_per_actor * layout.chunk
        return LimiterConfig(
            samples_per_insert=0, tolerance=0, min_size=1, capacity=layout.capacity, grant=grant,
            batch=1,
        )  # fmt: skip

    def network(self, device: str = "cpu") -> "DuelingNetwork":
        """A network with the run's seed."""
        from zapex.agent import networks

        spec, learner = self.spec, self.config.learner
        return networks.build(
            spec.observation_shape,
            np.dtype(spec.observation_dtype),
            spec.num_actions,
            learner.hidden,
            channels=learner.channels,
            precision=learner.precision,
            device=device,
            seed=self.config.run.seed,
        )

    def dqn(self) -> "DQN":
        """The learner's networks and optimiser, fresh."""
        from zapex.agent.learning import DQN

        learner = self.config.learner
        return DQN(
            self.network(learner.device),
            lr=learner.lr,
            optimiser=learner.optimiser,
            rmsprop_decay=learner.rmsprop_decay,
            optimiser_eps=learner.optimiser_eps,
            loss=learner.loss,
            max_grad_norm=learner.max_grad_norm,
            target_period=learner.target_period,
        )

    def seed(self, *part: int) -> np.random.SeedSequence:
        """Independent randomness for each part of the run, and for each of its lives.

        Who takes a number over from a host that has left must not play that one's games again.
        """
        host = [self.place.host] if self.place is not None else []
        return np.random.SeedSequence([self.config.run.seed, self.steps_before, *host, *part])


@dataclass(frozen=True)
class Clock:
    """What time it is: real, or counted in duty cycles where a run must repeat bit for bit."""

    now_ns: Callable[[], int] = time.perf_counter_ns

    def now_s(self) -> float:
        """Seconds, of an origin of its own."""
        return self.now_ns() / 1e9
