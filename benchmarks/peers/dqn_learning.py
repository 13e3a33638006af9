"""Stable-Baselines3's DQN: its learning curve on an Atari game, and games of its last network.

    python dqn_learning.py ENV SEED MINUTES GAMES FILE

Runs in an environment that has stable-baselines3, ale-py and opencv: nothing of zapex is imported.
Settings are those of RL Baselines3 Zoo for Atari, but for two that it chose for ten million steps:
exploration ends after a tenth of the time, and learning starts after 10,000 steps. The clock runs
from the start of the process's work, as zapex's does. Evaluation: greedy, whole games of at most
27,000 steps, its own wrapper (up to 30 no-ops; FIRE at reset and after each lost life, as in
training: without it a network that never had to press FIRE waits until the limit).
"""

import json
import sys
import time

ZOO = {
    "buffer_size": 100_000, "learning_rate": 1e-4, "batch_size": 32, "learning_starts": 10_000,
    "target_update_interval": 1_000, "train_freq": 4, "gradient_steps": 1,
    "exploration_fraction": 0.1, "exploration_final_eps": 0.01,
}  # fmt: skip
MANY_STEPS = 10_000_000
POINT_S = 10.0
MOST_STEPS = 27_000
_OWN = {"frameskip": 1}  # the wrapper repeats each action four times


def training_environment(env: str, seed: int):
    """One game of ALE in Stable-Baselines3's wrappers for training, four frames stacked last."""
    import ale_py
    import gymnasium
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecTransposeImage

    gymnasium.register_envs(ale_py)
    one = make_atari_env(env, n_envs=1, seed=seed, env_kwargs=_OWN)
    return VecTransposeImage(VecFrameStack(one, n_stack=4))


def play(model, env: str, seed: int, games: int) -> list[float]:
    """Returns of whole games, greedily."""
    import gymnasium
    from gymnasium.wrappers import TimeLimit
    from stable_baselines3.common.atari_wrappers import AtariWrapper
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecTransposeImage

    def whole_game() -> gymnasium.Env:
        one = Monitor(TimeLimit(gymnasium.make(env, **_OWN), 4 * MOST_STEPS))
        return AtariWrapper(one, clip_reward=False)  # Monitor counts whole games

    played = VecTransposeImage(VecFrameStack(DummyVecEnv([whole_game]), n_stack=4))
    played.seed(seed + 1_000)
    returns, _ = evaluate_policy(
        model, played, n_eval_episodes=games, deterministic=True, return_episode_rewards=True
    )
    return returns


def main(env: str, seed: int, minutes: float, games: int, out: str) -> None:
    """Train for so many minutes, play, write {"curve", "final_returns", "versions"}."""
    began = time.perf_counter()
    import ale_py
    import gymnasium
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback

    class TimedDQN(DQN):
        """Its schedules follow the clock."""

        def _update_current_progress_remaining(self, num_timesteps: int, total: int) -> None:
            used = (time.perf_counter() - began) / (60 * minutes)
            self._current_progress_remaining = max(0.0, 1 - used)

    class Curve(BaseCallback):
        """Points (seconds, frames, mean return of the last 100 whole games), until time is up."""

        def __init__(self) -> None:
            super().__init__()
            self.points: list[list[float | None]] = []
            self.due_s = 0.0

        def _on_step(self) -> bool:
            now_s = time.perf_counter() - began
            if now_s >= self.due_s:
                self.due_s = now_s + POINT_S
                returns = [one["r"] for one in self.model.ep_info_buffer]
                mean = float(np.mean(returns)) if returns else None
                self.points.append([now_s, 4 * self.num_timesteps, mean])
            return now_s < 60 * minutes

    model = TimedDQN("CnnPolicy", training_environment(env, seed), seed=seed, device="cpu", **ZOO)
    curve = Curve()
    model.learn(MANY_STEPS, callback=curve)
    returns = play(model, env, seed, games)
    versions = {m.__name__: m.__version__ for m in (stable_baselines3, torch, gymnasium, ale_py)}
    with open(out, "w") as file:
        json.dump({"curve": curve.points, "final_returns": returns, "versions": versions}, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
