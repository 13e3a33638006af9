"""Chunk slots: headers, generations, keys, and the kernels that gather from them.

    headers   (slots, 16) int64     state, generation, actor, ... (schema.py); state is stored last
    bodies    (slots, body bytes)   chunks, as schema.py lays them out

Ownership moves, and is never shared:

    free --grant--> granted --commit--> committed --accept--> live --evict--> evicted --> free
    replay          an actor's          replay's              replay's        quarantine

The replay owns every move but `commit`, which is the actor's one store; they are in
slot_ledger.py. An eviction bumps the generation, so a key taken before it no longer fits; the slot
then waits in quarantine until the learner has released every answer issued before.

    SYNC chunk-whole: commit (release state)       -> accept (acquire state)
    SYNC row-whole:   evict (release generation)   -> gather (copy; acquire fence; generation again)

Key: shard 8 bits | generation 28 | slot 19 | offset 8; never negative; -1 is none.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.atomics import (
    copy_bytes,
    fence_acquire,
    fence_full,
    load_acquire,
    prefetch,
    store_release,
    stream_bytes,
)
from zapex.errors import ConfigError, SharedMemoryError
from zapex.jit import kernel
from zapex.schema import (
    COUNT,
    F_BYTES,
    F_INNERMOST,
    F_ITEM,
    F_NEXT_OBS,
    F_OBS,
    F_SOURCE,
    F_STACK,
    GENERATION,
    HEADER_WORDS,
    LIVE,
    NO_FRAME,
    S_BYTES,
    S_SOURCE,
    S_TARGET,
    STATE,
    BatchLayout,
    ChunkLayout,
    align,
    gather_tables,
)

GatherArguments = tuple[Any, Any, Any, int, int, int, int, int, Any, Any, Any]

OFFSET_BITS, SLOT_BITS, GENERATION_BITS, SHARD_BITS = 8, 19, 28, 8
MAX_SLOTS = 1 << SLOT_BITS
NO_KEY = -1
_STREAMED_BYTES = 4 << 20  # a batch from which on its reader would not find it in a cache anyway
_BYTES_AHEAD = 1024  # of the next row's first frame, on their way while a row is copied
GENERATION_MASK = (1 << GENERATION_BITS) - 1
_SLOT_SHIFT = OFFSET_BITS
_GENERATION_SHIFT = OFFSET_BITS + SLOT_BITS
_SHARD_SHIFT = OFFSET_BITS + SLOT_BITS + GENERATION_BITS


@kernel
def keys_kernel(indices: Any, headers: Any, chunk: int, shard: int, keys: Any) -> None:
    """Keys of transitions by index (slot * chunk + offset)."""
    for b in range(indices.shape[0]):
        slot = indices[b] // chunk
        generation = headers[slot * HEADER_WORDS + GENERATION]
        keys[b] = (
            (shard << _SHARD_SHIFT)
            | (generation << _GENERATION_SHIFT)
            | (slot << _SLOT_SHIFT)
            | (indices[b] - slot * chunk)
        )


@kernel
def indices_kernel(keys: Any, headers: Any, chunk: int, shard: int, indices: Any) -> int:
    """indices[b]: the transition's index, or -1 where the key fits no more; returns how many do."""
    fit = 0
    slots = headers.shape[0] // HEADER_WORDS
    for b in range(keys.shape[0]):
        key = keys[b]
        slot = (key >> _SLOT_SHIFT) & (MAX_SLOTS - 1)
        offset = key & ((1 << OFFSET_BITS) - 1)
        indices[b] = -1
        if key < 0 or key >> _SHARD_SHIFT != shard or slot >= slots:
            continue
        header = slot * HEADER_WORDS
        if (
            (key >> _GENERATION_SHIFT) & GENERATION_MASK == headers[header + GENERATION]
            and headers[header + STATE] == LIVE
            and offset < headers[header + COUNT]
        ):
            indices[b] = slot * chunk + offset
            fit += 1
    return fit


@kernel
def _interleave4(target: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    # Slices as arguments: LLVM vectorises this loop, and not the same one over flat indices.
    for p in range(a.shape[0]):
        target[4 * p] = a[p]
        target[4 * p + 1] = b[p]
        target[4 * p + 2] = c[p]
        target[4 * p + 3] = d[p]


@kernel
def gather_innermost(mem: Any, base: int, at: Any, size: int, stack: int, item: int, zeros: Any,
                      batch: Any, target: int) -> None:  # fmt: skip
    """One stacked observation with the stack innermost; `at` (stack,): its frames' numbers."""
    if stack == 4 and item == 1:
        f0 = zeros[:size] if at[0] == NO_FRAME else mem[base + at[0] * size :][:size]
        f1 = zeros[:size] if at[1] == NO_FRAME else mem[base + at[1] * size :][:size]
        f2 = zeros[:size] if at[2] == NO_FRAME else mem[base + at[2] * size :][:size]
        f3 = zeros[:size] if at[3] == NO_FRAME else mem[base + at[3] * size :][:size]
        _interleave4(batch[target : target + 4 * size], f0, f1, f2, f3)
        return
    for j in range(stack):
        frame = base + at[j] * size
        for p in range(size // item):
            place = target + (p * stack + j) * item
            for k in range(item):
                batch[place + k] = 0 if at[j] == NO_FRAME else mem[frame + p * item + k]


@kernel
def gather_columns(keys: Any, mem: Any, mem16: Any, bodies: int, body_bytes: int, obs_frames: int,
                   next_frames: int, stack: int, step_table: Any, batch: Any,
                   numbers: Any) -> None:  # fmt: skip
    """Everything but the frames; their numbers into `numbers` (B * 2 * stack).

    A loop of its own: each value lies on a line of its own, and so their cache misses overlap.
    """
    for b in range(keys.shape[0]):
        slot = (keys[b] >> _SLOT_SHIFT) & (MAX_SLOTS - 1)
        row = keys[b] & ((1 << OFFSET_BITS) - 1)
        body = bodies + slot * body_bytes
        at = 2 * stack * b
        obs_at = (body + obs_frames) // 2 + row * stack
        next_at = (body + next_frames) // 2 + row * stack
        for j in range(stack):
            numbers[at + j] = mem16[obs_at + j]
            numbers[at + stack + j] = mem16[next_at + j]
        for c in range(step_table.shape[0]):
            size = step_table[c, S_BYTES]
            target = step_table[c, S_TARGET] + b * size
            copy_bytes(batch, target, mem, body + step_table[c, S_SOURCE] + row * size, size)


@kernel
def gather_kernel(keys: Any, mem: Any, mem16: Any, headers: Any, bodies: int, body_bytes: int,
                  obs_frames: int, next_frames: int, stack: int, frame_table: Any,
                  step_table: Any, zeros: Any, batch: Any, out_keys: Any) -> int:  # fmt: skip
    """Copy the rows of `keys` into `batch`; torn rows get key -1; returns how many are torn.

    A row is torn when its slot's generation has moved on by the time that it was copied. Keys must
    have been checked to lie inside the store.
    """
    count = keys.shape[0]
    numbers = np.empty(2 * stack * count, np.int64)
    gather_columns(keys, mem, mem16, bodies, body_bytes, obs_frames, next_frames, stack,
                   step_table, batch, numbers)  # fmt: skip
    # STEP columns-copied
    streaming = batch.shape[0] >= _STREAMED_BYTES
    for b in range(count):
        slot = (keys[b] >> _SLOT_SHIFT) & (MAX_SLOTS - 1)
        body = bodies + slot * body_bytes
        if b + 1 < count:
            following = (keys[b + 1] >> _SLOT_SHIFT) & (MAX_SLOTS - 1)
            size = frame_table[0, F_BYTES]
            ahead = bodies + following * body_bytes + frame_table[0, F_SOURCE]
            ahead += numbers[2 * stack * (b + 1)] * size
            for place in range(ahead, ahead + min(size, _BYTES_AHEAD), 64):
                prefetch(mem, place)
        for side in range(2):
            for c in range(frame_table.shape[0]):
                size, depth = frame_table[c, F_BYTES], frame_table[c, F_STACK]
                base = body + frame_table[c, F_SOURCE]
                column = frame_table[c, F_NEXT_OBS] if side else frame_table[c, F_OBS]
                target = column + b * depth * size
                # No slices for each frame: counting their references takes a locked instruction,
                # which waits until all stores before it are done.
                first = (2 * b + side + 1) * stack - depth
                if frame_table[c, F_INNERMOST]:
                    at = numbers[first : first + depth]
                    gather_innermost(mem, base, at, size, depth, frame_table[c, F_ITEM], zeros,
                                      batch, target)  # fmt: skip
                    continue
                for j in range(depth):
                    number = numbers[first + j]
                    if number == NO_FRAME:
                        copy_bytes(batch, target + j * size, zeros, 0, size)
                    elif streaming:
                        stream_bytes(batch, target + j * size, mem, base + number * size, size)
                    else:
                        copy_bytes(batch, target + j * size, mem, base + number * size, size)
    if streaming:
        fence_full()
    # STEP rows-copied
    # SYNC row-whole: the copies above come before this second look at the generations
    fence_acquire()
    torn = 0
    for b in range(count):
        key = keys[b]
        now = headers[((key >> _SLOT_SHIFT) & (MAX_SLOTS - 1)) * HEADER_WORDS + GENERATION]
        if (key >> _GENERATION_SHIFT) & GENERATION_MASK == now:
            out_keys[b] = key
        else:
            out_keys[b] = NO_KEY
            torn += 1
    return torn


@kernel
def _state_kernel(headers: Any, slot: int) -> int:
    # SYNC chunk-whole: what the actor wrote before its commit is visible after this
    return load_acquire(headers, slot * HEADER_WORDS + STATE)


@kernel
def set_state_kernel(headers: Any, slot: int, state: int) -> None:
    store_release(headers, slot * HEADER_WORDS + STATE, state)


class ChunkStore:
    """The slots as memory: any process may map them, read rows and (where granted) write chunks.

    buffer: uint8 array (cache-line aligned) of `required_bytes(layout, slots)`, zero when new.
    """

    def __init__(self, buffer: NDArray[np.uint8], layout: ChunkLayout, slots: int) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise ConfigError(
                f"a replay has 1 to {MAX_SLOTS} slots, got {slots}: lower capacity, "
                "or fewer streams (each chunk then holds more transitions)"
            )
        wanted = self.required_bytes(layout, slots)
        if buffer.nbytes < wanted:
            raise SharedMemoryError(
                f"the store needs {wanted} bytes, the buffer has {buffer.nbytes}"
            )
        self.layout = layout
        self.slots = slots
        self.mem = buffer[:wanted]
        self.mem16 = self.mem.view(np.uint16)
        self.bodies_offset = align(slots * HEADER_WORDS * 8)
        self.headers: NDArray[np.int64] = self.mem[: slots * HEADER_WORDS * 8].view(np.int64)
        self.header_rows = self.headers.reshape(slots, HEADER_WORDS)
        longest = max(c.item_bytes for c in layout.schema.obs_columns.values())
        self._zeros = np.zeros(longest, np.uint8)
        self._arguments: dict[int, tuple[BatchLayout, GatherArguments]] = {}

    @staticmethod
    def required_bytes(layout: ChunkLayout, slots: int) -> int:
        """Bytes of headers and bodies."""
        return align(slots * HEADER_WORDS * 8) + slots * layout.body_bytes

    @property
    def num_indices(self) -> int:
        """Transitions there is room for; an index is slot * chunk + offset."""
        return self.slots * self.layout.chunk

    def body(self, slot: int) -> int:
        """Where the body of a slot starts in `mem`."""
        return self.bodies_offset + slot * self.layout.body_bytes

    def column(self, slot: int, name: str) -> NDArray[Any]:
        """A section of a slot's chunk as an array (a view)."""
        return self.layout.column(name, self.mem, self.body(slot))

    def state(self, slot: int) -> int:
        """The state of a slot, with acquire semantics."""
        return _state_kernel(self.headers, slot)

    def keys_of(self, indices: NDArray[np.int64], shard: int = 0) -> NDArray[np.int64]:
        """Keys of transitions as they are now."""
        keys = np.empty(len(indices), np.int64)
        keys_kernel(indices, self.headers, self.layout.chunk, shard, keys)
        return keys

    def indices_of(self, keys: NDArray[np.int64], shard: int = 0) -> tuple[NDArray[np.int64], int]:
        """Indices of keys, -1 where the transition is gone or never was; and how many are there."""
        indices = np.empty(len(keys), np.int64)
        fit = indices_kernel(keys, self.headers, self.layout.chunk, shard, indices)
        return indices, fit

    def gather(
        self,
        keys: NDArray[np.int64],
        layout: BatchLayout,
        memory: NDArray[np.uint8],
        out_keys: NDArray[np.int64],
    ) -> int:
        """Copy the rows of `keys` (B,) into `memory` as `layout` says; the number of torn rows.

        `out_keys` (B,) gets the keys, -1 for torn rows. Raises IndexError for a key that is not of
        this store: a peer's keys are checked here before a kernel follows them.
        """
        slots = (keys >> _SLOT_SHIFT) & (MAX_SLOTS - 1)
        offsets = keys & ((1 << OFFSET_BITS) - 1)
        if len(keys) and (
            keys.min() < 0 or slots.max() >= self.slots or offsets.max() >= self.layout.chunk
        ):
            raise IndexError("a key points outside of the store")
        return gather_kernel(keys, *self.gather_arguments(layout), memory, out_keys)

    def gather_arguments(self, layout: BatchLayout) -> GatherArguments:
        """What `gather_kernel` takes between the keys and the batch's memory."""
        # By identity: hashing a layout takes longer than copying a small batch.
        known = self._arguments.get(id(layout))
        if known is not None:
            return known[1]
        sections = self.layout.sections
        found: GatherArguments = (
            self.mem, self.mem16, self.headers, self.bodies_offset, self.layout.body_bytes,
            sections["obs_frames"].offset, sections["next_obs_frames"].offset,
            self.layout.schema.stack, *gather_tables(self.layout, layout), self._zeros,
        )  # fmt: skip
        self._arguments[id(layout)] = layout, found
        return found


def slots_needed(capacity: int, chunk: int, streams: int) -> int:
    """Slots for `capacity` transitions and every stream's credit (design: 2 a stream, and 8)."""
    return -(-capacity // chunk) + 2 * streams + 8


def chunk_length(capacity: int, streams: int, n_step: int) -> int:
    """K: transitions a chunk; short enough that evicting one is a small share of the memory."""
    return max(n_step, min(64, capacity // (16 * max(1, streams))))
