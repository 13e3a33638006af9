"""A whole run beside an insider that has the key of an actor host."""

import re
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import Cluster, Part, cluster_in
from zapex.chunks.batch import aligned_zeros
from zapex.chunks.layout import ChunkLayout
from zapex.chunks.store import ChunkStore
from zapex.config.settings import Config
from zapex.envs.environments import check
from zapex.host.metrics import RoleMetrics
from zapex.net import keys as curve_keys
from zapex.net.keys import Security
from zapex.net.link import ZmqLink
from zapex.run.run import Membership, Run
from zapex.wire import control as m
from zapex.wire.header import as_buffer

SMALL = ["--env", "CartPole-v1", "--preset", "smoke", "--max-frames", "0"]
VALUES = [
    ("reward", np.inf), ("reward", np.nan), ("reward", 3e38), ("discount", np.nan),
    ("discount", 2.0), ("action", 99), ("action", -1), ("obs", np.nan), ("obs", 3e38),
    ("priority", np.nan), ("priority", 3e38),
]  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_in(tmp_path, SMALL) as made:
        yield made


class Insider:
    """A relay of its own making: it has the run's settings and the key."""

    def __init__(self, url: str, learner: Part, keys: Path) -> None:
        config = Config.from_dict(tomllib.loads((learner.run / "config.toml").read_text()))
        security = Security.load(str(keys), "relay", False)
        run = Run(config, check(config.env.env), learner.run)

        def link(form: object) -> ZmqLink:
            return ZmqLink(
                url, "relay", 77, 1, form, config.shared(), security,  # type: ignore[arg-type]
                schema_hash=run.form.schema.hash, actors=1,
            )  # fmt: skip

        asking = link(None)
        chunk = asking.open(60).chunk
        asking.close()
        run = replace(run, membership=Membership("learner", url, chunk=chunk))
        self.link, self.layout = link(run.form), ChunkLayout(run.form.schema, chunk)
        self.link.handlers[m.Kind.ACK] = lambda ack: setattr(self, "states", ack.actors)
        self.states = self.link.open(60).actors
        nbytes = ChunkStore.required_bytes(self.layout, 1)
        self.store = ChunkStore(aligned_zeros(nbytes), self.layout, 1)

    def lie(self, column: str, value: float) -> None:
        """A chunk with an impossible value, and counters that no actor reaches."""
        deadline = time.monotonic() + 60
        while not self.states["credit_bytes"][0]:
            self.link.do_work()
            time.sleep(0.01)
            assert time.monotonic() < deadline
        actor, incarnation, sequence, _ = self.states[0].tolist()
        for name in ("reward", "discount", "action", "obs", "priority"):
            self.store.column(0, name)[:] = 0
        self.store.column(0, column)[0] = value
        push = m.Push.of_chunks(
            self.layout, self.store.mem, [(self.store.body(0), 0, self.layout.chunk)],
            actor=actor, incarnation=max(1, incarnation), sequence=sequence,
        )  # fmt: skip
        assert self.link.send(m.BULK, push) is not None
        block = RoleMetrics(bytearray(RoleMetrics.required_bytes()), "actor", create=True)
        block.enter("environment")
        block.set("frames", 1e12)
        stats = m.Stats(actor, time.perf_counter_ns(), as_buffer(block.as_bytes()), as_buffer(b""))
        assert self.link.send(m.SMALL, stats) is not None
        while self.states["sequence"][0] == sequence:  # until it is acknowledged
            self.link.do_work()
            time.sleep(0.01)
            assert time.monotonic() < deadline


def refusals(replay: Part) -> int:
    """How many the replay's host has told of."""
    told = re.findall(r" sent .*: refused(?: \(([\d,]+) more since)?", replay.output)
    return sum(1 + int(more.replace(",", "") or 0) for more in told)


def goes_on(learner: Part, what: str) -> None:
    then = learner.snapshot()["totals"][what]
    learner.wait_for(lambda: learner.snapshot()["totals"][what] > then, what)


@pytest.mark.scenario
@pytest.mark.timeout(400)
def test_an_actors_key_ends_no_run(cluster: Cluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    curve_keys.make(keys)
    cluster.config += ["--keys", str(keys), "--max-frames", "10M"]
    replay = cluster.start("replay", "--actors", "2")
    learner = cluster.start("learner")
    host = cluster.start("actor", "--actors", "1")
    learner.wait_for(lambda: learner.snapshot()["totals"]["batches"] > 0, "batches")
    insider = Insider(cluster.url, learner, keys)
    for column, value in VALUES:
        insider.lie(column, value)
    lies = 2 * len(VALUES) - 1  # a value and counters each; the finite priority is lowered
    replay.wait_for(lambda: refusals(replay) >= lies, f"{lies} refusals")
    for what in ("batches", "frames"):
        goes_on(learner, what)
    assert learner.snapshot()["totals"]["frames"] < 10_000_000
    for part in (learner, replay, host):
        assert part.popen.poll() is None, part.output
        assert "Traceback" not in part.output + part.logs()
    insider.link.close()
