"""Snapshots: a replay on disk, chunk by chunk. It is whole even if the machine stops in a save.

    path/manifest.json      settings, random state, and the place of each chunk
    path/state-<id>.bin     headers and leaves at the time of the save
    path/chunks-<id>.bin    bodies of chunks; each up to SEGMENT_BYTES

A save copies headers, leaves and random state under the replay's lock. Then it writes the chunks
that are not on disk yet, in the order of eviction. Other threads may add transitions during this: a
full chunk never changes, and a chunk that is evicted before it is written is copied to other memory
(`SlotLedger.on_evict`). A save writes new files first, then renames the manifest, then removes old
files. So if the process is killed at any time, the manifest names files that are whole.
"""

import json
import os
import re
import secrets
import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zapex.chunks.keys import GENERATION_MASK
from zapex.chunks.layout import (
    COMMIT_SEQUENCE,
    COUNT,
    FREE,
    GENERATION,
    HEADER_WORDS,
    LIVE,
    NO_FRAME,
    STATE,
)
from zapex.chunks.schema import Schema
from zapex.errors import CheckpointError
from zapex.machine.disk import open_regular, read_regular, sync_directory, write_whole
from zapex.replay.core import ReplayCore, ReplayLayout

if TYPE_CHECKING:
    from zapex.library.prioritized import PrioritizedReplay

FORMAT = 2
UNORDERED_FORMAT = 1  # columns lay in the order of the user's schema, which was not written down
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 64 << 20  # a line for each of the most slots takes less
# A save removes files with these names, and no others.
_OURS = re.compile(
    r"manifest\.json(\.[0-9a-f]{16})?|state-[0-9a-f]{16}\.bin|chunks-[0-9a-f]{16}-\d+\.bin"
)
_START = b'{"crc32":'  # of a manifest
SEGMENT_BYTES = 64 << 20
# The settings of a replay, besides its schema.
_FRACTIONS = frozenset({"alpha", "eps", "samples_per_insert", "timeout_s"})
_COUNTS = frozenset({"capacity", "streams", "chunk", "min_size_to_sample", "tolerance", "shard"})
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


class _Instant:
    """A replay's state while the lock was held. It keeps copies of chunks evicted since."""

    def __init__(self, replay: ReplayCore) -> None:
        ledger, store = replay.ledger, replay.store
        self.store = store
        self.headers = store.header_rows.copy()
        # Filled by other processes: the header's count may be ahead.
        elsewhere = ledger.announced >= 0
        self.headers[elsewhere, COUNT] = ledger.announced[elsewhere]
        self.leaves = replay.tree.leaves.copy()
        # The oldest first; open chunks are the newest.
        live = ledger.live
        still_open = np.setdiff1d(np.flatnonzero(self.headers[:, STATE] == LIVE), live)
        still_open = still_open[self.headers[still_open, COUNT] > 0]
        still_open = still_open[np.argsort(self.headers[still_open, COMMIT_SEQUENCE])]
        # Their stamps are of their opening: a load would take them for older than closed ones.
        self.headers[still_open, COMMIT_SEQUENCE] = ledger.next_commit + np.arange(len(still_open))
        self.slots: list[int] = live + still_open.tolist()
        self.aside: dict[int, bytes] = {}
        self.pending = set(self.slots)
        self.facts = {
            "replay": replay.facts(),
            "format": FORMAT,
            "free": ledger.free_slots,
            "random": replay.rng.bit_generator.state,
        }

    def keep(self, slot: int) -> None:
        """Copy the bytes of a slot that the ledger evicts, before they change."""
        if slot in self.pending and slot not in self.aside:
            self.aside[slot] = bytes(self._body(slot))

    def _body(self, slot: int) -> NDArray[np.uint8]:
        start = self.store.body(slot)
        return self.store.mem[start : start + self.store.layout.body_bytes]

    def take(self, slot: int, lock: threading.RLock) -> bytes:
        """The bytes of a chunk at the time of the save."""
        with lock:  # an eviction waits for this copy, or has made its own
            self.pending.discard(slot)
            return self.aside.pop(slot, None) or bytes(self._body(slot))


def save(replay: ReplayCore, saves: Saves, path: str | os.PathLike[str]) -> None:
    """Write a snapshot of `replay` into the directory `path`; one save at a time.

    Raises CheckpointError if it cannot be written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with saves.lock:
            _save(replay, saves, folder.resolve())
    except OSError as error:
        raise CheckpointError(f"no snapshot in {folder}: {error}") from error


def _save(replay: ReplayCore, saves: Saves, folder: Path) -> None:
    _demand_own_directory(folder)
    same = saves.path == folder and _manifest_crc32(folder) == saves.manifest_crc32
    known = saves.chunks if same else {}
    with replay.lock:
        instant = _Instant(replay)
        replay.ledger.on_evict = instant.keep
    try:
        name = secrets.token_hex(8)
        chunks = _write_chunks(replay, instant, known, folder, name)
    finally:
        with replay.lock:
            replay.ledger.on_evict = None
    state = f"state-{name}.bin"
    crc32 = write_whole(folder / state, [instant.headers.data, instant.leaves.data])
    facts = {
        **instant.facts,
        "state": {"file": state, "crc32": crc32},
        "chunks": {str(slot): chunk for slot, chunk in chunks.items()},
    }
    text = text_of(facts)
    whole = b'%s%d,"snapshot":%s}\n' % (_START, zlib.crc32(text), text)
    temporary = folder / f"{MANIFEST}.{name}"
    write_whole(temporary, [whole])
    sync_directory(folder)
    os.replace(temporary, folder / MANIFEST)
    sync_directory(folder)
    _forget(folder, {MANIFEST, state, *(c.file for c in chunks.values())})
    saves.path, saves.manifest_crc32, saves.chunks = folder, zlib.crc32(text), chunks


def _demand_own_directory(folder: Path) -> None:
    """Raise CheckpointError if there are files of others: a save removes and replaces files."""
    others = [file.name for file in folder.iterdir() if not _OURS.fullmatch(file.name)]
    with suppress(FileNotFoundError), open_regular(folder / MANIFEST) as file:
        if file.read(len(_START)) != _START:
            others.append(MANIFEST)
    if others:
        raise CheckpointError(
            f"{folder} holds other files ({', '.join(sorted(others)[:3])}): save into a directory "
            "that is new, or holds only a snapshot"
        )


def _write_chunks(
    replay: ReplayCore, instant: _Instant, known: dict[int, StoredChunk], folder: Path, name: str
) -> dict[int, StoredChunk]:
    """Write chunks that are not on disk yet to new files. Returns the places of all chunks."""
    chunks: dict[int, StoredChunk] = {}
    missing = []
    for slot in instant.slots:
        generation, count = instant.headers[slot, [GENERATION, COUNT]].tolist()
        there = known.get(slot)
        if there is not None and (there.generation, there.rows) == (generation, count):
            chunks[slot] = there
            with replay.lock:
                instant.pending.discard(slot)
        else:
            missing.append((slot, generation, count))
    body_bytes = replay.store.layout.body_bytes
    per_file = max(1, SEGMENT_BYTES // body_bytes)
    for number, first in enumerate(range(0, len(missing), per_file)):
        file = f"chunks-{name}-{number}.bin"

        def bodies(part: list[tuple[int, int, int]], file: str = file) -> Iterable[bytes]:
            for position, (slot, generation, count) in enumerate(part):
                body = instant.take(slot, replay.lock)
                chunks[slot] = StoredChunk(
                    generation, count, file, position * body_bytes, zlib.crc32(body)
                )
                yield body

        write_whole(folder / file, bodies(missing[first : first + per_file]))
    return chunks


def _forget(folder: Path, wanted: set[str]) -> None:
    """Remove files of snapshots that no manifest names any more."""
    for file in folder.iterdir():
        if _OURS.fullmatch(file.name) and file.name not in wanted:
            with suppress(OSError):
                file.unlink()


def _manifest_crc32(folder: Path) -> int | None:
    try:
        return zlib.crc32(text_of(read_manifest(folder)))
    except CheckpointError:
        return None


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


def restore(
    replay: ReplayCore,
    path: str | os.PathLike[str],
    facts: dict[str, Any],
    state: tuple[NDArray[np.int64], NDArray[np.float64]],
) -> Saves:
    """Fill a new, empty `replay` of the same layout with the snapshot in `path`.

    facts: its manifest. state: from `read_state`.

    A random number is added to every generation, so older keys are stale (except one in 2^28).
    Raises CheckpointError if a file is missing or a checksum is wrong, and the errors in
    `UNREADABLE` for invalid facts.
    """
    folder = Path(path).resolve()
    store, layout = replay.store, replay.store.layout
    headers, leaves = state
    chunks = {int(slot): StoredChunk(*where) for slot, where in facts["chunks"].items()}
    if not all(0 <= slot < store.slots for slot in chunks):
        raise CheckpointError(f"the snapshot in {folder} names a slot that does not exist")
    drawable = np.zeros((store.slots, layout.chunk), np.bool_)
    for slot, chunk in chunks.items():
        _read_chunk(folder, chunk, store.mem[store.body(slot) :][: layout.body_bytes])
        _check_chunk(store.column, slot, chunk, layout.chunk, layout.frames, headers)
        drawable[slot, : chunk.rows] = True
    if leaves[~drawable.reshape(-1)].any():
        raise CheckpointError(
            f"the snapshot in {folder} gives priorities to transitions that it lacks"
        )
    jump = secrets.randbelow(GENERATION_MASK - 1)
    rows = store.header_rows
    rows[:] = headers
    rows[:, GENERATION] = (rows[:, GENERATION] + jump) % GENERATION_MASK + 1
    gone = np.ones(store.slots, np.bool_)
    gone[list(chunks)] = False
    rows[gone, STATE] = FREE
    replay.take_over(leaves, facts["replay"])
    replay.ledger.free_in_order(facts["free"])
    replay.rng.bit_generator.state = facts["random"]
    there = {
        slot: chunk._replace(generation=int(rows[slot, GENERATION]))
        for slot, chunk in chunks.items()
    }
    return Saves(folder, zlib.crc32(text_of(facts)), there)


def _read_chunk(folder: Path, chunk: StoredChunk, body: NDArray[np.uint8]) -> None:
    with open_regular(folder / Path(chunk.file).name) as file:
        file.seek(chunk.position)
        got = file.readinto(body.data)
    if got != body.nbytes or zlib.crc32(body.data) != chunk.crc32:
        raise CheckpointError(f"{folder / chunk.file} is damaged at byte {chunk.position}")


def _check_chunk(column: Any, slot: int, chunk: StoredChunk, most: int, frames: int,
                 headers: NDArray[np.int64]) -> None:  # fmt: skip
    """Check numbers that kernels use without a check. Raises CheckpointError."""
    count = int(headers[slot, COUNT])
    if not (1 <= count <= most and count == chunk.rows and headers[slot, STATE] == LIVE):
        raise CheckpointError(f"slot {slot} of the snapshot lacks its {chunk.rows} transitions")
    for name in ("obs_frames", "next_obs_frames"):
        places = column(slot, name)[:count]
        if ((places >= frames) & (places != NO_FRAME)).any():
            raise CheckpointError(f"slot {slot} of the snapshot names frames that it lacks")
