"""How each part of a run is wired: which roles its host has, and what connects them.

The process of a role calls `make_role`. That picks the function of the host's part, which makes the
role with its ends of the links. Roles know only the protocols of zapex.transport. Imports that are
large, or that only some parts need (torch, ZeroMQ, environments), are local to a function.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from zapex.agent.policy import epsilon_ladder, linear_epsilon
from zapex.chunks.batch import Batch, split
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.device_frames import DeviceFrames
from zapex.chunks.layout import BatchLayout
from zapex.chunks.limits import LARGEST
from zapex.errors import ConfigError, Fenced, Refused, RunOver
from zapex.host.metrics import Role, RoleMetrics
from zapex.host.plan import EVALUATION_FIELDS, FENCED, NEWS, NOTICE, OVER, REFUSED
from zapex.machine.child import DutyCycle
from zapex.machine.exchange import Exchange
from zapex.machine.resources import given_cores, idle_seconds
from zapex.replay.core import ReplayCore
from zapex.roles.actor import Actor
from zapex.roles.intake import Intake
from zapex.roles.learner import AtOnce, Learner, Trainer
from zapex.roles.replay_server import ReplayServer
from zapex.roles.values import Inference, OwnValues, Pull
from zapex.run.keeping import Keeper
from zapex.run.run import NOT_ACTORS, Clock, Run
from zapex.shm_transport import HostMemory
from zapex.transport import ExperienceSource, ParameterSink, SampleSink, SampleSource, ValueSource
from zapex.watch.report import TOTALS

if TYPE_CHECKING:
    from zapex.agent.learning import DQN
    from zapex.agent.networks import Network
    from zapex.agent.policy import Acting
    from zapex.agent.threads import IdleCores

Totals = Callable[[], dict[str, float]]
_TRIAL_BATCH = 128


class Notices:
    """Messages for the user, from a role to its parent."""

    def __init__(self, host: HostMemory) -> None:
        self._ring = host.ring("notices").producer()

    def send(self, text: str, kind: int = NEWS) -> None:
        """Send one line; it is lost if the parent has not read for a long time."""
        record = np.zeros(1, NOTICE)
        record["kind"], record["text"] = kind, text.encode()[: NOTICE["text"].itemsize]
        self._ring.try_offer(record)

    def send_end(self, error: RunOver | Fenced | Refused) -> None:
        """Say why this role ends."""
        kinds = {RunOver: OVER, Fenced: FENCED, Refused: REFUSED}
        self.send(str(error), kinds[type(error)])


@dataclass(frozen=True)
class Start:
    """One start of a role's process: all that is needed to make the role.

    Attributes:
        name: of the process, as in HostPlan.roles.
        totals: gives the counters of the whole run, now.
    """

    name: str
    run: Run
    host: HostMemory
    incarnation: int = 1
    clock: Clock = field(default_factory=Clock)
    totals: Totals = dict

    @property
    def role(self) -> Role:
        """The role of the process."""
        return dict(self.host.plan.roles)[self.name]

    @cached_property
    def notices(self) -> Notices:
        """For a role with a link to other hosts, or with the experience."""
        return Notices(self.host)


class Attended(DutyCycle):
    """A role whose process has other work, too: links to other hosts, or saving."""

    fds: Sequence[int] | None = ()
    """Sockets that its process waits on, too. None: it must call `ready` all the time."""

    def leave(self) -> None:
        """Save what the role has, and leave: the run is over or refuses this host."""


# The parts of a run.


def make_role(start: Start) -> DutyCycle:
    """Make the role of one process."""
    match start.run.part.name:
        case "all":
            return run_all(start)
        case "replay" | "replay with learner":
            return run_replay(start)
        case "actor":
            return run_actors(start)
        case "learner":
            return run_learner(start)


def run_all(start: Start) -> DutyCycle:
    """One host with the whole run: every link is in its shared memory."""
    host = start.host
    match start.role:
        case "replay":
            replay, keeper = make_memory(start)
            source, sink = host.experience_source(), host.sample_sink()
            return KeptReplay(make_replay(start, replay, source, sink), keeper)
        case "learner":
            return make_learner(start, host.mailbox())
        case _:
            return _run_without_links(start)


def run_replay(start: Start) -> DutyCycle:
    """The host with the replay: other hosts connect to it. The learner may be here or there."""
    from zapex.run import networked

    match start.role:
        case "replay":
            return networked.make_replay_host(start)
        case "learner":
            return make_learner(start, start.host.mailbox())
        case _:
            return _run_without_links(start)


def run_actors(start: Start) -> DutyCycle:
    """A host of actors: its relay sends their chunks to the replay's host."""
    from zapex.run import networked

    if start.role == "relay":
        return networked.make_relay(start)
    return _run_without_links(start)


def run_learner(start: Start) -> DutyCycle:
    """The learner's host, if it is not the replay's: batches come from there."""
    from zapex.run import networked

    if start.role == "learner":
        return networked.make_learner_host(start)
    return _run_without_links(start)


def _run_without_links(start: Start) -> DutyCycle:
    """The roles that use only their host's memory, in each part that has them."""
    match start.role:
        case "actor":
            return make_actor(start)
        case "inference":
            return make_inference(start)
        case "evaluator":
            return make_evaluator(start)
        case role:
            raise AssertionError(f"part {start.run.part.name!r} has no role {role!r}")


# Replay.


class KeptReplay(Attended):
    """The replay server, and the keeper that loads and saves its memory."""

    def __init__(self, role: ReplayServer, keeper: Keeper) -> None:
        self._role, self._keeper = role, keeper

    def do_work(self) -> int:
        """One duty cycle; then begin a save if one is due."""
        work = self._role.do_work()
        self._keeper.do_work()
        return work

    def ready(self) -> bool:
        """Whether the replay server has something to do."""
        return self._role.ready()

    def close(self) -> None:
        """Stop, and save the memory if the run does that."""
        self._role.close()
        self._keeper.close()

    def leave(self) -> None:
        """Save the memory if the run does that."""
        self._keeper.close()


def make_core(run: Run, host: HostMemory) -> ReplayCore:
    """Make the replay over what the memory holds."""
    config, layout = run.config.replay, host.plan.replay
    seed = int(run.seed(NOT_ACTORS).generate_state(1)[0])
    return ReplayCore(
        layout,
        config.alpha,
        config.priority_eps,
        seed,
        buffer=host.experience,
        floor=config.priority_floor,
        recency=config.recency,
    )


def make_memory(start: Start) -> tuple[ReplayCore, Keeper]:
    """Make the replay, with what a resumed run has saved, and its keeper."""
    keeper = Keeper(start.run, start.host, start.notices.send, start.clock.now_s)
    return keeper.memory(partial(make_core, start.run, start.host)), keeper


def make_replay(
    start: Start, replay: ReplayCore, source: ExperienceSource, sink: SampleSink
) -> ReplayServer:
    """Make the replay server.

    Args:
        start: of its process.
        replay: the memory.
        source: where chunks come from.
        sink: where batches go.
    """
    plan = start.host.plan
    intake = Intake(
        source,
        replay,
        start.run.limiter,
        streams_per_actor=plan.envs_per_actor,
    )
    method = start.run.config.replay.sampling
    return ReplayServer(replay, intake, source, sink, start.host.metrics("replay"), method=method)


# Actors, and what computes for them.


def make_actor(start: Start) -> Actor:
    """Make an actor."""
    from zapex.envs import streams

    run, host = start.run, start.host
    config, spec = run.config, run.spec
    actor = int(start.name.split()[1])
    size = config.actor.envs_per_actor
    first = run.number(actor) * size
    metrics = host.metrics(start.name)
    # A restarted actor must not play its former incarnation's games again.
    number = [start.incarnation] if metrics.value("steps") else []
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
    values: ValueSource
    if "inference" in run.part.roles:
        values = _exchange(host).asker(actor, host.waker("inference").wake)
    else:
        policy = _policy(run)
        values = OwnValues(policy, _pull(start, policy, metrics), metrics)
    return Actor(
        played,
        values,
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
        cut_exploratory=config.replay.cut_exploratory,
        may_step=may_step(run, host),
        clock_ns=start.clock.now_ns,
    )


def may_step(run: Run, host: HostMemory) -> Callable[[], bool]:
    """Whether --max-frames leaves a step, if this host's actors are all of the run's.

    Each actor looks before each step, so together they exceed the limit by less than one step each.
    """
    limit = run.config.run.max_frames
    if not limit or run.membership is not None:
        return lambda: True
    left = limit - run.steps_before * run.spec.frames_per_step
    blocks = [host.metrics(f"actor {i}") for i in range(host.plan.actors)]
    return lambda: sum(block.value("frames") for block in blocks) < left


def make_inference(start: Start) -> Inference:
    """Make the inference role, which computes for all actors of its host."""
    run, host = start.run, start.host
    actors = host.plan.actors
    wakers = [host.waker(f"actor {i}").wake for i in range(actors)]
    policy, metrics = _policy(run), host.metrics(start.name)
    return Inference(
        _exchange(host).answerer(wakers),
        policy,
        _pull(start, policy, metrics, actors),
        metrics,
        streams=run.config.actor.envs_per_actor,
    )


def _exchange(host: HostMemory) -> Exchange:
    assert host.plan.exchange is not None, "the plan has no inference role"
    return Exchange(host.part_of("exchange"), host.plan.exchange)


def _pull(start: Start, policy: "Acting", metrics: RoleMetrics, actors: int = 1) -> Pull:
    """Parameters for `policy`. metrics: the role's own object, which times its phases."""
    run, host = start.run, start.host
    return Pull(
        policy,
        host.mailbox(),
        metrics,
        period=actors * run.param_steps,
        parameter_bytes=host.plan.parameter_bytes,
    )


def _policy(run: Run) -> "Acting":
    import torch

    torch.set_num_threads(run.config.actor.actor_threads)
    return make_policy(run)


def make_policy(run: Run) -> "Acting":
    """Make what an actor computes with; with central inference, what computes for all actors."""
    actor = run.config.actor
    central = actor.inference == "central"
    place = actor.inference_device if central else "cuda" if actor.inference == "gpu" else "cpu"
    network = acting_network(run, place)
    if network.device.type == "cpu":
        return network
    from zapex.agent.device import CudaQueues, DevicePolicy, Sizes

    def policy_for(streams: int) -> DevicePolicy:
        queues = CudaQueues(network.device)
        return DevicePolicy(network, queues, streams, np.dtype(run.spec.observation_dtype))

    size = actor.envs_per_actor
    return Sizes(policy_for, network, size) if central else policy_for(size)


def acting_network(run: Run, device: str = "cpu") -> "Network":
    """Make a network with the run's seed, to act or to evaluate with."""
    from zapex.run.network import network_of

    config = run.config
    precision = config.actor.actor_precision
    return network_of(run.spec, config.learner, device, precision, config.run.seed)


def _anneal(run: Run) -> Callable[[float], float]:
    """Epsilon by the steps of one actor, of which the run has several."""
    config, frames = run.config.actor, run.spec.frames_per_step
    share = run.streams / config.envs_per_actor

    def epsilon(steps: float) -> float:
        played = (run.steps_before + share * steps) * frames
        return linear_epsilon(played, config.exploration_frames, config.eps_end)

    return epsilon


# Learner.


def make_learner(
    start: Start, parameters: ParameterSink, source: SampleSource | None = None
) -> Learner:
    """Make the learner, from the newest checkpoint, or else from the last published parameters.

    Args:
        start: of its process.
        parameters: where it publishes.
        source: its batches; None: from the replay in this host's memory.

    Raises:
        ConfigError: the settings do not fit the learner's device.
    """
    import torch

    from zapex.run.checkpoints import RunCheckpoints

    run, host, clock = start.run, start.host, start.clock
    config = run.config
    torch.manual_seed(config.run.seed)
    torch.set_num_threads(most_learner_threads(run))
    dqn = make_dqn(run)
    cores = _idle_cores(run, dqn)
    checkpoints = RunCheckpoints(
        run.run_dir,
        run.spec,
        config.run.seed,
        clock.now_s,
        60 * config.run.checkpoint_minutes,
        start.totals,
        partial(host.metrics("learner").set, "unsaved"),
        config.learner,
    )
    checkpoints.restore(dqn)
    newest = np.empty(host.plan.parameter_bytes, np.uint8)
    if not checkpoints.version and host.mailbox().newer_than(0, newest):
        # It died before its first checkpoint: only its last published parameters are left.
        dqn.online.load_flat(newest)
        dqn.target.load_flat(newest)
    learns = resolve_name(run.wrap)(dqn) if run.wrap else dqn
    here = source is None
    trainer, batches, gather_threads, frames = plan_training(run, host, dqn, learns, here)
    if source is None:
        source = host.sample_source(gather_threads, frames)
    if cores is not None and trainer is None:
        trainer = AtOnce(learns, after=cores.look)
    return Learner(
        learns,
        source,
        parameters,
        batches,
        host.metrics("learner"),
        checkpoints,
        prefetch=host.plan.prefetch,
        publish_period_s=config.learner.publish_period_s,
        clock_s=clock.now_s,
        first_version=max(checkpoints.version, int(start.totals().get("params_version", 0))),
        trainer=trainer,
    )


def make_dqn(run: Run) -> "DQN":
    """Make the learner's networks and optimiser, with the run's seed."""
    from zapex.agent.learning import DQN
    from zapex.run.network import network_of

    learner, seed = run.config.learner, run.config.run.seed
    return DQN(
        network_of(run.spec, learner, learner.device, learner.precision, seed),
        lr=learner.lr,
        optimiser=learner.optimiser,
        rmsprop_decay=learner.rmsprop_decay,
        optimiser_eps=learner.optimiser_eps,
        loss=learner.loss,
        double=learner.double,
        munchausen=learner.munchausen,
        share_trunk=learner.share_trunk,
        max_grad_norm=learner.max_grad_norm,
        target_period=learner.target_period,
        average_targets=learner.average_targets,
        largest=LARGEST,
    )


def most_learner_threads(run: Run) -> int:
    """The threads given, or the cores that this host's other roles leave to the learner."""
    config = run.config
    if config.learner.learner_threads or config.run.inline:  # which must repeat bit for bit
        return config.learner.learner_threads or 1
    roles = [role for _, role in run.plan.roles if role not in ("learner", "evaluator")]
    return max(1, given_cores() - sum(busy_threads(run, role) for role in roles))


def busy_threads(run: Run, role: Role) -> int:
    """Threads that one process of a role keeps busy. An evaluator's are idle most of the time."""
    actor, central = run.config.actor, "inference" in run.part.roles
    match role:
        case "actor":
            return actor.env_threads if central else max(actor.actor_threads, actor.env_threads)
        case "inference":
            return actor.actor_threads
        case "learner":
            return most_learner_threads(run)
        case "evaluator":
            return 0
        case _:
            return 1


def _idle_cores(run: Run, dqn: "DQN") -> "IdleCores | None":
    """What adapts the learner's threads to idle cores; None if their number is fixed.

    It tries how many threads are fastest, with networks for this alone and small batches of zeros.
    """
    config = run.config
    if config.learner.learner_threads or config.run.inline or dqn.online.device.type != "cpu":
        return None
    import torch

    from zapex.agent.threads import IdleCores, fastest

    def set_threads(threads: int) -> None:
        torch.set_num_threads(threads)
        print(f"the learner uses {threads} thread(s)", flush=True)

    threads, most = 1, most_learner_threads(run)
    if most > 1:
        layout = run.plan.replay.schema, min(_TRIAL_BATCH, config.learner.batch_size)
        batch, trial = Batch.empty(BatchLayout(*layout, channels_last=True)), make_dqn(run)
        for column in batch.values():
            column[...] = 0
        threads = fastest(lambda: trial.learn(batch), most)
    set_threads(threads)
    return IdleCores(threads, given_cores(), idle_s=idle_seconds, set_threads=set_threads)


def plan_training(
    run: Run, host: HostMemory, dqn: "DQN", learns: Any, replay_is_here: bool
) -> tuple[Trainer | None, list[Batch], int, DeviceFrames | None]:
    """How the learner steps, by its device and the settings.

    Args:
        run: the run.
        host: this host's memory.
        dqn: the learner's networks.
        learns: `dqn`, or what the run's `wrap` made of it.
        replay_is_here: the experience is in this host's memory.

    Returns:
        The trainer (None: the DQN's own steps, at once), the batches to use in turn, and for the
        source: the threads that gather, and the frames.

    Raises:
        ConfigError: `replay_device` does not fit.
    """
    config, plan, device = run.config.learner, host.plan, dqn.online.device
    cuda = device.type == "cuda"
    frames = None
    if config.replay_device != "cpu":
        _check_replay_device(config.replay_device, device.type, replay_is_here)
        frames = DeviceFrames(host.store(), device)
    layout = BatchLayout(
        plan.replay.schema,
        plan.batch_size,
        channels_last=learns.channels_last,
        frames_apart=frames is not None,
    )
    trainer: Trainer | None = None
    if cuda and learns is dqn:
        trainer = pipeline(dqn, layout, frames, config.cuda_graphs)
    elif frames is not None:
        trainer = AtOnce(learns, _completed_by(frames))
    late = trainer.late if trainer is not None else 0
    threads = config.gather_threads
    if threads is None:
        threads = 2 if cuda else 0
    # With fewer requests ahead, no next batch has come when the learner begins with one.
    ahead = (threads > 0 or not replay_is_here) and plan.prefetch >= 3 + late
    batches = [Batch.empty(layout, pin_memory=cuda) for _ in range(1 + late + ahead)]
    return trainer, batches, threads, frames


def _check_replay_device(replay_device: str, device: str, replay_is_here: bool) -> None:
    if not replay_is_here:
        raise ConfigError(
            f"--replay-device {replay_device} needs the replay on the learner's host: omit it"
        )
    needed = "cuda" if replay_device == "cuda" else "cpu"
    if device != needed:
        raise ConfigError(
            f"--replay-device {replay_device} needs a learner on {needed}, but it computes on "
            f"{device}: give --device {needed} or omit --replay-device"
        )


def _completed_by(frames: DeviceFrames) -> Any:
    def complete(batch: Batch) -> dict[str, Any]:
        frames.put_in_place(batch)
        return frames.complete(batch.torch())

    return complete


def pipeline(dqn: "DQN", layout: BatchLayout, frames: DeviceFrames | None, graphs: bool) -> Trainer:
    """Make the steps of a DQN on a GPU."""
    from zapex.agent.device import CudaQueues, Device, Pipeline

    queues = CudaQueues(dqn.online.device, graphs)
    device = Device(queues, layout.nbytes, dqn.results(layout.batch_size))
    if frames is None:
        return Pipeline(dqn, device, lambda block: split(layout, block))
    return Pipeline(
        dqn, device, lambda block: frames.complete(split(layout, block)), frames.put_in_place
    )


# Evaluator, and what several roles need.


def make_evaluator(start: Start) -> DutyCycle:
    """Make the evaluator."""
    import torch

    from zapex.envs import streams
    from zapex.roles.evaluator import MAX_STREAMS, Evaluator
    from zapex.run.checkpoints import BestNetwork

    run, host = start.run, start.host
    config, spec = run.config, run.spec
    torch.set_num_threads(1)
    network = acting_network(run)
    unsaved = partial(host.metrics("evaluator").set, "unsaved")
    best = BestNetwork(run.run_dir, spec, network, unsaved, config.learner)
    evaluations = host.ring("evaluations").producer()

    def report(returns: tuple[float, ...], version: int, at: dict[str, float]) -> None:
        record = np.zeros(1, host.plan.evaluation_dtype)
        record["returns"], record["params_version"] = returns, version
        for name in EVALUATION_FIELDS:
            record[name] = at.get(name, 0.0)
        best.offer(returns, version, at)  # first: a kill in between must not lose the best
        evaluations.try_offer(record)

    return Evaluator(
        network,
        lambda: streams.make(
            spec,
            min(config.evaluator.eval_episodes, MAX_STREAMS),
            seed=int(run.seed(NOT_ACTORS + 1).generate_state(1)[0]),
            max_episode_frames=config.env.max_episode_frames,
            noop_max=config.evaluator.eval_noop_max,
        ),
        host.mailbox(),
        host.metrics("evaluator"),
        report,
        episodes=config.evaluator.eval_episodes,
        epsilon=config.evaluator.eval_epsilon,
        period_s=config.evaluator.eval_period_s,
        parameter_bytes=host.plan.parameter_bytes,
        seed=config.run.seed,
        clock_s=start.clock.now_s,
        totals=start.totals,
    )


def totals_of(host: HostMemory, base: dict[str, float], started_ns: int) -> Totals:
    """Counters of the whole run, also from before it was resumed; a checkpoint stores them."""
    blocks = [(role, host.metrics(n)) for n, role in host.plan.roles + host.plan.elsewhere]

    def look() -> dict[str, float]:
        totals = dict(base)
        for role, block in blocks:
            for name in (name for name, counted_by in TOTALS.items() if counted_by == role):
                totals[name] = totals.get(name, 0.0) + block.value(name)
        elapsed_s = (time.perf_counter_ns() - started_ns) / 1e9
        totals["wall_s"] = base.get("wall_s", 0.0) + elapsed_s
        return totals

    return look
