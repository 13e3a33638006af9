"""`--save-replay`: runs that end with their memory on disk, and go on with it."""

import re
import signal
from collections.abc import Callable

import pytest

from tests.scenarios.test_train import Command, start

SMALL = ["--env", "CartPole-v1", "--preset", "smoke", "--learning-starts", "1000"]
IN_TIME_S = 100.0  # a busy machine is no failure; nothing here promises seconds
__all__ = ["start"]  # a fixture
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(500)]


def number(output: str, what: str) -> int:
    """How many transitions were loaded, or saved last."""
    return int(re.findall(rf"memory: ([\d,]+) transitions {what}", output)[-1].replace(",", ""))


def test_a_run_that_is_stopped_and_resumed_learns_at_once_from_the_memory_that_it_had(
    start: Callable[..., Command],
) -> None:
    args = ["--max-frames", "0", "--plain", "--save-replay", "stop"]
    first = start(*SMALL, *args)
    first.wait_for(lambda: [x for x in first.metrics() if x["batches"]], "batches")
    assert first.ends(signal.SIGTERM, IN_TIME_S) == 0
    saved = number(first.output, "saved in run/replay")
    assert saved > 1000
    learned = first.metrics()[-1]["batches"]

    again = start("--plain", main=RESUME)
    again.wait_for(lambda: "zapex: actor 0" in again.children(), "an actor")
    again.children()["zapex: actor 0"].send_signal(signal.SIGSTOP)  # it plays no more, or never did
    again.wait_for(lambda: again.metrics()[-1]["batches"] > learned, "batches without an actor")
    assert number(again.output, "loaded from run/replay") == saved
    assert again.ends(signal.SIGINT, IN_TIME_S) == 0
    assert number(again.output, "saved in run/replay") >= saved
    assert "Traceback" not in again.output


RESUME = """
import sys
from zapex.cli import main as cli
words = ["train", "--resume", "run", *sys.argv[4:]]  # not: train --run-dir run
sys.exit(cli.main(words))
"""


def test_a_run_whose_replay_does_not_save_in_time_ends_and_says_so(
    start: Callable[..., Command],
) -> None:
    args = ["--max-frames", "0", "--plain", "--save-replay", "stop"]
    command = start(*SMALL, *args, main=STUCK)
    command.wait_for(lambda: [x for x in command.metrics() if x["inserted"]], "transitions")
    assert command.ends(signal.SIGTERM, IN_TIME_S) == 1
    assert "the memory is not saved: the disk is too slow, and it is given up" in command.output
    assert "the memory is not saved: the replay ended before that" in command.output
    assert command.left_over() == []


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
