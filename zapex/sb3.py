"""Prioritized replay for Stable-Baselines3: a replay buffer, and a DQN that uses its priorities."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space
from stable_baselines3.common.vec_env import VecNormalize
from torch.nn import functional as F

from zapex.chunks.schema import Column, Schema
from zapex.errors import ConfigError
from zapex.library.prioritized import PrioritizedReplay

_COLOURS, _MOST_FRAMES = 3, 16
# What a pickle has a snapshot for, and what begins again after a load.
_NOT_PICKLED = ("replay", "_writer", "_last", "_playing")


class PrioritizedSamples(NamedTuple):
    """A batch of B transitions: the fields of SB3's ReplayBufferSamples, weights and keys.

    For Dict observations, `observations` and `next_observations` are dicts of tensors.
    """

    observations: Any  # (B, *shape)
    actions: torch.Tensor  # (B, action_dim)
    next_observations: Any  # (B, *shape), n_steps later
    dones: torch.Tensor  # (B, 1): 1 does not bootstrap
    rewards: torch.Tensor  # (B, 1) n-step returns
    discounts: torch.Tensor | None  # (B, 1) factors of the bootstrap; None: the algorithm's gamma
    weights: torch.Tensor  # (B, 1) importance weights, at most 1
    keys: NDArray[np.int64]  # (B,) for update_priorities


class PrioritizedReplayBuffer(ReplayBuffer):
    """A replay buffer of SB3 that draws by priority (Schaul et al. 2016) and stores frames once.

    It works with every off-policy algorithm of SB3 that samples from a ReplayBuffer:

        SAC("MlpPolicy", env, replay_buffer_class=PrioritizedReplayBuffer)

    An algorithm that gives no priorities back draws uniformly, with weights of 1. PrioritizedDQN
    gives them back; in an algorithm of your own, weight the losses with `samples.weights` and call
    `update_priorities`.

    `replay` is the zapex.PrioritizedReplay inside. `beta` may be set at any time. A pickle (as of
    `save_replay_buffer`) holds a snapshot of the replay; loading a pickle runs what its writer
    wants, so load only those that you trust.

    Args:
        buffer_size: how many transitions to keep, of all environments together.
        observation_space: Box, Discrete, MultiDiscrete, MultiBinary or a Dict of them.
        action_space: Box, Discrete, MultiDiscrete or MultiBinary.
        device: where sampled tensors are.
        n_envs: how many environments step together.
        optimize_memory_usage: not needed, and refused: each frame is stored once in any case.
        handle_timeout_termination: time limits bootstrap, as in SB3.
        n_steps: steps of a return, 1 to 64. SB3 passes its own `n_steps` only to its own buffers,
            so give it in `replay_buffer_kwargs`, with `gamma`. PrioritizedDQN passes both.
        gamma: discount of one step; matters only if n_steps > 1.
        alpha: how much priorities matter; 0 draws uniformly.
        beta: how much of the bias the weights correct.
        stack: how many frames VecFrameStack joins, by name for Dict observations. None: images of
            3, 6, 9, ... channels are taken for stacks of RGB frames, others for stacks of grey
            ones, unless the first step refutes it; other observations are no stacks.

    Raises:
        ConfigError: a value is out of range, or does not fit the observation.
        SchemaError: in `add`: an observation with a stack is not the one before it, shifted.
    """

    pos: int
    full: bool

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        alpha: float = 0.6,
        beta: float = 0.4,
        stack: int | Mapping[str, int] | None = None,
    ) -> None:
        if optimize_memory_usage:
            raise ConfigError(
                "optimize_memory_usage=True is not needed here: each frame is stored once in any "
                "case, so leave it out"
            )
        # Not ReplayBuffer's own: that allocates memory for all observations, twice.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)  # in steps of all environments, as SB3's
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps, self.gamma, self.alpha, self.beta = n_steps, gamma, alpha, beta
        self._columns = _columns(observation_space, stack)
        self._guessed = stack is None  # and no observation has confirmed it
        self.reset()

    def reset(self) -> None:
        """Empty the buffer."""
        super().reset()
        dtype = self._maybe_cast_dtype(self.action_space.dtype)
        columns = {"action": Column((self.action_dim,), dtype)}
        if isinstance(self._columns, dict):
            columns |= {f"obs/{name}": column for name, column in self._columns.items()}
        else:
            columns["obs"] = self._columns
        schema = Schema(columns, self.n_steps, self.gamma)
        # SB3 seeds NumPy before it makes a buffer: its seed= makes these draws repeatable, too.
        seed = int(np.random.randint(2**31))
        least = 2 * max(self.n_steps, schema.stack)  # of each environment, in chunks
        capacity = self.n_envs * max(self.buffer_size, least)
        self._begin(PrioritizedReplay(capacity, schema, self.alpha, seed=seed, streams=self.n_envs))

    def _begin(self, replay: PrioritizedReplay) -> None:
        self.replay = replay
        self._writer = replay.writer(self.n_envs, autoreset="disabled")
        self._last: Any = None  # next_obs of the last `add`
        self._playing = np.zeros(self.n_envs, np.bool_)  # the streams whose episodes go on

    def size(self) -> int:
        """How many steps of all environments can be drawn from."""
        return len(self.replay) // int(self.n_envs)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one step of every environment. See SB3's ReplayBuffer."""
        if self._guessed:
            self._guessed = False
            columns = _each(_confirmed, self._columns, obs, next_obs)
            if columns != self._columns:
                self._columns = columns
                self.reset()
        obs, next_obs = (
            _each(lambda c, part: part.reshape(self.n_envs, *c.value_shape), self._columns, found)
            for found in (obs, next_obs)
        )
        done = np.array(done, np.bool_)
        timeouts = np.zeros_like(done)
        if self.handle_timeout_termination:
            timeouts[:] = [info.get("TimeLimit.truncated", False) for info in infos]
        begins = ~self._playing
        if self._last is not None:  # `learn` called again resets environments within an episode
            differ = _each(lambda a, b: (a != b).reshape(self.n_envs, -1).any(1), obs, self._last)
            begins |= np.any([*differ.values()], 0) if isinstance(differ, dict) else differ
        if begins.any():
            self._writer.reset(obs, begins)
        self._writer.add(
            action=np.reshape(action, (self.n_envs, self.action_dim)),
            reward=reward,
            next_obs=next_obs,
            terminated=done & ~timeouts,
            truncated=timeouts,
        )
        self._playing = ~(done | timeouts)
        self._last = _each(np.copy, next_obs)
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> PrioritizedSamples:
        """Draw transitions by priority.

        Args:
            batch_size: rows, B. If fewer can be drawn, rows are repeated.
            env: normalizes observations and n-step returns.

        Raises:
            NotEnoughData: nothing can be drawn yet.
        """
        drawn = min(batch_size, max(len(self.replay), 1))
        batch = self.replay.sample(drawn, self.beta)
        rows: Any = slice(None)
        if drawn < batch_size:
            rows = np.random.randint(drawn, size=batch_size)
        obs, next_obs = (
            self._normalize_obs(
                _each(lambda part, shape: part[rows].reshape(-1, *shape), found, self.obs_shape),
                env,
            )
            for found in (batch.obs, batch.next_obs)
        )
        rewards, discounts, weights = (
            column[rows, None] for column in (batch.reward, batch.discount, batch.weights)
        )

        def tensor(array: NDArray[Any]) -> torch.Tensor:
            return torch.as_tensor(array, device=self.device)

        return PrioritizedSamples(
            _each(tensor, obs),
            tensor(batch.action[rows]),
            _each(tensor, next_obs),
            tensor((discounts == 0).astype(np.float32)),
            tensor(self._normalize_reward(rewards, env)),
            tensor(discounts) if self.n_steps > 1 else None,
            tensor(weights),
            batch.keys[rows],
        )

    def update_priorities(
        self, keys: NDArray[np.int64], td_errors: ArrayLike | torch.Tensor
    ) -> None:
        """Set new priorities; those of transitions that were evicted meanwhile are ignored.

        Args:
            keys: (B,) of the samples.
            td_errors: (B,) or (B, 1); the sign is ignored.

        Raises:
            InvalidPriority: one is NaN or infinite.
        """
        if isinstance(td_errors, torch.Tensor):
            td_errors = td_errors.detach().cpu().numpy()
        self.replay.update_priorities(keys, np.reshape(td_errors, -1))

    def _get_samples(self, batch_inds: NDArray[Any], env: VecNormalize | None = None) -> Any:
        raise NotImplementedError("transitions are drawn by priority, not by index: call sample")

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED}
        with tempfile.TemporaryDirectory(prefix="zapex-") as path:
            self.replay.save(path)
            # Mapped, not read: a large memory is not held twice.
            state["snapshot"] = {
                str(file.relative_to(path)): np.asarray(np.memmap(file, np.uint8, "r"))
                for file in Path(path).rglob("*")
                if file.is_file()
            }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        snapshot = state.pop("snapshot")
        self.__dict__.update(state)
        with tempfile.TemporaryDirectory(prefix="zapex-") as path:
            for name, content in snapshot.items():
                file = Path(path, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                content.tofile(file)
            self._begin(PrioritizedReplay.load(path))


class PrioritizedDQN(DQN):
    """SB3's DQN with prioritized replay (Schaul et al. 2016).

    Losses are multiplied by the importance weights, and each gradient step gives its TD errors back
    as priorities. All else, arguments too, is as in SB3's DQN. The buffer is a
    PrioritizedReplayBuffer: its alpha, beta and stack are given in `replay_buffer_kwargs`.

        model = PrioritizedDQN("CnnPolicy", env, n_steps=3, replay_buffer_kwargs={"beta": 0.5})

    Raises:
        ConfigError: `replay_buffer_class` is another kind of buffer.
    """

    replay_buffer: PrioritizedReplayBuffer
    replay_buffer_class: type[ReplayBuffer] | None
    replay_buffer_kwargs: dict[str, Any]

    def _setup_model(self) -> None:
        kind = self.replay_buffer_class = self.replay_buffer_class or PrioritizedReplayBuffer
        if not issubclass(kind, PrioritizedReplayBuffer):
            raise ConfigError(
                "replay_buffer_class must be a PrioritizedReplayBuffer of zapex.sb3, "
                f"got {kind.__name__}"
            )
        self.replay_buffer_kwargs = {
            "n_steps": self.n_steps, "gamma": self.gamma, **self.replay_buffer_kwargs,
        }  # fmt: skip
        with warnings.catch_warnings():  # SB3 says that n_steps is ignored
            warnings.filterwarnings("ignore", "`n_steps=")
            super()._setup_model()

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """SB3's gradient steps, with weights and priorities."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        losses = []
        for _ in range(gradient_steps):
            samples = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            discounts = self.gamma if samples.discounts is None else samples.discounts
            with torch.no_grad():
                best = self.q_net_target(samples.next_observations).amax(1, keepdim=True)
                targets = samples.rewards + (1 - samples.dones) * discounts * best
            values = self.q_net(samples.observations).gather(1, samples.actions.long())
            errors = F.smooth_l1_loss(values, targets, reduction="none")
            loss = (samples.weights * errors).mean()
            losses.append(loss.item())
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            self.replay_buffer.update_priorities(samples.keys, targets - values)
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", np.mean(losses))


def _each(change: Any, obs: Any, *others: Any) -> Any:
    """`change` of an observation, or of each part of a Dict observation."""
    if isinstance(obs, dict):
        return {name: change(obs[name], *(other[name] for other in others)) for name in obs}
    return change(obs, *others)


def _columns(space: spaces.Space[Any], stack: int | Mapping[str, int] | None) -> Any:
    """The column of an observation, or of each part of a Dict observation."""
    if not isinstance(space, spaces.Dict):
        if isinstance(stack, Mapping):
            raise ConfigError("stack by name is for Dict observations")
        return _column(space, stack)
    by_name = stack if isinstance(stack, Mapping) else dict.fromkeys(space, stack)
    return {name: _column(part, by_name.get(name)) for name, part in space.items()}


def _column(space: spaces.Space[Any], stack: int | None) -> Column:
    """The column of an observation that VecFrameStack may have stacked.

    Images with channels first may be stacks of RGB frames; with channels last they may not.
    """
    shape, dtype = get_obs_shape(space), np.dtype(space.dtype)
    last = len(shape) == 3 and shape[-1] < shape[0]
    channels = (shape[-1] if last else shape[0]) if shape else 1
    if stack is None:
        colours = 1 if channels % _COLOURS else _COLOURS
        stack = channels // colours if is_image_space(space) else 1
        if stack > _MOST_FRAMES or (last and stack != channels):
            stack = 1
    if stack == 1:
        return Column(shape, dtype)
    if channels != stack if last else channels % stack:
        raise ConfigError(f"stack={stack} does not divide an observation of shape {shape}")
    frame = shape[:-1] if last else (channels // stack, *shape[1:])
    return Column(frame, dtype, stack, -1 if last else 0)


def _confirmed(column: Column, obs: NDArray[Any], next_obs: NDArray[Any]) -> Column:
    """The column; without its stack if next_obs (N, *shape) is not obs shifted by a frame."""
    if column.stack == 1:
        return column
    before, after = (
        np.moveaxis(part.reshape(len(part), *column.value_shape), column.stack_axis or 1, 0)
        for part in (obs, next_obs)
    )
    if np.array_equal(before[1:], after[:-1]):
        return column
    return Column(obs.shape[1:], column.dtype)
