"""A custom network and a custom loss; `zapex.load_policy` then loads the network.

python examples/own_network.py --max-frames 20000
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import zapex


class Network(nn.Module):
    """Q values from two layers and tanh."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        self.first = nn.Linear(observation_space.shape[0], 64)
        self.last = nn.Linear(64, int(action_space.n))

    def forward(self, obs):
        return self.last(torch.tanh(self.first(obs)))


def loss(predictions, targets):
    """The loss of each row, at most 5, so that rare large errors count less."""
    return F.smooth_l1_loss(predictions, targets, reduction="none").clamp(max=5.0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-frames", type=int, default=20_000)
    args = parser.parse_args()
    config = zapex.TrainConfig(
        env="CartPole-v1",
        network=Network,
        loss=loss,
        preset="laptop",
        actors=1,
        max_frames=args.max_frames,
        eval_period_s=5,
    )
    result = zapex.train(config, on_report=lambda report: not report.mean_return > 300)
    print(f"{result.steps} steps, best mean return {result.best_return}")
    policy = zapex.load_policy(result.run_dir, trust=True)  # it runs the code of `Network`
    print("Q values of an upright pole", policy.q_values([0.0, 0.0, 0.0, 0.0]))


if __name__ == "__main__":  # the run's processes import this file
    main()
