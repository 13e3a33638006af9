"""The replay's side of the benchmarks of transports: the real role over either of them."""

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


def make_role(
    setting: Setting, replay: ReplayCore, source: Any, sink: Any, metrics: RoleMetrics
) -> ReplayServer:
    """The replay role over either transport."""
    layout, streams = setting.layout, len(setting.rows)
    limits = LimiterConfig(
        samples_per_insert=0, tolerance=0, min_size_to_sample=setting.batch,
        batch=setting.batch, grant=streams * setting.chunk, capacity=layout.capacity,
    )  # fmt: skip
    intake = Intake(source, replay, limits, streams_per_actor=streams)
    return ReplayServer(replay, intake, source, sink, metrics, method="stratified")


class NetworkServer:
    """A replay server's parts; all its memory is its own but the metrics `words`.

    fstack: what fstack:// needs.
    """

    def __init__(
        self, setting: Setting, url: str, security: Security, words: Any = None,
        fstack: Setup | None = None,
    ) -> None:  # fmt: skip
        actors, nbytes = setting.actors, setting.parameter_bytes
        experience = aligned_zeros(setting.layout.nbytes)
        experience[:] = 0  # populated
        replay = ReplayCore(setting.layout, seed=1, buffer=experience)
        roster = Roster(
            aligned_zeros(Roster.required_bytes(actors)), actors, replay.store.header_rows
        )
        self.mailbox = Mailbox(aligned_zeros(Mailbox.required_bytes(nbytes)), nbytes, create=True)
        self.server = LinkServer(
            listen(url, security, setting.form.largest_request_bytes, fstack=fstack),
            setting.form, {}, roster, incarnation=time.time_ns(),
            params_version=lambda: self.mailbox.version,
        )  # fmt: skip
        sink = ZmqSampleSink(self.server, replay.store)
        self.parameters = ZmqParameters(self.server, self.mailbox)
        source = ZmqExperienceSource(self.server, replay.store, [sink, self.parameters])
        if words is None:
            words = aligned_zeros(RoleMetrics.required_bytes())
        metrics = RoleMetrics(words, "replay", create=True)
        self.role = make_role(setting, replay, source, sink, metrics)

    def serve(self) -> None:
        """For ever; parameters come from the learner."""
        while True:
            if not self.role.do_work():
                self.server.wait(self.role.ready, _LONGEST_WAIT_S)

    def serve_and_renew(self) -> None:
        """For ever; parameters are renewed `_RENEW_S` after they were taken."""
        value = np.zeros(self.mailbox.value_bytes, np.uint8)
        self.mailbox.publish(1, value)
        before, due_s = 0, math.inf
        while True:
            done = self.role.do_work()
            now, now_s = self.parameters.counts["sent"], time.monotonic()
            if now != before:
                before, due_s = now, min(due_s, now_s + _RENEW_S)
            if now_s >= due_s:
                self.mailbox.publish(self.mailbox.version + 1, value)
                due_s = math.inf
            elif not done:
                self.server.wait(self.role.ready, min(due_s - now_s, _LONGEST_WAIT_S))


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
    columns = {"obs": Column((32,), np.uint8), "action": Column((), np.int64)}
    replay = PrioritizedReplay(64, Schema(columns, n_step=1), chunk=4)
    obs = np.zeros((8, 32), np.uint8)
    nothing = np.zeros(8, np.bool_)
    replay.extend(
        obs=obs, action=np.zeros(8, np.int64), reward=np.zeros(8, np.float32), next_obs=obs,
        terminated=nothing, truncated=nothing,
    )  # fmt: skip
    batch = replay.sample(4)
    replay.update_priorities(batch.keys, np.ones(4, np.float32))
