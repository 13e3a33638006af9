"""A run of several processes learns a game with Atari's pictures, by all that ALE's games use."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.pixel_catch import BALLS, stacked
from zapex.envs import environments

ROOT = Path(__file__).parents[2]
ENV = "tests.support.pixel_catch:PixelCatch-v0"
LEARNED = 1.0  # three of five balls caught
RUN = [
    *("--preset", "laptop", "--actors", "1", "--envs-per-actor", "8", "--seed", "1"),
    *("--capacity", "20k", "--learning-starts", "1k", "--samples-per-insert", "4"),
    *("--channels", "8", "--hidden", "64", "--batch-size", "32", "--n-step", "3"),
    *("--lr", "1e-3", "--target-period", "100", "--publish-period-s", "0.3"),
    *("--param-period", "40", "--eval-period-s", "10", "--eval-episodes", "20"),
    *("--eval-noop-max", "0", "--stop-at-return", str(LEARNED), "--max-frames", "25k"),
]
"""Frames, not minutes, bound it: each is sampled four times, however fast the machine is."""


def test_random_play_catches_few_balls() -> None:
    env, returns = stacked(), []
    env.action_space.seed(1)
    for game in range(100):
        env.reset(seed=game)
        returns.append(0.0)
        over = False
        while not over:
            obs, reward, over, _, _ = env.step(env.action_space.sample())
            returns[-1] += float(reward)
    assert (obs.shape, obs.dtype) == ((4, 84, 84), np.uint8)
    assert -BALLS < np.mean(returns) < -2.5


def test_its_frames_are_stored_once_each_as_those_of_ale() -> None:
    ours, ale = environments.check(ENV), environments.check("ALE/Pong-v5")
    assert ours.schema(3, 0.99).obs_columns["obs"] == ale.schema(3, 0.99).obs_columns["obs"]
    assert ours.stack == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_several_processes_learns_from_pixels(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zapex", "train", "--env", ENV, "--run-dir", "run", "--plain"]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *RUN], cwd=tmp_path, env={**os.environ, **variables}, timeout=840,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    facts = json.loads((tmp_path / "run/result.json").read_text())
    assert facts["best"]["mean"] >= LEARNED, done.stdout
    assert facts["reason"] == f"the mean return of an evaluation reached {LEARNED:g}"
