"""The paper's baseline (Furukawa & Matsutani, arXiv 2110.13506): Redis as shared memory.

    actor     RPUSH of whole transitions (s, a, R, s') with their priority; GET of the parameters
    learner   LPOP of everything that waits, into its own replay, which it samples; SET

A message of pairs is a record `_HEAD` and the columns of `pair_dtype`, one whole column after
another. Observations are arrays, as in Atari. System `a2` pushes chunks, each frame once. The keys:

    experience   list     messages, at most `most_waiting`; actors wait while it is full
    parameters   string   the newest; `version` is their number
    batches      string   how many batches the learner of a real run has learned from
"""

import struct
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import Batch
from zapex.chunks.layout import COUNT, GENERATION, INCARNATION, SEQUENCE, STREAM, BatchLayout
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.library.prioritized import PrioritizedReplay
from zapex.replay.core import ReplayLayout
from zapex.wire.experience import Push, row_columns
from zapex.wire.messages import decode, encode
from zapex.wire.protocol import Form, as_buffer

EXPERIENCE, PARAMETERS, VERSION, BATCHES = (
    "zapex:" + name for name in ("experience", "parameters", "version", "batches")
)
_HEAD = struct.Struct("<QI")  # the schema's hash, and how many pairs
_START_S = 20.0
_LOOK_S = 0.1  # between two looks for newer parameters
_WAITING_BYTES = 256 << 20


def joined(buffers: Sequence[memoryview]) -> bytes:
    """A message's buffers as one value, each after its length (u32)."""
    return b"".join(
        part for buffer in buffers for part in (buffer.nbytes.to_bytes(4, "little"), buffer)
    )


def split(value: bytes) -> list[memoryview]:
    """The buffers of a value that `joined` made, as views."""
    rest, parts = memoryview(value), list[memoryview]()
    while rest:
        end = 4 + int.from_bytes(rest[:4], "little")
        parts.append(rest[4:end])
        rest = rest[end:]
    return parts


def connect(url: str) -> Any:
    """A client of the Redis at `url`, as soon as that answers. It may be starting."""
    import redis

    client = redis.Redis.from_url(url, socket_timeout=60.0, socket_connect_timeout=20.0, protocol=2)
    deadline = time.monotonic() + _START_S
    while True:
        try:
            client.ping()
            return client
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@lru_cache(maxsize=8)
def pair_dtype(schema: Schema) -> np.dtype[np.void]:
    """The columns of a pair: observations s and s' as their space has them, then the rest."""
    sides = [
        (side + name.removeprefix("obs"), c.dtype, c.value_shape)
        for side in ("obs", "next_obs")
        for name, c in schema.obs_columns.items()
    ]
    steps = [(name, c.dtype, c.shape) for name, c in schema.step_columns.items()]
    return np.dtype([*sides, *steps, *((n, "<f4") for n in ("reward", "discount", "priority"))])


def most_waiting(layout: ReplayLayout, actors: int) -> int:
    """Messages that may wait in the list: 256 MiB of pairs, and two for each actor at least."""
    nbytes = layout.chunk * pair_dtype(layout.schema).itemsize
    return max(2 * actors, min(4096, _WAITING_BYTES // nbytes))


class PairMaker:
    """Makes pairs of whole chunks in a store."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._batches: dict[int, Batch] = {}  # by their rows; most chunks are full

    def columns(self, slot: int) -> dict[str, NDArray[Any]]:
        """The transitions of a slot's chunk, as arrays by the names of `pair_dtype`."""
        store, schema = self._store, self._store.layout.schema
        indices = store.indices(slot)
        rows = len(indices)
        if rows not in self._batches:
            self._batches = {rows: Batch.empty(BatchLayout(schema, rows))}
        batch = self._batches[rows]
        store.gather(store.keys_of(indices), batch.layout, batch.memory, batch.keys)
        values = batch.layout.views(batch.memory)
        values["priority"] = store.column(slot, "priority")[:rows]
        return {name: values[name] for name in pair_dtype(schema).names or ()}

    def message(self, slot: int) -> bytearray:
        """The transitions of a slot's chunk, as a message."""
        columns = self.columns(slot)
        rows, schema = len(columns["reward"]), self._store.layout.schema
        dtype = pair_dtype(schema)
        message = bytearray(_HEAD.size + rows * dtype.itemsize)
        _HEAD.pack_into(message, 0, schema.hash, rows)
        body = as_buffer(np.frombuffer(message, np.uint8)[_HEAD.size :])
        for name, column in row_columns(dtype, rows, body).items():
            column[...] = columns[name]
        return message


class Sender:
    """An actor's end: pushes chunks as pairs, or as chunks (each frame once).

    most: how many messages may wait in the list. form: of messages with chunks; None sends pairs.
    """

    def __init__(self, client: Any, store: ChunkStore, most: int, form: Form | None = None) -> None:
        self.store, self._client, self._most, self._form = store, client, most, form
        self._maker = PairMaker(store)
        self.sent_bytes = 0

    def has_room(self) -> bool:
        """Whether the list may take another message."""
        return int(self._client.llen(EXPERIENCE)) < self._most

    def push(self, slot: int) -> None:
        """Push a slot's chunk; it is in Redis when this returns."""
        message: Any = self._maker.message(slot) if self._form is None else self._chunk(slot)
        self._client.rpush(EXPERIENCE, memoryview(message))
        self.sent_bytes += len(message)

    def _chunk(self, slot: int) -> bytes:
        store, header = self.store, self.store.header_rows[slot].tolist()
        chunks = [(store.body(slot), header[STREAM], header[COUNT])]
        who = {"actor": 0, "incarnation": header[INCARNATION], "sequence": header[SEQUENCE]}
        return joined(encode(Push.of_chunks(store.layout, store.mem, chunks, **who)))


class PairSink:
    """The ExperienceSink of an actor that pushes to Redis itself, from memory of its own."""

    def __init__(self, client: Any, layout: ReplayLayout, streams: int, most: int) -> None:
        slots = 4 * streams
        nbytes = ChunkStore.required_bytes(layout.chunk_layout, slots)
        memory = np.zeros(nbytes + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :][:nbytes]
        self.store = ChunkStore(memory, layout.chunk_layout, slots)
        self.store.header_rows[:, GENERATION] = 1  # one that keys can have
        self._sender = Sender(client, self.store, most)
        self._streams, self._free = streams, deque(range(slots))

    def ready(self) -> bool:
        """Always: only Redis knows how many messages wait."""
        return True

    def try_claim(self) -> NDArray[np.int64] | None:
        """(S,) free slots; None while the list is full."""
        if len(self._free) < self._streams or not self._sender.has_room():
            return None
        return np.array([self._free.popleft() for _ in range(self._streams)], np.int64)

    def commit(self, slots: NDArray[np.int64]) -> None:
        """Push whole chunks, in their order; their slots are free again."""
        for slot in slots.tolist():
            self._sender.push(slot)
            self.store.header_rows[slot, COUNT] = 0
            self._free.append(slot)


class Memory:
    """A learner's replay, filled from the list. pulled: transitions taken in so far."""

    def __init__(self, client: Any, replay: PrioritizedReplay, form: Form | None = None) -> None:
        self.replay, self._client, self._form = replay, client, form
        self.pulled = 0

    def pull(self) -> int:
        """Take in all that waits, as far as the replay's limiter allows. Returns transitions."""
        before, core = self.pulled, self.replay.core
        take = self._pairs if self._form is None else self._chunk
        while not core.insert_waits(core.layout.chunk):
            message = self._client.lpop(EXPERIENCE)
            if message is None:
                break
            self.pulled += take(message)
        return self.pulled - before

    def _pairs(self, message: bytes) -> int:
        schema = self.replay.schema
        hashed, rows = _HEAD.unpack_from(message)
        assert hashed == schema.hash, "these pairs are of another schema"
        columns = row_columns(pair_dtype(schema), rows, memoryview(message)[_HEAD.size :])
        whole: Any = {name: np.require(c, requirements="CA") for name, c in columns.items()}
        self.replay.extend(priorities=whole.pop("priority"), **whole)
        return int(rows)

    def _chunk(self, message: bytes) -> int:
        core, push = self.replay.core, decode(split(message), self._form)
        assert isinstance(push, Push)
        (chunk,) = push.chunks
        with core.lock:
            slot = core.open_slot()
            push.write(0, core.store.layout, core.store.mem, core.store.body(slot))
            core.store.header_rows[slot, COUNT] = chunk.rows
            magnitudes = core.store.column(slot, "priority")[: chunk.rows].astype(np.float64)
            core.grown(core.store.indices(slot), magnitudes, np.array([slot]))
        return int(chunk.rows)


class Parameters:
    """Both ends of the parameters: a ParameterSource for actors, a ParameterSink for a learner."""

    def __init__(self, client: Any) -> None:
        self._client, self._version, self._look_s = client, 0, 0.0

    @property
    def version(self) -> int:
        """The newest version that is known; 0 is none. Looks ten times a second at most."""
        if time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + _LOOK_S
            self._version = int(self._client.get(VERSION) or 0)
        return self._version

    def newer_than(self, version: int, out: NDArray[np.uint8]) -> int:
        """Copy the newest into `out` if it is newer than `version`. Returns its version, or 0."""
        if self.version <= version:
            return 0
        out[:] = np.frombuffer(self._client.get(PARAMETERS), np.uint8)
        return self._version

    def publish(self, version: int, parameters: NDArray[np.uint8]) -> None:
        """Make these parameters the newest."""
        self._client.mset({PARAMETERS: as_buffer(parameters), VERSION: version})
        self._version = version
