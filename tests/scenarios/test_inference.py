"""Actors that ask the inference role, in real runs: whoever is killed, it goes on and learns."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.scenarios.test_cluster import GRACE_S, SMALL
from tests.support.parts import Part, check_account, cluster_in
from zapex.watch import recorders

CENTRAL = ("--inference", "central", "--inference-device", "cpu")
LEARNS = (
    "--env CartPole-v1 --preset laptop --actors 2 --envs-per-actor 4 --samples-per-insert 16"
    " --learner-threads 1 --eval-period-s 5 --max-minutes 5"
)
LEARNED = 195.0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_cartpole_is_learned_by_actors_without_torch_whose_inference_role_is_killed(
    tmp_path: Path,
) -> None:
    part = Part(tmp_path / "train", "train", *LEARNS.split(), *CENTRAL)
    try:
        part.wait_for(lambda: part.snapshot()["totals"]["batches"] > 0, "batches")
        mapped = [
            "torch" in Path(f"/proc/{part.children()[f'actor {i}'].pid}/maps").read_text()
            for i in range(2)
        ]
        assert mapped == [False, False]
        for name in ("inference", "actor 0", "inference"):
            goes_on(part, name)
        # The test ends the run: a fast machine would reach a --stop-at-return before the last kill.
        before = len(evaluations(part))
        part.wait_for(lambda: max(evaluations(part)[before:], default=0.0) >= LEARNED, "a return")
        assert part.ends(GRACE_S, signal.SIGINT) == 0, part.output
        assert "Traceback" not in part.output + part.logs()
        last = list(recorders.read_metrics(part.run))[-1]
        shown = {name.partition("/")[0] for name in last}
        assert {"inference", "phases", "comm"} <= shown
        found = part.snapshot()["inference"]
        assert 0 < found["passes"] <= found["answers"]
        assert part.is_gone()
    finally:
        part.close()


def evaluations(part: Part) -> list[float]:
    """The mean returns of the evaluations so far."""
    return [evaluation.mean for evaluation in recorders.read_evaluations(part.run)]


def goes_on(part: Part, name: str) -> None:
    """The role is killed, reported and started again, and the run goes on."""
    deaths, victim = part.output.count(f"{name} died"), part.children()[name]
    victim.kill()
    part.wait_to_say(f"{name} died", deaths + 1)
    frames = part.snapshot()["totals"]["frames"]
    part.wait_for(lambda: part.snapshot()["totals"]["frames"] > frames + 500, "more frames")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_actors_that_wait_for_a_dead_role_end_in_time(tmp_path: Path) -> None:
    part = Part(tmp_path / "train", "train", *SMALL, "--actors", "2", *CENTRAL)
    try:
        part.wait_for(lambda: part.snapshot()["totals"]["batches"] > 0, "batches")
        role = part.children()["inference"]
        told = "inference is stopped by SIGSTOP"
        role.send_signal(signal.SIGSTOP)
        part.wait_for(lambda: told in part.output, "word of the stop")
        assert part.ends(GRACE_S, signal.SIGINT) == 0
        assert part.is_gone()
        assert not psutil.pid_exists(role.pid)
    finally:
        part.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_actor_host_has_an_inference_role_of_its_own(tmp_path: Path) -> None:
    with cluster_in(tmp_path, SMALL) as cluster:
        replay = cluster.start("replay", "--actors", "2")
        host = cluster.start("actor", "--actors", "2", *CENTRAL)
        learner = cluster.start("learner")
        learner.wait_for(lambda: learner.snapshot()["totals"]["batches"] > 0, "batches")
        goes_on(host, "inference")
        goes_on(host, "relay")
        assert host.snapshot()["inference"]["params_version"] > 0
        assert host.ends(GRACE_S, signal.SIGINT) == 0
        for part in (learner, replay):
            assert part.ends(GRACE_S, signal.SIGINT) in (0, 130)
        for part in cluster.parts:
            assert part.is_gone()
            assert "Traceback" not in part.output + part.logs()
        check_account(replay, [host])
