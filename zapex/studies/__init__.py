"""Studies of this machine: how actors and learner balance on its cores and its GPU.

Imports: agent, chunks, config, envs, errors, machine, processes, roles, run.
"""
