"""A process of a real run over Redis: an actor that pushes pairs, or the learner with its replay.

    python -m benchmarks.paper.real_baseline learner URL FLAG ...
    python -m benchmarks.paper.real_baseline 0 URL FLAG ...

The games, the networks and the actor's steps are those of `zapex train` with the same flags. The
process ends at SIGTERM, and prints its seconds by phase and its counters since SIGUSR1 as JSON.
"""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.baseline import BATCHES, Memory, PairSink, Parameters, connect, most_waiting
from benchmarks.support.harness import Clock
from zapex.agent.policy import epsilon_ladder
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.builder import ChunkBuilder
from zapex.cli.resolve import resolve
from zapex.envs import streams
from zapex.host.metrics import RoleMetrics
from zapex.library.prioritized import PrioritizedReplay
from zapex.machine.child import child_setup
from zapex.roles.actor import Actor
from zapex.roles.values import OwnValues, Pull
from zapex.run.run import Run
from zapex.run.topologies import make_dqn, make_policy, most_learner_threads

_PAUSE_S = 0.002  # for a role that cannot go on


def play(run: Run, number: int, client: Any, stop: list[int]) -> dict[str, Any]:
    """Run one actor until SIGTERM is in `stop`. Returns its phases (s) and counters."""
    import torch

    config, size = run.config, run.config.actor.envs_per_actor
    torch.set_num_threads(config.actor.actor_threads)
    games, actions = run.seed(number).spawn(2)
    played = streams.make(
        run.spec,
        size,
        seed=int(games.generate_state(1)[0]),
        num_threads=config.actor.env_threads,
        max_episode_frames=config.env.max_episode_frames,
    )
    layout, first = run.plan.replay, number * size
    sink = PairSink(client, layout, size, most_waiting(layout, config.actor.actors))
    metrics = RoleMetrics(aligned_zeros(RoleMetrics.required_bytes()), "actor", create=True)
    policy = make_policy(run)
    pull = Pull(
        policy,
        Parameters(client),
        metrics,
        period=run.param_steps,
        parameter_bytes=run.plan.parameter_bytes,
    )
    builder = ChunkBuilder(
        sink.store,
        size,
        actor=number,
        incarnation=1,
        first_stream=first,
        max_chunk_age_steps=config.actor.max_chunk_age_steps,
    )
    ladder = epsilon_ladder(run.streams, config.actor.eps_base, config.actor.eps_alpha)
    actor = Actor(
        played,
        OwnValues(policy, pull, metrics),
        sink,
        builder,
        metrics,
        lambda records: None,
        epsilons=ladder[first : first + size],
        first_stream=first,
        reward_clip=config.env.reward_clip,
        priorities=True,
        rng=np.random.default_rng(actions),
        clock_ns=time.perf_counter_ns,
    )
    before: dict[str, float] = {}
    while signal.SIGTERM not in stop:
        if signal.SIGUSR1 in stop and not before:
            before = metrics.snapshot()
        if not actor.do_work():
            time.sleep(_PAUSE_S)
    found = {name: value - before[name] for name, value in metrics.snapshot().items()}
    phases = {k.removeprefix("phase/"): v for k, v in found.items() if k.startswith("phase/")}
    return {"phases": phases, "frames": found["frames"]}


def learn(run: Run, client: Any, stop: list[int]) -> dict[str, Any]:
    """Pull, sample, learn and publish until SIGTERM is in `stop`. Returns as `play`."""
    import torch

    config, layout = run.config, run.plan.replay
    torch.set_num_threads(most_learner_threads(run))
    dqn = make_dqn(run)
    replay = PrioritizedReplay(
        layout.capacity,
        layout.schema,
        config.replay.alpha,
        config.replay.priority_eps,
        config.run.seed,
        chunk=layout.chunk,
        min_size_to_sample=config.replay.learning_starts,
        samples_per_insert=config.replay.samples_per_insert,
        tolerance=config.limiter_tolerance,
    )
    memory, parameters, clock = Memory(client, replay), Parameters(client), Clock()
    rows = config.learner.batch_size
    batch = replay.empty_batch(rows, "channels_last" if dqn.channels_last else "channels_first")
    batches = version = 0
    due_s = 0.0
    counting = False
    while signal.SIGTERM not in stop:
        if signal.SIGUSR1 in stop and not counting:
            counting, batches, clock = True, 0, Clock()
        if time.monotonic() >= due_s:
            clock.enter("set")
            version, due_s = version + 1, time.monotonic() + config.learner.publish_period_s
            parameters.publish(version, dqn.flat_parameters().view(np.uint8))
            client.set(BATCHES, batches)
        clock.enter("sample")
        memory.pull()
        if not replay.can_sample(rows):
            clock.enter("wait")
            time.sleep(_PAUSE_S)
            continue
        replay.sample(rows, config.replay.beta, batch, method=config.replay.sampling)
        clock.enter("compute")
        td_errors, _ = dqn.learn(batch)
        clock.enter("update")
        replay.update_priorities(batch.keys, td_errors)
        batches += 1
    clock.enter("over")
    spent = {k: v for k, v in clock.spent.items() if k not in ("other", "over")}
    return {"phases": spent, "batches": batches}


def main(role: str, url: str, *flags: str) -> None:
    """Run a role and print what it returns."""
    child_setup(f"paper: {role}")
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: stop.append(number))
    resolved = resolve(list(flags), "train", "")
    run, client = Run(resolved.config, resolved.spec, Path()), connect(url)
    found = learn(run, client, stop) if role == "learner" else play(run, int(role), client, stop)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
