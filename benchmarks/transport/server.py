"""The replay's side of the transport benchmark: the real role over either transport."""

import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zapex.chunks.batch import aligned_zeros
from zapex.chunks.schema import Column, Schema
from zapex.fstack import Setup
from zapex.host.metrics import RoleMetrics
from zapex.host.roster import Roster
from zapex.library.prioritized import PrioritizedReplay
from zapex.machine.mailbox import Mailbox
from zapex.machine.segment import Segment
from zapex.machine.waiting import Waiter
from zapex.net import keys as curve_keys
from zapex.net.keys import Security
from zapex.net.replay_ends import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.net.server import LinkServer
from zapex.net.sockets import listen
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.roles.replay_server import ReplayServer
from zapex.shm_transport import HostMemory, HostPlan
from zapex.wire.protocol import Form

PARAMETER_BYTES = 4 * 3_292_837  # the dueling net of arXiv 2110.13506
PREFETCH = 2  # batches under way: the default of the setting
BETA = 0.4
_RENEW_S = 0.015
_LONGEST_WAIT_S = 0.2  # as a role's process waits


@dataclass(frozen=True)
class Setting:
    """What is moved. rows: transitions of each chunk of one push."""

    schema: Schema
    chunk: int
    rows: tuple[int, ...]
    batch: int
    parameter_bytes: int
    capacity: int
    actors: int = 1

    @property
    def layout(self) -> ReplayLayout:
        """Of the replay's memory."""
        streams = len(self.rows) * self.actors
        return ReplayLayout(self.schema, self.capacity, streams, self.chunk)

    @property
    def form(self) -> Form:
        """Of the messages."""
        return Form(self.layout.chunk_layout, self.batch, self.parameter_bytes)

    @property
    def plan(self) -> HostPlan:
        """Of the shared memory."""
        return HostPlan(
            replay=self.layout, actors=self.actors, envs_per_actor=len(self.rows),
            batch_size=self.batch, prefetch=PREFETCH, parameter_bytes=self.parameter_bytes,
            beta=BETA, eval_episodes=1,
        )  # fmt: skip


def atari(actors: int = 1, capacity: int = 40_000) -> Setting:
    """800 transitions a push, 512 a batch, and the 13.17 MB of parameters."""
    columns = {"obs": Column((84, 84), np.uint8, stack=4), "action": Column((), np.int64)}
    schema = Schema(columns, n_step=3, gamma=0.99)
    return Setting(schema, 64, (64,) * 12 + (32,), 512, PARAMETER_BYTES, capacity, actors)


def of_size(nbytes: int) -> Setting:
    """Chunks, batches and parameters of about so many bytes each."""
    chunk, batch = (64, 32) if nbytes >= 1 << 16 else (1, 1)
    item = max(1, nbytes // (chunk + 1))
    columns = {"obs": Column((item,), np.uint8), "action": Column((), np.int64)}
    schema = Schema(columns, n_step=1)
    return Setting(schema, chunk, (chunk,), batch, nbytes, 8 * chunk)


class Server:
    """The replay role over either transport; parameters are renewed as they are taken."""

    def __init__(
        self, setting: Setting, source: Any, sink: Any, experience: Any, metrics: RoleMetrics
    ) -> None:
        layout = setting.layout
        limits = LimiterConfig(
            samples_per_insert=0, tolerance=0, min_size_to_sample=setting.batch,
            batch=setting.batch, grant=len(setting.rows) * setting.chunk, capacity=layout.capacity,
        )  # fmt: skip
        replay, streams = self.replay(setting, experience), len(setting.rows)
        intake = Intake(source, replay, limits, streams_per_actor=streams)
        self.role = ReplayServer(replay, intake, source, sink, metrics, method="stratified")

    @staticmethod
    def replay(setting: Setting, experience: Any) -> ReplayCore:
        """Over the experience's memory."""
        return ReplayCore(setting.layout, seed=1, buffer=experience)


def serve(
    role: Any,
    wait: Callable[[Callable[[], object], float], bool],
    mailbox: Mailbox,
    taken: Callable[[], int],
) -> None:
    """A role, for ever; parameters are renewed `_RENEW_S` after `taken()` has grown."""
    value = np.zeros(mailbox.value_bytes, np.uint8)
    mailbox.publish(1, value)
    before, due_s = 0, math.inf
    while True:
        done = role.do_work()
        now, now_s = taken(), time.monotonic()
        if now != before:
            before, due_s = now, min(due_s, now_s + _RENEW_S)
        if now_s >= due_s:
            mailbox.publish(mailbox.version + 1, value)
            due_s = math.inf
        elif not done:
            wait(role.ready, min(due_s - now_s, _LONGEST_WAIT_S))


class NetworkServer:
    """A replay server's parts; all its memory is its own but the metrics `words`."""

    def __init__(
        self, setting: Setting, url: str, security: Security, words: Any = None,
        fstack: Setup | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """fstack: what fstack:// needs. more: for LinkServer."""
        actors, nbytes = setting.actors, setting.parameter_bytes
        experience = aligned_zeros(setting.layout.nbytes)
        experience[:] = 0  # populated
        store = Server.replay(setting, experience).store
        roster = Roster(aligned_zeros(Roster.required_bytes(actors)), actors, store.header_rows)
        mailbox = Mailbox(aligned_zeros(Mailbox.required_bytes(nbytes)), nbytes, create=True)
        self.mailbox = mailbox
        self.server = LinkServer(
            listen(url, security, setting.form.largest_request_bytes, fstack=fstack),
            setting.form, {}, roster, incarnation=time.time_ns(),
            params_version=lambda: mailbox.version, **more,
        )  # fmt: skip
        sink = ZmqSampleSink(self.server, store)
        self.parameters = ZmqParameters(self.server, mailbox)
        self.source = ZmqExperienceSource(self.server, store, [sink, self.parameters])
        if words is None:
            words = aligned_zeros(RoleMetrics.required_bytes())
        metrics = RoleMetrics(words, "replay", create=True)
        self.duty = Server(setting, self.source, sink, experience, metrics)


def serve_network(
    setting: Setting, url: str, security: Security, words: Any = None, fstack: Setup | None = None
) -> None:
    """A replay server, for ever."""
    made = NetworkServer(setting, url, security, words, fstack)
    serve(made.duty.role, made.server.wait, made.mailbox, lambda: made.parameters.counts["sent"])


def make_host(setting: Setting) -> HostMemory:
    """Shared memory of the replay and its clients, before they are forked."""
    plan = setting.plan
    control = Segment.create("bench-control", plan.nbytes)
    experience = Segment.create("bench-experience", plan.replay.nbytes)
    experience.populate()
    fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in plan.roles]
    host = HostMemory(plan, control.buffer, experience.buffer, fds, create=True)
    for actor in range(plan.actors):
        host.set_incarnation(f"actor {actor}", 1)
    host.set_incarnation("learner", 1)
    return host


def waiter(host: HostMemory, name: str) -> Callable[[Callable[[], object], float], bool]:
    """How a process of that name waits."""
    index = host.plan.role_index(name)
    return Waiter(host.sleeping, host.sleeping_word(name), host.eventfds[index]).wait


def serve_shm(setting: Setting, host: HostMemory) -> None:
    """A replay server over shared memory."""
    source, sink = host.experience_source(), host.sample_sink()
    parameters = host.mailbox()
    role = Server(setting, source, sink, host.experience, host.metrics("replay")).role
    serve(role, waiter(host, "replay"), parameters, itertools.count().__next__)


def securities(directory: Path | None) -> dict[str, Security]:
    """Of each role: with the keys in `directory`, or without."""
    if directory is None:
        open_ = Security(insecure_network=True)
        return dict.fromkeys((curve_keys.SERVER, *curve_keys.CLIENTS), open_)
    if not directory.exists():
        curve_keys.make(directory)
    roles = (curve_keys.SERVER, *curve_keys.CLIENTS)
    return {role: Security.load(str(directory), role, False) for role in roles}


def warm() -> None:
    """Compile (or load) every kernel before anybody is forked."""
    setting = of_size(64)
    replay = PrioritizedReplay(64, setting.schema, chunk=4)
    obs = np.zeros((8, 32), np.uint8)
    nothing = np.zeros(8, np.bool_)
    replay.extend(
        obs=obs, action=np.zeros(8, np.int64), reward=np.zeros(8, np.float32), next_obs=obs,
        terminated=nothing, truncated=nothing,
    )  # fmt: skip
    batch = replay.sample(4)
    replay.update_priorities(batch.keys, np.ones(4, np.float32))
