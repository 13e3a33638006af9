"""Sequences: consecutive steps of one episode, found in linked chunks and copied into a batch.

A sequence starts at the first row of an episode or of a chunk, and at every `stride`-th row after
that. It stands for the rows up to the next start: it is drawn by the sum of their leaves. It runs
into the following chunks of its stream, and ends with its episode.

Two rows of a linked chunk are consecutive steps if the newest frame of the second has the number
after the newest frame of the first: between two episodes lies at least one frame more, the last
observation. So a piece of a sequence has its frames side by side, and takes one copy for each
column.

Only the slots' owner follows links. What it draws has `most_pieces` keys for each sequence: where
it starts, and where it goes on in each following chunk.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.batch import SequenceBatch
from zapex.chunks.gather import gather_words, step_copies
from zapex.chunks.keys import (
    GENERATION_MASK,
    GENERATION_SHIFT,
    NO_KEY,
    are_inside_kernel,
    keys_kernel,
    row_of,
    slot_of,
)
from zapex.chunks.layout import (
    COUNT,
    GENERATION,
    HEADER_WORDS,
    LINKED,
    LIVE,
    NO_FRAME,
    STATE,
    STREAM,
    SequenceLayout,
)
from zapex.chunks.schema import Schema
from zapex.chunks.store import ChunkStore
from zapex.errors import BadMessage, ReplayError, SchemaError
from zapex.machine.atomics import (
    copy_bytes,
    fence_acquire,
    fence_full,
    load_acquire,
    record_at,
    stream_bytes,
)
from zapex.machine.jit import kernel
from zapex.machine.memory import count, words
from zapex.replay.draw import Draw, weigh_kernel

UNLINKED, OUTSIDE = -1, -1
_NONE = -1
_SPREAD = 0x9E3779B97F4A7C1  # a large odd number
_STREAMED_BYTES = 4 << 20  # a batch of this size or more does not stay in a cache

# How a column is copied: the place in a chunk, the bytes of a row or of a frame, the place in a
# batch. depth: frames of an observation.
_FRAME_COPY, _STEP_COPY = words("source nbytes target depth"), words("source nbytes target")
_FRAME_WORDS, _STEP_WORDS = count(_FRAME_COPY), count(_STEP_COPY)
# Where columns begin in the batch: of int64 and float32 in elements, else in bytes.
_SEQUENCES = gather_words("slots steps pieces valid reset bootstrap spans keys indices sequences")


MOST_STEPS = (1 << 20) - 1


@dataclass(frozen=True)
class Sequences:
    """Which sequences are asked for: their steps, burn-in first, and how far apart they start."""

    length: int
    burn_in: int
    stride: int

    @property
    def steps(self) -> int:
        """With the burn-in."""
        return self.burn_in + self.length

    @property
    def option(self) -> int:
        """As the `option` of a request."""
        return (self.length << 40) + (self.burn_in << 20) + self.stride

    @classmethod
    def of_option(cls, option: int) -> Self:
        """The inverse of `option`. Raises BadMessage if a peer's number is out of range."""
        asked = cls(option >> 40, option >> 20 & MOST_STEPS, option & MOST_STEPS)
        if not (asked.length > 0 and asked.stride > 0 and asked.steps <= MOST_STEPS):
            raise BadMessage(f"there are no sequences like {asked}")
        return asked

    def layout(self, schema: Schema, sequences: int) -> SequenceLayout:
        """Of a batch of so many."""
        return SequenceLayout(schema, sequences, steps=self.steps, burn_in=self.burn_in)


@kernel
def _newest(body: int, row: int, w: Any, mem16: Any) -> Any:
    """The number of the newest frame of a row's observation."""
    return np.int64(mem16[(body + w.obs_frames) // 2 + (row + 1) * w.stack - 1])


@kernel
def _follows(body: int, row: int, w: Any, mem16: Any) -> Any:
    """Whether a row is the step after the row before it; row > 0."""
    return _newest(body, row, w, mem16) == _newest(body, row - 1, w, mem16) + 1


@kernel
def _end(body: int, row: int, end: int, w: Any, mem16: Any) -> int:
    """The row after the last one, before row `end`, that is of the episode of `row`."""
    last = row + 1
    while last < end and _follows(body, last, w, mem16):
        last += 1
    return last


@kernel
def _table_of_links(slots: int, headers: Any) -> Any:
    """The slot of each linked chunk that has rows: a hash table with open addressing."""
    cells = 2
    while cells < 2 * slots:
        cells *= 2
    table = np.full(cells, _NONE, np.int32)
    for slot in range(slots):
        header = slot * HEADER_WORDS
        if (
            headers[header + STREAM] < LINKED
            or headers[header + STATE] != LIVE
            or load_acquire(headers, header + COUNT) <= 0
        ):
            continue
        cell = ((headers[header + STREAM] >> 1) * _SPREAD >> 20) & (cells - 1)
        while table[cell] != _NONE:
            cell = (cell + 1) & (cells - 1)
        table[cell] = slot
    return table


@kernel
def _slot_of_link(link: int, headers: Any, table: Any) -> Any:
    """The slot of the chunk with this link, or _NONE."""
    cells = table.shape[0]
    cell = ((link >> 1) * _SPREAD >> 20) & (cells - 1)
    while table[cell] != _NONE:
        if headers[np.int64(table[cell]) * HEADER_WORDS + STREAM] == link:
            return np.int64(table[cell])
        cell = (cell + 1) & (cells - 1)
    return _NONE


@kernel
def follow_kernel(
    drawn: Any,
    leaf_of: Any,
    stride: int,
    shard: int,
    mem: Any,
    plan: Any,
    keys: Any,
    indices: Any,
    leaves: Any,
) -> Any:
    """Find the sequences of the rows at the indices `drawn` (n,). Returns n, or UNLINKED.

    keys, indices (n * pieces): where a sequence starts, and where it goes on; -1 after its end.
    leaves (n * pieces): the sum of the leaves by which it is drawn, then zeros. leaf_of: by index.
    """
    w = record_at(plan, 0, _SEQUENCES)
    headers, mem16 = mem.view(np.int64), mem.view(np.uint16)
    table = np.empty(0, np.int32)
    for b in range(drawn.shape[0]):
        slot = drawn[b] // w.chunk
        row = drawn[b] - slot * w.chunk
        if headers[slot * HEADER_WORDS + STREAM] < LINKED:
            return UNLINKED
        body = w.bodies + slot * w.body_bytes
        rows = load_acquire(headers, slot * HEADER_WORDS + COUNT)
        first = row
        while first > 0 and _follows(body, first, w, mem16):
            first -= 1
        start = row - (row - first) % stride
        total = 0.0
        for i in range(start, _end(body, start, min(start + stride, rows), w, mem16)):
            total += leaf_of[slot * w.chunk + i]
        steps, row, at = 0, start, b * w.pieces
        for p in range(w.pieces):
            indices[at + p] = keys[at + p] = _NONE
            leaves[at + p] = 0.0
        leaves[at] = total
        for p in range(w.pieces):
            indices[at + p] = slot * w.chunk + row
            steps += _end(body, row, rows, w, mem16) - row
            ends = _end(body, row, rows, w, mem16) < rows
            if ends or steps >= w.steps:
                break
            if table.shape[0] == 0:
                table = _table_of_links(w.slots, headers)
            # The next number, and no episode begins with it.
            link = (headers[slot * HEADER_WORDS + STREAM] & ~1) + 2
            slot = _slot_of_link(link, headers, table)
            if slot == _NONE:
                break
            row, body = 0, w.bodies + slot * w.body_bytes
            rows = load_acquire(headers, slot * HEADER_WORDS + COUNT)
        used = 1
        while used < w.pieces and indices[at + used] != _NONE:
            used += 1
        keys_kernel(indices[at : at + used], headers, w.chunk, shard, keys[at : at + used])
    return drawn.shape[0]


@kernel
def _copy(batch: Any, target: int, mem: Any, source: int, nbytes: int, streaming: bool) -> None:
    if streaming:
        stream_bytes(batch, target, mem, source, nbytes)
    else:
        copy_bytes(batch, target, mem, source, nbytes)


@kernel
def _frames_of(
    step: int, frame: int, number: int, b: int, w: Any, body: int, mem: Any, plan: Any, batch: Any
) -> None:
    """Copy `number` frames from `frame` on: the newest ones of the observations from `step` on."""
    streaming = batch.shape[0] >= _STREAMED_BYTES
    for c in range(w.num_frame_copies):
        copy = record_at(plan, w.frame_copies + c * _FRAME_WORDS, _FRAME_COPY)
        row = b * (w.steps + w.n_step + copy.depth - 1) + copy.depth - 1 + step
        source = body + copy.source + frame * copy.nbytes
        _copy(batch, copy.target + row * copy.nbytes, mem, source, number * copy.nbytes, streaming)


@kernel
def _older_frames(b: int, row: int, w: Any, body: int, mem: Any, plan: Any, batch: Any) -> bool:
    """Copy the frames before the newest one of a sequence's first observation."""
    mem16 = mem.view(np.uint16)
    for c in range(w.num_frame_copies):
        copy = record_at(plan, w.frame_copies + c * _FRAME_WORDS, _FRAME_COPY)
        at = (body + w.obs_frames) // 2 + (row + 1) * w.stack - copy.depth
        target = copy.target + b * (w.steps + w.n_step + copy.depth - 1) * copy.nbytes
        for j in range(copy.depth - 1):
            frame = np.int64(mem16[at + j])
            place = target + j * copy.nbytes
            if frame == NO_FRAME:
                batch[place : place + copy.nbytes] = 0
            elif frame < w.max_frames:
                copy_bytes(batch, place, mem, body + copy.source + frame * copy.nbytes, copy.nbytes)
            else:
                return False
    return True


@kernel
def _blank(b: int, steps: int, observations: int, w: Any, plan: Any, batch: Any) -> None:
    """Write zeros after a sequence's last step, and after its last observation."""
    for c in range(w.num_step_copies):
        copy = record_at(plan, w.step_copies + c * _STEP_WORDS, _STEP_COPY)
        first = copy.target + (b * w.steps + steps) * copy.nbytes
        batch[first : copy.target + (b + 1) * w.steps * copy.nbytes] = 0
    for c in range(w.num_frame_copies):
        copy = record_at(plan, w.frame_copies + c * _FRAME_WORDS, _FRAME_COPY)
        rows = w.steps + w.n_step + copy.depth - 1
        first = b * rows + (copy.depth - 1 + observations if observations else 0)
        batch[copy.target + first * copy.nbytes : copy.target + (b + 1) * rows * copy.nbytes] = 0


@kernel
def _copy_sequence(b: int, keys: Any, w: Any, mem: Any, plan: Any, batch: Any) -> Any:
    """Copy sequence b. Returns its steps and its observations; 0 steps: its first row is torn.

    keys (pieces,). What it reads may change meanwhile, so each number is checked before its use.
    """
    headers, mem16 = mem.view(np.int64), mem.view(np.uint16)
    steps = observations = 0
    long, first = batch.view(np.int64), w.bootstrap + b * w.steps
    for p in range(w.pieces):
        if keys[p] == NO_KEY:
            break
        slot, row = slot_of(keys[p]), row_of(keys[p])
        rows = load_acquire(headers, slot * HEADER_WORDS + COUNT)
        if not row < rows <= w.chunk:
            return 0, 0
        body = w.bodies + slot * w.body_bytes
        end = _end(body, row, min(rows, row + w.steps - steps), w, mem16)
        frame, number = _newest(body, row, w, mem16), 0
        for i in range(row, end):
            after = np.int64(mem16[(body + w.next_obs_frames) // 2 + (i + 1) * w.stack - 1]) - frame
            if not 1 <= after - (i - row) <= w.n_step:
                return 0, 0
            long[first + steps + i - row] = steps + after
            number = max(number, after + 1)
        if frame + number > w.max_frames:
            return 0, 0
        if steps == 0 and not _older_frames(b, row, w, body, mem, plan, batch):
            return 0, 0
        # The frames after the last row's own are the next piece's, too, if there is one.
        _frames_of(steps, frame, number, b, w, body, mem, plan, batch)
        for c in range(w.num_step_copies):
            copy = record_at(plan, w.step_copies + c * _STEP_WORDS, _STEP_COPY)
            target = copy.target + (b * w.steps + steps) * copy.nbytes
            source = body + copy.source + row * copy.nbytes
            copy_bytes(batch, target, mem, source, (end - row) * copy.nbytes)
        observations = max(observations, steps + number)
        steps += end - row
        if end < rows:  # the episode or the sequence ends
            break
    return steps, observations


@kernel
def _is_whole(keys: Any, mem: Any) -> bool:
    # SYNC row-whole: the caller's copies come before this second look at the generations
    fence_acquire()
    headers = mem.view(np.int64)
    for p in range(keys.shape[0]):
        now = headers[slot_of(keys[p]) * HEADER_WORDS + GENERATION]
        if keys[p] != NO_KEY and (keys[p] >> GENERATION_SHIFT) & GENERATION_MASK != now:
            return False
    return True


@kernel
def gather_sequences_kernel(
    keys: Any, indices: Any, stride: int, mem: Any, plan: Any, batch: Any
) -> int:
    """Copy the sequences that `follow_kernel` has found. Returns how many are torn, or OUTSIDE.

    A sequence is torn if one of its chunks was evicted meanwhile. Then it has no step, and its key
    is -1. plan: of `_plan`. Weights are not written.
    """
    w = record_at(plan, 0, _SEQUENCES)
    headers, mem16, long = mem.view(np.int64), mem.view(np.uint16), batch.view(np.int64)
    torn = 0
    for b in range(w.sequences):
        mine = keys[b * w.pieces : (b + 1) * w.pieces]
        used = 1
        while used < w.pieces and mine[used] != NO_KEY:
            used += 1
        if not are_inside_kernel(mine[:used], w.slots, w.chunk):
            return OUTSIDE
        steps, observations = _copy_sequence(b, mine[:used], w, mem, plan, batch)
        slot, row, span = slot_of(mine[0]), row_of(mine[0]), 0
        begins = False
        if steps:
            body = w.bodies + slot * w.body_bytes
            rows = min(row + stride, headers[slot * HEADER_WORDS + COUNT], w.chunk)
            span = _end(body, row, rows, w, mem16) - row
            begins = (
                not _follows(body, row, w, mem16)
                if row > 0
                else (headers[slot * HEADER_WORDS + STREAM] & 1) != 0
            )
        if not (steps and _is_whole(mine[:used], mem)):
            steps = observations = span = 0
            begins = False
            torn += 1
        _blank(b, steps, observations, w, plan, batch)
        for t in range(w.steps):
            batch[w.valid + b * w.steps + t] = t < steps
            if t >= steps:
                long[w.bootstrap + b * w.steps + t] = max(observations - 1, 0)
        batch[w.reset + b] = begins
        long[w.spans + b] = span
        long[w.keys + b] = mine[0] if steps else NO_KEY
        long[w.indices + b] = indices[b * w.pieces]
    if batch.shape[0] >= _STREAMED_BYTES:
        fence_full()
    return torn


def _plan(store: ChunkStore, layout: SequenceLayout) -> NDArray[np.int64]:
    """The state of the kernels for sequences of `layout`."""
    known = store.plans.get(layout)
    if known is not None:
        return known
    chunk, sections = store.layout, layout.sections
    frames = [
        (chunk.sections[name].offset, column.item_bytes, sections[name].offset, column.stack)
        for name, column in chunk.schema.obs_columns.items()
    ]
    steps = {n: sections[n].offset for n in (*chunk.schema.step_columns, "reward", "discount")}
    columns = ("valid", "reset", "bootstrap", "spans", "keys", "indices")
    values = {
        "slots": store.slots,
        "steps": layout.steps,
        "pieces": most_pieces(layout.steps, chunk.chunk),
        "sequences": layout.batch_size,
        **{n: sections[n].offset // sections[n].dtype.itemsize for n in columns},
    }
    copies = np.array(frames, np.int64), step_copies(chunk, steps)
    plan = store.plans[layout] = store.new_gather_plan(_SEQUENCES, values, *copies)
    return plan


def most_pieces(steps: int, chunk: int) -> int:
    """How many chunks a sequence may lie in: more than it needs, as chunks may be short."""
    return 2 * -(-steps // chunk) + 1


def follow(
    draw: Draw,
    layout: SequenceLayout,
    stride: int,
    store: ChunkStore,
    shard: int,
    leaves: NDArray[np.float64],
) -> Draw:
    """The sequences in which drawn rows lie: `most_pieces` keys for each.

    The caller owns the slots, and evicts none meanwhile. leaves: of all rows, by index. Raises
    ReplayError: a row is not of a writer.
    """
    plan = _plan(store, layout)
    rows = len(draw.keys) * most_pieces(layout.steps, store.layout.chunk)
    keys, indices, sums = np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows)
    found = follow_kernel(draw.indices, leaves, stride, shard, store.mem, plan, keys, indices, sums)
    if found == UNLINKED:
        raise ReplayError(
            "sequences are of steps that a writer has added, and this replay has rows of extend "
            "(or of a snapshot of an older version), which belong to no stream"
        )
    return Draw(keys, indices, sums, draw.total, draw.count, 0.0)


def compile_kernels(store: ChunkStore) -> None:
    """Compile the kernels of `follow` and `gather`, so that a first call need not wait for that."""
    asked = Sequences(length=1, burn_in=0, stride=1)
    try:
        layout = asked.layout(store.layout.schema, 1)
    except SchemaError:  # its columns have names of a batch's own: no sequences can be drawn
        return
    plan, nothing = _plan(store, layout), np.empty(0, np.int64)
    leaves, batch = np.empty(0), np.zeros(layout.nbytes, np.uint8)
    follow_kernel(nothing, leaves, 1, 0, store.mem, plan, nothing, nothing, leaves)
    keys = np.full(most_pieces(1, store.layout.chunk), NO_KEY, np.int64)
    gather_sequences_kernel(keys, keys, 1, store.mem, plan, batch)


def gather(draw: Draw, store: ChunkStore, batch: SequenceBatch, stride: int) -> int:
    """Copy the sequences that `follow` found, without weights. Returns how many are torn.

    Raises IndexError: a key is not of this store. A peer may send wrong keys.
    """
    plan = _plan(store, batch.layout)
    torn = gather_sequences_kernel(draw.keys, draw.indices, stride, store.mem, plan, batch.memory)
    if torn == OUTSIDE:
        raise IndexError("a key points outside of the store")
    return torn


def weigh(batch: SequenceBatch, leaves: NDArray[np.float64], beta: float) -> None:
    """Write weights (B,), divided by their largest; torn sequences have 0. leaves (B,): of each."""
    weigh_kernel(leaves, 0.0, float(beta), batch.weights)
    batch.weights[batch.keys == NO_KEY] = 0.0


def mixed_priorities(
    batch: SequenceBatch, td_errors: NDArray[np.float64], eta: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Keys of the steps for which the sequences stand, and the sequences' new priorities.

    eta max |delta| + (1 - eta) mean |delta| (Kapturowski et al. 2019, sec. 2.3), over the valid
    steps after the burn-in. td_errors: (B, length).
    """
    valid = batch.valid[:, batch.layout.burn_in :]
    errors = np.where(valid, np.abs(td_errors), 0.0)
    means = errors.sum(axis=1) / np.maximum(valid.sum(axis=1), 1)
    mixed = eta * errors.max(axis=1) + (1.0 - eta) * means
    spans = np.where(batch.keys == NO_KEY, 0, batch.spans)
    before = np.cumsum(spans) - spans
    offsets = np.arange(spans.sum()) - np.repeat(before, spans)
    return np.repeat(batch.keys, spans) + offsets, np.repeat(mixed, spans)
