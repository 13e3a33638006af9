"""A custom environment and a wrapper: a grid in which the agent has to reach the goal.

python examples/own_env.py --max-frames 20000
"""

import argparse

import gymnasium
import numpy as np

import zapex

SIDE = 5
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class Grid(gymnasium.Env):
    """Observations are the places of the agent and of the goal; each step costs 0.1."""

    observation_space = gymnasium.spaces.Dict(
        {name: gymnasium.spaces.Box(0, SIDE - 1, (2,), np.float32) for name in ("agent", "goal")}
    )
    action_space = gymnasium.spaces.Discrete(len(MOVES))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.agent, self.goal = self.np_random.integers(SIDE, size=(2, 2))
        self.steps = 0
        return self.observe(), {}

    def observe(self):
        return {"agent": self.agent.astype(np.float32), "goal": self.goal.astype(np.float32)}

    def step(self, action):
        self.agent = np.clip(self.agent + MOVES[action], 0, SIDE - 1)
        self.steps += 1
        reached = bool((self.agent == self.goal).all())
        return self.observe(), 1.0 if reached else -0.1, reached, self.steps >= 50, {}


class Relative(gymnasium.ObservationWrapper):
    """Only the place of the goal relative to the agent."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-SIDE, SIDE, (2,), np.float32)

    def observation(self, observation):
        return observation["goal"] - observation["agent"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-frames", type=int, default=20_000)
    parser.add_argument(
        "--whole", action="store_true", help="without the wrapper: observe both places"
    )
    args = parser.parse_args()
    config = zapex.TrainConfig(
        env=Grid,
        wrapper=[] if args.whole else Relative,
        preset="laptop",
        actors=1,
        max_frames=args.max_frames,
        capacity=20_000,
        learning_starts=500,
        batch_size=64,
        eval_period_s=5,
    )
    result = zapex.train(config)
    print(f"{result.steps} steps, best mean return {result.best_return}")
    policy = zapex.load_policy(result.run_dir, "latest")
    env = Grid() if args.whole else Relative(Grid())
    print("first move", policy(env.reset(seed=1)[0]))


if __name__ == "__main__":  # the run's processes import this file
    main()
