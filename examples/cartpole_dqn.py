"""Double DQN on CartPole in one file, with zapex's replay and nothing else of zapex.

    python examples/cartpole_dqn.py --total-steps 30000

`replay.writer` turns the steps of vector environments into n-step transitions. The learner samples
by priority, weights the loss, and sets new priorities from the TD errors.
"""

import argparse
import random

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from zapex import PrioritizedReplay, Schema


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--total-steps", type=int, default=30_000)
    parser.add_argument("--capacity", type=int, default=20_000)
    parser.add_argument("--learning-starts", type=int, default=1_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--target-period", type=int, default=250, help="updates")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--n-step", type=int, default=3)
    parser.add_argument("--save", help="directory in which to save the replay at the end")
    return parser.parse_args()


def q_network(envs: gym.vector.VectorEnv) -> nn.Module:
    inputs, actions = envs.single_observation_space.shape[0], envs.single_action_space.n
    return nn.Sequential(
        nn.Linear(inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions)
    )


def main() -> None:
    args = parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs = gym.make_vec("CartPole-v1", num_envs=args.num_envs, vectorization_mode="sync")
    online, target = q_network(envs), q_network(envs)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=args.learning_rate)

    schema = Schema.from_spaces(
        envs.single_observation_space, envs.single_action_space, n_step=args.n_step, gamma=0.99
    )
    replay = PrioritizedReplay(
        args.capacity, schema, seed=args.seed, min_size_to_sample=args.learning_starts
    )
    writer = replay.writer(args.num_envs, autoreset="next_step")
    batch = replay.empty_batch(args.batch_size)

    obs, _ = envs.reset(seed=args.seed)
    writer.reset(obs)
    returns, scores, updates = np.zeros(args.num_envs), [], 0
    for step in range(0, args.total_steps, args.num_envs):
        epsilon = max(0.05, 1.0 - step / (0.4 * args.total_steps))
        with torch.no_grad():
            action = online(torch.from_numpy(obs)).argmax(1).numpy()
        explores = np.random.random(args.num_envs) < epsilon
        action = np.where(explores, envs.action_space.sample(), action)
        obs, reward, terminated, truncated, _ = envs.step(action)
        writer.add(
            action=action, reward=reward, next_obs=obs, terminated=terminated, truncated=truncated
        )
        returns += reward
        over = terminated | truncated
        scores += returns[over].tolist()
        returns[over] = 0.0

        if not replay.can_sample(args.batch_size):
            continue
        beta = min(1.0, 0.4 + 0.6 * step / args.total_steps)
        data = replay.sample(args.batch_size, beta, out=batch).torch()
        with torch.no_grad():
            best = online(data["next_obs"]).argmax(1, keepdim=True)
            bootstrap = target(data["next_obs"]).gather(1, best).squeeze(1)
            goal = data["reward"] + data["discount"] * bootstrap
        value = online(data["obs"]).gather(1, data["action"].unsqueeze(1)).squeeze(1)
        td_errors = goal - value
        loss = (data["weights"] * nn.functional.huber_loss(value, goal, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        replay.update_priorities(batch.keys, td_errors.detach().numpy())
        updates += 1
        if updates % args.target_period == 0:
            target.load_state_dict(online.state_dict())
        if updates % 1000 == 0:
            print(f"step {step:6d}   mean return of the last 20: {np.mean(scores[-20:]):6.1f}")

    print(f"{len(scores)} episodes; mean return of the last 20: {np.mean(scores[-20:]):.1f}")
    print(replay.stats())
    if args.save:
        replay.save(args.save)


if __name__ == "__main__":
    main()
