"""`load`: a new replay out of a snapshot on disk."""

import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.schema import Schema
from zapex.errors import CheckpointError
from zapex.replay.core import ReplayLayout
from zapex.replay.snapshots import (
    UNORDERED_FORMAT,
    UNREADABLE,
    Saves,
    read_manifest,
    read_state,
    restore,
)

if TYPE_CHECKING:
    from zapex.library.prioritized import PrioritizedReplay

# The settings of a replay, besides its schema.
_FRACTIONS = frozenset({"alpha", "eps", "samples_per_insert", "timeout_s"})
_COUNTS = frozenset({"capacity", "streams", "chunk", "min_size_to_sample", "tolerance", "shard"})


def load(
    make: "type[PrioritizedReplay]", path: str | os.PathLike[str], buffer: NDArray[np.uint8] | None
) -> "tuple[PrioritizedReplay, Saves]":
    """Make a replay with a snapshot's settings, and fill it. Raises CheckpointError."""
    manifest = read_manifest(path)
    try:
        facts = dict(manifest["replay"])
        facts["schema"] = Schema.from_description(facts["schema"])
        for name in _FRACTIONS | _COUNTS:
            if type(facts[name]) not in ((int, float) if name in _FRACTIONS else (int,)):
                raise TypeError(f"{name} is {facts[name]!r}")
        _check_order(manifest["format"], facts["schema"])
        layout = ReplayLayout(*(facts[n] for n in ("schema", "capacity", "streams", "chunk")))
        state = read_state(path, manifest, layout)
        settings = {name: facts[name] for name in ("schema", *_FRACTIONS, *_COUNTS)}
        replay = make(**settings, buffer=buffer)
        return replay, restore(replay.core, path, manifest, state)
    except UNREADABLE as error:
        raise CheckpointError(f"the snapshot in {path} cannot be used: {error}") from error


def _check_order(form: int, schema: Schema) -> None:
    """Raise CheckpointError if the columns of an old snapshot may lie in another order."""
    for columns in (schema.obs_columns, schema.step_columns):
        if form == UNORDERED_FORMAT and len(columns) > 1:
            raise CheckpointError(
                f"the snapshot was written by a version that did not note the order of "
                f"{sorted(columns)}: they may be swapped, so it is not used"
            )
