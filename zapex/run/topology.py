"""Makes a run's roles, each with its ends of the links; a table says which function makes it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import numpy as np

from zapex.chunks.layout import BatchLayout
from zapex.errors import Fenced, Refused, RunOver
from zapex.host.metrics import Role
from zapex.host.parts import Link
from zapex.host.plan import EVALUATION_FIELDS, FENCED, NEWS, NOTICE, OVER, REFUSED
from zapex.machine.child import DutyCycle
from zapex.machine.resources import given_cores, idle_seconds
from zapex.replay.core import ReplayCore
from zapex.run.keeping import Keeper
from zapex.run.run import NOT_ACTORS, Clock, Run
from zapex.shm_transport import HostMemory
from zapex.transport import ExperienceSource, ParameterSink, SampleSink, SampleSource
from zapex.watch.report import TOTALS

if TYPE_CHECKING:
    from zapex.agent.threads import IdleCores

Totals = Callable[[], dict[str, float]]
_TRIAL_BATCH = 128

MAKERS: dict[tuple[Role, Link], str] = {
    ("actor", "memory"): "zapex.run.acting:make_actor",
    ("inference", "memory"): "zapex.run.acting:make_inference",
    ("replay", "memory"): "zapex.run.topology:make_replay_here",
    ("learner", "memory"): "zapex.run.topology:make_learner",
    ("evaluator", "memory"): "zapex.run.topology:make_evaluator",
    ("relay", "dials"): "zapex.run.networked:make_relay",
    ("learner", "dials"): "zapex.run.networked:make_learner_there",
    ("replay", "listens"): "zapex.run.networked:make_replay_there",
}
"""The function that makes a role with this link, by name, so ZeroMQ is imported only if needed."""


class Notices:
    """Notices for the user, from a role to its parent."""

    def __init__(self, host: HostMemory) -> None:
        self._ring = host.ring("notices").producer()

    def tell(self, text: str, kind: int = NEWS) -> None:
        """Send one line; it is lost if the parent has not read for long."""
        record = np.zeros(1, NOTICE)
        record["kind"], record["text"] = kind, text.encode()[: NOTICE["text"].itemsize]
        self._ring.try_offer(record)

    def verdict(self, error: RunOver | Fenced | Refused) -> None:
        """Say why this role ends."""
        kinds = {RunOver: OVER, Fenced: FENCED, Refused: REFUSED}
        self.tell(str(error), kinds[type(error)])


@dataclass(frozen=True)
class Start:
    """One start of a role's process: all that its maker needs.

    totals: counters of the whole run, now.
    """

    name: str
    run: Run
    host: HostMemory
    incarnation: int = 1
    clock: Clock = field(default_factory=Clock)
    totals: Totals = dict

    @cached_property
    def notices(self) -> Notices:
        """The notices of a role with a link or with the experience."""
        return Notices(self.host)


@dataclass
class LinkedRole:
    """A role with a link or with the experience, and what its process waits on."""

    role: DutyCycle
    chores: Sequence[Callable[[], object]]
    hang_up: Callable[[], object]
    fds: Sequence[int] | None  # None: `ready` must be called all the time
    save: Callable[[], object] = lambda: None  # if the run is over, or refuses this host

    def do_work(self) -> int:
        """Do the role's duty cycle, and the link's regular work."""
        work = self.role.do_work()
        for chore in self.chores:
            chore()
        return work

    def ready(self) -> bool:
        """Whether the role has something to do."""
        return self.role.ready()

    def close(self) -> None:
        """Close the role, which saves what it has; then close the link."""
        self.role.close()
        self.hang_up()


def make_role(start: Start) -> DutyCycle:
    """Make the role of one process."""
    role = dict(start.host.plan.roles)[start.name]
    made: DutyCycle = resolve_name(MAKERS[role, start.run.part.roles[role]])(start)
    return made


def make_core(run: Run, host: HostMemory) -> ReplayCore:
    """Make the replay, over what the memory holds."""
    config, layout = run.config.replay, host.plan.replay
    seed = int(run.seed(NOT_ACTORS).generate_state(1)[0])
    return ReplayCore(layout, config.alpha, config.priority_eps, seed, buffer=host.experience)


def make_memory(start: Start) -> tuple[ReplayCore, Keeper]:
    """Make the replay, with what a resumed run has saved, and what saves it."""
    keeper = Keeper(start.run, start.host, start.notices.tell, start.clock.now_s)
    return keeper.memory(partial(make_core, start.run, start.host)), keeper


def make_replay_here(start: Start) -> LinkedRole:
    """Make the replay server of a run on one host."""
    replay, keeper = make_memory(start)
    role = make_replay(start, replay)
    return LinkedRole(role, [keeper.do_work], keeper.close, (), keeper.close)


def make_replay(
    start: Start,
    replay: ReplayCore | None = None,
    source: ExperienceSource | None = None,
    sink: SampleSink | None = None,
) -> DutyCycle:
    """Make the replay server. source, sink: None if actors and learner are on this host.

    replay: None: over what the memory holds.
    """
    from zapex.roles.intake import Intake
    from zapex.roles.replay_server import ReplayServer

    run, host = start.run, start.host
    if replay is None:
        replay = make_core(run, host)
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
        method=run.config.replay.sampling,
    )


def make_learner(
    start: Start, source: SampleSource | None = None, sink: ParameterSink | None = None
) -> DutyCycle:
    """Make the learner, from the newest checkpoint, or else from the last published parameters.

    source, sink: None if the replay is on this host.
    """
    import torch

    from zapex.checkpoints.learner import RunCheckpoints
    from zapex.roles.learner import AtOnce, Learner
    from zapex.run.training import plan_training

    run, host, clock = start.run, start.host, start.clock
    config = run.config
    torch.manual_seed(config.run.seed)
    torch.set_num_threads(run.most_learner_threads())
    dqn = run.dqn()
    team = None
    if (
        not (config.learner.learner_threads or config.run.inline)
        and dqn.online.device.type == "cpu"
    ):
        team = _choose_threads(run)
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
    training = plan_training(run, host, dqn, learns, replay_is_here=source is None)
    trainer = training.trainer
    if team is not None and trainer is None:
        trainer = AtOnce(learns, after=team.look)
    return Learner(
        learns,
        source or host.sample_source(training.gather_threads, training.frames),
        sink or host.mailbox(),
        training.batches,
        host.metrics("learner"),
        checkpoints,
        prefetch=host.plan.prefetch,
        publish_period_s=config.learner.publish_period_s,
        clock_s=clock.now_s,
        first_version=max(checkpoints.version, int(start.totals().get("params_version", 0))),
        trainer=trainer,
    )


def _choose_threads(run: Run) -> "IdleCores":
    """Try how many threads are fastest, with networks of their own and small batches of zeros."""
    import torch

    from zapex.agent.threads import IdleCores, fastest
    from zapex.chunks.batch import Batch

    def set_threads(threads: int) -> None:
        torch.set_num_threads(threads)
        print(f"the learner takes {threads} thread(s)", flush=True)

    threads, most = 1, run.most_learner_threads()
    if most > 1:
        layout = run.plan.replay.schema, min(_TRIAL_BATCH, run.config.learner.batch_size)
        batch, dqn = Batch.empty(BatchLayout(*layout, channels_last=True)), run.dqn()
        for column in batch.values():
            column[...] = 0
        threads = fastest(lambda: dqn.learn(batch), most)
    set_threads(threads)
    return IdleCores(threads, given_cores(), idle_s=idle_seconds, set_threads=set_threads)


def make_evaluator(start: Start) -> DutyCycle:
    """The evaluator's role."""
    import torch

    from zapex.checkpoints.learner import BestNetwork
    from zapex.envs import streams
    from zapex.roles.evaluator import MAX_STREAMS, Evaluator

    run, host = start.run, start.host
    config, spec = run.config, run.spec
    torch.set_num_threads(1)
    network = run.acting_network()
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
            counts = block.snapshot(alive=False)
            for name in (name for name, counted_by in TOTALS.items() if counted_by == role):
                totals[name] = totals.get(name, 0.0) + counts[name]
        elapsed_s = (time.perf_counter_ns() - started_ns) / 1e9
        totals["wall_s"] = base.get("wall_s", 0.0) + elapsed_s
        return totals

    return look


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables that limit the libraries of a process to `threads` threads."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMBA_NUM_THREADS": count,
        # An idle OpenMP thread that spins would take a core from a role that works.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "PYTHONUNBUFFERED": "1",
    }
