"""Soft actor-critic (Haarnoja et al. 2018) on Pendulum: Box actions and an extra column.

    python examples/sac_pendulum.py --total-steps 15000

The extra column is the log-probability of the action under the policy that took it. The networks
are small and the temperature is fixed, because the example is about the replay.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from zapex import Column, PrioritizedReplay, Schema


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=15_000)
    parser.add_argument("--learning-starts", type=int, default=1_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.1)
    return parser.parse_args()


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs)
    )


class Policy(nn.Module):
    """A squashed Gaussian over actions in [-scale, scale]."""

    def __init__(self, inputs: int, scale: np.ndarray) -> None:
        super().__init__()
        self.body = network(inputs, 2 * len(scale))
        self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.body(obs).chunk(2, dim=1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        log_prob = normal.log_prob(raw) - torch.log(self.scale * (1 - raw.tanh() ** 2) + 1e-6)
        return raw.tanh() * self.scale, log_prob.sum(1)


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs = gym.make_vec("Pendulum-v1", num_envs=1, vectorization_mode="sync")
    observations, actions = envs.single_observation_space, envs.single_action_space
    inputs = observations.shape[0]
    policy = Policy(inputs, actions.high)
    critics, targets = ([network(inputs + len(actions.high), 1) for _ in "12"] for _ in "ab")
    for critic, copy in zip(critics, targets, strict=True):
        copy.load_state_dict(critic.state_dict())
    policy_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    critic_parameters = [p for critic in critics for p in critic.parameters()]
    critic_optimizer = torch.optim.Adam(critic_parameters, lr=1e-3)

    schema = Schema.from_spaces(
        observations, actions, n_step=1, gamma=0.99, extra={"log_prob": Column((), np.float32)}
    )
    replay = PrioritizedReplay(
        50_000, schema, alpha=0.4, seed=args.seed, min_size_to_sample=args.learning_starts
    )
    writer = replay.writer(1)
    batch = replay.empty_batch(args.batch_size)

    obs, _ = envs.reset(seed=args.seed)
    writer.reset(obs)
    score, scores = 0.0, []
    for step in range(args.total_steps):
        with torch.no_grad():
            action, log_prob = (t.numpy() for t in policy(torch.from_numpy(obs)))
        obs, reward, terminated, truncated, _ = envs.step(action)
        writer.add(
            action=action,
            reward=reward,
            next_obs=obs,
            terminated=terminated,
            truncated=truncated,
            log_prob=log_prob,
        )
        score += float(reward[0])
        if terminated[0] or truncated[0]:
            scores.append(score)
            score = 0.0
            if len(scores) % 10 == 0:
                print(f"step {step:6d}   mean return of the last 10: {np.mean(scores[-10:]):7.1f}")
        if not replay.can_sample(args.batch_size):
            continue

        data = replay.sample(args.batch_size, beta=0.4, out=batch).torch()
        with torch.no_grad():
            next_action, next_log_prob = policy(data["next_obs"])
            both = torch.cat([data["next_obs"], next_action], 1)
            bootstrap = torch.min(*(critic(both) for critic in targets)).squeeze(1)
            goal = bootstrap - args.temperature * next_log_prob
            goal = data["reward"] + data["discount"] * goal
        both = torch.cat([data["obs"], data["action"]], 1)
        values = [critic(both).squeeze(1) for critic in critics]
        loss = sum((data["weights"] * (value - goal) ** 2).mean() for value in values)
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        replay.update_priorities(batch.keys, (goal - values[0]).detach().numpy())

        action, log_prob = policy(data["obs"])
        value = torch.min(*(critic(torch.cat([data["obs"], action], 1)) for critic in critics))
        policy_loss = (args.temperature * log_prob - value.squeeze(1)).mean()
        policy_optimizer.zero_grad()
        policy_loss.backward()
        policy_optimizer.step()
        with torch.no_grad():
            for critic, copy in zip(critics, targets, strict=True):
                for new, average in zip(critic.parameters(), copy.parameters(), strict=True):
                    average.lerp_(new, 0.005)

    print(f"{len(scores)} episodes; mean return of the last 10: {np.mean(scores[-10:]):.1f}")
    print(f"mean log-probability in the last batch: {batch['log_prob'].mean():.2f}")
    print(replay.stats())


if __name__ == "__main__":
    main()
