"""Double DQN from a Minari dataset alone, with prioritized replay and 3-step returns.

pip install 'zapex[minari]', then make a dataset of a run, or take one of Minari's with discrete
actions:

    zapex export RUN --minari datasets --episodes 200 --epsilon 0.3
    MINARI_DATASETS_PATH=datasets python examples/offline_minari.py zapex/RUN-v0
"""

import argparse
import math

import minari
import torch
from torch import nn

from zapex import PrioritizedReplay, Schema

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset", help="its id, such as zapex/RUN-v0")
    parser.add_argument("--updates", type=int, default=5000)
    args = parser.parse_args()
    dataset = minari.load_dataset(args.dataset)
    schema = Schema.from_spaces(
        dataset.observation_space, dataset.action_space, n_step=3, gamma=0.99
    )
    replay = PrioritizedReplay(2 * max(int(dataset.total_steps), 64), schema, seed=1)
    print(f"{replay.extend_from(dataset):,} transitions of {dataset.total_episodes} episodes")

    torch.manual_seed(1)
    inputs = math.prod(dataset.observation_space.shape)
    actions, first = int(dataset.action_space.n), int(dataset.action_space.start)
    network, target = (
        nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, actions)
        )
        for _ in range(2)
    )  # fmt: skip
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for update in range(args.updates):
        if update % 200 == 0:
            target.load_state_dict(network.state_dict())
        batch = replay.sample(min(64, len(replay)))
        data = batch.torch()
        with torch.no_grad():
            best = network(data["next_obs"].float()).argmax(1, keepdim=True)
            value = target(data["next_obs"].float()).gather(1, best)[:, 0]
            goal = data["reward"] + data["discount"] * value
        index = data["action"].unsqueeze(1) - first
        q = network(data["obs"].float()).gather(1, index)[:, 0]
        loss = (data["weights"] * nn.functional.smooth_l1_loss(q, goal, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        replay.update_priorities(batch.keys, (goal - q).detach())
        if update % 500 == 0 or update + 1 == args.updates:
            print(f"update {update:6,}  loss {loss.item():.4f}  mean Q {q.mean().item():.2f}")
