"""Stable-Baselines3's DQN on an Atari game: its steps a second, as JSON.

    python dqn.py GAME SECONDS THREADS own|dueling BATCH

Runs in an environment that has stable-baselines3, ale-py and opencv: nothing of zapex is imported.
Settings are those of RL Baselines3 Zoo for Atari (one update in 4 steps at batch 32, buffer of
100,000, learning rate 1e-4, target every 1,000), but learning begins early, because what is timed
is only what comes after. Another batch keeps 8 samples a step. "own" is its network and loss;
"dueling" the ones that zapex has at `--hidden 512 --channels 32`: two streams of 512 units, and the
double Q-learning target. Both in float32, its replay uniform.
"""

import json
import sys
import time

LEARNING_STARTS = 2_000
SETTLE_S = 5.0


def dueling():
    """(policy class, algorithm class) with the dueling network and the double target."""
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.dqn.policies import CnnPolicy
    from torch import nn
    from torch.nn import functional

    class Trunk(BaseFeaturesExtractor):
        """The convolutions alone (Mnih et al. 2015)."""

        def __init__(self, space):
            super().__init__(space, 64 * 7 * 7)
            self.layers = nn.Sequential(
                nn.Conv2d(space.shape[0], 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(),
            )  # fmt: skip

        def forward(self, obs):
            return self.layers(obs)

    class Streams(nn.Module):
        """Value and advantages (Wang et al. 2016)."""

        def __init__(self, features, actions):
            super().__init__()
            self.value = nn.Sequential(nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, 1))
            self.advantage = nn.Sequential(
                nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, actions)
            )

        def forward(self, x):
            advantage = self.advantage(x)
            return self.value(x) + advantage - advantage.mean(1, keepdim=True)

    class Policy(CnnPolicy):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, features_extractor_class=Trunk, net_arch=[], **kwargs)

        def make_q_net(self):
            net = super().make_q_net()
            net.q_net = Streams(net.features_dim, int(self.action_space.n)).to(self.device)
            return net

    class DoubleDQN(DQN):
        """As DQN.train, but the online network chooses the next action (van Hasselt 2016)."""

        def train(self, gradient_steps, batch_size=100):
            self.policy.set_training_mode(True)
            for _ in range(gradient_steps):
                data = self.replay_buffer.sample(batch_size)
                with torch.no_grad():
                    best = self.q_net(data.next_observations).argmax(1, keepdim=True)
                    after = self.q_net_target(data.next_observations).gather(1, best)
                    goal = data.rewards + (1 - data.dones) * self.gamma * after
                q = self.q_net(data.observations).gather(1, data.actions.long())
                loss = functional.smooth_l1_loss(q, goal)
                self.policy.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
                self.policy.optimizer.step()
            self._n_updates += gradient_steps

    return Policy, DoubleDQN


def main(game: str, seconds: float, threads: int, network: str, batch: int) -> None:
    """Train until `seconds` of learning have been timed; threads: torch's, 0 for its default."""
    import ale_py
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)
    if threads:
        torch.set_num_threads(threads)

    class Timer(BaseCallback):
        """Notes the time of the first step that counts, and stops after the last."""

        first: tuple[float, int, int] | None = None
        learning_s = 0.0

        def _on_step(self) -> bool:
            now = time.perf_counter()
            if self.num_timesteps < LEARNING_STARTS:
                return True
            self.learning_s = self.learning_s or now
            if self.first is None:
                if now - self.learning_s >= SETTLE_S:
                    self.first = (now, self.num_timesteps, self.model._n_updates)
                return True
            self.elapsed_s = now - self.first[0]
            self.steps = self.num_timesteps - self.first[1]
            self.updates = self.model._n_updates - self.first[2]
            return self.elapsed_s < seconds

    timer = Timer()
    envs = VecFrameStack(make_atari_env(f"{game}NoFrameskip-v4", n_envs=1, seed=0), n_stack=4)
    policy, algorithm = dueling() if network == "dueling" else ("CnnPolicy", DQN)
    model = algorithm(
        policy, envs, buffer_size=100_000, learning_rate=1e-4, batch_size=batch,
        learning_starts=LEARNING_STARTS, target_update_interval=1_000, train_freq=batch // 8,
        gradient_steps=1, exploration_fraction=0.1, exploration_final_eps=0.01, device="cpu",
    )  # fmt: skip
    model.learn(10**9, callback=timer)
    facts = {
        "steps_per_s": timer.steps / timer.elapsed_s,
        "updates_per_s": timer.updates / timer.elapsed_s,
        "samples_per_step": batch * timer.updates / timer.steps,
        "batch_size": batch,
        "parameters": sum(p.numel() for p in model.q_net.parameters()),
        "seconds": timer.elapsed_s,
        "torch_threads": torch.get_num_threads(),
        "versions": {
            "stable-baselines3": stable_baselines3.__version__,
            "torch": torch.__version__,
            "gymnasium": gymnasium.__version__,
            "ale-py": ale_py.__version__,
        },
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
