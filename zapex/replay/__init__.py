"""The replay: slots, priorities, sampling and the rate limiter.

Imports: chunks, errors, machine, sumtree_kernels, sumtree_numba.
"""
