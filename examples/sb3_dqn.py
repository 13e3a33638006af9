"""Stable-Baselines3's DQN with prioritized replay and 3-step returns: two lines differ from SB3's.

pip install 'zapex[sb3]' && python examples/sb3_dqn.py --total-steps 50000
"""

import argparse

from zapex.sb3 import PrioritizedDQN

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--total-steps", type=int, default=50_000)
    args = parser.parse_args()
    model = PrioritizedDQN(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=3,
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
