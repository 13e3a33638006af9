"""Replay and learner on one host, actors on another: `zapex replay --with-learner`."""

import signal
from pathlib import Path

import pytest

from tests.support.parts import cluster_in
from zapex.run import checkpoints

SMALL = ["--env", "CartPole-v1", "--preset", "smoke", "--eval-period-s", "2"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_it_trains_with_actors_of_other_hosts_and_its_limit_ends_them_too(tmp_path: Path) -> None:
    with cluster_in(tmp_path, SMALL) as cluster:
        both = cluster.start("replay", "--with-learner", "--actors", "2", "--max-frames", "3000")
        both.wait_to_say("waiting for actors")
        second = cluster.start("learner")
        assert second.ends(110) == 2
        assert "this replay has its learner on its own host" in second.output
        both.wait_for(lambda: both.snapshot()["learner"].get("params_version", 0) > 0, "a learner")
        both.kill_child("learner")  # its new incarnation learns
        actor = cluster.start("actor", "--actors", "1")
        both.wait_for(lambda: "3,000 frames are played" in both.output, "its limit")
        assert both.ends(60) == 0
        assert actor.ends(60) == 0
        assert "the run is over: 3,000 frames are played" in actor.output
        assert checkpoints.latest(both.run) is not None
        totals = both.snapshot()["totals"]
        assert totals["frames"] >= 3000
        assert totals["batches"] > 0
        assert both.is_gone()
        assert actor.is_gone()


def test_it_goes_on_from_its_checkpoint_with_an_empty_memory(tmp_path: Path) -> None:
    with cluster_in(tmp_path, SMALL) as cluster:
        first = cluster.start("replay", "--with-learner", "--actors", "1", "--max-frames", "1500")
        cluster.start("actor", "--actors", "1")
        assert first.ends(110) == 0
        learned = first.snapshot()["totals"]["batches"]
        assert learned > 0
        cluster.config = []
        words = ["--with-learner", "--resume", str(first.run), "--max-frames", "1M"]
        again = cluster.start("replay", *words)
        cluster.config = SMALL
        cluster.start("actor", "--actors", "1")

        def further() -> bool:  # it is the same run directory
            return bool(first.snapshot()["totals"]["batches"] > learned)

        again.wait_for(further, "batches beyond the checkpoint's")
        assert again.ends(110, signal.SIGINT) == 0
