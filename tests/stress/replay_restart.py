"""A replay server killed at two million transitions: how soon it answers again, and what is left.

    python -m tests.stress.replay_restart [--transitions 2000000] [--kills 10] [--json FILE]

The server is the real one, a supervised `python -m zapex.run.child`; this process owns the
memory, has filled it through the actors' own end, and asks for batches as a learner does. Its
clock starts at the SIGKILL, so that the restart's delay, the interpreter, the kernels and the
attaching are in it.
After every life each live transition must still be there, and no batch may hold a row that was
never written.
"""

import argparse
import dataclasses
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.harness import add_json, evidence
from benchmarks.support.machine import Watch
from zapex.chunks.batch import Batch
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.layout import COUNT, LIVE, STATE, BatchLayout
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.machine.child import thread_environment
from zapex.machine.segment import Segment
from zapex.machine.supervisor import Died, ProcessSpec, Started, Supervisor
from zapex.run.child import Order
from zapex.run.run import Run
from zapex.run.topologies import Start, make_core, make_replay
from zapex.shm_transport import HostMemory

STREAMS = 64
BATCH = 512
SPEC = EnvironmentSpec(
    env_id="numbers", env_kwargs={}, observation_shape=(2,), observation_dtype="float32", stack=1,
    num_actions=4, frames_per_step=1, atari=False, describe="(stream, step), counted up",
)  # fmt: skip


class Memory:
    """A run's shared memory with `transitions` in it, and whoever asks the server for batches."""

    def __init__(self, directory: Path, transitions: int) -> None:
        config = Config().replace(
            actors=1, envs_per_actor=STREAMS, capacity=transitions, learning_starts=BATCH,
            batch_size=BATCH, hidden=8,
        )  # fmt: skip
        self.run = Run(config, SPEC, directory)
        plan = self.run.plan
        self.control = Segment.create("restart-control", plan.nbytes)
        self.experience = Segment.create("restart-experience", plan.replay.nbytes)
        self.eventfds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in plan.roles]
        self.host = HostMemory(
            plan, self.control.buffer, self.experience.buffer, self.eventfds, create=True
        )
        self.steps = self._fill(transitions)
        self.source = self.host.sample_source()
        self.batch = Batch.empty(BatchLayout(plan.replay.schema, BATCH))

    def _fill(self, transitions: int) -> int:
        """Through the actor's own end, with a server in this process; the steps of each stream."""
        self.host.set_incarnation("actor 0", 1)
        server = make_replay(
            Start("replay", self.run, self.host),
            make_core(self.run, self.host),
            self.host.experience_source(),
            self.host.sample_sink(),
        )
        sink = self.host.experience_sink(0, 1)
        builder = ChunkBuilder(sink.store, STREAMS, actor=0, incarnation=1)
        everyone, never = np.ones(STREAMS, np.bool_), np.zeros(STREAMS, np.bool_)
        obs = np.zeros((STREAMS, 2), np.float32)
        obs[:, 0] = np.arange(STREAMS)

        def finish(call: Callable[[], int]) -> None:
            while True:
                done = call() == STREAMS
                closed = builder.take_closed()
                sink.commit(closed)
                if done:
                    return
                while (slots := sink.try_claim()) is None:
                    server.do_work()
                builder.provide(slots)

        finish(lambda: builder.begin(everyone, {"obs": obs}))
        steps = transitions // STREAMS
        rng = np.random.default_rng(0)
        for step in range(1, steps + 1):
            obs[:, 1] = step
            reward, error = obs[:, 0] + step % 7, rng.random(STREAMS)
            finish(
                lambda reward=reward, error=error: builder.add(  # type: ignore[misc]
                    {"obs": obs}, reward.astype(np.float64), never, never, priority=error
                )
            )
        while server.do_work():
            pass
        self.host.set_incarnation("actor 0", 0)
        server.do_work()
        server.close()
        return steps

    def order(self) -> ProcessSpec:
        """The replay's process, as `zapex train` starts it."""
        fds = [self.control.fd, self.experience.fd, *self.eventfds]
        order = Order(
            name="replay", run=dataclasses.asdict(self.run), control_fd=fds[0],
            experience_fd=fds[1], eventfds=self.eventfds, base={},
            started_ns=time.perf_counter_ns(),
        )  # fmt: skip
        return ProcessSpec(
            name="replay", argv=[sys.executable, "-m", "zapex.run.child", order.to_json()],
            log_path=self.run.run_dir / "replay.log", pass_fds=fds, env=thread_environment(1),
            restart=True,
        )  # fmt: skip

    def live(self) -> tuple[int, str]:
        """How many transitions are live, and a digest of where."""
        rows = self.host.store().header_rows
        live = rows[rows[:, STATE] == LIVE]
        return int(live[:, COUNT].sum()), hashlib.sha256(live.tobytes()).hexdigest()

    def answered(self) -> bool:
        """Whether a batch came; a row that was never written raises."""
        if self.source.poll(self.batch) is None:
            return False
        batch = self.batch
        stream, step = batch.obs[:, 0], batch.obs[:, 1]
        n, gamma = self.run.config.replay.n_step, self.run.config.replay.gamma
        reward = sum(gamma**k * (stream + (step + 1 + k) % 7) for k in range(n))
        wrong = (
            (batch.next_obs[:, 0] != stream)
            | (batch.next_obs[:, 1] != step + n)
            | (np.abs(batch.reward - reward) > 1e-3)
            | (step + n > self.steps)
        )
        if wrong.any() or (batch.keys < 0).any():
            raise RuntimeError(f"rows that nobody wrote: {np.flatnonzero(wrong)}")
        return True

    def wait_for_answer(self, supervisor: Supervisor, timeout_s: float) -> list[Any]:
        """The events until a batch has come."""
        events: list[Any] = []
        deadline_s = time.monotonic() + timeout_s
        if not self.source.outstanding:
            self.source.request()
        while not self.answered():
            events += supervisor.poll(0.0005)
            if time.monotonic() > deadline_s:
                log = (self.run.run_dir / "replay.log").read_text()
                raise RuntimeError(f"stuck: no batch within {timeout_s} s; {events}\n{log}")
        return events


def kill(memory: Memory, supervisor: Supervisor, timeout_s: float) -> dict[str, float]:
    """Seconds from the SIGKILL until the death is seen, the next life begins, and answers."""
    memory.source.request()  # it dies before, while or after it answers
    began = time.monotonic()
    os.kill(supervisor.pids["replay"], signal.SIGKILL)
    events = supervisor.poll(timeout_s)
    assert any(isinstance(e, Died) for e in events), events
    dead_s = time.monotonic() - began
    memory.host.set_incarnation("replay", 0)
    while memory.answered():  # by the life that is over
        pass
    events = supervisor.poll(timeout_s)
    assert any(isinstance(e, Started) for e in events), events
    started_s = time.monotonic() - began
    events = memory.wait_for_answer(supervisor, timeout_s)
    assert not any(isinstance(e, Died) for e in events), events
    return {
        "dead_s": dead_s,
        "started_s": started_s,
        "sampling_s": time.monotonic() - began,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Fill, kill again and again, say how soon it was back."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transitions", type=int, default=2_000_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the result to this file")
    options = parser.parse_args(argv)
    watch = Watch()
    moments = random.Random(options.seed)
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="zapex-restart-") as name:
        memory = Memory(Path(name), options.transitions)
        before = memory.live()
        print(f"{before[0]:,} transitions of {memory.experience.size_bytes / 2**20:.0f} MiB")
        with Supervisor() as supervisor:
            supervisor.start(memory.order())
            memory.wait_for_answer(supervisor, options.timeout_s)
            for i in range(options.kills):
                # A life of ten seconds and more is no short one: its successor is not held back.
                settle_s = 10.2 if options.kills > 3 else 0.0
                until = time.monotonic() + settle_s + moments.random()
                while time.monotonic() < until:
                    memory.wait_for_answer(supervisor, options.timeout_s)
                    time.sleep(0.02)
                found.append(kill(memory, supervisor, options.timeout_s))
                after = memory.live()
                if after != before:
                    raise RuntimeError(f"lost: {before[0]} live transitions, now {after[0]}")
                told = ", ".join(f"{key} {value:.3f}" for key, value in found[-1].items())
                print(f"kill {i + 1}: {told}", flush=True)
    sampling: NDArray[np.float64] = np.array([one["sampling_s"] for one in found])
    result = {
        "transitions": before[0],
        "kills": options.kills,
        "lost": 0,
        "torn": 0,
        "sampling_again_s": {
            "p50": round(float(np.median(sampling)), 3), "max": round(float(sampling.max()), 3),
        },
        "started_s_p50": round(float(np.median([one["started_s"] for one in found])), 3),
    }  # fmt: skip
    print(result)
    if options.json:
        add_json(options.json, "kills", "replay_restart", result, evidence(watch, None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
