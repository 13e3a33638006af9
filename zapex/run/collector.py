"""Collects what roles report to their parent, and checks the run's limits."""

import contextlib
import errno
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from zapex.errors import ConfigError
from zapex.host.metrics import Role
from zapex.host.plan import FENCED, NEWS, OVER
from zapex.host.roster import SaveWords
from zapex.machine.disk import open_to_append, why_not_written
from zapex.machine.resources import process_age_s
from zapex.run import checkpoints, directory
from zapex.run.run import Run
from zapex.shm_transport import HostMemory
from zapex.watch import recorders
from zapex.watch.curves import draw_run
from zapex.watch.monitor import Monitor
from zapex.watch.report import Evaluation, Recorder, Report, RunFacts, Snapshot
from zapex.watch.terminal import (
    LivePicture,
    PlainLines,
    open_view,
    print_lines,
    summary,
)

TERMINAL_LOG = "terminal.log"  # in the run's logs: what was said after the terminal was closed
_SAVED_BY: dict[Role, str] = {"learner": "checkpoints", "evaluator": "the best network"}
_REPORT_S = 0.95  # between two reports to a caller; the monitor looks twice a second
_FIRSTS = {"first_step_s": ("actor", "steps"), "first_batch_s": ("learner", "batches")}


def command_started_ns() -> int:
    """The start of this process, on the clock of `time.perf_counter_ns`."""
    return time.perf_counter_ns() - int(process_age_s() * 1e9)


@dataclass(frozen=True)
class Caller:
    """A program that trains by a call, and not by a command.

    on_report: called about once a second; the run ends if it returns False. started_ns: when it
    called, by `perf_counter_ns`. plain: never the picture on the terminal.
    """

    on_report: Callable[[Report], object] | None = None
    started_ns: int = field(default_factory=time.perf_counter_ns)
    plain: bool = True


@dataclass(frozen=True)
class Ending:
    """Why a run, or this host's part of it, ends; without a reason it continues.

    over: a limit is reached, so the run ends on every host. again: this host must join again.
    last: the last state, once all has ended.
    """

    reason: str = ""
    failed: bool = False
    over: bool = False
    again: bool = False
    last: Snapshot | None = None


def say_into(path: Path) -> None:
    """Make a file the standard output of this process, and nothing its input."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = open_to_append(path)
    for descriptor, instead in ((0, nothing), (1, file), (2, file)):
        os.dup2(instead, descriptor)
    os.close(nothing)
    os.close(file)


class Collector:
    """Reads what roles report and gives it to a monitor, which it closes on an exception."""

    def __init__(
        self, run: Run, host: HostMemory, base: dict[str, float], caller: Caller | None = None
    ) -> None:
        self.run, self.host, self.base = run, host, base
        self._caller, self._report_due_s = caller, 0.0
        self.started_ns = caller.started_ns if caller else command_started_ns()
        self.ending = Ending()
        self.deaths: list[str] = []
        self._unsaved: dict[str, int] = {}
        self._firsts: dict[str, float] = {}
        plan = host.plan
        every = [f"episodes {i}" for i in range(plan.actors)]
        names = ["episodes"] if "episodes" in plan.rings else every
        self._episodes = [host.ring(name).consumer() for name in names]
        self._new_episodes = host.used_rings(names)
        self._evaluations, self._notices = (
            host.ring(name).consumer() if name in plan.rings else None
            for name in ("evaluations", "notices")
        )
        self._origin = recorders.origin()
        plain = run.config.run.plain or (caller is not None and caller.plain)
        view = None if run.config.run.quiet else open_view(plain)
        self._live = isinstance(view, LivePicture)
        written: list[Recorder] = [recorders.JsonLines(run.run_dir)]
        settings = run.config.shared(replays=run.part.holds_replay)
        if run.part.learns:
            written.append(recorders.TensorBoard(run.run_dir, settings))
        if run.part.learns and run.config.run.track:
            project, entity = run.config.run.wandb_project_name, run.config.run.wandb_entity
            written.append(recorders.WeightsAndBiases(run.run_dir, settings, project, entity))
        if run.part.learns and run.config.run.visdom:
            written.append(recorders.Visdom(run.run_dir, run.config.run.visdom))
        every_role = plan.roles + plan.elsewhere
        self._blocks = [(role, host.metrics(name)) for name, role in every_role]
        self._unseen = {
            first: [block for role, block in self._blocks if role == wanted]
            for first, (wanted, _) in _FIRSTS.items()
        }
        self._savers = [(r, b) for r, b in self._blocks if run.part.learns and r in _SAVED_BY]
        self.monitor = Monitor(
            self._facts(),
            [(name, host.metrics(name)) for name, _ in every_role],
            view,
            written,
            for_others=recorders.ForWatchers(run.run_dir),
            evaluations=directory.evaluations(run.run_dir) if base else (),
            elsewhere={role for _, role in plan.elsewhere},
            limiter=run.limiter,
        )

    def _facts(self) -> RunFacts:
        run, plan = self.run, self.host.plan
        config, spec, membership = run.config, run.spec, run.membership
        column = plan.replay.schema.columns["obs"]
        where = "at" if run.part.holds_replay else "of the replay at"
        urls = ", ".join(membership.all_urls) if membership is not None else ""
        return RunFacts(
            environment=spec.env_id,
            preset=config.run.preset,
            part=f"{membership.part} {where} {urls}" if membership is not None else "",
            films=spec.films,
            resume=shlex.join([*run.command, "--resume", str(run.run_dir)]),
            run_dir=run.run_dir,
            streams=config.streams if "actor" in run.part.roles else run.streams,
            envs_per_actor=config.actor.envs_per_actor,
            greedy_stream=run.streams - 1,
            plain_transition_bytes=2 * column.stack * column.item_bytes + 21,
            shared_bytes=plan.nbytes + plan.experience_bytes,
            started_ns=self.started_ns,
            max_wall_s=60 * config.run.max_minutes,
            max_frames=config.run.max_frames,
            base=self.base,
            references=spec.references,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:  # in every case the terminal is restored
            self.monitor.close()

    def tick(self) -> Snapshot | None:
        """Show, record and report if it is time. Returns the snapshot, if there was one."""
        snapshot = self.monitor.tick()
        caller = self._caller
        if snapshot is None or caller is None or caller.on_report is None:
            return snapshot
        if snapshot.wall_s >= self._report_due_s:
            self._report_due_s = snapshot.wall_s + _REPORT_S
            if caller.on_report(Report.of(snapshot)) is False and not self.ending.reason:
                self.end("on_report returned False", over=True)
        return snapshot

    def collect(self) -> None:
        """Read new episodes and evaluations, and note which roles have begun to work."""
        for first, blocks in list(self._unseen.items()):
            if any(block.value(_FIRSTS[first][1]) for block in blocks):
                self._firsts[first] = self._session_s()
                del self._unseen[first]
        self._look_at_saves()
        for i in self._new_episodes.find():
            episodes = self._episodes[i]
            self.monitor.add_episodes(episodes.take(episodes.ring.capacity))
        if self._evaluations is not None:
            for record in self._evaluations.take(self._evaluations.ring.capacity):
                returns, version = tuple(record["returns"].tolist()), int(record["params_version"])
                at = int(record["steps"]), int(record["frames"]), float(record["wall_s"])
                self._add_evaluation(Evaluation(returns, version, *at))

    def _look_at_saves(self) -> None:
        """Report once that the disk refuses what a role saves, and once that it works again."""
        for role, block in self._savers:
            code, what = int(block.value("unsaved")), _SAVED_BY[role]
            if code == self._unsaved.get(role, 0):
                continue
            self._unsaved[role] = code
            text = f"{what} cannot be written: {why_not_written(code, self.run.run_dir)}"
            again = "training continues in memory and will try again"
            self.monitor.message(f"{text}; {again}" if code else f"{what} can be written again")

    def _add_evaluation(self, evaluation: Evaluation) -> None:
        self.monitor.add_evaluation(evaluation)
        self.monitor.message(
            f"evaluation: mean return {evaluation.mean:g} over {len(evaluation.returns)} games"
        )
        target = self.run.config.run.stop_at_return
        if target is not None and evaluation.mean >= target:
            self.end(f"the mean return of an evaluation reached {target:g}", over=True)

    def take_notices(self) -> None:
        """Read the notices of a role with a link to other hosts, or with the experience."""
        if self._notices is None:
            return
        for record in self._notices.take(self._notices.ring.capacity):
            kind, text = int(record["kind"]), bytes(record["text"]).decode(errors="replace")
            if kind == NEWS:
                self.monitor.message(text)
            elif self.ending.reason:
                continue
            elif kind == OVER:
                self.end(f"the run is over: {text}")
            elif kind == FENCED and self.run.part.rejoins:
                self.end(f"{text}; joining again", again=True)
            else:
                self.end(text, failed=True)

    def look_at_memory(self) -> None:
        """All roles have ended: note whether the experience is saved, if the run does that."""
        words = SaveWords(self.host.part_of("saves"))
        config, part = self.run.config.replay, self.run.part
        if config.save_replay == "never" or not part.holds_replay:
            return
        self._unsaved["memory"] = words.unsaved
        if not words.last_is_over and self.host.metrics("replay").value("inserted"):
            self._unsaved["memory"] = errno.EINTR
            self.monitor.message(
                f"the memory is not saved: the {part.intake} ended before that; what was saved "
                "before is as it was"
            )

    def has_ended(self, name: str) -> None:
        """A role has ended by itself: its last notices must say why."""
        self.take_notices()
        if not self.ending.reason:
            where = f"{self.run.run_dir}/logs"
            self.end(f"{name} ended without a message: see {where}", failed=True)

    def end(self, reason: str, **more: Any) -> None:
        """The run ends. more: the other fields of an Ending."""
        self.ending = replace(self.ending, reason=reason, **more)

    def leave_terminal(self) -> None:
        """The terminal was closed: the run continues, and its output goes to a file."""
        say_into(Path(os.devnull))
        self._live = False
        self.monitor.show_in(PlainLines(sys.__stdout__))  # the picture's end goes nowhere
        logs = self.run.run_dir / "logs"
        with contextlib.suppress(OSError):  # a full disk, perhaps
            logs.mkdir(exist_ok=True)
            say_into(logs / TERMINAL_LOG)
        name = shlex.quote(str(self.run.run_dir))
        self.monitor.message(
            f"the terminal was closed; the run continues: zapex watch {name}, zapex stop {name}"
        )

    def check_limits(self) -> None:
        """End the run if one of its limits is reached; only the learner's host checks limits.

        The clock of --max-minutes starts with the session's first step.
        """
        limits, base = self.run.config.run, self.base
        if self.ending.reason or not self.run.part.learns:
            return
        frames, played_s = base.get("frames", 0.0), base.get("wall_s", 0.0)
        if self.host.metrics("learner").pid:  # it could not save a run that ended before it works
            frames += sum(block.value("frames") for role, block in self._blocks if role == "actor")
        if "first_step_s" in self._firsts:
            played_s += self._session_s() - self._firsts["first_step_s"]
        if limits.max_frames and frames >= limits.max_frames:
            self.end(f"{limits.max_frames:,} frames are played", over=True)
        elif limits.max_minutes and played_s >= 60 * limits.max_minutes:
            self.end(f"{limits.max_minutes:g} minutes are over", over=True)

    def _session_s(self) -> float:
        return (time.perf_counter_ns() - self.started_ns) / 1e9

    def finish(self) -> Ending:
        """Record the last state and print the summary."""
        run, run_dir, spec = self.run.config.run, self.run.run_dir, self.run.spec
        reason, snapshot = self.ending.reason, self.monitor.close()
        if self._live:  # the picture had room only for their first lines
            print("".join(f"{death}\n" for death in self.deaths), end="", file=sys.stderr)
        self.end(reason, last=snapshot)
        if any(self._unsaved.values()) or self.monitor.unwritten:
            self.end(reason, failed=True)
        try:
            more = {"seed": run.seed, "startup": self._firsts, **self._origin}
            recorders.write_result(run_dir, snapshot, reason, **more)
        except OSError as error:
            self._not_written(recorders.RESULT_FILE, error)
        if not self.run.part.learns:
            if not run.quiet:
                print_lines(summary(snapshot, reason), run.plain)
            return self.ending
        picture = None
        try:
            title = f"{spec.env_id}, preset {run.preset}, seed {run.seed}"
            picture = draw_run(run_dir, references=spec.references, title=title)
        except ConfigError as error:  # no matplotlib, or no game ended yet
            if not run.quiet:
                print(f"no learning curve: {error}")
        except OSError as error:
            self._not_written("the learning curve", error)
        saved = checkpoints.latest(run_dir) is not None
        code = self._unsaved.get("learner", 0)
        unsaved = code and f"what was learned last: {why_not_written(code, run_dir)}"
        if not run.quiet:
            print_lines(summary(snapshot, reason, picture, saved, unsaved or ""), run.plain)
        return self.ending

    def _not_written(self, what: str, error: OSError) -> None:
        """The run has failed to write something at its end."""
        why = why_not_written(error.errno or 0, self.run.run_dir)
        print(f"{what} cannot be written: {why}", file=sys.stderr)
        self.end(self.ending.reason, failed=True)
