"""Actor, inference, learner, replay server, relay, evaluator: duty cycles over protocols.

Imports: agent, chunks, envs, errors, host, replay, sumtree_numba, transport.
"""
