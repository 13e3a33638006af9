"""A run's topology as data, and its roles made from it: who gets which end of which link."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from zapex.host_plan import EVALUATION_FIELDS
from zapex.replay import PrioritizedReplay
from zapex.run import NOT_ACTORS, Clock, DutyCycle, Run
from zapex.schema import BatchLayout
from zapex.shm_transport import Host
from zapex.transport import ExperienceSource, ParameterSink, SampleSink, SampleSource


def make_actor(run: Run, host: Host, actor: int, incarnation: int, clock: Clock) -> DutyCycle:
    """The actor's role."""
    from zapex import streams

    config, spec = run.config, run.spec
    size = config.actor.envs_per_actor
    first = run.number(actor) * size
    # A restarted actor must not play its former life's games again.
    life = [incarnation] if actor_restarted(host, actor) else []
    environments, actions = run.seed(first, *life).spawn(2)
    # Before torch is imported: Atari's games go on loading meanwhile.
    played = streams.make(
        spec,
        size,
        seed=int(environments.generate_state(1)[0]),
        num_threads=config.actor.env_threads,
        max_episode_frames=config.env.max_episode_frames,
    )
    import torch

    from zapex.agent.exploration import epsilon_ladder
    from zapex.agent.policy import Policy
    from zapex.nstep import ChunkBuilder
    from zapex.roles.actor import Actor

    torch.set_num_threads(config.actor.actor_threads)
    ladder = epsilon_ladder(run.streams, config.actor.eps_base, config.actor.eps_alpha)
    sink = host.experience_sink(actor, incarnation)
    builder = ChunkBuilder(
        sink.store,
        size,
        actor=actor,
        incarnation=incarnation,
        first_stream=first,
        max_chunk_age_steps=config.actor.max_chunk_age_steps,
    )
    episodes = host.ring(f"episodes {actor}").producer()
    return Actor(
        played,
        Policy(run.network()),
        sink,
        host.parameter_source(),
        builder,
        host.metrics(f"actor {actor}"),
        episodes.try_offer,
        epsilons=ladder[first : first + size],
        first_stream=first,
        param_steps=max(1, config.actor.param_period // spec.frames_per_step),
        parameter_bytes=host.plan.parameter_bytes,
        reward_clip=config.env.reward_clip,
        rng=np.random.default_rng(actions),
        clock_ns=clock.now_ns,
    )


def make_role(
    name: str,
    run: Run,
    host: Host,
    incarnation: int,
    clock: Clock,
    totals: Callable[[], dict[str, float]],
) -> DutyCycle:
    """The role of the process `name`."""
    kind = dict(host.plan.roles)[name]
    if kind == "actor":
        return make_actor(run, host, int(name.split()[1]), incarnation, clock)
    if kind == "replay":
        return make_replay(run, host)
    if kind == "learner":
        return make_learner(run, host, clock, totals)
    return make_evaluator(run, host, clock, totals)


def actor_restarted(host: Host, actor: int) -> bool:
    """An actor of this number has played in this run before."""
    return host.metrics(f"actor {actor}").snapshot(alive=False)["steps"] > 0


def make_memory(run: Run, host: Host) -> PrioritizedReplay:
    """The replay itself, over whatever the memory holds."""
    config, layout = run.config.replay, host.plan.replay
    return PrioritizedReplay(
        layout.capacity,
        layout.schema,
        config.alpha,
        config.priority_eps,
        seed=int(run.seed(NOT_ACTORS).generate_state(1)[0]),
        streams=layout.streams,
        chunk=layout.chunk,
        buffer=host.experience,
    )


def make_replay(
    run: Run,
    host: Host,
    replay: PrioritizedReplay | None = None,
    source: ExperienceSource | None = None,
    sink: SampleSink | None = None,
) -> DutyCycle:
    """The replay server's role; source, sink: None where actors and learner are on this host."""
    from zapex.intake import Intake
    from zapex.roles.replay_server import ReplayServer

    if replay is None:
        replay = make_memory(run, host)
    if source is None or sink is None:
        source, sink = host.experience_source(), host.sample_sink()
    intake = Intake(
        source,
        replay,
        run.limiter,
        actors=host.plan.actors,
        streams_per_actor=host.plan.envs_per_actor,
    )
    return ReplayServer(
        replay,
        intake,
        source,
        sink,
        host.metrics("replay"),
        batch_size=host.plan.batch_size,
        method=run.config.replay.sampling,
    )


def make_learner(
    run: Run,
    host: Host,
    clock: Clock,
    totals: "Callable[[], dict[str, float]]",
    source: SampleSource | None = None,
    sink: ParameterSink | None = None,
) -> DutyCycle:
    """The learner's role, from the newest checkpoint, or else from what was last published.

    source, sink: None where the replay is on this host.
    """
    import torch

    from zapex.batch import Batch
    from zapex.checkpoints import RunCheckpoints
    from zapex.roles.learner import Learner

    config = run.config
    torch.set_num_threads(config.learner.learner_threads)
    torch.manual_seed(config.run.seed)
    dqn = run.dqn()
    checkpoints = RunCheckpoints(
        run.run_dir,
        run.spec,
        config.run.seed,
        clock.now_s,
        60 * config.run.checkpoint_minutes,
        totals,
    )
    checkpoints.restore(dqn)
    newest = np.empty(host.plan.parameter_bytes, np.uint8)
    if not checkpoints.version and host.parameter_source().newer_than(0, newest):
        # It died before its first checkpoint: what it last published is all that is left of it.
        dqn.online.load_flat(newest)
        dqn.target.load_flat(newest)
    cuda = dqn.online.device.type == "cuda"
    layout = BatchLayout(host.plan.replay.schema, host.plan.batch_size, channels_last=not cuda)
    # With fewer asked for ahead none has come yet when the learner begins with the one before.
    ahead = source is not None and host.plan.prefetch >= 3
    return Learner(
        dqn,
        source or host.sample_source(),
        sink or host.parameter_sink(),
        Batch.empty(layout, pin_memory=cuda),
        host.metrics("learner"),
        checkpoints,
        prefetch=host.plan.prefetch,
        publish_period_s=config.learner.publish_period_s,
        clock_s=clock.now_s,
        first_version=checkpoints.version,
        spare=Batch.empty(layout, pin_memory=cuda) if ahead else None,
    )


def make_evaluator(
    run: Run, host: Host, clock: Clock, totals: Callable[[], dict[str, float]]
) -> DutyCycle:
    """The evaluator's role."""
    import torch

    from zapex import streams
    from zapex.agent.policy import Policy
    from zapex.checkpoints import BestNetwork
    from zapex.roles.evaluator import MAX_STREAMS, Evaluator

    config, spec = run.config, run.spec
    torch.set_num_threads(1)
    network = run.network()
    best = BestNetwork(run.run_dir, spec, network)
    return Evaluator(
        Policy(network),
        lambda: streams.make(
            spec,
            min(config.evaluator.eval_episodes, MAX_STREAMS),
            seed=int(run.seed(NOT_ACTORS + 1).generate_state(1)[0]),
            max_episode_frames=config.env.max_episode_frames,
            noop_max=config.evaluator.eval_noop_max,
        ),
        host.parameter_source(),
        host.metrics("evaluator"),
        lambda returns, version, at: _report_evaluation(host, best, returns, version, at),
        episodes=config.evaluator.eval_episodes,
        epsilon=config.evaluator.eval_epsilon,
        period_s=config.evaluator.eval_period_s,
        parameter_bytes=host.plan.parameter_bytes,
        seed=config.run.seed,
        clock_s=clock.now_s,
        totals=totals,
    )


def _report_evaluation(
    host: Host, best: Any, returns: tuple[float, ...], version: int, at: dict[str, float]
) -> None:
    record = np.zeros(1, host.plan.evaluation_dtype)
    record["returns"], record["params_version"] = returns, version
    for name in EVALUATION_FIELDS:
        record[name] = at.get(name, 0.0)
    host.ring("evaluations").producer().try_offer(record)
    best.offer(float(np.mean(returns)), version, at)


def totals_of(
    host: Host, base: dict[str, float], started_ns: int
) -> Callable[[], dict[str, float]]:
    """Counters of the whole run, its earlier lives included: what a checkpoint stores."""
    everybody = host.plan.roles + host.plan.elsewhere
    roles = [(role, host.metrics(name)) for name, role in everybody]

    def look() -> dict[str, float]:
        totals = dict(base)
        for role, metrics in roles:
            counts = metrics.snapshot(alive=False)
            for name in _TOTALS.get(role, ()):
                totals[name] = totals.get(name, 0.0) + counts[name]
        elapsed_s = (time.perf_counter_ns() - started_ns) / 1e9
        totals["wall_s"] = base.get("wall_s", 0.0) + elapsed_s
        return totals

    return look


_TOTALS = {
    "actor": ("steps", "frames", "episodes"),
    "learner": ("batches", "samples"),
    "replay": ("inserted",),
}


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables that keep the libraries of a process to `threads` threads."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMBA_NUM_THREADS": count,
        # An idle OpenMP thread that spins takes the core from a role that works.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "PYTHONUNBUFFERED": "1",
        "PATH": os.environ.get("PATH", ""),
    }
