"""Plain experience: whole transitions with s and s', each observation in full.

This is the message of the paper's baseline (Furukawa & Matsutani, arXiv 2110.13506). It says the
same as a chunk, in about seven times the bytes where four frames are stacked.
"""

from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.builder import flat_observations
from zapex.chunks.layout import BatchLayout
from zapex.chunks.packer import TransitionPacker
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import BadMessage
from zapex.wire.experience import row_columns
from zapex.wire.header import MAX_ACTORS, Buffer, Form, Kind, RawMessage, as_buffer
from zapex.wire.message import Body, Message, one_buffer, word


@lru_cache(maxsize=8)
def pair_rows(schema: Schema) -> np.dtype[np.void]:
    """The columns of a pair: observations s and s' as their space has them, then the rest."""
    sides = [
        (side + name.removeprefix("obs"), c.dtype, c.value_shape)
        for side in ("obs", "next_obs")
        for name, c in schema.obs_columns.items()
    ]
    steps = [(name, c.dtype, c.shape) for name, c in schema.step_columns.items()]
    return np.dtype([*sides, *steps, *((n, "<f4") for n in ("reward", "discount", "priority"))])


def _read_pairs(raw: RawMessage, form: Form) -> tuple[Buffer]:
    ours = form.schema.hash
    if raw.schema != ours:
        raise BadMessage(
            f"the peer's schema is {raw.schema:#018x}, this end's {ours:#018x}: start both from "
            "the same config"
        )
    if not 1 <= raw.rows <= form.layout.chunk:
        raise BadMessage(f"a message has 1 to {form.layout.chunk} pairs, got {raw.rows}")
    return (one_buffer(raw, nbytes=raw.rows * pair_rows(form.schema).itemsize),)


class Pairs(Message, kind=Kind.PAIRS, body=Body(lambda m: (m.body,), _read_pairs)):
    """Transitions of one stream: the columns of `pair_rows`, one whole column after another.

    actor, incarnation, sequence, stream: of the chunk that they come from.
    """

    schema: int = word("schema")
    actor: int = word("number", 0, MAX_ACTORS - 1)
    incarnation: int = word("incarnation")
    sequence: int = word("sequence")
    stream: int = word("value")
    rows: int = word("rows")
    body: Buffer = field(repr=False)

    def columns(self, schema: Schema) -> dict[str, NDArray[Any]]:
        """Each column as an array of `rows` values; views, not aligned."""
        return row_columns(pair_rows(schema), self.rows, self.body)


class PairMaker:
    """Makes pairs of whole chunks in a store."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._batches: dict[int, Batch] = {}  # by their rows; most chunks are full

    def of_slot(
        self, slot: int, rows: int, *, actor: int, incarnation: int, sequence: int, stream: int
    ) -> Pairs:
        """The transitions of a slot's chunk, copied."""
        store, schema = self._store, self._store.layout.schema
        if rows not in self._batches:
            self._batches = {rows: Batch.empty(BatchLayout(schema, rows))}
        batch = self._batches[rows]
        keys = store.keys_of(store.indices(slot)[:rows])
        store.gather(keys, batch.layout, batch.memory, batch.keys)
        values = batch.layout.views(batch.memory)
        values["priority"] = store.column(slot, "priority")[:rows]
        dtype = pair_rows(schema)
        body = np.empty(rows * dtype.itemsize, np.uint8)
        for name, column in row_columns(dtype, rows, as_buffer(body)).items():
            column[...] = values[name]
        return Pairs(schema.hash, actor, incarnation, sequence, stream, rows, as_buffer(body))


class PairWriter:
    """Writes pairs into the slots of a store, each frame once.

    The caller's loop:

        done = 0
        while done < pairs.rows:
            done = writer.write(pairs, done, slot)    # the next free slot each time
    """

    def __init__(self, store: ChunkStore) -> None:
        self._schema, self._packer = store.layout.schema, TransitionPacker(store)
        most = store.layout.chunk * pair_rows(self._schema).itemsize
        self._memory = np.empty(most, np.uint8)  # kernels are compiled for arrays to write to

    def write(self, pairs: Pairs, first: int, slot: int) -> int:
        """Write rows from `first` on into an empty slot. Returns the row that needs another."""
        schema, memory = self._schema, self._memory[: pairs.body.nbytes]
        memory[:] = np.frombuffer(pairs.body, np.uint8)
        columns = row_columns(pair_rows(schema), pairs.rows, as_buffer(memory))
        obs, next_obs = (
            flat_observations(
                schema,
                {name: columns[side + name.removeprefix("obs")] for name in schema.obs_columns},
            )
            for side in ("obs", "next_obs")
        )
        staged = np.zeros(pairs.rows, schema.step_dtype)
        for name in schema.step_columns:
            staged[name] = columns[name]
        indices, keys = np.empty((2, pairs.rows), np.int64)
        self._packer.open(slot)
        done = self._packer.pack(
            first, obs, next_obs, staged.view(np.uint8), columns["reward"].copy(),
            columns["discount"].copy(), None, columns["priority"].astype(np.float64), 0, indices,
            keys,
        )  # fmt: skip
        self._packer.close()
        return done
