"""The whole way of a chunk: an actor's process hands it over, the replay's makes it sampleable."""

import os
import time
from typing import Any

import numpy as np

from benchmarks.support.harness import clock_ns, percentiles
from benchmarks.support.processes import reap, start_beside
from benchmarks.transport.server import Setting, make_host
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.builder import ChunkBuilder
from zapex.chunks.schema import Column, Schema
from zapex.machine.segment import Segment
from zapex.replay.core import ReplayCore
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.shm_transport import HostMemory

CHUNK = 64
INCARNATION = 1
STACK = 4
_MEMORY_BYTES = 256 << 20


def _setting(frame_bytes: int) -> Setting:
    """Observations of four frames; as many chunks as fit a fixed memory, 8 to 256."""
    columns = {"obs": Column((frame_bytes,), np.uint8, stack=STACK), "action": Column((), np.int64)}
    chunks = max(8, min(256, _MEMORY_BYTES // (CHUNK * frame_bytes)))
    return Setting(Schema(columns), CHUNK, (CHUNK,), 512, 64, chunks * CHUNK)


def _make_intake(host: HostMemory) -> Intake:
    layout = host.plan.replay
    replay = ReplayCore(layout, buffer=host.experience)
    limiter = LimiterConfig(
        samples_per_insert=0, tolerance=0, min_size_to_sample=1, grant=CHUNK, batch=1,
        capacity=layout.capacity,
    )  # fmt: skip
    source = host.experience_source()
    return Intake(source, replay, limiter, actors=1, streams_per_actor=1)


def measure(seconds: float, frames_bytes: int = CHUNK * 84 * 84) -> dict[str, Any]:
    """Microseconds of writing 64 steps, and from their commit until they are sampleable.

    frames_bytes: of the steps' frames, each stored once; a multiple of 64. The replay polls.
    Sampleable: in the sum tree, its leaves set.
    """
    frame_bytes = frames_bytes // CHUNK
    host = make_host(_setting(frame_bytes))
    intake = _make_intake(host)
    done = Segment.create("bench-done", 4096).buffer[:16].view(np.int64)  # inserted, and when

    def serve() -> None:
        before = intake.inserted
        intake.do_work(0, 0)
        if intake.inserted != before:
            done[1] = clock_ns()
            done[0] = intake.inserted

    sink = host.experience_sink(0, INCARNATION)
    builder = ChunkBuilder(sink.store, 1, actor=0, incarnation=INCARNATION)
    obs = {"obs": aligned_zeros(STACK * frame_bytes).reshape(1, STACK, frame_bytes)}
    everyone, flags, reward = np.ones(1, np.bool_), np.zeros(1, np.int64), np.zeros(1)
    begun = False

    def write_chunk() -> np.ndarray:
        """Steps until a chunk closes: its slot."""
        nonlocal begun
        while True:
            if builder.spares == 0:
                slots = sink.try_claim()
                if slots is not None:
                    builder.provide(slots)
            if not begun:
                begun = builder.begin(everyone, obs) == 1
            elif builder.add(everyone, flags, obs, reward) < 1:
                continue  # no slot yet
            closed = builder.take_closed()
            if closed.size:
                return closed

    for _turn in range(3):  # everything compiled before the fork
        while not (sink.ready() or builder.spares):
            serve()
        sink.commit(write_chunk())
        serve()
    pid = start_beside(serve)
    writes: list[float] = []
    pushes: list[float] = []
    expected = int(done[0])
    stop = time.monotonic() + seconds
    while len(pushes) < 8 or time.monotonic() < stop:
        start = clock_ns()
        slots = write_chunk()
        written = clock_ns()
        sink.commit(slots)
        expected += CHUNK
        while done[0] < expected:
            os.sched_yield()
        writes.append(written - start)
        pushes.append(int(done[1]) - written)
    reap(pid)
    return {"write_us": percentiles(writes[2:], 1000), "push_us": percentiles(pushes[2:], 1000)}
