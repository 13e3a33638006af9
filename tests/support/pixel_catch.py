"""A game with Atari's pictures: uint8, 84x84, four stacked; fast, and soon learned."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FrameStackObservation
from numpy.typing import NDArray

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
