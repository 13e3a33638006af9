"""Stable-Baselines3's DQN with prioritized replay: a buffer, and a `train` that weights the loss.

pip install stable-baselines3 && python examples/sb3_dqn.py --total-steps 50000
"""

import argparse
from typing import Any, NamedTuple

import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import BaseBuffer
from torch.nn import functional as F

from zapex import PrioritizedReplay, Schema


class Samples(NamedTuple):
    observations: torch.Tensor
    actions: torch.Tensor
    next_observations: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor
    weights: torch.Tensor
    keys: np.ndarray


class ZapexBuffer(BaseBuffer):
    """SB3's buffer interface over `replay.extend`, which finds shared frames."""

    def __init__(
        self,
        buffer_size,
        observation_space,
        action_space,
        device="auto",
        n_envs=1,
        gamma=0.99,
        beta=0.4,
        stack=None,
        seed=None,
        **_: Any,
    ) -> None:
        super().__init__(buffer_size, observation_space, action_space, device, n_envs)
        schema = Schema.from_spaces(
            observation_space, action_space, n_step=1, gamma=gamma, stack=stack
        )
        self.replay = PrioritizedReplay(buffer_size, schema, seed=seed)
        self.beta = beta

    def add(self, obs, next_obs, action, reward, done, infos) -> None:
        timeouts = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        action = action.reshape(self.n_envs, *self.action_space.shape)
        self.replay.extend(
            obs=obs,
            next_obs=next_obs,
            action=action,
            reward=reward,
            terminated=done.astype(bool) & ~timeouts,
            truncated=timeouts,
        )

    def size(self) -> int:
        return len(self.replay)

    def sample(self, batch_size, env=None) -> Samples:
        batch = self.replay.sample(batch_size, self.beta)
        data = batch.torch(self.device)
        return Samples(
            data["obs"],
            data["action"].unsqueeze(1),
            data["next_obs"],
            data["reward"].unsqueeze(1),
            data["discount"].unsqueeze(1),
            data["weights"].unsqueeze(1),
            batch.keys,
        )

    def _get_samples(self, batch_inds, env=None):
        raise NotImplementedError("rows are drawn by priority: call sample")


class PrioritizedDQN(DQN):
    """DQN whose buffer is a ZapexBuffer."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        for _ in range(gradient_steps):
            data = self.replay_buffer.sample(batch_size)
            with torch.no_grad():
                best = self.q_net(data.next_observations).argmax(1, keepdim=True)
                bootstrap = self.q_net_target(data.next_observations).gather(1, best)
                goal = data.rewards + data.discounts * bootstrap
            value = self.q_net(data.observations).gather(1, data.actions)
            loss = (data.weights * F.smooth_l1_loss(value, goal, reduction="none")).mean()
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            td_errors = (goal - value).detach().squeeze(1).cpu().numpy()
            self.replay_buffer.replay.update_priorities(data.keys, td_errors)
        self._n_updates += gradient_steps
        self.logger.record("train/loss", loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--total-steps", type=int, default=50_000)
    args = parser.parse_args()
    model = PrioritizedDQN(
        "MlpPolicy",
        "CartPole-v1",
        replay_buffer_class=ZapexBuffer,
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1000,
        gamma=0.99,
        seed=1,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        verbose=1,
    )
    model.learn(args.total_steps, log_interval=20)
    print(model.replay_buffer.replay.stats())
