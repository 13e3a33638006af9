"""`--save-replay`: runs that end with their memory on disk, and go on with it."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scenarios.test_train import start
from tests.support.parts import Part, cluster_in

SMALL = [
    "--env", "CartPole-v1", "--preset", "smoke", "--learning-starts", "1000", "--max-frames", "0",
]  # fmt: skip
IN_TIME_S = 100.0  # a busy machine is no failure; nothing here promises seconds
__all__ = ["start"]  # a fixture
pytestmark = pytest.mark.timeout(500)


def number(output: str, what: str) -> int:
    """How many transitions were loaded, or saved last."""
    return int(re.findall(rf"memory: ([\d,]+) transitions {what}", output)[-1].replace(",", ""))


def live(part: Part) -> float:
    return float(part.snapshot()["replay"].get("live", 0))


def batches(part: Part) -> float:
    return float(part.snapshot()["totals"]["batches"])


@pytest.mark.scenario
def test_a_run_that_is_stopped_and_resumed_learns_at_once_from_the_memory_that_it_had(
    start: Callable[..., Part],
) -> None:
    args = ["--save-replay", "stop"]
    first = start(*SMALL, *args)
    first.wait_for(lambda: [x for x in first.metrics() if x["batches"]], "batches")
    assert first.ends(IN_TIME_S, signal.SIGTERM) == 0
    saved = number(first.output, "saved in run/replay")
    assert saved > 1000
    learned = first.metrics()[-1]["batches"]

    again = start("--resume", "run")
    again.wait_for(lambda: "actor 0" in again.children(), "an actor")
    again.children()["actor 0"].send_signal(signal.SIGSTOP)  # it plays no more, or never did
    again.wait_for(lambda: again.metrics()[-1]["batches"] > learned, "batches without an actor")
    assert number(again.output, "loaded from run/replay") == saved
    assert again.ends(IN_TIME_S, signal.SIGINT) == 0
    assert number(again.output, "saved in run/replay") >= saved
    assert "Traceback" not in again.output


@pytest.mark.slow
def test_a_run_whose_replay_does_not_save_in_time_ends_and_says_so(
    start: Callable[..., Part],
) -> None:
    args = ["--save-replay", "stop"]
    command = start(*SMALL, *args, main=STUCK)
    command.wait_for(lambda: [x for x in command.metrics() if x["inserted"]], "transitions")
    assert command.ends(IN_TIME_S, signal.SIGTERM) == 1
    assert "the memory is not saved: the disk is too slow" in command.output
    assert "the memory is not saved: the replay ended before that" in command.output
    assert command.is_gone()


# The replay never hears that it must end, as if its disk hung.
STUCK = """
import signal, sys
from zapex.cli import main as cli
from zapex.run import keeping, parent
keeping._BEGIN_S = 1.0
send = parent.Supervisor.send_signal
def lose(self, name, number):
    if name != "replay" or number == signal.SIGKILL:
        send(self, name, number)
parent.Supervisor.send_signal = lose
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_replay_that_is_started_again_with_its_memory_serves_the_learner_before_any_actor(
    tmp_path: Path,
) -> None:
    with cluster_in(tmp_path, SMALL) as cluster:
        replay = cluster.start("replay", "--actors", "2", "--save-replay", "stop")
        learner = cluster.start("learner")
        actor = cluster.start("actor", "--actors", "1")
        learner.wait_for(lambda: batches(learner) > 10, "batches")
        replay.wait_for(lambda: live(replay) > 2000, "a memory")
        assert actor.ends(IN_TIME_S, signal.SIGINT) == 0
        assert replay.ends(IN_TIME_S, signal.SIGTERM) == 0
        saved = number(replay.output, "saved in run/replay")
        assert saved > 2000
        before = batches(learner)

        cluster.config = []
        again = cluster.start("replay", "--resume", str(replay.run))
        again.wait_to_say("transitions loaded from")
        assert number(again.output, "loaded from") == saved
        # No actor plays: these are of what was saved.
        learner.wait_for(lambda: batches(learner) > before + 10, "batches of the saved memory")
        cluster.config = SMALL
        actor = cluster.start("actor", "--actors", "1")
        actor.wait_for(lambda: actor.snapshot()["relay"].get("acknowledged", 0) > 5, "chunks")
        assert learner.ends(IN_TIME_S, signal.SIGINT) == 0
        assert again.ends(IN_TIME_S, signal.SIGINT) == 0
        assert number(again.output, "saved in") > 2000
        for part in cluster.parts:
            assert "Traceback" not in part.output + part.logs()


@pytest.mark.slow
def test_actors_that_stayed_join_the_replay_that_was_started_again_with_its_memory(
    tmp_path: Path,
) -> None:
    with cluster_in(tmp_path, SMALL) as cluster:
        words = ["--actors", "2", "--save-replay", "always", "--checkpoint-minutes", "0.02"]
        replay = cluster.start("replay", *words)
        learner = cluster.start("learner")
        actor = cluster.start("actor", "--actors", "1")
        manifest = replay.run / "replay" / "manifest.json"
        replay.wait_for(lambda: live(replay) > 500 and manifest.exists(), "a save")
        replay.popen.kill()  # all of it dies: what was saved last is there
        replay.popen.wait(10)
        cluster.config = []
        again = cluster.start("replay", "--resume", str(replay.run))
        again.wait_to_say("transitions loaded from")
        loaded = number(again.output, "loaded from")
        again.run = replay.run
        cluster.config = SMALL
        actor.wait_to_say("the replay was restarted with a new memory; joining again")
        again.wait_for(lambda: live(again) > loaded > 0, "more transitions")
        for part in (actor, learner, again):
            assert part.ends(IN_TIME_S, signal.SIGINT) == 0, part.output
        # It may have been full; then room is made before more comes.
        assert number(again.output, "saved in") > 0.9 * loaded
