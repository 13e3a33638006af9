"""One placed host: what it starts, what it waits for, when it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.parts import VARIABLES
from zapex.clusters.host import Group, Placement

DEADLINE_S = 60.0


class Placed:
    """`python -m zapex.clusters.host` over commands that stand in for zapex's own."""

    def __init__(self, home: Path, role: str, *again: str) -> None:
        self.output = home / f"{role}.txt"
        argv = [sys.executable, "-m", "zapex.clusters.host", str(home), role, "0", *again]
        with self.output.open("wb") as file:
            self.popen = subprocess.Popen(
                argv, stdout=file, stderr=file, env={**os.environ, **VARIABLES}
            )

    def wait_for(self, ready: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not ready():
            assert time.monotonic() < deadline_s, f"{what}: {self.output.read_text()}"
            time.sleep(0.05)

    def wait_to_say(self, text: str) -> None:
        self.wait_for(lambda: text in self.output.read_text(), text)

    def ends(self) -> int:
        return self.popen.wait(DEADLINE_S)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A launch directory; --version ends at once, and `doctor` of an unknown flag cannot start."""
    commands = {
        "replay": ["replay", "--listen", "{url}", "--env", "CartPole-v1", "--preset", "smoke",
                   "--run-dir", "{run}", "--resume", "auto", "--plain", "--insecure-network"],
        "learner": ["--version"],
        "actor": ["actor", "--replay", "{url}", "--env", "CartPole-v1", "--preset", "smoke",
                  "--run-dir", "{run}", "--insecure-network"],
        "wrong": ["train", "--no-such-flag", "{url}"],
    }  # fmt: skip
    groups = {
        role: Group(name=role, command=tuple(words), cores=3, learns=role == "learner")
        for role, words in commands.items()
    }
    Placement("slurm", "a", groups, advertise="127.0.0.1").write(tmp_path)
    return tmp_path


def test_the_learners_end_ends_the_run_also_for_later_hosts(home: Path) -> None:
    (home / "replay.url").write_text("tcp://127.0.0.1:1\n")
    assert Placed(home, "learner").ends() == 0
    assert (home / "over").exists()
    late = Placed(home, "actor")
    assert late.ends() == 0
    assert "the run is over" in late.output.read_text()


def test_the_command_gets_its_number_of_cores(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = home / "cores.txt"
    (home / "sitecustomize.py").write_text(  # runs first in every Python
        f"import os\nprint(os.environ.get('ZAPEX_CORES', 'none'), file=open({str(said)!r}, 'a'))\n"
    )
    monkeypatch.setitem(VARIABLES, "PYTHONPATH", f"{home}:{VARIABLES['PYTHONPATH']}")
    (home / "replay.url").write_text("tcp://127.0.0.1:1\n")
    assert Placed(home, "learner").ends() == 0
    assert said.read_text().split() == ["none", "3"]


def test_a_mistake_in_the_settings_is_not_retried(home: Path) -> None:
    (home / "replay.url").write_text("tcp://127.0.0.1:1\n")
    placed = Placed(home, "wrong")
    assert placed.ends() == 2
    assert placed.output.read_text().count("--no-such-flag") == 2  # as started, and as refused


@pytest.mark.slow
def test_hosts_follow_a_replay_that_is_requeued_elsewhere(home: Path) -> None:
    actor = Placed(home, "actor")
    actor.wait_to_say("waiting for the replay's host to write")
    replay = Placed(home, "replay", "touch", str(home / "again"))
    log = home / "logs" / "actor-0.log"
    actor.wait_for(lambda: log.exists() and "frames" in log.read_text(), "frames")
    # SIGUSR1: save, and ask to be started again; elsewhere, so with a new port.
    replay.popen.send_signal(signal.SIGUSR1)
    assert replay.ends() == 143
    assert (home / "again").exists()
    before = (home / "replay.url").read_text()
    replay = Placed(home, "replay")
    replay.wait_for(lambda: (home / "replay.url").read_text() != before, "another address")
    actor.wait_to_say("rejoining there")
    url = (home / "replay.url").read_text().strip()
    actor.wait_to_say(f"zapex actor --replay {url}")
    for placed in (actor, replay):
        placed.popen.send_signal(signal.SIGTERM)
        assert placed.ends() == 143
