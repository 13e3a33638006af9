"""`zapex train`: the parent that owns the memory, starts the roles, watches them and ends them."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from zapex import checkpoint, preflight, recorders
from zapex.child import Order
from zapex.config import Config
from zapex.curve import draw
from zapex.environments import EnvironmentSpec
from zapex.errors import CheckpointError, ConfigError
from zapex.host_plan import EVALUATION_FIELDS
from zapex.metrics import Role
from zapex.monitor import Monitor
from zapex.report import Evaluation, Recorder, RunFacts
from zapex.run import Clock, Run
from zapex.shm_segment import Populator, Segment
from zapex.shm_transport import Host
from zapex.summary import summary, summary_of_part
from zapex.supervisor import (
    Died,
    Exited,
    GaveUp,
    ProcessSpec,
    Started,
    Supervisor,
)
from zapex.terminal import LivePicture, open_view, print_lines
from zapex.topology import make_role, thread_environment, totals_of

_TICK_S = 0.1
_GRACE_S = 3.5  # of the five seconds within which everything is over, the curve drawn too
_ROUNDS_A_LOOK = 16  # inline, at limits: a count, so that a run ends where its twin does
_FIRSTS = {"first_step_s": ("actor", "steps"), "first_batch_s": ("learner", "batches")}


def train(config: Config, spec: EnvironmentSpec) -> int:
    """Run until a limit, a signal or a role that cannot stay up. Returns the exit code."""
    run = Run(config, spec, Path(config.run.resume or config.run.run_dir))
    if not config.run.resume:
        run.run_dir.mkdir(parents=True)
    elif checkpoint.latest(run.run_dir) is None:
        raise CheckpointError(f"{run.run_dir} has no checkpoint to go on from: start a new run")
    (run.run_dir / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    base = recorders.read_base(run.run_dir) if config.run.resume else {}
    if base:
        print(
            f"going on at {base['frames']:,.0f} frames; the replay is refilled first: learning "
            f"starts after {config.replay.learning_starts:,} transitions"
        )
    run = replace(run, steps_before=int(base.get("steps", 0)))
    session = Session(run, base)
    return session.run_inline() if config.run.inline else session.run_processes()


def _command_started_ns() -> int:
    """When this process was started, on the clock of `time.perf_counter_ns`."""
    age_s = time.time() - psutil.Process().create_time()
    return time.perf_counter_ns() - int(age_s * 1e9)


@dataclass
class Session:
    """One life of a run on this host, or of this host's part of it."""

    run: Run
    base: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan = self.run.plan
        self.started_ns = _command_started_ns()
        self.reason = ""
        self.over = False  # a limit of the run is reached: it ends on every host
        self.failed = False
        self.firsts: dict[str, float] = {}
        self.deaths: list[str] = []

    # What both ways to run have in common.

    @contextlib.contextmanager
    def _watched(self, host: Host) -> Iterator[Monitor]:
        """A monitor of all roles; whatever happens, the terminal is given back."""
        monitor = self._monitor(host)
        try:
            yield monitor
        except BaseException:
            monitor.close()
            raise

    def _monitor(self, host: Host) -> Monitor:
        config, spec, plan = self.run.config, self.run.spec, self.plan
        view = open_view(config.run.plain)
        self.live = isinstance(view, LivePicture)
        column = plan.replay.schema.columns["obs"]
        facts = RunFacts(
            environment=spec.env_id,
            preset=config.run.preset,
            part=self._part_in_words(),
            replay_url=self.run.place.url if self.run.place is not None else "",
            run_dir=self.run.run_dir,
            streams=config.streams if plan.part == "actor" else self.run.streams,
            greedy_stream=self.run.streams - 1,
            plain_transition_bytes=2 * column.stack * column.item_bytes + 21,
            shared_bytes=plan.nbytes + self._experience_bytes,
            started_ns=self.started_ns,
            max_wall_s=60 * config.run.max_minutes,
            max_frames=config.run.max_frames,
            base=self.base,
            references=spec.references,
        )
        written: list[Recorder] = [recorders.JsonLines(self.run.run_dir)]
        if self._learns:
            written.append(recorders.TensorBoard(self.run.run_dir))
        return Monitor(
            facts,
            [(name, host.metrics(name)) for name, _ in self._everybody],
            view,
            written,
            evaluations=recorders.read_evaluations(self.run.run_dir) if self.base else (),
            elsewhere={role for _, role in plan.elsewhere},
        )

    def _collect(self, host: Host, monitor: Monitor) -> None:
        """Episodes and evaluations that came in, and whether somebody has just begun to work."""
        for first, (wanted, counter) in _FIRSTS.items():
            blocks = [host.metrics(name) for name, role in self._everybody if role == wanted]
            if first not in self.firsts and any(b.snapshot(alive=False)[counter] for b in blocks):
                self.firsts[first] = (time.perf_counter_ns() - self.started_ns) / 1e9
        every = [f"episodes {i}" for i in range(self.plan.actors)]
        for name in every if self.plan.part == "all" else ["episodes"]:
            consumer = host.ring(name).consumer()
            monitor.add_episodes(consumer.take(consumer.ring.capacity))
        if self._learns:
            self._collect_evaluations(host, monitor)

    def _collect_evaluations(self, host: Host, monitor: Monitor) -> None:
        evaluations = host.ring("evaluations").consumer()
        for record in evaluations.take(evaluations.ring.capacity):
            facts = {name: float(record[name]) for name in EVALUATION_FIELDS}
            evaluation = Evaluation(
                tuple(record["returns"].tolist()),
                int(record["params_version"]),
                int(facts["steps"]),
                int(facts["frames"]),
                facts["wall_s"],
            )
            monitor.add_evaluation(evaluation)
            monitor.message(
                f"evaluation: mean return {evaluation.mean:g} over {len(evaluation.returns)} games"
            )
            target = self.run.config.run.stop_at_return
            if target is not None and evaluation.mean >= target:
                self._reached(f"the mean return of an evaluation reached {target:g}")

    def _reached(self, limit: str) -> None:
        self.reason, self.over = limit, True

    def _check_limits(self, frames: float, wall_s: float) -> None:
        limits = self.run.config.run
        if self.reason or not self._learns:
            return
        if limits.max_frames and frames >= limits.max_frames:
            self._reached(f"{limits.max_frames:,} frames are played")
        elif limits.max_minutes and wall_s >= 60 * limits.max_minutes:
            self._reached(f"{limits.max_minutes:g} minutes are over")

    def _finish(self, monitor: Monitor) -> int:
        run, spec = self.run.config.run, self.run.spec
        snapshot = monitor.close()
        if self.live:  # the picture had room for their first lines only
            print("".join(f"{death}\n" for death in self.deaths), end="", file=sys.stderr)
        recorders.write_result(
            self.run.run_dir, snapshot, self.reason, seed=run.seed, startup=self.firsts
        )
        if not self._learns:
            print_lines(summary_of_part(snapshot, self.reason), run.plain)
            return int(self.failed)
        picture = None
        try:
            title = f"{spec.env_id}, preset {run.preset}, seed {run.seed}"
            picture = draw(self.run.run_dir, references=spec.references, title=title)
        except ConfigError as error:  # no matplotlib, or no game ended yet
            print(f"no learning curve: {error}")
        saved = checkpoint.latest(self.run.run_dir) is not None
        print_lines(summary(snapshot, self.reason, picture, saved), run.plain)
        return int(self.failed)

    # What the parts of a run on several hosts do differently.

    @property
    def _learns(self) -> bool:
        return self.plan.part in ("all", "learner")

    @property
    def _everybody(self) -> list[tuple[str, Role]]:
        return self.plan.roles + self.plan.elsewhere

    @property
    def _experience_bytes(self) -> int:
        return self.plan.replay.nbytes if self.plan.part != "learner" else 0

    def _part_in_words(self) -> str:
        return ""

    def _look_after(self, host: Host, monitor: Monitor) -> None:
        """Once a turn of the parent's loop."""

    def _ended(self, name: str, host: Host, monitor: Monitor) -> None:
        """A role says that its work is done, and nobody had asked it to end."""
        monitor.message(f"{name} ended")

    # Everything in one process and one thread.

    def run_inline(self) -> int:
        """All duty cycles in turn; time is counted in rounds, so that a run repeats bit for bit."""
        rounds = 0
        clock = Clock(lambda: rounds * 10_000_000)
        eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in self.plan.roles]
        control, experience = _zeros(self.plan.nbytes), _zeros(self.plan.replay.nbytes)
        host = Host(self.plan, control, experience, eventfds, create=True)
        totals = totals_of(host, self.base, self.started_ns)
        names = [name for name, _ in self._wanted_roles()]
        for name in names:
            host.set_life(name, 1)
        with Supervisor() as supervisor, self._watched(host) as monitor:
            supervisor.install_signal_handlers()
            # The learner first: actors wait for its parameters.
            names.sort(key=lambda name: name != "learner")
            roles = [make_role(name, self.run, host, 1, clock, totals) for name in names]
            while not self.reason:
                for role in roles:
                    role.do_work()
                rounds += 1
                self._collect(host, monitor)
                monitor.tick()
                if rounds % _ROUNDS_A_LOOK == 0:
                    now = totals()
                    self._check_limits(now["frames"], now["wall_s"])
                if supervisor.stop_signal is not None:
                    self.reason = f"stopped by {supervisor.stop_signal.name}"
            for role in roles:
                role.close()
            self._collect(host, monitor)
        for fd in eventfds:
            os.close(fd)
        return self._finish(monitor)

    def _wanted_roles(self) -> list[tuple[str, str]]:
        return [
            (name, role)
            for name, role in self.plan.roles
            if role != "evaluator" or self.run.config.evaluator.eval_period_s > 0
        ]

    # A process for each role.

    @preflight.limits_told()
    def run_processes(self) -> int:
        """Start the roles, watch them, and end them within five seconds of being asked to."""
        control = Segment.create("zapex-control", self.plan.nbytes)
        eventfds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in self.plan.roles]
        experience = None
        if self._experience_bytes:
            huge = self.run.config.replay.huge_pages
            experience = Segment.create("zapex-experience", self._experience_bytes, huge_pages=huge)
        slots = experience.buffer if experience is not None else _zeros(0)
        host = Host(self.plan, control.buffer, slots, eventfds, create=True)
        control.populate()
        populator = Populator(experience) if experience is not None else None
        with (
            Supervisor(
                on_death=lambda event: host.set_life(event.name, 0),
                is_up=lambda name, pid: host.metrics(name).pid == pid,
            ) as supervisor,
            self._watched(host) as monitor,
        ):
            supervisor.install_signal_handlers()
            try:
                experience_fd = experience.fd if experience is not None else -1
                for spec in self._process_specs(control.fd, experience_fd, eventfds):
                    self._tell(monitor, host, supervisor.start(spec))
                if populator is not None:
                    populator.start()
                while not self.reason:
                    for event in supervisor.poll(_TICK_S):
                        self._tell(monitor, host, event)
                    self._collect(host, monitor)
                    self._look_after(host, monitor)
                    snapshot = monitor.tick()
                    if snapshot is not None:
                        # What is played before the learner works could not be saved by it.
                        works = not self._learns or host.metrics("learner").pid
                        frames = snapshot.totals["frames"] if works else 0.0
                        self._check_limits(frames, snapshot.wall_s)
                    if supervisor.stop_signal is not None:
                        self.reason = f"stopped by {supervisor.stop_signal.name}"
            finally:
                for event in supervisor.shutdown(_GRACE_S):
                    self._tell(monitor, host, event)
                if populator is not None:
                    populator.stop()
            self._collect(host, monitor)
        for fd in eventfds:
            os.close(fd)
        for segment in (control, experience):
            if segment is not None:
                segment.close()
        return self._finish(monitor)

    def _process_specs(
        self, control_fd: int, experience_fd: int, eventfds: list[int]
    ) -> Iterator[ProcessSpec]:
        config = self.run.config
        logs = self.run.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        threads = {"actor": config.actor.actor_threads, "learner": config.learner.learner_threads}
        for name, role in self._wanted_roles():
            order = Order(
                name=name,
                config=config.to_dict(),
                spec=asdict(self.run.spec),
                run_dir=str(self.run.run_dir),
                control_fd=control_fd,
                experience_fd=experience_fd,
                eventfds=eventfds,
                base=self.base,
                started_ns=self.started_ns,
                place=asdict(self.run.place) if self.run.place is not None else None,
            )
            fds = [fd for fd in (control_fd, experience_fd) if fd >= 0]
            yield ProcessSpec(
                name=name,
                argv=[sys.executable, "-m", "zapex.birth", order.to_json()],
                pass_fds=[*fds, *eventfds],
                env=thread_environment(threads.get(role, 1)),
                restart=True,
                log_path=logs / f"{name.replace(' ', '-')}.log",
            )

    def _tell(self, monitor: Monitor, host: Host, event: Any) -> None:
        if isinstance(event, Started):
            host.set_life(event.name, event.incarnation)
            return
        if isinstance(event, Exited) and self.reason:
            return
        if isinstance(event, Exited):
            self._ended(event.name, host, monitor)
            return
        monitor.message(str(event))
        if isinstance(event, Died):
            self.deaths.append(str(event))
        if isinstance(event, GaveUp):
            self.failed = True
            self.reason = str(event)


def _zeros(nbytes: int) -> Any:
    from zapex.batch import aligned_zeros

    return aligned_zeros(nbytes)
