"""Makes actors and what computes for them: each actor's own policy, or one role for all."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from zapex.agent.policy import epsilon_ladder, linear_epsilon
from zapex.chunks.builder import ChunkBuilder
from zapex.host.metrics import RoleMetrics
from zapex.machine.child import DutyCycle
from zapex.machine.exchange import Exchange
from zapex.roles.actor import Actor
from zapex.roles.inference import Inference
from zapex.roles.values import OwnValues, Pull
from zapex.shm_transport import HostMemory

if TYPE_CHECKING:
    from zapex.agent.policy import Acting
    from zapex.run.run import Run
    from zapex.run.topology import Start
    from zapex.transport import ValueSource


def make_actor(start: "Start") -> DutyCycle:
    """The actor's role."""
    from zapex.envs import streams

    run, host = start.run, start.host
    config, spec = run.config, run.spec
    actor = int(start.name.split()[1])
    size = config.actor.envs_per_actor
    first = run.number(actor) * size
    # A restarted actor must not play its former incarnation's games again.
    number = [start.incarnation] if actor_restarted(host, actor) else []
    environments, actions = run.seed(first, *number).spawn(2)
    # Before torch is imported, because Atari's games load meanwhile.
    played = streams.make(
        spec,
        size,
        seed=int(environments.generate_state(1)[0]),
        num_threads=config.actor.env_threads,
        max_episode_frames=config.env.max_episode_frames,
    )
    ladder = epsilon_ladder(run.streams, config.actor.eps_base, config.actor.eps_alpha)
    sink = host.experience_sink(actor, start.incarnation)
    builder = ChunkBuilder(
        sink.store,
        size,
        actor=actor,
        incarnation=start.incarnation,
        first_stream=first,
        max_chunk_age_steps=config.actor.max_chunk_age_steps,
    )
    metrics = host.metrics(start.name)
    return Actor(
        played,
        _values(start, actor, metrics),
        sink,
        builder,
        metrics,
        host.ring(f"episodes {actor}").producer().try_offer,
        epsilons=ladder[first : first + size],
        first_stream=first,
        reward_clip=config.env.reward_clip,
        priorities=config.replay.initial_priority == "actor",
        rng=np.random.default_rng(actions),
        anneal=_anneal(run) if config.actor.exploration == "linear" else None,
        clock_ns=start.clock.now_ns,
    )


def actor_restarted(host: HostMemory, actor: int) -> bool:
    """Whether an actor of this number has played in this run before."""
    return host.metrics(f"actor {actor}").snapshot(alive=False)["steps"] > 0


def _values(start: "Start", actor: int, metrics: RoleMetrics) -> "ValueSource":
    """Where an actor's Q values come from; only its own policy loads torch.

    metrics: the actor's own object: each one takes the time since its last phase as its own.
    """
    run, host = start.run, start.host
    if "inference" in run.part.roles:
        return _exchange(host).asker(actor, host.waker("inference").wake)
    policy = _policy(start)
    return OwnValues(policy, _pull(start, policy, metrics, 1), metrics)


def _policy(start: "Start") -> "Acting":
    import torch

    torch.set_num_threads(start.run.config.actor.actor_threads)
    return start.run.policy()


def _pull(start: "Start", policy: "Acting", metrics: RoleMetrics, actors: int) -> Pull:
    run, host = start.run, start.host
    return Pull(
        policy, host.mailbox(), metrics, period=actors * run.param_steps,
        parameter_bytes=host.plan.parameter_bytes,
    )  # fmt: skip


def _exchange(host: HostMemory) -> Exchange:
    assert host.plan.exchange is not None, "the plan has no inference role"
    return Exchange(host.part_of("exchange"), host.plan.exchange)


def make_inference(start: "Start") -> DutyCycle:
    """The inference role."""
    run, host = start.run, start.host
    actors = host.plan.actors
    wakers = [host.waker(f"actor {i}").wake for i in range(actors)]
    policy, metrics = _policy(start), host.metrics(start.name)
    return Inference(
        _exchange(host).answerer(wakers),
        policy,
        _pull(start, policy, metrics, actors),
        metrics,
        streams=run.config.actor.envs_per_actor,
    )


def _anneal(run: "Run") -> Callable[[float], float]:
    """Epsilon by the steps of one actor, of which the run has several."""
    config, frames = run.config.actor, run.spec.frames_per_step
    share = run.streams / config.envs_per_actor

    def epsilon(steps: float) -> float:
        played = (run.steps_before + share * steps) * frames
        return linear_epsilon(played, config.exploration_frames, config.eps_end)

    return epsilon
