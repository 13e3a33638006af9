"""Actor, learner, replay server, relay, evaluator: a duty cycle each, over protocols.

Imports: agent, chunks, envs, errors, host, replay, sumtree_numba, transport.
"""
