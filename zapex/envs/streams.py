"""Environments stepped in lockstep: streams of steps, with automatic resets.

    streams = make(environments.check("ALE/Breakout-v5"), num_streams=8, seed=1)
    obs = streams.reset()                  # (8, 4, 84, 84)
    while True:
        step = streams.step(act(obs))      # Step: obs, reward, terminated, truncated, ...
        obs = step.obs
        report(streams.finished)           # the games that ended in this step, with their scores

How an episode ends is described at `Step`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zapex.envs.environments import (
    MAX_EPISODE_FRAMES,
    EnvironmentSpec,
    ale_settings,
    find,
    game_of,
    make_one,
)
from zapex.errors import ConfigError

_LOADING_S = 300.0  # every ROM, on a busy machine
_NO_LIMIT = 1 << 30
_EMULATOR_HZ = 60.0

Bools = NDArray[np.bool_]


class Episode(NamedTuple):
    """A game that ended: `game_return` is the sum of its raw rewards, over all lives."""

    stream: int
    game_return: float
    steps: int
    frames: int


@dataclass(slots=True)
class Step:
    """The result of one step of S streams. The next step overwrites the same object.

    A game ends in one of two ways, both of which end its episode: it is over (`terminated`), or it
    is cut at a limit (`truncated`). A lost life ends the return but not the game. After the end of
    an episode the next step of the stream begins a new game (Gymnasium's NEXT_STEP autoreset). That
    step has `started` set and is no transition: its action is ignored, its reward is 0, and its
    observation is the first of the new game.

    Attributes:
        obs: (S, *observation_shape).
        reward: float32 (S,), the game's own, unclipped.
        terminated: bool (S,), the game is over.
        truncated: bool (S,), the game is cut at a limit.
        life_lost: bool (S,), a life was lost, but the game is not over; it may be truncated.
        started: bool (S,), a new game begins.
    """

    obs: NDArray[Any]
    reward: NDArray[np.float32]
    terminated: Bools
    truncated: Bools
    life_lost: Bools
    started: Bools

    @property
    def episode_ends(self) -> Bools:
        """Where this was the last step of an episode."""
        return self.terminated | self.truncated


Advance = tuple[NDArray[Any], NDArray[Any], Bools, Bools, NDArray[Any]]


class Streams(ABC):
    """S environments of one kind; see the module's docstring. `finished` is of the last step."""

    def __init__(self, spec: EnvironmentSpec, num_streams: int) -> None:
        self.spec = spec
        self.screens_per_s = _EMULATOR_HZ
        self.num_streams = num_streams
        self.finished: list[Episode] = []
        shape = (num_streams,)
        self._over = np.zeros(shape, np.bool_)
        self._lives = np.zeros(shape, np.int32)
        self._return = np.zeros(shape, np.float64)
        self._began = np.zeros(shape, np.int64)  # the time in steps when the game began
        self._time = 0
        self._step = Step(np.empty(0), np.empty(0, np.float32), *[self._over] * 4)

    def reset(self) -> NDArray[Any]:
        """Begin a new game in every stream. Returns the observations, (S, *observation_shape).

        The seed decides the first reset; later ones continue the random numbers.
        """
        obs, self._lives = self._begin()
        self._over = np.zeros(self.num_streams, np.bool_)
        self._return[:] = 0.0
        self._began[:] = self._time
        self.finished = []
        return obs

    def step(self, actions: NDArray[np.int64]) -> Step:
        """Play `actions`, int64 (S,), one step in every stream. Returns the same Step each time.

        Raises:
            ValueError: the actions are of another shape or dtype, or out of range.
        """
        if actions.shape != self._over.shape or actions.dtype != np.int64:
            raise ValueError(
                f"actions must be int64 {self._over.shape}, got {actions.dtype} {actions.shape}"
            )
        if np.maximum.reduce(actions.view(np.uint64)) >= self.spec.num_actions:
            # As unsigned numbers negative actions are out of range, too. The emulator's threads
            # never answer after a bad action.
            raise ValueError(f"actions must be in 0..{self.spec.num_actions - 1}, got {actions}")
        # The emulator evicts all of this from the caches, so even a few operations are slow.
        step = self._step
        step.started = self._over
        step.obs, reward, step.terminated, step.truncated, lives = self._advance(actions)
        step.reward = reward.astype(np.float32)
        step.life_lost = lives < self._lives
        self._lives = lives
        self._return += reward
        self._time += 1
        self._over = step.episode_ends
        self.finished = self._finish() if np.logical_or.reduce(self._over) else []
        return step

    def _finish(self) -> list[Episode]:
        over = self._over
        self._step.life_lost &= ~self._step.terminated
        episodes = []
        for stream in np.flatnonzero(over).tolist():
            steps = self._time - int(self._began[stream])
            frames = steps * self.spec.frames_per_step
            episodes.append(Episode(stream, float(self._return[stream]), steps, frames))
        self._return[over] = 0.0
        self._began[over] = self._time + 1  # after the step that begins the next game
        self._lives = np.where(over, 0, self._lives)  # a new game loses no life
        return episodes

    @property
    def returns(self) -> NDArray[np.float64]:
        """The score so far of the game in each stream, float64 (S,); 0 where it is over."""
        return self._return

    @property
    def action_names(self) -> tuple[str, ...]:
        """What players call the actions; their numbers where they have no names."""
        return tuple(map(str, range(self.spec.num_actions)))

    @property
    @abstractmethod
    def screens(self) -> Sequence[NDArray[np.uint8]]:
        """The screens of the last step or reset: RGB frames (H, W, 3); needs `film=True`."""

    @abstractmethod
    def close(self) -> None:
        """Free the environments."""

    @abstractmethod
    def _begin(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Observations and lives of new games in all streams."""

    @abstractmethod
    def _advance(self, actions: NDArray[np.int64]) -> Advance:
        """Observations, rewards, terminated, truncated and lives after a step in all streams."""


def make(
    spec: EnvironmentSpec,
    num_streams: int,
    *,
    seed: int,
    num_threads: int = 1,
    max_episode_frames: int = MAX_EPISODE_FRAMES,
    noop_max: int = 30,
    film: bool = False,
) -> Streams:
    """Streams of the environment that `environments.check` described.

    Args:
        spec: of the environment.
        num_streams: how many games are played in lockstep.
        seed: of all random numbers; each stream has different ones.
        num_threads: threads that step Atari games; other environments use the caller's thread.
        max_episode_frames: truncates an episode, unless the environment's own limit is less; 0:
            only its own limit.
        noop_max: an Atari game begins with 0 to this many no-ops.
        film: keep the screens; one stream only.

    Raises:
        ConfigError: the environment cannot be made, or cannot be filmed.
    """
    if num_streams < 1 or (film and num_streams != 1):
        wanted = "1 to be filmed" if film else "at least 1"
        raise ConfigError(f"num_streams must be {wanted}, got {num_streams}")
    source = find(spec.env_id)
    seeds = (np.random.SeedSequence(seed).generate_state(num_streams) >> 1).astype(np.int64)
    if spec.atari:
        frames = max_episode_frames or _NO_LIMIT
        return _AleStreams(spec, source, seeds, frames, noop_max, num_threads, film)
    return _GymStreams(spec, source, seeds, max_episode_frames, film)


class _AleStreams(Streams):
    """AtariVectorEnv, configured so that `terminated` is the game's own end.

    `life_loss_info` stays off: it does not tell a life lost in a truncated step from one in a game
    that continues, and misses the loss of the last life but one in games that count the last as 0.
    `info["lives"]` shows both.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        source: Any,
        seeds: NDArray[np.int64],
        max_episode_frames: int,
        noop_max: int,
        num_threads: int,
        film: bool,
    ) -> None:
        from ale_py.vector_env import AtariVectorEnv

        super().__init__(spec, len(seeds))
        settings, game = ale_settings(source, spec.env_kwargs), game_of(source) or ""
        self._envs = AtariVectorEnv(
            game,
            len(seeds),
            num_threads=num_threads,
            autoreset_mode="NextStep",
            max_num_frames_per_episode=max_episode_frames,
            noop_max=noop_max + 1,  # it draws from 0 to noop_max - 1
            episodic_life=False,
            life_loss_info=False,
            reward_clipping=False,
            **settings,
        )
        # Seeding loads every ROM again without the GIL: meanwhile the caller can import torch.
        loader = ThreadPoolExecutor(1)
        self._first: Future[Any] | None = loader.submit(self._envs.reset, seed=seeds)
        loader.shutdown(wait=False)
        self._emulator = (
            _Emulator(game, int(seeds[0]), max_episode_frames, settings) if film else None
        )

    @property
    def screens(self) -> Sequence[NDArray[np.uint8]]:
        return self._emulator.screens if self._emulator else ()

    @property
    def action_names(self) -> tuple[str, ...]:
        return self._emulator.action_names if self._emulator else super().action_names

    def close(self) -> None:
        del self._envs

    def _begin(self) -> tuple[NDArray[Any], NDArray[Any]]:
        obs, info = self._first.result(_LOADING_S) if self._first else self._envs.reset()
        self._first = None
        if self._emulator:
            self._emulator.begin(info["episode_frame_number"][0])
        return obs, info["lives"]

    def _advance(self, actions: NDArray[np.int64]) -> Advance:
        obs, reward, terminated, truncated, info = self._envs.step(actions)
        if self._emulator:
            frame = info["episode_frame_number"][0]
            if self._over[0]:
                self._emulator.begin(frame)
            else:
                self._emulator.act(actions[0], frame)
        return obs, reward, terminated, truncated, info["lives"]


class _Emulator:
    """A second emulator that plays the same game, because AtariVectorEnv hides its screens.

    With the same seed and the same calls both draw the same random numbers.
    """

    def __init__(
        self, game: str, seed: int, max_episode_frames: int, settings: dict[str, Any]
    ) -> None:
        import ale_py
        from ale_py import roms

        self._ale = ale_py.ALEInterface()
        self._ale.setFloat("repeat_action_probability", settings["repeat_action_probability"])
        self._ale.setInt("random_seed", seed)
        self._ale.loadROM(roms.get_rom_path(game))
        full = settings["full_action_space"]
        self._actions = self._ale.getLegalActionSet() if full else self._ale.getMinimalActionSet()
        self._fire = settings["use_fire_reset"] and ale_py.Action.FIRE in self._actions
        self._skip = settings["frameskip"]
        self._max_episode_frames = max_episode_frames
        self._frames = 0
        self.screens: list[NDArray[np.uint8]] = []

    @property
    def action_names(self) -> tuple[str, ...]:
        return tuple(action.name for action in self._actions)

    def begin(self, frame: int) -> None:
        """A new game, with no-ops until `frame`."""
        self._ale.reset_game()
        self._frames = 0
        if self._fire:
            self._ale.act(1)
        while self._ale.getEpisodeFrameNumber() < frame:
            self._ale.act(0)
        self.screens = [self._ale.getScreenRGB()]

    def act(self, action: int, frame: int) -> None:
        """One step; `frame` is that of the other emulator after it."""
        self.screens = []
        for _ in range(self._skip):
            self._ale.act(self._actions[action])
            self._frames += 1
            self.screens.append(self._ale.getScreenRGB())
            if self._ale.game_over() or self._frames >= self._max_episode_frames:
                break
        assert self._ale.getEpisodeFrameNumber() == frame, "the film shows another game"


class _GymStreams(Streams):
    """Gymnasium environments, stepped one after another."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        source: Any,
        seeds: NDArray[np.int64],
        max_episode_steps: int,
        film: bool,
    ) -> None:
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        from zapex.envs.wrappers import Fitted, has_integers

        super().__init__(spec, len(seeds))
        render_mode = "rgb_array" if film else None

        def one() -> Any:
            env = make_one(
                spec.env_id, source, spec.env_kwargs, spec.wrappers, max_episode_steps, render_mode
            )
            return Fitted(env) if has_integers(env.observation_space) else env

        self._envs = SyncVectorEnv(
            [one] * len(seeds), copy=False, autoreset_mode=AutoresetMode.NEXT_STEP
        )
        metadata = self._envs.envs[0].metadata
        if film and "rgb_array" not in metadata.get("render_modes", ()):
            raise ConfigError(f"{spec.env_id} cannot be filmed: it has no render mode rgb_array")
        self._film = film
        self.screens_per_s = float(metadata.get("render_fps", 30))
        self._seeds: list[int | None] | None = seeds.tolist()
        self._obs = np.empty(
            (len(seeds), *spec.observation_shape), np.dtype(spec.observation_dtype)
        )

    @property
    def screens(self) -> Sequence[NDArray[np.uint8]]:
        from gymnasium.error import DependencyNotInstalled

        try:
            return [np.asarray(frame) for frame in self._envs.render() or ()] if self._film else ()
        except DependencyNotInstalled as error:
            raise ConfigError(
                f"{self.spec.env_id} needs another package to draw its screen: {error}"
            ) from error

    def close(self) -> None:
        self._envs.close()

    def _begin(self) -> tuple[NDArray[Any], NDArray[Any]]:
        obs, _ = self._envs.reset(seed=self._seeds)
        self._seeds = None
        return self._converted(obs), self._lives

    def _advance(self, actions: NDArray[np.int64]) -> Advance:
        obs, reward, terminated, truncated, _ = self._envs.step(actions + self.spec.first_action)
        return self._converted(obs), reward, terminated, truncated, self._lives

    def _converted(self, obs: Any) -> NDArray[Any]:
        self.spec.write(obs, self._obs)
        return self._obs
