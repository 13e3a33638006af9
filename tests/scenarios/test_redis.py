"""A run through a real Redis, its commands as real processes; Redis and roles die meanwhile."""

import signal
from pathlib import Path

import pytest

from tests.scenarios.test_cluster import SMALL
from tests.support.parts import cluster_in
from tests.support.redis_server import RedisServer, needs_redis, redis_server

pytestmark = needs_redis
__all__ = ["redis_server"]  # a fixture


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_goes_on_when_redis_is_restarted_empty_and_a_learner_is_killed(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with cluster_in(tmp_path, SMALL, redis_server.url) as cluster:
        actor = cluster.start("actor", "--actors", "1")
        actor.wait_to_say("there is no run")
        learner = cluster.start("learner", "--actors", "2", "--checkpoint-minutes", "0.05")

        def batches() -> float:
            return float(learner.snapshot()["totals"]["batches"])

        learner.wait_for(lambda: batches() > 50, "batches")
        redis_server.stop()
        for part in (actor, learner):
            part.wait_to_say("it does not answer")
        redis_server.start()
        learner.wait_to_say("was emptied: settings and parameters are written again")
        actor.wait_to_say("Redis answers again")
        before = batches()
        learner.wait_for(lambda: batches() > before + 50, "batches after the restart")
        learner.kill_child("learner")
        learner.wait_to_say("learner died")
        live = learner.snapshot()["replay"]["live"]
        before = batches()
        learner.wait_for(lambda: batches() > before + 50, "batches after the kill")
        # Its memory outlived it; a full one is a chunk more or less.
        assert learner.snapshot()["replay"]["live"] >= 0.9 * live > 0
        frames = learner.snapshot()["totals"]["frames"]
        assert frames > 0
        # A busy machine may not let it save within the seconds of its end.
        saved = learner.run / "checkpoints"
        learner.wait_for(lambda: saved.is_dir() and any(saved.iterdir()), "a checkpoint")
        assert learner.ends(60, signal.SIGINT) == 0
        learner = cluster.start("learner", "--resume", str(learner.run), "--max-frames", "1")
        learner.run = cluster.parts[1].run
        assert learner.ends(100) == 0, learner.output
        assert actor.ends(100) == 0, actor.output
        assert "the run is over: 1 frames are played" in actor.output
        for part in cluster.parts:
            assert part.is_gone()
            assert "Traceback" not in part.output + part.logs()
