"""A run with two replays, its commands as real processes: one shard is killed and comes back."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.parts import (
    Cluster,
    Part,
    cluster_in,
    free_port,
    memory_of,
    settled,
)  # fmt: skip

SMALL = ["--env", "CartPole-v1", "--preset", "smoke", "--max-frames", "0", "--prefetch", "3"]
SMALL += ["--capacity", "20k"]
GRACE_S = 60.0  # of five: a busy machine is no failure


class Shards:
    """The parts of a run with two shards."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.urls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.replays = [self.replay(shard) for shard in range(2)]
        cluster.url = ",".join(self.urls)
        self.actors = cluster.start("actor", "--actors", "2")
        self.learner = cluster.start("learner")

    def replay(self, shard: int) -> Part:
        self.cluster.url = self.urls[shard]
        words = ["--actors", "2", "--shards", "2", "--shard", str(shard)]
        part = self.cluster.start("replay", *words)
        self.cluster.url = ",".join(self.urls)
        return part

    def counts(self) -> dict[str, float]:
        learner, relay = self.learner.snapshot(), self.actors.snapshot()["relay"]
        return {
            "batches": learner["totals"]["batches"],
            "acknowledged": relay.get("acknowledged", 0),
        }

    def goes_on(self, what: str) -> None:
        """The learner learns, and what the actors play arrives."""
        before = self.counts()
        for name, more in (("batches", 30), ("acknowledged", 5)):
            self.learner.wait_for(
                lambda name=name, more=more: self.counts()[name] > before[name] + more,
                f"{name} after {what}\n{self.actors.output}",
            )


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Shards]:
    with cluster_in(tmp_path, SMALL) as cluster:
        yield Shards(cluster)


def inserted(part: Part) -> int:
    return int(part.snapshot()["replay"].get("inserted", 0))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_while_shard_0_is_gone_play_goes_on_and_a_limit_ends_all_hosts(shards: Shards) -> None:
    first, second = shards.replays
    shards.learner.wait_for(lambda: shards.counts()["batches"] > 0, "a batch")
    second.wait_for(lambda: inserted(second) > 0, "transitions at shard 1")
    shards.goes_on("its start")
    kept = memory_of(second, shards.urls[1])
    first.children()
    first.popen.kill()
    first.popen.wait(10)
    shards.actors.wait_to_say("its actors go to the others")
    shards.goes_on("the death of shard 0")
    settled(kept)
    # A host that comes now waits for shard 0, and says so.
    comes = shards.cluster.start("actor", "--actors", "1")
    comes.wait_to_say(f"waiting for the replay at {shards.urls[0]}")
    comes.ends(GRACE_S, signal.SIGINT)

    first = shards.replay(0)
    first.wait_to_say("a host with actors")
    shards.goes_on("another shard 0")
    assert shards.learner.ends(GRACE_S, signal.SIGINT) in (0, 130)
    limit = str(int(shards.learner.snapshot()["totals"]["frames"]) + 100)
    shards.cluster.start("learner", "--resume", str(shards.learner.run), "--max-frames", limit)
    for part in (shards.actors, first, second):
        assert part.ends(GRACE_S * 2) == 0, part.output
        assert re.search(r"the run is over: [\d,]+ frames are played", part.output)
