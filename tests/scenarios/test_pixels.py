"""A run of several processes learns a game with Atari's pictures, by all that ALE's games use."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FrameStackObservation
from numpy.typing import NDArray

from zapex.envs import environments

ROOT = Path(__file__).parents[2]
ENV = "tests.scenarios.test_pixels:PixelCatch-v0"
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


CELLS = 7  # in each direction
PIXELS = 84 // CELLS  # of a cell's side
BALLS = 5  # of an episode


class Catch(gymnasium.Env[NDArray[np.uint8], Any]):
    """Balls fall to the bottom, some of them aslant; a paddle of one cell catches them.

    Actions: stay, left, right. Reward: 1 for a caught ball, -1 for another. A ball falls one cell
    a step and moves -1, 0 or 1 cells aside, which only several frames show; walls reflect it.
    """

    action_space = Discrete(3)
    observation_space = Box(0, 255, (84, 84), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left, self._paddle = BALLS, CELLS // 2
        self._serve()
        return self._frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._paddle = min(max(self._paddle + (0, -1, 1)[action], 0), CELLS - 1)
        if not 0 <= self._column + self._aside < CELLS:
            self._aside = -self._aside
        self._row, self._column = self._row + 1, self._column + self._aside
        reward, frame = 0.0, self._frame()
        if self._row == CELLS - 1:
            reward = 1.0 if self._column == self._paddle else -1.0
            self._left -= 1
            self._serve()
        return frame, reward, self._left == 0, False, {}

    def _serve(self) -> None:
        self._row = 0
        self._column, self._aside = (int(n) for n in self.np_random.integers((0, -1), (CELLS, 2)))

    def _frame(self) -> NDArray[np.uint8]:
        frame = np.zeros((84, 84), np.uint8)
        top, left = self._row * PIXELS, self._column * PIXELS
        frame[top : top + PIXELS, left : left + PIXELS] = 255
        left = self._paddle * PIXELS
        frame[-PIXELS // 2 :, left : left + PIXELS] = 128
        return frame


def stacked() -> gymnasium.Env[Any, Any]:
    return FrameStackObservation(Catch(), 4)


gymnasium.register("PixelCatch-v0", entry_point=stacked, max_episode_steps=200)


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
