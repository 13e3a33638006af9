"""A benchmark's paced learner really takes as long for a step as it is told to."""

import signal
from pathlib import Path

import pytest

from benchmarks.train.whole_run import TrainRun
from tests.support.parts import DEADLINE_S, cluster_in
from zapex.envs import environments

STEP_S = 0.2
SMALL = ["--preset", "smoke", "--eval-period-s", "0", "--max-frames", "0"]
pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]


def test_a_paced_learner_takes_at_most_one_batch_in_the_time_of_a_step(tmp_path: Path) -> None:
    with cluster_in(tmp_path, ["--env", "CartPole-v1", *SMALL]) as cluster:
        cluster.start("replay", "--actors", "1")
        cluster.start("actor")
        module = ["benchmarks.support.paced_learner", str(STEP_S)]
        learner = cluster.start("learner", module=module)

        def batches() -> float:
            return float(learner.snapshot()["totals"]["batches"])

        learner.wait_for(batches, "a batch")
        first = learner.snapshot()
        learner.wait_for(lambda: batches() > first["totals"]["batches"], "another")
        then = learner.snapshot()
        took_s = then["wall_s"] - first["wall_s"]
        # One may have been under way at the first look.
        assert then["totals"]["batches"] - first["totals"]["batches"] <= took_s / STEP_S + 1
        assert learner.ends(20, signal.SIGINT) == 0


def test_so_does_one_that_has_its_replay_on_the_same_host() -> None:
    with TrainRun(environments.check("CartPole-v1"), SMALL, step_s=STEP_S) as run:
        run.wait_until(lambda: run.count("learner", "batches") >= 1, DEADLINE_S)
        first = run.look()
        run.wait_until(
            lambda: run.count("learner", "batches") >= first.roles["learner"]["batches"] + 3,
            DEADLINE_S,
        )
        then = run.look()
    learned = then.roles["learner"]["batches"] - first.roles["learner"]["batches"]
    assert learned <= (then.time_s - first.time_s) / STEP_S + 1
    assert then.roles["learner"]["phase/forward"] > first.roles["learner"]["phase/forward"]
