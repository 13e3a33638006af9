"""The agent in pure torch: networks, the double DQN learner, acting and exploration."""
