"""A replay server without a run: a child whose work a calibration measures.

It prints its address as a line of JSON, and serves until its parent ends it.
"""

import json
import sys
import time
from typing import Any

from zapex.chunks.batch import aligned_zeros
from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.host.metrics import RoleMetrics
from zapex.host.roster import Roster
from zapex.machine.child import child_setup
from zapex.machine.mailbox import Mailbox
from zapex.net.keys import Security
from zapex.net.replay_ends import ZmqExperienceSource, ZmqParameters, ZmqSampleSink
from zapex.net.server import LinkServer
from zapex.net.sockets import listen
from zapex.replay.core import ReplayCore, ReplayLayout
from zapex.replay.limiter import LimiterConfig
from zapex.roles.intake import Intake
from zapex.roles.replay_server import ReplayServer
from zapex.run.run import Run
from zapex.wire.header import Form

STREAMS = 16
"""Of the one actor host that pushes."""
_MEMORY_BYTES = 256 << 20  # more than the caches have
_WAIT_S = 0.2
CLOSED = Security()
"""Loopback, without keys."""


def layout_of(config: Config, spec: EnvironmentSpec) -> ReplayLayout:
    """Chunks as the run's, but few of them."""
    schema = spec.schema(config.replay.n_step, config.replay.gamma)
    chunk = config.chunk_transitions
    one = ReplayLayout(schema, chunk, STREAMS, chunk).chunk_layout.body_bytes
    rows = max(2 * STREAMS * chunk, 2 * config.learner.batch_size)
    capacity = min(config.replay.capacity, max(rows, _MEMORY_BYTES // one * chunk))
    return ReplayLayout(schema, capacity, STREAMS, chunk)


def form_of(run: Run, layout: ReplayLayout) -> Form:
    """Messages of the run's sizes."""
    return Form(layout.chunk_layout, run.config.learner.batch_size, run.plan.parameter_bytes)


def serve(run: Run) -> None:
    """For ever."""
    layout = layout_of(run.config, run.spec)
    form, batch = form_of(run, layout), run.config.learner.batch_size
    memory = aligned_zeros(layout.nbytes)
    memory[:] = 0  # populated
    replay = ReplayCore(layout, seed=1, buffer=memory)
    roster = Roster(aligned_zeros(Roster.required_bytes(1)), 1, replay.store.header_rows)
    words = aligned_zeros(Mailbox.required_bytes(form.parameter_bytes))
    mailbox = Mailbox(words, form.parameter_bytes, create=True)
    server = LinkServer(
        listen("tcp://127.0.0.1:0", CLOSED, form.largest_request_bytes), form, {}, roster,
        incarnation=time.time_ns(), params_version=lambda: mailbox.version,
    )  # fmt: skip
    sink = ZmqSampleSink(server, replay.store)
    source = ZmqExperienceSource(server, replay.store, [sink, ZmqParameters(server, mailbox)])
    limits = LimiterConfig(
        samples_per_insert=0, tolerance=0, min_size_to_sample=batch, batch=batch,
        grant=STREAMS * layout.chunk, capacity=layout.capacity,
    )  # fmt: skip
    intake = Intake(source, replay, limits, actors=1, streams_per_actor=STREAMS)
    metrics = RoleMetrics(aligned_zeros(RoleMetrics.required_bytes()), "replay", create=True)
    role = ReplayServer(replay, intake, source, sink, metrics, method=run.config.replay.sampling)
    print(json.dumps(server.url), flush=True)
    while True:
        if not role.do_work():
            server.wait(role.ready, _WAIT_S)


def main(text: str) -> None:
    """A child of `calibration`."""
    from pathlib import Path

    about: dict[str, Any] = json.loads(text)
    child_setup("calibration's replay")
    serve(Run(Config.from_dict(about["config"]), EnvironmentSpec(**about["spec"]), Path()))


if __name__ == "__main__":
    main(sys.argv[1])
