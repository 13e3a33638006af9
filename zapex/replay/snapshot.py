"""Snapshots: a replay on disk, chunk by chunk. Their files, and how they are read.

    path/manifest.json      settings, random state, and the place of each chunk
    path/state-<id>.bin     headers and leaves at the time of the save
    path/chunks-<id>.bin    bodies of chunks; each up to SEGMENT_BYTES

saving.py writes them.
"""

import json
import os
import secrets
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.keys import GENERATION_MASK
from zapex.chunks.layout import (
    COMMIT_SEQUENCE,
    COUNT,
    FREE,
    GENERATION,
    HEADER_WORDS,
    HOST,
    LIVE,
    NO_FRAME,
    STATE,
)
from zapex.errors import CheckpointError
from zapex.machine.disk import open_regular, read_regular
from zapex.replay.core import ReplayCore, ReplayLayout

FORMAT = 2
UNORDERED_FORMAT = 1  # columns lay in the order of the user's schema, which was not written down
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 64 << 20  # a line for each of the most slots takes less
# Errors that a damaged or forged file can cause.
UNREADABLE = (
    OSError, KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError,
    RecursionError, MemoryError,
)  # fmt: skip


class StoredChunk(NamedTuple):
    """The place of a chunk on disk. `rows` of its rows are whole."""

    generation: int
    rows: int
    file: str
    position: int
    crc32: int


@dataclass
class Saves:
    """The chunks in `path` since the last save of one replay, or its load. One save at a time."""

    path: Path | None = None
    manifest_crc32: int = 0
    chunks: dict[int, StoredChunk] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def text_of(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts of a snapshot. Raises CheckpointError if it is missing or damaged."""
    file = Path(path) / MANIFEST
    try:
        content = read_regular(file, MOST_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no snapshot in {Path(path)}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return parse_manifest(content, file)


def parse_manifest(content: bytes, name: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts in a manifest's bytes; `name` names it in errors. Raises CheckpointError."""
    try:
        table = json.loads(content)
        facts = table["snapshot"]
        intact = zlib.crc32(text_of(facts)) == table["crc32"]
        known = facts["format"] in (UNORDERED_FORMAT, FORMAT)
        found = dict(facts)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a manifest: {error}") from error
    if not (intact and known):
        raise CheckpointError(f"{name} is damaged, or of another format than {FORMAT}")
    return found


def read_state(
    path: str | os.PathLike[str], facts: dict[str, Any], layout: ReplayLayout
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Headers (slots, HEADER_WORDS) and leaves of a snapshot of a replay of `layout`.

    Their length must agree with `layout`, so no memory is allocated that the files do not need.
    Raises CheckpointError if the file is missing or a checksum is wrong.
    """
    file = Path(path) / Path(facts["state"]["file"]).name
    rows = np.dtype((np.float64, layout.chunk))
    record = np.dtype(
        [("headers", np.int64, (layout.slots, HEADER_WORDS)), ("leaves", rows, layout.slots)]
    )
    with open_regular(file) as stream:
        length = os.fstat(stream.fileno()).st_size
        state = stream.read(length) if length == record.itemsize else b""
    if len(state) != record.itemsize or zlib.crc32(state) != facts["state"]["crc32"]:
        raise CheckpointError(f"{file} is damaged")
    (found,) = np.frombuffer(state, record)
    headers: NDArray[np.int64] = found["headers"]
    if headers.min() < 0 or headers.max() >= 1 << 62:
        raise CheckpointError(f"{file} has a header with a number out of range")
    return headers, found["leaves"].reshape(-1)


def restore(
    replay: ReplayCore,
    path: str | os.PathLike[str],
    facts: dict[str, Any],
    state: tuple[NDArray[np.int64], NDArray[np.float64]],
) -> Saves:
    """Fill a new, empty `replay` with the snapshot in `path`; its chunks have the same layout.

    facts: its manifest. state: from `read_state`, with the layout of the saved replay.

    In a replay of the same size everything is in its place, and draws continue bit for bit. In one
    of another size chunks have other slots, and if it is smaller the oldest are left out. A random
    number is added to every generation, so older keys are stale (except one in 2^28).
    Raises CheckpointError if a file is missing or a checksum is wrong, and the errors in
    `UNREADABLE` for invalid facts.
    """
    folder = Path(path).resolve()
    store, layout = replay.store, replay.store.layout
    headers, leaves = state[0], state[1].reshape(len(state[0]), -1)
    chunks = {int(slot): StoredChunk(*where) for slot, where in facts["chunks"].items()}
    if not all(0 <= slot < len(headers) for slot in chunks):
        raise CheckpointError(f"the snapshot in {folder} names a slot that does not exist")
    drawable = np.zeros(leaves.shape, np.bool_)
    for slot, chunk in chunks.items():
        drawable[slot, : chunk.rows] = True
    if leaves[~drawable].any():
        raise CheckpointError(
            f"the snapshot in {folder} gives priorities to transitions that it lacks"
        )
    saved_size = tuple(facts["replay"][name] for name in ("capacity", "streams"))
    same = saved_size == (replay.layout.capacity, replay.layout.streams)
    places = {slot: slot for slot in chunks} if same else _places(replay.layout, headers, chunks)
    for slot, place in places.items():
        _read_chunk(folder, chunks[slot], store.mem[store.body(place) :][: layout.body_bytes])
        _check_chunk(store.column, place, chunks[slot], layout.chunk, layout.frames, headers[slot])
    old, new = (np.array(list(slots), np.int64) for slots in (places, places.values()))
    rows, taken = store.header_rows, np.zeros((store.slots, layout.chunk))
    taken[new] = leaves[old]
    if same:
        rows[:] = headers
    rows[:, STATE] = FREE
    rows[new] = headers[old]
    rows[:, HOST] = 0  # it plays no more: numbers of hosts begin anew
    jump = secrets.randbelow(GENERATION_MASK - 1)
    rows[:, GENERATION] = (rows[:, GENERATION] + jump) % GENERATION_MASK + 1
    replay.take_over(taken.reshape(-1), facts["replay"])
    if same:
        replay.ledger.free_in_order(facts["free"])
    replay.rng.bit_generator.state = facts["random"]
    there = {
        place: chunks[slot]._replace(generation=int(rows[place, GENERATION]))
        for slot, place in places.items()
    }
    return Saves(folder, zlib.crc32(text_of(facts)), there)


def _places(
    layout: ReplayLayout, headers: NDArray[np.int64], chunks: dict[int, StoredChunk]
) -> dict[int, int]:
    """Slots of a replay of another size for saved chunks, the oldest first; the newest that fit."""
    newest_first = sorted(chunks, key=lambda slot: -int(headers[slot, COMMIT_SEQUENCE]))
    held = np.cumsum([chunks[slot].rows for slot in newest_first])
    fitting = int(np.searchsorted(held, layout.capacity, side="right"))
    kept = newest_first[: min(fitting, layout.live_slots)]
    return {slot: place for place, slot in enumerate(reversed(kept))}


def _read_chunk(folder: Path, chunk: StoredChunk, body: NDArray[np.uint8]) -> None:
    with open_regular(folder / Path(chunk.file).name) as file:
        file.seek(chunk.position)
        got = file.readinto(body.data)
    if got != body.nbytes or zlib.crc32(body.data) != chunk.crc32:
        raise CheckpointError(f"{folder / chunk.file} is damaged at byte {chunk.position}")


def _check_chunk(column: Any, place: int, chunk: StoredChunk, most: int, frames: int,
                 header: NDArray[np.int64]) -> None:  # fmt: skip
    """Check numbers that kernels use without a check. Raises CheckpointError."""
    count = int(header[COUNT])
    if not (1 <= count <= most and count == chunk.rows and header[STATE] == LIVE):
        raise CheckpointError(f"a chunk of the snapshot lacks its {chunk.rows} transitions")
    for name in ("obs_frames", "next_obs_frames"):
        places = column(place, name)[:count]
        if ((places >= frames) & (places != NO_FRAME)).any():
            raise CheckpointError("a chunk of the snapshot names frames that it lacks")
