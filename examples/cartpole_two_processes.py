"""Double DQN on CartPole in two processes: one plays, one learns, and they share the replay.

    python examples/cartpole_two_processes.py --total-steps 30000

The learner owns the replay; the actor gets `replay.handle` and writes into it without a copy.
`samples_per_insert` keeps both at the same pace. The actor asks for new weights over a pipe after
it has received the last ones, so neither process waits for the pipe. If the learner dies, the
actor's next call raises PeerDied, which ends the actor.
"""

import argparse
import contextlib
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import zapex
from zapex import PrioritizedReplay, Schema


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--total-steps", type=int, default=30_000)
    parser.add_argument("--capacity", type=int, default=20_000)
    parser.add_argument("--learning-starts", type=int, default=1_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--samples-per-insert", type=float, default=32.0)
    parser.add_argument("--target-period", type=int, default=250, help="updates")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--n-step", type=int, default=3)
    parser.add_argument("--start-method", default="spawn", choices=["spawn", "forkserver"])
    return parser.parse_args()


def make_envs(args: argparse.Namespace) -> gym.vector.VectorEnv:
    return gym.make_vec("CartPole-v1", num_envs=args.num_envs, vectorization_mode="sync")


def q_network(envs: gym.vector.VectorEnv) -> nn.Module:
    inputs, actions = envs.single_observation_space.shape[0], envs.single_action_space.n
    return nn.Sequential(
        nn.Linear(inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions)
    )


def act(args: argparse.Namespace, handle: Any, weights: Connection) -> None:
    """The actor's process: plays `total_steps` steps with the newest weights."""
    np.random.seed(args.seed)
    torch.set_num_threads(1)
    envs = make_envs(args)
    envs.action_space.seed(args.seed)
    network = q_network(envs)
    returns, scores = np.zeros(args.num_envs), []
    with zapex.connect(handle) as replay, replay.writer(args.num_envs) as writer:
        obs, _ = envs.reset(seed=args.seed)
        writer.reset(obs)
        weights.send("more")
        for step in range(0, args.total_steps, args.num_envs):
            if weights.poll():
                for parameter, array in zip(network.parameters(), weights.recv(), strict=True):
                    parameter.data = torch.from_numpy(array)
                weights.send("more")
            epsilon = max(0.05, 1.0 - step / (0.4 * args.total_steps))
            with torch.no_grad():
                action = network(torch.from_numpy(obs)).argmax(1).numpy()
            explores = np.random.random(args.num_envs) < epsilon
            action = np.where(explores, envs.action_space.sample(), action)
            obs, reward, terminated, truncated, _ = envs.step(action)
            writer.add(
                action=action,
                reward=reward,
                next_obs=obs,
                terminated=terminated,
                truncated=truncated,
            )
            returns += reward
            over = terminated | truncated
            scores += returns[over].tolist()
            returns[over] = 0.0
            if step % 5000 < args.num_envs:
                print(
                    f"step {step:6d}   mean return of the last 20: {np.mean(scores[-20:] or 0):.1f}"
                )
    print(f"{len(scores)} episodes; mean return of the last 20: {np.mean(scores[-20:]):.1f}")


def send_if_asked(actor: Connection, network: nn.Module) -> None:
    """Send the newest weights if the actor has received the last ones."""
    with contextlib.suppress(EOFError, ConnectionError):  # the actor has ended
        if actor.poll() and actor.recv():
            actor.send([parameter.detach().numpy() for parameter in network.parameters()])


def main() -> None:
    args = parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs = make_envs(args)
    online, target = q_network(envs), q_network(envs)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=args.learning_rate)
    schema = Schema.from_spaces(
        envs.single_observation_space, envs.single_action_space, n_step=args.n_step, gamma=0.99
    )
    replay = PrioritizedReplay(
        args.capacity,
        schema,
        seed=args.seed,
        min_size_to_sample=args.learning_starts,
        samples_per_insert=args.samples_per_insert,
        timeout_s=60.0,
    )
    batch = replay.empty_batch(args.batch_size)
    context = multiprocessing.get_context(args.start_method)
    pipe, theirs = context.Pipe()
    actor = context.Process(target=act, args=(args, replay.handle, theirs), daemon=True)
    actor.start()
    theirs.close()

    updates = 0
    while True:
        if not replay.can_sample(args.batch_size):
            if not actor.is_alive():
                break
            time.sleep(0.0005)
            continue
        beta = min(1.0, 0.4 + 0.6 * replay.stats()["inserted"] / args.total_steps)
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
        if updates % 10 == 0:
            send_if_asked(pipe, online)
        if updates % args.target_period == 0:
            target.load_state_dict(online.state_dict())

    actor.join()
    print(f"{updates} updates; {replay.stats()}")
    raise SystemExit(actor.exitcode)


if __name__ == "__main__":
    main()
