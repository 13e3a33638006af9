"""An environment whose observations name stream and step, so that every transition can be checked.

An observation is (stream, life, episode, step, checksum, 1), drawn from the seed; its games are
those of tests/support/fake_system.py, so whoever finds a transition knows what it must be.
"""

import dataclasses
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from tests.support.fake_system import ACTIONS, Game, Moment, frame, game, moment_of

_STEP_S = 0.002  # a game that costs nothing would fill any memory in a minute
_BITS = 20  # of stream and life: exact in float32


def game_of(stream: int, life: int, episode: int) -> Game:
    """What is played; Gymnasium knows no lives."""
    one = game(stream, life, episode)
    return dataclasses.replace(one, lives_lost=(False,) * one.length)


class Marked(gymnasium.Env[Any, Any]):
    """See above."""

    metadata = {"render_modes": []}  # noqa: RUF012
    action_space = Discrete(ACTIONS)
    observation_space = Box(-np.inf, np.inf, (6,), np.float32)

    def __init__(self) -> None:
        self._who = (0, 0)
        self._episode = -1
        self._step = 0

    def _obs(self) -> NDArray[np.float32]:
        return frame(1, (*self._who, self._episode, self._step))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            stream, life = self.np_random.integers(1 << _BITS, size=2).tolist()
            self._who, self._episode = (stream, life), -1
        self._episode += 1
        self._step = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(_STEP_S)
        one = game_of(*self._who, self._episode)
        reward = one.rewards[self._step]
        self._step += 1
        over = self._step == one.length
        return self._obs(), reward, over and one.terminated, over and not one.terminated, {}


def marked() -> Marked:
    """For `--env tests.stress.marked_env:marked`."""
    return Marked()


def check_row(
    obs: NDArray[Any], reward: float, discount: float, next_obs: NDArray[Any], n: int, gamma: float
) -> Moment:
    """The moment that a transition is of; RuntimeError where it is not what was played then."""
    moment = moment_of(1, obs)
    who, step = moment[:3], moment[3]
    total, left, then = game_of(*who).transition(step, n, gamma)
    whole = (
        np.array_equal(obs, frame(1, moment))
        and np.array_equal(next_obs, frame(1, (*who, then)))
        and abs(reward - total) < 1e-5
        and abs(discount - left) < 1e-5
    )
    if not whole:
        raise RuntimeError(
            f"torn or foreign: {obs} -> {next_obs}, reward {reward} (is {total}), "
            f"discount {discount} (is {left})"
        )
    return moment
