"""Tiny environments for tests: all that they do is known beforehand."""

import os
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete


class Lengths(gymnasium.Env[Any, Any]):
    """Episodes of given lengths, over and over; each step pays `reward`; ends are terminal.

    obs: float64 (episode, step). Rendering shows the step in every pixel.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    action_space = Discrete(2)
    observation_space = Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(
        self, lengths: list[int], reward: float = 1.0, render_mode: str | None = None
    ) -> None:
        self.render_mode = render_mode
        self._lengths, self._reward = lengths, reward
        self._episode = -1
        self._step = 0

    def _obs(self) -> np.ndarray:
        return np.array([self._episode, self._step], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode += 1
        self._step = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self._step += 1
        over = self._step == self._lengths[self._episode % len(self._lengths)]
        return self._obs(), self._reward, over, False, {}

    def render(self) -> Any:
        return np.full((9, 15, 3), self._step, np.uint8)


class Unseen(Lengths):
    """Lengths that cannot be rendered."""

    metadata = {"render_modes": []}  # noqa: RUF012


class Spaces(Lengths):
    """Any spaces; observations are drawn from theirs, and kept in `drawn`, for all together."""

    drawn: ClassVar[list[Any]] = []

    def __init__(self, observations: Any, actions: Any) -> None:
        super().__init__([5])
        self.observation_space, self.action_space = observations, actions

    def _obs(self) -> Any:
        self.drawn.append(self.observation_space.sample())
        return self.drawn[-1]


def many_actions() -> gymnasium.Env[Any, Any]:
    return Spaces(Box(0, 1, (3,), np.float32), MultiDiscrete([2, 2]))


def dict_observations() -> gymnasium.Env[Any, Any]:
    return Spaces(Dict({"a": Discrete(3)}), Discrete(2))


def tiny_images() -> gymnasium.Env[Any, Any]:
    return Spaces(Box(0, 255, (6, 10, 3), np.uint8), Discrete(2))


def colour_images() -> gymnasium.Env[Any, Any]:
    return Spaces(Box(0, 255, (40, 48, 3), np.uint8), Discrete(2, start=5))


def grey_images() -> gymnasium.Env[Any, Any]:
    return Spaces(Box(0, 255, (40, 48), np.uint8), Discrete(2))


def whole_numbers() -> gymnasium.Env[Any, Any]:
    return Spaces(Box(0, 9, (3,), np.int64), Discrete(2))


def not_an_environment() -> str:
    return "hello"


def liar() -> gymnasium.Env[Any, Any]:
    """Declares what it does not return."""
    return "hello"  # type: ignore[return-value]


gymnasium.register("Lengths-v0", entry_point=Lengths, max_episode_steps=8, reward_threshold=7.0)


class Sleepy(gymnasium.Env[Any, Any]):
    """Each step sleeps: its time is known, whatever else the machine does."""

    action_space = Discrete(2)
    observation_space = Box(-1, 1, (2,), np.float32)

    def __init__(self, ms: float = 5.0) -> None:
        self._s = ms / 1e3

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._s)
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Fragile(Lengths):
    """Raises in its tenth step."""

    left = 10

    def step(self, action: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise RuntimeError("the joystick broke off")
        return super().step(action)


def fragile() -> Fragile:
    return Fragile([5])


class Quitting(Fragile):
    """Ends its process with status 0 in its tenth step, as a library's clean-up may do."""

    def step(self, action: Any) -> Any:
        if self.left == 1:
            os._exit(0)
        return super().step(action)


def quitting() -> Quitting:
    return Quitting([5])
