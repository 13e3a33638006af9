"""A run without processes: metrics blocks that fill as if Ape-X were learning Breakout."""

import dataclasses
import mmap
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zapex.host.metrics import EPISODE, Role, RoleMetrics
from zapex.watch.monitor import Monitor
from zapex.watch.report import Evaluation, Recorder, RunFacts, Snapshot, View

STREAMS = 16

_SHARES: dict[Role, dict[str, float]] = {
    "actor": {
        "pull": 0.01,
        "environment": 0.62,
        "forward": 0.31,
        "push": 0.02,
        "wait": 0.03,
        "other": 0.01,
    },
    "replay": {"insert": 0.02, "sample": 0.04, "update": 0.02, "idle": 0.91, "other": 0.01},
    "learner": {
        "wait": 0.03,
        "gather": 0.04,
        "forward": 0.33,
        "backward": 0.44,
        "optimiser": 0.13,
        "update": 0.01,
        "publish": 0.01,
        "checkpoint": 0.0,
        "other": 0.01,
        "fill": 0.0,
    },
    "evaluator": {"evaluate": 0.1, "idle": 0.9},
}


class FakeRun:
    """Roles' blocks and episodes, advanced by hand: `advance(seconds)`. `now_ns` is their clock.

    begun: every role has entered a phase.
    """

    def __init__(self, actors: int = 2, seed: int = 0, begun: bool = True) -> None:
        names: list[tuple[str, Role]] = [(f"actor {i}", "actor") for i in range(actors)]
        names += [("replay", "replay"), ("learner", "learner"), ("evaluator", "evaluator")]
        self.now_ns = 1_000_000_000
        self.roles = [(name, self._block(role)) for name, role in names]
        self.seconds = 0.0
        self._rng = np.random.default_rng(seed)
        self._actors = actors
        self._owed = 0.0
        self._evaluated = 0
        for _, block in self.roles if begun else ():
            block.enter(block.table.phases[0])

    def clock_ns(self) -> int:
        """The clock of blocks and monitor."""
        return self.now_ns

    def _block(self, role: Role) -> RoleMetrics:
        memory = mmap.mmap(-1, RoleMetrics.required_bytes())  # a forked role shares it
        return RoleMetrics(memory, role, create=True, clock_ns=self.clock_ns)

    def monitor(
        self, view: View | None = None, recorders: Sequence[Recorder] = (), *,
        facts: RunFacts | None = None, **more: Any,
    ) -> Monitor:  # fmt: skip
        """A monitor that begins now; facts: all but when it began."""
        facts = facts or RunFacts("CartPole-v1")
        facts = dataclasses.replace(facts, started_ns=self.now_ns)
        return Monitor(facts, self.roles, view, recorders, clock_ns=self.clock_ns, **more)

    def advance(self, seconds: float, stuck: str = "") -> np.ndarray[Any, Any]:
        """Let `seconds` pass; the episodes that ended meanwhile. stuck: who stays in its phase."""
        self.seconds += seconds
        began_ns = self.now_ns
        for name, block in self.roles:
            self.now_ns = began_ns
            for phase, share in _SHARES[block.role].items() if name != stuck else ():
                block.enter(phase)
                self.now_ns += int(share * seconds * 1e9)
            self.now_ns = began_ns + int(seconds * 1e9)
            if name != stuck:
                block.enter(block.table.phases[0])
        steps = int(1650 * seconds / self._actors)
        learned = self.seconds / (self.seconds + 300)
        for _, block in self.roles:
            if block.role == "actor":
                for name, n in (("steps", steps), ("frames", 4 * steps), ("transitions", steps)):
                    block.add(name, n)
                block.add("chunks", steps // 64)
                block.set("params_version", int(self.seconds))
            elif block.role == "replay":
                block.add("inserted", steps * self._actors)
                block.add("sampled", int(8 * steps * self._actors))
                block.add("updates_applied", int(8 * steps * self._actors))
                block.add("updates_stale", int(0.02 * steps * self._actors))
                live = min(400_000.0, 1650 * self.seconds)
                block.set("live", live)
                block.set("capacity", 400_000)
                block.set("bytes_used", live * 7900)
                block.set("slots_free", 40)
                block.set("slots_granted", STREAMS)
                block.set("limiter", 2)
            elif block.role == "learner":
                block.add("batches", int(100 * seconds))
                block.add("samples", int(100 * seconds) * 128)
                block.set("params_version", int(self.seconds))
                block.set("loss", 0.02 * (1 - 0.6 * learned) * self._rng.uniform(0.9, 1.1))
                block.set("q_mean", 4 * learned)
                block.set("td_abs_mean", 0.1 * (1 - 0.5 * learned))
                block.set("grad_norm", 1.3)
        return self._episodes(seconds, learned)

    def evaluation(self) -> Evaluation | None:
        """Ten games a minute, when one is due."""
        if self.seconds < 60 * (self._evaluated + 1):
            return None
        self._evaluated += 1
        mean = 60 * self.seconds / (self.seconds + 300)
        return Evaluation(
            returns=tuple(self._rng.normal(mean, 4, 10).round().tolist()),
            params_version=int(self.seconds),
            steps=int(1650 * self.seconds),
            frames=int(6600 * self.seconds),
            wall_s=self.seconds,
        )

    def _episodes(self, seconds: float, learned: float) -> np.ndarray[Any, Any]:
        self._owed += 1.5 * seconds
        records = np.zeros(int(self._owed), EPISODE)
        self._owed -= len(records)
        records["stream"] = self._rng.integers(0, STREAMS, len(records))
        records["epsilon"] = 0.4 ** (1 + 7 * records["stream"] / (STREAMS - 1))
        records["game_return"] = self._rng.poisson(
            (1 + 55 * learned) * (1 - records["epsilon"]) ** 2
        )
        records["steps"] = 300
        records["frames"] = 1200
        records["time_ns"] = self.now_ns
        records["params_version"] = int(self.seconds)
        self.roles[0][1].add("episodes", len(records))
        return records


def facts(run_dir: Path | None = None) -> RunFacts:
    """A ten-minute run of Breakout."""
    return RunFacts(
        environment="ALE/Breakout-v5",
        preset="laptop",
        run_dir=run_dir,
        resume=shlex.join(["zapex", "train", "--resume", str(run_dir)]),
        streams=STREAMS,
        envs_per_actor=STREAMS // 2,
        greedy_stream=STREAMS - 1,
        plain_transition_bytes=2 * 4 * 84 * 84,
        shared_bytes=int(400_000 * 7900 * 1.02),
        max_wall_s=600.0,
        references={"random": 1.7, "human": 30.5},
    )


def started(
    view: View | None = None,
    recorders: Sequence[Recorder] = (),
    head_start_s: int = 0,
    run_dir: Path | None = None,
) -> tuple[FakeRun, Monitor]:
    """A run and its monitor, `head_start_s` seconds after the start."""
    fake = FakeRun()
    monitor = fake.monitor(view, recorders, facts=facts(run_dir))
    monitor.message("learning starts at 20,000 transitions")
    for _ in range(head_start_s):
        go_on(fake, monitor, 1.0)
    return fake, monitor


def go_on(fake: FakeRun, monitor: Monitor, seconds: float) -> None:
    """Let `seconds` pass and tell the monitor what happened."""
    monitor.add_episodes(fake.advance(seconds))
    if evaluation := fake.evaluation():
        monitor.add_evaluation(evaluation)
        monitor.message(f"evaluated: {evaluation.mean:.1f} over 10 games")


def record(recorders: Sequence[Recorder], seconds: int, run_dir: Path) -> Snapshot:
    """Minutes of learning in no time: each recorder gets what it would have got."""
    fake = FakeRun()
    monitor = fake.monitor(facts=facts(run_dir))
    for at in range(5, seconds + 1, 5):
        evaluation = fake.evaluation()
        new = [evaluation] if evaluation else []
        for one in new:
            monitor.add_evaluation(one)
        episodes = fake.advance(5)
        monitor.add_episodes(episodes)
        snapshot = monitor.look(final=at == seconds)
        for recorder in recorders:
            recorder.write(snapshot, episodes, new)
    for recorder in recorders:
        recorder.close()
    return snapshot
