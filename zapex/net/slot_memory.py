"""Slots as the memory that pushes are received into, where the transport can do that.

A slot is in use here while a buffer of it exists: a part of a push that is being received, or that
waits to be handled. So a push that is cut, refused or doubled leaves its slot free as soon as its
buffers are gone. No header of a slot changes here; only the commit makes a chunk count.
"""

from collections.abc import Collection, Iterable, Sequence
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.store import ChunkStore
from zapex.wire.header import Buffer


class SlotMemory:
    """The bodies of a store's slots, for one receiver at a time."""

    def __init__(self, store: ChunkStore) -> None:
        self._store, layout = store, store.layout
        sections = [layout.sections[name] for name in layout.schema.obs_columns]
        self._columns = [(section.offset, section.nbytes) for section in sections]
        # By slot, the array of its body. Every buffer that `_part` gives keeps it alive. A plain
        # dictionary, as a WeakValueDictionary is slow to ask; what has ended leaves it.
        self._used: dict[int, ref[NDArray[np.uint8]]] = {}
        self._slots: dict[int, int] = {}  # by the id of such an array, its slot
        self._peers: dict[int, bytes] = {}

    def unused(self, slots: Iterable[int]) -> list[int]:
        """Those of the slots that nothing is received into."""
        return [slot for slot in slots if slot not in self._used]

    def peers(self, slots: Iterable[int]) -> set[bytes]:
        """The peers whose pushes are in these slots."""
        return {self._peers[slot] for slot in slots if slot in self._used}

    def begin(self, peer: bytes, slot: int, nbytes: int) -> Buffer | None:
        """Memory for the first observation column of a peer's push; None: it does not fit."""
        start = self._store.body(slot)
        body = self._store.mem[start : start + self._store.layout.body_bytes]
        used, slots, key = self._used, self._slots, id(body)
        assert slot not in used

        def end(_: ref[NDArray[np.uint8]]) -> None:
            del used[slot], slots[key]

        used[slot], slots[key], self._peers[slot] = ref(body, end), slot, peer
        return self._part(body, 0, nbytes)

    def go_on(self, parts: Sequence[Buffer], nbytes: int) -> Buffer | None:
        """Memory for the next column of a push, beside these parts; None: they are elsewhere."""
        body = parts[0].obj
        if self._slot_of(body) is None:
            return None
        assert isinstance(body, np.ndarray)
        return self._part(body, len(parts), nbytes)

    def _slot_of(self, body: object) -> int | None:
        """The slot whose body this array is. While it exists, no other object has its id."""
        return self._slots.get(id(body))

    def _part(self, body: NDArray[np.uint8], column: int, nbytes: int) -> Buffer | None:
        if column >= len(self._columns):
            return None
        offset, most = self._columns[column]
        return body.data[offset : offset + nbytes] if nbytes <= most else None

    def slot_of(self, part: Buffer, slots: Collection[int]) -> int | None:
        """The slot whose body this is a part of; None: it is none of these slots."""
        slot = self._slot_of(part.obj)
        return slot if slot in slots else None
