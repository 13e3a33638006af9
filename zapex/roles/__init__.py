"""Actor, inference, learner, replay server, relay, evaluator: duty cycles over protocols.

A role knows no transport: zapex/run/topologies.py connects it.
"""
