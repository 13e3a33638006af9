"""Chunk slots: headers, generations, and the kernels that gather from them.

    headers   (slots, 16) int64     state, generation, actor, ... (layout.py); state is stored last
    bodies    (slots, body bytes)   chunks, in the layout of layout.py

A slot always has one owner. The owner changes with the state:

    free --grant--> granted --commit--> committed --accept--> live --evict--> evicted --> free
    replay          an actor's          replay's              replay's        quarantine

The actor makes the move `commit`, with one store. The replay makes all other moves, in ledger.py.
An eviction increments the generation, so older keys are no longer valid. The slot then waits in
quarantine until the learner has released all answers that were issued before.

    SYNC chunk-whole: commit (release state)       -> accept (acquire state)
    SYNC row-counted: add (release count)          -> the owner's new rows (acquire count)
    SYNC row-whole:   evict (release generation)   -> gather (copy; acquire fence; generation again)
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.gather import (
    BATCH_GATHER,
    GatherArguments,
    gather_kernel,
    gather_numbers_kernel,
    gather_tables,
    row_offset,
)
from zapex.chunks.keys import (
    GENERATION_MASK,
    GENERATION_SHIFT,
    MAX_SLOTS,
    are_inside_kernel,
    keys_kernel,
    slot_of,
)
from zapex.chunks.layout import (
    COUNT,
    GENERATION,
    HEADER_WORDS,
    STATE,
    BatchLayout,
    ChunkLayout,
    SequenceLayout,
)
from zapex.errors import ConfigError, SharedMemoryError
from zapex.machine.atomics import (
    load_kernel,
    store_release,
)
from zapex.machine.jit import kernel
from zapex.machine.memory import RecordType, Section, lay_out, pack


@kernel
def set_state_kernel(headers: Any, slot: int, state: int) -> None:
    store_release(headers, slot * HEADER_WORDS + STATE, state)


def _sections(layout: ChunkLayout, slots: int) -> tuple[dict[str, Section], int]:
    if not 1 <= slots <= MAX_SLOTS:
        raise ConfigError(
            f"a replay has 1 to {MAX_SLOTS} slots, got {slots}: lower capacity, "
            "or fewer streams (each chunk then holds more transitions)"
        )
    return lay_out(
        [
            ("headers", (slots, HEADER_WORDS), np.int64),
            ("bodies", (slots, layout.body_bytes), np.uint8),
        ]
    )


class ChunkStore:
    """The slots in memory. Any process may map it, read rows, and write chunks to granted slots.

    buffer: uint8 array (cache-line aligned) of `required_bytes(layout, slots)`; a new one is zero.
    """

    def __init__(self, buffer: NDArray[np.uint8], layout: ChunkLayout, slots: int) -> None:
        wanted = self.required_bytes(layout, slots)
        if buffer.nbytes < wanted:
            raise SharedMemoryError(
                f"the store needs {wanted} bytes, the buffer has {buffer.nbytes}"
            )
        self.layout = layout
        self.slots = slots
        self.mem = buffer[:wanted]
        sections, _ = _sections(layout, slots)
        self.bodies_offset = sections["bodies"].offset
        self.header_rows: NDArray[np.int64] = sections["headers"].view(self.mem)
        self.headers = self.header_rows.reshape(-1)
        self._arguments: dict[tuple[int, int], tuple[BatchLayout, GatherArguments]] = {}
        self._columns: dict[str, NDArray[Any]] = {}
        self.plans: dict[SequenceLayout, NDArray[np.int64]] = {}  # of sequences.py

    @staticmethod
    def required_bytes(layout: ChunkLayout, slots: int) -> int:
        """Bytes of headers and bodies."""
        return _sections(layout, slots)[1]

    @property
    def num_indices(self) -> int:
        """The number of indices: slots * chunk. An index is slot * chunk + offset."""
        return self.slots * self.layout.chunk

    def body(self, slot: int) -> int:
        """The offset of a slot's body in `mem`, in bytes."""
        return self.bodies_offset + slot * self.layout.body_bytes

    def column(self, slot: int, name: str) -> NDArray[Any]:
        """A section of a slot's chunk as an array (a view)."""
        row: NDArray[Any] = self.columns(name)[slot]
        return row

    def columns(self, name: str) -> NDArray[Any]:
        """A section of every slot: (slots, *shape), a view."""
        of_all = self._columns.get(name)
        if of_all is None:
            section = self.layout.sections[name]
            inner = np.empty(section.shape, section.dtype).strides
            of_all = self._columns[name] = np.ndarray(
                (self.slots, *section.shape),
                section.dtype,
                self.mem,
                self.bodies_offset + section.offset,
                (self.layout.body_bytes, *inner),
            )
        return of_all

    def state(self, slot: int) -> int:
        """The state of a slot, with acquire semantics."""
        # SYNC chunk-whole: all writes of the actor before its commit are visible after this
        return load_kernel(self.headers, slot * HEADER_WORDS + STATE)

    def keys_of(self, indices: NDArray[np.int64], shard: int = 0) -> NDArray[np.int64]:
        """The present keys of the transitions at `indices`."""
        keys = np.empty(len(indices), np.int64)
        keys_kernel(indices, self.headers, self.layout.chunk, shard, keys)
        return keys

    def holds(self, key: int) -> bool:
        """Whether a key made by this store is still of its generation."""
        now = self.headers[slot_of(key) * HEADER_WORDS + GENERATION]
        return bool((key >> GENERATION_SHIFT) & GENERATION_MASK == now)

    def indices(self, slot: int) -> NDArray[np.int64]:
        """The indices of a slot's transitions."""
        first = slot * self.layout.chunk
        return np.arange(first, first + int(self.header_rows[slot, COUNT]))

    def gather(
        self,
        keys: NDArray[np.int64],
        layout: BatchLayout,
        memory: NDArray[np.uint8],
        out_keys: NDArray[np.int64],
        first: int = 0,
    ) -> int:
        """Copy the rows of `keys` (n,) into `memory`, in `layout`. Returns how many are torn.

        `out_keys` (n,) gets the keys, -1 for torn rows. `first`: the row of the batch that the
        first key is for. Raises IndexError for a key that is not of this store: a peer may send
        wrong keys, and the kernel does not check them.
        """
        self._check(keys)
        return gather_kernel(keys, *self.gather_arguments(layout, first), memory, out_keys)

    def gather_numbers(
        self,
        keys: NDArray[np.int64],
        layout: BatchLayout,
        memory: NDArray[np.uint8],
        out_keys: NDArray[np.int64],
    ) -> tuple[int, NDArray[np.int64]]:
        """As `gather`, in a layout with its frames apart.

        Returns how many are torn, and the numbers of the frames in their chunks (B, 2, stack).
        """
        self._check(keys)
        numbers = np.empty(2 * len(keys) * self.layout.schema.stack, np.int64)
        arguments = self.gather_arguments(layout)
        torn = gather_numbers_kernel(keys, *arguments, memory, out_keys, numbers)
        return torn, numbers.reshape(len(keys), 2, -1)

    def _check(self, keys: NDArray[np.int64]) -> None:
        if not are_inside_kernel(keys, self.slots, self.layout.chunk):
            raise IndexError("a key points outside of the store")

    def gather_arguments(self, layout: BatchLayout, first: int = 0) -> GatherArguments:
        """The arguments of `gather_kernel` between the keys and the batch's memory."""
        # By identity: a hash of a layout takes longer than the copy of a small batch.
        known = self._arguments.get((id(layout), first))
        if known is not None:
            return known[1]
        own = {"slots": self.slots}
        for name in ("keys", "indices", "weights"):
            itemsize = layout.sections[name].dtype.itemsize
            own[name] = row_offset(layout, name, first) // itemsize
        tables = gather_tables(self.layout, layout, first)
        found = self.mem, self.new_gather_plan(BATCH_GATHER, own, *tables)
        self._arguments[id(layout), first] = layout, found
        return found

    def new_gather_plan(
        self,
        record: RecordType,
        values: Mapping[str, int],
        frame_copies: NDArray[np.int64],
        step_copies: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """The state of a gather. record: from `gather_words`. values: those of its own words."""
        longest = max(c.item_bytes for c in self.layout.schema.obs_columns.values())
        parts: dict[str, NDArray[Any]] = {
            "frame_copies": frame_copies,
            "step_copies": step_copies,
            "zeros": np.zeros(longest, np.uint8),
        }
        return self.new_state(record, values, parts)[0]

    def new_state(
        self, record: RecordType, values: Mapping[str, int], parts: Mapping[str, NDArray[Any]]
    ) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """A kernel's state over these chunks, as `pack` returns it. record: from `chunk_words`."""
        layout, schema = self.layout, self.layout.schema
        sizes = {
            "chunk": layout.chunk,
            "max_frames": layout.frames,
            "stack": schema.stack,
            "n_step": schema.n_step,
            "bodies": self.bodies_offset,
            "body_bytes": layout.body_bytes,
        }
        names = ("obs_frames", "next_obs_frames", "reward", "discount", "priority")
        starts = {name: layout.sections[name].offset for name in names}
        return pack(record, {**sizes, **starts, **values}, parts)
