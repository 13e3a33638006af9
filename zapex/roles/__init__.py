"""Actor, inference, learner, replay server, relay, evaluator: duty cycles over protocols."""
