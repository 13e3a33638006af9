"""Studies: how actors and learner balance on this machine, and a model of a run on many hosts.

Imports: agent, chunks, config, envs, errors, host, machine, net, processes, replay, roles, run,
wire, zmq_transport.
"""
