"""The same actor, replay and learner over each transport, all in one thread, turned by hand."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zapex.batch import Batch, aligned_zeros
from zapex.chunk_store import NO_KEY, ChunkStore
from zapex.host_plan import HostPlan
from zapex.intake import Intake
from zapex.message_header import Form
from zapex.rate_limiter import LimiterConfig
from zapex.replay import Draw, PrioritizedReplay, ReplayLayout, importance_weights
from zapex.roster import Roster
from zapex.schema import Column, Schema
from zapex.shm_mailbox import Mailbox
from zapex.shm_transport import Host
from zapex.transport import Life, Sampled
from zapex.zmq_client import ZmqLink
from zapex.zmq_replay import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.zmq_samples import ZmqSampleSource
from zapex.zmq_server import ZmqServer
from zapex.zmq_socket import Security
from zapex.zmq_transport import (
    ZmqExperienceSink,
    ZmqParameterSink,
    ZmqParameterSource,
)

DEADLINE_S = 100.0  # a busy machine is no failure
STREAMS, BATCH, PARAMETER_BYTES, BETA = 2, 16, 1000, 0.4
SCHEMA = Schema(
    {"obs": Column((3, 2), np.uint8, stack=4), "action": Column((), np.int64),
     "mask": Column((2,), np.float32)},
    n_step=3, gamma=0.9,
)  # fmt: skip
CONFIG = {"env": "game", "gamma": 0.9}


def layout_of(capacity: int, streams: int = STREAMS) -> ReplayLayout:
    return ReplayLayout(SCHEMA, capacity, streams, chunk=8)


def until(ready: Callable[[], object], turn: Callable[[], object], what: str = "") -> None:
    """Turn until it is so; a test that would hang fails instead."""
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        turn()
        time.sleep(0.0002)  # libzmq's threads, and a link's, need the core too
        assert time.monotonic() < deadline, f"waited for {what or ready}"


class Memory:
    """What a parent owns: it outlives servers made over it."""

    def __init__(self, layout: ReplayLayout, actors: int) -> None:
        self.layout, self.actors = layout, actors
        self.experience = aligned_zeros(layout.nbytes)
        self.roster = aligned_zeros(Roster.required_bytes(actors))
        self.parameters = aligned_zeros(Mailbox.required_bytes(PARAMETER_BYTES))
        Mailbox(self.parameters, PARAMETER_BYTES, create=True)

    def replay(self) -> PrioritizedReplay:
        layout = self.layout
        return PrioritizedReplay(
            layout.capacity, layout.schema, seed=1, streams=layout.streams, chunk=layout.chunk,
            buffer=self.experience,
        )  # fmt: skip


def form_of(layout: ReplayLayout) -> Form:
    return Form(layout.chunk_layout, BATCH, PARAMETER_BYTES)


class NetworkReplay:
    """A replay server's process, without the process: made over a Memory, dropped, made again."""

    def __init__(
        self, memory: Memory, url: str, security: Security | None = None, **kwargs: Any
    ) -> None:
        layout = memory.layout
        self.replay = memory.replay()
        self.roster = Roster(memory.roster, memory.actors, self.replay.store.header_rows)
        mailbox = Mailbox(memory.parameters, PARAMETER_BYTES)
        self.server = ZmqServer(
            url, form_of(layout), CONFIG, self.roster, security or Security(),
            incarnation=time.time_ns(), params_version=lambda: mailbox.version, **kwargs,
        )  # fmt: skip
        OPEN.append(self.server)
        self.url = self.server.url
        self.source = ZmqExperienceSource(self.server, self.replay.store)
        self.sink = ZmqSampleSink(self.server, self.replay.store)
        self.parameters = ZmqParameters(self.server, mailbox)
        self.intake = make_intake(self.source, self.replay, memory.actors)

    def turn(self) -> None:
        self.intake.do_work(self.sink.issued, self.sink.released)

    def close(self) -> None:
        self.server.close()


def make_intake(source: Any, replay: PrioritizedReplay, actors: int) -> Intake:
    layout = replay.layout
    streams = layout.streams // actors
    limits = LimiterConfig(
        samples_per_insert=0, min_size=1, tolerance=0, grant=streams * layout.chunk, batch=1,
        capacity=layout.capacity,
    )  # fmt: skip
    return Intake(source, replay, limits, actors=actors, streams_per_actor=streams)


def goes_on(script: str) -> bool:
    """A process of its own, which may hang or abort, runs `script` to its last line."""
    command = [sys.executable, "-c", script + 'print("goes on")']
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "goes on\n", done.stderr
    return True


OPEN: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """A test that fails closes nothing, and a server that is kept by its traceback listens on."""
    yield
    while OPEN:
        OPEN.pop().close()


def make_link(url: str, role: str, host: int, layout: ReplayLayout, **kwargs: Any) -> ZmqLink:
    link = ZmqLink(
        url, role, host, kwargs.pop("incarnation", 1), form_of(layout),
        kwargs.pop("config", CONFIG), kwargs.pop("security", Security()),
        schema_hash=layout.schema.hash, **kwargs,
    )  # fmt: skip
    OPEN.append(link)
    return link


class Direct:
    """In process: no transport at all. Slots and draws are handed over as they are."""

    outstanding = 0

    def __init__(self, replay: PrioritizedReplay) -> None:
        self.store, self._replay = replay.store, replay
        self._grants: deque[np.ndarray] = deque()
        self._commits: list[int] = []
        self._draws: deque[Draw] = deque()
        self._asked = self.issued = self.released = 0
        self._updates: list[Any] = []
        self._here = [Life(0, 1)]

    def lives(self) -> list[Life]:
        here, self._here = self._here, []
        return here

    def committed(self, actor: int) -> np.ndarray:
        slots, self._commits = self._commits, []
        return np.array(slots, np.int64)

    def has_room(self, actor: int, count: int) -> bool:
        return True

    def next_grant(self, actor: int) -> int:
        return 0

    def grant(self, actor: int, incarnation: int, slots: np.ndarray) -> None:
        self._grants.append(slots)

    def try_claim(self) -> np.ndarray | None:
        return self._grants.popleft() if self._grants else None

    def commit(self, slots: np.ndarray) -> None:
        self._commits += slots.tolist()

    def request(self) -> None:
        self._asked += 1

    def requests(self) -> int:
        return self._asked

    def answer(self, draw: Draw) -> None:
        self._asked -= 1
        self._draws.append(draw)

    def poll(self, batch: Batch, following: Batch | None = None) -> Sampled | None:
        if not self._draws:
            return None
        draw = self._draws.popleft()
        batch.indices[:] = draw.indices
        batch.weights[:] = importance_weights(draw.leaves, BETA)
        torn = self._replay.store.gather(draw.keys, batch.layout, batch.memory, batch.keys)
        assert NO_KEY not in batch.keys
        return Sampled(torn, draw.count)

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> bool:
        self._updates.append((keys, priorities))
        return True

    def updates(self) -> list[Any]:
        updates, self._updates = self._updates, []
        return updates


@dataclass
class Rig:
    """Every face of one transport; `turn` is one round of all duty cycles."""

    replay: PrioritizedReplay
    intake: Intake
    experience_sink: Any
    sample_source: Any
    sample_sink: Any
    parameter_sink: Any
    parameter_source: Any
    pumps: list[Callable[[], object]] = field(default_factory=list)
    closers: list[Callable[[], object]] = field(default_factory=list)

    def turn(self) -> None:
        self.intake.do_work(self.sample_sink.issued, self.sample_sink.released)
        for pump in self.pumps:
            pump()

    def close(self) -> None:
        for close in self.closers:
            close()


def make_rig(kind: str, directory: Path, capacity: int) -> Rig:
    layout = layout_of(capacity)
    if kind in ("tcp", "ipc"):
        url = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{directory}/replay"
        return _network_rig(Memory(layout, 1), url)
    plan = HostPlan(
        replay=layout, actors=1, envs_per_actor=STREAMS, batch_size=BATCH, prefetch=2,
        parameter_bytes=PARAMETER_BYTES, beta=BETA, eval_episodes=1,
    )  # fmt: skip
    fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in plan.roles]
    memory = Memory(layout, 1)
    host = Host(plan, aligned_zeros(plan.nbytes), memory.experience, fds, create=True)
    replay = memory.replay()
    host.set_life("actor 0", 1)
    parameters = host.parameter_sink(), host.parameter_source()
    closers = [lambda fd=fd: os.close(fd) for fd in fds]
    if kind == "shm":
        source = host.experience_source()
        return Rig(
            replay, make_intake(source, replay, 1), host.experience_sink(0, 1),
            host.sample_source(), host.sample_sink(), *parameters, closers=closers,
        )  # fmt: skip
    direct = Direct(replay)
    return Rig(
        replay, make_intake(direct, replay, 1), direct, direct, direct, *parameters,
        closers=closers,
    )  # fmt: skip


def _network_rig(memory: Memory, url: str) -> Rig:
    layout = memory.layout
    server = NetworkReplay(memory, url)
    relay = make_link(server.url, "relay", 1, layout, actors=1)
    learner = make_link(server.url, "learner", 2, layout)
    slots = 3 * STREAMS
    store = ChunkStore(
        aligned_zeros(ChunkStore.required_bytes(layout.chunk_layout, slots)),
        layout.chunk_layout, slots,
    )  # fmt: skip
    sink = ZmqExperienceSink(relay, store, streams=STREAMS, slots=range(slots))
    sources = ZmqParameterSink(learner), ZmqParameterSource(relay)
    source = ZmqSampleSource(learner, BETA)
    rig = Rig(
        server.replay, server.intake, sink, source, server.sink, *sources,
        pumps=[sink.ready, learner.do_work], closers=[relay.close, learner.close, server.close],
    )  # fmt: skip
    until(lambda: relay.is_open and learner.is_open, rig.turn, "welcomes")
    return rig
