"""Ape-X: distributed prioritized experience replay.

Layers; imports point down only (tests/test_layers.py):

    L8 cli    L7 launch    L6 roles    L5 connect, metrics    L4 transports, agent, environments
    L3 replay, snapshot, transport    L2 rings, tree, store, nstep, limiter, messages
    L1 jit, atomics, shm_segment, idle    L0 errors, config, schema
"""

from typing import TYPE_CHECKING, Any

from zapex.version import __version__

if TYPE_CHECKING:
    from zapex.batch import Batch
    from zapex.connections import connect
    from zapex.replay import PrioritizedReplay
    from zapex.schema import Column, Schema
    from zapex.writer import Writer

__all__ = ["Batch", "Column", "PrioritizedReplay", "Schema", "Writer", "__version__", "connect"]

_HOMES = {
    "Batch": "batch",
    "Column": "schema",
    "PrioritizedReplay": "replay",
    "Schema": "schema",
    "Writer": "writer",
    "connect": "connections",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import zapex` alone loads nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"zapex.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
