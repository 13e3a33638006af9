"""The command line: arguments and files become settings; the demos.

Imports: agent, checkpoints, clusters, config, envs, errors, fstack, host, library, machine, net,
    processes, replay, roles, run, shm_transport, studies, watch, wire.
"""
