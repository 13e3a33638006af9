"""R2D2 (Kapturowski et al. 2019) on CartPole without velocities: a task that needs memory.

    python examples/r2d2.py

The network sees the positions of cart and pole, and must find their velocities in its LSTM. The
replay draws sequences, with the state that the actor had at their first step; the burn-in brings
this state up to date with the newest parameters. Ends when ten greedy episodes have a mean return
of 475.
"""

import argparse
import copy
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from zapex import Column, PrioritizedReplay, Schema

HIDDEN = 64
ENVS = 8
LENGTH, BURN_IN, BATCH = 20, 10, 32
N_STEP, GAMMA = 5, 0.99
FIRST_UPDATE, STEPS_PER_UPDATE, TARGET_EVERY, EVALUATE_EVERY = 1_000, 2, 100, 500
SOLVED = 475.0


class Positions(gym.ObservationWrapper):
    """CartPole's positions (of the cart, of the pole), without their velocities."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation):
        """Cart position and pole angle."""
        return observation[[0, 2]]


def make_envs(count):
    """Vector environments without velocities."""
    return gym.make_vec("CartPole-v1", count, vectorization_mode="sync", wrappers=[Positions])


class Network(nn.Module):
    """Q(s, a) of each step of a sequence (dueling; Wang et al. 2016), and the LSTM's next state."""

    def __init__(self, inputs, actions):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU())
        self.memory = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.value, self.advantage = nn.Linear(HIDDEN, 1), nn.Linear(HIDDEN, actions)

    def forward(self, obs, state):
        """obs (B, T, inputs), state (B, 2, HIDDEN): Q (B, T, actions), state (B, 2, HIDDEN)."""
        h, c = state.transpose(0, 1)[:, None].contiguous()
        features, (h, c) = self.memory(self.body(obs), (h, c))
        advantage = self.advantage(features)
        q = self.value(features) + advantage - advantage.mean(-1, keepdim=True)
        return q, torch.stack([h[0], c[0]], dim=1)

    @torch.no_grad()
    def act(self, obs, state):
        """The best actions for one step (B,), and the next state."""
        q, state = self(torch.from_numpy(obs)[:, None], torch.from_numpy(state))
        return q[:, 0].argmax(-1).numpy(), state.numpy()


def learn(network, target, optimiser, replay, beta=0.6):
    """One double-DQN step on a batch of sequences. Returns the mean |TD error|."""
    sequences = replay.sample_sequences(BATCH, LENGTH, burn_in=BURN_IN, beta=beta)
    batch = sequences.torch()
    obs, state = batch["obs"], batch["state"][:, 0]
    action, reward, discount, valid = (
        batch[name][:, BURN_IN:] for name in ("action", "reward", "discount", "valid")
    )
    # The observations that the steps bootstrap from, counted from the end of the burn-in.
    follows = (batch["bootstrap"][:, BURN_IN:] - BURN_IN).clamp(min=0)
    with torch.no_grad():
        _, warm = network(obs[:, :BURN_IN], state)
        future = target(obs, state)[0][:, BURN_IN:]
    q, _ = network(obs[:, BURN_IN:], warm)
    best = q.detach().argmax(-1).gather(1, follows)
    rows = torch.arange(BATCH)[:, None]
    td_error = (
        reward + discount * future[rows, follows, best] - q.gather(2, action[..., None])[..., 0]
    )
    losses = nn.functional.huber_loss(td_error, torch.zeros_like(td_error), reduction="none")
    loss = (batch["weights"][:, None] * valid * losses).sum() / valid.sum().clamp(min=1)
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 10.0)
    optimiser.step()
    replay.update_sequences(sequences, td_error.detach().numpy())
    return float((td_error.detach().abs() * valid).sum() / valid.sum().clamp(min=1))


def evaluate(network, episodes=10, seed=1):
    """The mean return of greedy episodes."""
    envs = make_envs(episodes)
    obs, _ = envs.reset(seed=seed)
    state = np.zeros((episodes, 2, HIDDEN), np.float32)
    returns, playing = np.zeros(episodes), np.ones(episodes, bool)
    while playing.any():
        action, state = network.act(obs, state)
        obs, reward, terminated, truncated, _ = envs.step(action)
        returns += reward * playing
        playing &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def train(max_seconds, seed=1):
    """Play and learn until CartPole is solved. Returns the best mean return of an evaluation."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    envs = make_envs(ENVS)
    schema = Schema.from_spaces(
        envs.single_observation_space,
        envs.single_action_space,
        n_step=N_STEP,
        gamma=GAMMA,
        extra={"state": Column((2, HIDDEN), np.float32)},
    )
    replay = PrioritizedReplay(100_000, schema, alpha=0.9, seed=seed, streams=ENVS)
    network = Network(2, 2)
    target = copy.deepcopy(network)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    # Each environment explores by its own epsilon (Horgan et al. 2018).
    epsilon = 0.4 ** (1 + 7 * np.arange(ENVS) / (ENVS - 1))

    began_s, step, updates, best = time.monotonic(), 0, 0, 0.0
    obs, _ = envs.reset(seed=seed)
    state, ended = np.zeros((ENVS, 2, HIDDEN), np.float32), np.zeros(ENVS, bool)
    with replay.writer(ENVS, autoreset=envs) as writer:
        writer.reset(obs)
        while time.monotonic() - began_s < max_seconds:
            action, following = network.act(obs, state)
            explores = rng.random(ENVS) < epsilon
            action = np.where(explores, rng.integers(0, 2, ENVS), action)
            obs, reward, terminated, truncated, _ = envs.step(action)
            writer.add(
                action=action, reward=reward, next_obs=obs, terminated=terminated,
                truncated=truncated, state=state,
            )  # fmt: skip
            # This step has given the first observation of an episode to those that had ended.
            state = np.where(ended[:, None, None], np.float32(0), following)
            ended = terminated | truncated
            step += 1
            if len(replay) < FIRST_UPDATE or step % STEPS_PER_UPDATE:
                continue
            error = learn(network, target, optimiser, replay)
            updates += 1
            if updates % TARGET_EVERY == 0:
                target.load_state_dict(network.state_dict())
            if updates % EVALUATE_EVERY == 0:
                score, seconds = evaluate(network), time.monotonic() - began_s
                best = max(best, score)
                print(
                    f"{seconds:4.0f} s, {step * ENVS:7,d} steps, {updates:6,d} updates: return "
                    f"{score:5.1f}, |TD error| {error:.2f}", flush=True,
                )  # fmt: skip
                if score >= SOLVED:
                    print(f"solved in {seconds:.0f} s")
                    break
    envs.close()
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--max-seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"best mean return: {train(arguments.max_seconds, arguments.seed):.1f}")
