"""PQN or PPO as CleanRL sets them: the learning curve on an Atari game, and games of the network.

    python on_policy_learning.py pqn|ppo ENV SEED MINUTES GAMES FILE

Both collect 128 steps of eight games, then learn from them in four passes of four minibatches. A
statement of CleanRL's pqn_atari_envpool.py and ppo_atari_envpool.py (MIT, Huang et al., JMLR
23(274), 2022; arXiv 2407.04811, 1707.06347) in our own words, with their networks and
hyperparameters. What differs: games run in ALE's own vector environment, with sticky actions as in
all of `make learning`, and schedules that CleanRL spreads over ten million steps are spread over
the minutes. As in EnvPool, a lost life ends an episode and not the game.
Clock, curve and evaluation are those of dqn_learning.py.
"""

import json
import re
import sys
import time
from collections import deque

import ale_py
import numpy as np
import stable_baselines3
import torch
from ale_py.vector_env import AtariVectorEnv
from dqn_learning import POINT_S, play
from torch import nn
from torch.nn import functional as F

GAMES, STEPS, PASSES, MINIBATCHES = 8, 128, 4, 4
LR, GAMMA = 2.5e-4, 0.99
LAST_EPSILON, EXPLORES = 0.01, 0.1  # of the time
LAMBDA = {"pqn": 0.65, "ppo": 0.95}
CLIP, ENTROPY, VALUE = 0.1, 0.01, 0.5


def layer(module: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Orthogonal weights, no bias."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Agent(nn.Module):
    """Nature's trunk (PQN: with layer norms) and a head: Q, or logits and a value."""

    def __init__(self, algorithm: str, actions: int) -> None:
        super().__init__()
        norm = nn.LayerNorm if algorithm == "pqn" else lambda shape: nn.Identity()
        self.trunk = nn.Sequential(
            layer(nn.Conv2d(4, 32, 8, 4)), norm([32, 20, 20]), nn.ReLU(),
            layer(nn.Conv2d(32, 64, 4, 2)), norm([64, 9, 9]), nn.ReLU(),
            layer(nn.Conv2d(64, 64, 3, 1)), norm([64, 7, 7]), nn.ReLU(), nn.Flatten(),
            layer(nn.Linear(3136, 512)), norm([512]), nn.ReLU(),
        )  # fmt: skip
        self.actor = layer(nn.Linear(512, actions), 2**0.5 if algorithm == "pqn" else 0.01)
        self.critic = layer(nn.Linear(512, 1), 1.0) if algorithm == "ppo" else None

    def forward(self, obs):
        """Q or logits [B, actions], and the value [B]: of PQN the largest Q."""
        hidden = self.trunk(torch.as_tensor(obs).float() / 255)
        out = self.actor(hidden)
        return out, out.amax(1) if self.critic is None else self.critic(hidden)[:, 0]

    @torch.no_grad()
    def predict(self, obs, state=None, episode_start=None, deterministic=True):
        """What Stable-Baselines3's evaluation asks. PPO plays its policy, as in CleanRL."""
        out = self(obs)[0]
        if self.critic is not None:
            return torch.distributions.Categorical(logits=out).sample().numpy(), state
        return out.argmax(1).numpy(), state


def pqn_returns(rewards, values, goes_on):
    """Q(lambda) returns [STEPS, GAMES]; values has the next observation's as its last row."""
    returns = torch.empty_like(rewards)
    following = values[-1]
    for t in reversed(range(STEPS)):
        returns[t] = following = rewards[t] + GAMMA * goes_on[t] * (
            values[t + 1] if t == STEPS - 1
            else LAMBDA["pqn"] * following + (1 - LAMBDA["pqn"]) * values[t + 1]
        )  # fmt: skip
    return returns


def ppo_returns(rewards, values, goes_on):
    """Values plus generalised advantages, [STEPS, GAMES]."""
    returns, advantage = torch.empty_like(rewards), torch.zeros(GAMES)
    for t in reversed(range(STEPS)):
        error = rewards[t] + GAMMA * goes_on[t] * values[t + 1] - values[t]
        advantage = error + GAMMA * LAMBDA["ppo"] * goes_on[t] * advantage
        returns[t] = advantage + values[t]
    return returns


def pqn_loss(agent, obs, actions, returns, values, logs):
    """Mean squared error of Q."""
    return F.mse_loss(agent(obs)[0].gather(1, actions[:, None])[:, 0], returns)


def ppo_loss(agent, obs, actions, returns, values, logs):
    """Clipped policy and value loss, and the entropy's share."""
    logits, value = agent(obs)
    policy = torch.distributions.Categorical(logits=logits)
    ratio = (policy.log_prob(actions) - logs).exp()
    gain = returns - values
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    surrogate = torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    near = values + (value - values).clamp(-CLIP, CLIP)
    errors = torch.max((value - returns) ** 2, (near - returns) ** 2)
    return -surrogate - ENTROPY * policy.entropy().mean() + VALUE * 0.5 * errors.mean()


def main(algorithm: str, env: str, seed: int, minutes: float, games: int, out: str) -> None:
    """Train for so many minutes, play, write {"curve", "final_returns", "versions"}."""
    began = time.perf_counter()
    np.random.seed(seed)
    torch.manual_seed(seed)
    name = env.rpartition("/")[2].partition("-")[0]
    envs = AtariVectorEnv(
        re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower(), GAMES, reward_clipping=False,
        repeat_action_probability=0.25, autoreset_mode="SameStep",
    )  # fmt: skip
    agent = Agent(algorithm, int(envs.single_action_space.n))
    if algorithm == "pqn":
        optimiser = torch.optim.RAdam(agent.parameters(), lr=LR)
        to_returns, to_loss, most_norm = pqn_returns, pqn_loss, 10.0
    else:
        optimiser = torch.optim.Adam(agent.parameters(), lr=LR, eps=1e-5)
        to_returns, to_loss, most_norm = ppo_returns, ppo_loss, 0.5
    seen = torch.zeros(STEPS, GAMES, 4, 84, 84, dtype=torch.uint8)
    actions = torch.zeros(STEPS, GAMES, dtype=torch.long)
    rewards, goes_on, logs = torch.zeros(3, STEPS, GAMES)
    values = torch.zeros(STEPS + 1, GAMES)
    points: list[list[float | None]] = []
    recent: deque[float] = deque(maxlen=100)
    scores, frames, due_s = np.zeros(GAMES), 0, 0.0
    obs, info = envs.reset(seed=seed)
    lives = info["lives"]
    while (share := (time.perf_counter() - began) / (60 * minutes)) < 1:
        optimiser.param_groups[0]["lr"] = LR * (1 - share)
        epsilon = max(LAST_EPSILON, 1 - (1 - LAST_EPSILON) * share / EXPLORES)
        with torch.no_grad():
            for t in range(STEPS):
                seen[t] = torch.as_tensor(obs)
                result, values[t] = agent(obs)
                if algorithm == "pqn":
                    chance = torch.randint(result.shape[1], (GAMES,))
                    act = torch.where(torch.rand(GAMES) < epsilon, chance, result.argmax(1))
                else:
                    policy = torch.distributions.Categorical(logits=result)
                    act = policy.sample()
                    logs[t] = policy.log_prob(act)
                actions[t] = act
                obs, reward, ended, cut, info = envs.step(act.numpy())
                over = ended | cut
                scores += reward
                recent.extend(scores[over])
                scores[over] = 0
                frames += 4 * GAMES
                rewards[t] = torch.as_tensor(np.clip(reward, -1, 1))
                goes_on[t] = torch.as_tensor(~(over | (info["lives"] < lives)))
                lives = info["lives"]
            values[STEPS] = agent(obs)[1]
        returns = to_returns(rewards, values, goes_on)
        rows = [x.flatten(0, 1) for x in (seen, actions, returns, values[:STEPS], logs)]
        for _ in range(PASSES):
            for chosen in torch.randperm(STEPS * GAMES).chunk(MINIBATCHES):
                optimiser.zero_grad()
                to_loss(agent, *(row[chosen] for row in rows)).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), most_norm)
                optimiser.step()
        if (now_s := time.perf_counter() - began) >= due_s:
            due_s = now_s + POINT_S
            points.append([now_s, frames, float(np.mean(recent)) if recent else None])
    versions = {m.__name__: m.__version__ for m in (stable_baselines3, torch, ale_py)}
    found = {"curve": points, "final_returns": play(agent, env, seed, games), "versions": versions}
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
