"""Several seeds by one command, and the page on comparing runs as its reader runs it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from zapex.cli import main as cli
from zapex.run import checkpoints

ROOT = Path(__file__).parents[2]
SHORT = ["--preset", "smoke", "--inline", "--plain", "--max-frames", "3000", "--max-minutes", "0"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("in_an_empty_directory"),
]


def parameters(run: str) -> np.ndarray:
    path = checkpoints.latest(Path(run))
    assert path is not None
    tensors = checkpoints.load(path).tensors
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def test_each_seed_is_the_run_that_it_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "CartPole-v1", *SHORT]
    assert cli.main([*words, "--run-dir", "all", "--seeds", "1,2"]) == 0
    assert cli.main([*words, "--run-dir", "alone", "--seed", "2"]) == 0
    assert np.array_equal(parameters("all/seed-2"), parameters("alone"))
    assert not np.array_equal(parameters("all/seed-1"), parameters("all/seed-2"))
    out = capsys.readouterr().out
    assert "seed 2, run 2 of 2" in out
    assert "zapex plot all/seed-1 all/seed-2" in out
    walls = [json.loads(Path(f"all/seed-{n}/result.json").read_text())["wall_s"] for n in (1, 2)]
    assert walls[1] < sum(walls), "the second run's clock begins with it"


# Fails in the process of one seed, whose command line names the run's directory.
MINE = """
import sys
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    steps = 0

    def step(self, action):
        Mine.steps += 1
        if Mine.steps > 500 and "all/seed-2" in sys.argv:
            raise RuntimeError("no game for this seed")
        return super().step(action)

gymnasium.register("Mine-v0", Mine, max_episode_steps=500)
"""
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")


@two_cores
def test_runs_side_by_side_are_the_runs_that_they_are_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train", "CartPole-v1", *SHORT]
    assert cli.main([*words, "--run-dir", "all", "--seeds", "1,2,3", "--parallel", "2"]) == 0
    assert cli.main([*words, "--run-dir", "alone", "--seed", "3"]) == 0
    assert np.array_equal(parameters("all/seed-3"), parameters("alone"))
    out = capsys.readouterr().out
    assert all(f"seed {n} ended: 3,000 frames are played" in out for n in (1, 2, 3))
    assert "zapex plot all/seed-1 all/seed-2 all/seed-3" in out
    settings = [Path(f"all/seed-{n}/config.toml").read_text() for n in (1, 2, 3)]
    assert len({re.sub("seed = .", "", text) for text in settings}) == 1


@two_cores
def test_a_seed_that_fails_is_reported_and_the_others_finish(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("mine.py").write_text(MINE)
    words = ["train", "mine:Mine-v0", *SHORT, "--run-dir", "all", "--seeds", "1,2,3"]
    assert cli.main([*words, "--parallel", "2"]) == 1
    said = capsys.readouterr()
    assert re.search("^seed 2 failed: .*no game for this seed", said.err, re.M)
    assert "Traceback" in said.err
    assert [
        json.loads(Path(f"all/seed-{n}/result.json").read_text())["reason"] for n in (1, 3)
    ] == ["3,000 frames are played"] * 2


def wait_for(condition: Callable[[], object], timeout_s: float = 240.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@two_cores
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_run_outlives_the_command(number: signal.Signals) -> None:
    words = ["train", "CartPole-v1", "--preset", "smoke", "--plain", "--run-dir", "all"]
    more = ["--seeds", "1,2,3", "--parallel", "2"]
    command = subprocess.Popen([sys.executable, "-m", "zapex", *words, *more])
    try:
        paths = [Path(f"all/seed-{n}") for n in (1, 2)]
        wait_for(lambda: all((path / "snapshot.json").exists() for path in paths))
        family = psutil.Process(command.pid).children(recursive=True)
        assert len(family) > 4, "two runs and their roles"
        command.send_signal(number)
        code = command.wait(60)
        wait_for(lambda: not any(one.is_running() for one in family), 20)
    finally:
        command.kill()
    assert not Path("all/seed-3").exists()
    if number == signal.SIGINT:
        assert code == 0
        for path in paths:
            assert "stopped by" in json.loads((path / "result.json").read_text())["reason"]


def test_the_page_on_comparing_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/comparing.md").read_text()
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)).splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["zapex"]:
            assert cli.main([*words[1:], *(SHORT if words[1] == "train" else [])]) == 0, line
    out = capsys.readouterr().out
    assert re.search(r"CartPole-v1 +3 .* lr 0\.001$", out, re.M)
    assert re.search(r"^lr +\S+ +0\.001$", out, re.M)
    assert Path("curves.png").stat().st_size > 10_000
    assert "<svg" in Path("seeds.svg").read_text()
