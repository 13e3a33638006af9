"""The same actor, replay and learner over each transport, all in one thread, step by step."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import fstack
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.schema import Column, Schema
from zapex.chunks.store import ChunkStore
from zapex.host.plan import HostPlan
from zapex.host.roster import Roster
from zapex.machine.mailbox import Mailbox
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.net.replay_ends import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.net.sample_source import ZmqSampleSource
from zapex.net.server import LinkServer
from zapex.net.sockets import listen
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.shm_transport import HostMemory
from zapex.wire.protocol import Form
from zapex.zmq_transport import ChunkSender, ZmqParameterSink, ZmqParameterSource

DEADLINE_S = 100.0  # a busy machine is no failure
STREAMS, BATCH, PARAMETER_BYTES, BETA = 2, 16, 1000, 0.4
SCHEMA = Schema(
    {"obs": Column((3, 2), np.uint8, stack=4), "action": Column((), np.int64),
     "mask": Column((2,), np.float32)},
    n_step=3, gamma=0.9,
)  # fmt: skip
NO_KEYS = Security(insecure_network=True)  # F-Stack's address is not loopback
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

    def replay(self) -> ReplayCore:
        return ReplayCore(self.layout, seed=1, buffer=self.experience)


def form_of(layout: ReplayLayout) -> Form:
    return Form(layout.chunk_layout, BATCH, PARAMETER_BYTES)


class NetworkReplay:
    """A replay server's process, without the process: made over a Memory, dropped, made again."""

    def __init__(
        self, memory: Memory, url: str, security: Security | None = None, *,
        large_bytes: int = 1 << 16, form: Form | None = None, more_ends: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """more_ends: each makes another end from this object. kwargs: for LinkServer."""
        layout = memory.layout
        self.replay = memory.replay()
        self.roster = Roster(memory.roster, memory.actors, self.replay.store.header_rows)
        self.mailbox = mailbox = Mailbox(memory.parameters, PARAMETER_BYTES)
        form = form or form_of(layout)
        self.listener = listen(
            url,
            security or NO_KEYS,
            form.largest_request_bytes,
            large_bytes=large_bytes,
            fstack=fstack.in_this_process(url),
        )
        self.server = LinkServer(
            self.listener, form, CONFIG, self.roster, incarnation=time.time_ns(),
            params_version=lambda: mailbox.version, **kwargs,
        )  # fmt: skip
        OPEN.append(self.server)
        self.url = self.server.url
        self.sink = ZmqSampleSink(self.server, self.replay.store)
        self.parameters = ZmqParameters(self.server, mailbox)
        ends = [self.sink, self.parameters, *(make(self) for make in more_ends)]
        self.source = ZmqExperienceSource(self.server, self.replay.store, ends)
        self.intake = make_intake(self.source, self.replay, memory.actors)

    def turn(self) -> None:
        self.intake.do_work(self.sink.issued, self.sink.released)

    def close(self) -> None:
        self.server.close()


def make_intake(source: Any, replay: ReplayCore, actors: int) -> Intake:
    layout = replay.layout
    streams = layout.streams // actors
    limits = LimiterConfig(
        samples_per_insert=0, min_size_to_sample=1, tolerance=0, batch=1,
        grant=streams * layout.chunk, capacity=layout.capacity,
    )  # fmt: skip
    return Intake(source, replay, limits, streams_per_actor=streams)


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
        url, role, host, kwargs.pop("incarnation", 1), kwargs.pop("form", form_of(layout)),
        kwargs.pop("config", CONFIG), kwargs.pop("security", NO_KEYS),
        schema_hash=layout.schema.hash, **kwargs,
    )  # fmt: skip
    OPEN.append(link)
    return link


@dataclass
class Rig:
    """Every end of one transport; `turn` is one round of all duty cycles.

    server, learner: of a network, the replay's server and the learner's link.
    """

    replay: ReplayCore
    intake: Intake
    experience_sink: Any
    sample_source: Any
    sample_sink: Any
    parameter_sink: Any
    parameter_source: Any
    pumps: list[Callable[[], object]] = field(default_factory=list)
    closers: list[Callable[[], object]] = field(default_factory=list)
    server: NetworkReplay | None = None
    learner: ZmqLink | None = None

    def turn(self) -> None:
        self.intake.do_work(self.sample_sink.issued, self.sample_sink.released)
        for pump in self.pumps:
            pump()

    def close(self) -> None:
        for close in self.closers:
            close()


def url_of(kind: str, directory: Path) -> str:
    """Where a server may listen."""
    if kind == "fstack":
        return fstack.url()
    return f"ipc://{directory}/replay" if kind == "ipc" else f"{kind}://127.0.0.1:0"


def make_rig(kind: str, directory: Path, capacity: int) -> Rig:
    layout = layout_of(capacity)
    if kind in ("tcp", "ipc", "zmtp", "fstack"):
        return _network_rig(Memory(layout, 1), url_of(kind, directory))
    plan = HostPlan(
        replay=layout, actors=1, envs_per_actor=STREAMS, batch_size=BATCH, prefetch=2,
        parameter_bytes=PARAMETER_BYTES, beta=BETA, eval_episodes=1,
    )  # fmt: skip
    fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in plan.roles]
    memory = Memory(layout, 1)
    host = HostMemory(plan, aligned_zeros(plan.nbytes), memory.experience, fds, create=True)
    replay = memory.replay()
    host.set_incarnation("actor 0", 1)
    parameters = host.mailbox(), host.mailbox()
    closers = [lambda fd=fd: os.close(fd) for fd in fds]
    source = host.experience_source()
    return Rig(
        replay, make_intake(source, replay, 1), host.experience_sink(0, 1),
        host.sample_source(), host.sample_sink(), *parameters, closers=closers,
    )  # fmt: skip


class SlotSink:
    """An actor and its relay in one: chunks are built in slots of its own and sent from there."""

    def __init__(self, link: Any, store: ChunkStore, slots: int) -> None:
        self.store, self._link = store, link
        self._sender = ChunkSender(link, store)
        self._free = deque(range(slots))

    def try_claim(self) -> np.ndarray | None:
        self.do_work()
        if len(self._free) < STREAMS:
            return None
        return np.array([self._free.popleft() for _ in range(STREAMS)], np.int64)

    def commit(self, slots: np.ndarray) -> None:
        self._sender.offer(slots)
        self.do_work()

    def do_work(self) -> None:
        self._link.do_work()
        self._sender.do_work()
        self._free.extend(self._sender.take_freed())


def store_of(layout: ReplayLayout, slots: int) -> ChunkStore:
    nbytes = ChunkStore.required_bytes(layout.chunk_layout, slots)
    return ChunkStore(aligned_zeros(nbytes), layout.chunk_layout, slots)


def _network_rig(memory: Memory, url: str) -> Rig:
    layout = memory.layout
    server = NetworkReplay(memory, url)
    relay = make_link(server.url, "relay", 1, layout, actors=1)
    learner = make_link(server.url, "learner", 2, layout)
    slots = 3 * STREAMS
    sink = SlotSink(relay, store_of(layout, slots), slots)
    sources = ZmqParameterSink(learner), ZmqParameterSource(relay)
    source = ZmqSampleSource(learner, BETA)
    rig = Rig(
        server.replay, server.intake, sink, source, server.sink, *sources,
        pumps=[sink.do_work, learner.do_work], closers=[relay.close, learner.close, server.close],
        server=server, learner=learner,
    )  # fmt: skip
    until(lambda: relay.is_open and learner.is_open, rig.turn, "welcomes")
    return rig
