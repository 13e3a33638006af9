"""What many actors on one host cost while little happens: the replay's look, the parent's tick.

    zapex bench many_actors [--actors 128] [--seconds 10] [--json FILE] [--quick]

Real memory, rings, builder, replay server, supervisor and collector. The actors are forked, have
neither torch nor games, and commit real chunks of frames, but seldom, so that most looks find
nothing. A look is the question of the sleeping replay whether there is work; with each wakeup comes
a duty cycle, too. A tick is the processor time of one round of the parent's loop, ten of them a
second, with what it shows and records; its mean is of each of five windows.
"""

import contextlib
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.harness import arguments, clock_ns, goal, percentiles, write_json
from zapex.chunks.builder import ChunkBuilder
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.machine.segment import Segment
from zapex.processes.child import child_setup
from zapex.processes.restarts import ProcessSpec
from zapex.processes.supervisor import Supervisor
from zapex.run.collector import Collector
from zapex.run.run import Run
from zapex.run.topology import Start, make_replay
from zapex.shm_transport import HostMemory

_LOOK_US, _TICK_MS = 30.0, 0.5
_STREAMS, _FRAME = 2, (84, 84)
_STEP_S = 0.5  # of each actor
_PAUSE_S = 2e-3  # of the replay between two looks
_TICK_S = 0.1
_WINDOWS = 5
_SAMPLES = 1 << 16
_START_S = 120.0
_WARM_UP_S = 7.0  # the first record imports TensorBoard
_SPEC = EnvironmentSpec(
    env_id="frames", env_kwargs={}, observation_shape=(4, *_FRAME), observation_dtype="uint8",
    stack=4, num_actions=4, frames_per_step=1, atari=False, describe="frames of noise",
)  # fmt: skip


class Looks:
    """Durations that the forked replay leaves for the benchmark, ns."""

    def __init__(self) -> None:
        words = np.frombuffer(mmap.mmap(-1, 8 * (2 * _SAMPLES + 1)), np.int64)
        self.count, self._times = words[:1], words[1:].reshape(2, _SAMPLES)

    def add(self, cycle_ns: int, ready_ns: int) -> None:
        self._times[:, self.count[0] % _SAMPLES] = cycle_ns, ready_ns
        self.count[0] += 1

    def us(self) -> tuple[list[float], list[float]]:
        """Duty cycles, and questions whether there is something to do."""
        cycles, ready = (self._times[:, : min(int(self.count[0]), _SAMPLES)] / 1e3).tolist()
        return cycles, ready


def play(host: HostMemory, actor: int, incarnation: int) -> None:
    """Commit chunks of noise for ever, a step in half a second."""
    sink = host.experience_sink(actor, incarnation)
    first = actor * _STREAMS
    builder = ChunkBuilder(
        sink.store, _STREAMS, actor=actor, incarnation=incarnation, first_stream=first,
        max_chunk_age_steps=128,
    )  # fmt: skip
    metrics = host.metrics(f"actor {actor}")
    rng = np.random.default_rng(actor)
    everyone, flags = np.ones(_STREAMS, np.bool_), np.zeros(_STREAMS, np.int64)
    reward, value = np.zeros(_STREAMS), np.ones(_STREAMS)
    obs: NDArray[Any] = np.zeros((_STREAMS, 4, *_FRAME), np.uint8)

    def until_done(call: Callable[[], int]) -> None:
        while call() < _STREAMS:
            metrics.enter("wait")
            slots = sink.try_claim()
            if slots is None:
                time.sleep(_PAUSE_S)
            else:
                builder.provide(slots)

    until_done(lambda: builder.begin(everyone, {"obs": obs}))
    while True:
        metrics.enter("environment")
        time.sleep(_STEP_S * rng.uniform(0.8, 1.2))
        obs[:, :-1] = obs[:, 1:]
        obs[:, -1] = rng.integers(0, 256, (_STREAMS, *_FRAME), np.uint8)
        builder.staged["action"] = 0
        until_done(lambda: builder.add(everyone, flags, {"obs": obs}, reward, priority=value))
        metrics.enter("push")
        closed = builder.take_closed()
        if len(closed):
            sink.commit(closed)
            metrics.add("chunks", len(closed))
        metrics.add("steps", _STREAMS)


def serve(run: Run, host: HostMemory, looks: Looks) -> None:
    """The replay server; it times the looks that find nothing."""
    server = make_replay(Start("replay", run, host))
    while True:
        start = clock_ns()
        work = server.do_work()
        middle = clock_ns()
        ready = server.ready()
        if not work and not ready:
            looks.add(middle - start, clock_ns() - middle)
            time.sleep(_PAUSE_S)


class _Forked:
    """Stands in for subprocess.Popen: a fork shares the pages of the compiler."""

    def __init__(self, work: Callable[[], None], env: dict[str, str], name: str) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.environ.update(env)
                child_setup(name)
                work()
            finally:
                os._exit(70)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class _ForkingSupervisor(Supervisor):
    """The real one, but for how a process comes into being."""

    def __init__(self, works: dict[str, Callable[[], None]], **settings: Any) -> None:
        super().__init__(**settings)
        self._works = works

    def _execute(self, spec: ProcessSpec, env: dict[str, str], log: Any) -> Any:
        return _Forked(self._works[spec.name], env, spec.name)


def measure(actors: int, seconds: float, directory: Path) -> dict[str, Any]:
    """Looks and ticks beside so many actors. seconds: of each window."""
    capacity = 4 * 16 * _STREAMS * actors  # chunks of 4 transitions
    config = Config().replace(
        actors=actors, envs_per_actor=_STREAMS, capacity=capacity, learning_starts=512,
        eval_period_s=0.0, plain=True,
    )  # fmt: skip
    run, looks = Run(config, _SPEC, directory), Looks()
    plan = run.plan
    with contextlib.ExitStack() as held:
        blocks = (plan.nbytes, plan.experience_bytes)
        memory = [held.enter_context(Segment.create("many actors", n)).buffer for n in blocks]
        eventfds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in plan.roles]
        for fd in eventfds:
            held.callback(os.close, fd)
        host = HostMemory(plan, memory[0], memory[1], eventfds, create=True)
        works: dict[str, Callable[[], None]] = {"replay": lambda: serve(run, host, looks)}
        for i in range(actors):
            works[f"actor {i}"] = lambda i=i: play(host, i, host.incarnation(f"actor {i}"))
        roles = {name: host.metrics(name) for name in works}
        make_replay(Start("replay", run, host))  # compiles what the forked ones need
        supervisor = held.enter_context(
            _ForkingSupervisor(works, is_up=lambda name, pid: roles[name].pid == pid)
        )
        for name in works:  # the memory's words first: a forked actor reads its incarnation there
            host.set_incarnation(name, time.time_ns())
            supervisor.start(ProcessSpec(name=name, argv=[], log_path=directory / "log"))
        collector = held.enter_context(Collector(run, host, {}))
        chunks = [block for name, block in roles.items() if name != "replay"]
        before = time.monotonic()
        while any(not block.value("steps") for block in chunks):
            if time.monotonic() > before + _START_S:
                raise TimeoutError("not every actor has made a step")
            supervisor.poll(_TICK_S)
        _ticks(supervisor, collector, _WARM_UP_S)
        looks.count[0] = 0
        windows = [_ticks(supervisor, collector, seconds) for _ in range(_WINDOWS)]
        committed = sum(block.value("chunks") for block in chunks)
        collector.monitor.close()
    cycles, ready = looks.us()
    return {
        "actors": actors,
        "chunks": committed,
        "replay_cycle_us": percentiles(cycles),
        "replay_look_us": percentiles(ready),
        "parent_tick_ms": {
            **percentiles([tick for ticks in windows for tick in ticks], 1e6),
            "mean": percentiles([float(np.mean(ticks)) for ticks in windows], 1e6),
        },
    }


def _ticks(supervisor: Supervisor, collector: Collector, seconds: float) -> list[float]:
    """Processor time of each round of the parent's loop, ns."""
    end, ticks = time.monotonic() + seconds, []
    while time.monotonic() < end:
        start = time.thread_time_ns()
        events = supervisor.poll(_TICK_S)
        if events:
            raise RuntimeError(f"a process ended or stopped: {events[0]}")
        collector.collect()
        collector.take_notices()
        collector.monitor.tick()
        ticks.append(float(time.thread_time_ns() - start))
    return ticks


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--actors", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of five windows")
    options = parser.parse_args()
    if options.quick:
        options.actors, options.seconds = min(options.actors, 8), min(options.seconds, 0.8)
    with (
        tempfile.TemporaryDirectory(prefix="zapex-many-") as directory,
        contextlib.redirect_stdout(sys.stderr),  # the collector's lines
    ):
        results = measure(options.actors, options.seconds, Path(directory))
    look, cycle, tick = (
        results[name] for name in ("replay_look_us", "replay_cycle_us", "parent_tick_ms")
    )
    print(f"{results['actors']} actors, p50 (p90): a look of the replay {look['p50']:.1f} "
          f"({look['p90']:.1f}) us, a cycle without work {cycle['p50']:.1f} "
          f"({cycle['p90']:.1f}) us, a tick {tick['p50']:.3f} ({tick['p90']:.3f}) ms, "
          f"mean {tick['mean']['p50']:.3f} ms")  # fmt: skip
    print(goal("idle look of the replay", look["p50"], _LOOK_US, " us"))
    print(goal("the parent, a tick", tick["mean"]["p50"], _TICK_MS, " ms"))
    write_json(options, "many_actors", results, rounds=_WINDOWS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
