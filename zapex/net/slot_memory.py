"""Slots as the memory that pushes are received into, where the transport can do that.

A slot is in use here while a buffer of it exists: a part of a push that is being received, or that
waits to be handled. So a push that is cut, refused or doubled leaves its slot free as soon as its
buffers are gone. No header of a slot changes here; only the commit makes a chunk count.
"""

from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

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
        # Every buffer that `_part` gives keeps the array of its slot's body alive.
        self._used: WeakValueDictionary[int, NDArray[np.uint8]] = WeakValueDictionary()
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
        self._used[slot], self._peers[slot] = body, peer
        return self._part(body, 0, nbytes)

    def go_on(self, parts: Sequence[Buffer], nbytes: int) -> Buffer | None:
        """Memory for the next column of a push, beside these parts; None: they are elsewhere."""
        body = parts[0].obj
        if not isinstance(body, np.ndarray) or not any(body is one for one in self._used.values()):
            return None
        return self._part(body, len(parts), nbytes)

    def _part(self, body: NDArray[np.uint8], column: int, nbytes: int) -> Buffer | None:
        if column >= len(self._columns):
            return None
        offset, most = self._columns[column]
        return body.data[offset : offset + nbytes] if nbytes <= most else None

    def slot_of(self, part: Buffer, slots: Iterable[int]) -> int | None:
        """The slot whose body this is a part of; None: it is none of these slots."""
        body: object = part.obj
        if body is None:  # as `get` says of a slot that nothing is received into
            return None
        return next((slot for slot in slots if self._used.get(slot) is body), None)
