"""CleanRL's DQN: its learning curve on an Atari game, and games of its last network.

    python cleanrl_learning.py ENV SEED MINUTES GAMES FILE

CleanRL is scripts and no library, and its newest release that Python 3.11 takes, 0.4.8, needs gym
and no Gymnasium. So this is a statement of its dqn_atari.py (MIT, Huang et al., JMLR 23(274),
2022) in our own words: its network, hyperparameters, exploration, loss and order of steps. The
wrappers and the buffer are Stable-Baselines3's, as in earlier versions of it. What differs: the
buffer holds 100,000 steps, as that of Stable-Baselines3 beside it, because a million take 28 GB;
learning starts after 10,000 steps instead of 80,000.
Clock, curve and evaluation are those of dqn_learning.py.
"""

import json
import random
import sys
import time

from dqn_learning import POINT_S, play, training_environment

BUFFER, BATCH, LEARNING_STARTS, TRAIN_EVERY, TARGET_EVERY = 100_000, 32, 10_000, 4, 1_000
LR, GAMMA = 1e-4, 0.99
LAST_EPSILON, EXPLORES = 0.01, 0.1  # of the time, as there of its ten million steps


def main(env: str, seed: int, minutes: float, games: int, out: str) -> None:
    """Train for so many minutes, play, write {"curve", "final_returns", "versions"}."""
    began = time.perf_counter()
    from collections import deque

    import ale_py
    import gymnasium
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3.common.buffers import ReplayBuffer
    from torch import nn

    class Policy(nn.Module):
        """The Nature network; `predict` is what Stable-Baselines3's evaluation asks."""

        def __init__(self, actions: int) -> None:
            super().__init__()
            self.q = nn.Sequential(
                nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(),
                nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions),
            )  # fmt: skip

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return self.q(obs / 255.0)

        def predict(self, obs, state=None, episode_start=None, deterministic=True):
            with torch.no_grad():
                return self(torch.tensor(obs, dtype=torch.float32)).argmax(1).numpy(), state

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    envs = training_environment(env, seed)
    actions = envs.action_space
    actions.seed(seed)
    online, target = Policy(actions.n), Policy(actions.n)
    target.load_state_dict(online.state_dict())
    optimiser = torch.optim.Adam(online.parameters(), lr=LR)
    memory = ReplayBuffer(
        BUFFER, envs.observation_space, actions, "cpu",
        optimize_memory_usage=True, handle_timeout_termination=False,
    )  # fmt: skip
    points: list[list[float | None]] = []
    returns: deque[float] = deque(maxlen=100)
    step, due_s, obs = 0, 0.0, envs.reset()
    while (now_s := time.perf_counter() - began) < 60 * minutes:
        if now_s >= due_s:
            due_s = now_s + POINT_S
            points.append([now_s, 4 * step, float(np.mean(returns)) if returns else None])
        share = now_s / (60 * minutes)
        epsilon = max(LAST_EPSILON, 1 - (1 - LAST_EPSILON) * share / EXPLORES)
        act = np.array([actions.sample()]) if random.random() < epsilon else online.predict(obs)[0]
        next_obs, reward, done, infos = envs.step(act)
        real = next_obs
        if done[0]:
            real = infos[0]["terminal_observation"][None]
            if "episode" in infos[0]:
                returns.append(infos[0]["episode"]["r"])
        cut = infos[0].get("TimeLimit.truncated", False)
        memory.add(obs, real, act, reward, done & (not cut), infos)
        obs = next_obs
        if step > LEARNING_STARTS and step % TRAIN_EVERY == 0:
            batch = memory.sample(BATCH)
            with torch.no_grad():
                best = target(batch.next_observations.float()).amax(1, keepdim=True)
                wanted = batch.rewards + GAMMA * (1 - batch.dones) * best
            loss = nn.functional.mse_loss(
                online(batch.observations.float()).gather(1, batch.actions), wanted
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        if step > LEARNING_STARTS and step % TARGET_EVERY == 0:
            target.load_state_dict(online.state_dict())
        step += 1
    versions = {m.__name__: m.__version__ for m in (stable_baselines3, torch, gymnasium, ale_py)}
    found = {"curve": points, "final_returns": play(online, env, seed, games), "versions": versions}
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
