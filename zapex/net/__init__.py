"""Sockets and keys: the two ends of a link between hosts, and the guard of a server.

Imports: chunks, errors, fstack, host, machine, replay, shm_transport, sumtree_numba,
    transport, wire, zmtp.
"""
