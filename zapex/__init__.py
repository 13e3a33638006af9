"""Ape-X: distributed prioritized experience replay.

Layers; imports point down only (tests/test_layers.py):

    L8 cli    L7 launch    L6 roles    L5 connect, metrics    L4 transports, agent, environments
    L3 replay, snapshot, transport    L2 rings, tree, store, nstep, limiter, messages
    L1 jit, atomics, shm_segment, idle    L0 errors, config, schema
"""

from zapex.version import __version__

__all__ = ["__version__"]
