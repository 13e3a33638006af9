"""The replay for a user's own training loop: in this process, by a handle, or by a URL.

Imports: chunks, errors, fstack, host, machine, net, processes, replay, roles, shm_ring,
sumtree_numba, wire, zmq_transport.
"""
