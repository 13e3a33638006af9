"""A training run: its topology, its processes, and the loop that watches them.

Imports: agent, checkpoints, chunks, config, envs, errors, fstack, host, machine, net, processes,
redis_transport, replay, roles, shm_transport, transport, watch, wire, zmq_transport.
"""
