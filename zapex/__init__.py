"""Ape-X (Horgan et al. 2018): whole training runs, and a prioritized replay for loops of your own.

In a shell, `zapex train --env ALE/Breakout-v5` is a run and `zapex --help` lists the commands. In
Python, `zapex.train(zapex.TrainConfig(env="ALE/Breakout-v5"))` is one (docs/python.md). The replay
alone (docs/library.md):

    import zapex

    schema = zapex.Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    replay = zapex.PrioritizedReplay(100_000, schema)
    writer = replay.writer(num_envs=8)                  # takes what `envs.step` returns
    batch = replay.sample(512)                          # drawn by priority
    replay.update_priorities(batch.keys, td_errors)
    client = zapex.connect(replay.handle)               # the same calls, in another process

`zapex.errors` has the errors, and `zapex.sumtree_numba` the sum tree alone.
"""

# Where things live. Imports run down this map and never up (tests/test_layers.py); each package's
# docstring says what it holds.
#
#     13  __main__
#     12  cli, sb3
#     11  clusters, library
#     10  run
#      9  zmq_transport
#      8  net
#      7  roles, shm_transport, watch
#      6  host, transport, wire
#      5  replay
#      4  config, envs, sumtree_numba
#      3  agent, chunks, fstack, shm_ring
#      2  machine
#      1  errors, version

from typing import TYPE_CHECKING, Any

from zapex.version import __version__

if TYPE_CHECKING:
    from zapex import errors as errors
    from zapex.chunks.batch import Batch, SequenceBatch
    from zapex.chunks.schema import Column, Schema
    from zapex.cli.from_python import TrainConfig, train
    from zapex.cli.saved import SavedPolicy, load_policy
    from zapex.clusters.placement import launch
    from zapex.library.connect import connect
    from zapex.library.prioritized import PrioritizedReplay
    from zapex.library.writer import Writer
    from zapex.watch.report import Report, Result

__all__ = [
    "Batch", "Column", "PrioritizedReplay", "Report", "Result", "SavedPolicy", "Schema",
    "SequenceBatch", "TrainConfig", "Writer", "__version__", "connect", "launch", "load_policy",
    "train",
]  # fmt: skip

_HOMES = {
    "Batch": "chunks.batch",
    "Column": "chunks.schema",
    "PrioritizedReplay": "library.prioritized",
    "Report": "watch.report",
    "Result": "watch.report",
    "SavedPolicy": "cli.saved",
    "Schema": "chunks.schema",
    "SequenceBatch": "chunks.batch",
    "TrainConfig": "cli.from_python",
    "Writer": "library.writer",
    "connect": "library.connect",
    "launch": "clusters.placement",
    "load_policy": "cli.saved",
    "train": "cli.from_python",
}


if not TYPE_CHECKING:  # type checkers know the names

    def __getattr__(name: str) -> Any:
        """A public name, imported when it is first used: `import zapex` alone loads nothing."""
        from importlib import import_module

        if name == "errors":
            return import_module("zapex.errors")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"zapex.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, and what all modules have."""
    return sorted({*__all__, "errors", *(name for name in globals() if name.startswith("__"))})
