"""Stable-Baselines3's DQN on an Atari game with its own settings: its steps a second, as JSON.

Runs in an environment that has stable-baselines3, ale-py and opencv: nothing of zapex is imported.
Settings are those of RL Baselines3 Zoo for Atari (batch 32, one update in 4 steps, buffer of
100,000, learning rate 1e-4, target every 1,000), but learning begins early, because what is timed
is only what comes after.
"""

import json
import sys
import time

LEARNING_STARTS = 2_000
SETTLE_S = 5.0


def main(game: str, seconds: float, threads: int) -> None:
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
    model = DQN(
        "CnnPolicy", envs, buffer_size=100_000, learning_rate=1e-4, batch_size=32,
        learning_starts=LEARNING_STARTS, target_update_interval=1_000, train_freq=4,
        gradient_steps=1, exploration_fraction=0.1, exploration_final_eps=0.01, device="cpu",
    )  # fmt: skip
    model.learn(10**9, callback=timer)
    facts = {
        "steps_per_s": timer.steps / timer.elapsed_s,
        "updates_per_s": timer.updates / timer.elapsed_s,
        "samples_per_step": 32 * timer.updates / timer.steps,
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
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
