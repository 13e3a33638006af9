"""Stable-Baselines3's DQN at work, with its own uniform buffer and with zapex's.

    python -m benchmarks.peers.sb3_steps NAME CAPACITY SWEEP_BYTES

answers each line "STEPS" with one row, [nanoseconds a step]. The environment only shows frames of
noise, stacked four at a time; a batch of 32 is learned after every fourth step. So what is compared
is the buffer, below the network's own work, which is the same for all.
"""

import time
from functools import partial

import numpy as np

from benchmarks.peers.serving import serve

SIDE, STACK = 84, 4


class Sb3:
    """SB3's DQN; ours: zapex's buffer below it, or zapex's DQN, with priorities."""

    package = "stable-baselines3"

    def __init__(self, capacity, ours=""):
        import gymnasium
        import torch
        from gymnasium import spaces
        from stable_baselines3 import DQN
        from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

        torch.set_num_threads(1)
        frames = np.random.default_rng(0).integers(0, 255, (64, SIDE, SIDE, 1), np.uint8)

        class Noise(gymnasium.Env):
            observation_space = spaces.Box(0, 255, (SIDE, SIDE, 1), np.uint8)
            action_space = spaces.Discrete(4)

            def reset(self, seed=None, options=None):
                self.steps = 0
                return frames[0], {}

            def step(self, action):
                self.steps += 1
                return frames[self.steps % 64], 0.0, self.steps == 500, False, {}

        settings = {
            "buffer_size": capacity, "learning_starts": 200, "batch_size": 32, "train_freq": 4,
            "seed": 1,
        }  # fmt: skip
        kind = DQN
        if ours:
            from zapex.sb3 import PrioritizedDQN, PrioritizedReplayBuffer

            settings["replay_buffer_class"] = PrioritizedReplayBuffer
            kind = PrioritizedDQN if ours == "dqn" else DQN
        self.model = kind("CnnPolicy", VecFrameStack(DummyVecEnv([Noise]), STACK), **settings)
        self.model.learn(300)


CONTENDERS = {
    "sb3": Sb3,
    "sb3, zapex's buffer": partial(Sb3, ours="buffer"),
    "zapex.sb3.PrioritizedDQN": partial(Sb3, ours="dqn"),
}


def measure(contender, sweep, steps):
    start = time.perf_counter_ns()
    contender.model.learn(steps, reset_num_timesteps=False)
    return [[(time.perf_counter_ns() - start) / steps]]


if __name__ == "__main__":
    serve(CONTENDERS, measure)
